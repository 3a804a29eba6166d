# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices of each kind, with a server, over what their hosts go through.

A boot of each kind in a whole cloud is in tests/functional.
"""

import ddt

from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from tests.host import base
from tests.unit.host import A, B, FIRST, FUNCTION, OTHER, plain, vf

AI, FPGA, GPU, QAT, SSD, CLOCK = (
    f'CUSTOM_ACCELERATOR_{type_}'
    for type_ in ('AI', 'FPGA', 'GPU', 'QAT', 'SSD', 'TIMECARD'))
SOUND, DISK = f'{A[:-1]}1', '0000:02:00.0'
LOST = 'LOST @ 2026-11-21T04:12:09'


def service(name):
    return naming.property_trait('QAT', 'SERVICE', name)


class KindTestCase(base.HostTestCase):

    def boot(self, class_, address=A, **specs):
        """A server, and the addresses that its guest has."""
        server = self.host.boot({f'resources1:{class_}': '1', **specs},
                                self.host.allocation(address, class_))
        return server, self.host.devices_of(server)

    def traits(self, address):
        provider, = [p for p in self.host.inventory.shown.providers().values()
                     if address in p.addresses]
        return provider.traits

    def look(self, address):
        """As nova-compute does by itself, only now."""
        self.host.inventory.scanner.scan()
        self.host.report()
        return self.traits(address)


@ddt.ddt
class HostBootTest(KindTestCase):
    """The host boots, and its kernel has forgotten what was set."""

    @ddt.data(
        (QAT, {'qats': [{'address': A}], 'drivers': ('qat',)},
         {'qat_services': ['dc'], 'virtual_functions': [f'{A}=16']}),
        (CLOCK, {'timecards': [{'address': A}], 'drivers': ('timecard',)},
         {}),
        (GPU, {'drivers': ('gpu',), 'gpus': [
            {'address': A, 'iommu_group': 7}], 'others': [
                {'address': SOUND, 'vendor': '10de', 'device': '10fa',
                 'class': '0x040300', 'driver': 'snd_hda_intel',
                 'iommu_group': 7}]}, {}),
        (AI, {'drivers': ('pci',), 'others': [
            {'address': A, 'vendor': '19e5', 'device': 'd801',
             'class': '0x120000', 'driver': 'davinci', 'total_vfs': 4}]},
         {'pci_devices': ['vendor=19e5 type=AI'],
          'virtual_functions': [f'{A}=2']}))
    @ddt.unpack
    def test_host_boot(self, class_, devices, options):
        self.start_host(**devices)
        self.config.config(**options, group='accel')
        self.restart()
        before = self.look(A)
        server, held = self.boot(class_)
        self.assertEqual(1, len(self.host.guests.handles(server)))
        for _ in range(2):
            self.host.power_cut()
            self.restart()
            self.host.start_guest(server)
            self.assertEqual(held, self.host.devices_of(server))
            self.assertEqual([model.ClaimState.BOUND],
                             self.host.states(server))
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual(before, self.look(A))
        self.assertEqual([], self.host.fenced())


class PortsTest(KindTestCase):
    """A card of two regions, each with a VF for a server of its own."""

    def setUp(self):
        super().setUp()
        self.start_host({'address': A, 'product': 'PAC_D5005', 'ports': 2,
                         'functions': [FIRST, OTHER]})
        self.host.upload(FUNCTION)

    def boot_on(self, index, function):
        provider, = [uuid for uuid, p
                     in self.host.inventory.shown.providers().items()
                     if p.region_index == index]
        return self.host.boot(base.asks(function), {
            provider: {'resources': {FPGA: 1}}})

    def test_other_port_is_programmed(self):
        """One region is programmed while a server has the other."""
        first = self.boot_on(1, OTHER)
        self.assertHas(first, vf(A, 1))
        second = self.boot_on(0, FUNCTION)
        self.assertHas(second, vf(A, 0))
        self.assertHas(first, vf(A, 1))
        self.assertEqual((plain(FUNCTION), plain(OTHER)), (
            self.host.carries(A, 0), self.host.carries(A, 1)))

    def test_host_boot(self):
        self.host.upload(OTHER)
        servers = {self.boot_on(1, OTHER): 1, self.boot_on(0, FUNCTION): 0}
        self.host.power_cut()
        self.assertFalse(self.simulated.kernel.exists(
            f'bus/pci/devices/{A}/virtfn0'))
        self.restart()
        for server, index in servers.items():
            self.host.start_guest(server)
            self.assertHas(server, vf(A, index))
        self.assertEqual((plain(FUNCTION), plain(OTHER)), (
            self.host.carries(A, 0), self.host.carries(A, 1)))


class SlotTest(KindTestCase):
    """A board of OFS: the AFU of its slot has several VFs."""

    VFS = [vf(A, n) for n in range(3)]

    def setUp(self):
        super().setUp()
        self.start_host({'address': A, 'product': 'N6001', 'vfs': 3,
                         'afu_vfs': 3})
        self.host.upload(FUNCTION)

    def boot_programmed(self):
        return self.host.boot(base.asks(FUNCTION), self.host.allocation(A))

    def test_server(self):
        """One claim, all VFs in the guest, programmed by the PF."""
        server = self.boot_programmed()
        self.assertEqual(self.VFS, self.host.devices_of(server))
        self.assertEqual([model.ClaimState.BOUND], self.host.states(server))
        self.assertEqual({*self.VFS},
                         self.host.descriptions.roles(server).keys())
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
        self.assertRaises(exception.DeviceUnavailable, self.boot, FPGA)
        kernel = self.host.kernel
        kernel.guest_writes(self.VFS[0], registers='of the first')
        self.host.reboot(server)
        self.restart()
        self.host.reconciler.run()
        self.assertEqual(self.VFS, self.host.devices_of(server))
        # while the guest has the VFs nothing of them can be read
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
        self.host.delete(server)
        self.host.report()
        second, held = self.boot(FPGA)
        self.assertEqual(self.VFS, held)
        self.assertEqual({}, kernel.guest_reads(self.VFS[0]))

    def test_host_boot(self):
        """The kernel has forgotten the VFs, and a guest starts with them."""
        server = self.boot_programmed()
        self.host.power_cut()
        self.assertFalse(self.simulated.kernel.exists(
            f'bus/pci/devices/{A}/virtfn0'))
        self.restart()
        self.host.start_guest(server)
        self.assertEqual(self.VFS, self.host.devices_of(server))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    def test_of_a_lost_store(self):
        server = self.boot_programmed()
        self.lose_store()
        self.host.reconciler.run()
        self.assertEqual([(vf(A), 0)], [
            (claim.handle.address, claim.region_index)
            for claim in self.host.holdings.all()
            if claim.instance_uuid == server])
        self.assertRaises(exception.DeviceUnavailable, self.boot, FPGA)


class TraitsTest(KindTestCase):
    """What a device offers changes while nova-compute runs."""

    def test_services_of_a_qat(self):
        self.start_host(qats=[{'address': A}], drivers=('qat',))
        self.config.config(qat_services=['sym;asym'],
                           virtual_functions=[f'{A}=16'], group='accel')
        self.restart()
        self.assertLessEqual({service('sym'), service('asym')}, self.look(A))
        kernel = self.simulated.kernel
        kernel.write_attribute(A, 'qat/state', 'down')
        kernel.write_attribute(A, 'qat/cfg_services', 'asym')
        kernel.write_attribute(A, 'qat/state', 'up')
        kernel.set_numvfs(A, 16)
        self.assertEqual({service('asym')},
                         {service('sym'), service('asym')} & self.look(A))

    def test_lost_heartbeat_of_a_qat(self):
        """No server gets a VF; the one that has one keeps it."""
        self.start_host(qats=[{'address': A}], drivers=('qat',))
        self.config.config(virtual_functions=[f'{A}=16'], group='accel')
        self.restart()
        server, held = self.boot(QAT)
        self.simulated.kernel.set_fault(A, heartbeat='silent')
        for _ in range(3):
            self.look(A)
        self.assertEqual(1, len(self.host.fenced()))
        self.assertRaises(exception.DeviceUnavailable, self.boot, QAT)
        self.assertEqual(held, self.host.devices_of(server))
        self.simulated.kernel.set_fault(A, heartbeat=None)
        self.look(A)
        self.assertEqual([], self.host.fenced())
        self.host.reboot(server)
        self.assertEqual(held, self.host.devices_of(server))

    def test_lost_sync_of_a_time_card(self):
        sync = naming.property_trait('TIMECARD', 'GNSS_SYNC')
        self.start_host(timecards=[{'address': A}, {'address': B}],
                        drivers=('timecard',))
        self.assertIn(sync, self.look(A))
        self.simulated.kernel.set_fault(A, attributes={'gnss_sync': LOST})
        self.assertNotIn(sync, self.look(A))
        self.assertIn(sync, self.traits(B))
        self.simulated.kernel.set_fault(A, attributes={})
        self.assertIn(sync, self.look(A))


class DiskTest(KindTestCase):

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': DISK}], drivers=('nvme',))
        self.disk = self.simulated.kernel
        self.disk.write_disk(DISK, 'of the operator')

    def boot_and_write(self):
        server, held = self.boot(SSD, DISK)
        self.assertEqual([DISK], held)
        self.disk.write_disk(DISK, 'a secret')
        return server

    def assertUnerased(self, words):
        claim, = self.host.holdings.being_released()
        self.assertIn(words, claim.error)
        self.host.report()
        self.assertEqual(1, len(self.host.fenced()))
        self.assertEqual('a secret', self.disk.data_of_disk(DISK))
        self.assertRaises(exception.DeviceUnavailable, self.boot, SSD, DISK)

    def assertErased(self):
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('', self.disk.data_of_disk(DISK))
        self.host.report()
        self.assertEqual([], self.host.fenced())
        self.assertEqual([DISK], self.boot(SSD, DISK)[1])

    def test_cannot_be_erased(self):
        server = self.boot_and_write()
        self.disk.set_fault(DISK, format='refused')
        self.host.delete(server)
        self.assertUnerased('Input/output error')
        self.host.reconcile()
        self.assertUnerased('Input/output error')
        # and it is erased when that can be
        self.disk.set_fault(DISK, format=None)
        self.host.reconcile()
        self.assertErased()

    def test_server_deletes_its_namespaces(self):
        server = self.boot_and_write()
        self.disk.change_disk(DISK, namespaces=[])
        self.disk.set_fault(DISK, namespaces='refused')
        self.host.delete(server)
        self.assertUnerased('')
        self.disk.set_fault(DISK, namespaces=None)
        self.host.reconcile()
        self.assertEqual([1 << 39], [
            n.blocks * n.block_size
            for n in self.disk.read_nvme(DISK).namespaces])
        self.assertErased()

    def test_host_begins_to_use_it(self):
        """Just now, so that no report says it yet."""
        self.disk.use_disk(DISK, 'zfs')
        error = self.assertRaises(
            exception.DeviceUnavailable, self.boot, SSD, DISK)
        self.assertIn(f'{DISK} was allocated, and the host uses it',
                      str(error))
        # what it was not given is not its to erase, then or later
        self.assertEqual([], self.host.holdings.all())
        self.disk.use_disk(DISK, None)
        self.host.reconcile()
        self.assertEqual('of the operator', self.disk.data_of_disk(DISK))
