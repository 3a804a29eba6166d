# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Operations that leave the devices alone, snapshots, and interruptions.

As in test_operations, the docstring of a test is its row in
docs/source/operations.rst.
"""

from unittest import mock
import uuid

from nova import context as nova_context
from nova import objects
from nova.network import neutron
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.virt.libvirt import driver as libvirt_driver
from nova.volume import cinder

from nova_accel import model
from nova_accel.api import expansion
from nova_accel.virt import guest
from tests.functional import cloud
from tests.functional import guests
from tests.functional import operations
from tests.functional import process


class GuestTest(operations.StepsMixin, operations.OperationsTestBase):
    """Operations that leave the devices alone."""

    def setUp(self):
        super().setUp()
        self.useFixture(guests.LiveSnapshots())
        self.image = self.glance.service.upload(
            self.glance.client, 'guest', b'with an agent',
            visibility='public', hw_qemu_guest_agent='yes')['id']
        self.server = self.boot(self.specs, image_uuid=self.image)
        self.before = self.assertHas(self.server)
        self.host = self.host_of(self.server)

    def assertKept(self):
        self.assertEqual(self.before, self.assertHas(self.server))
        self.assertFunction(self.before, self.function)

    def act(self, **action):
        self.api.post_server_action(self.server['id'], action)
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None})

    def step_password_and_crash_dump(self):
        """Set password, trigger crash dump: untouched."""
        self.act(changePassword={'adminPass': 'secret'})
        self.act(trigger_crash_dump=None)

    def step_volumes_and_interfaces(self):
        """Attach or detach a volume or an interface: untouched."""
        # this libvirt does not tell when a device is out
        self.flags(device_detach_timeout=1, device_detach_attempts=1,
                   group='libvirt')
        volume = self.cinder.IMAGE_BACKED_VOL
        # the imitation of Nova 31 does not show which volume it is
        self.assertNotIn('dev="vdc"', self.guest_xml(self.server))
        self.api.post_server_volume(
            self.server['id'], {'volumeAttachment': {'volumeId': volume}})
        self.notifier.wait_for_versioned_notifications(
            'instance.volume_attach.end', timeout=process.PATIENCE)
        self.assertIn('dev="vdc"', self.guest_xml(self.server))
        self.assertKept()
        self.api.delete_server_volume(self.server['id'], volume)
        self._wait_for_volume_detach(self.server['id'], volume)
        self.assertKept()
        port = self.neutron.port_1
        self._attach_interface(self.server, port['id'])
        self.assertIn(port['mac_address'], self.guest_xml(self.server))
        self.assertKept()
        self._detach_interface(self.server, port['id'])

    def snapshot(self, action='createImage', **more):
        """The id of the image, when it is there."""
        image = self.api.post_server_action(
            self.server['id'],
            {action: {'name': 'snapshot', **more}})['image_id']
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None})
        self.assertEqual(
            'active', self.glance.client.images.get(image)['status'])
        return image

    def step_snapshot(self):
        """Snapshot, backup: the guest runs on with its devices."""
        with mock.patch.object(fakelibvirt.Domain, 'managedSave') as saved:
            self.snapshot()
            self.assertKept()
            self.snapshot('createBackup', backup_type='daily', rotation=1)
            self.assertKept()
        saved.assert_not_called()

    def step_cold_snapshot(self):
        """Cold snapshot: the guest is saved without devices, and gets the same
        devices again."""
        self.flags(disable_libvirt_livesnapshot=True, group='workarounds')
        managed_save = []
        save = fakelibvirt.Domain.managedSave

        def saved(domain, *args):
            managed_save.append(self.hostdevs(self.server))
            return save(domain, *args)
        with mock.patch.object(fakelibvirt.Domain, 'managedSave', saved):
            self.snapshot()
        self.assertEqual([[]], managed_save)

    def step_boot_from_snapshot(self):
        """Create from a snapshot of a server with devices: refused if the
        flavor has devices, unless the operator allows it (``[accel]
        allow_snapshot_boot``)."""
        image = self.snapshot()
        body = {'server': self._build_server(
            image_uuid=image, networks='none',
            flavor_id=self._create_flavor(extra_spec=self.specs))}
        response = self.api.api_post(
            '/servers', body, check_response_status=[400])
        message = response.body['badRequest']['message']
        self.assertIn(image, message)
        self.assertIn('allow_snapshot_boot', message)
        plain = self._create_server(
            image_uuid=image, networks='none', flavor_id=self.plain)
        self.assertEqual([], self.hostdevs(plain))
        self.flags(allow_snapshot_boot=True, group='accel')
        allowed = self.boot(self.specs, image_uuid=image)
        self.assertHas(allowed)
        for server in plain, allowed:
            self._delete_server(server)

    def step_snapshot_of_a_volume(self):
        """Rebuild with a snapshot of another server with devices, even of a
        server that boots from a volume: refused by nova-api, like a create
        from this snapshot."""
        server = self.api.post_server({'server': {
            **self._build_server(image_uuid='', networks='none',
                                 flavor_id=self._create_flavor(
                                     extra_spec=self.specs)),
            'block_device_mapping_v2': [{
                'boot_index': 0, 'uuid': self.cinder.IMAGE_BACKED_VOL,
                'source_type': 'volume', 'destination_type': 'volume'}]}})
        server = self._wait_for_state_change(server, 'ACTIVE')
        get = cinder.API.get

        def described(*args, **kwargs):
            # what Nova's imitation of Cinder leaves out
            return {**get(*args, **kwargs), 'display_description': ''}
        with mock.patch.object(cinder.API, 'get', described), \
                mock.patch.object(
                    cinder.API, 'create_snapshot_force',
                    lambda *args: {'id': str(uuid.uuid4())}):
            response = self.api.api_post(
                f'/servers/{server["id"]}/action',
                {'createImage': {'name': 'of a volume'}})
        image = response.body['image_id']
        body = {'server': self._build_server(
            image_uuid=image, networks='none',
            flavor_id=self._create_flavor(extra_spec=self.specs))}
        for path, body in (
                ('/servers', body),
                (f'/servers/{self.server["id"]}/action',
                 {'rebuild': {'imageRef': image}})):
            response = self.api.api_post(path, body,
                                         check_response_status=[400])
            self.assertIn('is a snapshot of a server with accelerators',
                          response.body['badRequest']['message'])
        self._delete_server(server)
        # its own is what its devices are
        self.api.post_server_action(self.server['id'], {
            'rebuild': {'imageRef': self.snapshot()}})
        self._wait_for_server_parameter(self.server, {
            'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})

    def step_live_migration_refused_by_the_host(self):
        """Live migration without ``accel:live_migration``, if nova-api does
        not refuse it: refused by the compute host before anything moves."""
        with mock.patch.object(
                expansion, '_has_accelerators', return_value=False):
            self.admin_api.post_server_action(self.server['id'], {
                'os-migrateLive': {'host': None, 'block_migration': 'auto'}})
            self._wait_for_migration_status(self.server, ['error'])
            self._wait_for_server_parameter(
                self.server, {'OS-EXT-STS:task_state': None,
                              'status': 'ACTIVE'})
        self.assertEqual(self.host, self.host_of(self.server))

    def test_evacuation_fails(self):
        """An evacuation that fails: released on the new host; the dead host
        keeps the old devices."""
        other = next(h for h in self.HOSTS if h != self.host)
        self.break_cards(other)
        self.computes[self.host].stop()
        service = self.computes[self.host].service_ref.uuid
        self.admin_api.put_service(service, {'forced_down': 'true'})
        self._evacuate_server(self.server, expected_state='ERROR',
                              expected_migration_status='failed')
        self.assertIn('CRC', self.fault(self.server))
        self.assertEqual([], self.claims(other))
        self.assertEqual(self.before, self.held(self.server))
        self.assertEqual(
            [c.provider_uuid for c in self.claims(self.host)],
            self.allocated(self.server['id']))

    def step_suspend_fails(self):
        """Suspend, if the guest does not release a device: the guest continues
        with all its devices."""
        self.suspend_fails()

    def suspend_fails(self):
        """What the guest was asked for, and did not do in time."""
        with mock.patch.object(guest, '_DETACH_SECONDS', 0), \
                mock.patch.object(
                    fakelibvirt.Domain, 'detachDeviceFlags') as asked:
            self.api.post_server_action(self.server['id'], {'suspend': None})
            event = self._wait_for_action_fail_completion(
                self.server, 'suspend', 'compute_suspend_instance')
        self.assertIn('must release', event['details'])
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})
        return asked.call_args

    def test_suspended_again(self):
        """Suspend again, while the guest has not yet released a device: the
        guest continues with all its devices."""
        self.suspend_fails()
        refused = fakelibvirt.make_libvirtError(
            fakelibvirt.libvirtError, 'Device hostdev0 is already in the '
            'process of unplug',
            error_code=fakelibvirt.VIR_ERR_INTERNAL_ERROR)
        with mock.patch.object(guest, '_DETACH_SECONDS', 0), \
                mock.patch.object(fakelibvirt.Domain, 'detachDeviceFlags',
                                  side_effect=refused):
            self.act(suspend=None)
        self.assertEqual(
            'ACTIVE', self.api.get_server(self.server['id'])['status'])
        self.assertKept()
        self.delete_all()

    def step_device_cannot_go_back(self):
        """Resume or cold snapshot, if libvirt cannot attach a device
        afterwards: succeeds; the guest gets the device when nova-compute next
        compares claims."""
        self.flags(disable_libvirt_livesnapshot=True, group='workarounds')
        self._suspend_server(self.server)
        self.goes_back_later(lambda: self._resume_server(self.server))
        self.goes_back_later(self.snapshot)

    def goes_back_later(self, act):
        with mock.patch.object(
                fakelibvirt.Domain, 'attachDeviceFlags',
                side_effect=fakelibvirt.libvirtError('it is full')):
            act()
        self.assertEqual([], self.hostdevs(self.server))
        self.compare()
        self.assertKept()

    def test_guest_lets_go_late(self):
        """Suspend, if the guest releases a device after the time limit: the
        guest gets the device again when nova-compute next compares claims."""
        reconciler = self.computes[self.host].driver.parts.reconciler
        late = self.suspend_fails()
        self.domain(self.server).detachDeviceFlags(*late.args, **late.kwargs)
        self.assertEqual([], self.hostdevs(self.server))
        # not while Nova is at it
        self.set_in_nova(task_state='suspending')
        reconciler.run()
        self.assertEqual([], self.hostdevs(self.server))
        self.set_in_nova(task_state=None)
        reconciler.run()
        self.assertKept()
        # nor one that is saved without devices
        self._suspend_server(self.server)
        reconciler.run()
        self.assertEqual([], self.hostdevs(self.server))
        self._resume_server(self.server)
        self.assertKept()
        self.delete_all()

    def set_in_nova(self, **changes):
        instance = objects.Instance.get_by_uuid(
            nova_context.get_admin_context(), self.server['id'])
        instance.update(changes)
        instance.save()

    def step_half_prepared(self):
        """Start after nova-compute was killed in the middle of a resize or an
        unshelve: nova-compute first completes the preparation of the
        devices."""
        self._stop_server(self.server)
        parts = self.parts(self.host)
        parts.store.update(
            parts.store.claims(), state=model.ClaimState.UNKNOWN,
            restore_function=None, restore_bitstream=None)
        self.forget_functions(self.host)
        self._start_server(self.server)
        self.assertKept()
        claim, = self.claims()
        self.assertEqual(model.ClaimState.BOUND, claim.state)

    def killed(self, what, where, **action):
        """nova-compute goes where it says, and starts again."""
        with mock.patch.object(
                what, where, side_effect=operations.Killed) as called:
            self.api.post_server_action(self.server['id'], action)
            self._wait_for_assert(called.assert_called)
            self.assertIsNotNone(self.api.get_server(
                self.server['id'])['OS-EXT-STS:task_state'])
        return self.restart_compute_service(self.host)

    def step_suspend_killed(self):
        """nova-compute is killed during a suspend: the guest gets its devices
        back when the operator has reset the state of the server."""
        compute = self.killed(fakelibvirt.Domain, 'managedSave', suspend=None)
        compute.driver.parts.reconciler.run()
        self.assertEqual([], self.hostdevs(self.server))
        self.admin_api.post_server_action(
            self.server['id'], {'os-resetState': {'state': 'active'}})
        compute.driver.parts.reconciler.run()

    def step_killed_in_hard_reboot(self):
        """nova-compute is killed during a hard reboot: Nova repeats the reboot
        when nova-compute starts, with the same devices."""
        self.killed(libvirt_driver.LibvirtDriver, '_create_guest_with_network',
                    reboot={'type': 'HARD'})
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})

    # Nova leaves the allocation of the migration
    @cloud.fresh
    def test_killed_in_resize(self):
        """nova-compute of the source is killed during a resize: when it
        starts, it restores the server with the same devices."""
        self.killed(neutron.API, 'migrate_instance_start', migrate=None)
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})
        self.assertEqual(self.host, self.host_of(self.server))
        self.computes[self.host].driver.parts.reconciler.run()
        self.assertEqual(self.before, self.held(self.server))
        self.assertEqual([self.before[0][1]], self.hostdevs(self.server))
        self.assertFunction(self.before, self.function)
        self.assertEqual(1, len(self.claims()))

    def test_killed_in_delete(self):
        """nova-compute is killed during a delete: released when nova-compute
        starts."""
        self.killed(self.parts(self.host).store, 'update',
                    forceDelete=None)
        self._wait_until_deleted(self.server)
        self._wait_for_assert(lambda: self.assertEqual([], self.claims()))
        self.delete_all()

    def step_host_boot_without_resume(self):
        """The host reboots, without ``resume_guests_state_on_host_boot``:
        the guest stays down, and starts with the same devices."""
        kernel, compute = self.kernel(self.host), self.computes[self.host]
        compute.stop()
        connection = compute.driver._host.get_connection()
        for domain in connection._vms.values():
            domain.destroy()
        kernel.power_cycle()
        compute = self.restart_compute_service(self.host)
        compute.manager._sync_power_states(nova_context.get_admin_context())
        self._wait_for_state_change(self.server, 'SHUTOFF')
        self.assertEqual(self.before, self.held(self.server))
        self._start_server(self.server)
