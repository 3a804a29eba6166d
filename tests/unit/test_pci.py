# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What sysfs says of functions that VFIO has."""

import testtools

from nova_accel import exception
from nova_accel.host import pci

VF, MATE = '0000:5e:00.1', '0000:5e:00.2'


class Kernel:
    """A function with a group mate, as sysfs shows them."""

    def __init__(self, driver, enable='0', is_for_vfio=False):
        self.driver, self.enable, self.is_for_vfio = (
            driver, enable, is_for_vfio)

    def readlink(self, path):
        return {'driver': f'../drivers/{self.driver}',
                'iommu_group': '../iommu_groups/7'}[path.rpartition('/')[2]]

    def read(self, path):
        return self.enable if path.endswith('/enable') else '0x8086'

    def exists(self, path):
        return path.endswith('/vfio-dev') and self.is_for_vfio

    def listdir(self, path):
        return [VF, MATE]


class AddressTest(testtools.TestCase):

    def test_spellings(self):
        for text, expected in (
                ('0000:3B:00.0', '0000:3b:00.0'),
                ('00000000:3B:00.0', '0000:3b:00.0'),
                ('0001:3b:00.0', '0001:3b:00.0'),
                ('10000:01:00.0', '10000:01:00.0'),
                ('00010000:01:00.0 ', '10000:01:00.0'),
                ('000:3b:00.0', None), ('0000:3b:20.0', None),
                ('110000000:01:00.0', None)):
            with self.subTest(text):
                if expected:
                    self.assertEqual(expected, pci.address(text))
                else:
                    self.assertRaises(exception.ConfigurationError,
                                      pci.address, text)

    def test_domain_that_libvirt_refuses(self):
        self.assertIn('no function of a PCI domain above ffff', pci.obstacle(
            Kernel('nvme'), '10000:01:00.0'))


class VariantTest(testtools.TestCase):
    """Variants of vfio-pci, as mlx5_vfio_pci, have other names."""

    def test_open(self):
        for driver, is_for_vfio, enable, expected in (
                ('vfio-pci', True, '1', True), ('vfio-pci', False, '1', True),
                ('xe-vfio-pci', True, '1', True),
                ('xe-vfio-pci', True, '0', False),
                ('xe', False, '1', False)):
            with self.subTest(driver=driver, enable=enable):
                self.assertEqual(expected, pci.is_open(
                    Kernel(driver, enable, is_for_vfio), VF))

    def test_mate_in_its_group(self):
        self.assertEqual('', pci.obstacle(
            Kernel('mlx5_vfio_pci', is_for_vfio=True), VF))
        self.assertIn('mlx5_core', pci.obstacle(Kernel('mlx5_core'), VF))
