# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Real machines: what nova_accel finds of them is what their files say.

``right`` of a file was written by hand, from documents.
"""

import ddt
import fixtures

from nova_accel.drivers import gpu
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
