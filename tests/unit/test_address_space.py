# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whether guests see all of their devices with large memory regions."""

from xml.etree import ElementTree

import ddt
from nova.virt.libvirt import config
import testtools

from nova_accel import exception
from nova_accel.host import address_space as host_address_space
from nova_accel import model
from nova_accel.virt import address_space
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
                  is_new=True):
        kernel = self.useFixture(SimulatedHost(address_bits=bits, gpus=[
            {'address': address, 'bar_gib': size}
            for address, size in zip((A, B), gib)])).kernel
        address_space.make_room(
            self.xml, [model.AttachHandle(model.HandleType.PCI, address)
                       for address in (A, B)], kernel, can_emulate, is_new)
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

    def test_host_that_is_too_small(self):
        self.assertRaises(exception.DeviceUnavailable, self.make_room,
                          bits=39)

    def test_without_a_cpu(self):
        """[libvirt] cpu_mode = none."""
        self.xml.cpu = None
        self.assertIsNone(self.make_room())
