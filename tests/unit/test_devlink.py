# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Messages of devlink, in the form of the kernel's headers."""

import errno
import struct

import testtools

from nova_accel.host import devlink


def attribute(kind, value):
    return struct.pack('=HH', 4 + len(value), kind) + value + b'\0' * (
        -len(value) % 4)


def message(kind, body):
    return struct.pack('=IHHII', 16 + len(body), kind, 0, 1, 0) + body


def version(kind, name, value):
    # 0x8000: nested
    return attribute(kind | 0x8000, attribute(103, name + b'\0')
                     + attribute(104, value + b'\0'))


class DevlinkTest(testtools.TestCase):

    def test_request(self):
        found = devlink.request(21, 51, {1: 'pci', 2: '0000:02:00.0'})
        self.assertEqual(message(21, b'')[4:6], found[4:6])
        self.assertEqual(len(found), struct.unpack_from('=I', found)[0])
        self.assertEqual(b'\x33\x01\0\0', found[16:20])
        self.assertEqual(attribute(1, b'pci\0')
                         + attribute(2, b'0000:02:00.0\0'), found[20:])

    def test_versions(self):
        body = b'\x33\x01\0\0' + attribute(98, b'ptp_ocp\0') + version(
            101, b'fw', b'32771') + version(100, b'board.id', b'R1')
        found = dict(devlink._version(value) for kind, value
                     in devlink.answer(message(21, body))
                     if kind in devlink._VERSIONS)
        self.assertEqual({'fw': '32771', 'board.id': 'R1'}, found)

    def test_error(self):
        for text, number in ((message(2, struct.pack('=i', -errno.ENODEV)),
                              errno.ENODEV), (b'', errno.EPROTO)):
            error = self.assertRaises(OSError, devlink.answer, text)
            self.assertEqual(number, error.errno)

    def test_attributes_that_end_too_early(self):
        self.assertEqual([(1, b'')], list(devlink.attributes(
            struct.pack('=HHHH', 4, 1, 0, 9))))

    def test_function_without_devlink(self):
        """On the kernel of this machine."""
        try:
            self.assertEqual({}, devlink.versions('ffff:ff:1f.7'))
        except PermissionError:
            self.skipTest('no netlink here')
