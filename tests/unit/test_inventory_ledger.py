# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the operator reserves stays what he reserves, whatever we write."""

import contextlib
import copy
import dataclasses
import itertools
import uuid as uuids

import ddt
import fixtures
import hypothesis
from hypothesis import strategies as st
from nova.compute import provider_tree
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel.inventory import ledger
from nova_accel.inventory import tree as inventory_tree
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store
from tests.unit import inventory_host
from tests.unit.inventory_host import A, handle, NODE

OK, SICK, GONE = model.Health
R, F, W = model.Reserved, ledger.Found, ledger.Wanted
CLASS = 'CUSTOM_ACCELERATOR_GPU'
GPUS = [f'0000:0{n}:00.0' for n in range(1, 5)]
ALL = dict(reserved=4)


@ddt.ddt
class BalanceTest(testtools.TestCase):

    @ddt.data(
        # row; reserved in Placement, generation (of 4); what is wanted;
        #   -> value, operators, waiting in the row, returned
        # nothing reserved: the value is the operator's, and needs no row
        (None, (0, 1), {}, 0, None, None, ''),
        (None, (3, 1), {}, 3, None, None, ''),
        (None, None, {}, 0, None, None, ''),
        # both add up; all of it is all of it
        (None, (1, 1), {'reserved': 1}, 2, 1, '', ''),
        (None, (3, 1), {'reserved': 2}, 4, 3, '', ''),
        (None, (1, 1), ALL, 4, 1, '', ''),
        (R(1, 2, 5), (2, 5), {'reserved': 1}, 2, 1, '', ''),
        (R(1, 2, 5), (2, 5), {}, 1, 1, '', ''),
        # an older copy of the provider says nothing
        (R(1, 2, 5), (0, 4), {'reserved': 1}, 2, 1, '', ''),
        (R(1, 2, 5), (0, 5), {'reserved': 1}, 2, 1, '', ''),
        # others wrote something else
        (R(1, 2, 5), (2, 9), {'reserved': 1}, 2, 1, '', ''),
        # he raises and lowers it
        (R(1, 2, 5), (3, 6), {'reserved': 1}, 3, 2, '', ''),
        (R(1, 2, 5), (1, 6), {'reserved': 1}, 1, 0, '', ''),
        (R(1, 2, 5), (0, 6), {'reserved': 1}, 1, 0, '', ''),
        # and our part changes meanwhile
        (R(1, 2, 5), (3, 6), {'reserved': 2}, 4, 2, '', ''),
        (R(1, 2, 5), (1, 6), {}, 0, None, None, ''),
        # what waits is released first, the oldest first
        (None, (0, 1), {'waiting': 'ab'}, 2, 0, 'ab', ''),
        (R(0, 2, 5, waiting=('a', 'b')), (1, 6), {'waiting': 'ab'},
         1, 0, 'b', 'a'),
        (R(1, 3, 5, waiting=('a', 'b')), (0, 6), {'waiting': 'ab'},
         0, None, None, 'ab'),
        # one that he has not seen yet is not released
        (R(0, 1, 5, waiting=('a',)), (0, 6), {'waiting': 'ab'},
         1, 0, 'b', 'a'),
        (R(0, 0, 5), (0, 6), {'waiting': 'a'}, 1, 0, 'a', ''),
        # the one that he means is released, also where its device is not
        # well by now
        (R(0, 2, 5, waiting=('a', 'b')), (1, 6),
         {'reserved': 1, 'waiting': 'b'}, 2, 0, 'b', 'a'),
        # all is reserved: another value is the one that he wants
        (R(0, 4, 5, all=True), (2, 6), ALL, 4, 2, '', ''),
        (R(3, 4, 5, all=True), (2, 6), {}, 2, None, None, ''),
        (R(3, 4, 5, all=True), (4, 6), {}, 3, None, '', ''),
        (R(0, 4, 5, all=True), (4, 9), ALL, 4, 0, '', ''),
        # killed before Placement had it, or after that
        (R(1, 2, 5, before=1), (1, 5), {'reserved': 1}, 2, 1, '', ''),
        (R(1, 2, 5, before=1), (2, 6), {'reserved': 1}, 2, 1, '', ''),
        (R(1, 2, 5, before=1), (2, 6), {}, 1, 1, '', ''),
        (R(0, 0, 5, before=4), (4, 5), {}, 0, 0, '', ''),
        # and he wrote something then: rather more than less
        (R(1, 2, 5, before=1), (3, 7), {'reserved': 1}, 4, 3, '', ''),
        (R(1, 2, 5, before=1), (0, 7), {'reserved': 1}, 1, 0, '', ''),
        (R(0, 4, 5, before=0, all=True), (3, 7), ALL, 4, 3, '', ''),
        # the inventory was deleted
        (R(1, 2, 5), None, {'reserved': 1}, 2, 1, '', ''),
        (R(1, 2, 5, waiting=('a',)), None, {'waiting': 'a'}, 2, 1, 'a', ''),
        # there are fewer: his value comes back with them
        (None, (3, 1), {'total': 2}, 2, 3, '', ''),
        (R(3, 2, 5), (2, 5), {}, 3, 3, '', ''),
        # the same request allocates the rest
        (None, (1, 1), {'reserved': 1, 'room': 1}, 1, None, None, ''),
        (R(1, 1, 5, before=0), (1, 6), {'reserved': 1}, 2, 1, '', ''),
        # a pool has a row, whatever is reserved
        (None, (1, 1), {'traits': ()}, 1, 1, '', ''),
        # of an earlier release, which noted only what is his
        (R(1, -1), (4, 1), {}, 1, 1, '', ''),
        (R(1, -1), (4, 1), ALL, 4, 1, '', ''),
        (R(1, -1), (1, 1), {}, 1, None, None, ''),
        (R(1, -1), (2, 1), {}, 2, None, None, ''),
        (R(1, -1), (0, 1), {}, 0, None, None, ''),
        (R(1, -1, waiting=('a',)), (2, 1), {'waiting': 'a'}, 2, 1, 'a', ''),
        (R(1, -1, waiting=('a',)), (1, 1), {'waiting': 'a'}, 2, 1, 'a', ''))
    @ddt.unpack
    def test_balance(self, row, found, wanted, value, operators, waiting,
                     returned):
        wanted = W(**{'total': 4, **wanted,
                      'waiting': tuple(wanted.get('waiting', ()))})
        found = found and F(found[0], 4, found[1])
        got = ledger.balance(row, found, wanted)
        self.assertEqual((value, tuple(returned)), (got.value, got.returned))
        if operators is None and got.row is None:
            return
        self.assertIsNotNone(got.row)
        if operators is not None:
            self.assertEqual((operators, tuple(waiting)),
                             (got.row.operators, got.row.waiting))
        # a second balance of what was written says nothing new
        generation = (found.generation if found else 1) + 1
        again = ledger.balance(
            ledger.written(got.row, generation),
            F(got.value, wanted.total, generation),
            dataclasses.replace(wanted, waiting=tuple(
                w for w in wanted.waiting if w not in got.returned)))
        self.assertEqual((got.value, ()), (again.value, again.returned))

    @ddt.data(
        # of release 0.1, or after the store was lost: the mark says it
        (4, True, {}, 0), (4, True, ALL, 4), (3, True, {}, 3),
        (4, False, {}, 4))
    @ddt.unpack
    def test_no_row(self, there, marked, wanted, value):
        self.assertEqual(value, ledger.balance(
            None, F(there, 4), W(4, **wanted), marked).value)

    def test_row_stays_while_marked(self):
        """Without it, a value that is his would count as reserved."""
        row, found = R(4, 4, 5), F(4, 4, 5)
        self.assertEqual(row, ledger.balance(row, found, W(4), True).row)
        self.assertIsNone(ledger.balance(row, found, W(4), False).row)
        self.assertEqual(row, ledger.written(row, 5, True))
        self.assertIsNone(ledger.written(row, 5, False))

    @ddt.data((0, {}), (2, {'x': 2}), (5, {'x': 4, 'y': 1}),
              (9, {'x': 4, 'y': 2}))
    @ddt.unpack
    def test_share(self, amount, shares):
        self.assertEqual(shares, ledger.share(amount, {'x': 4, 'y': 2}))


class Killed(BaseException):
    pass


class Cloud:
    """Placement with generations, and Nova's copy of it, which gets old."""

    def __init__(self, root):
        #: uuid -> [inventory, traits, generation]
        self.placement = {root: [{}, set(), 0]}
        self.copy = provider_tree.ProviderTree()
        self.copy.new_root(NODE, root, generation=0)
        #: how many steps until a kill; None: never
        self.kill = None
        #: whether it refuses the next inventory that we write beside a report,
        #: and then does not answer
        self.refuses = False

    def step(self):
        if self.kill is not None:
            self.kill -= 1
            if self.kill < 0:
                raise Killed

    def refresh(self):
        for uuid, (inventory, traits, generation) in self.placement.items():
            if self.copy.exists(uuid):
                self.copy.update_inventory(
                    uuid, copy.deepcopy(inventory), generation=generation)
                self.copy.update_traits(
                    uuid, traits, generation=generation)

    def put(self, uuid, what, value, generation):
        self.step()
        there = self.placement[uuid]
        if there[2] != generation:
            return None
        there[what], there[2] = copy.deepcopy(value), generation + 1
        self.step()
        return generation + 1

    def mark(self, uuid, racks):
        """The operator says in which racks the devices of a provider are."""
        inventory, traits, generation = self.placement[uuid]
        others = {t for t in traits if not t.startswith('CUSTOM_RACK_')}
        self.placement[uuid] = [inventory, others | racks, generation + 1]

    def write(self, heard, noted):
        """As NovaCloud.show().

        :param heard: called before we read.
        :param noted: called after our inventory was taken.
        """
        def write(uuid, change, refused):
            heard(uuid)
            inventory, traits, generation = self.placement[uuid]
            now, wanted = change(copy.deepcopy(inventory), set(traits),
                                 generation)
            if now is not None:
                if self.refuses:
                    self.refuses = False
                    refused()
                    raise exception.PlacementUnavailable('It is away.')
                generation = self.put(uuid, 0, now, generation)
                self.copy.update_inventory(uuid, now, generation=generation)
            if wanted != traits:
                generation = self.put(uuid, 1, set(wanted), generation)
                self.copy.update_traits(uuid, wanted, generation=generation)
            noted(uuid)
            return generation
        return write

    def flush(self, tree):
        """As SchedulerReportClient.update_from_provider_tree()."""
        for uuid in {*self.copy.get_provider_uuids()} - {
                *tree.get_provider_uuids()}:
            self.step()
            self.copy.remove(uuid)
            del self.placement[uuid]
        for uuid in tree.get_provider_uuids():
            data = tree.data(uuid)
            if not self.copy.exists(uuid):
                self.step()
                self.placement[uuid] = [{}, set(), 0]
                self.copy.new_child(data.name, data.parent_uuid, uuid=uuid,
                                    generation=0)
            for what, value, has_changed, update in (
                    (0, data.inventory, self.copy.has_inventory_changed,
                     self.copy.update_inventory),
                    (1, data.traits, self.copy.have_traits_changed,
                     self.copy.update_traits)):
                if has_changed(uuid, value):
                    generation = self.put(
                        uuid, what, value, self.copy.data(uuid).generation)
                    if generation is None:
                        return False
                    update(uuid, value, generation=generation)
        return True


class World(fixtures.Fixture):
    """A host, its operator, and Nova with a copy that is refreshed when the
    operator is lucky."""

    def __init__(self, pool):
        self.pool = pool

    def _setUp(self):
        self.useFixture(config_fixture.Config(conf.CONF)).config(
            pools='host' if self.pool else 'none', group='accel')
        self.store = inventory_host.Store(claim_store.MEMORY)
        self.driver = inventory_host.Driver()
        self.driver.POOLED = True
        self.health = dict.fromkeys(range(4), OK)
        self.traits = ()
        self.look()
        self.start()
        self.root = str(uuids.uuid4())
        self.nova = Cloud(self.root)
        #: uuids of providers from which something is allocated
        self.allocated = set()
        #: what the operator has reserved, and has released
        self.his, self.released = 0, []
        #: reserved as we wrote it last, what waits in it, whether it is all
        self.included = 0, [], False
        self.report()
        self.uuid, = self.nova.placement.keys() - {self.root}

    def start(self):
        self.inventory = host_inventory.Inventory(
            {'good': self.driver}, self.store)
        self.addCleanup(self.inventory.close)
        self.inventory.scanner.scan()

    def look(self):
        if self.pool:
            self.driver.devices = tuple(model.Device(
                address=address, type='GPU', vendor='ACME', product='G1',
                vendor_id='1234', product_id='0002', driver='good',
                health=self.health[n], traits=self.traits,
                handles=(handle(address),), numa_node=n // 2)
                for n, address in enumerate(GPUS))
            return
        self.driver.devices = (model.Device(
            address=A, type='GPU', vendor='ACME', product='G1',
            vendor_id='1234', product_id='0002', driver='good',
            health=self.health[0],
            handles=tuple(handle(a) for a in GPUS)),)

    def heard(self, uuid):
        """We read what Placement has: what he wants, by the last value."""
        if uuid != getattr(self, 'uuid', None):
            return
        value, waiting, all_ = self.included
        change = self.reserved - value
        if all_ and change:
            self.his = self.reserved
        elif change > 0:
            self.his += change
        elif change:
            back = waiting[:-change]
            self.released += back
            self.his = max(0, self.his + change + len(back))
        self.included = self.reserved, waiting, all_

    def noted(self, uuid):
        """Placement has what we want."""
        if uuid == getattr(self, 'uuid', None):
            row = self.store.reserved().get((uuid, CLASS))
            self.included = (self.reserved, list(row.waiting) if row else [],
                             bool(row and row.all))

    def item(self):
        return self.nova.placement[self.uuid][0][CLASS]

    # What happens

    def report(self):
        for _ in range(4):
            tree = copy.deepcopy(self.nova.copy)
            self.inventory.update_tree(
                tree, NODE, inventory_tree.Placement(
                    self.allocated.__contains__,
                    write=self.nova.write(self.heard, self.noted)))
            if self.nova.flush(tree):
                return
            self.nova.refresh()
        raise AssertionError('Nova gives up')

    def publish(self, uuid=None):
        # as attach.publishing
        with contextlib.suppress(KeyError, exception.PlacementUnavailable):
            self.inventory.publish(
                uuid or self.uuid, inventory_tree.Placement(
                    self.allocated.__contains__,
                    write=self.nova.write(self.heard, self.noted)))

    def changes_health(self, number):
        number = number if self.pool else 0
        self.health[number] = SICK if self.health[number] is OK else OK
        self.look()
        self.inventory.scanner.scan()

    def waits(self, number):
        address = GPUS[number]
        self.store.await_operator(model.Claim(
            str(uuids.uuid4()), 'i', 'p', CLASS, '1',
            address if self.pool else A, None, handle(address), 'i'))

    def operator_writes(self, reserved):
        self.item()['reserved'] = reserved
        self.nova.placement[self.uuid][2] += 1

    def server_comes(self):
        """Placement counts generations for allocations, too."""
        self.nova.placement[self.uuid][2] += 1

    def refresh(self):
        self.nova.refresh()

    def refuses(self):
        self.nova.refuses = True

    def do(self, steps):
        for name, argument in steps:
            getattr(self, name)(*([] if argument is None else [argument]))

    def settle(self, refreshes=True):
        self.nova.refuses = False
        if refreshes:
            self.nova.refresh()
        for _ in range(3):
            self.report()
        self.heard(self.uuid)
        for number in range(4):
            if self.health[number] is not OK:
                self.changes_health(number)
        for _ in range(3):
            self.report()

    @property
    def reserved(self):
        return self.item()['reserved']


NUMBERS = st.integers(0, 3)
STEPS = st.lists(st.one_of(
    st.tuples(st.sampled_from(['report', 'publish', 'server_comes',
                               'refresh', 'refuses']), st.none()),
    st.tuples(st.sampled_from(['changes_health', 'waits']), NUMBERS),
    st.tuples(st.just('operator_writes'), st.integers(0, 4))), max_size=14)


class RandomTest(testtools.TestCase):

    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(st.booleans(), STEPS)
    def test_nothing_is_lost(self, pool, steps):
        """A raise and a lowering count, whenever they come; what waits is
        released only by him."""
        with World(pool) as world:
            world.do(steps)
            waiting = {handle(GPUS[n]) for name, n in steps
                       if name == 'waits'}
            world.settle()
            left = [w.handle for w in world.store.waiting()]
            self.assertEqual(
                min(4, world.his + len(left)), world.reserved)
            self.assertLessEqual(
                {h.address for h in waiting} - {h.address for h in left},
                set(world.released))
            self.assertNotIn(naming.FENCED,
                             world.nova.placement[world.uuid][1])

    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(st.booleans(), STEPS)
    def test_copy_stays_old(self, pool, steps):
        """A raise and a lowering count also where Nova reads nothing again."""
        with World(pool) as world:
            world.do([step for step in steps
                      if step[0] not in ('refresh', 'waits')])
            world.settle(refreshes=False)
            self.assertEqual(world.his, world.reserved)

    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(st.booleans(), STEPS, STEPS, st.integers(0, 8))
    def test_killed(self, pool, steps, then, kill):
        """Without his doing it is as if nothing had happened; what he reserved
        before it counts, and nothing is released that he has not released."""
        with World(pool) as world:
            world.do(steps)
            waiting = len(world.store.waiting())
            world.heard(world.uuid)
            his = world.his
            world.nova.kill = kill
            try:
                world.report()
                world.changes_health(0)
                world.publish()
                world.report()
            except Killed:
                pass
            world.nova.kill = None
            world.start()
            world.nova.refresh()
            writes = [s for s in then if s[0] == 'operator_writes']
            world.do(then)
            world.settle()
            left = len(world.store.waiting())
            reserved = world.reserved
            if not any(s[0] in ('operator_writes', 'waits')
                       for s in (*steps, *then)):
                self.assertEqual(0, reserved)
            if not writes and not waiting:
                self.assertEqual(min(4, his + left), reserved)


class StaleTest(testtools.TestCase):
    """Nova's copy is not refreshed here, as within five minutes."""

    def world(self, pool=False):
        self.host = self.useFixture(World(pool))
        return self.host

    def report(self, expected):
        for _ in range(3):
            self.host.report()
            self.assertEqual(expected, self.host.reserved)

    def test_card_that_fails_and_recovers(self):
        host = self.world()
        host.operator_writes(1)
        host.changes_health(0)
        self.report(4)
        host.changes_health(0)
        self.report(1)
        self.assertEqual({}, host.store.reserved())

    def test_raised_after_a_write_that_was_refused(self):
        """It is his, though it is the value that we wanted."""
        for pool in (False, True):
            host = self.world(pool)
            host.changes_health(0)
            host.refuses()
            host.report()
            host.operator_writes(1 if pool else 4)
            host.changes_health(0)
            self.report(1 if pool else 4)

    def test_gone_as_the_operator_lowers(self):
        """The provider is removed, and not changed as well."""
        host = self.world()
        host.driver.devices = ()
        host.inventory.scanner.scan()
        host.report()
        self.assertIn(naming.FENCED, host.nova.placement[host.uuid][1])
        host.operator_writes(0)
        host.refresh()
        host.report()
        self.assertEqual({host.root}, set(host.nova.placement))
        self.assertEqual({}, dict(host.inventory.devices))

    def test_pool_shows_his_one_and_our_one(self):
        host = self.world(pool=True)
        host.operator_writes(1)
        host.changes_health(2)
        self.report(2)
        host.changes_health(2)
        self.report(1)

    def test_lowered_where_there_are_fewer(self):
        """What he lowers it to is his, though more of him had been there than
        fits now: two devices of the pool are gone, or a handle of the card is
        being cleaned."""
        host = self.world(pool=True)
        host.operator_writes(3)
        host.refresh()
        host.report()
        host.driver.devices = host.driver.devices[:2]
        host.inventory.scanner.scan()
        host.report()
        self.report(2)
        for his in (1, 0):
            host.operator_writes(his)
            host.refresh()
            self.report(his)
        host = self.world()
        host.operator_writes(4)
        host.refresh()
        host.report()
        claim = model.Claim(
            str(uuids.uuid4()), 'i', host.uuid, CLASS, '1', A, None,
            handle(GPUS[0]), 'i', state=model.ClaimState.DELETING)
        host.store.add([claim])
        self.report(3)
        host.operator_writes(0)
        host.refresh()
        self.report(0)
        host.store.remove([claim])
        self.report(0)

    def shown(self, host):
        """(addresses, or 0 for a pool; reserved; traits of the operator)"""
        found = []
        for uuid, provider in host.inventory.providers().items():
            inventory, traits, _ = host.nova.placement[uuid]
            found.append((len(provider.addresses),
                          inventory[CLASS]['reserved'],
                          sorted(t for t in traits if 'RACK' in t)))
        return sorted(found)

    def change(self, host, pools='host', traits=()):
        """nova-compute starts with other options."""
        self.conf.config(pools=pools, group='accel')
        host.traits = traits
        host.look()
        host.start()
        for _ in range(3):
            host.report()

    def test_pool_that_gives_way(self):
        """To one of another name, to two, to single providers, and back."""
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        host = self.world(pool=True)
        host.operator_writes(3)
        host.nova.mark(host.uuid, {'CUSTOM_RACK_7'})
        rack = ['CUSTOM_RACK_7']
        for _ in range(2):
            self.change(host, traits=('CUSTOM_ONE_TIME',))
            self.assertEqual([(4, 3, rack)], self.shown(host))
            # not its own traits of before
            self.change(host)
            self.assertEqual([(4, 3, rack)], self.shown(host))
            self.assertFalse(any('ONE_TIME' in trait for _, traits, _
                                 in host.nova.placement.values()
                                 for trait in traits))
            self.change(host, 'numa_node')
            self.assertEqual([(2, 1, rack), (2, 2, rack)], self.shown(host))
            self.change(host, 'none')
            self.assertEqual([(1, 0, rack), *[(1, 1, rack)] * 3],
                             self.shown(host))
            self.change(host)
            self.assertEqual([(4, 3, rack)], self.shown(host))

    def test_killed_as_a_pool_gives_way(self):
        """Something is allocated from it, which is still there afterwards."""
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        for kill, back, fails in itertools.product(
                range(12), (False, True), (False, True)):
            host = self.world(pool=True)
            host.allocated.add(host.uuid)
            host.operator_writes(1)
            if back:
                # to one that has been there before, and is still in use
                self.change(host, traits=('CUSTOM_ONE_TIME',))
                self.assertEqual(3, len(host.nova.placement))
            old, = host.inventory.providers()
            host.allocated.add(old)
            host.nova.mark(old, {'CUSTOM_RACK_7'})
            host.refresh()
            host.nova.kill = kill
            with contextlib.suppress(Killed):
                self.change(host, traits=() if back else ('CUSTOM_ONE_TIME',))
            host.nova.kill = None
            if fails:
                # Nova did not write all, and an operation comes before it does
                host.publish(*host.inventory.providers())
            else:
                host.start()
            for _ in range(3):
                host.report()
            self.assertEqual([(4, 1, ['CUSTOM_RACK_7'])], self.shown(host))
            # what is taken from it does not come back
            heir, = host.inventory.providers()
            self.assertNotEqual(old, heir)
            host.nova.mark(heir, set())
            host.refresh()
            host.changes_health(0)
            host.report()
            self.assertEqual([(4, 2, [])], self.shown(host))

    def test_killed_as_a_pool_is_divided(self):
        """Also before the trait of others was written, and while servers have
        devices of the pool."""
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        for is_allocated, kill in itertools.product((False, True), range(12)):
            self.conf.config(pools='host', group='accel')
            host = self.world(pool=True)
            host.operator_writes(3)
            host.nova.mark(host.uuid, {'CUSTOM_RACK_7'})
            host.refresh()
            host.report()
            host.allocated = {host.uuid} if is_allocated else set()
            host.nova.kill = kill
            with contextlib.suppress(Killed):
                self.change(host, 'numa_node')
            host.nova.kill = None
            host.refresh()
            self.change(host, 'numa_node')
            rack = ['CUSTOM_RACK_7']
            self.assertEqual([(2, 1, rack), (2, 2, rack)], self.shown(host),
                             (is_allocated, kill))

    def test_pool_that_gives_way_while_a_device_is_sick(self):
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        host = self.world(pool=True)
        host.operator_writes(1)
        host.changes_health(3)
        self.report(2)
        self.change(host, traits=('CUSTOM_ONE_TIME',))
        self.assertEqual([(4, 2, [])], self.shown(host))
        host.changes_health(3)
        host.report()
        self.assertEqual([(4, 1, [])], self.shown(host))

    def test_pool_that_gives_way_twice(self):
        """Something is allocated from both still, and the first one says
        nothing of what others set and took away since."""
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        host = self.world(pool=True)

        def mark(traits):
            uuid, = host.inventory.providers()
            host.allocated.add(uuid)
            host.nova.mark(uuid, traits)
            host.refresh()
        mark({'CUSTOM_RACK_7'})
        self.change(host, traits=('CUSTOM_ONE_TIME',))
        mark({'CUSTOM_RACK_8'})
        self.change(host, traits=('CUSTOM_OTHER_TIME',))
        self.assertEqual([(4, 0, ['CUSTOM_RACK_8'])], self.shown(host))
        self.change(host, 'none')
        self.assertEqual([(1, 0, ['CUSTOM_RACK_8'])] * 4, self.shown(host))

    def test_refused_as_a_pool_gives_way(self):
        """After a kill as its heir was made, Placement refuses it once."""
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        for kill in range(12):
            host = self.world(pool=True)
            host.nova.mark(host.uuid, {'CUSTOM_RACK_7'})
            host.refresh()
            host.nova.kill = kill
            with contextlib.suppress(Killed):
                self.change(host, traits=('CUSTOM_ONE_TIME',))
            host.nova.kill = None
            host.start()
            host.refuses()
            for _ in range(4):
                host.report()
            self.assertEqual([(4, 0, ['CUSTOM_RACK_7'])], self.shown(host))
            self.assertEqual(2, len(host.nova.placement))

    def test_one_that_leaves_a_pool(self):
        """Of what the operator has reserved it takes along what is too much
        for the others, and what others have set is true of it still."""
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        for his, theirs, its in ((4, 3, 1), (3, 3, 0)):
            host = self.world(pool=True)
            host.operator_writes(his)
            host.nova.mark(host.uuid, {'CUSTOM_RACK_7'})
            # nova-compute starts again, and Nova reads Placement
            host.refresh()
            self.change(host)
            one, *others = host.driver.devices
            host.driver.devices = (dataclasses.replace(
                one, traits=('CUSTOM_ONE_TIME',)), *others)
            host.start()
            for _ in range(3):
                host.report()
            self.assertEqual([(1, its, ['CUSTOM_RACK_7']),
                              (3, theirs, ['CUSTOM_RACK_7'])],
                             self.shown(host))

    def test_released_as_a_pool_gives_way(self):
        """What he lowers before the start, which has not read it, is a handle
        that waits no more."""
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        host = self.world(pool=True)
        host.waits(0)
        host.inventory.scanner.scan()
        self.report(1)
        host.operator_writes(0)
        host.refresh()
        self.change(host, traits=('CUSTOM_ONE_TIME',))
        self.assertEqual((), host.store.waiting())
        self.assertEqual([(4, 0, [])], self.shown(host))

    def test_steady_state_writes_nothing(self):
        for pool in (False, True):
            host = self.world(pool)
            host.changes_health(0)
            for _ in range(3):
                host.report()
            host.nova.kill = 0
            host.store.error = inventory_host.unavailable('set_reserved')
            asked = []
            for _ in range(3):
                host.server_comes()
                host.inventory.update_tree(
                    copy.deepcopy(host.nova.copy), NODE,
                    inventory_tree.Placement(
                        lambda uuid: False,
                        write=lambda *args: asked.append(args)))
            self.assertEqual([], asked)
            host.store.error = None
