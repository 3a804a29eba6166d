# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices that are alike -> one provider, and how many of them count."""

import dataclasses
import logging
from unittest import mock
import uuid

import ddt
import fixtures
import testtools

from nova_accel.inventory import providers
from nova_accel.inventory import tree as inventory_tree
from nova_accel import model
from nova_accel import naming
from tests.unit import inventory_host
from tests.unit.inventory_host import A, B, C, handle, NODE

ROOT = str(uuid.uuid4())
CLASS = 'CUSTOM_ACCELERATOR_GPU'
D = '0000:04:00.0'
OK, SICK = model.Health
DELETING, BOUND = model.ClaimState.DELETING, model.ClaimState.BOUND
POOL = f'{NODE}_accel_pool'


def gpu(address, health=OK, **more):
    return model.Device(**{
        'address': address, 'type': 'GPU', 'vendor': 'ACME', 'product': 'G1',
        'vendor_id': '1234', 'product_id': '0002', 'driver': 'good',
        'health': health, 'handles': (handle(address),), **more})


def claim(address, provider_uuid, state=BOUND, **more):
    return model.Claim(**{
        'uuid': str(uuid.uuid4()), 'instance_uuid': 'i', 'consumer_uuid': 'i',
        'provider_uuid': provider_uuid,
        'resource_class': CLASS, 'group': '1', 'device_address': address,
        'region_index': None, 'state': state, 'handle': handle(address),
        **more})


def waiting(address):
    return claim(address, '').that_waits()


def pool_name(device):
    return naming.pool_provider_name(NODE, device)


def made(*devices, **more):
    return inventory_host.providers_of(
        devices, NODE, ROOT, **{'pool_of': pool_name, **more})


UUID, = made(gpu(A))


class CostTest(testtools.TestCase):

    def test_handles_that_wait(self):
        """Each change of a device costs what there is, not its square."""
        def reads(number):
            devices = [gpu(f'0000:{n:02x}:00.0') for n in range(number)]
            with mock.patch.object(
                    model.Claim, 'part', new_callable=mock.PropertyMock,
                    side_effect=lambda: (A, None)) as part:
                made(*devices, claims=[waiting(d.address) for d in devices])
            return part.call_count
        self.assertLess(reads(64), 3 * reads(32))


@ddt.ddt
class PoolTest(testtools.TestCase):

    @ddt.data(
        # health of A, B, C; claims, lost, waiting -> total, fenced (None:
        # all is reserved without the trait)
        ((OK, OK, OK), (), (), (), 3, False),
        ((OK, SICK, OK), (), (), (), 2, False),
        ((OK, SICK, SICK), (), (), (), 1, False),
        ((SICK, SICK, SICK), (), (), (), 3, True),
        # what a server has is allocated, whatever it is like
        ((OK, OK, OK), [(A, UUID)], (), (), 3, False),
        ((OK, SICK, SICK), [(B, UUID), (C, UUID)], (), (), 3, False),
        ((OK, SICK, SICK), [(A, UUID)], (), (), 1, False),
        ((SICK, SICK, SICK), [(B, UUID)], (), (), 3, True),
        # it is not clean, or Placement has not allocated it
        ((OK, OK, OK), [(A, UUID, DELETING)], (), (), 2, False),
        ((OK, SICK, OK), [(A, UUID), (B, UUID)], [A], (), 2, False),
        # it is allocated from another provider
        ((OK, OK, OK), [(A, 'other')], (), (), 2, False),
        # the server had it from here, and it is in another pool now
        ((OK, OK, OK), [(D, UUID)], (), (), 4, False),
        ((OK, OK, OK), [(D, UUID, DELETING)], (), (), 3, False),
        # the operator's turn
        ((OK, OK, OK), (), (), [A, C], 1, False),
        ((OK, SICK, OK), (), (), [B, C], 1, False),
        ((OK, OK, OK), (), (), [D], 3, False),
        ((OK, SICK, OK), (), (), [A, C], 3, True),
        ((OK, OK, OK), (), (), [A, C, B], 3, None),
        ((SICK, SICK, SICK), (), (), [A, C, B], 3, True))
    @ddt.unpack
    def test_counts(self, healths, claims, lost, waits, total, fenced):
        claims = [claim(*args) for args in claims]
        provider, = made(
            *(gpu(address, health) for address, health
              in zip((A, B, C), healths)),
            claims=[*claims, *map(waiting, waits)],
            lost={c.uuid for c in claims
                  if c.device_address in lost}).values()
        self.assertEqual(
            ({CLASS: total}, fenced is not False, True, NODE, (A, B, C)),
            (provider.inventory, provider.fenced, provider.pool,
             provider.parent, provider.addresses))
        self.assertEqual(waits if len(waits) == 3 else [], [
            w.device_address for w in provider.waiting])
        self.assertEqual(fenced or False, naming.FENCED in provider.traits)

    @ddt.data(
        ({}, 1), ({'numa_node': 1}, 1), ({'serial': 'x'}, 1),
        ({'state_traits': ('CUSTOM_Y',)}, 1),
        ({'traits': ('CUSTOM_X',)}, 2), ({'product': 'G2'}, 2),
        ({'vendor': 'OTHER'}, 2), ({'type': 'NPU'}, 2), ({'family': 'F'}, 2),
        ({'driver': 'other'}, 2),
        # one by its VFs
        ({'handles': (model.AttachHandle(
            model.HandleType.PCI, C, parent=B),)}, 2))
    @ddt.unpack
    def test_alike(self, changes, count):
        found = made(gpu(A), gpu(B, **changes)).values()
        self.assertEqual(count, len(found))
        for provider in found:
            self.assertTrue(provider.name.startswith(POOL))

    @ddt.data(
        # devices of a set of three, claims, waiting -> fenced
        ((OK, OK, OK), (), (), False),
        ((OK, SICK, OK), (), (), True),
        ((SICK, SICK, SICK), (), (), True),
        # one is not there, or was never seen to be well
        ((OK, OK), (), (), True),
        ((OK, OK, None), (), (), True),
        # a server has all of it; of another one it is not clean
        ((OK, OK, OK), [(A, UUID), (B, UUID), (C, UUID)], (), False),
        ((OK, SICK, OK), [(A, UUID), (B, UUID), (C, UUID)], (), False),
        ((OK, OK, OK), [(A, UUID, DELETING)], (), True),
        # a server has a part of it, which counts alone
        ((OK, OK, OK), [(A, UUID)], (), True),
        # a server had one of it when the set came to be
        ((OK, OK, OK), [(B, 'other')], (), True),
        ((OK, OK, OK), (), [A], True))
    @ddt.unpack
    def test_set(self, healths, claims, waits, fenced):
        """It has its size whatever its devices are, and any one of them keeps
        it from servers."""
        devices = [
            gpu(address, health) if health
            else gpu(address, SICK, handles=())
            for address, health in zip((A, B, C), healths)]
        provider, = made(
            *devices, sets={pool_name(gpu(A)): 3},
            claims=[*(claim(*args) for args in claims),
                    *map(waiting, waits)]).values()
        inventory = provider.merged(
            providers.Shown('u', 'n', {}, frozenset()), {},
            lambda uuid: False).inventory[CLASS]
        self.assertEqual(
            {'total': 3, 'reserved': 3 if fenced else 0, 'min_unit': 3,
             'max_unit': 3, 'step_size': 3, 'allocation_ratio': 1.0}, inventory)
        self.assertEqual(fenced, naming.FENCED in provider.traits)
        self.assertIn(naming.SET, provider.traits)

    def test_traits_of_a_set(self):
        """Those that all of its devices have."""
        provider, = made(
            gpu(A, numa_node=0), gpu(B, product='G2', numa_node=0),
            pool_of=lambda device: POOL, sets={POOL: 2}).values()
        self.assertLessEqual({'CUSTOM_GPU_ACME', 'CUSTOM_ACCELERATOR_NUMA_0'},
                             provider.traits)
        self.assertFalse({t for t in provider.traits if t.endswith('G1')})

    @ddt.data(
        # node and root complex of two devices -> traits of their pool
        ((0, '3a'), (0, '3a'), {'NUMA_0', 'PCIE_ROOT_0000_3A'}),
        ((0, '3a'), (0, '5d'), {'NUMA_0'}),
        ((0, '3a'), (1, '3a'), {'PCIE_ROOT_0000_3A'}),
        ((None, '3a'), (1, '5d'), set()),
        ((None, None), (None, None), set()))
    @ddt.unpack
    def test_place(self, one, two, traits):
        def at(address, node, bus):
            return gpu(address, numa_node=node,
                       bridges=(f'pci0000:{bus}', 'port') if bus else ())
        provider, = made(at(A, *one), at(B, *two)).values()
        found = {t for t in provider.traits if 'NUMA' in t or 'ROOT' in t}
        self.assertEqual(
            {f'CUSTOM_ACCELERATOR_{trait}' for trait in traits}, found)
        self.assertEqual(
            ('CUSTOM_ACCELERATOR_NUMA_0' if 'NUMA_0' in traits else None,
             'CUSTOM_ACCELERATOR_PCIE_ROOT_0000_3A'
             if 'PCIE_ROOT_0000_3A' in traits else None),
            naming.place_of(sorted(provider.traits)))
        # those of before go, those of others stay
        self.assertEqual(provider.traits | {'CUSTOM_NUMA_7'},
                         provider.merged_traits({
                             'CUSTOM_ACCELERATOR_NUMA_7', 'CUSTOM_NUMA_7',
                             'CUSTOM_ACCELERATOR_PCIE_ROOT_0001_FF'}))

    def test_names(self):
        """Stable, and told from those of devices; within Placement's 200."""
        self.assertEqual(f'{POOL}_GPU_ACME_G1_645485bb', pool_name(gpu(A)))
        self.assertEqual(f'{POOL}_GPU_ACME_G1_645485bb_numa3',
                         naming.pool_provider_name(NODE, gpu(B), 3))
        long = pool_name(gpu(A, product='P' * 200, vendor='V' * 200))
        self.assertLess(len(long) - len(NODE), 120)
        for name, part in (
                (f'{NODE}_accel_{A}', A), (f'{NODE}_accel_{A}_region0', A),
                (f'{NODE}_accel_pool_GPU', 'pool_GPU'), (NODE, None),
                ('other_accel_pool_GPU', None)):
            self.assertEqual(part, naming.part_of_provider(NODE, name))
            self.assertEqual(part == 'pool_GPU',
                             naming.is_pool(part or ''))

    def test_boards_of_one_product(self):
        """Their subsystems tell them apart."""
        names = {pool_name(gpu(A, subsystem=subsystem))
                 for subsystem in ('10de:1533', '10de:1642', '')}
        self.assertEqual(3, len(names))

    def test_name_that_cannot_be(self):
        told = []
        found = made(gpu(A, product='A/B'), gpu(B),
                     report=lambda *args: told.append(args))
        self.assertEqual([(B,)], [p.addresses for p in found.values()])
        self.assertEqual(A, told[0][0])

    def test_state_of_another_pool(self):
        """A trait of a state that none of them is in is taken away."""
        provider, = made(gpu(A, state_traits=('CUSTOM_X', 'CUSTOM_Y'),
                             traits=('CUSTOM_X',))).values()
        self.assertEqual({'CUSTOM_Y'}, provider.retired_traits)


class TreeTest(inventory_host.InventoryTestBase):
    """With Nova's own provider tree, and a store that is opened again."""

    def setUp(self):
        super().setUp()
        self.driver.POOLED = True
        self.driver.devices = tuple(map(gpu, (A, B, C)))
        self.log = self.useFixture(fixtures.FakeLogger(level=logging.WARNING))
        self.conf.config(pools='none', group='accel')
        self.inventory = self.make(good=self.driver)
        self.pool = f'{NODE}_accel_' + pool_name(gpu(A)).partition(
            '_accel_')[2]

    def pools(self, value='host'):
        """nova-compute starts again."""
        self.conf.config(pools=value, group='accel')
        self.inventory = self.make(good=self.driver)

    def reserve(self, name, value):
        inventory = self.tree.data(name).inventory
        inventory[CLASS]['reserved'] = value
        self.tree.update_inventory(name, inventory)

    def reserved(self):
        item = self.update()[self.pool].inventory[CLASS]
        return item['total'], item['reserved']

    def test_what_the_operator_set_on_each(self):
        """Stays behind; the log says what."""
        names = [f'{NODE}_accel_{address}' for address in (A, B, C)]
        self.assertEqual({NODE, *names}, set(self.update()))
        self.reserve(names[1], 1)
        self.tree.add_traits(names[0], 'CUSTOM_TESTED')
        self.update()
        self.pools()
        for _ in range(3):
            data = self.update()
        self.assertEqual({NODE, self.pool}, set(data))
        self.assertEqual((3, 0), self.reserved())
        self.assertNotIn('CUSTOM_TESTED', data[self.pool].traits)
        lines = [line for line in self.log.output.splitlines()
                 if 'is replaced by' in line]
        self.assertEqual(2, len(lines))
        for line, name, what in zip(lines, names[1::-1], (
                f'({CLASS}:reserved=1)', '(CUSTOM_TESTED)')):
            for word in (name, self.pool, what):
                self.assertIn(word, line)

    def test_fenced_providers_before(self):
        """What we had reserved is not the operator's."""
        self.driver.devices = (gpu(A, SICK), gpu(B), gpu(C))
        self.update()
        self.pools()
        self.assertEqual((2, 0), self.reserved())
        self.driver.devices = tuple(map(gpu, (A, B, C)))
        self.assertEqual((3, 0), self.reserved())
        self.assertNotIn('is replaced by', self.log.output)

    def test_in_use_before(self):
        """What something is allocated from stays, fenced."""
        self.update()
        self.consumers.add(f'{NODE}_accel_{A}')
        self.pools()
        for _ in range(3):
            data = self.update()
        self.assertEqual({NODE, self.pool, f'{NODE}_accel_{A}'}, set(data))
        self.assertEqual(1, data[f'{NODE}_accel_{A}'].inventory[CLASS][
            'reserved'])
        self.consumers.clear()
        self.assertEqual({NODE, self.pool}, set(self.update()))

    def test_gone(self):
        """A device that is gone counts no more."""
        self.pools()
        self.update()
        self.driver.devices = tuple(map(gpu, (A, B)))
        self.assertEqual((2, 0), self.reserved())
        self.driver.devices = tuple(map(gpu, (A, B, C)))
        self.assertEqual((3, 0), self.reserved())

    def test_all_gone(self):
        self.pools()
        self.update()
        self.reserve(self.pool, 1)
        self.driver.devices = ()
        self.consumers.add(self.pool)
        for _ in range(3):
            data = self.update()[self.pool]
            self.assertEqual(3, data.inventory[CLASS]['reserved'])
            self.assertIn(naming.FENCED, data.traits)
        # one comes back: what the operator had reserved is so again
        self.driver.devices = (gpu(A), gpu(B))
        self.assertEqual((2, 1), self.reserved())
        self.driver.devices = ()
        self.consumers.clear()
        for _ in range(4):
            data = self.update()
        self.assertEqual({NODE}, set(data))
        self.update()
        # and when they come back after that
        self.driver.devices = (gpu(A), gpu(B))
        self.assertEqual((2, 1), self.reserved())
        self.assertEqual((2, 1), self.reserved())
        self.assertEqual({}, self.store.reserved())

    def test_waiting_at_a_change(self):
        """What waits for the operator waits on, in the pool and beside it."""
        for address in (A, B):
            self.store.await_operator(waiting(address))
        for _ in range(2):
            self.update()
        self.pools()
        for _ in range(3):
            self.assertEqual((1, 0), self.reserved())
        self.pools('none')
        for _ in range(3):
            data = self.update()
        self.assertEqual([1, 1, 0], [
            data[f'{NODE}_accel_{a}'].inventory[CLASS]['reserved']
            for a in (A, B, C)])
        self.reserve(f'{NODE}_accel_{A}', 0)
        self.update()
        self.assertEqual([B], [w.device_address
                               for w in self.store.all_claims()])

    def test_waiting_goes_and_comes_back(self):
        self.pools()
        self.store.await_operator(waiting(C))
        for _ in range(3):
            self.assertEqual((2, 0), self.reserved())
        self.driver.devices = tuple(map(gpu, (A, B)))
        for _ in range(3):
            self.update()
        self.assertEqual((2, 0), self.reserved())
        self.driver.devices = tuple(map(gpu, (A, B, C)))
        for _ in range(3):
            self.assertEqual((2, 0), self.reserved())
        self.assertEqual(1, len(self.store.all_claims()))

    def test_other_traits(self):
        """A device that has other traits is in another pool; what a server
        has of it stays where it is allocated."""
        self.pools()
        uuid_ = self.update()[self.pool].uuid
        self.store.add([claim(A, uuid_)])
        self.driver.devices = (gpu(A, traits=('CUSTOM_FW_2',)), gpu(B),
                               gpu(C))
        data = self.update()
        self.assertEqual((3, 0), self.reserved())
        other, = (d for d in data.values() if 'CUSTOM_FW_2' in d.traits)
        self.assertEqual((1, 1), (other.inventory[CLASS]['total'],
                                  other.inventory[CLASS]['reserved']))
        mine, = self.store.claims()
        self.assertEqual(other.uuid, self.inventory.shown.provider_of(mine))
        self.store.remove([mine])
        self.assertEqual((2, 0), self.reserved())
        self.assertEqual(0, self.update()[other.name].inventory[CLASS][
            'reserved'])

    def test_pass_without_a_change_writes_nothing(self):
        self.pools()
        self.driver.devices = (gpu(A, SICK), gpu(B), gpu(C))
        for _ in range(3):
            self.update()
        for name in ('update_inventory', 'update_traits', 'new_child',
                     'remove'):
            setattr(self.tree, name, None)
        self.store.error = 'set_reserved', AssertionError()
        self.update()

    def test_what_is_allocated_in_the_same_request(self):
        """Placement would refuse to reserve it, or to count it out; after
        that it is, and not taken for the operator's number."""
        sick = gpu(A, SICK), gpu(B, SICK)
        self.driver.devices = (*sick, gpu(C))
        self.update()
        self.pools()
        self.inventory.scanner.scan()
        moved = [claim(A, 'before')]
        self.store.add(moved)
        uuid_ = naming.provider_uuid(self.root, NODE, self.pool)
        old = naming.provider_uuid(self.root, NODE, f'{NODE}_accel_{B}')
        used = {uuid_: 3, old: 1}
        self.inventory.shown.update_tree(
            self.tree, NODE, inventory_tree.Placement(
                used.__contains__, used=lambda uuid: used.get(uuid, 0)),
            [dataclasses.replace(moved[0], provider_uuid=uuid_)])
        items = [self.tree.data(u).inventory[CLASS] for u in (uuid_, old)]
        self.assertEqual([(3, 0), (1, 0)], [
            (item['total'], item['reserved']) for item in items])
        self.store.update(moved, provider_uuid=uuid_)
        # in another process
        self.pools()
        self.consumers = {self.pool, f'{NODE}_accel_{B}'}
        self.assertEqual((2, 0), self.reserved())
        self.assertEqual(1, self.tree.data(old).inventory[CLASS]['reserved'])
        self.assertEqual({0}, {row.operators for row
                               in self.store.reserved().values()})
