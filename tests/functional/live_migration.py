# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Guests that migrate live, and what QEMU does with their devices."""

from importlib import metadata
from unittest import mock

import fixtures
from nova.compute import manager
from nova import context as nova_context
from nova import objects
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel import model
from tests.functional import base
from tests.functional import guests
from tests.functional import operations
from tests.functional import vgpus

VGPU, FPGA = 'CUSTOM_ACCELERATOR_VGPU', 'CUSTOM_ACCELERATOR_FPGA'
#: mediated devices of a GPU, of either size
SMALL, LARGE = 'CUSTOM_NVIDIA_2235_A40_1Q', 'CUSTOM_NVIDIA_2235_A40_2Q'
NET = 'CUSTOM_ACCELERATOR_NET'
NIC = '0000:03:00.0'


def devices(**more):
    """A GPU, and a network card with VFs."""
    return {
        'vgpus': [{**vgpus.gpu(), **more}],
        'others': [{
            'address': NIC, 'vendor': '15b3', 'device': '101d',
            'vf_device': '101e', 'driver': 'mlx5_core', 'total_vfs': 4,
            'vfs': 4, 'vfio_driver': 'mlx5_vfio_pci',
            'firmware': '28.39.1002'}],
        'cards': [base.card('0000:5e:00.0', [base.NLB0])]}


class LiveMigrationTestBase(guests.Reads,
                            operations.OperationsTestBase):

    #: of the flavors
    HOW: str

    def setUp(self):
        super().setUp()
        #: what the guest had when it moved
        self.moved = []
        self.libvirt_migrates(self.migrate)

    def start(self, specs, count=1, **kwargs):
        """Boot the server that moves."""
        self.server = self.boot(
            {**specs, 'accel:live_migration': self.HOW}, **kwargs)
        self.before = self.assertHas(self.server, count)
        self.source = self.host_of(self.server)
        self.destination, = set(self.HOSTS) - {self.source}

    def migrate(self, domain, destination, params, flags):
        """In place of libvirt's."""
        self.moved.append(self.hostdevs(self.server))
        # there of the migration, here of the server
        self.assertEqual(
            {self.destination},
            {host for host, _ in self.held(self.server, model.Role.OLD)})
        self.assertEqual(self.before, self.held(self.server))
        # in Placement the other way round
        new = [c for c in self.claims(self.destination)
               if c.instance_uuid == self.server['id']]
        self.assertEqual(sorted(c.provider_uuid for c in new),
                         self.allocated(self.server['id']))
        self.assertEqual(
            sorted(c.provider_uuid for c in self.claims(self.source)
                   if c.instance_uuid == self.server['id']),
            self.allocated(new[0].consumer_uuid))
        self.guest_moves(domain, self.destination, params['destination_xml'])

    def forget_places(self):
        """As if its accelerators had been at other places."""
        instance = objects.Instance.get_by_uuid(
            nova_context.get_admin_context(), self.server['id'],
            expected_attrs=['device_metadata'])
        instance.device_metadata = None
        instance.save()

    def assertReads(self):
        """The guest reads where its accelerators are now."""
        places = self.places(self.server)
        self.assertEqual(
            sorted(places[address] for _, address in self.held(self.server)),
            sorted(device['address'] for device in self.devices(self.server)
                   if device.get('tags', [''])[0] == 'accelerator'))

    def fails(self, domain, destination, params, flags):
        self.moved.append(self.hostdevs(self.server))
        domain.fail_job()
        raise fakelibvirt.libvirtError('it fails')

    def ask(self, host=None):
        self.admin_api.post_server_action(self.server['id'], {
            'os-migrateLive': {'host': host, 'block_migration': 'auto'}})

    def live_migrate(self, *status, host=None):
        self.ask(host)
        self._wait_for_migration_status(
            self.server, status or ['completed'])
        self._wait_for_server_parameter(self.server, {
            'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})

    def kill_destination(self):
        """When it has claimed and prepared; nova-compute starts again there,
        after the source has given up."""
        self.flags(rpc_response_timeout=3, long_rpc_timeout=3)
        with mock.patch.object(
                libvirt_driver.LibvirtDriver, 'pre_live_migration',
                side_effect=operations.Killed) as called:
            self.ask()
            self._wait_for_assert(called.assert_called)
            self.computes[self.destination].stop()
            self._wait_for_migration_status(self.server, ['failed', 'error'])
        self.assertNotEqual([], self.held(self.server, model.Role.OLD))
        self.restart_compute_service(self.destination)
        self.computes[self.destination].driver.parts.reconciler.run()

    def kill_source(self, has):
        """When the guest is about to move; nova-compute starts again, and the
        guest has all of its devices.

        :param has: the guest when nova-compute is killed.
        """
        with mock.patch.object(
                libvirt_driver.LibvirtDriver, '_live_migration',
                side_effect=operations.Killed) as called:
            self.ask()
            self._wait_for_assert(called.assert_called)
        self.assertEqual(has, self.hostdevs(self.server))
        compute = self.restart_compute_service(self.source)
        self._wait_for_server_parameter(self.server, {
            'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})
        compute.driver.parts.reconciler.run()
        self.assertEqual(self.before, self.held(self.server))
        self.assertEqual([self.before[0][1]], self.hostdevs(self.server))

    def kill_source_after_the_move(self):
        """When Nova does not know yet that the guest has moved."""
        with mock.patch.object(
                manager.ComputeManager, '_post_live_migration',
                side_effect=operations.Killed) as called:
            self.ask()
            self._wait_for_assert(called.assert_called)
        self.restart_compute_service(self.source)

    def live_migration_fails(self):
        """In libvirt."""
        self.libvirt_migrates(self.fails)
        # from Nova 32 on the server is in ERROR then, whatever it has
        in_error = int(metadata.version('nova').split('.')[0]) >= 32
        self.ask()
        self._wait_for_migration_status(
            self.server, ['error' if in_error else 'failed'])
        if in_error:
            self.leaves_error()

    def migrations(self):
        return f'/servers/{self.server["id"]}/migrations'

    def abort(self):
        """As the operator does."""
        under_way, = self.admin_api.api_get(
            self.migrations()).body['migrations']
        self.admin_api.api_delete(f'{self.migrations()}/{under_way["id"]}')

    def aborts(self, domain, destination, params, flags):
        """In place of libvirt's, while the guest moves."""
        self.moved.append(self.hostdevs(self.server))
        domain._job_type = fakelibvirt.VIR_DOMAIN_JOB_UNBOUNDED
        self.useFixture(fixtures.MockPatchObject(
            domain, 'abortJob', lambda: setattr(
                domain, '_job_type', fakelibvirt.VIR_DOMAIN_JOB_CANCELLED)))
        self.abort()

    def leaves_error(self):
        """As the operator resets it."""
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:vm_state': 'error'})
        self.admin_api.post_server_action(
            self.server['id'], {'os-resetState': {'state': 'active'}})

    def live_migration_fails_without_the_new_host(self):
        def fails(domain, destination, params, flags):
            self.computes[self.destination].stop()
            domain.fail_job()
        self.libvirt_migrates(fails)
        self.ask()
        self._wait_for_migration_status(self.server, ['failed', 'error'])
        self.assertNotEqual([], self.claims(self.destination))
        self.restart_compute_service(self.destination)
        self.computes[self.destination].driver.parts.reconciler.run()

    def assertStayed(self):
        self.assertEqual(self.source, self.host_of(self.server))
        self.assertEqual(
            self.before, self.assertHas(self.server, len(self.before)))
        self.assertEqual([], self.claims(self.destination))
        self.assertEqual([], self.held(self.server, model.Role.OLD))


class TransparentTestBase(LiveMigrationTestBase):

    HOW = 'transparent'
    VGPU_FLAVOR = {**vgpus.flavor(LARGE), 'accel:max_downtime': '5'}

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_drivers=['vgpu', 'pci', 'dfl'],
                   pci_devices=['vendor=15b3 type=NET'], group='accel')
        # a restart keeps what it had
        if not args:
            kwargs = {'libvirt_version': 10000000, 'qemu_version': 8002002,
                      **kwargs}
        return super().start_compute(hostname, *args, **kwargs)

    def allocated(self, consumer):
        return sorted(
            uuid for uuid, allocation
            in self._get_allocations_by_server_uuid(consumer).items()
            for name, amount in allocation['resources'].items()
            if name in (VGPU, NET, FPGA) for _ in range(amount))

    def assertRefused(self, *said):
        """Nothing moves, and nothing is prepared."""
        self.forget_log()
        self.live_migrate('error', 'failed')
        self.assertEqual([], self.moved)
        self.assertStayed()
        log = dict(self.logs())['nova']
        for text in said:
            self.assertIn(text, log)
