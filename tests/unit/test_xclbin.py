# Licensed under the Apache License, Version 2.0. See LICENSE.

import os
import struct
import tracemalloc
import uuid

import ddt
import fixtures
from hypothesis import assume
from hypothesis import given
from hypothesis import strategies as st
import testtools

from nova_accel import bitstream
from nova_accel.bitstream import gbs
from nova_accel.bitstream import xclbin
from nova_accel import exception
from nova_accel import sim

INTERFACE = uuid.UUID('862c7020-a250-293e-3203-6f19956669e5')
FUNCTION = uuid.UUID('6d696c61-6e6f-4b1d-a110-c0ffee00d00d')
HEADER = 456


def layout(*names, kind=1, count=None):
    """The section IP_LAYOUT."""
    return struct.pack('<ii', len(names) if count is None else count, 0) + (
        b''.join(struct.pack('<IIQ', kind, 0, 0x1000) + name.ljust(64, b'\0')
                 for name in names))


def make(sections=((0, b'\x5a' * 64), (8, layout(b'vadd:vadd_1'))), mode=1,
         length=None, count=None, signature=-1, interface=INTERFACE.bytes,
         function=FUNCTION.bytes, places=None, tail=b''):
    """An xclbin by the offsets of struct axlf, as a compiler lays it out."""
    start = HEADER + 40 * len(sections)
    data = bytearray(start) + b''.join(content for _, content in sections)
    at = start
    for number, (kind, content) in enumerate(sections):
        header = HEADER + 40 * number
        offset, size = (places or {}).get(number, (at, len(content)))
        struct.pack_into('<I', data, header, kind)
        struct.pack_into('<QQ', data, header + 24, offset, size)
        at += len(content)
    data[0:8] = b'xclbin2\0'
    struct.pack_into('<i', data, 8, signature)
    data[12:40] = b'\xff' * 28
    struct.pack_into('<Q', data, 304, len(data) if length is None else length)
    struct.pack_into('<H', data, 332, mode)
    data[336:352] = interface
    data[352:374] = b'xilinx:u250:gen3x16:0\0'
    data[416:432] = function
    struct.pack_into('<I', data, 448,
                     len(sections) if count is None else count)
    return bytes(data) + tail


@ddt.ddt
class XclbinTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'f.xclbin')

    def parse(self, data, name='image 4711'):
        with open(self.path, 'wb') as file:
            file.write(data)
        return xclbin.parse(self.path, name)

    def refused(self, data):
        """The error's text, which always names the image and ends well."""
        text = str(self.assertRaises(
            exception.BitstreamError, self.parse, data))
        self.assertThat(text, testtools.matchers.StartsWith('image 4711 '))
        self.assertThat(text, testtools.matchers.EndsWith('.'))
        self.assertTrue(text.isprintable(), text)
        self.assertLess(len(text), 255)
        return text

    def test_what_is_linked(self):
        data = make()
        found = self.parse(data)
        self.assertEqual((INTERFACE.hex, FUNCTION.hex, self.path, 0,
                          len(data)),
                         (found.region_type_uuid, found.function_uuid,
                          found.path, found.payload_offset,
                          found.payload_size))
        self.assertEqual(('vadd:vadd_1',),
                         xclbin.kernels(xclbin.layout(self.path)))

    @ddt.data(0, 18, 19)
    def test_what_programs_the_hardware(self, kind):
        self.assertEqual(FUNCTION.hex,
                         self.parse(make([(kind, b'x')])).function_uuid)

    def test_what_the_simulator_writes(self):
        for versal in (False, True):
            sim.make_xclbin(self.path, str(FUNCTION), str(INTERFACE),
                            kernels=('a', 'krnl_b'), versal=versal)
            found = xclbin.parse(self.path)
            self.assertEqual(
                (INTERFACE.hex, FUNCTION.hex, os.path.getsize(self.path)),
                (found.region_type_uuid, found.function_uuid,
                 found.payload_size))
            self.assertEqual(('a:a_1', 'krnl_b:krnl_b_1'),
                             xclbin.kernels(xclbin.layout(self.path)))
        sim.make_xclbin(self.path, str(FUNCTION), str(INTERFACE),
                        stripped=True)
        self.assertIn('stripped', str(self.assertRaises(
            exception.BitstreamError, xclbin.parse, self.path)))

    def test_bytes_after_the_end_are_not_of_it(self):
        data = make()
        self.assertEqual(len(data),
                         self.parse(data + bytes(99)).payload_size)

    def test_stripped(self):
        for sections in ([(8, layout())], [(0, b''), (8, layout())]):
            self.assertIn('stripped', self.refused(make(sections)))

    def test_something_else(self):
        text = self.refused(b'\x7fELF' + bytes(500))
        self.assertIn('at offset 0 ', text)
        self.assertIn('7f454c46', text)
        self.refused(b'xclbin1\0' + make()[8:])

    def test_file_for_other_fpgas(self):
        with open(self.path, 'wb') as file:
            file.write(bitstream.GBS + bytes(500))
        error = self.assertRaises(exception.IncompatibleBitstream,
                                  xclbin.parse, self.path, 'image 4711')
        self.assertIn('image 4711 is a GBS file, for FPGAs of Intel',
                      str(error))
        with open(self.path, 'wb') as file:
            file.write(make())
        error = self.assertRaises(exception.IncompatibleBitstream,
                                  gbs.parse, self.path, 'image 4711')
        self.assertIn('image 4711 is an xclbin file', str(error))
        # another host may have the FPGA for it
        self.assertTrue(error.elsewhere)

    @ddt.data((0, 'flat'), (4, 'emulation'), (5, 'emulation'),
              (6, 'emulation'), (7, 'is 7'), (0xffff, 'is 65535'))
    @ddt.unpack
    def test_modes_that_program_nothing(self, mode, part):
        self.assertIn(part, self.refused(make(mode=mode)))

    @ddt.data((3, 'FIRMWARE'), (5, 'SCHED_FIRMWARE'), (12, 'MCS'),
              (13, 'BMC'), (24, 'ASK_FLASH'))
    @ddt.unpack
    def test_shell_or_flash_image(self, kind, name):
        text = self.refused(make([(0, b'x'), (kind, b'y')]))
        self.assertIn(f'the section {name}, which only shells', text)
        self.assertIn(f'offset {HEADER + 40} ', text)

    def test_missing_uuids(self):
        self.assertIn('older shell', self.refused(make(interface=bytes(16))))
        self.assertIn('the UUID of the file is zero',
                      self.refused(make(function=bytes(16))))

    @ddt.data(0, 0x10001, 0xffffffff)
    def test_number_of_sections(self, count):
        self.assertIn(f'is {count} and has', self.refused(make(count=count)))

    def test_length(self):
        size = len(make())
        for length, part in ((0, 'the length is 0 and'),
                             (HEADER + 79, f'has to be {HEADER + 80} to'),
                             (size + 1, f'before its length of {size + 1}'),
                             ((1 << 30) + 1, f'to {1 << 30}'),
                             ((1 << 64) - 1, f'to {1 << 30}')):
            self.assertIn(part, self.refused(make(length=length)))

    @ddt.data(0, -2, 1 << 20, -1 << 31)
    def test_length_of_the_signature(self, signature):
        # the driver subtracts it from the length
        self.assertIn('signature', self.refused(make(signature=signature)))

    def test_signed(self):
        data = make(signature=8, tail=b'signed!!')
        data = bytearray(data)
        struct.pack_into('<Q', data, 304, len(data))
        self.assertEqual(len(data), self.parse(bytes(data)).payload_size)

    @ddt.data((0, 64), (HEADER, 64), (HEADER + 80, 10 ** 6), (10 ** 6, 1),
              ((1 << 64) - 8, 16), (HEADER + 80, (1 << 64) - 1))
    def test_sections_outside(self, place):
        # the driver would read there
        for number in (0, 1):
            text = self.refused(make(places={number: place}))
            self.assertIn(f'section {number} of kind {(0, 8)[number]}', text)

    @ddt.data(-1, 2, 1 << 30)
    def test_number_of_ips(self, count):
        self.assertIn(f'IP_LAYOUT has {count} IPs', self.refused(
            make([(0, b'x'), (8, layout(b'a', count=count))])))

    def test_size_of_the_layout(self):
        self.assertIn('IP_LAYOUT has 7 bytes',
                      self.refused(make([(0, b'x'), (8, bytes(7))])))

    def test_kernels(self):
        self.assertEqual(('a:a_1', 'b:b_1'), xclbin.kernels(
            layout(b'a:a_1', b'b:b_1')))
        self.assertEqual((), xclbin.kernels(layout(b'ddr', kind=3)))
        self.assertEqual((), xclbin.kernels(b''))
        self.assertEqual(('a',), xclbin.kernels(layout(b'a', b'b')[:-1]))
        self.parse(make([(0, b'x')]))
        self.assertEqual(b'', xclbin.layout(self.path))

    def test_truncated_anywhere(self):
        data = make()
        for length in range(len(data)):
            self.refused(data[:length])

    def test_file_missing(self):
        error = self.assertRaises(exception.BitstreamError, xclbin.parse,
                                  '/nowhere/f', 'image 4711')
        self.assertIn('image 4711 cannot be read as an xclbin file (No such ',
                      str(error))

    def test_bitstream_is_not_read(self):
        data = bytearray(make([(8, layout(b'a')), (0, b'')]))
        size = 1 << 30
        struct.pack_into('<QQ', data, HEADER + 64, len(data),
                         size - len(data))
        struct.pack_into('<Q', data, 304, size)
        with open(self.path, 'wb') as file:
            file.write(data)
            file.truncate(size)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        self.assertEqual(size, xclbin.parse(self.path).payload_size)
        self.assertLess(tracemalloc.get_traced_memory()[1], 256 << 10)

    @given(st.binary(max_size=600))
    def test_any_bytes(self, data):
        assume(not data.startswith(bitstream.GBS))
        self.refused(data)
        self.refused(b'xclbin2\0' + data)

    @given(st.integers(0, 700), st.binary(min_size=1, max_size=8))
    def test_any_damage(self, offset, damage):
        """Damage is refused or leaves a file that is safe for the driver."""
        data = make()
        data = data[:offset] + damage + data[offset + len(damage):]
        try:
            found = self.parse(data)
        except (exception.BitstreamError, exception.IncompatibleBitstream):
            return
        length, = struct.unpack_from('<Q', data, 304)
        self.assertEqual((0, length),
                         (found.payload_offset, found.payload_size))
        self.assertLessEqual(length, len(data))
        for number in range(struct.unpack_from('<I', data, 448)[0]):
            at, size = struct.unpack_from('<QQ', data,
                                          HEADER + 40 * number + 24)
            self.assertLessEqual(at + size, length)

    @given(st.uuids(), st.uuids(),
           st.lists(st.tuples(st.sampled_from([0, 2, 6, 7, 11, 20, 26]),
                              st.binary(max_size=40)), max_size=6))
    def test_round_trip(self, interface, function, sections):
        if not interface.int or not function.int:
            return
        found = self.parse(make([(18, b'x'), *sections],
                                interface=interface.bytes,
                                function=function.bytes))
        self.assertEqual((interface.hex, function.hex),
                         (found.region_type_uuid, found.function_uuid))
