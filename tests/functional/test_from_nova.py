# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Running servers move from Nova's own devices to ours by resize, and back.

What docs/source/migration.rst promises: until a resize is confirmed, a revert
returns to the device of before, and afterwards the old device is free.
"""

from tests.functional import beside_nova
from tests.functional import process
from tests.functional import vgpus

NATIVE_VGPU = {'resources:VGPU': '1'}
ALIAS = {'pci_passthrough:alias': 'native:1'}


class MoveTestBase:
    """Steps of both kinds; beside a base class of a cloud."""

    #: resource class of Nova's device
    NOVAS = ''

    def resize(self, server, extra_specs):
        self.api.post_server_action(server['id'], {'resize': {
            'flavorRef': self._create_flavor(extra_spec=extra_specs)}})
        self._wait_for_state_change(server, 'VERIFY_RESIZE')

    def revert(self, server):
        """The source host ends it after the status says so."""
        self.api.post_server_action(server['id'], {'revertResize': None})
        self._wait_for_state_change(server, 'ACTIVE')
        process.until(lambda: self.assertNotIn(server['id'], [
            m['instance_uuid'] for m in self.admin_api.api_get(
                '/os-migrations').body['migrations']
            if m['status'] not in ('reverted', 'confirmed')]))

    def amounts(self, consumer):
        """What is allocated to a consumer of devices, Nova's and ours."""
        found = {}
        for allocation in self._get_allocations_by_server_uuid(
                consumer).values():
            for name, amount in allocation['resources'].items():
                if name in (self.NOVAS, self.RESOURCE_CLASS):
                    found[name] = found.get(name, 0) + amount
        return found

    def assertNovas(self, server, devices, host='compute1'):
        """The server has a device of Nova's, and none of ours."""
        self.assertEqual(host, self.host_of(server))
        self.assertEqual(devices, self.hostdevs(server))
        self.assertEqual([], self.claims())
        self.assertEqual({self.NOVAS: 1}, self.amounts(server['id']))

    def assertOurs(self, server, host='compute2'):
        """The server has one of ours, and none of Nova's.

        :returns: what it holds.
        """
        self.assertEqual(host, self.host_of(server))
        held = self.assertHas(server)
        self.assertEqual({self.RESOURCE_CLASS: 1}, self.amounts(server['id']))
        return held

    def move(self, novas, ours, host='compute2'):
        """A server moves to ours and back, each time after a revert.

        On one host there is no revert to Nova's: Nova takes the vGPUs from the
        definition of the guest, which the resize has replaced there.
        """
        server = self.boot(novas, host='compute1')
        devices = self.hostdevs(server)
        self.assertEqual(1, len(devices))
        self.assertNovas(server, devices)

        self.resize(server, ours)
        self.assertOurs(server, host)
        # the server still has the other one
        self.assertEqual({self.NOVAS: 1}, self.amounts(
            self._migration_of(server)))
        if host != 'compute1':
            self.revert(server)
            process.until(lambda: self.assertNovas(server, devices))
            self._reboot_server(server, hard=True)
            self.assertNovas(server, devices)
            self.resize(server, ours)
        self._confirm_resize(server)
        held = self.assertOurs(server, host)
        self._reboot_server(server, hard=True)
        self.assertEqual(held, self.assertOurs(server, host))
        self.assertFree(novas)

        self.resize(server, novas)
        self.assertEqual(devices, self.hostdevs(server))
        self.revert(server)
        process.until(lambda: self.assertEqual(
            held, self.assertOurs(server, host)))

        self.resize(server, novas)
        self._confirm_resize(server)
        self.assertNovas(server, devices)
        self._reboot_server(server, hard=True)
        self.assertNovas(server, devices)
        return server

    def assertFree(self, novas):
        """Another server can have the device of Nova's."""
        other = self.boot(novas, host='compute1')
        self.assertEqual(1, len(self.hostdevs(other)))
        self._delete_server(other)

    def _migration_of(self, server):
        migration, = (
            m for m in self.admin_api.api_get(
                '/os-migrations').body['migrations']
            if m['instance_uuid'] == server['id']
            and m['status'] == 'finished')
        return migration['uuid']


class VgpuTest(MoveTestBase, vgpus.NativeTestBase):
    """From a host with Nova's vGPUs to one with ours."""

    NOVAS = 'VGPU'
    RESOURCE_CLASS = vgpus.VGPU
    HOSTS = {'compute1': {'vgpus': [vgpus.gpu(
                 address=vgpus.NativeTestBase.NATIVE,
                 types=[vgpus.NATIVE_TYPE])]},
             'compute2': {'vgpus': [vgpus.gpu()]}}
    WITH_NOVAS = ('compute1',)

    def test_moves(self):
        server = self.move(NATIVE_VGPU, vgpus.flavor(vgpus.SMALL))
        uuid, = self.hostdevs(server)
        self.assertEqual(self.TYPE, self.type_of(uuid))
        # Nova keeps what it has created, nova_accel does not
        self.assertEqual([uuid],
                         self.kernel('compute1').listdir('bus/mdev/devices'))
        self.assertEqual([],
                         self.kernel('compute2').listdir('bus/mdev/devices'))


class PciTest(MoveTestBase, beside_nova.BesideNovaTestBase):
    """From a host with Nova's PCI devices to one with ours."""

    NOVAS = beside_nova.NATIVE
    RESOURCE_CLASS = 'CUSTOM_ACCELERATOR_GPU'
    GPU = '0000:1a:00.0'
    HOSTS = {'compute1': {'others': [beside_nova.NOVAS]},
             'compute2': {'gpus': [{'address': GPU}]}}

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['gpu'], group='accel')

    def test_moves(self):
        server = self.move(ALIAS, {f'resources1:{self.RESOURCE_CLASS}': '1'})
        self.assertEqual([beside_nova.NOVAS['address']],
                         self.hostdevs(server))
        # ours went back to the host's driver
        other = self.boot({f'resources1:{self.RESOURCE_CLASS}': '1'})
        self.assertEqual([self.GPU], self.hostdevs(other))
