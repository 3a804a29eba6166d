# Licensed under the Apache License, Version 2.0. See LICENSE.
"""VFs, services and quotas that nova.conf asks for and the kernel refused for a
while, or forgot when a driver was loaded again."""

from unittest import mock

import ddt

from nova_accel.drivers import sriov
from nova_accel import model
from tests.host import base
from tests.unit.host import A

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED
#: name -> driver, key of the description, the card, VFs, options, resource
#: class
KINDS = {
    'qat': ('qats', {}, 16, {'qat_services': ['dc']}, 'QAT'),
    'dfl': ('cards', {'ports': 2, 'vfs': 0}, 2, {}, 'FPGA'),
    'nvme': ('nvmes', {'total_vfs': 2}, 2, {}, 'SSD'),
    'pci': ('others', {'vendor': '19e5', 'device': 'd801', 'total_vfs': 2,
                       'class': '0x120000', 'driver': 'davinci'}, 2,
            {'pci_devices': ['vendor=19e5 type=AI']}, 'AI'),
    'vgpu': ('vgpus', {
        'vendor': '8086', 'device': 'e211', 'driver': 'xe', 'types': [],
        'framework': 'sriov', 'total_vfs': 2, 'vram_mib': 4096}, 2,
        {'xe_quotas': [f'{A}/vram_quota={1 << 30}']}, 'VGPU')}


@ddt.ddt
class SetUpTest(base.HostTestCase):

    POOLS = 'none'

    def start(self, kind, **faults):
        key, card, self.count, options, type_ = KINDS[kind]
        self.type = f'CUSTOM_ACCELERATOR_{type_}'
        # looks are those of the test
        self.config.config(discovery_interval=3600, group='accel', **options)
        self.start_host(drivers=[kind], **{
            key: [{**card, 'address': A, 'faults': faults}]})
        self.config.config(virtual_functions=[f'{A}={self.count}'],
                           group='accel')
        self.kernel = self.host.kernel
        self.restart()

    def look(self):
        self.host.inventory.looks.run()
        self.host.report()

    @property
    def device(self):
        return self.host.inventory.devices[A]

    def vfs(self):
        return int(self.kernel.read(f'bus/pci/devices/{A}/sriov_numvfs'))

    def reload(self):
        """The driver of the card is loaded again."""
        driver = self.kernel.readlink(
            f'bus/pci/devices/{A}/driver').rpartition('/')[2]
        self.kernel.rebind(A, driver)
        self.assertEqual(0, self.vfs())

    def assertSetUp(self, kind):
        self.assertEqual((OK, self.count), (self.device.health, self.vfs()),
                         self.device.reason)
        self.assertEqual(self.count, len(self.device.all_handles))
        for path, value in {
                'qat': {'qat/cfg_services': 'dc', 'qat/state': 'up'},
                'vgpu': {'sriov_admin/vf1/profile/vram_quota': str(1 << 30)},
                }.get(kind, {}).items():
            self.assertEqual(
                value, self.kernel.read(f'bus/pci/devices/{A}/{path}'))

    @ddt.data(*KINDS)
    def test_refused_for_a_while(self, kind):
        """The reason is that of the kernel, until it agrees."""
        self.start(kind, vfs='EBUSY')
        for _ in range(2):
            self.assertEqual((QUARANTINED, 0),
                             (self.device.health, self.vfs()))
            self.assertIn('Device or resource busy', self.device.reason)
            self.look()
        self.kernel.set_fault(A, vfs=None)
        self.look()
        self.assertSetUp(kind)

    def test_services_refused_for_a_while(self):
        self.start('qat', busy=True)
        self.assertIn('(the host itself is using it); it keeps sym;asym: end '
                      'that; nova-compute tries again', self.device.reason)
        self.kernel.set_fault(A, busy=None)
        self.look()
        self.assertSetUp('qat')

    @ddt.data(*KINDS)
    def test_driver_that_is_loaded_again(self, kind):
        self.start(kind)
        self.assertSetUp(kind)
        self.reload()
        self.look()
        self.assertSetUp(kind)

    @ddt.data(*KINDS)
    def test_driver_that_is_loaded_late(self, kind):
        """At the start the card had none."""
        self.start(kind)
        driver = self.kernel.readlink(
            f'bus/pci/devices/{A}/driver').rpartition('/')[2]
        self.kernel.unbind(A)
        self.restart()
        self.look()
        self.assertEqual((QUARANTINED, 0), (self.device.health, self.vfs()))
        self.kernel.rebind(A, driver)
        # of a QAT card only the time tells that it must be examined
        self.host.inventory.scanner.scan()
        self.assertSetUp(kind)

    @ddt.data(*KINDS)
    def test_card_of_a_server(self, kind):
        """It stays as it is, until the server is deleted or nova-compute
        starts."""
        self.start(kind)
        server = self.host.boot(
            {f'resources1:{self.type}': '1'},
            {min(uuid for uuid, provider
                 in self.host.inventory.shown.providers().items()
                 if self.type in provider.inventory):
             {'resources': {self.type: 1}}})
        self.host.cloud.stop_guest(server, undefine=True)
        self.reload()
        for _ in range(2):
            self.look()
            self.assertEqual((QUARANTINED, 0),
                             (self.device.health, self.vfs()))
            self.assertIn(sriov.NONE, self.device.reason)
        self.restart()
        self.assertEqual(self.count, self.vfs())

    @ddt.data('nvme', 'pci')
    def test_card_of_a_process(self, kind):
        """A program of the host has the whole card open through VFIO."""
        self.start(kind)
        self.kernel.rebind(A, 'vfio-pci')
        self.kernel.guest_takes(A)
        with mock.patch.object(self.kernel, 'set_numvfs') as asked:
            self.look()
        asked.assert_not_called()
        self.assertEqual((QUARANTINED, 0), (self.device.health, self.vfs()))
        self.kernel.guest_returns(A)
        self.kernel.rebind(A, {'nvme': 'nvme', 'pci': 'davinci'}[kind])
        self.look()
        self.assertSetUp(kind)

    @ddt.data(*KINDS)
    def test_card_that_is_disabled(self, kind):
        """The operator may work on it."""
        self.start(kind)
        self.host.disable(A)
        self.reload()
        self.look()
        self.assertEqual(0, self.vfs())
        self.host.enable()
        self.look()
        self.assertSetUp(kind)

    def test_two_cards(self):
        """One that is refused costs the other nothing."""
        other = '0000:81:00.0'
        self.config.config(discovery_interval=3600, group='accel')
        self.start_host(drivers=['nvme'], nvmes=[
            {'address': A, 'total_vfs': 2, 'faults': {'vfs': 'EIO'}},
            {'address': other, 'total_vfs': 2}])
        self.config.config(virtual_functions=[f'{A}=2', f'{other}=2'],
                           group='accel')
        self.restart()
        self.assertIn('Input/output error', self.device.reason)
        self.assertIs(OK, self.host.inventory.devices[other].health)
