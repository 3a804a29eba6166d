# Licensed under the Apache License, Version 2.0. See LICENSE.
"""BAR0 as the kernel of this machine shows it; its calls are imitated."""

import errno
import fcntl
import mmap
import os
import struct
from unittest import mock

import fixtures
import testtools

from nova_accel.host import nvidia

A = '0000:5e:00.0'
SIZE = 16384
WORD = 0x2010


class TestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.root = self.useFixture(fixtures.TempDir()).path
        self.device = f'{self.root}/sys/bus/pci/devices/{A}'
        self.write(f'{self.device}/resource0', bytes(SIZE))
        self.set_word(0x3ff)

    def write(self, path, data=b''):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'wb') as file:
            file.write(data)

    def set_word(self, value):
        with open(f'{self.device}/resource0', 'r+b') as file:
            file.seek(WORD)
            file.write(struct.pack('<I', value))

    def assertReads(self, read, *expected):
        for value in expected:
            self.set_word(value)
            self.assertEqual(value, read(WORD))
        self.assertEqual(0, read(SIZE - 4))
        error = self.assertRaises(OSError, read, SIZE)
        self.assertEqual(errno.ERANGE, error.errno)
        self.assertEqual(f'its BAR0 has {SIZE} bytes, and no word at '
                         f'{SIZE:#x}', error.strerror)


class SysfsTest(TestCase):

    def setUp(self):
        super().setUp()
        self.written = []

    def opened(self):
        return nvidia.by_sysfs(
            f'{self.root}/sys', A,
            lambda path, text: self.written.append((path, text)))

    def test_reads_and_resets(self):
        with self.opened() as (read, reset):
            self.assertReads(read, 0x3ff, 0, 0xffffffff)
            reset()
        self.assertEqual([(f'{self.device}/{name}', text) for name, text in (
            ('enable', '1'), ('reset', '1'), ('enable', '0'))], self.written)

    def test_kernel_that_is_locked_down(self):
        def refuses(*args):
            raise PermissionError(errno.EPERM, 'Operation not permitted')
        with mock.patch.object(mmap, 'mmap', refuses):
            error = self.assertRaises(OSError, self.opened().__enter__)
        self.assertEqual(errno.EPERM, error.errno)
        self.assertEqual('0', self.written[-1][1])

    def test_bar_is_never_written(self):
        with self.opened() as (read, _):
            items = read.__closure__[0].cell_contents
            self.assertTrue(items.readonly)


class VfioTest(TestCase):
    """The protocol of include/uapi/linux/vfio.h."""

    def setUp(self):
        super().setUp()
        self.calls = []
        os.symlink('../../../kernel/iommu_groups/7',
                   f'{self.device}/iommu_group')
        self.write(f'{self.device}/vfio-dev/vfio3/dev')
        for name in 'vfio/vfio', 'vfio/7', 'vfio/devices/vfio3', 'iommu':
            self.write(f'{self.root}/dev/{name}')
        self.refused = None
        self.useFixture(fixtures.MonkeyPatch('fcntl.ioctl', self.ioctl))

    def ioctl(self, fd, request, argument=0):
        node = os.readlink(f'/proc/self/fd/{fd}').removeprefix(self.root)
        if self.refused == request:
            raise OSError(errno.EBUSY, 'Device or resource busy')
        self.calls.append((node, request))
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        self.assertEqual(node not in (
            '/dev/vfio/7', f'{self.device}/resource0'.removeprefix(self.root)),
            writable)
        if request == 0x3b6a:
            self.assertEqual(f'{A}\0'.encode(), bytes(argument))
            return os.open(f'{self.device}/resource0', os.O_RDONLY)
        if request == 0x3b6c:
            argsz, _, index, *_ = struct.unpack('=IIIIQQ', argument)
            self.assertEqual((32, 0), (argsz, index))
            return struct.pack('=IIIIQQ', 32, 3, 0, 0, SIZE, 0)
        if request == 0x3b71:
            argsz, _, count, *fds = struct.unpack(
                f'=III{len(argument) // 4 - 3}i', argument)
            self.assertEqual((len(argument), len(fds)), (argsz, count))
            self.reset_with = [os.readlink(f'/proc/self/fd/{group}')
                               .removeprefix(self.root) for group in fds]
        if request == 0x3b68:
            container, = struct.unpack('=i', argument)
            self.assertTrue(os.readlink(f'/proc/self/fd/{container}').endswith(
                '/dev/vfio/vfio'))
        return 0 if isinstance(argument, int) else argument

    def opened(self):
        return nvidia.by_vfio(f'{self.root}/sys', f'{self.root}/dev', A)

    def open_files(self):
        return len(os.listdir('/proc/self/fd'))

    def test_by_its_group(self):
        before = self.open_files()
        with self.opened() as (read, reset):
            self.assertReads(read, 0x3ff, 0, 0xffffffff)
            reset()
        self.assertEqual(['/dev/vfio/7'], self.reset_with)
        self.assertEqual([0x3b68, 0x3b66, 0x3b6a, 0x3b6c, 0x3b71],
                         [request for _, request in self.calls])
        self.assertEqual(before, self.open_files())

    def test_kernel_without_groups(self):
        os.unlink(f'{self.root}/dev/vfio/7')
        self.device_node = f'{self.root}/dev/vfio/devices/vfio3'
        os.unlink(self.device_node)
        os.link(f'{self.device}/resource0', self.device_node)
        before = self.open_files()
        with self.opened() as (read, reset):
            self.assertReads(read, 0x3ff, 0)
            reset()
        self.assertEqual([], self.reset_with)
        self.assertEqual([0x3b76, 0x3b6c, 0x3b71],
                         [request for _, request in self.calls])
        self.assertEqual(before, self.open_files())

    def test_function_that_is_open(self):
        """Nothing of it stays open here."""
        before = self.open_files()
        for self.refused in 0x3b68, 0x3b66, 0x3b6a, 0x3b6c:
            error = self.assertRaises(OSError, self.opened().__enter__)
            self.assertEqual(errno.EBUSY, error.errno)
            self.assertEqual(before, self.open_files())
