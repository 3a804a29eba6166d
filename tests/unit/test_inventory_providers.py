# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices and claims -> resource providers, by tables."""

import dataclasses
import uuid

import ddt
import testtools

from nova_accel.inventory import providers
from nova_accel import model
from nova_accel import naming
from tests.unit.inventory_host import A, B, CLASS, fpga, handle

ROOT = str(uuid.uuid4())
OK, QUARANTINED, GONE = model.Health
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
        role=model.Role.CURRENT, provider_uuid='p', resource_class=CLASS,
        group='1', device_address=A, region_index=index, state=state,
        handle=handle(f'{A[:-1]}{number}'), created_type=created,
        error=error)


def made(*devices, claims=(), held_back=(), returning=None):
    return {p.name.removeprefix('host_accel_'): p for p in
            providers.providers(devices, claims, 'host', ROOT,
                                held_back, returning=returning).values()}


@ddt.ddt
class ProvidersTest(testtools.TestCase):

    @ddt.data(
        # device, claims -> inventory of the card, fenced
        (card(), [], {CLASS: 2}, False),
        (card(memory=(('DDR', 8),)), [], {CLASS: 2, MEMORY: 8}, False),
        (card(), [claim()], {CLASS: 2}, False),
        (card(health=QUARANTINED), [], {CLASS: 2}, True),
        (card(health=GONE), [claim()], {CLASS: 2}, True),
        (card(handles=0), [], {}, False),
        # what is held up is less; with nothing left it is fenced
        (card(), [claim(state=DELETING)], {CLASS: 1}, False),
        (card(), [claim(n, state=DELETING) for n in (1, 2)], {CLASS: 2}, True),
        # what was made counts beside what could be made
        (card(1, creatable=TYPES), [claim(7, created='a')], {CLASS: 2}, False),
        (card(0, creatable=TYPES), [claim(7, created='a')], {CLASS: 1}, False),
        (card(0, creatable=TYPES), [claim(7, DELETING, created='a')],
         {CLASS: 1}, False),
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
        # of two handles: claims, those held back -> inventory, fenced
        ([claim(1)], [], {CLASS: 2}, False),
        ([claim(1)], [1], {CLASS: 1}, False),
        ([claim(1), claim(2)], [2], {CLASS: 1}, False),
        ([claim(1), claim(2, state=DELETING)], [1], {CLASS: 2}, True),
        # the server let go of it meanwhile
        ([], [1], {CLASS: 2}, False),
    )
    @ddt.unpack
    def test_held_back(self, claims, numbers, inventory, fenced):
        """Placement would give what servers hold without an allocation."""
        held_back = {claim(number).handle for number in numbers}
        device = card(2)
        region = dataclasses.replace(
            fpga(B).region(0), handles=device.handles)
        for found, index in (
                (made(device, claims=claims, held_back=held_back)[A], None),
                (made(dataclasses.replace(
                    device, handles=(), regions=(region,)), claims=[
                        # who gets a region waits while it is cleaned
                        dataclasses.replace(
                            c, region_index=0, error='It failed.')
                        for c in claims],
                    held_back=held_back)[f'{A}_region0'], 0)):
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
            return set(providers.providers([fpga(A)], (), 'host', root))
        self.assertEqual(uuids(ROOT), uuids(ROOT))
        self.assertFalse(uuids(ROOT) & uuids(str(uuid.uuid4())))

    def test_name_that_cannot_be(self):
        told = []
        found = providers.providers(
            [dataclasses.replace(
                fpga(A), vendor='A/B'), fpga(B)], (), 'host', ROOT,
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
        found = providers.providers(
            [dataclasses.replace(device, **wrong),
             dataclasses.replace(device, address=B)], [], 'host', ROOT,
            report=lambda *args: told.append(args),
            pool_of=lambda device: pool)
        self.assertEqual({(B,)}, {p.addresses for p in found.values()})
        (address, why), = told
        self.assertEqual(A, address)
        self.assertIn(f'the driver {device.driver} reports', why)


@ddt.ddt
class MergedTest(testtools.TestCase):

    @ddt.data(
        # fenced, reserved there (of 4), kept, marked
        #   -> reserved, to keep, done
        (False, 0, None, False, 0, None, False),
        (False, 3, None, False, 3, None, False),
        (False, 4, None, False, 4, None, False),
        (True, 0, None, False, 4, 0, False),
        (True, 3, None, False, 4, 3, False),
        (True, 4, None, False, 4, 4, False),
        (True, 4, 0, True, 4, None, False),
        (True, 4, 0, False, 4, None, False),
        (True, 0, 0, False, 4, None, False),
        (True, 2, 0, True, 4, 2, False),
        (False, 4, 0, True, 0, None, False),
        (False, 4, 3, False, 3, None, False),
        (False, 3, 3, False, 3, None, True),
        (False, 4, 4, False, 4, None, True),
        (False, 2, 0, False, 2, None, True),
        (False, 3, 3, True, 3, None, False),
        # of release 0.1
        (True, 4, None, True, 4, 0, False),
        (False, 4, None, True, 0, None, False),
        # a class that is not there now, and comes back
        (False, None, 3, False, 3, None, False),
    )
    @ddt.unpack
    def test_reserved(self, fenced, there, kept, marked, reserved, keep,
                      done):
        provider = dataclasses.replace(made(card(4))[A], fenced=fenced)
        item = {} if there is None else {
            CLASS: {'total': 4, 'reserved': there, 'allocation_ratio': 2.0}}
        merged = provider.merged_inventory(
            item, {} if kept is None else {CLASS: kept}, marked,
            in_use=lambda uuid: False)
        self.assertEqual(
            (reserved, {} if keep is None else {CLASS: keep},
             {CLASS} if done else set()),
            (merged.inventory[CLASS]['reserved'], merged.keep, merged.done))
        self.assertEqual(1.0 if there is None else 2.0,
                         merged.inventory[CLASS]['allocation_ratio'])

    @ddt.data(
        # of 4, one waits for each letter, S is shown: reserved there, kept,
        # marked -> reserved, to keep, given back, all shown
        ('W', 0, None, False, 1, 0, 0, False),
        ('W', 1, None, False, 2, 1, 0, False),
        # Placement has not heard of it yet
        ('W', 0, 0, False, 1, None, 0, False),
        ('W', 1, 0, False, 1, None, 0, True),
        ('S', 1, 0, False, 1, None, 0, True),
        # the operator lowers it
        ('S', 0, 0, False, 0, None, 1, False),
        ('SS', 1, 0, False, 1, None, 1, False),
        ('SS', 0, 0, False, 0, None, 2, False),
        ('SW', 0, 0, False, 1, None, 1, False),
        ('SW', 1, 0, False, 2, None, 0, False),
        # with what he had reserved, and below that
        ('S', 3, 2, False, 3, None, 0, True),
        ('S', 2, 2, False, 2, None, 1, False),
        ('S', 0, 2, False, 0, 0, 1, False),
        # he raises it
        ('S', 3, 0, False, 3, 2, 0, True),
        # never more than there is
        ('SSSS', 4, 2, False, 4, None, 0, True),
        ('SSSS', 3, 2, False, 4, None, 1, False),
        # our fence ends
        ('S', 4, 0, True, 1, None, 0, False),
        ('S', 4, 1, True, 2, None, 0, False),
        # the inventory was deleted
        ('S', None, 0, False, 1, None, 0, False),
        ('SS', None, 1, False, 3, None, 0, False))
    @ddt.unpack
    def test_waiting(self, waiting, there, kept, marked, reserved, keep,
                     returned, shown):
        device = card(4)
        provider, = providers.providers(
            [device], (), 'host', ROOT, waiting=[
                model.Waiting(h, A, None, letter == 'S') for h, letter
                in zip(device.handles, waiting)]).values()
        self.assertEqual(({CLASS: 4}, False, len(waiting)), (
            provider.inventory, provider.fenced, len(provider.waiting)))
        merged = provider.merged_inventory(
            {} if there is None else {
                CLASS: {'total': 4, 'reserved': there}},
            {} if kept is None else {CLASS: kept}, marked,
            in_use=lambda uuid: False)
        self.assertEqual(
            (reserved, {} if keep is None else {CLASS: keep}, returned,
             shown),
            (merged.inventory[CLASS]['reserved'], merged.keep,
             merged.returned, merged.shown))

    @ddt.data((1, 0, None), (4, 1, None), (3, 2, None), (2, 0, 2))
    @ddt.unpack
    def test_waiting_in_a_fenced_provider(self, there, kept, keep):
        """What waits is not taken for the operator's own value."""
        device = card(4, health=QUARANTINED)
        provider, = providers.providers(
            [device], (), 'host', ROOT, waiting=[model.Waiting(
                device.handles[0], A, None, True)]).values()
        merged = provider.merged_inventory(
            {CLASS: {'total': 4, 'reserved': there}}, {CLASS: kept}, False,
            in_use=lambda uuid: False)
        self.assertEqual((4, {} if keep is None else {CLASS: keep}), (
            merged.inventory[CLASS]['reserved'], merged.keep))

    def test_waiting_elsewhere(self):
        device = card(2)
        found = providers.providers(
            [device], [claim(1, state=DELETING)], 'host', ROOT, waiting=[
                model.Waiting(device.handles[0], A, None),
                model.Waiting(device.handles[1], B, None),
                model.Waiting(device.handles[1], A, 0),
                model.Waiting(handle(B), A, None)])
        provider, = found.values()
        self.assertEqual(((), {CLASS: 1}),
                         (provider.waiting, provider.inventory))

    @ddt.data((True, {'CUSTOM_X': {'total': 2, 'reserved': 2}},
               {'CUSTOM_X': 1}, set()),
              (False, {}, {}, set()))
    @ddt.unpack
    def test_class_that_it_has_not_any_more(self, used, inventory, keep,
                                            done):
        provider = made(card(0))[A]
        merged = provider.merged_inventory(
            {'CUSTOM_X': {'total': 2, 'reserved': 1}}, {}, False,
            in_use=lambda uuid: used and uuid == provider.uuid)
        self.assertEqual((inventory, keep, done),
                         (merged.inventory, merged.keep, merged.done))

    def test_less_than_what_the_operator_reserved(self):
        merged = made(card(1))[A].merged_inventory(
            {CLASS: {'total': 4, 'reserved': 3}}, {}, False,
            in_use=lambda uuid: False)
        self.assertEqual((1, 1), (merged.inventory[CLASS]['total'],
                                  merged.inventory[CLASS]['reserved']))

    @ddt.data(
        ({'CUSTOM_OTHERS'}, {'CUSTOM_OTHERS'}),
        ({'CUSTOM_2', naming.FENCED, naming.PROGRAMMABLE}, set()))
    @ddt.unpack
    def test_traits(self, present, left):
        provider = made(card(state_traits=('CUSTOM_2',)))[A]
        self.assertEqual(provider.traits | left,
                         provider.merged_traits(present))
