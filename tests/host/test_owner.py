# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A claim is the server's or one migration's, whatever cannot be written."""

import itertools
import sqlite3

import ddt

from nova_accel import exception
from nova_accel import model
from tests.host import base
from tests.unit.host import A, B, FUNCTION, plain, vf


@ddt.ddt
class MoveTest(base.HostTestCase):
    """A resize on the same host, of which one write after another fails."""

    POOLS = 'none'
    CLASS, ADDRESSES = base.FPGA, (A, B)

    def setUp(self):
        super().setUp()
        self.start_devices()
        before, after = (self.host.allocation(address, self.CLASS)
                         for address in self.ADDRESSES)
        self.server = self.host.boot(
            {f'resources1:{self.CLASS}': '1'}, before)
        self.first = self.held()
        self.migration = self.host.resize_here(self.server, after)
        self.second = self.held()
        self.context = self.host.cloud.admin_context()

    def start_devices(self):
        self.start_host(*({'address': address} for address in self.ADDRESSES))

    def held(self):
        claim, = self.host.holdings.of(self.server)
        return claim.handle.address

    def fail_at(self, number):
        """The n-th transaction that writes from now on fails, until mend():
        some are written by threads, which may come later."""
        store = self.host.store
        begin, counter = store._begin, itertools.count()

        def fails():
            if next(counter) == number:
                raise sqlite3.OperationalError('disk I/O error')
            begin()
        store._begin = fails
        self.mend = lambda: setattr(store, '_begin', begin)
        self.addCleanup(self.mend)

    def revert(self):
        self.host.revert_here(self.server, self.migration)

    def confirm(self):
        self.host.accelerators.confirm_move(self.server, self.migration)
        self.host.cloud.allocate(self.migration, None)

    def compare(self):
        for _ in range(2):
            self.host.reconciler.run()
            self.host.settle()

    def assertHasOnly(self, handle):
        self.assertEqual({self.server: frozenset([handle])},
                         self.host.cloud.running())
        claim, = self.host.holdings.all()
        self.assertEqual((self.server, self.server, handle), (
            claim.instance_uuid, claim.consumer_uuid, claim.handle.address))
        self.assertEqual(
            {self.server: self.host.allocation(
                claim.device_address, self.CLASS)},
            self.host.cloud.read()['allocations'])

    @ddt.data(*itertools.product(range(6), (False, True), (False, True)))
    @ddt.unpack
    def test_revert(self, number, restarts, compares):
        self.fail_at(number)
        try:
            self.revert()
        except exception.AcceleratorsUnavailable:
            # the server is in ERROR, and its owner reboots it hard
            pass
        if restarts:
            self.restart()
        if compares:
            self.compare()
        self.mend()
        self.host.start_guest(self.server)
        self.compare()
        self.assertHasOnly(self.first)

    @ddt.data(*itertools.product(range(4), (False, True)))
    @ddt.unpack
    def test_confirm_and_move_again(self, number, restarts):
        """What the first move left is not the second one's."""
        self.fail_at(number)
        self.confirm()
        if restarts:
            self.restart()
            self.compare()
        self.mend()
        self.migration = self.host.migrate_away(self.server)
        self.host.revert(self.server, self.migration)
        self.compare()
        self.assertHasOnly(self.second)

    @ddt.data(False, True)
    def test_allocation_of_the_move_is_lost(self, restarts):
        """The operator has deleted it, and the owner reverts."""
        self.host.cloud.lose(self.migration)
        if restarts:
            self.restart()
        self.compare()
        self.assertEqual(
            {self.server, self.migration},
            self.host.cloud.read()['allocations'].keys())
        self.assertEqual([], self.host.fenced())
        self.revert()
        self.host.start_guest(self.server)
        self.compare()
        self.assertHasOnly(self.first)

    def test_reverted_twice(self):
        """As where two hear of it: the server keeps what it has."""
        self.confirm()
        held = self.host.holdings.of(self.server)
        migration = self.host.migrate_away(self.server)
        self.host.revert(self.server, migration)
        self.host.accelerators.revert_move(self.server, migration)
        self.assertEqual(held, self.host.holdings.of(self.server))

    def test_revert_is_one_transaction(self):
        """What is read meanwhile is what the server had, or what it has."""
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.cloud.move_allocation(self.migration, self.server)
        store, seen = self.host.store, []
        begin = store._begin

        def begins():
            seen.append(len(self.host.holdings.of(self.server)))
            begin()
        store._begin = begins
        self.addCleanup(setattr, store, '_begin', begin)
        self.host.accelerators.revert_move(self.server, self.migration)
        self.assertEqual({1}, {*seen})

    def test_move_that_has_its_allocation(self):
        """It is not over, whatever Placement has for the server."""
        held = self.host.holdings.of(self.server)
        old = self.host.holdings.of(self.server, model.Role.OLD)
        self.host.cloud.allocate(self.server, {
            **self.host.allocation(self.ADDRESSES[0], self.CLASS),
            **self.host.allocation(self.ADDRESSES[1], self.CLASS)})
        with self.host.cloud.state() as state:
            state.setdefault('reverted', []).append(self.migration)
        self.host.accelerators.end_earlier(
            self.context, self.host.cloud.server(self.server))
        self.assertEqual(held, self.host.holdings.of(self.server))
        self.assertEqual(old, self.host.holdings.of(
            self.server, model.Role.OLD))

    def test_operation_that_does_not_end(self):
        """It has the server's lock: a confirm and a delete are not stopped,
        and what they release is released when it has ended."""
        end = self.operate_on(self.server)
        self.assertRaises(
            exception.LockTimeout, self.host.accelerators.revert_move,
            self.server, self.migration)
        self.confirm()
        self.host.delete(self.server)
        self.host.cloud.delete_server(self.server)
        self.assertEqual(2, len(self.host.holdings.all()))
        self.assertIn('is postponed', self.log.output)
        # not before: it may have the devices at work
        self.host.releases.retry()
        self.assertEqual({model.ClaimState.BOUND}, {
            claim.state for claim in self.host.holdings.all()})
        end()
        # all of it: the comparison would find it otherwise
        self.host.releases.retry()
        self.host.settle()
        self.assertEqual([], self.host.holdings.all())

    @ddt.data(False, True)
    def test_store_that_stays_away(self, restarts):
        """The server does not start with what it has lost."""
        store = self.host.store
        begin = store._begin

        def fails():
            raise sqlite3.OperationalError('disk I/O error')
        store._begin = fails
        self.assertRaises(exception.AcceleratorsUnavailable, self.revert)
        self.assertRaises(exception.AcceleratorsUnavailable,
                          self.host.start_guest, self.server)
        store._begin = begin
        if restarts:
            self.restart()
            self.compare()
        self.host.start_guest(self.server)
        self.compare()
        self.assertHasOnly(self.first)
        self.assertEqual([], self.host.holdings.of(
            self.server, model.Role.OLD))


class PoolMoveTest(MoveTest):
    """Of two disks of a pool: once the move has ended, Placement says that the
    server has one, and not which."""

    POOLS = 'host'
    CLASS, ADDRESSES = 'CUSTOM_ACCELERATOR_SSD', ('0000:02:00.0',
                                                  '0000:03:00.0')

    def start_devices(self):
        self.start_host(nvmes=[{'address': address}
                               for address in self.ADDRESSES],
                        drivers=('nvme',))

    def setUp(self):
        super().setUp()
        self.disks = self.simulated.kernel
        self.disks.write_disk(self.first, 'its data')

    def assertHasOnly(self, handle):
        super().assertHasOnly(handle)
        if handle == self.first:
            self.assertEqual('its data', self.disks.data_of_disk(handle))

    def test_compared_while_the_new_one_is_cleaned(self):
        self.disks.set_fault(self.second, format='refused')
        cloud = self.host.cloud
        move = cloud.move_allocation

        def moves(*args):
            move(*args)
            self.compare()
        cloud.move_allocation = moves
        self.revert()
        self.assertEqual(
            {self.first: model.ClaimState.BOUND,
             self.second: model.ClaimState.DELETING},
            {c.handle.address: c.state for c in self.host.holdings.all()})
        self.disks.set_fault(self.second, format=None)
        self.host.start_guest(self.server)
        self.compare()
        self.assertHasOnly(self.first)

    def test_confirm_that_fails(self):
        """Before its devices were released, as where Neutron does not answer:
        Nova deletes the migration's allocation, sets it to "error", and the
        log says that the server may be hard rebooted."""
        self.disks.write_disk(self.second, 'what it wrote since')
        self.host.cloud.allocate(self.migration, None)
        self.host.reboot(self.server)
        self.compare()
        self.assertHasOnly(self.second)
        self.assertEqual('what it wrote since',
                         self.disks.data_of_disk(self.second))

    def move_again(self):
        """The confirm fails as above, and no comparison comes before the next
        resize: back to the flavor that the server had at first."""
        self.disks.write_disk(self.second, 'what it wrote since')
        cloud = self.host.cloud
        cloud.allocate(self.migration, None)
        again = self.host.resize_here(
            self.server, cloud.read()['allocations'][self.server])
        with cloud.state() as state:
            # the flavor tells it, of the first resize as of this one
            state.setdefault('reverted', []).append(self.migration)
        return again

    def test_moves_again(self):
        """What the first resize has left does not come back."""
        again = self.move_again()
        self.assertEqual(self.first, self.held())
        self.disks.write_disk(self.first, 'what it wrote at last')
        self.host.accelerators.confirm_move(self.server, again)
        self.host.cloud.allocate(again, None)
        self.host.reboot(self.server)
        self.compare()
        self.assertHas('what it wrote at last', self.first)

    def test_moves_again_and_is_reverted(self):
        """nova-compute is killed before it hears of that."""
        again = self.move_again()
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.guests.unplug(self.server)
        self.host.cloud.set_server(
            self.server, task_state='resize_reverting')
        self.host.cloud.move_allocation(again, self.server)
        self.restart()
        self.compare()
        self.host.cloud.set_server(self.server, task_state=None)
        self.host.reboot(self.server)
        self.compare()
        self.assertHas('what it wrote since', self.second)

    def assertHas(self, data, disk):
        self.assertEqual({self.server: frozenset([disk])},
                         self.host.cloud.running())
        self.assertEqual((data, disk),
                         (self.disks.data_of_disk(disk), self.held()))


class TwoDisksTestCase(base.HostTestCase):

    SSD = 'CUSTOM_ACCELERATOR_SSD'

    def setUp(self):
        super().setUp()
        self.start_host(drivers=('nvme',), nvmes=[
            {'address': f'0000:0{number}:00.0'} for number in (2, 3)])
        self.allocation = self.host.allocation(resource_class=self.SSD)
        self.server = self.host.boot(
            {f'resources1:{self.SSD}': '1'}, self.allocation)


class ComesBackTest(TwoDisksTestCase):
    """A server was evacuated from here, and a live migration brings it back
    before this host has released what it had."""

    def test_that_is_not_the_migrations(self):
        before = self.host.holdings.of(self.server)
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.come(self.server, 'migration',
                       {f'resources1:{self.SSD}': '1'}, self.allocation)
        self.assertEqual(before, self.host.holdings.of(self.server))
        self.assertEqual(1, len(self.host.holdings.of_migration(
            self.server, 'migration')))


@ddt.ddt
class TwoMigrationsTest(TwoDisksTestCase):
    """What an earlier move has left could not be released before the next."""

    @ddt.data('confirm', 'revert')
    def test_one_ends(self, end):
        holdings = self.host.holdings
        holdings.set_aside(self.server, 'first')
        self.host.spawn(self.server)
        holdings.set_aside(self.server, 'second')
        getattr(self.host.accelerators, f'{end}_move')(self.server, 'second')
        self.host.settle()
        self.assertEqual(['first'], [
            claim.consumer_uuid for claim
            in holdings.of(self.server, model.Role.OLD)])
        self.assertEqual(end == 'revert', bool(holdings.of(self.server)))


@ddt.ddt
class UnwrittenTest(TwoDisksTestCase):
    """A server was shelved, which could not be written."""

    def unshelved(self):
        self.host.spawn(self.server)

    def started(self):
        self.host.start_guest(self.server)

    def restored(self):
        self.host.accelerators.restore(
            self.context, self.host.cloud.server(self.server))

    def moved(self):
        self.host.accelerators.set_aside(self.server, 'migration')

    def test_tried_again(self):
        """Others are released meanwhile."""
        releases = self.host.releases
        self.read_only(True)
        self.host.delete(self.server, wait=False)
        self.assertEqual(0, releases.retry())
        self.read_only(False)
        releases.retry()
        self.host.settle()
        self.assertEqual([], self.host.holdings.all())

    @ddt.data('unshelved', 'started', 'restored', 'moved')
    def test_released_first(self, operation):
        """It does not have again what it had."""
        self.context = self.host.cloud.admin_context()
        before, = self.host.holdings.of(self.server)
        self.read_only(True)
        self.host.delete(self.server, wait=False)
        self.read_only(False)
        self.assertEqual([before], self.host.holdings.of(self.server))
        self.host.cloud.allocate(self.server, self.allocation)
        getattr(self, operation)()
        self.host.settle()
        self.assertNotIn(before.uuid, {
            claim.uuid for claim in self.host.holdings.all()})


@ddt.ddt
class ResizeHereTest(base.HostTestCase):
    """A resize on the same host, from or to no accelerators or to as many."""

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.host.upload(FUNCTION)

    @ddt.data((A, None), (None, A), (A, B))
    @ddt.unpack
    def test_reverted_and_confirmed(self, before, after):
        first, second = (self.flavor(address) for address in (before, after))
        server = self.host.boot(*first)
        for ends in self.revert, self.confirm:
            self.host.cloud.set_server(server, extra_specs=second[0])
            migration = self.host.resize_here(server, second[1])
            self.assertHolds(server, after)
            self.assertEqual([vf(before)] if before else [], [
                claim.handle.address for claim
                in self.host.holdings.of(server, model.Role.OLD)])
            ends(server, migration, first)
            self.host.settle()
            left = after if ends == self.confirm else before
            self.assertHolds(server, left)
            self.assertEqual(bool(left), len(self.host.holdings.all()))
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())

    def flavor(self, address):
        """Its extra specs, and what a server of it is allocated."""
        return (base.asks(FUNCTION), self.host.allocation(address)) if (
            address) else ({}, {})

    def revert(self, server, migration, first):
        self.host.cloud.set_server(server, extra_specs=first[0])
        self.host.revert_here(server, migration)
        self.host.start_guest(server)

    def confirm(self, server, migration, first):
        self.host.confirm(server, migration, here=True)

    def assertHolds(self, server, address):
        self.assertHas(server, *([vf(address)] if address else []))
        if address:
            self.assertEqual(plain(FUNCTION), self.host.carries(address))
