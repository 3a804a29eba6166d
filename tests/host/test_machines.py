# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Real machines: what nova_accel finds of them is what their files say.

``right`` of a file was written by hand, from documents.
"""

import shutil

import ddt
import fixtures

from nova_accel.drivers import fabric
from nova_accel.drivers import gpu
from nova_accel.drivers import pci_rule
from nova_accel.host import pci
from nova_accel import model
from nova_accel.sim import captured
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

    def place(self, address):
        return self.machine.sys / pci.DEVICES / address

    def show(self, address, hive):
        """Have amdgpu show the hive of a GPU."""
        directory = self.place(address) / 'xgmi_hive_info'
        directory.mkdir()
        (directory / 'xgmi_hive_id').write_text(f'{hive}\n')

    def end(self, address):
        """Take the GPU from amdgpu."""
        shutil.rmtree(self.place(address) / 'xgmi_hive_info')

    @ddt.data(gpu.GpuDriver, pci_rule.PciRuleDriver)
    def test_remembered(self, driver):
        driver = driver(self.machine.kernel)
        # MI100, whose product alone would be refused
        self.show(self.FIRST, '0')
        # another product, which would be offered
        self.show(self.SECOND, '18013298997854213')
        (self.place(self.SECOND) / 'device').write_text('0x744c\n')
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
