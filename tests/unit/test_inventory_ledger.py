# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the operator reserves stays what he reserves, whatever we write."""

import contextlib
import copy
import logging
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
from nova_accel.store import values
from tests.unit import inventory_host
from tests.unit.inventory_host import A, handle, NODE

OK, SICK = model.Health
R, F = values.Reserved, ledger.Found
CLASS = 'CUSTOM_ACCELERATOR_GPU'
GPUS = [f'0000:0{n}:00.0' for n in range(1, 5)]


@ddt.ddt
class BalanceTest(testtools.TestCase):

    @ddt.data(
        # row; reserved in Placement, of 4; whether nothing is fit, total now
        #   -> value, row
        # without a row it is his, and needs none
        (None, 0, False, 4, 0, None),
        (None, 3, False, 4, 3, None),
        (None, None, False, 4, 0, None),
        # nothing is fit
        (None, 1, True, 4, 4, R(1, 4, 1)),
        (None, None, True, 4, 4, R(0, 4)),
        (R(1, 4), 4, True, 4, 4, R(1, 4)),
        # something is again
        (R(1, 4), 4, False, 4, 1, R(1, 1, 4)),
        (R(1, 1), 1, False, 4, 1, None),
        # there are fewer: his number comes back with them
        (None, 3, False, 2, 2, R(3, 2, 3)),
        (R(3, 2), 2, False, 2, 2, R(3, 2)),
        (R(3, 2), 2, False, 4, 3, R(3, 3, 2)),
        # he raises and lowers it
        (R(3, 2), 1, False, 2, 1, None),
        (R(3, 2), 3, False, 2, 2, R(3, 2, 3)),
        (R(0, 4), 2, True, 4, 4, R(0, 4, 2)),
        # killed before Placement had it, or after that
        (R(1, 4, 1), 1, True, 4, 4, R(1, 4, 1)),
        (R(1, 4, 1), 4, True, 4, 4, R(1, 4)),
        (R(1, 4, 1), 4, False, 4, 1, R(1, 1, 4)),
        (R(1, 4, 1), 1, False, 4, 1, None),
        # and he wrote something then
        (R(1, 4, 1), 3, True, 4, 4, R(3, 4, 3)),
        (R(1, 4, 1), 0, False, 4, 0, None),
        # the inventory was deleted, or has not come yet
        (R(1, 4), None, False, 4, 1, R(1, 1)),
        (R(1, 1), None, False, 4, 1, R(1, 1)))
    @ddt.unpack
    def test_balance(self, row, there, full, total, value, after):
        found = None if there is None else F(there, 4)
        self.assertEqual((value, after),
                         ledger.balance(row, found, total, full))
        # once Placement has it, a second balance says nothing else
        again, row = ledger.balance(after, F(value, total), total, full)
        self.assertEqual(value, again)
        self.assertEqual((value, row),
                         ledger.balance(row, F(value, total), total, full))

    @ddt.data((R(1, 4, 1), R(1, 4)), (R(1, 1, 4), None), (R(3, 2, 3), R(3, 2)))
    @ddt.unpack
    def test_confirmed(self, row, after):
        self.assertEqual(after, ledger.confirmed(row, F(row.value, 4)))
        self.assertEqual(row._replace(before=None),
                         ledger.confirmed(row, F(row.value, 4, True)))

    def test_room(self):
        """The same request to Placement allocates the rest."""
        self.assertEqual((1, R(0, 1, 0)),
                         ledger.balance(None, F(0, 4), 4, True, 1))
        self.assertEqual((4, R(0, 4, 1)),
                         ledger.balance(R(0, 1), F(1, 4), 4, True))

    @ddt.data(
        # the store was lost: the mark says that nova_accel wrote it
        (4, True, False, 0), (4, True, True, 4), (3, True, False, 3),
        (4, False, False, 4))
    @ddt.unpack
    def test_no_row(self, there, marked, full, value):
        self.assertEqual(value, ledger.balance(
            None, F(there, 4, marked), 4, full)[0])

    def test_row_stays_while_marked(self):
        """Without it, a value that is his would count as nova_accel's."""
        row = R(4, 4)
        self.assertEqual(row, ledger.balance(row, F(4, 4, True), 4)[1])
        self.assertIsNone(ledger.balance(row, F(4, 4), 4)[1])

    @ddt.data(
        # row; reserved in Placement -> released, his number then
        (R(0, 4), 4, 0, 0), (R(0, 4), 3, 1, 0), (R(0, 4), 0, 4, 0),
        (R(1, 4), 3, 1, 1), (R(1, 4), 0, 4, 0), (R(4, 4), 3, 1, 3),
        # he reserved as much before
        (None, 0, 0, 0), (R(3, 1), 0, 0, 0),
        # our write may not have arrived
        (R(0, 4, 1), 1, 0, 0), (R(0, 4, 1), 2, 0, 2))
    @ddt.unpack
    def test_released(self, row, there, released, number):
        found = F(there, 4)
        self.assertEqual((released, number), (
            ledger.released(row, found), ledger.operators(row, found)))
        # of a device that is not well it is the number for later
        self.assertEqual(0, ledger.released(row, F(there, 4, True)))


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
            now, wanted = change(copy.deepcopy(inventory), set(traits))
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
        #: reserved as we wrote it last, whether a lower value releases
        self.included = 0, False
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
        value, releases = self.included
        if releases and self.reserved < value:
            self.released += [c.handle.address for c in self.store.all_claims()
                              ][:value - self.reserved]
            self.his = min(self.his, self.reserved)
        elif self.reserved != value:
            self.his = self.reserved
        self.included = self.reserved, False

    def noted(self, uuid):
        """Placement has what we want."""
        if uuid == getattr(self, 'uuid', None):
            self.included = self.reserved, (
                not self.pool and len(self.store.all_claims()) == 4
                and not self.is_marked)

    @property
    def is_marked(self):
        return naming.FENCED in self.nova.placement[self.uuid][1]

    @property
    def expected(self):
        """What is reserved in the end: his, as far as there is as much; all
        where nothing is fit."""
        return min(self.his, 4 - len(self.store.all_claims())) or (
            4 if len(self.store.all_claims()) == 4 else 0)

    def item(self):
        return self.nova.placement[self.uuid][0][CLASS]

    # What happens

    def report(self):
        for _ in range(4):
            tree = copy.deepcopy(self.nova.copy)
            self.inventory.shown.update_tree(
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
            self.inventory.shown.publish(
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

    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(st.booleans(), STEPS)
    def test_nothing_is_lost(self, pool, steps):
        """A raise and a lowering count, whenever they come; what waits is
        released only by him."""
        with World(pool) as world:
            world.do(steps)
            waiting = {handle(GPUS[n]) for name, n in steps
                       if name == 'waits'}
            world.settle()
            left = [w.handle for w in world.store.all_claims()]
            self.assertEqual(world.expected, world.reserved)
            self.assertLessEqual(
                {h.address for h in waiting} - {h.address for h in left},
                set(world.released))
            self.assertEqual(pool and len(left) == 4, world.is_marked)

    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(st.booleans(), STEPS)
    def test_copy_stays_old(self, pool, steps):
        """A raise and a lowering count also where Nova reads nothing again."""
        with World(pool) as world:
            world.do([step for step in steps
                      if step[0] not in ('refresh', 'waits')])
            world.settle(refreshes=False)
            self.assertEqual(world.his, world.reserved)

    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(st.booleans(), STEPS, STEPS, st.integers(0, 8))
    def test_killed(self, pool, steps, then, kill):
        """Without his doing it is as if nothing had happened; what he reserved
        before it counts, and nothing is released that he has not released."""
        with World(pool) as world:
            world.do(steps)
            waiting = len(world.store.all_claims())
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
            if not any(s[0] in ('operator_writes', 'waits')
                       for s in (*steps, *then)):
                self.assertEqual(0, world.reserved)
            if not writes:
                self.assertLessEqual(waiting, len(world.store.all_claims()))
            if not writes and not waiting:
                world.his = his
                self.assertEqual(world.expected, world.reserved)


@ddt.ddt
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

    def test_pool_shows_only_his(self):
        """A device that is not well is not in total."""
        host = self.world(pool=True)
        host.operator_writes(1)
        host.changes_health(2)
        self.report(1)
        self.assertEqual(3, host.item()['total'])
        host.changes_health(2)
        self.report(1)
        self.assertEqual(4, host.item()['total'])

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

    @ddt.data(False, True)
    def test_lowered_in_the_minute_after_a_start(self, pool):
        """What he had reserved is so again as the devices come back; that he
        lowers it before the next report counts, also where nova-compute was
        killed as Nova had written it."""
        for kill in (None, 3):
            host = self.world(pool)
            host.operator_writes(1)
            host.driver.devices = ()
            host.inventory.scanner.scan()
            for _ in range(3):
                host.refresh()
                host.report()
            self.assertNotIn(host.uuid, host.nova.placement)
            host.look()
            host.start()
            host.nova.kill = kill
            with contextlib.suppress(Killed):
                host.report()
            host.nova.kill = None
            self.assertEqual(1, host.reserved)
            if kill:
                host.start()
            host.operator_writes(0)
            host.refresh()
            self.report(0)
            self.assertEqual({}, host.store.reserved())

    @ddt.data(False, True)
    def test_lowered_after_a_fence_was_lifted(self, pool):
        """To what was reserved before the lifting and after it."""
        for his in (0, 4):
            host = self.world(pool)
            host.operator_writes(1)
            for _ in range(2):
                for number in range(4 if pool else 1):
                    host.changes_health(number)
                host.report()
            self.assertEqual(1, host.reserved)
            host.operator_writes(his)
            host.refresh()
            self.report(his)

    def test_what_replaces_it_has_a_number_of_its_own(self):
        """Of a pool that gives way the log names what is not taken over, once;
        it has its number again when it comes back."""
        self.conf = self.useFixture(config_fixture.Config(conf.CONF))
        log = self.useFixture(fixtures.FakeLogger(level=logging.WARNING))
        host = self.world(pool=True)
        host.operator_writes(3)
        host.nova.mark(host.uuid, {'CUSTOM_RACK_7'})
        host.refresh()

        def start(pools):
            self.conf.config(pools=pools, group='accel')
            host.look()
            host.start()
            for _ in range(3):
                host.report()
            return {uuid: host.nova.placement[uuid][0][CLASS]['reserved']
                    for uuid in host.inventory.shown.providers()}
        old = host.nova.copy.data(host.uuid).name
        self.assertEqual([0] * 4, [*start('none').values()])
        line, = [line for line in log.output.splitlines()
                 if 'is replaced by' in line]
        for word in (old, f'{CLASS}:reserved=3', 'CUSTOM_RACK_7', *(
                f'{NODE}_accel_{address}' for address in GPUS)):
            self.assertIn(word, line)
        self.assertNotIn('CUSTOM_GPU', line)
        self.assertEqual({host.uuid: 3}, start('host'))

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
                host.inventory.shown.update_tree(
                    copy.deepcopy(host.nova.copy), NODE,
                    inventory_tree.Placement(
                        lambda uuid: False,
                        write=lambda *args: asked.append(args)))
            self.assertEqual([], asked)
            host.store.error = None
