# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is released is what was judged, twice."""

import itertools
import threading
import types
from unittest import mock
import uuid

import fixtures

from nova_accel.attach import reconcile
from nova_accel import exception
from nova_accel import model
from tests.host import base
from tests.unit.host import A, B, vf

State = model.ClaimState


class ReconcileTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.server = self.host.boot(base.ONE, self.host.allocation(A))

    def meanwhile(self, name, function, after=True):
        """Once, before or after the cloud answers a question."""
        answer = getattr(self.host.cloud, name)

        def then(*args):
            setattr(self.host.cloud, name, answer)
            found = answer(*args) if after else None
            function()
            return found if after else answer(*args)
        setattr(self.host.cloud, name, then)

    def test_built_or_deleted_meanwhile(self):
        """A server that comes or goes while this compares raises no alarm."""
        gone = self.host.boot(base.ONE, self.host.allocation(B))
        for name, after in itertools.product(
                ('running', 'guest_devices', 'consumers'), (False, True)):
            self.meanwhile(name, lambda: self.host.delete(gone), after)
            self.host.reconciler.run()
            built = []
            self.meanwhile(name, lambda: built.append(self.host.boot(
                base.ONE, self.host.allocation(B))), after)
            self.host.reconciler.run()
            gone, = built
            self.assertHas(gone, vf(B))
            self.host.report()
        self.assertNotIn('no claim', self.log.output)
        self.assertNotIn('not allocated to', self.log.output)
        self.assertNotIn('not on this host', self.log.output)

    def leave(self):
        """The server is gone, and this host was not told."""
        self.host.cloud.delete_server(self.server)
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.cloud.allocate(self.server, None)

    def test_released(self):
        self.assertEqual(0, self.host.reconciler.run())
        self.leave()
        self.assertEqual(1, self.host.reconciler.run())
        self.assertEqual([], self.host.holdings.all())

    def test_guest_or_allocation_or_record_is_enough(self):
        self.host.cloud.allocate(self.server, None)
        self.assertEqual(0, self.host.reconciler.run())
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.assertEqual(0, self.host.reconciler.run())
        self.host.cloud.delete_server(self.server)
        self.host.cloud.allocate(self.server, self.host.allocation(A))
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.assertEqual(0, self.host.reconciler.run())

    def test_guest_alone_is_enough(self):
        """Whether it runs or not: its definition names the device."""
        self.host.cloud.allocate(self.server, None)
        self.host.cloud.delete_server(self.server)
        self.assertEqual(0, self.host.reconciler.run())
        self.host.cloud.stop_guest(self.server)
        self.assertEqual(0, self.host.reconciler.run())
        self.assertEqual([State.BOUND], self.host.states(self.server))

    def after_the_first_judgement(self, function):
        """Nova is the last one that is asked about a server."""
        servers = self.host.cloud.servers

        def then(uuids):
            self.host.cloud.servers = servers
            found = servers(uuids)
            function()
            return found
        self.host.cloud.servers = then

    def claim_ids(self):
        return [c.uuid for c in self.host.holdings.of(self.server)]

    def test_judged_again(self):
        """The server comes back after the first judgement, and before what
        was judged is released."""
        self.leave()
        allocation, uuids = self.host.allocation(A), self.claim_ids()
        self.after_the_first_judgement(lambda: self.host.boot(
            base.ONE, allocation, uuid_=self.server))
        self.assertEqual(0, self.host.reconciler.run())
        self.assertHas(self.server, vf(A))
        self.assertEqual(uuids, self.claim_ids())

    def test_judged_again_after_what_has_begun(self):
        """An operation has begun on the server, and gives it a guest."""
        self.leave()
        allocation, uuids = self.host.allocation(A), self.claim_ids()
        compared, began = threading.Event(), threading.Event()

        def operation():
            with self.host.servers.held(self.server):
                began.set()
                # in this time it would be released; it waits for us instead
                compared.wait(0.3)
                self.host.cloud.add_server(base.ONE, uuid_=self.server)
                self.host.cloud.allocate(self.server, allocation)
            self.host.start_guest(self.server)
        operating = threading.Thread(target=operation)

        def begin():
            operating.start()
            began.wait(base.PATIENCE)
        self.after_the_first_judgement(begin)
        released = self.host.reconciler.run()
        compared.set()
        operating.join()
        self.assertEqual(0, released)
        self.assertHas(self.server, vf(A))
        self.assertEqual(uuids, self.claim_ids())

    def test_judged_otherwise_the_second_time(self):
        """Without an allocation at first, and deleted then: that is judged
        once, and waits for the next comparison."""
        self.host.cloud.lose(self.server)
        self.after_the_first_judgement(self.leave)
        self.assertEqual(0, self.host.reconciler.run())
        self.assertEqual([State.BOUND], self.host.states(self.server))
        self.assertEqual(1, self.host.reconciler.run())

    def test_revert_that_has_begun(self):
        """Placement has the devices at the server again, of which this host
        has not heard."""
        migration = self.host.migrate_away(self.server)
        self.host.cloud.delete_server(self.server)
        self.host.cloud.move_allocation(migration, self.server)
        self.assertEqual(0, self.host.reconciler.run())
        self.host.cloud.add_server(base.ONE, uuid_=self.server)
        self.host.accelerators.revert_move(self.server, migration)
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))

    def test_server_that_is_being_built(self):
        """It has neither guest nor record here yet, and its allocation went
        with a delete that waits for the build."""
        server = self.host.cloud.add_server(base.ONE)
        allocation = self.host.allocation(B)
        with self.host.guests.plugged(
                self.host.cloud.admin_context(),
                self.host.cloud.server(server), lambda: allocation):
            self.host.guests.handles_to_start(
                self.host.cloud.admin_context(),
                self.host.cloud.server(server))
            self.host.cloud.delete_server(server)
            self.assertEqual(0, self.host.reconciler.run())
            self.assertEqual([State.BOUND], self.host.states(server))
        self.assertEqual(1, self.host.reconciler.run())

    def test_placement_does_not_answer(self):
        self.leave()
        self.host.cloud.placement_error = exception.PlacementUnavailable('No')
        self.assertRaises(exception.PlacementUnavailable,
                          self.host.reconciler.run)
        self.assertEqual([State.BOUND], self.host.states(self.server))

    def test_placement_goes_away_between_the_two_looks(self):
        """What the first one found is offered to no server."""
        self.host.cloud.lose(self.server)
        self.after_the_first_judgement(lambda: setattr(
            self.host.cloud, 'placement_error',
            exception.PlacementUnavailable('No')))
        self.assertRaises(exception.PlacementUnavailable,
                          self.host.reconciler.run)
        self.assertEqual({*self.claim_ids()},
                         self.host.inventory.table.unallocated)

    def test_server_comes_back_in_between(self):
        """Between the two looks the server is evacuated to this host again."""
        self.leave()
        allocation = self.host.allocation(A)
        consumers, calls = self.host.cloud.consumers, []

        def first_then_back(provider_uuid):
            found = consumers(provider_uuid)
            if not calls:
                calls.append(provider_uuid)
                self.host.boot(base.ONE, allocation, uuid_=self.server)
            return found
        self.host.cloud.consumers = first_then_back
        self.assertEqual(0, self.host.reconciler.run())
        self.assertHas(self.server, vf(A))
        self.assertEqual([State.BOUND], self.host.states(self.server))

    def left_without_its_device(self):
        """A guest, by a crash of nova-compute."""
        claim, = self.host.holdings.all()
        self.host.store.update([claim], state=State.PROVISIONING)
        self.host.cloud.detach(self.server, [claim.handle])
        self.restart()

    def test_first_look_is_repeated_until_it_ran(self):
        self.left_without_its_device()
        self.config.config(discovery_interval=1, group='accel')
        running = self.host.cloud.running
        self.host.cloud.running = lambda: {}[self.server]
        self.host.reconciler.background.run()
        self.assertIn('Claims could not be compared', self.log.output)
        self.host.cloud.running = running
        self.host.reconciler.background.run()
        self.assertHas(self.server, vf(A))

    def test_first_look_is_repeated_until_it_could_be_looked_at(self):
        self.left_without_its_device()
        self.host.cloud.set_server(self.server, task_state='image_snapshot')
        self.host.reconciler.background.run()
        servers = self.host.cloud.servers
        self.host.cloud.servers = lambda uuids: {}[uuids[0]]
        self.host.reconciler.background.run()
        self.assertIn('Claims could not be compared', self.log.output)
        self.host.cloud.servers = servers
        self.host.reconciler.background.run()
        self.assertEqual([], self.host.devices_of(self.server))
        self.host.cloud.set_server(self.server, task_state=None)
        self.host.reconciler.background.run()
        self.assertHas(self.server, vf(A))
        self.assertEqual([State.BOUND], self.host.states(self.server))

    def test_guest_is_tried_with_a_growing_pause(self):
        """Where its device cannot go back; also while Placement is away; a
        start of the server does not wait for that."""
        self.left_without_its_device()
        now = 1000.0
        self.useFixture(fixtures.MockPatchObject(
            reconcile, 'time',
            types.SimpleNamespace(monotonic=lambda: now)))
        self.host.cloud.attach_error = RuntimeError('QEMU refuses')
        self.host.cloud.placement_error = exception.PlacementUnavailable('No')
        restore = self.host.readiness.restore
        tried = []

        def restored(*args):
            tried.append(now - 1000)
            restore(*args)
        self.host.readiness.restore = restored
        for _ in range(200):
            self.host.reconciler.background.run()
            now += 60
        self.assertEqual(
            [0, 120, 360, 840, 1800, 3720, 7320, 10920], tried)
        self.assertEqual(len(tried), self.log.output.count('QEMU refuses'))
        self.host.cloud.placement_error = None
        self.host.reboot(self.server)
        self.assertHas(self.server, vf(A))
        # from the start
        claim, = self.host.holdings.of(self.server)
        self.host.reconciler.background.run()
        self.host.cloud.detach(self.server, [claim.handle])
        self.host.cloud.attach_error = None
        self.host.reconciler.background.run()
        self.assertHas(self.server, vf(A))

    def test_guest_loses_it_again(self):
        """Once it is back, the pause of the try before is over."""
        self.left_without_its_device()
        for _ in range(2):
            self.host.reconcile()
            self.assertHas(self.server, vf(A))
            self.host.cloud.detach(
                self.server, self.host.guests.handles(self.server))

    def test_owner_is_told(self):
        """While a device cannot go into its guest, and until it is there."""
        self.host.reconcile()
        claim, = self.host.holdings.of(self.server)
        self.host.cloud.detach(self.server, [claim.handle])
        self.host.cloud.attach_error = RuntimeError('QEMU refuses')
        now = 1000.0
        self.useFixture(fixtures.MockPatchObject(
            reconcile, 'time',
            types.SimpleNamespace(monotonic=lambda: now)))
        for _ in range(2):
            # not each time is it tried
            self.host.reconcile()
            self.host.owners.run()
            self.assertEqual(
                {'accel1:health': 'on its way: 1 of 1'},
                self.host.cloud.read()['servers'][self.server]['metadata'])
        self.host.cloud.attach_error = None
        now += reconcile.PAUSE
        self.host.reconcile()
        self.host.owners.run()
        self.assertHas(self.server, vf(A))
        self.assertEqual(
            {}, self.host.cloud.read()['servers'][self.server]['metadata'])

    def test_live_migration_that_has_come(self):
        """While nova-compute was down: the server's, and in its guest."""
        server, move = str(uuid.uuid4()), str(uuid.uuid4())
        self.host.come(server, move, base.ONE, self.host.allocation(B))
        self.host.guest_comes(server)
        self.host.reconcile()
        # Nova has not said yet where it is
        self.assertEqual([], self.host.devices_of(server))
        self.host.is_here(server)
        self.host.reconcile()
        self.assertHas(server, vf(B))
        self.assertIn(f'Server {server} has arrived on this host',
                      self.log.output)

    def test_left_out_in_doubt(self):
        """Of a device that a programming at run time has left out, the owner
        was told; it returns at a reboot, or after nova-compute's start."""
        self.host.reconcile()
        claim, = self.host.holdings.of(self.server)
        self.host.cloud.detach(self.server, [claim.handle])
        self.host.holdings.doubt([claim], 'CRC')
        self.host.reconcile()
        self.host.guests.reattach(self.server, 'A guest runs again')
        self.assertEqual([], self.host.devices_of(self.server))
        self.restart()
        self.host.reconcile()
        self.assertHas(self.server, vf(A))

    def resize_that_fails(self):
        """A server without accelerators is resized to some. The store cannot
        be written once they are claimed, and Nova puts the flavor back, but
        leaves the allocation."""
        server = self.host.cloud.add_server({'resources:VCPU': '1'})
        self.host.cloud.set_server(
            server, extra_specs=base.ONE, task_state='resize_finish')
        self.host.cloud.allocate(server, self.host.allocation(B))
        claim = self.host.holdings.claim

        def claimed(claims):
            claim(claims)
            self.read_only(True)
        self.host.holdings.claim = claimed
        self.assertRaises(exception.AcceleratorsUnavailable,
                          self.host.spawn, server)
        self.read_only(False)
        self.host.cloud.set_server(
            server, extra_specs={'resources:VCPU': '1'}, task_state=None)
        return server

    def test_resize_that_failed_while_nothing_could_be_written(self):
        server = self.resize_that_fails()
        self.assertEqual(1, len(self.host.states(server)))
        self.host.reconcile()
        self.assertEqual([], self.host.states(server))
        self.assertHas(self.server, vf(A))

    def test_the_same_before_nova_compute_is_killed(self):
        """Nothing but the claim is known then. It stays until the server has
        a guest again, which asks for no accelerator."""
        server = self.resize_that_fails()
        self.restart()
        self.host.reconcile()
        self.assertEqual([State.UNKNOWN], self.host.states(server))
        self.host.cloud.start_guest(server, [])
        self.host.cloud.set_server(server, task_state='rebuilding')
        self.host.reconcile()
        self.assertEqual([State.UNKNOWN], self.host.states(server))
        self.host.cloud.set_server(server, task_state=None)
        self.assertEqual(1, self.host.reconciler.run())
        self.assertEqual([], self.host.states(server))
        self.host.cloud.allocate(server, None)
        self.assertHas(self.host.boot(base.ONE, self.host.allocation(B)),
                       vf(B))

    def assertReserved(self, *addresses):
        self.host.reconciler.run()
        self.assertEqual(
            [f'{base.clouds.NODE}_accel_{a}_region0' for a in addresses],
            self.host.fenced())
        self.report()

    def report(self):
        """Nova's own report says the same."""
        before = self.host.fenced()
        self.host.report()
        self.assertEqual(before, self.host.fenced())

    def test_guest_runs_after_an_unshelve_that_failed(self):
        """Nova takes its allocation away and knows no host of it."""
        self.host.delete(self.server)
        self.host.cloud.allocate(self.server, self.host.allocation(A))
        self.assertRaises(RuntimeError, self.host.spawn, self.server,
                          fails_after_start=RuntimeError('No answer'))
        self.assertReserved()
        self.host.cloud.allocate(self.server, None)
        self.host.cloud.servers = lambda uuids: []
        self.assertReserved(A)
        self.host.cloud.placement_error = exception.PlacementUnavailable('No')
        self.assertRaises(exception.PlacementUnavailable,
                          self.host.reconciler.run)
        self.host.cloud.placement_error = None
        self.report()
        self.assertReserved(A)
        self.assertEqual(1, self.log.output.count('has not allocated to it'))
        self.leave()
        self.assertReserved()
        self.assertEqual([], self.host.holdings.all())

    def test_memory_is_allocated_again_with_its_device(self):
        allocation = self.host.allocation(B)
        name = 'CUSTOM_ACCELERATOR_MEMORY_DDR'
        for given in allocation.values():
            given['resources'][name] = 4096
        server = self.host.boot(
            {**base.ONE, f'resources1:{name}': '4096'}, allocation)
        self.host.cloud.lose(server)
        self.host.reconcile()
        self.assertEqual(allocation,
                         self.host.cloud.read()['allocations'][server])

    def test_rebuild_that_failed(self):
        """A server without a guest and without an allocation keeps its
        device, also when nova-compute starts, and gets it again. Once
        Placement takes it, it is allocated again."""
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.cloud.allocate(self.server, None)
        reallocate = self.host.cloud.reallocate
        self.host.cloud.reallocate = mock.Mock(
            side_effect=exception.PlacementUnavailable('Not now.'))
        self.assertReserved(A)
        self.restart()
        self.host.reconciler.run()
        self.assertReserved(A)
        with self.host.guests.plugged(
                self.host.cloud.admin_context(),
                self.host.cloud.server(self.server),
                lambda: self.host.allocation(A)):
            # a rebuild, of which it is not known yet how it ends
            self.assertReserved(A)
            self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))
        self.assertReserved(A)
        self.host.cloud.reallocate = reallocate
        self.host.cloud.set_server(self.server, task_state='rebuilding')
        self.assertReserved(A)
        self.host.cloud.set_server(self.server, task_state=None)
        self.assertReserved()
        self.assertEqual(
            self.host.allocation(A),
            self.host.cloud.read()['allocations'][self.server])

    def test_reserved_and_given_to_the_next_server(self):
        """Which is being built while claims are compared: nothing is said of
        it, and its device is not fenced."""
        self.host.cloud.allocate(self.server, None)
        self.host.cloud.reallocate = mock.Mock(
            side_effect=exception.PlacementUnavailable('Not now.'))
        self.assertReserved(A)
        # its owner does as the log says
        self.leave()
        self.host.guests.unplug(self.server)
        self.host.settle()
        self.assertEqual([], self.host.fenced())
        server = self.host.cloud.add_server(base.ONE)
        self.host.cloud.allocate(server, self.host.allocation(A))
        with self.host.guests.plugged(
                self.host.cloud.admin_context(),
                self.host.cloud.server(server),
                lambda: self.host.allocation(A)):
            self.host.guests.handles_to_start(
                self.host.cloud.admin_context(),
                self.host.cloud.server(server))
            for _ in range(2):
                self.host.reconciler.run()
                self.host.report()
            self.assertEqual([], self.host.fenced())
            self.host.start_guest(server)
        self.assertNotIn(f'Server {server} holds accelerators that',
                         self.log.output)

    def test_lost_and_not_looked_at_again(self):
        """What was seen once is enough to offer it to no server."""
        self.host.reconcile()
        self.host.cloud.allocate(self.server, None)
        error = RuntimeError('nova-conductor did not answer')

        def fails(*args):
            raise error
        self.after_the_first_judgement(
            lambda: setattr(self.host.cloud, 'servers', fails))
        self.assertIs(error, self.assertRaises(
            RuntimeError, self.host.reconciler.run))
        self.assertEqual([f'{base.clouds.NODE}_accel_{A}_region0'],
                         self.host.fenced())

    def test_not_put_back_while_a_move_is_open(self):
        """Of a resize on this host that has not ended it is not known what is
        the server's own."""
        self.host.resize_here(self.server, self.host.allocation(B))
        self.host.cloud.lose(self.server)
        self.host.reconcile()
        self.assertNotIn(self.server, self.host.cloud.read()['allocations'])

    def test_built_and_deleted_meanwhile(self):
        """No claim before, and none after, of a guest in between."""
        built = []
        self.meanwhile('guest_devices', lambda: built.append(self.host.boot(
            base.ONE, self.host.allocation(B))), after=False)
        self.meanwhile('running', lambda: self.host.delete(built[0]))
        self.host.reconciler.run()
        self.assertEqual(1, len(built))
        self.assertNotIn('without a claim', self.log.output)

    def test_release_waits_for_an_operation(self):
        """What an operation of the server is at is not judged."""
        self.host.cloud.delete_server(self.server)
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.cloud.allocate(self.server, None)
        self.operate_on(self.server)
        self.assertRaises(exception.LockTimeout,
                          self.host.maintenance.release, vf(A))
        self.assertEqual([State.BOUND], self.host.states(self.server))

    def lose(self):
        self.host.cloud.allocate(self.server, None)
        self.host.cloud.reallocate = mock.Mock(
            side_effect=exception.PlacementUnavailable('Not now.'))
        self.assertReserved(A)

    def test_lost_and_resized_meanwhile(self):
        """Of which nothing is judged, and which stays lost."""
        self.lose()
        move = str(uuid.uuid4())

        def moves():
            self.host.cloud.set_server(
                self.server, task_state='resize_migrating')
            with self.host.cloud.state() as state:
                state.setdefault('moves', {})[move] = self.server
            self.host.cloud.stop_guest(self.server)
            self.host.accelerators.set_aside(self.server, move)
        self.meanwhile('running', moves)
        self.assertReserved(A)

    def test_lost_and_rebuilt_meanwhile(self):
        self.lose()
        rebuild = self.host.guests.plugged(
            self.host.cloud.admin_context(),
            self.host.cloud.server(self.server),
            lambda: self.host.allocation(A), rebuilt=True)

        def begins():
            self.host.cloud.set_server(self.server, task_state='rebuilding')
            self.host.cloud.stop_guest(self.server, undefine=True)
            rebuild.__enter__()
        self.after_the_first_judgement(begins)
        self.assertReserved(A)
        self.host.start_guest(self.server)
        rebuild.__exit__(None, None, None)

    def test_operator_deletes_an_allocation(self):
        """It is found and put back while the guest runs, and no server is
        sent there."""
        self.host.reconcile()
        self.host.cloud.allocate(self.server, None)
        self.host.reconcile()
        self.assertEqual(
            {self.server: self.host.allocation(A)},
            self.host.cloud.read()['allocations'])
        self.assertHas(self.server, vf(A))
        self.assertEqual([], self.host.fenced())

    def test_device_in_a_guest_without_a_claim(self):
        """It is said once, and fenced until the guest is gone."""
        stranger = str(uuid.uuid4())
        handle, = self.host.inventory.devices[B].region(0).handles
        self.host.cloud.start_guest(stranger, [handle])
        for _ in range(2):
            self.host.reconciler.run()
        self.assertEqual(1, self.log.output.count(
            f'virsh dumpxml {stranger}'))
        self.assertRaises(exception.DeviceUnavailable, self.host.boot,
                          base.ONE, self.host.allocation(B))
        self.host.cloud.stop_guest(stranger, undefine=True)
        self.host.reconciler.run()
        self.assertHas(self.host.boot(base.ONE, self.host.allocation(B)), vf(B))

    def test_old_claim_of_a_confirmed_move(self):
        """Nova confirmed it while this host was down."""
        migration = self.host.migrate_away(self.server)
        self.assertEqual(0, self.host.reconciler.run())
        self.host.cloud.allocate(migration, None)
        self.assertEqual(1, self.host.reconciler.run())
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual([], self.host.fenced())

    def test_allocation_of_a_move_is_put_back(self):
        """The operator has deleted it while the owner may revert the move."""
        migration = self.host.migrate_away(self.server)
        self.host.cloud.set_server(self.server, is_here=False)
        self.host.reconcile()
        self.assertEqual(0, self.host.cloud.asked_open)
        self.host.cloud.lose(migration)
        self.assertEqual(0, self.host.reconciler.run())
        self.assertEqual({migration: self.host.allocation(A)},
                         self.host.cloud.read()['allocations'])
        self.assertNotIn('released', self.log.output)
        self.host.revert(self.server, migration)
        self.assertHas(self.server, vf(A))

    def lost_by_a_move(self):
        """What it had cannot be put back, and is offered to no server."""
        migration = self.host.migrate_away(self.server)
        self.host.cloud.lose(migration)
        self.host.cloud.reallocate = mock.Mock(
            side_effect=exception.PlacementUnavailable('Not now.'))
        self.assertReserved(A)
        self.assertIn('Confirm or revert', self.log.output)
        return migration

    def test_what_a_move_has_lost_and_its_revert(self):
        """Nova finds no allocation to move, and goes on."""
        migration = self.lost_by_a_move()
        error = self.assertRaises(exception.DeviceUnavailable,
                                  self.host.maintenance.release, vf(A))
        self.assertIn('Nova may revert', str(error))
        self.host.accelerators.revert_move(self.server, migration)
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))
        self.assertReserved(A)

    def test_what_a_move_has_lost_and_its_end(self):
        """Confirmed, failed or deleted: Nova has it open no more."""
        migration = self.lost_by_a_move()
        self.host.cloud.allocate(migration, None)
        self.assertEqual(1, self.host.reconciler.run())
        self.assertEqual([], self.host.holdings.all())
        self.assertReserved()

    def test_move_that_may_have_failed(self):
        """Nova deletes the allocation before it says so: nothing is put back
        in between."""
        migration = self.host.migrate_away(self.server)
        self.host.cloud.set_server(self.server, task_state='resize_finish')
        self.host.cloud.lose(migration)
        self.assertReserved(A)
        self.assertEqual({}, self.host.cloud.read()['allocations'])
        self.host.cloud.delete_server(self.server)
        self.assertEqual(1, self.host.reconciler.run())

    def test_nova_does_not_say_whether_a_move_is_open(self):
        migration = self.host.migrate_away(self.server)
        self.host.cloud.lose(migration)
        self.host.cloud.open_moves = mock.Mock(side_effect=RuntimeError)
        self.assertRaises(RuntimeError, self.host.reconciler.run)
        self.assertEqual([State.BOUND], self.host.states(self.server))


class TwoTest(base.HostTestCase):
    """A running guest has lost two devices, and one cannot go back."""

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.server = self.host.boot(
            {**base.ONE, 'group_policy': 'isolate',
             **{key.replace('1', '2', 1): value
                for key, value in base.ONE.items()}},
            {**self.host.allocation(A), **self.host.allocation(B)})
        self.host.reconcile()
        self.host.cloud.detach(
            self.server, self.host.guests.handles(self.server))

    def test_other_goes_back(self):
        takes = self.host.cloud._takes

        def refuses(handles, guest):
            if vf(A) in [handle.address for handle in handles]:
                raise RuntimeError('VFIO refuses this one')
            takes(handles, guest)
        self.host.cloud._takes = refuses
        self.host.reconciler.background.run()
        self.assertEqual([vf(B)], self.host.devices_of(self.server))
        of = {c.handle.address: c.state
              for c in self.host.holdings.of(self.server)}
        self.assertEqual({vf(A): model.ClaimState.UNKNOWN,
                          vf(B): model.ClaimState.BOUND}, of)


class PartTest(base.HostTestCase):
    """Placement has allocated fewer of a pool than a server holds, as after a
    resize that failed on its destination."""

    SSD = 'CUSTOM_ACCELERATOR_SSD'

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': f'0000:0{n}:00.0'}
                               for n in (2, 3, 4)], drivers=('nvme',))
        self.server = self.host.boot(
            {f'resources1:{self.SSD}': '2'}, self.allocation(2))
        self.host.report()
        self.host.cloud.allocate(self.server, self.allocation(1))

    def allocation(self, amount):
        return self.host.allocation(resource_class=self.SSD, amount=amount)

    def test_allocated_again(self):
        self.host.reconcile()
        self.assertEqual({self.server: self.allocation(2)},
                         self.host.cloud.read()['allocations'])
        self.assertEqual(2, len(self.host.holdings.of(self.server)))

    def test_withheld(self):
        """As many as are not allocated: the third disk can be had."""
        reallocate = self.host.cloud.reallocate
        self.host.cloud.reallocate = mock.Mock(
            side_effect=exception.PlacementUnavailable('Not now.'))
        self.host.reconciler.run()
        self.host.report()
        self.assertEqual(2, self.total())
        other = self.host.boot({f'resources1:{self.SSD}': '1'},
                               self.allocation(1))
        self.host.delete(other)
        self.host.cloud.reallocate = reallocate
        self.host.reconciler.run()
        self.host.report()
        self.assertEqual(3, self.total())
        self.assertEqual({self.server: self.allocation(2)},
                         self.host.cloud.read()['allocations'])

    def total(self):
        pool, = self.allocation(1)
        item = self.host.cloud.read()['providers'][pool]['inventory'][self.SSD]
        self.assertEqual(0, item['reserved'])
        return item['total']
