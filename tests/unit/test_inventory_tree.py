# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices, claims and Nova's tree -> what Placement shows."""

import copy
import dataclasses
import itertools
import threading
import time
import uuid

import ddt
import fixtures
from nova.compute import provider_tree

from nova_accel import exception
from nova_accel.inventory import tree as inventory_tree
from nova_accel import model
from nova_accel import naming
from tests.unit.inventory_host import (
    A, B, CLASS, Driver, fpga, GONE, handle, InventoryTestBase, loaded,
    NODE, unavailable)

CARD = f'{NODE}_accel_{A}'
REGION = f'{CARD}_region0'
OTHER = f'{NODE}_accel_{B}_region0'


class TreeTest(InventoryTestBase):

    def test_providers_below_the_node(self):
        data = self.update()
        self.assertEqual({NODE, CARD, REGION, f'{NODE}_accel_{B}', OTHER},
                         set(data))
        self.assertEqual((1, 0), (data[REGION].inventory[CLASS]['total'],
                                  data[REGION].inventory[CLASS]['reserved']))
        self.assertIn(naming.PROGRAMMABLE, data[REGION].traits)
        self.assertEqual((NODE, self.root), self.inventory.shown.root)
        self.assertEqual(4, len(self.inventory.shown.providers()))

    def test_nothing_before_nova_asked(self):
        self.inventory.scanner.scan()
        self.assertEqual(({}, None), (self.inventory.shown.providers(),
                                      self.inventory.shown.root))
        self.assertEqual([], self.inventory.shown.allocated({self.root: {
            'resources': {CLASS: 1}}}))
        self.assertEqual(4, len(self.inventory.shown.providers_of(
            NODE, self.root)))

    def test_pass_without_a_change_writes_nothing(self):
        self.update()
        self.update()
        for name in ('update_inventory', 'update_traits', 'new_child',
                     'remove'):
            setattr(self.tree, name, None)
        self.store.error = 'set_devices', AssertionError()
        self.update()

    def test_traits_that_come_and_go(self):
        """Those of a state that is over go, those that others set stay."""
        card = dataclasses.replace(
            fpga(A, regions=0), handles=(handle(A),),
            traits=('CUSTOM_LOCKED',),
            state_traits=('CUSTOM_LOCKED', 'CUSTOM_LOST'))
        self.driver.devices = (card,)
        self.tree.add_traits(self.update()[CARD].uuid, 'CUSTOM_OF_OTHERS')
        self.driver.devices = (dataclasses.replace(
            card, traits=('CUSTOM_LOST',)),)
        traits = self.update()[CARD].traits
        self.assertLessEqual({'CUSTOM_LOST', 'CUSTOM_OF_OTHERS'}, traits)
        self.assertNotIn('CUSTOM_LOCKED', traits)

    def test_another_card_in_the_slot(self):
        """It shows nothing of the card that was there when nova-compute was
        stopped, nor does one with another shell."""
        old = fpga(A)
        self.driver.devices = (old,)
        self.tree.add_traits(self.update()[REGION].uuid, 'CUSTOM_OF_OTHERS')
        other_shell = old.with_region(0, region_type_uuid='d' * 32)
        for now in (other_shell, dataclasses.replace(
                other_shell, vendor_id='9999', vendor='OTHER', product='Z9'),
                old):
            sick = dataclasses.replace(
                now, vendor='UNKNOWN', product='UNKNOWN',
                health=model.Health.QUARANTINED, reason='it is silent')
            self.driver.devices = (now,)
            self.inventory = self.make()
            data = self.update()
            shown = naming.identity_traits(now)
            types = {trait for trait in shown if '_REGION_' in trait}
            self.assertEqual(2, len(types))
            for name, expected in ((CARD, shown - types), (REGION, shown)):
                self.assertEqual(expected, {
                    trait for trait in data[name].traits
                    if not naming.is_volatile(trait)} - {'CUSTOM_OF_OTHERS'})
            self.assertIn('CUSTOM_OF_OTHERS', data[REGION].traits)
            # what it is stays while that cannot be read
            before = data[REGION].traits
            self.driver.devices = (sick,)
            self.assertLessEqual(
                {t for t in before if t.startswith('CUSTOM_FPGA_')
                 and not naming.is_volatile(t)}, self.update()[REGION].traits)

    def test_handle_that_cannot_be_released(self):
        """Placement is not told of what would be refused."""
        self.driver.devices = (dataclasses.replace(
            fpga(A, regions=0),
            handles=(handle(f'{A[:-1]}1'), handle(f'{A[:-1]}2')),
            creatable=(model.CreatableType('a', 'CUSTOM_A', 2),)),)
        total = (lambda: self.update()[CARD].inventory[CLASS]['total'])
        self.assertEqual(2, total())
        claim = self.claim(A)
        self.assertEqual(2, total())
        self.store.update([claim], state=model.ClaimState.DELETING,
                          created_type='a', region_index=None)
        self.assertEqual(1, total())

    def test_operators_reservation_stays(self):
        self.update()
        changed = self.tree.data(REGION).inventory
        changed[CLASS].update(reserved=1, allocation_ratio=2.0)
        self.tree.update_inventory(REGION, changed)
        item = self.update()[REGION].inventory[CLASS]
        self.assertEqual((1, 2.0), (item['reserved'],
                                    item['allocation_ratio']))

    def test_drift_is_repaired(self):
        self.update()
        self.update()
        self.tree.update_traits(REGION, {'CUSTOM_OF_OTHERS',
                                         'CUSTOM_ACCELERATOR_FENCED'})
        changed = self.tree.data(REGION).inventory
        changed[CLASS].update(total=7)
        self.tree.update_inventory(REGION, changed)
        data = self.update()[REGION]
        self.assertEqual(1, data.inventory[CLASS]['total'])
        self.assertLessEqual({'CUSTOM_OF_OTHERS', 'CUSTOM_PROGRAMMABLE'},
                             data.traits)
        self.assertNotIn(naming.FENCED, data.traits)

    def test_gone_and_held(self):
        self.update()
        self.claim(A)
        self.driver.devices = ()
        for _ in range(3):
            self.assertTrue(self.fenced(self.update()[REGION]))
        self.assertEqual(GONE, self.health(A))

    def test_gone_and_allocated_by_somebody_not_here_yet(self):
        self.update()
        self.consumers.add(REGION)
        self.driver.devices = ()
        for _ in range(3):
            self.assertTrue(self.fenced(self.update()[REGION]))
        self.consumers.clear()
        self.assertNotIn(CARD, self.update())
        self.assertEqual({}, {
            a: d for a, d in self.store.devices().items() if a == A})

    def test_gone_and_free_is_fenced_before_it_is_removed(self):
        self.update()
        self.driver.devices = ()
        self.assertTrue(self.fenced(self.update()[REGION]))
        self.assertNotIn(CARD, self.update())
        self.update()
        self.assertEqual({}, self.store.reserved())

    def test_regions_that_come_and_go(self):
        self.driver.devices = (fpga(A, regions=3),)
        self.assertIn(f'{CARD}_region2', self.update())
        self.driver.devices = (fpga(A, regions=1),)
        self.consumers.add(f'{CARD}_region1')
        self.update()
        data = self.update()
        self.assertNotIn(f'{CARD}_region2', data)
        self.assertTrue(self.fenced(data[f'{CARD}_region1']))

    def test_handles_that_go_while_allocated(self):
        """And come back: the reservation was that of nova_accel."""
        self.update()
        before = self.driver.devices
        self.driver.devices = (before[0].with_region(0, handles=()),)
        self.consumers.add(REGION)
        for _ in range(2):
            self.assertEqual(
                1, self.update()[REGION].inventory[CLASS]['reserved'])
        self.driver.devices, without = before, self.driver.devices
        self.assertEqual(
            0, self.update()[REGION].inventory[CLASS]['reserved'])
        self.consumers.clear()
        self.driver.devices = without
        self.assertEqual({}, self.update()[REGION].inventory)

    def test_providers_of_an_earlier_life(self):
        self.update()
        self.store = self.open_store()
        self.inventory = self.make(good=Driver())
        for _ in range(2):
            self.update()
        self.assertEqual([self.root], self.tree.get_provider_uuids(NODE))

    def test_other_providers_are_left_alone(self):
        self.tree.new_child('host_pci_0000_84_00_0', NODE)
        self.tree.new_child('host_0000:81:00.0', NODE)
        self.tree.update_traits('host_0000:81:00.0', {'CUSTOM_PROGRAMMABLE'})
        self.update()
        data = self.update()
        self.assertEqual({'CUSTOM_PROGRAMMABLE'},
                         data['host_0000:81:00.0'].traits)
        self.assertIn('host_pci_0000_84_00_0', data)

    def test_name_that_placement_refuses(self):
        self.driver.devices = (dataclasses.replace(fpga(A), product='X/1'),)
        logged = self.useFixture(fixtures.FakeLogger())
        for _ in range(3):
            data = self.update()
        self.assertNotIn(CARD, data)
        self.assertIn(OTHER, data)
        self.assertEqual(1, logged.output.count('X/1'))

    def test_tree_of_another_release(self):
        """Only what is documented of it."""
        class Tree:
            def __init__(self, tree):
                for name in ('get_provider_uuids', 'data', 'exists', 'remove',
                             'new_child', 'update_inventory',
                             'update_traits'):
                    setattr(self, name, getattr(tree, name))
        self.inventory.scanner.scan()
        self.inventory.shown.update_tree(
            Tree(self.tree), NODE, inventory_tree.Placement(self.in_use))
        self.assertEqual(self.update().keys(), {
            NODE, CARD, REGION, f'{NODE}_accel_{B}', OTHER})

    def test_allocated(self):
        self.update()
        self.tree.add_traits(REGION, 'CUSTOM_OF_OTHERS')
        self.claim(A)
        uuid_ = self.update()[REGION].uuid
        allocations = {
            self.root: {'resources': {'VCPU': 1}},
            uuid_: {'resources': {CLASS: 1, naming.memory_class('DDR'): 1}}}
        found, = self.inventory.shown.allocated(allocations)
        self.assertEqual((uuid_, {CLASS: 1}, {naming.memory_class('DDR'): 1}),
                         (found.provider_uuid, found.resources, found.memory))
        self.assertIn('CUSTOM_OF_OTHERS', found.traits)
        self.assertNotIn(naming.PROGRAMMABLE, found.traits)
        found, = self.inventory.shown.allocated(allocations, unused=[(A, 0)])
        self.assertIn(naming.PROGRAMMABLE, found.traits)
        self.assertEqual([], self.inventory.shown.allocated(None))

    def test_providers_follow_what_changes(self):
        """They are made once for each state of devices and claims."""
        self.update()

        def traits():
            return self.inventory.shown.providers()[
                self.tree.data(REGION).uuid].traits
        self.assertIn(naming.PROGRAMMABLE, traits())
        claim = self.claim(A)
        self.assertNotIn(naming.PROGRAMMABLE, traits())
        self.store.remove([claim])
        self.assertIn(naming.PROGRAMMABLE, traits())
        self.inventory.contents.set_loaded(A, 0, loaded('b' * 32))
        self.assertIn('CUSTOM_FPGA_FUNCTION_NAME_NEW', traits())


class StoreTest(InventoryTestBase):
    """Errors of the store leave the tree as it is."""

    @staticmethod
    def dump(tree):
        return {u: tree.data(u) for u in tree.get_provider_uuids()}

    def check(self, method):
        self.update()
        self.inventory.scanner.scan()
        self.driver.devices = ()
        self.inventory.scanner.scan()
        before = self.dump(self.tree)
        self.store.error = unavailable(method)
        logged = self.useFixture(fixtures.FakeLogger())
        for _ in range(3):
            self.update(scan=False)
        self.assertEqual(before, self.dump(self.tree))
        self.assertEqual(1, logged.output.count('disk full'))
        self.store.error = None
        self.assertTrue(self.fenced(self.update()[REGION]))

    def test_reserved(self):
        self.check('set_reserved')

    def test_everything(self):
        self.check(None)

    def test_our_own_defect(self):
        self.update()
        before = self.dump(self.tree)
        self.inventory.shown._tree.update = None
        self.driver.devices = ()
        self.update()
        self.assertEqual(before, self.dump(self.tree))


class ForeignTest(InventoryTestBase):
    """A provider of another program under one of our names."""

    def setUp(self):
        super().setUp()
        self.uuid = str(uuid.uuid4())

    def make_foreign(self, name=CARD):
        self.tree.new_child(name, NODE, uuid=self.uuid)
        self.tree.update_inventory(self.uuid, {'CUSTOM_X': {
            'total': 3, 'reserved': 1}})
        self.tree.update_traits(self.uuid, {'CUSTOM_Y'})

    def assertIsFenced(self):
        data = self.tree.data(self.uuid)
        self.assertEqual(3, data.inventory['CUSTOM_X']['reserved'])
        self.assertEqual({'CUSTOM_Y', naming.FENCED}, data.traits)

    def test_allocated(self):
        self.make_foreign()
        self.consumers.add(CARD)
        logged = self.useFixture(fixtures.FakeLogger())
        for _ in range(3):
            data = self.update()
            self.assertIsFenced()
            # the provider of nova_accel is not created meanwhile
            self.assertNotIn(REGION, data)
            self.assertIn(OTHER, data)
        self.assertEqual(1, logged.output.count('by another program'))
        self.assertIn(self.uuid, logged.output)
        self.consumers.clear()
        self.update()
        data = self.update()
        self.assertNotIn(self.uuid, {d.uuid for d in data.values()})
        self.assertIn(REGION, data)

    def test_child_that_is_allocated(self):
        self.make_foreign()
        self.tree.new_child('of_others', self.uuid)
        self.consumers.add('of_others')
        for _ in range(3):
            self.update()
            self.assertIsFenced()

    def test_region(self):
        self.make_foreign(REGION)
        self.consumers.add(REGION)
        for _ in range(2):
            data = self.update()
            self.assertIsFenced()
            self.assertIn(naming.device_traits(fpga(A)).pop(),
                          data[CARD].traits)

    def update_beside(self, others, asked):
        """A pass while Placement has providers outside of Nova's tree.

        :param others: name -> uuid.
        :param asked: receives the names that Placement is asked for.
        """
        def named(name):
            asked.append(name)
            return {others[name]} if name in others else set()
        self.inventory.scanner.scan()
        self.inventory.shown.update_tree(
            self.tree, NODE, inventory_tree.Placement(self.in_use, named))
        return {self.name(u) for u in self.tree.get_provider_uuids(NODE)}

    def test_outside_of_the_tree(self):
        logged = self.useFixture(fixtures.FakeLogger())
        others, asked = {CARD: self.uuid}, []
        for _ in range(3):
            self.assertEqual({NODE, f'{NODE}_accel_{B}', OTHER},
                             self.update_beside(others, asked))
        self.assertEqual(1, logged.output.count(self.uuid))
        # once for what is there, each time for what is not
        self.assertEqual(sorted([CARD, f'{NODE}_accel_{B}', OTHER, CARD,
                                 CARD]), sorted(asked))
        others.clear()
        self.assertIn(REGION, self.update_beside(others, asked))
        asked.clear()
        self.update_beside(others, asked)
        self.assertEqual([], asked)

    def test_outside_of_the_tree_is_a_region(self):
        there = self.update_beside({REGION: self.uuid}, [])
        self.assertIn(CARD, there)
        self.assertNotIn(REGION, there)

    def test_ours_that_nova_has_not_read(self):
        there = self.update_beside(
            {CARD: naming.provider_uuid(self.root, NODE, CARD)}, [])
        self.assertIn(CARD, there)

    def test_names_are_not_known(self):
        asked = []

        def named(name):
            asked.append(name)
            raise exception.PlacementUnavailable('Placement answered 500.')
        self.inventory.scanner.scan()
        self.inventory.shown.update_tree(
            self.tree, NODE, inventory_tree.Placement(self.in_use, named))
        self.assertEqual(4, len(self.tree.get_provider_uuids(NODE)) - 1)
        self.assertEqual(1, len(asked))

    def test_comes_later(self):
        self.update()
        self.make_foreign(f'{NODE}_accel_0000:07:00.0')
        self.consumers.add(f'{NODE}_accel_0000:07:00.0')
        self.update()
        self.assertIsFenced()


class Killed(BaseException):
    pass


class Placement:
    """What Nova writes of a tree, request by request."""

    def __init__(self, root):
        self.tree = provider_tree.ProviderTree()
        self.tree.new_root(NODE, root)

    def write(self, new, step):
        """:param step: called before each request; may raise."""
        for uuid_ in new.get_provider_uuids():
            data = new.data(uuid_)
            if not self.tree.exists(uuid_):
                step()
                self.tree.new_child(data.name, data.parent_uuid, uuid=uuid_)
            if data.inventory != self.tree.data(uuid_).inventory:
                step()
                self.tree.update_inventory(uuid_, data.inventory)
            if data.traits != self.tree.data(uuid_).traits:
                step()
                self.tree.update_traits(uuid_, data.traits)


class ConfiguredClassTest(InventoryTestBase):
    """Nova's provider.yaml adds a class to a provider of a region, by a name
    as nova_accel gives: nothing changes it, and Nova adds it to its tree."""

    EXTRA = 'CUSTOM_ACCELERATOR_LICENSE'
    ITEM = {'total': 5, 'reserved': 1, 'min_unit': 1, 'max_unit': 5,
            'step_size': 1, 'allocation_ratio': 1.0}

    def setUp(self):
        super().setUp()
        self.update()
        inventory = self.tree.data(REGION).inventory
        inventory[self.EXTRA] = dict(self.ITEM)
        self.tree.update_inventory(REGION, inventory)
        #: what Placement has
        self.there = copy.deepcopy(self.tree)

    def write(self, uuid_, change, refused):
        data = self.there.data(uuid_)
        inventory, traits = change(data.inventory, data.traits)
        if inventory is not None:
            self.there.update_inventory(uuid_, inventory)
        self.there.update_traits(uuid_, traits)

    def report(self):
        self.inventory.scanner.scan()
        self.inventory.shown.update_tree(
            self.tree, NODE, inventory_tree.Placement(
                self.in_use, write=self.write,
                configured={REGION: {self.EXTRA}}))
        self.assertEqual([CLASS], [*self.tree.data(REGION).inventory])
        self.assertEqual(
            self.ITEM, self.there.data(REGION).inventory[self.EXTRA])

    def test_nothing_changed(self):
        self.report()

    def test_device_changed(self):
        self.driver.devices = (fpga(A).with_region(
            0, function_uuid='e' * 32),)
        before = self.there.data(REGION).traits
        self.report()
        self.assertNotEqual(before, self.there.data(REGION).traits)

    def test_inventory_changed(self):
        inventory = self.there.data(REGION).inventory
        inventory[CLASS]['total'] = 7
        for tree in self.there, self.tree:
            tree.update_inventory(REGION, inventory)
        self.report()
        self.assertEqual(1, self.there.data(REGION).inventory[CLASS]['total'])

    def test_device_is_gone(self):
        self.consumers.add(REGION)
        self.driver.devices = ()
        self.report()
        self.assertTrue(self.fenced(self.there.data(REGION)))

    def test_provider_of_an_earlier_life(self):
        self.consumers.add(REGION)
        self.store = self.open_store()
        self.inventory = self.make(good=Driver())
        self.report()
        self.assertTrue(self.fenced(self.there.data(REGION)))


class Configured(dict):
    """The same classes for each provider; notes whose were read."""

    def __init__(self, read, classes):
        super().__init__({'any': classes})
        self._read = read

    def get(self, key, _=None):
        self._read.append(key)
        return set(self['any'])


class SettledTest(InventoryTestBase):
    """A pass for which there is nothing to do reads no provider."""

    def setUp(self):
        super().setUp()
        self.writes = []
        self.edition = object()
        self.update()
        for _ in range(2):
            self.report()
        self.assertEqual(0, self.report())

    def report(self, same=True, configured=frozenset(), write=True,
               named=frozenset()):
        """How many providers are read.

        :param same: whether nothing below the node has changed.
        """
        if not same:
            self.edition = object()
        read = []
        self.inventory.shown.update_tree(
            self.tree, NODE, inventory_tree.Placement(
                self.in_use, lambda name: {*named},
                Configured(read, configured),
                write=self.write if write else None), edition=self.edition)
        # each by its UUID and by its name
        return len(read) // 2

    def write(self, uuid_, change, refused):
        data = self.tree.data(uuid_)
        self.writes.append((data.name, change(data.inventory, data.traits)))

    def test_placement_has_changed(self):
        self.tree.add_traits(REGION, 'CUSTOM_OF_OTHERS')
        self.assertEqual(6, self.report(same=False))
        self.assertEqual(0, self.report())

    def test_edition_is_not_known(self):
        self.edition = None
        self.assertEqual([5, 5], [self.report(), self.report()])

    def test_device_has_changed(self):
        self.claim(A)
        self.assertLess(5, self.report())
        self.assertEqual([REGION], [name for name, _ in self.writes])
        self.assertLess(5, self.report(same=False))
        self.assertEqual(0, self.report())

    def test_device_is_gone(self):
        """Each pass asks whether anything of it is allocated."""
        self.consumers.add(REGION)
        self.driver.devices = (fpga(B),)
        self.inventory.scanner.scan()
        for _ in range(3):
            self.assertLess(4, self.report())
        self.consumers.clear()
        for _ in range(2):
            self.report(same=False)
        self.assertFalse(self.tree.exists(CARD))
        self.report(same=False)
        self.assertEqual(0, self.report())

    def test_provider_without_a_device(self):
        self.tree.new_child(f'{NODE}_accel_0000:07:00.0', NODE)
        self.consumers.add(f'{NODE}_accel_0000:07:00.0')
        self.report(same=False)
        self.assertLess(5, self.report())

    def test_name_was_taken(self):
        """A provider that was deleted is made once its name is free."""
        self.tree.remove(REGION)
        self.report(same=False, named=['of another program'])
        self.assertFalse(self.tree.exists(REGION))
        self.report()
        self.assertTrue(self.tree.exists(REGION))

    def test_class_of_provider_yaml(self):
        """Each pass takes it out of Nova's tree."""
        for _ in range(2):
            inventory = self.tree.data(REGION).inventory
            inventory['CUSTOM_LICENSE'] = {'total': 1, 'reserved': 0}
            self.tree.update_inventory(REGION, inventory)
            self.assertLess(4, self.report(
                same=False, configured={'CUSTOM_LICENSE'}))
            self.assertEqual([CLASS], [*self.tree.data(REGION).inventory])

    def test_written_beside_the_report(self):
        provider = self.tree.data(REGION).uuid
        self.inventory.shown.publish(
            provider, inventory_tree.Placement(self.in_use, write=self.write))
        self.assertLess(4, self.report())

    def test_together_with_allocations(self):
        self.assertEqual(5, self.report(write=False))


@ddt.ddt
class ReservedTest(InventoryTestBase):
    """A fence and its mark go together, wherever we are killed."""

    def setUp(self):
        super().setUp()
        self.driver.devices = (dataclasses.replace(
            fpga(A, regions=0),
            handles=tuple(handle(f'{A[:-1]}{n}') for n in range(1, 5))),)
        self.placement = Placement(self.root)
        self.steps = itertools.count(-1000)
        self.inventory.scanner.scan()
        for _ in range(2):
            self.report()

    def step(self):
        if next(self.steps) == 0:
            raise Killed

    def report(self):
        """A pass of Nova, with one step for each write."""
        tree = copy.deepcopy(self.placement.tree)
        self.inventory.shown.update_tree(
            tree, NODE, inventory_tree.Placement(lambda uuid: False))
        self.placement.write(tree, self.step)

    def publish(self):
        uuid_ = self.data().uuid
        data = self.data()

        def write(uuid, change, refused):
            inventory, traits = change(data.inventory, data.traits)
            if inventory is not None:
                self.step()
                self.placement.tree.update_inventory(uuid_, inventory)
            self.step()
            self.placement.tree.update_traits(uuid_, traits)
        self.inventory.shown.publish(uuid_, inventory_tree.Placement(
            lambda uuid: False, write=write))

    def data(self):
        return self.placement.tree.data(CARD)

    def reserved(self):
        return self.data().inventory[CLASS]['reserved']

    def set_reserved(self, value):
        inventory = self.data().inventory
        inventory[CLASS]['reserved'] = value
        self.placement.tree.update_inventory(CARD, inventory)

    def restart(self):
        self.inventory = self.make()
        self.inventory.scanner.scan()

    def vanish(self):
        self.driver.devices, self.well = (), self.driver.devices
        self.inventory.scanner.scan()

    def come_back(self):
        self.driver.devices = self.well
        self.inventory.scanner.scan()

    def assertIsFenced(self, value=True):
        self.assertEqual(value, naming.FENCED in self.data().traits)
        if value:
            self.assertEqual(4, self.reserved())

    def watch_store(self):
        """Writes of the store are steps, too."""
        def write(*args):
            self.step()
            type(self.store).set_reserved(self.store, *args)
        self.store.set_reserved = write

    @ddt.data(*itertools.product((0, 1, 4), range(12), (False, True)))
    @ddt.unpack
    def test_killed(self, operators, kill_at, published):
        """While it is fenced or given free: it heals in two passes."""
        self.set_reserved(operators)
        self.claim(A, region=None)
        self.vanish()
        self.watch_store()
        self.steps = itertools.count(-kill_at)
        do = self.publish if published else self.report
        try:
            do()
            self.report()
            self.come_back()
            do()
            self.report()
            self.report()
        except Killed:
            pass
        self.steps = itertools.count(1)
        self.driver.devices = self.well
        self.restart()
        for _ in range(2):
            self.report()
        self.assertIsFenced(False)
        self.assertEqual(operators, self.reserved())
        self.report()
        self.assertEqual({}, self.store.reserved())
        # and it is fenced again all the same
        self.vanish()
        self.report()
        self.assertIsFenced()

    def test_as_it_was_seen(self):
        """A card vanishes while a server has it and comes back, the server is
        deleted, and that is published."""
        claim = self.claim(A, region=None)
        self.vanish()
        self.report()
        self.assertIsFenced()
        self.come_back()
        self.store.remove([claim])
        self.publish()
        self.assertEqual((0, False), (self.reserved(),
                                      naming.FENCED in self.data().traits))
        for _ in range(2):
            self.report()
        self.assertEqual((0, {}), (self.reserved(), self.store.reserved()))

    def test_operator_reserves_while_it_is_fenced(self):
        self.claim(A, region=None)
        self.vanish()
        self.report()
        self.set_reserved(2)
        self.report()
        self.assertIsFenced()
        self.come_back()
        for _ in range(2):
            self.report()
        self.assertEqual((2, {}), (self.reserved(), self.store.reserved()))

    def test_operator_reserves_when_it_is_free_again(self):
        self.claim(A, region=None)
        self.vanish()
        self.report()
        self.come_back()
        self.set_reserved(3)
        for _ in range(2):
            self.report()
        self.assertEqual((3, {}), (self.reserved(), self.store.reserved()))

    @ddt.data(False, True)
    def test_fenced_by_release_0_1(self, well):
        """Which noted nothing, and told its own by the trait."""
        self.claim(A, region=None)
        self.set_reserved(4)
        self.placement.tree.add_traits(CARD, naming.FENCED)
        if not well:
            self.vanish()
            self.restart()
            self.report()
            self.assertIsFenced()
            self.driver.devices = self.well
        self.restart()
        for _ in range(2):
            self.report()
        self.assertIsFenced(False)
        self.assertEqual((0, {}), (self.reserved(), self.store.reserved()))

    def test_store_that_fails_reserves_nothing(self):
        self.vanish()
        self.store.error = unavailable('set_reserved')
        self.assertRaises(exception.AcceleratorsUnavailable, self.publish)
        self.report()
        self.assertIsFenced(False)
        self.assertEqual(0, self.reserved())


class ThreadsTest(InventoryTestBase):

    def test_readers_beside_a_pass(self):
        """Devices that a thread read stay as they were."""
        self.update()
        ends = threading.Event()
        errors = []

        def read():
            try:
                while not ends.is_set():
                    for device in self.inventory.devices.values():
                        device.functions()
                    self.inventory.shown.providers()
                    # a green thread lets no other one run without this
                    time.sleep(0)
            except Exception as error:
                errors.append(error)
        reader = threading.Thread(target=read)
        reader.start()
        for number in range(20):
            self.driver.devices = (fpga(A, regions=number % 3),)
            self.update()
        ends.set()
        reader.join(30)
        self.assertEqual([], errors)
