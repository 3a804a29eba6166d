# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A server that had devices starts with them, or not at all."""

from unittest import mock
import uuid

import ddt

from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from tests.host import base
from tests.host import cloud as clouds
from tests.unit.host import A, B, FIRST, FUNCTION, OTHER, plain, vf

State = model.ClaimState
DISK = '0000:02:00.0'
SSD = 'CUSTOM_ACCELERATOR_SSD'
NO_ANSWER = exception.PlacementUnavailable('Placement answered 500.')


class NameTest(base.HostTestCase):
    """Placement has a provider under one of our names elsewhere."""

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.name = naming.device_provider_name(clouds.NODE, B)
        self.host.cloud.other_providers = {'elsewhere': {
            'name': self.name, 'inventory': {}, 'traits': []}}
        # as before the first report
        with self.host.cloud.state() as state:
            state['providers'] = {}

    def names(self):
        return {provider['name'] for provider
                in self.host.cloud.read()['providers'].values()}

    def test_other_devices_are_reported(self):
        self.host.report()
        self.assertEqual({clouds.NODE, f'{clouds.NODE}_accel_{A}',
                          f'{clouds.NODE}_accel_{A}_region0'}, self.names())
        self.assertIn('elsewhere', self.log.output)
        # the operator deletes it
        self.host.cloud.other_providers.clear()
        self.host.report()
        self.assertIn(self.name, self.names())
        # and then there is nothing to ask for
        named = self.host.cloud.named
        self.host.report()
        self.assertEqual(named, self.host.cloud.named)

    def test_placement_does_not_answer(self):
        self.host.cloud.other_providers.clear()
        self.host.cloud.placement_error = NO_ANSWER
        self.host.report()
        self.assertIn(self.name, self.names())


@ddt.ddt
class StartTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.host.upload(FUNCTION)
        self.specs = base.asks(FUNCTION)
        self.server = self.host.boot(
            self.specs, self.host.allocation(A))
        self.claim, = self.host.holdings.all()

    def left_by_a_crash(self, state):
        self.host.store.update([self.claim], state=state)

    def test_placement_is_not_asked(self):
        asked = self.host.cloud.asked
        self.host.cloud.placement_error = NO_ANSWER
        self.host.reboot(self.server)
        self.assertHas(self.server, vf(A))
        self.assertEqual(asked, self.host.cloud.asked)

    @ddt.data(State.INITIAL, State.PROVISIONING, State.UNKNOWN)
    def test_half_done_and_placement_does_not_answer(self, state):
        self.left_by_a_crash(state)
        self.host.cloud.placement_error = NO_ANSWER
        self.assertRaises(exception.PlacementUnavailable,
                          self.host.reboot, self.server)
        self.assertIsNone(self.host.devices_of(self.server))
        self.assertEqual([state], self.host.states(self.server))
        self.host.cloud.placement_error = None
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))
        self.assertEqual([State.BOUND], self.host.states(self.server))

    @ddt.data(State.INITIAL, State.PROVISIONING, State.UNKNOWN)
    def test_half_done_and_nothing_is_allocated(self, state):
        self.left_by_a_crash(state)
        self.host.cloud.allocate(self.server, None)
        error = self.assertRaises(exception.DeviceUnavailable,
                                  self.host.reboot, self.server)
        self.assertIn('Placement has none allocated to it', str(error))
        self.assertIsNone(self.host.devices_of(self.server))
        self.assertEqual([state], self.host.states(self.server))

    def test_bound_and_nothing_is_allocated(self):
        """As after a rebuild that failed: Nova took the allocation away."""
        self.host.cloud.allocate(self.server, None)
        self.host.reboot(self.server)
        self.assertHas(self.server, vf(A))

    def test_without_a_claim(self):
        """As after a store that was lost."""
        self.host.store.remove([self.claim])
        self.host.cloud.placement_error = NO_ANSWER
        self.assertRaises(exception.PlacementUnavailable,
                          self.host.reboot, self.server)
        self.host.cloud.placement_error = None
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))

    def test_killed_at_each_state_then_restarted(self):
        for state in (s for s in State if s is not State.WAITING):
            self.left_by_a_crash(state)
            self.restart()
            self.host.reboot(self.server)
            self.assertHas(self.server, vf(A))
            self.assertEqual(plain(FUNCTION), self.host.carries(A))
            self.claim, = self.host.holdings.all()

    def test_plug_fails_and_the_store_as_well(self):
        """What could not be released is started with."""
        image = self.host.upload(OTHER)
        server = self.host.cloud.add_server(base.asks(OTHER))
        self.host.cloud.allocate(server, self.host.allocation(B))
        self.host.kernel.set_fault(B, pr_error='crc')
        releasing = self.host.holdings.releasing
        self.host.holdings.releasing = mock.Mock(
            side_effect=exception.AcceleratorsUnavailable('The disk is full.'))
        self.assertRaises(exception.AcceleratorError, self.host.spawn, server)
        self.host.holdings.releasing = releasing
        self.host.kernel.set_fault(B, pr_error=None)
        self.host.start_guest(server)
        self.assertHas(server, vf(B))
        self.assertEqual(image, self.host.holdings.of(
            server)[0].restore_bitstream)

    def test_host_boot(self):
        """The card has its first function again, and the guest gets its own
        back: from the cache, without Placement and without Glance."""
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        self.assertEqual(plain(FIRST), self.host.carries(A))
        self.host.cloud.placement_error = NO_ANSWER
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    def test_rebuild_keeps(self):
        self.host.rebuild(self.server)
        self.assertHas(self.server, vf(A))
        claim, = self.host.holdings.all()
        self.assertEqual(self.claim.uuid, claim.uuid)

    def test_rebuild_that_fails_keeps(self):
        """Nothing was claimed for it, so nothing is undone."""
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.assertRaises(
            RuntimeError, self.host.spawn, self.server, rebuilt=True,
            fails_after_start=RuntimeError('the network is down'))
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.cloud.allocate(self.server, None)
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))

    def test_rebuild_and_placement_says_nothing(self):
        self.left_by_a_crash(State.UNKNOWN)
        self.host.cloud.allocate(self.server, {})
        self.assertRaises(exception.DeviceUnavailable,
                          self.host.rebuild, self.server)
        self.assertEqual(1, len(self.host.holdings.all()))

    def test_quarantine_does_not_stop_a_restart(self):
        self.host.kernel.set_fault(B, pr_error='crc')
        self.host.upload(OTHER)
        self.assertRaises(
            exception.ProgrammingFailed, self.host.boot, base.asks(OTHER),
            self.host.allocation(B))
        self.host.reboot(self.server)
        self.assertHas(self.server, vf(A))

    def test_revert(self):
        migration = self.host.migrate_away(self.server)
        self.assertEqual([], self.host.guests.handles(self.server))
        self.host.revert(self.server, migration)
        self.assertHas(self.server, vf(A))

    def test_revert_whose_allocation_did_not_come_back(self):
        """Nova leaves it in ERROR, and its owner reboots it."""
        self.host.migrate_away(self.server)
        self.host.cloud.allocate(self.server, {
            str(uuid.uuid4()): {'resources': {base.FPGA: 1}}})
        error = self.assertRaises(
            exception.DeviceUnavailable, self.host.reboot, self.server)
        self.assertIn('Placement has none allocated to it', str(error))

    def test_build_that_fails_while_the_store_is_locked(self):
        """The locked store adds no error for Nova. The next comparison
        releases what the server had."""
        server = self.host.cloud.add_server(base.ONE)
        self.host.delete(self.server)
        self.host.cloud.allocate(server, self.host.allocation(A))
        context = self.host.cloud.admin_context()
        plugs = self.host.guests
        plugs.start_plug(
            context, self.host.cloud.server(server),
            lambda: self.host.cloud.allocations(context, server))
        self.host.guests.handles(server)
        with mock.patch.object(
                self.host.store, 'update',
                side_effect=exception.AcceleratorsUnavailable('Locked.')):
            plugs.abandon(server)
        self.assertFalse(plugs.is_under_way(server))
        self.assertEqual(1, len(self.host.holdings.all()))
        self.host.cloud.allocate(server, None)
        self.host.cloud.delete_server(server)
        self.host.reconciler.run()
        self.assertEqual([], self.host.holdings.all())

    def test_move_that_failed(self):
        """Nova gave the allocation back and told this host nothing."""
        migration = self.host.migrate_away(self.server)
        self.host.cloud.placement_error = NO_ANSWER
        self.assertRaises(exception.PlacementUnavailable,
                          self.host.reboot, self.server)
        self.host.cloud.placement_error = None
        self.host.cloud.move_allocation(migration, self.server)
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))


class DiskTest(base.HostTestCase):
    """What is on a disk tells whether its claim stayed."""

    SPECS = {f'resources1:{SSD}': '1'}

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': DISK}], drivers=('nvme',))
        self.server = self.host.boot(
            self.SPECS, self.host.allocation(resource_class=SSD))
        self.simulated.kernel.write_disk(DISK, 'a secret')
        self.claim, = self.host.holdings.all()

    def test_failed_start_erases_nothing(self):
        self.host.store.update([self.claim], state=State.UNKNOWN)
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.simulated.kernel.set_fault(DISK, vanish=True)
        self.host.inventory.scanner.scan()
        self.assertRaises(exception.AcceleratorError,
                          self.host.start_guest, self.server)
        now, = self.host.holdings.all()
        self.assertEqual(self.claim.uuid, now.uuid)
        self.assertIsNot(State.DELETING, now.state)
        self.simulated.kernel.set_fault(DISK, vanish=None)
        self.host.inventory.scanner.scan()
        self.host.start_guest(self.server)
        self.assertHas(self.server, DISK)
        self.assertEqual('a secret',
                         self.simulated.kernel.data_of_disk(DISK))

    def test_delete_erases(self):
        self.host.delete(self.server)
        self.assertEqual('', self.simulated.kernel.data_of_disk(DISK))
        self.assertEqual([], self.host.holdings.all())

    def test_spawn_that_fails_after_the_guest_started(self):
        """The device is not taken from under the guest, nor erased."""
        self.host.delete(self.server)
        server = self.host.cloud.add_server(self.SPECS)
        self.host.cloud.allocate(
            server, self.host.allocation(resource_class=SSD))
        self.assertRaises(
            RuntimeError, self.host.spawn, server,
            fails_after_start=RuntimeError('no event from Neutron'))
        self.assertHas(server, DISK)
        self.assertEqual([State.BOUND], self.host.states(server))
        # reconciliation counts it for the server while its guest runs, and
        # frees it once server and guest are gone
        self.host.cloud.allocate(server, None)
        self.assertEqual(0, self.host.reconciler.run())
        self.assertIn(SSD, str(self.host.cloud.allocations(
            self.host.cloud.admin_context(), server)))
        self.host.cloud.stop_guest(server, undefine=True)
        self.host.cloud.delete_server(server)
        self.host.cloud.allocate(server, None)
        self.assertEqual(1, self.host.reconciler.run())
        self.assertEqual([], self.host.holdings.all())


@ddt.ddt
class SmallerResizeTest(base.HostTestCase):
    """A resize to fewer devices, on the same host, fails in its end: Nova
    leaves what it allocated for the new flavor, and puts the old one back."""

    CLASS = 'CUSTOM_ACCELERATOR_GPU'

    def asks(self, *amounts):
        return {f'resources{n}:{self.CLASS}': str(amount)
                for n, amount in enumerate(amounts, 1)}

    @ddt.data((2,), (1, 1))
    def test_server_has_what_is_allocated(self, amounts):
        self.start_host(gpus=[{'address': f'0000:0{n}:00.0'}
                              for n in range(1, 4)], drivers=('gpu',))
        pool = self.host.allocation(None, self.CLASS, 1)
        server = self.host.boot(
            self.asks(*amounts), self.host.allocation(None, self.CLASS, 2))
        before = self.host.devices_of(server)
        migration = self.host.migrate_away(server)
        self.host.cloud.set_server(server, extra_specs=self.asks(1))
        self.host.cloud.allocate(server, pool)

        def fail():
            with self.host.guests.plugged(
                    self.host.cloud.admin_context(),
                    self.host.cloud.server(server),
                    lambda: self.host.cloud.allocations(None, server)):
                raise RuntimeError('libvirt')
        self.assertRaises(RuntimeError, fail)
        self.host.settle()
        self.host.cloud.set_server(server, extra_specs=self.asks(*amounts))
        self.host.cloud.allocate(migration, None)
        self.host.reboot(server)
        device, = self.host.devices_of(server)
        self.assertIn(device, before)
        self.host.reconcile()
        self.host.reconcile()
        self.assertEqual(1, len(self.host.holdings.all()))
        # and Placement offers as many as there are
        self.host.report()
        self.host.boot(self.asks(2),
                       self.host.allocation(None, self.CLASS, 2))
        self.host.reboot(server)
        self.assertHas(server, device)
