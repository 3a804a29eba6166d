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

    def test_without_a_domain(self):
        for text, found in (('5e:00.0', '0000:5e:00.0'),
                            ('5E:00.0', '0000:5e:00.0'),
                            ('10000:01:00.0', '10000:01:00.0'),
                            ('0000:5e:00.0', '0000:5e:00.0'),
                            ('5e:00', '5e:00'), ('S123', 'S123')):
            self.assertEqual(found, pci.from_lspci(text))

    def test_domain_that_libvirt_refuses(self):
        self.assertIn('not support PCI domains above ffff', pci.obstacle(
            Kernel('nvme'), '10000:01:00.0'))


class PortsTest(testtools.TestCase):
    """Where a function is plugged in, without numbers of buses."""

    class Kernel:

        def __init__(self, links, **files):
            self.links, self.files = links, files

        def readlink(self, path):
            if path not in self.links:
                raise FileNotFoundError(path)
            return self.links[path]

        def read(self, path):
            if path not in self.files:
                raise FileNotFoundError(path)
            return self.files[path]

    def ports(self, *above, function=VF, pf=None, **files):
        links = {pci.path(function): '/'.join((
            '../../../devices', *above, function))}
        if pf:
            links |= {pci.path(function, 'physfn'): f'../{pf}',
                      pci.path(pf): '/'.join((
                          '../../../devices', *above, pf))}
        return pci.ports(self.Kernel(links, **files), function)

    def test_ports(self):
        for above, function, expected in (
                (('pci0000:00',), '0000:00:02.0', 'pci0000:00/02.0'),
                (('pci0000:3a', '0000:3a:01.0'), '0000:3b:00.1',
                 'pci0000:3a/01.0/00.1'),
                # the same ports, behind which the buses have other numbers
                (('pci0000:00', '0000:00:01.1', '0000:02:00.0',
                  '0000:03:08.0'), '0000:04:00.0',
                 'pci0000:00/01.1/00.0/08.0/00.0'),
                (('pci0000:00', '0000:00:01.1', '0000:05:00.0',
                  '0000:06:08.0'), '0000:07:00.0',
                 'pci0000:00/01.1/00.0/08.0/00.0'),
                # VMD, whose domains are numbered as they are found
                (('pci0000:00', '0000:00:0e.0', 'pci10001:00',
                  '10001:00:02.0'), '10001:01:00.0',
                 'pci0000:00/0e.0/00/02.0/00.0')):
            self.assertEqual(expected, self.ports(*above, function=function))

    def test_root_complex_of_acpi(self):
        """Its bus number is the firmware's, too."""
        for root in 'pci0000:3a', 'pci0000:40':
            self.assertEqual('\\_SB_.PC02/01.0/00.1', self.ports(
                root, f'{root[3:]}:01.0', **{
                    f'devices/{root}/firmware_node/path': '\\_SB_.PC02\n'}))

    def test_vf(self):
        """VFs of one PF may be on several buses."""
        found = [self.ports('pci0000:3a', '0000:3a:01.0', function=vf,
                            pf='0000:3b:00.0')
                 for vf in ('0000:3b:02.3', '0000:3c:02.3')]
        self.assertEqual(['pci0000:3a/01.0/00.0+19',
                          'pci0000:3a/01.0/00.0+275'], found)

    def test_not_a_function(self):
        self.assertEqual('', pci.ports(self.Kernel({}), 'mtty'))


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
