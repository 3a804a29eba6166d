# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whole GPUs on simulated hosts, and what else is in their slots."""

from nova_accel.drivers import gpu
from nova_accel import model
from tests.unit import configured
from tests.unit.host import A, SimulatedHost

SOUND, USB = f'{A[:-1]}1', f'{A[:-1]}2'
#: what such a card has in its slot
COMPANY = [
    {'address': SOUND, 'vendor': '10de', 'device': '10fa',
     'class': '0x040300', 'driver': 'snd_hda_intel', 'iommu_group': 7},
    {'address': USB, 'vendor': '10de', 'device': '1ad8',
     'class': '0x0c0330', 'driver': 'xhci_hcd', 'iommu_group': 7}]


class TestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.config.config(group='accel', include_devices=['address=*'])

    def start(self, *gpus, **more):
        self.kernel = self.useFixture(
            SimulatedHost(gpus=list(gpus), **more)).kernel
        self.driver = gpu.GpuDriver(self.kernel)
        return self.driver.discover()

    def refused(self, device, *said):
        self.assertEqual((model.Health.QUARANTINED, ()),
                         (device.health, device.handles))
        for text in said:
            self.assertIn(text, device.reason)
