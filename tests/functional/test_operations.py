# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One server operation after another, each with what it does to devices.

The docstring of each test and step is its row in docs/source/operations.rst.
"""

from unittest import mock

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.tests.fixtures import libvirt as fakelibvirt

from nova_accel import model
from nova_accel import naming
from tests.functional import base
from tests.functional import operations


CARDS = '0000:5e:00.0', '0000:af:00.0'


class KeepMixin(operations.StepsMixin):
    """A server that has a device, and what is seen with each kind of card."""

    def setUp(self):
        super().setUp()
        self.server = self.boot(self.specs)
        self.before = self.assertHas(self.server)
        self.claimed = self.claim_ids()

    def claim_ids(self):
        """Of the server: what was released and claimed again has others."""
        return sorted(claim.uuid for claim in self.claims()
                      if claim.instance_uuid == self.server['id'])

    def assertKept(self):
        self.assertEqual(self.before, self.assertHas(self.server))
        self.assertEqual(self.claimed, self.claim_ids())
        self.assertFunction(self.before, self.function)

    def step_stop_start(self):
        """Stop, start: the same devices."""
        self._stop_server(self.server)
        self.assertEqual(self.before, self.held(self.server))
        self._start_server(self.server)

    def step_suspend_resume(self):
        """Suspend: the guest is saved without its devices; the server keeps
        them, and resume attaches them again."""
        server = self._suspend_server(self.server)
        self.assertEqual([], self.hostdevs(server))
        self.assertEqual(self.before, self.held(server))
        self._resume_server(server)


class KeepTest(KeepMixin, operations.OperationsTestBase):
    """Operations through which a server keeps its devices."""

    def test_delete(self):
        """Delete, in any state: released."""
        self.flags(shelved_offload_time=-1)
        server = self.server
        for state, action in (('ACTIVE', None), ('SHUTOFF', 'os-stop'),
                              ('PAUSED', 'pause'), ('SUSPENDED', 'suspend'),
                              ('RESCUE', 'rescue'), ('SHELVED', 'shelve')):
            if action:
                server = self.boot(self.specs)
                self.api.post_server_action(server['id'], {action: None})
            self._wait_for_state_change(server, state)
            self.assertEqual(1, len(self.held(server)), state)
            self.delete_all()

    def step_reboot(self):
        """Soft and hard reboot: the same devices."""
        self._reboot_server(self.server)
        self.assertHas(self.server)
        self._reboot_server(self.server, hard=True)

    def step_pause_lock(self):
        """Pause, unpause, lock, unlock: the same devices."""
        for action in ('pause', 'unpause', 'lock', 'unlock'):
            self.api.post_server_action(self.server['id'], {action: None})
            self._wait_for_state_change(
                self.server, 'PAUSED' if action == 'pause' else 'ACTIVE')

    def step_resume_fails(self):
        """Resume, if a function cannot be restored: the server stays
        suspended, with its memory and its devices."""
        server = self._suspend_server(self.server)
        host = self.before[0][0]
        self.forget_functions(host)
        self.break_cards(host)
        self.api.post_server_action(server['id'], {'resume': None})
        event = self._wait_for_action_fail_completion(
            server, 'resume', 'compute_resume_instance')
        self.assertIn('CRC', event['details'])
        self._wait_for_server_parameter(
            server, {'OS-EXT-STS:task_state': None, 'status': 'SUSPENDED'})
        self.assertEqual(self.before, self.held(server))
        self.mend_cards()
        self._resume_server(server)

    def step_rescue_unrescue(self):
        """Rescue: the rescue guest has the devices as well."""
        self._rescue_server(self.server)
        self.assertHas(self.server)
        self._unrescue_server(self.server)

    def step_unrescue_of_a_guest_that_lacked_its_devices(self):
        host, address = self.before[0]
        cloud = self.computes[host].driver.cloud
        cloud.detach(self.server['id'], self.parts(host).guests.handles(
            self.server['id']))
        self.assertEqual([], self.hostdevs(self.server))
        self._rescue_server(self.server)
        self.assertHas(self.server)
        # a guest that has no room for it while it runs has it at its start
        with mock.patch.object(
                fakelibvirt.Domain, 'attachDeviceFlags',
                side_effect=fakelibvirt.libvirtError('no room')):
            self._unrescue_server(self.server)

    def step_rebuild(self):
        """Rebuild: the same devices, with the function they carry."""
        self._rebuild_server(self.server, self.other_image())

    def other_image(self, **properties):
        return self.glance.service.upload(
            self.glance.client, 'other', b'another', visibility='public',
            **properties)['id']

    def test_rebuild_with_an_image_that_asks_for_a_function(self):
        """Rebuild with an image that requests another function
        (``accel:bitstream_id``): the region is programmed again if the flavor
        has ``accel<N>:runtime_programming=true``."""
        image = self.other_image(
            **{'accel:bitstream_id': self.bitstreams[base.NLB3]})
        self._rebuild_server(self.server, image)
        self.assertFunction(self.before, self.function)
        free = self.boot({**self.specs, 'accel1:runtime_programming': 'true'})
        held = self.assertHas(free)
        self._rebuild_server(free, image)
        self.assertEqual(held, self.assertHas(free))
        self.assertFunction(held, base.NLB3)
        self.delete_all()

    def test_rebuild_fails(self):
        """A rebuild that fails: the server is in ERROR, and can start with its
        devices. nova_accel keeps the allocation, which Nova alone would
        delete."""
        allocated = self.allocated(self.server['id'])
        self.assertNotEqual([], allocated)
        self.kernel(self.host_of(self.server)).set_fault(
            base.pf(self.before[0][1]), vanish=True)
        self.api.post_server_action(self.server['id'], {
            'rebuild': {'imageRef': self.other_image()}})
        self._wait_for_state_change(self.server, 'ERROR')
        self.assertEqual(allocated, self.allocated(self.server['id']))
        self.assertEqual(self.before, self.held(self.server))
        host, address = self.before[0]
        self.kernel(host).set_fault(base.pf(address), vanish=None)
        self.kernel(host).rebind(address, 'dfl-pci')
        self.parts(host).inventory.scanner.scan()
        self.report()
        self.computes[host].driver.parts.reconciler.run()
        self.report()
        self.assertEqual(self.before, self.held(self.server))
        totals, traits, used = self.provider_tree()[
            f'{host}_accel_{base.pf(address)}_region0']
        self.assertEqual(1, used['CUSTOM_ACCELERATOR_FPGA'])
        self.assertNotEqual(base.FENCED_REGION, totals)
        self.assertNotIn(naming.FENCED, traits)
        self.assertEqual(allocated, self.allocated(self.server['id']))
        self.api.post_server_action(
            self.server['id'], {'os-resetState': {'state': 'active'}})
        self._reboot_server(self.server, hard=True)
        self.assertEqual([address], self.hostdevs(self.server))
        self.assertEqual(self.before, self.held(self.server))

    def step_soft_delete_restore(self):
        """Soft delete: kept; the server is powered off. A restore returns the
        same devices."""
        self.flags(reclaim_instance_interval=3600)
        self.api.delete_server(self.server['id'])
        self._wait_for_state_change(self.server, 'SOFT_DELETED')
        self.assertEqual(self.before, self.held(self.server))
        self.api.post_server_action(self.server['id'], {'restore': None})
        self._wait_for_state_change(self.server, 'ACTIVE')
        self.flags(reclaim_instance_interval=0)

    def test_force_delete(self):
        """Force delete, also of a soft-deleted server: released."""
        self.flags(reclaim_instance_interval=3600)
        self.api.delete_server(self.server['id'])
        self._wait_for_state_change(self.server, 'SOFT_DELETED')
        direct = self.boot(self.specs)
        self.assertEqual(2, len(self.claims()))
        for server in (self.server, direct):
            self.api.post_server_action(server['id'], {'forceDelete': None})
            self._wait_until_deleted(server)
            self.assertEqual([], self.held(server))
        self.delete_all()

    def test_shelve_without_offload(self):
        """Shelve without offload (``shelved_offload_time = -1``): kept; the
        server is powered off. An unshelve returns the same devices, an offload
        releases them."""
        self.flags(shelved_offload_time=-1)
        self._shelve_server(self.server, expected_state='SHELVED')
        self.assertEqual(self.before, self.held(self.server))
        self._unshelve_server(self.server)
        self.assertEqual(self.before, self.assertHas(self.server))
        self.assertFunction(self.before, self.function)
        self._shelve_server(self.server, expected_state='SHELVED')
        self._shelve_offload_server(self.server)
        self.assertEqual([], self.claims())
        self._unshelve_server(self.server)
        self.assertFunction(self.assertHas(self.server), self.function)
        self.delete_all()

    def step_restart_of_nova_compute(self):
        """nova-compute restarts: the same devices."""
        self.restart_compute_service(self.host_of(self.server))
        self.report()

    def step_live_migration_is_refused(self):
        """Live migration: refused at once; the error suggests a cold
        migration."""
        response = self.api.api_post(
            f'/servers/{self.server["id"]}/action',
            {'os-migrateLive': {'host': None, 'block_migration': 'auto'}},
            check_response_status=[400])
        message = response.body['badRequest']['message']
        self.assertIn(self.server['id'], message)
        self.assertIn('cold migration', message)


class KeepWholeCardTest(KeepMixin, operations.OperationsTestBase):
    """With cards that guests get whole: what a guest did to one is not known,
    and each start programs it again."""

    HOSTS = {host: {'cards': [base.card(address, [base.NLB0], vfs=0)
                              for address in CARDS]}
             for host in ('compute1', 'compute2')}

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(whole_cards=list(CARDS), virtual_functions=[],
                   group='accel')


class ResizeTest(operations.MoveTestBase):
    """Operations that give a server other devices, and may be reverted."""

    def test_migrate_confirm(self):
        """Cold migration: devices on the new host, programmed there; the old
        devices are kept until the confirm."""
        server = self._migrate_server(self.server)
        after = self.assertHas(self.server)
        self.assertNotEqual(self.host, self.host_of(server))
        self.assertFunction(after, self.function)
        self.assertEqual(self.before, self.held(server, model.Role.OLD))
        self._confirm_resize(server)
        self.assertEqual([], self.held(server, model.Role.OLD))
        self.assertHas(server)
        self.delete_all()

    def test_migrate_revert(self):
        """Revert: the original devices, with their original function."""
        server = self._migrate_server(self.server)
        self._revert_resize(server)
        self.assertEqual(self.before, self.assertHas(server))
        self.assertEqual(1, len(self.claims()))
        self.assertFunction(self.before, self.function)
        self.delete_all()

    def resize(self, count, specs, server=None, revert=True, **sizes):
        """Resized, reverted, resized once more and confirmed.

        :param revert: False: it is resized and confirmed only.
        :returns: what it has, of which there are count.
        """
        server = server or self.server
        before = self.held(server)
        flavor = self._create_flavor(extra_spec=specs, **sizes)
        self._resize_server(server, flavor)
        if revert:
            self.assertHas(server, count)
            self.assertEqual(before, self.held(server, model.Role.OLD))
            self._revert_resize(server)
            self.assertEqual(before, self.assertHas(server, len(before)))
            if before:
                self.assertFunction(before, self.function)
            self.assertEqual(len(before), len(self.claims()))
            self._resize_server(server, flavor)
        after = self.assertHas(server, count)
        self.assertEqual(before, self.held(server, model.Role.OLD))
        self._confirm_resize(server)
        self.assertEqual(after, self.assertHas(server, count))
        self.assertEqual(count, len(self.claims()))
        return after

    def test_resize_to_another_function(self):
        """Resize to a flavor with another function: programmed, unless a free
        region already carries the function; a revert returns the original
        device."""
        self.assertFunction(
            self.resize(1, base.fpga_flavor(function_id=base.NLB3)),
            base.NLB3)
        self.delete_all()

    def test_resize_to_two(self):
        """Resize to a flavor with more devices: attached; a revert returns the
        original devices."""
        self.resize(2, {
            **base.fpga_flavor('1', function_id=base.NLB0),
            **base.fpga_flavor('2', function_id=base.NLB3),
            'group_policy': 'isolate'})
        self.delete_all()

    def test_resize_to_none(self):
        """Resize to a flavor without devices: released at the confirm; a
        revert returns the original devices."""
        self.resize(0, {})
        self.delete_all()

    def test_resize_from_none(self):
        """Resize from a flavor without devices to a flavor with devices:
        attached; a revert releases them."""
        self.delete_all()
        plain = self._create_server(flavor_id=self.plain, networks='none')
        self.resize(1, base.fpga_flavor(function_id=base.NLB0), plain)
        self.delete_all()

    def test_resize_up_and_down(self):
        """Resize to a larger or smaller flavor with the same accelerators:
        as cold migration."""
        for sizes in ({'vcpu': 3, 'memory_mb': 3072},
                      {'vcpu': 1, 'memory_mb': 1024}):
            host = self.host_of(self.server)
            # test_migrate_revert has the revert
            after = self.resize(1, self.specs, revert=False, **sizes)
            self.assertNotEqual(host, self.host_of(self.server))
            self.assertFunction(after, self.function)
        self.delete_all()

    def stay(self):
        """Resizes can only be on the same host."""
        self.flags(allow_resize_to_same_host=True)
        other = next(h for h in self.HOSTS if h != self.host)
        self.admin_api.put_service(
            self.computes[other].service_ref.uuid, {'status': 'disabled'})

    def test_resize_on_the_same_host(self):
        """Resize on the same host, even with the same accelerators: a second
        device; a confirm releases the first device, a revert the second."""
        self.stay()
        after = self.resize(1, self.specs, vcpu=3)
        self.assertEqual(self.host, self.host_of(self.server))
        self.assertNotEqual(self.before, after)
        self.assertFunction(after, self.function)
        # to none and back, and to another function
        self.resize(0, {}, revert=False)
        self.resize(1, self.specs, revert=False)
        self.assertFunction(
            self.resize(1, base.fpga_flavor(function_id=base.NLB3)),
            base.NLB3)
        self.delete_all()

    def test_resize_fails_on_the_destination(self):
        """A resize that fails on its destination: released there, and on the
        source when nova-compute next compares claims."""
        other = next(h for h in self.HOSTS if h != self.host)
        self.break_cards(other)
        server = self._migrate_fails()
        self.assertEqual([], self.held(server))
        self.computes[self.host].driver.parts.reconciler.run()
        self.assertEqual([], self.claims())
        self.api.delete_server(server['id'])
        self._wait_until_deleted(server)

    def test_resize_fails_on_the_source(self):
        """A resize that fails on its source: the server keeps its devices; a
        hard reboot attaches them again."""
        with mock.patch('nova.network.neutron.API.migrate_instance_start',
                        side_effect=nova_exception.PortBindingActivationFailed(
                            port_id='port', host=self.host)):
            server = self._migrate_fails()
        self.assertEqual(self.host, self.host_of(server))
        self.computes[self.host].driver.parts.reconciler.run()
        self._reboot_server(server, hard=True)
        self.assertEqual(self.before, self.assertHas(server))
        self.assertFunction(self.before, self.function)
        self.delete_all()

    def _migrate_fails(self):
        self.api.post_server_action(self.server['id'], {'migrate': None})
        return self._wait_for_state_change(self.server, 'ERROR')


class MoveTest(operations.MoveTestBase):
    """Operations that give a server other devices."""

    def test_deleted_before_the_confirm(self):
        """Delete while a resize waits for its confirmation: released on both
        hosts."""
        self._migrate_server(self.server)
        self.delete_all()

    def test_shelve_unshelve(self):
        """Shelve with offload: released; an unshelve schedules again, and
        programs new devices."""
        server = self._shelve_server(self.server)
        self.assertEqual([], self.claims())
        self._unshelve_server(server)
        self.assertFunction(self.assertHas(server), self.function)
        self.delete_all()

    def test_unshelve_to_a_chosen_host(self):
        """Unshelve to a chosen host: devices on this host."""
        server = self._shelve_server(self.server)
        for host in self.HOSTS:
            self.admin_api.post_server_action(
                server['id'], {'unshelve': {'host': host}})
            self._wait_for_state_change(server, 'ACTIVE')
            self.assertEqual(host, self.host_of(server))
            self.assertFunction(self.assertHas(server), self.function)
            self._shelve_server(server)
            self.assertEqual([], self.claims())
        self.delete_all()

    def test_unshelve_fails(self):
        """An unshelve that fails: released."""
        server = self._shelve_server(self.server)
        self.break_cards()
        # every function is lost, so that all regions have to be programmed
        function = base.NLB3
        self.assertNotEqual(function, self.function)
        for host in self.HOSTS:
            self.forget_functions(host)
        self.report()
        self.api.post_server_action(server['id'], {'unshelve': None})
        self._wait_for_server_parameter(
            server, {'OS-EXT-STS:task_state': None})
        self.assertEqual([], self.claims())
        self.assertEqual([], self.allocated(server['id']))

    def test_evacuate(self):
        """Evacuate: devices on the new host; the old host releases the old
        devices when it returns."""
        self.computes[self.host].stop()
        service = self.computes[self.host].service_ref.uuid
        self.admin_api.put_service(service, {'forced_down': 'true'})
        server = self._evacuate_server(self.server)
        self._start_server(server)
        self.assertNotEqual(self.host, self.host_of(server))
        self.assertEqual(2, len(self.claims()))
        # it moves on from the new host, which does not concern the old one
        self.set_task_state('resize_migrating')
        self.restart_compute_service(self.host)
        self.set_task_state(None)
        self.admin_api.put_service(service, {'forced_down': 'false'})
        self.assertEqual([self.host_of(server)],
                         [h for h, _ in self.held(server)])
        self.assertFunction(self.assertHas(server), self.function)
        self.delete_all()

    def set_task_state(self, state):
        instance = objects.Instance.get_by_uuid(
            nova_context.get_admin_context(), self.server['id'])
        instance.task_state = state
        instance.save()

    def test_deleted_while_the_host_is_down(self):
        """Delete while the compute host is down: released when the host
        returns."""
        self.computes[self.host].stop()
        service = self.computes[self.host].service_ref.uuid
        self.admin_api.put_service(service, {'forced_down': 'true'})
        self.api.delete_server(self.server['id'])
        self._wait_until_deleted(self.server)
        compute = self.restart_compute_service(self.host)
        self.admin_api.put_service(service, {'forced_down': 'false'})
        # the guest runs on: whoever is given its device meanwhile is refused
        self.assertEqual(self.before, self.held(self.server))
        self.flags(running_deleted_instance_timeout=0)
        compute.manager._cleanup_running_deleted_instances(
            nova_context.get_admin_context())
        self.assertEqual([], self.claims())


class HostBootTest(operations.OperationsTestBase):

    def test_host_boot(self):
        """The host reboots, with ``resume_guests_state_on_host_boot``: the
        same devices, before the guest starts."""
        self.flags(resume_guests_state_on_host_boot=True)
        server = self.boot(self.specs)
        held = self.assertHas(server)
        host = self.host_of(server)
        self.host_reboots(host, 'reboot')
        self._wait_for_state_change(server, 'ACTIVE')
        self.assertEqual(held, self.assertHas(server))
        self.assertFunction(held, self.function)

    def test_power_cut(self):
        """The host loses its power, and the card loses its function: the
        function is restored before the guest starts."""
        self.flags(resume_guests_state_on_host_boot=True)
        server = self.boot(self.specs)
        held = self.assertHas(server)
        self.host_reboots(self.host_of(server), 'power_cycle')
        self.assertEqual(held, self.assertHas(server))
        self.assertFunction(held, self.function)

    def test_power_cut_in_a_rescue(self):
        """Unrescue after the host lost its power: the function is restored
        before the guest starts."""
        server = self.boot(self.specs)
        held = self.assertHas(server)
        self._rescue_server(server)
        self.host_reboots(self.host_of(server), 'power_cycle')
        self._unrescue_server(server)
        self.assertEqual(held, self.assertHas(server))
        self.assertFunction(held, self.function)
        self.delete_all()

    def test_power_cut_before_a_rebuild(self):
        """Rebuild after the host lost its power: the function is restored
        before the guest starts."""
        server = self.boot(self.specs)
        held = self.assertHas(server)
        self.host_reboots(self.host_of(server), 'power_cycle')
        self._rebuild_server(server, self.glance.guest_image)
        self.assertEqual(held, self.assertHas(server))
        self.assertFunction(held, self.function)
        self.delete_all()

    def test_power_cut_of_a_function_that_was_found(self):
        """The host loses its power, and the card loses a function that
        nova_accel had not programmed: the function of the flavor is programmed
        before the guest starts."""
        self.flags(resume_guests_state_on_host_boot=True)
        (host, address), = self.assertHas(self.boot(self.specs))
        self.delete_all()
        self.computes[host].stop()
        # as with a card that somebody else has programmed
        self.parts(host).store.set_loaded(
            base.pf(address), 0, model.AS_READ)
        self.restart_compute_service(host)
        server = self.boot(self.specs)
        held = self.assertHas(server)
        self.assertEqual([(host, address)], held)
        claim, = self.claims()
        self.assertIsNone(claim.restore_bitstream)
        self.host_reboots(host, 'power_cycle')
        self.assertEqual(held, self.assertHas(server))
        self.assertFunction(held, self.function)
        self.delete_all()
