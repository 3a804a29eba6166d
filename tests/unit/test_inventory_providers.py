# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices and claims -> resource providers, by tables."""

import dataclasses
import itertools
import uuid

import ddt
import testtools

from nova_accel.inventory import providers
from nova_accel import model
from nova_accel import naming
from nova_accel.store import values
from tests.unit import inventory_host
from tests.unit.inventory_host import A, B, CLASS, fpga, handle

ROOT = str(uuid.uuid4())
OK, QUARANTINED = model.Health
DELETING = model.ClaimState.DELETING
BOUND = model.ClaimState.BOUND
MEMORY, HBM = map(naming.memory_class, ('DDR', 'HBM'))


def card(handles=2, **more):
    return dataclasses.replace(
        fpga(A, regions=0), handles=tuple(
            handle(f'{A[:-1]}{n + 1}') for n in range(handles)), **more)


TYPES = (model.CreatableType('a', 'CUSTOM_A', 2),)


def claim(number=1, index=None, state=BOUND, created=None, error=''):
    return model.Claim(
        uuid=str(uuid.uuid4()), instance_uuid='i', consumer_uuid='i',
        provider_uuid='p', resource_class=CLASS,
        group='1', device_address=A, region_index=index, state=state,
        handle=handle(f'{A[:-1]}{number}'), created_type=created,
        error=error)


def waiting(handle_, **more):
    return dataclasses.replace(claim(), handle=handle_, **more).that_waits()


def made(*devices, **more):
    return {p.name.removeprefix('host_accel_'): p for p in
            inventory_host.providers_of(
                devices, 'host', ROOT, **more).values()}


@ddt.ddt
class ProvidersTest(testtools.TestCase):

    @ddt.data(
        # device, claims -> inventory of the card, fenced
        (card(), [], {CLASS: 2}, False),
        (card(memory=(('DDR', 8),)), [], {CLASS: 2, MEMORY: 8}, False),
        (card(), [claim()], {CLASS: 2}, False),
        (card(health=QUARANTINED), [], {CLASS: 2}, True),
        (card(health=QUARANTINED), [claim()], {CLASS: 2}, True),
        (card(handles=0), [], {}, False),
        # what is reserved is less; with nothing left it is fenced
        (card(), [claim(state=DELETING)], {CLASS: 1}, False),
        (card(), [claim(n, state=DELETING) for n in (1, 2)], {CLASS: 2}, True),
        # what was made counts beside what could be made
        (card(1, creatable=TYPES), [claim(7, created='a')], {CLASS: 2}, False),
        (card(0, creatable=TYPES), [claim(7, created='a')], {CLASS: 1}, False),
        (card(0, creatable=TYPES), [claim(7, state=DELETING, created='a')],
         {}, True),
        (card(0, creatable=TYPES), [], {}, True),
        (card(1, creatable=TYPES), [claim(1, state=DELETING, created='a')],
         {CLASS: 1}, True),
    )
    @ddt.unpack
    def test_cards(self, device, claims, inventory, fenced):
        provider, = made(device, claims=claims).values()
        self.assertEqual((inventory, fenced),
                         (provider.inventory, provider.fenced))
        self.assertEqual(fenced, naming.FENCED in provider.traits)
        self.assertEqual('host', provider.parent)

    @ddt.data(
        # changes of the region, claim, health of the card
        #   -> inventory, fenced, programmable
        ({}, False, OK, {CLASS: 1}, False, True),
        ({}, True, OK, {CLASS: 1}, False, False),
        ({'programmable': False}, False, OK, {CLASS: 1}, False, False),
        ({'handles': ()}, False, OK, {}, False, True),
        ({'health': QUARANTINED}, False, OK, {CLASS: 1}, True, True),
        # without an inventory, the trait alone keeps servers away
        ({'health': QUARANTINED, 'handles': ()}, False, OK, {}, True, True),
        ({}, False, QUARANTINED, {CLASS: 1}, True, True),
    )
    @ddt.unpack
    def test_regions(self, changes, used, health, inventory, fenced,
                     programmable):
        device = dataclasses.replace(
            fpga(A, regions=2), health=health).with_region(0, **changes)
        found = made(device, claims=[claim(index=0)] if used else ())
        self.assertEqual([A, f'{A}_region0', f'{A}_region1'], list(found))
        region = found[f'{A}_region0']
        self.assertEqual((inventory, fenced, programmable), (
            region.inventory, region.fenced,
            naming.PROGRAMMABLE in region.traits))
        self.assertEqual(fenced, naming.FENCED in region.traits)
        self.assertEqual((found[A].uuid, 0),
                         (region.parent, region.region_index))
        # its sibling does not depend on it, the card has no inventory
        self.assertEqual(health is not OK, found[f'{A}_region1'].fenced)
        self.assertEqual({}, found[A].inventory)

    @ddt.data(
        # claims, whether it is known what the region is going to be
        #   -> whether a function is shown, programmable, being cleaned
        ([], False, False, True, False),
        # what is programmed by others than those who clean is not shown
        ([], True, False, True, False),
        ([BOUND], True, False, False, False),
        ([DELETING], False, False, True, True),
        ([DELETING], True, True, True, True),
        ([DELETING, DELETING], True, True, True, True),
        ([DELETING, BOUND], True, False, False, False),
        # that failed, or hangs
        (['error'], True, False, False, False),
        ([DELETING, 'error'], True, False, False, False),
        # no server would lose what it uses
        ([model.ClaimState.WAITING], True, False, True, False),
    )
    @ddt.unpack
    def test_region_that_is_being_cleaned(self, states, known, function,
                                          programmable, cleaned):
        device = fpga(A, regions=2).with_region(
            0, function_uuid=None, origin=None)
        claims = [
            claim(n, 0, DELETING, error='no') if state == 'error'
            else claim(n, 0, state) for n, state in enumerate(states)]
        before = fpga(A, regions=2).region(0)
        shown = made(device, claims=claims, returning={
            (A, 0): before} if known else {})
        traits = shown[f'{A}_region0'].traits
        self.assertEqual((function, programmable, cleaned), (
            naming.function_trait(before.function_uuid) in traits,
            naming.PROGRAMMABLE in traits, naming.CLEANING in traits))
        self.assertNotIn(naming.CLEANING, shown[f'{A}_region1'].traits)

    def test_place(self):
        """Of the card and of its regions."""
        for provider in made(dataclasses.replace(
                fpga(A, regions=2), numa_node=1,
                bridges=('pci0000:3a',))).values():
            self.assertEqual(('CUSTOM_ACCELERATOR_NUMA_1',
                              'CUSTOM_ACCELERATOR_PCIE_ROOT_0000_3A'),
                             naming.place_of(provider.traits))

    @ddt.data(
        # of two handles: claims, those lost -> inventory, fenced
        ([claim(1)], [], {CLASS: 2}, False),
        ([claim(1)], [1], {CLASS: 1}, False),
        ([claim(1), claim(2)], [2], {CLASS: 1}, False),
        ([claim(1), claim(2, state=DELETING)], [1], {CLASS: 2}, True),
        # the server let go of it meanwhile
        ([], [1], {CLASS: 2}, False),
    )
    @ddt.unpack
    def test_lost(self, claims, numbers, inventory, fenced):
        """Placement would give what servers hold without an allocation."""
        lost = {c.uuid for c in claims
                if c.handle in {claim(n).handle for n in numbers}}
        device = card(2)
        region = dataclasses.replace(
            fpga(B).region(0), handles=device.handles)
        for found, index in (
                (made(device, claims=claims, lost=lost)[A], None),
                (made(dataclasses.replace(
                    device, handles=(), regions=(region,)), claims=[
                        # who gets a region waits while it is cleaned
                        dataclasses.replace(
                            c, region_index=0, error='It failed.')
                        for c in claims],
                    lost=lost)[f'{A}_region0'], 0)):
            self.assertEqual(index, found.region_index)
            self.assertEqual((inventory, fenced),
                             (found.inventory, found.fenced))
            self.assertEqual(fenced, naming.FENCED in found.traits)

    @ddt.data(
        # regions -> those of one
        (1, {CLASS: 1, MEMORY: 8192, HBM: 4096}),
        (2, {CLASS: 1, MEMORY: 4096, HBM: 2048}),
    )
    @ddt.unpack
    def test_memory_of_regions(self, regions, inventory):
        """One group gets a region and memory of the same card."""
        found = made(dataclasses.replace(
            fpga(A, regions=regions), memory=(('DDR', 8192), ('HBM', 4096))))
        self.assertEqual({}, found.pop(A).inventory)
        self.assertEqual([inventory] * regions,
                         [region.inventory for region in found.values()])

    def test_states(self):
        device = card(traits=('CUSTOM_1',),
                      state_traits=('CUSTOM_1', 'CUSTOM_2'))
        self.assertEqual({'CUSTOM_2'}, made(device)[A].retired_traits)

    def test_uuids(self):
        """The same each time; others below another root."""
        def uuids(root):
            return set(inventory_host.providers_of([fpga(A)], 'host', root))
        self.assertEqual(uuids(ROOT), uuids(ROOT))
        self.assertFalse(uuids(ROOT) & uuids(str(uuid.uuid4())))

    def test_name_that_cannot_be(self):
        told = []
        found = inventory_host.providers_of(
            [dataclasses.replace(fpga(A), vendor='A/B'), fpga(B)],
            'host', ROOT,
            report=lambda *args: told.append(args))
        self.assertEqual({B}, {p.addresses[0] for p in found.values()})
        self.assertEqual(A, told[0][0])

    WRONG = ({'bridges': (7,)}, {'traits': ('custom foo',)},
             {'traits': None}, {'state_traits': None}, {'vendor': None})

    @ddt.data(*WRONG, {'memory': (('HBM', '8'),)}, {'memory': (('HBM', 8.5),)},
              {'memory': (('HBM', 0),)}, {'memory': (('hbm', 8),)},
              {'memory': None}, {'regions': (None,)})
    def test_device_that_cannot_be(self, wrong):
        """It costs itself, and no other device."""
        self.check_costs_itself(fpga(A), wrong)

    @ddt.data(*WRONG, {'handles': None})
    def test_member_of_a_pool_that_cannot_be(self, wrong):
        self.check_costs_itself(card(), wrong, 'host_accel_pool')

    def check_costs_itself(self, device, wrong, pool=None):
        told = []
        found = inventory_host.providers_of(
            [dataclasses.replace(device, **wrong),
             dataclasses.replace(device, address=B)], 'host', ROOT,
            report=lambda *args: told.append(args),
            pool_of=lambda device: pool)
        self.assertEqual({(B,)}, {p.addresses for p in found.values()})
        (address, why), = told
        self.assertEqual(A, address)
        self.assertIn(f'the driver {device.driver} reports', why)


def shown(inventory, traits=()):
    return providers.Shown('u', 'n', inventory, frozenset(traits))


@ddt.ddt
class MergedTest(testtools.TestCase):
    """See tests.unit.test_inventory_ledger for what is reserved."""

    def merged(self, provider, inventory, rows=None, used=False,
               configured=()):
        return provider.merged(
            shown(inventory), rows or {},
            lambda uuid: used and uuid == provider.uuid,
            configured=configured)

    def test_what_others_set_stays(self):
        item = {CLASS: {'total': 4, 'reserved': 1, 'allocation_ratio': 2.0}}
        merged = self.merged(made(card(3))[A], item)
        self.assertEqual(
            {'total': 3, 'reserved': 1, 'min_unit': 1, 'max_unit': 3,
             'step_size': 1, 'allocation_ratio': 2.0},
            merged.inventory[CLASS])
        self.assertEqual(1.0, self.merged(
            made(card(3))[A], {}).inventory[CLASS]['allocation_ratio'])

    def test_waiting_in_a_fenced_provider(self):
        """What waits is not taken for the operator's own value."""
        device = card(4, health=QUARANTINED)
        provider = made(device, claims=map(waiting, device.handles))[A]
        merged = self.merged(
            provider, {CLASS: {'total': 4, 'reserved': 4}}, {
                CLASS: values.Reserved(1, 4)})
        self.assertEqual((4, 1, ()), (
            merged.inventory[CLASS]['reserved'],
            merged.rows[CLASS].operators, merged.returned))

    def test_waiting(self):
        """Where all wait, a lower value releases the oldest; memory beside
        them is not reserved. Where one waits, the others are offered."""
        device = dataclasses.replace(card(3), memory=(('DDR', 8),))
        one, two, three = map(waiting, device.handles)
        provider = made(device, claims=[two, one, three])[A]
        self.assertEqual((True, (two, one, three)),
                         (provider.fenced, provider.waiting))
        self.assertNotIn(naming.FENCED, provider.traits)
        there = {CLASS: {'total': 3, 'reserved': 1},
                 MEMORY: {'total': 8, 'reserved': 0}}
        merged = self.merged(provider, there, {CLASS: values.Reserved(0, 3)})
        self.assertEqual(
            ((two, one), 2, 0, 0),
            (merged.returned, merged.inventory[CLASS]['total'],
             merged.inventory[CLASS]['reserved'],
             merged.inventory[MEMORY]['reserved']))
        provider = made(device, claims=[two, three])[A]
        self.assertEqual((False, (), 1), (
            provider.fenced, provider.waiting, provider.inventory[CLASS]))

    def test_waiting_elsewhere(self):
        device = card(2)
        provider = made(device, claims=[
            waiting(device.handles[0]), waiting(handle(B))])[A]
        self.assertEqual(((), {CLASS: 1}, False), (
            provider.waiting, provider.inventory, provider.fenced))

    @ddt.data((True, {'CUSTOM_ACCELERATOR_X': {'total': 2, 'reserved': 2}},
               1), (False, {}, None))
    @ddt.unpack
    def test_class_that_it_has_not_any_more(self, used, inventory,
                                            operators):
        provider = made(card(0))[A]
        merged = self.merged(provider, {'CUSTOM_ACCELERATOR_X': {
            'total': 2, 'reserved': 1}}, used=used)
        self.assertEqual((inventory, operators), (
            merged.inventory, next((row.operators for row
                                    in merged.rows.values()), None)))

    @ddt.data(*itertools.product(
        ('CUSTOM_LICENSES', 'CUSTOM_ACCELERATOR_X'), (False, True),
        (False, True)))
    @ddt.unpack
    def test_class_of_others(self, name, used, fenced):
        """Of Nova's provider.yaml, or set in Placement: left alone."""
        provider = dataclasses.replace(made(card(1))[A], fenced=fenced)
        item = {'total': 5, 'reserved': 1, 'max_unit': 2}
        configured = {name} if 'LICENSES' not in name else ()
        merged = self.merged(provider, {name: item}, used=used,
                             configured=configured)
        self.assertEqual((item, {CLASS, name}, {CLASS}), (
            merged.inventory[name], set(merged.inventory),
            set(merged.rows)))
        if configured:
            self.assertEqual(item, providers.fenced(
                shown({name: item}), {}, configured=configured
                ).inventory[name])

    @ddt.data(
        ({'CUSTOM_OTHERS'}, {'CUSTOM_OTHERS'}),
        ({'CUSTOM_2', naming.FENCED, naming.PROGRAMMABLE}, set()))
    @ddt.unpack
    def test_traits(self, present, left):
        provider = made(card(state_traits=('CUSTOM_2',)))[A]
        self.assertEqual(provider.traits | left,
                         provider.merged_traits(present))
