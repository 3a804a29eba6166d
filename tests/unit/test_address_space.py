# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whether guests see all of their devices with large memory regions."""

import dataclasses
from xml.etree import ElementTree

import ddt
from nova.virt.libvirt import config
import testtools

from nova_accel.drivers import gpu
from nova_accel import exception
from nova_accel.host import address_space as host_address_space
from nova_accel import model
from nova_accel.virt import guest
from tests.unit.host import A, B, SimulatedHost

GIB = 1 << 30


@ddt.ddt
class PlacedTest(testtools.TestCase):

    # GiB of memory, devices, GiB of a region, bits -> how many are seen, and
    # whether OVMF's window (an eighth) has room for all of them
    @ddt.data(
        # H100 NVL: blog.rackspacecloud.com, December 2025
        ((256, 4, 128, 40), 3, False), ((512, 4, 128, 40), 2, False),
        ((768, 4, 128, 40), 1, False), ((256, 4, 128, 46), 4, True),
        ((512, 4, 128, 46), 4, True), ((768, 4, 128, 46), 4, True),
        # L40S, A100 of 80 GB
        ((64, 1, 8, 40), 1, True), ((64, 1, 32, 40), 1, False),
        ((64, 1, 64, 40), 1, False), ((256, 8, 128, 46), 8, True),
        # H100, H200, B200 and MI300X, eight of them with 2 TiB
        ((2048, 8, 128, 46), 8, True), ((2048, 8, 256, 46), 8, True),
        # 512 GiB each: seven of eight, tianocore/edk2 pull request 12997
        ((2048, 8, 512, 46), 8, False), ((2048, 7, 512, 46), 7, True),
        # a desktop: 39 bits
        ((32, 1, 256, 39), 1, False), ((300, 1, 256, 39), 0, False),
        # more is not used by the firmware
        ((64 << 10, 1, 128, 52), 0, True), ((256, 0, 128, 40), 0, True))
    @ddt.unpack
    def test_table(self, case, seen, uefi):
        memory, count, size, bits = case
        sizes = [size * GIB] * count
        self.assertEqual((seen, uefi), (
            host_address_space.placed(memory * GIB, sizes, bits),
            host_address_space.fits_uefi(sizes, bits)))


#: GB of a GPU's memory, as its vendor says, by product of the driver gpu. Of
#: MI250 and MI250X for each of its two functions. The largest region has at
#: most the memory, up to the next power of two
MEMORY = {
    'NVIDIA': {
        'TESLA_P4': 8, 'TESLA_P6': 16, 'TESLA_P10': 24, 'TESLA_P40': 24,
        'TESLA_P100': 16, 'TESLA_V100': 32, 'TESLA_V100S': 32, 'TESLA_T4': 16,
        'T4G': 16, 'TESLA_T10': 16, 'TESLA_T40': 24, 'A100': 80, 'A100X': 80,
        'A800': 80, 'AX800': 80, 'A30': 24, 'A30X': 24, 'A40': 48, 'A10': 24,
        'A10G': 24, 'A10M': 20, 'A16': 16, 'A2': 16, 'RTX_A6000': 48,
        'RTX_A5500': 24, 'RTX_A5000': 24, 'RTX_A4500': 20, 'L40': 48,
        'L40_CNX': 48, 'L40G': 24, 'L40S': 48, 'L30': 24, 'L20': 48, 'L16': 16,
        'L2': 24,
        'L4': 24, 'RTX_6000_ADA': 48, 'RTX_5880_ADA': 48, 'RTX_5000_ADA': 32,
        'H100L': 94, 'H100': 96, 'H100_CNX': 80, 'H800': 80, 'H800L': 94,
        'H20': 141, 'H20B': 96, 'H20_NVL16': 96, 'H200': 141, 'H200_NVL': 141,
        'GH200': 144, 'B100': 192, 'B200': 180, 'B300': 288, 'GB200': 186,
        'GB300': 288, 'GB10': 128, 'RTX_PRO_6000': 96, 'RTX_PRO_6000D': 84,
        'RTX_6000D': 84, 'RTX_PRO_5000': 72, 'RTX_PRO_4500': 32,
        'RTX_PRO_4000': 24},
    'AMD': {
        'MI25': 16, 'MI50': 32, 'MI60': 32, 'MI100': 32, 'MI250X': 64,
        'MI250': 64, 'MI210': 64, 'MI300A': 128, 'MI300X': 192,
        'MI300X_HF': 192, 'MI308X': 192, 'MI325X': 256, 'MI350P': 144,
        'MI350X': 288, 'MI355X': 288, 'V340': 16, 'V520': 8, 'V620': 32,
        'V710': 28, 'W7900': 48, 'W7800': 48, 'R9700': 32},
    'INTEL': {
        'FLEX_170': 16, 'FLEX_170V': 16, 'FLEX_140': 6, 'MAX_1550': 128,
        'MAX_1550VG': 128, 'MAX_1450': 128, 'MAX_1350': 96, 'MAX_1100': 48,
        'MAX_1100C': 48, 'ARC_PRO_A40': 6, 'ARC_PRO_A60': 12,
        'ARC_PRO_B50': 16, 'ARC_PRO_B60': 24, 'ARC_PRO_B65': 32,
        'ARC_PRO_B70': 32, 'SG1': 8}}
#: GiB of a region -> how many of eight a guest of 256 GiB sees that is told 40
#: bits, and one of 2 TiB that is told 46
SEEN = {8: (8, 8), 16: (8, 8), 32: (8, 8), 64: (6, 8), 128: (3, 8),
        256: (1, 8), 512: (1, 8)}


@ddt.ddt
class ProductTest(testtools.TestCase):

    def test_all_products_are_here(self):
        self.assertEqual(
            {(gpu.VENDORS[vendor], product)
             for (vendor, *_), (product, _) in {
                 **gpu.PRODUCTS, **gpu.BOARDS}.items()},
            {(vendor, product) for vendor, products in MEMORY.items()
             for product in products})

    @ddt.data(*((product, memory) for products in MEMORY.values()
                for product, memory in products.items()))
    @ddt.unpack
    def test_eight(self, product, memory):
        region = 1 << (memory - 1).bit_length()
        sizes = [region * GIB] * 8
        self.assertEqual(SEEN[region], tuple(
            host_address_space.placed(gib * GIB, sizes, bits)
            for gib, bits in ((256, 40), (2048, 46))))
        # of B300, MI350X and MI355X seven
        self.assertEqual(
            region < 512, host_address_space.fits_uefi(sizes, 46))


@ddt.ddt
class GuestTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.xml = config.LibvirtConfigGuest()
        self.xml.uuid, self.xml.name = 'the-server', 'instance-1'
        self.xml.virt_type, self.xml.memory = 'kvm', 512 << 20
        self.xml.cpu = config.LibvirtConfigGuestCPU()
        self.xml.cpu.mode = 'host-model'

    def make_room(self, gib=(128, 128), bits=46, can_emulate=True,
                  is_new=True, together=False):
        kernel = self.useFixture(SimulatedHost(address_bits=bits, gpus=[
            {'address': address, 'bar_gib': size}
            for address, size in zip((A, B), gib)])).kernel
        handles = [model.AttachHandle(model.HandleType.PCI, address)
                   for address in (A, B)]
        if together:
            handles = [dataclasses.replace(
                handles[0], companions=(B,), parent='0000:01:00.0')]
        guest.make_room(
            self.xml, handles, kernel, can_emulate, is_new)
        found = ElementTree.fromstring(self.xml.to_xml()).find(
            'cpu/maxphysaddr')
        return None if found is None else dict(found.attrib)

    def of_flavor(self, mode, bits=None):
        self.xml.cpu.maxphysaddr = config.LibvirtConfigGuestCPUMaxPhysAddr()
        self.xml.cpu.maxphysaddr.mode = mode
        self.xml.cpu.maxphysaddr.bits = bits

    @ddt.data(39, 46, 52)
    def test_bits_of_the_host(self, bits):
        self.xml.memory = 64 << 20
        self.assertEqual({'mode': 'emulate', 'bits': str(bits)},
                         self.make_room(bits=bits))

    def test_small_devices(self):
        self.assertIsNone(self.make_room(gib=(2, 0)))

    def test_cpu_of_the_host(self):
        self.xml.cpu.mode = 'host-passthrough'
        self.assertIsNone(self.make_room())

    def test_emulated_machine(self):
        """QEMU's TCG refuses any other number (x86_cpu_realizefn())."""
        self.xml.virt_type = 'qemu'
        self.assertIsNone(self.make_room())
        self.xml.memory = 768 << 20
        self.assertRaises(exception.DeviceUnavailable, self.make_room)

    def test_flavor_says_it(self):
        self.of_flavor('passthrough')
        self.assertEqual({'mode': 'passthrough'}, self.make_room())
        self.of_flavor('emulate', 42)
        self.assertEqual({'mode': 'emulate', 'bits': '42'}, self.make_room())

    def test_flavor_says_too_little(self):
        self.of_flavor('emulate', 40)
        self.xml.memory = 768 << 20
        error = self.assertRaises(exception.DeviceUnavailable, self.make_room)
        self.assertIn('of its 2 devices with large memory regions 1 fit above '
                      'its 768 GiB of memory into 40 bits', str(error))
        self.assertLessEqual(len(str(error)), 255)
        # what is there starts
        self.make_room(is_new=False)

    def test_libvirt_that_cannot(self):
        self.assertIsNone(self.make_room(can_emulate=False))
        self.xml.memory = 768 << 20
        self.assertRaises(exception.DeviceUnavailable, self.make_room,
                          can_emulate=False)

    def test_functions_that_are_given_together(self):
        """Each needs room, not only the first."""
        self.assertIsNone(self.make_room(gib=(2, 0), together=True))
        self.assertEqual({'mode': 'emulate', 'bits': '46'},
                         self.make_room(gib=(2, 128), together=True))

    def test_host_that_is_too_small(self):
        self.assertRaises(exception.DeviceUnavailable, self.make_room,
                          bits=39)

    def test_without_a_cpu(self):
        """[libvirt] cpu_mode = none."""
        self.xml.cpu = None
        self.assertIsNone(self.make_room())
