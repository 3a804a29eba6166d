# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Servers that migrate while they run.

As in test_operations, the docstring of a test is its row in
docs/source/live-migration.rst.
"""

import contextlib
from unittest import mock

import fixtures
from lxml import etree
from nova.compute import manager
from nova import context as nova_context
from nova import objects
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel import model
from nova_accel import naming
from nova_accel.store import chain
from nova_accel.virt import guest
from tests.functional import cloud
from tests.functional.live_migration import (
    devices, FPGA, LARGE, LiveMigrationTestBase, NET, NIC, TransparentTestBase)
from tests.functional import operations
from tests.functional import process
from tests.functional import vgpus


class DetachTest(operations.StepsMixin, LiveMigrationTestBase):

    HOW = 'detach'
    ADDITIONAL_FILTERS = ['ServerGroupAntiAffinityFilter']

    def setUp(self):
        super().setUp()
        #: ids of migrations of earlier steps
        self.earlier = []
        self.start(self.specs)

    def assertStayed(self):
        super().assertStayed()
        self.assertFunction(self.before, self.function)

    def assertKept(self):
        self.assertStayed()
        # for the next step
        self.moved = []
        self.libvirt_migrates(self.migrate)

    def ask(self, host=None):
        self.earlier = [m['id'] for m in self.admin_api.get_migrations()]
        super().ask(host)

    def _wait_for_migration_status(self, server, expected_statuses):
        """Nova's also takes a migration of an earlier step."""
        def look():
            found = [m['status'] for m in self.admin_api.get_migrations()
                     if m['id'] not in self.earlier]
            self.assertIn(found, [[status] for status in expected_statuses])
        process.until(look)

    def test_detach(self):
        """Live migration if the flavor has ``accel:live_migration=detach``:
        the new host claims and programs devices before the guest releases the
        old devices; the guest has no devices while it moves."""
        self.forget_places()
        self.live_migrate()
        self.assertEqual([[]], self.moved)
        self.assertEqual(self.destination, self.host_of(self.server))
        self.assertFunction(self.assertHas(self.server), self.function)
        self.assertReads()
        self.assertEqual([], self.claims(self.source))
        # and back to a chosen host, to the card that carries the function
        first, self.before = self.before, self.assertHas(self.server)
        self.source, self.destination = self.destination, self.source
        self.live_migrate(host=self.destination)
        self.assertEqual(first, self.assertHas(self.server))
        self.assertFunction(first, self.function)
        # that was handed over since; the other was not
        self.assertIn(self.newest_hash(), self.certificate())
        self._reboot_server(self.server, hard=True)
        self.assertHas(self.server)
        self.delete_all()

    def certificate(self):
        return ''.join(value for key, value in sorted(self.api.get_server(
            self.server['id'])['metadata'].items()) if ':handover:1:' in key)

    def newest_hash(self):
        return chain.digest(
            self.parts(self.destination).store.handovers()[-1])

    def step_guest_keeps_its_device(self):
        """Live migration if the guest does not release a device: the guest
        stays on its host, with all its devices."""
        with mock.patch.object(guest, '_DETACH_SECONDS', 1), mock.patch.object(
                fakelibvirt.Domain, 'detachDeviceFlags',
                lambda domain, xml, flags: None):
            self.live_migrate('failed')
        self.assertEqual([], self.moved)

    def step_fails(self):
        """Live migration that fails, for example because the hosts lose the
        network between them: the guest stays on its host, with its devices,
        and those on the new host are released."""
        self.live_migration_fails()
        self.assertEqual([[]], self.moved)

    def step_in_doubt(self):
        """Live migration that fails, if a device was detached from the guest
        before, for example because its programming had failed: this device
        stays detached until a hard reboot."""
        cloud = self.computes[self.source].driver.cloud
        parts = self.parts(self.source)
        cloud.detach(self.server['id'],
                     parts.guests.handles(self.server['id']))
        parts.holdings.doubt(
            parts.holdings.of(self.server['id']), 'It has failed.')
        self.live_migration_fails()
        self.assertEqual([], self.hostdevs(self.server))
        self._reboot_server(self.server, hard=True)

    def step_fails_without_the_new_host(self):
        """Live migration that fails while nova-compute of the new host is
        down: the devices there are released when this nova-compute starts."""
        self.live_migration_fails_without_the_new_host()
        # the comparison at its start may have begun that
        process.until(self.assertStayed)

    def test_aborted(self):
        """Live migration that the operator aborts, while the new host prepares
        or while the guest moves: the guest stays on its host, with its
        devices, and those on the new host are released."""
        self.libvirt_migrates(self.aborts)
        self.live_migrate('cancelled')
        self.assertEqual([[]], self.moved)
        self.assertStayed()
        prepare = libvirt_driver.LibvirtDriver.pre_live_migration

        def aborted(*args, **kwargs):
            self.assertNotEqual([], self.claims(self.destination))
            self.abort()
            waiting = self.computes[
                self.source].manager._waiting_live_migrations
            process.until(lambda: self.assertNotIn(
                self.server['id'], waiting))
            return prepare(*args, **kwargs)
        with mock.patch.object(
                libvirt_driver.LibvirtDriver, 'pre_live_migration', aborted):
            self.ask()
            self._wait_for_assert(lambda: self.assertEqual(
                ['cancelled'] * 2, [m['status'] for m in
                                    self.admin_api.get_migrations()]))
        self.assertEqual([[]], self.moved)
        process.until(self.assertStayed)
        self.delete_all()

    # Nova leaves the allocation of the migration
    @cloud.fresh
    def test_deleted(self):
        """A server is deleted while it migrates live: its devices on both
        hosts are released."""
        def deleted(domain, destination, params, flags):
            self.api.delete_server(self.server['id'])
            self._wait_until_deleted(self.server)
            raise fakelibvirt.libvirtError('the domain is gone')
        self.libvirt_migrates(deleted)
        self.ask()
        self._wait_until_deleted(self.server)

        def released():
            self.compare()
            self.assertEqual([], self.claims())
        process.until(released)

    def test_scheduler_finds_no_host(self):
        """Live migration if no other host has free devices, or the server
        group allows no other host: the guest stays on its host."""
        others = [self.boot(self.specs, host=self.destination)
                  for _ in range(2)]
        for host in None, self.destination:
            self.live_migrate('error', host=host)
            self.assertEqual(self.before, self.assertHas(self.server))
        self.assertEqual([], self.moved)
        for server in (*others, self.server):
            self._delete_server(server)
        group = self.api.post_server_groups(
            {'name': 'apart', 'policy': 'anti-affinity'})
        asked = self._build_server(
            networks='none', image_uuid=self.glance.guest_image,
            flavor_id=self.flavor_of(
                {**self.specs, 'accel:live_migration': self.HOW}))
        for _ in range(2):
            self.server = self._wait_for_state_change(self.api.post_server({
                'server': asked,
                'os:scheduler_hints': {'group': group['id']}}), 'ACTIVE')
        self.before = self.assertHas(self.server)
        self.live_migrate('error')
        self.assertEqual(self.before, self.assertHas(self.server))
        self.delete_all()

    def test_device_does_not_come_in(self):
        """Live migration after which a device cannot be attached to the guest:
        the server runs on the new host, its metadata have ``accel<N>:health``
        = ``on its way``, and nova-compute tries again."""
        with mock.patch.object(
                fakelibvirt.Domain, 'attachDeviceFlags',
                side_effect=fakelibvirt.libvirtError('it does not go in')):
            self.live_migrate()
            driver = self.computes[self.destination].driver
            driver.parts.reconciler.run()
        self.assertEqual([], self.hostdevs(self.server))
        self.assertEqual(1, len(self.held(self.server)))
        driver.parts.owners.run()
        self.assertEqual('on its way: 1 of 1', self.api.get_server(
            self.server['id'])['metadata'].get('accel1:health'))
        driver.parts.reconciler._pauses.clear()
        self.parts(self.destination).holdings.bound_as_before(
            self.parts(self.destination).holdings.of(
                self.server['id']))
        driver.parts.reconciler.run()
        self.assertFunction(self.assertHas(self.server), self.function)
        driver.parts.owners.run()
        self.assertNotIn('accel1:health', self.api.get_server(
            self.server['id'])['metadata'])
        self.delete_all()

    # Nova leaves the server in ERROR
    @cloud.fresh
    def test_new_host_does_not_hear(self):
        """Live migration, if Nova fails on the new host after the guest has
        arrived: the server is in ERROR there, and its guest gets its devices
        when nova-compute next compares claims."""
        with mock.patch.object(
                manager.ComputeManager, 'post_live_migration_at_destination',
                side_effect=fakelibvirt.libvirtError('no message')):
            self.ask()
            self.leaves_error()
        self.assertEqual(self.destination, self.host_of(self.server))
        self.assertEqual([], self.held(self.server))
        attach, lasts = fakelibvirt.Domain.attachDeviceFlags, []

        def attached(domain, xml, flags):
            lasts.append(bool(flags & fakelibvirt.VIR_DOMAIN_AFFECT_CONFIG))
            return attach(domain, xml, flags)
        with mock.patch.object(
                fakelibvirt.Domain, 'attachDeviceFlags', attached):
            self.compare()
        # a soft reboot starts the guest from that
        self.assertEqual([True], lasts)
        self.assertFunction(self.assertHas(self.server), self.function)
        self.delete_servers()

    # Nova leaves the allocation of the migration
    @cloud.fresh
    def test_killed(self):
        """nova-compute of the source is killed during a live migration: the
        guest gets its devices again when nova-compute starts."""
        self.kill_source([])
        # Placement has both, as Nova leaves them until the server goes
        self.computes[self.destination].driver.parts.reconciler.run()
        self.assertEqual(1, len(self.claims(self.destination)))
        self._delete_server(self.server)
        self.computes[self.destination].driver.parts.reconciler.run()
        self.assertEqual([], self.claims())

    @cloud.fresh
    def test_killed_there(self):
        """nova-compute of the new host is killed while it prepares a live
        migration: the guest stays on its host, with its devices; the devices
        on the new host are released when its nova-compute starts."""
        self.kill_destination()
        self.assertEqual([], self.moved)
        self.assertStayed()
        self.delete_all()

    # Nova leaves the server in ERROR, and the allocation of the migration
    @cloud.fresh
    def test_libvirt_ends(self):
        """libvirt of the source ends during a live migration: the server is in
        ERROR, and its guest gets its devices again when nova-compute next
        compares claims."""
        def ends(domain, destination, params, flags):
            self.moved.append(self.hostdevs(self.server))
            self.useFixture(fixtures.MockPatchObject(
                fakelibvirt.Domain, 'jobStats', side_effect=error))
            raise error
        error = fakelibvirt.libvirtError('no connection')
        self.libvirt_migrates(ends)
        self.ask()
        self.leaves_error()
        self.assertEqual([[]], self.moved)
        for host in self.source, self.destination:
            self.computes[host].driver.parts.reconciler.run()
        self.assertEqual(self.before, self.held(self.server))
        self.assertEqual([self.before[0][1]], self.hostdevs(self.server))
        self._delete_server(self.server)
        self.computes[self.destination].driver.parts.reconciler.run()
        self.assertEqual([], self.claims())

    def test_cannot_be_programmed_there(self):
        """Live migration to a host where no device can be programmed: the
        guest stays on its host, with its devices."""
        self.break_cards(self.destination)
        self.live_migrate('failed')
        self.assertEqual([], self.moved)
        self.assertStayed()
        self.mend_cards()
        self.delete_all()

    def step_paused(self):
        """Live migration of a paused server with devices: refused at once."""
        self.api.post_server_action(self.server['id'], {'pause': {}})
        self._wait_for_state_change(self.server, 'PAUSED')
        response = self.admin_api.api_post(
            f'/servers/{self.server["id"]}/action',
            {'os-migrateLive': {'host': None, 'block_migration': 'auto'}},
            check_response_status=[400])
        self.assertIn('unpause it', response.body['badRequest']['message'])
        self.api.post_server_action(self.server['id'], {'unpause': {}})
        self._wait_for_state_change(self.server, 'ACTIVE')

    def step_forced(self):
        """Live migration to a named host, with a microversion below 2.30:
        refused by Nova at once."""
        with mock.patch.object(self.admin_api, 'microversion', '2.29'):
            response = self.admin_api.api_post(
                f'/servers/{self.server["id"]}/action',
                {'os-migrateLive': {'host': self.destination,
                                    'block_migration': 'auto'}},
                check_response_status=[400])
        self.assertIn('complex allocations on the source host so move cannot '
                      'be forced', response.body['badRequest']['message'])


class TransparentTest(TransparentTestBase):

    HOSTS = {host: devices() for host in ('compute1', 'compute2')}

    def assertMoved(self):
        """With its devices in it all the time."""
        self.assertEqual([[a for _, a in self.before]], self.moved)
        self.assertEqual(self.destination, self.host_of(self.server))
        self.assertHas(self.server, len(self.before))
        self.assertEqual([], self.claims(self.source))
        self.assertEqual([], self.held(self.server, model.Role.OLD))

    def test_vgpu(self):
        """Live migration if the flavor has
        ``accel:live_migration=transparent``: equal devices on the new host,
        into which QEMU loads the state of the old ones; the guest has its
        devices all the time."""
        self.start(self.VGPU_FLAVOR)
        self.live_migrate()
        self.assertMoved()
        self.assertEqual(
            [], self.kernel(self.source).listdir('bus/mdev/devices'))
        self.assertEqual(
            self.hostdevs(self.server),
            self.kernel(self.destination).listdir('bus/mdev/devices'))
        self._reboot_server(self.server, hard=True)
        self.assertHas(self.server)
        self.delete_all()

    def test_vfs(self):
        # has the first one on the host to which the other server goes
        self.boot({f'resources1:{NET}': '1'}, host='compute2')
        self.start({f'resources1:{NET}': '2', **{
            key.replace('1:', '2:'): value
            for key, value in self.VGPU_FLAVOR.items()}}, 3, host='compute1')
        self.live_migrate()
        self.assertMoved()
        functions = [a for _, a in self.before if a.startswith(NIC[:7])]
        self.assertNotIn(functions[0], self.hostdevs(self.server))
        # those of the old host were reset for the next server
        self.assertEqual(functions, sorted(
            a for a, _ in self.simulated(self.source).resets(NIC)))
        self.delete_all()

    def test_fails(self):
        """A live migration with the state of devices fails: the guest stays
        on its host, with its devices, and those on the new host are
        released."""
        self.start(self.VGPU_FLAVOR)
        self.live_migration_fails()
        self.assertEqual([[a for _, a in self.before]], self.moved)
        self.assertStayed()
        self.delete_all()

    def test_fails_without_the_new_host(self):
        """A live migration with the state of devices fails while
        nova-compute of the new host is down: the devices there are released
        when this nova-compute starts."""
        self.start(self.VGPU_FLAVOR)
        self.live_migration_fails_without_the_new_host()
        # the comparison at its start may have begun that
        process.until(self.assertStayed)
        self.delete_all()

    # Nova leaves the allocation of the migration
    @cloud.fresh
    def test_killed(self):
        """nova-compute of the source is killed during a live migration with
        the state of devices: the guest still has its devices."""
        self.start(self.VGPU_FLAVOR)
        self.kill_source([self.before[0][1]])
        self._delete_server(self.server)
        self.computes[self.destination].driver.parts.reconciler.run()
        self.assertEqual([], self.claims())

    def test_forced(self):
        """A forced completion of a live migration with the state of devices:
        the guest is paused until everything is copied."""
        def migrate(domain, *args, **kwargs):
            domain._job_type = fakelibvirt.VIR_DOMAIN_JOB_UNBOUNDED
            under_way, = self.admin_api.api_get(
                self.migrations()).body['migrations']
            self.admin_api.force_complete_migration(
                self.server['id'], under_way['id'])
            process.until(lambda: self.assertEqual(
                fakelibvirt.VIR_DOMAIN_PAUSED, domain._state))
            self.migrate(domain, *args, **kwargs)
        self.libvirt_migrates(migrate)
        self.start(self.VGPU_FLAVOR)
        self.live_migrate()
        self.assertMoved()
        self.delete_all()

    # the new host does not answer
    @cloud.fresh
    def test_arrives_without_nova_compute(self):
        """Live migration with the state of devices if nova-compute of the new
        host ends while the guest moves: the guest keeps its devices, and
        nova-compute of the new host claims them when it starts."""
        def migrate(domain, *args, **kwargs):
            self.migrate(domain, *args, **kwargs)
            self.computes[self.destination].stop()
        self.libvirt_migrates(migrate)
        self.flags(rpc_response_timeout=3, long_rpc_timeout=3)
        self.start(self.VGPU_FLAVOR)
        self.ask()
        self._wait_for_migration_status(self.server, ['completed', 'error'])
        self.assertEqual([], self.held(self.server))
        self.assertNotEqual([], self.held(self.server, model.Role.OLD))
        self.restart_compute_service(self.destination)
        self.computes[self.destination].driver.parts.reconciler.run()
        self.assertMoved()
        self.delete_all()

    def test_not_with_this_device(self):
        """Live migration with the state of devices, if one of them cannot
        migrate: refused by the compute host before anything moves."""
        self.start({**self.VGPU_FLAVOR, f'resources2:{FPGA}': '1'}, 2)
        self.assertRefused('The state of 0000:5e:00.1 cannot move')
        self.delete_all()

    def test_refused(self):
        """Live migration with the state of devices if libvirt before 10.0 or
        QEMU before 8.2.2 is on either host, ``nova.conf`` permits
        post-copy, the guest has a virtual IOMMU, or the pause would exceed the
        permitted one: refused by the compute host before anything moves."""
        self.start(vgpus.flavor(LARGE))
        for where, which in ('source', 'old'), ('destination', 'new'):
            connection = self.computes[
                getattr(self, where)].driver._host.get_connection()
            with mock.patch.object(
                    connection, 'getVersion', return_value=8002001):
                self.assertRefused(f'the {which} host has earlier ones')
        # of [libvirt] live_migration_downtime, 500 ms
        self.assertRefused(
            '2048 MiB of memory, and its guest would be paused for up to '
            '1.7 s while that is copied, longer than [libvirt] '
            'live_migration_downtime of nova.conf allows')
        with self.changed('image_hw_viommu_model', 'intel'):
            self.assertRefused('no guest that has an IOMMU of its own')
        self.flags(live_migration_permit_post_copy=True, group='libvirt')
        self.assertRefused('live_migration_permit_post_copy to false')
        self.delete_all()

    @contextlib.contextmanager
    def changed(self, key, value):
        """The system metadata of the server."""
        instance = objects.Instance.get_by_uuid(
            nova_context.get_admin_context(), self.server['id'],
            expected_attrs=['system_metadata'])
        instance.system_metadata[key] = value
        instance.save()
        yield
        del instance.system_metadata[key]
        instance.save()

    def test_device_memory(self):
        """Live migration with the state of devices that have more memory than
        the guest: with ``accel:max_downtime``, only this guest may be paused
        longer while QEMU copies their memory, and Nova waits for the copy as
        for RAM."""
        allowed = []

        def migrate(domain, *args, **kwargs):
            domain._job_type = fakelibvirt.VIR_DOMAIN_JOB_UNBOUNDED
            process.until(lambda: self.assertEqual(2, len(allowed)))
            self.migrate(domain, *args, **kwargs)
        self.libvirt_migrates(migrate)
        self.useFixture(fixtures.MonkeyPatch(
            'nova.tests.fixtures.libvirt.Domain.migrateSetMaxDowntime',
            lambda domain, milliseconds: allowed.append(milliseconds)))
        # of Nova's steps two, the last one soon
        self.useFixture(fixtures.MockPatch(
            'nova.virt.libvirt.migration.downtime_steps',
            lambda data_gb: iter([(0, 50), (data_gb / 2, 500)])))
        self.start(self.VGPU_FLAVOR)
        driver = self.computes[self.source].driver
        instance = objects.Instance.get_by_uuid(
            nova_context.get_admin_context(), self.server['id'],
            expected_attrs=['flavor', 'system_metadata'])
        # 2 are Nova's least for RAM
        self.assertEqual(4, driver._live_migration_data_gb(instance, []))
        self.flags(live_migration_bandwidth=400, group='libvirt')
        self.assertRefused('5.1 s while that is copied, longer than '
                           'accel:max_downtime=5 of its flavor allows')
        self.flags(live_migration_bandwidth=1024, group='libvirt')
        self.live_migrate()
        self.assertEqual([2050, 5000], allowed)
        self.assertMoved()
        self.delete_all()

    def test_host_is_emptied(self):
        """Live migrations of all servers of a host, requested at once: each
        server has its devices on the new host, and the old host has none in
        use."""
        def migrate(domain, destination, params, flags):
            self.guest_moves(domain, 'compute2', params['destination_xml'])
        self.libvirt_migrates(migrate)
        servers = [self.boot(
            {**specs, 'accel:live_migration': how}, host='compute1')
            for how, specs in (
                ('transparent', self.VGPU_FLAVOR),
                ('transparent', {f'resources1:{NET}': '2'}),
                ('detach', {f'resources1:{FPGA}': '1'}))]
        for self.server in servers:
            self.ask()
        for server, count in zip(servers, (1, 2, 1)):
            self._wait_for_migration_status(server, ['completed'])
            self._wait_for_server_parameter(server, {
                'OS-EXT-STS:task_state': None, 'status': 'ACTIVE',
                'OS-EXT-SRV-ATTR:host': 'compute2'})
            self.assertHas(server, count)
        self.assertEqual([], self.claims('compute1'))
        self.delete_all()

    # Nova's record of the server names the old host
    @cloud.fresh
    def test_killed_after_the_move(self):
        """nova-compute of the source is killed after the guest has moved: the
        guest has its devices, and no other server gets the devices that the
        server has claimed on either host."""
        self.start(self.VGPU_FLAVOR)
        self.kill_source_after_the_move()
        for host in self.source, self.destination:
            self.computes[host].driver.parts.reconciler.run()
        self.assertEqual(self.before, self.held(self.server))
        (there, address), = self.held(self.server, model.Role.OLD)
        self.assertEqual(self.destination, there)
        self.assertEqual([address], self.hostdevs(self.server))
        # Nova would try again, and with that release what the guest has
        self.live_migrate('error')
        self.assertIn('where its guest runs already', dict(self.logs())[
            'nova'])
        self.assertEqual([(there, address)],
                         self.held(self.server, model.Role.OLD))
        self._delete_server(self.server)
        for host in self.source, self.destination:
            self.computes[host].driver.parts.reconciler.run()
        # Nova does not end its guest there
        self.assertEqual([], self.claims(self.source))
        self.assertEqual([address], [
            c.handle.address for c in self.claims(self.destination)])


class IommufdTest(TransparentTestBase):

    HOSTS = {host: {
        'iommufd': True,
        'others': [{**devices()['others'][0], 'vfio_driver': 'xe-vfio-pci'}]}
        for host in ('compute1', 'compute2')}

    def setUp(self):
        super().setUp()
        #: (host, function) -> whether QEMU has it by iommufd, which Nova's
        #: imitation of libvirt forgets
        self.by_iommufd = {}
        define = fakelibvirt.Connection.defineXML
        attach = fakelibvirt.Domain.attachDeviceFlags
        describe = fakelibvirt.Domain.XMLDesc

        def note(connection, hostdevs):
            for hostdev in hostdevs:
                self.by_iommufd[connection.hostname, self.function_of(
                    hostdev)] = hostdev.find('./driver') is not None

        def defined(connection, xml):
            note(connection, etree.fromstring(xml).iterfind(
                './devices/hostdev'))
            return define(connection, xml)

        def attached(domain, xml, flags):
            note(domain._connection, [etree.fromstring(xml)])
            return attach(domain, xml, flags)

        def described(domain, flags):
            xml = etree.fromstring(describe(domain, flags))
            for hostdev in xml.iterfind('./devices/hostdev'):
                if self.by_iommufd[domain._connection.hostname,
                                   self.function_of(hostdev)]:
                    # as libvirt completes it
                    etree.SubElement(
                        hostdev, 'driver', name='vfio', iommufd='yes')
            return etree.tostring(xml, encoding='unicode')
        for of, name, by in (
                (fakelibvirt.Connection, 'defineXML', defined),
                (fakelibvirt.Domain, 'attachDeviceFlags', attached),
                (fakelibvirt.Domain, 'XMLDesc', described)):
            self.useFixture(fixtures.MonkeyPatch(
                f'nova.tests.fixtures.libvirt.{of.__name__}.{name}', by))

    @staticmethod
    def function_of(hostdev):
        source = hostdev.find('./source/address')
        return guest.pci_address(*(source.get(part) for part in (
            'domain', 'bus', 'slot', 'function')))

    def upgrade(self, host):
        """libvirt and QEMU."""
        connection = self.computes[host].driver._host.get_connection()
        for name, version in (('getLibVersion', 12002000),
                              ('getVersion', 9001000)):
            self.useFixture(fixtures.MockPatchObject(
                connection, name, return_value=version))

    def test_iommufd(self):
        """Live migration with the state of devices whose driver does not log
        the pages that they write: with libvirt 12.2 and QEMU 9.1, the IOMMU
        logs the pages if the guest was started with these versions; otherwise
        the compute host refuses the migration before anything moves."""
        self.start({f'resources1:{NET}': '1'})
        self.assertRefused('libvirt 12.2.0 and QEMU 9.1.0 move, and the old '
                           'host has earlier ones')
        self.upgrade(self.source)
        self.assertRefused('it started before an upgrade of libvirt')
        self._reboot_server(self.server, hard=True)
        self.assertRefused('libvirt 12.2.0 and QEMU 9.1.0 move, and the new '
                           'host has earlier ones')
        self.upgrade(self.destination)
        # also what comes back into its guest
        self._suspend_server(self.server)
        self._resume_server(self.server)
        self.live_migrate()
        (_, address), = self.before
        self.assertEqual([[address]], self.moved)
        (host, address), = self.assertHas(self.server)
        self.assertEqual(self.destination, host)
        self.assertTrue(self.by_iommufd[host, address])
        # guests of other flavors have it as before
        other = self.boot({f'resources1:{NET}': '1'})
        (where,) = self.held(other)
        self.assertFalse(self.by_iommufd[where])
        self.delete_all()


class UnequalTest(TransparentTestBase):

    HOSTS = {'compute1': devices(),
             'compute2': devices(driver_version='570.1')}

    def test_other_driver(self):
        """Live migration with the state of devices to a host whose driver has
        another version: refused before anything moves."""
        self.start(self.VGPU_FLAVOR, host='compute1')
        self.assertRefused(
            f'Server {self.server["id"]} has 10de:2235 {LARGE} nvidia '
            f'550.54.16 and would get 10de:2235 {LARGE} nvidia 570.1')
        self.delete_all()


class OldHostTest(TransparentTestBase):
    """The second host has libvirt and QEMU of Debian 12."""

    HOSTS = {host: {**devices(), 'iommufd': True, 'others': [
        *devices()['others'],
        {**devices()['others'][0], 'address': '0000:04:00.0',
         'device': '1021', 'vfio_driver': 'xe-vfio-pci'}]}
        for host in ('compute1', 'compute2')}

    def start_compute(self, hostname, *args, **kwargs):
        if hostname == 'compute2':
            kwargs.update(libvirt_version=9000000, qemu_version=7002000)
        return super().start_compute(hostname, *args, **kwargs)

    def test_traits(self):
        # servers whose flavor requires one get to hosts that they can leave
        self.assertEqual(
            {self.provider_name('compute1', vgpus.GPU): {
                naming.MIGRATABLE,
                'CUSTOM_ACCELERATOR_MIGRATES_BY_NVIDIA_550_54_16'},
             self.provider_name('compute1', NIC): {
                naming.MIGRATABLE,
                'CUSTOM_ACCELERATOR_MIGRATES_BY_MLX5_VFIO_PCI_FW_VERSION_'
                '28_39_1002'}},
            {name: found for name, (_, traits, _)
             in self.provider_tree().items()
             if (found := {t for t in traits if 'MIGRAT' in t})})


class OtherNumbersTest(TransparentTestBase):

    HOSTS = {'compute1': devices(), 'compute2': devices(types=[
        {'id': 'nvidia-557', 'name': 'NVIDIA A40-2Q', 'units': 2},
        {'id': 'nvidia-558', 'name': 'NVIDIA A40-1Q', 'units': 1}])}

    def test_type_with_another_number(self):
        """Live migration with the state of a vGPU to a host whose driver has
        another number for the type of the vGPU: the guest gets a vGPU of the
        same type."""
        self.start(self.VGPU_FLAVOR, host='compute1')
        self.live_migrate()
        (host, address), = self.assertHas(self.server)
        self.assertEqual('compute2', host)
        self.assertEqual(
            'nvidia-557', self.kernel(host).readlink(
                f'bus/mdev/devices/{address}/mdev_type').rpartition('/')[2])
        self.delete_all()


class MixedTest(vgpus.NativeTestBase, TransparentTestBase):

    def test_with_novas(self):
        """Live migration of a server that also has a vGPU of Nova: the vGPU
        follows Nova's rules, the accelerators follow the flavor."""
        for self.HOW in ('transparent', 'detach'):
            self.moved = []
            self.server = self.boot({
                'resources:VGPU': '1', **(
                    self.VGPU_FLAVOR if self.HOW == 'transparent'
                    else vgpus.flavor(LARGE)),
                'accel:live_migration': self.HOW}, host='compute1')
            self.source, self.destination = 'compute1', 'compute2'
            self.before = self.held(self.server)
            (_, ours), = self.before
            novas, = set(self.hostdevs(self.server)) - {ours}
            self.live_migrate()
            self.assertEqual([sorted(
                [novas, ours] if self.HOW == 'transparent' else [novas])],
                self.moved)
            (_, ours), = self.held(self.server)
            self.assertEqual('nvidia-558', self.type_of(ours, 'compute2'))
            novas, = set(self.hostdevs(self.server)) - {ours}
            self.assertEqual(self.TYPE, self.type_of(novas, 'compute2'))
            self.assertEqual([], self.claims('compute1'))
            self.delete_all()
