# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Real machines: what nova_accel finds of them is what their files say.

``right`` of a file was written by hand, from documents.
"""

import shutil

import ddt
import fixtures

from nova_accel.drivers import dfl
from nova_accel.drivers import fabric
from nova_accel.drivers import gpu
from nova_accel.drivers import pci_rule
from nova_accel.drivers import xrt
from nova_accel.host import bus
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from nova_accel.sim import captured
from nova_accel.virt import guest_devices
from tests.host import machines
from tests.unit import configured


def offered(device):
    """Addresses of the functions that servers can get of a device."""
    if device.health is not model.Health.OK:
        return []
    return [handle.address for part in (device, *device.regions)
            for handle in part.handles]


def seen(device, keys):
    """What nova_accel says of a device, by the keys of ``right``."""
    if device is None:
        return {'device': False}
    return {key: bool(offered(device)) if key == 'offered'
            else getattr(device, key) for key in keys if key != 'device'}


@ddt.ddt
class MachineTest(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger())
        self.config.config(
            include_devices=['vendor=*'], group='accel',
            enabled_drivers=list(machines.DRIVERS))

    @ddt.data(*machines.FILES)
    def test_right(self, name):
        machine = self.useFixture(machines.Machine(name))
        devices = machine.devices()
        for right in machine.facts['right']:
            expected = {key: value for key, value in right.items()
                        if key not in ('at', 'why')}
            self.assertEqual(expected, seen(
                devices.get(right['at']), expected), right)


@ddt.ddt
class BoardTest(configured.TestCase):
    """What identifies an FPGA without a Device Serial Number."""

    D5005, N6001 = '0000:05:00.0', '0000:b1:00.0'

    def serial(self, name, address, mac=None, driver=None):
        machine = self.useFixture(machines.Machine(name))
        if mac:
            for path in machine.sys.rglob('mac_address'):
                path.write_text(f'{mac}\n')
        if driver:
            link = machine.sys / pci.DEVICES / address / 'driver'
            link.unlink()
            link.symlink_to(f'../../../bus/pci/drivers/{driver}')
        return dfl.DflDriver(machine.kernel).serial(address)

    def test_mac_address(self):
        """Behind an SPI bus, or of a part of the FME."""
        self.assertEqual('64:4c:36:00:00:40',
                         self.serial('pac-d5005', self.D5005))
        self.assertEqual('64:4c:36:00:00:52', self.serial(
            'ofs-n6001', self.N6001, '64:4C:36:00:00:52'))

    # as recorded of the N6001, a group; one that is local; none
    @ddt.data(None, '66:4c:36:00:00:52', '00:00:00:00:00:00', 'unknown')
    def test_mac_address_that_identifies_nothing(self, mac):
        self.assertEqual('', self.serial('ofs-n6001', self.N6001, mac))

    def test_card_of_a_guest(self):
        self.assertIsNone(self.serial(
            'pac-d5005', self.D5005, driver='vfio-pci'))


@ddt.ddt
class HiveTest(configured.TestCase):
    """What amdgpu shows of XGMI counts, and is remembered."""

    #: of the recorded MI100
    FIRST, SECOND = '0000:0a:00.0', '0000:0f:00.0'

    def setUp(self):
        super().setUp()
        self.machine = self.useFixture(machines.Machine('mi100-8'))
        self.config.config(include_devices=['vendor=1002'], pci_devices=[
            'vendor=1002 type=AI'], group='accel')
        self.gpu = gpu.GpuDriver(self.machine.kernel)

    def show(self, address, hive):
        """Have amdgpu show the hive of a GPU."""
        self.machine.write(address, **{'xgmi_hive_info/xgmi_hive_id': hive})

    def end(self, address):
        """Take the GPU from amdgpu."""
        shutil.rmtree(self.machine.sys / pci.DEVICES / address
                      / 'xgmi_hive_info')

    @ddt.data(gpu.GpuDriver, pci_rule.PciRuleDriver)
    def test_remembered(self, driver):
        driver = driver(self.machine.kernel)
        # MI100, whose product alone would be refused
        self.show(self.FIRST, '0')
        # another product, which would be offered
        self.show(self.SECOND, '18013298997854213')
        self.machine.write(self.SECOND, device='0x744c')
        seen = driver.discover()
        for known in (None, seen):
            found = driver.discover(known)
            self.assertEqual([self.FIRST], offered(found[self.FIRST]))
            self.assertIn('XGMI joins it', found[self.SECOND].reason)
            if known is None:
                self.end(self.FIRST)
                self.end(self.SECOND)
        # what was never seen under amdgpu goes by its product
        found = driver.discover()
        self.assertIn('XGMI may join it', found[self.FIRST].reason)
        self.assertEqual([self.SECOND], offered(found[self.SECOND]))

    def test_noticed_when_amdgpu_has_started(self):
        before = self.gpu.state(self.FIRST)
        self.show(self.FIRST, '0')
        self.assertNotEqual(before, self.gpu.state(self.FIRST))

    def test_shown_by_kfd_alone(self):
        """As of GPUs that are in no hive: they have no xgmi_hive_info."""
        for node, (location, hive) in enumerate(
                ((0, 0), (0x0f00, 7), (0x0a00, 0))):
            path = self.machine.sys / fabric._KFD / str(node) / 'properties'
            path.parent.mkdir(parents=True)
            path.write_text(f'simd_count 480\nlocation_id {location}\n'
                            f'domain 0\nhive_id {hive}\n')
        found = self.gpu.discover()
        self.assertEqual([self.FIRST], offered(found[self.FIRST]))
        self.assertIn('XGMI joins it', found[self.SECOND].reason)
        self.assertIn('XGMI may join it', found['0000:4a:00.0'].reason)


#: a GPU of AMD and one of Intel below the switches of their cards: vendor, ids
#: of the ports and of the GPU, class, and the link that the GPU shows
OWN_SWITCHES = {
    'Navi': ('1002', '1478', '1479', '744c', '030000', ('32.0', 16)),
    'Arc Pro': ('8086', 'e2ff', 'e2f0', 'e223', '030000', ('2.5', 1))}


@ddt.ddt
class SlotLinkTest(configured.TestCase):
    """The link of a card with a switch of its own is that of its slot."""

    ROOT, UP, DOWN, GPU = (f'0000:{bus}.0' for bus in (
        '00:01', '01:00', '02:00', '03:00'))

    def start(self, kind):
        vendor, up, down, device, class_, link = OWN_SWITCHES[kind]
        above = ['pci0000:00', self.ROOT, self.UP, self.DOWN]
        self.machine = self.useFixture(machines.Machine(functions=[
            {'at': self.ROOT, 'ids': '1022:14ab', 'class': '0604',
             'below': above[:1], 'link': ['32.0', 16]},
            {'at': self.UP, 'ids': f'{vendor}:{up}', 'class': '0604',
             'below': above[:2], 'link': ['16.0', 16]},
            {'at': self.DOWN, 'ids': f'{vendor}:{down}', 'class': '0604',
             'below': above[:3], 'link': link},
            {'at': self.GPU, 'ids': f'{vendor}:{device}', 'class': class_,
             'below': above, 'link': link}]))
        self.driver = gpu.GpuDriver(self.machine.kernel)
        self.config.config(include_devices=[f'vendor={vendor}'],
                           group='accel')
        self.device, = self.driver.discover().values()

    def read(self):
        return [*self.driver.health(self.device)]

    @ddt.data(*OWN_SWITCHES)
    def test_width_and_speed(self, kind):
        self.start(kind)
        self.assertEqual([], self.read())
        # as others have seen, at a bad contact
        self.machine.write(self.UP, current_link_width=8)
        self.assertEqual([('link_width', 8, 'of 16')], self.read())
        self.machine.write(self.UP, current_link_width=4,
                           current_link_speed='8.0 GT/s PCIe')
        self.assertEqual([('link_width_half', 4, 'of 16'),
                          ('link_speed', 8000, 'of 16000')], self.read())
        # a slot that has no more
        self.machine.write(self.ROOT, max_link_width=4,
                           max_link_speed='8.0 GT/s PCIe')
        self.assertEqual([], self.read())

    @ddt.data(*OWN_SWITCHES)
    def test_errors_of_both_ends(self, kind):
        self.start(kind)
        self.machine.write(self.UP, aer_dev_fatal='DLP 2\nTOTAL_ERR_FATAL 2')
        self.machine.write(self.ROOT,
                           aer_dev_nonfatal='SDES 1\nTOTAL_ERR_NONFATAL 1')
        self.machine.write(self.GPU, aer_dev_fatal='MalfTLP 3')
        # on the card
        self.machine.write(self.DOWN, aer_dev_fatal='DLP 7')
        self.assertEqual([('fatal_errors', 3, 'MalfTLP'),
                          ('link_errors', 2, f'DLP at port {self.UP}'),
                          ('link_errors', 1, f'SDES at port {self.ROOT}')],
                         self.read())

    def test_recorded_machine(self):
        """A topology tool shows one of the two ports of a switch."""
        machine = self.useFixture(machines.Machine('mi300x-8'))
        end, port, address = '0000:0a:00.0', '0000:08:00.0', '0000:0c:00.0'
        link = {'max_link_width': 16, 'max_link_speed': '32.0 GT/s PCIe'}
        for function in end, port, address:
            machine.write(function, **link)
        machine.write(end, current_link_width=8)
        self.assertIn(('link_width', 8, 'of 16'), [*bus.readings(
            machine.kernel, address, pci.bridges(machine.kernel, address))])

    def test_in_the_file_of_nccl(self):
        self.start('Navi')
        places = [guest_devices.Place(self.GPU, f'0000:0{n}:00.0', -1)
                  for n in (1, 2)]
        self.assertIn('<pci busid="0000:01:00.0"/>', guest_devices.topology(
            self.machine.kernel, places))
        self.machine.write(self.UP, max_link_speed='32.0 GT/s PCIe')
        self.assertIn(
            '<pci busid="0000:02:00.0" link_width="16" '
            'link_speed="32.0 GT/s PCIe"/>', guest_devices.topology(
                self.machine.kernel, places))


class ProductTest(configured.TestCase):

    def test_recovery_mode(self):
        """A U30 whose shell is damaged has other ids."""
        machine = self.useFixture(machines.Machine(functions=[
            {'at': '0000:5e:00.0', 'ids': '10ee:abcd', 'class': '0580'}]))
        device, = xrt.XrtDriver(machine.kernel).discover().values()
        self.assertEqual([], offered(device))
        self.assertIn('it is in recovery mode', device.reason)

    def test_vck5000(self):
        """Of the class 0580, as one was recorded."""
        machine = self.useFixture(machines.Machine(functions=[
            {'at': '0000:5e:00.0', 'ids': '10ee:5048', 'class': '0580'}]))
        device = xrt.XrtDriver(machine.kernel).identify('0000:5e:00.0')
        self.assertLessEqual(
            {'CUSTOM_FPGA_XILINX_VCK5000', 'CUSTOM_FPGA_XILINX_VERSAL'},
            naming.device_traits(device))


@ddt.ddt
class CaptureTest(configured.TestCase):
    """Two real GPUs, each in a virtual machine without an IOMMU."""

    @ddt.data('h100', 'h200')
    def test_right(self, name):
        self.config.config(
            include_devices=['address=0000:00:06.0'], group='accel')
        driver = gpu.GpuDriver(captured.CapturedKernel(
            str(machines.DATA / f'captures/{name}-guest.yaml')))
        device, = driver.discover().values()
        self.assertEqual(
            (name.upper(), 'HOPPER', []),
            (device.product, device.family, offered(device)))
        self.assertIn('has no IOMMU group', device.reason)
        self.assertEqual([], list(driver.health(device)))
