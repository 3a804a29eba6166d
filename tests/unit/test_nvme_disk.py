# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The lab's NVMe disk, by the messages that QEMU sends and answers."""

import array
import ctypes
import json
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import time

import fixtures
from oslotest import base

from nova_accel.host import nvme_admin
from tests import lab

HEADER = struct.Struct('<HHIII')
SET_IRQS, REGION_READ, REGION_WRITE, DMA_READ, DMA_WRITE = 8, 9, 10, 11, 12
BAR0, CONFIG = 0, 7
CC, CSTS, AQA, ASQ, ACQ, DOORBELLS = 0x14, 0x1c, 0x24, 0x28, 0x30, 0x1000
PAGE, BLOCK, ENTRIES = 4096, 512, 8
#: queues of commands and completions, by number; data
QUEUES = {0: (0x1000, 0x2000), 1: (0x3000, 0x4000)}
DATA = 0x10000
MEMORY = 1 << 20
SANITIZE_FAILED, SANITIZE_IN_PROGRESS = 0x1c, 0x1d
INVALID_NAMESPACE, ALL = 0x0b, 0xffffffff
CRYPTO, UNRESTRICTED, EXIT_FAILURE_MODE = 4, 8, 1
FLUSH, WRITE, READ = 0, 1, 2
SECRET = b'a secret of the last server'.ljust(BLOCK, b'\0')


#: what the disk has, where it has any
NAMESPACE = nvme_admin.Namespace(2048, 512, 0)


class Machine:
    """QEMU: it answers DMA only when no access waits for an answer."""

    def __init__(self, path):
        self.memory = bytearray(MEMORY)
        self.line = socket.socket(socket.AF_UNIX)
        self.line.settimeout(30)
        self.line.connect(str(path))
        self.last, self.dma = 0, []
        self.interrupt = os.eventfd(0, os.EFD_NONBLOCK)

    def close(self):
        self.line.close()
        os.close(self.interrupt)

    def receive(self):
        header = self.line.recv(16, socket.MSG_WAITALL)
        ident, command, size, flags, error = HEADER.unpack(header)
        body = (self.line.recv(size - 16, socket.MSG_WAITALL) if size > 16
                else b'')
        return ident, command, flags, error, body

    def request(self, command, payload, fds=()):
        self.last += 1
        self.line.sendmsg(
            [HEADER.pack(self.last, command, 16 + len(payload), 0, 0)
             + payload],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', fds))]
            if fds else [])
        while True:
            message = self.receive()
            if message[2] & 1:
                return message[4]
            self.dma.append(message)

    def answer(self, seconds=10):
        """Answer one DMA message."""
        if not self.dma:
            if not select.select([self.line], [], [], seconds)[0]:
                raise AssertionError('the device does nothing')
            self.dma.append(self.receive())
        ident, command, _, _, body = self.dma.pop(0)
        at, size = struct.unpack_from('<QQ', body)
        reply, error = body[:16], 0
        if at + size > MEMORY:
            error = 14
        elif command == DMA_READ:
            reply += self.memory[at:at + size]
        else:
            self.memory[at:at + size] = body[16:16 + size]
        if error:
            reply = b''
        self.line.sendall(HEADER.pack(
            ident, command, 16 + len(reply), 0x21 if error else 1, error)
            + reply)

    def read(self, region, offset, size=4):
        reply = self.request(REGION_READ,
                             struct.pack('<QII', offset, region, size))
        return int.from_bytes(reply[16:], 'little')

    def write(self, region, offset, value, size=4):
        self.request(REGION_WRITE, struct.pack('<QII', offset, region, size)
                     + value.to_bytes(size, 'little'))

    def take_interrupts(self):
        """SET_IRQS: one eventfd for the MSI."""
        self.request(SET_IRQS, struct.pack('<5I', 20, 1 << 2 | 1 << 5, 1, 0,
                                           1), [self.interrupt])


class Driver(Machine):
    """The driver of an operating system."""

    def begin(self):
        self.sent = {0: 0, 1: 0}
        self.write(BAR0, CC, 0)
        self.memory[:DATA] = bytes(DATA)
        self.write(BAR0, AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1))
        self.write(BAR0, ASQ, QUEUES[0][0], 8)
        self.write(BAR0, ACQ, QUEUES[0][1], 8)
        self.write(BAR0, CC, 0x460001)
        self.take_interrupts()
        for opcode, at, flags in ((5, QUEUES[1][1], 3),
                                  (1, QUEUES[1][0], 1 << 16 | 1)):
            self.admin(opcode, (ENTRIES - 1) << 16 | 1, flags, data=at)

    def send(self, queue, opcode, *words, namespace=0, data=DATA, more=0):
        """Write a command into a queue, and tell the device."""
        ident = self.sent[queue] & 0xffff
        words = (*words, 0, 0, 0, 0, 0, 0)[:6]
        struct.pack_into(
            '<BBHI16xQQ6I', self.memory,
            QUEUES[queue][0] + 64 * (ident % ENTRIES), opcode, 0, ident,
            namespace, data, more, *words)
        self.sent[queue] += 1
        self.write(BAR0, DOORBELLS + 8 * queue, self.sent[queue] % ENTRIES)
        return ident

    def completion(self, queue, ident):
        """(result, status) of a command, or None."""
        result, _, _, number, of, status = struct.unpack_from(
            '<IIHHHH', self.memory,
            QUEUES[queue][1] + 16 * (ident % ENTRIES))
        if status & 1 != (ident // ENTRIES + 1) & 1:
            return None
        assert (number, of) == (queue, ident), (number, of)
        return result, status >> 1 & 0x7ff

    def command(self, queue, *args, **kw):
        ident = self.send(queue, *args, **kw)
        while (done := self.completion(queue, ident)) is None:
            self.answer()
        self.write(BAR0, DOORBELLS + 8 * queue + 4,
                   self.sent[queue] % ENTRIES)
        return done

    def admin(self, *args, **kw):
        return self.command(0, *args, **kw)

    def io(self, opcode, block=0, count=1, **kw):
        """The status of an I/O command."""
        return self.command(1, opcode, block, 0, count - 1,
                            **{'namespace': 1, **kw})[1]

    def ioctl(self, _fd, request, command=None):
        """NVME_IOCTL_ADMIN_CMD, NVME_IOCTL_RESCAN."""
        if request == nvme_admin.RESCAN:
            return 0
        assert request == nvme_admin.ADMIN
        fields = nvme_admin.COMMAND.unpack(command)
        opcode, namespace, address, size = (fields[0], fields[3], fields[7],
                                            fields[9])
        self.memory[DATA:DATA + size] = ctypes.string_at(address, size)
        result, status = self.admin(opcode, *fields[10:16],
                                    namespace=namespace)
        if address:
            ctypes.memmove(address, bytes(self.memory[DATA:DATA + size]),
                           size)
        command[-4:] = struct.pack('<I', result)
        return status


class NvmeDiskTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        top = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        self.medium, self.faults = top / 'medium', top / 'faults'
        with open(self.medium, 'wb') as file:
            file.truncate(1 << 20)
        self.set_faults(sanitize_seconds=0.2)
        self.emulator = subprocess.Popen(
            [sys.executable, lab.LAB / 'emulators/nvme_disk.py', top / 'line',
             self.medium, self.faults], stdout=subprocess.DEVNULL)
        self.addCleanup(self.emulator.wait)
        self.addCleanup(self.emulator.kill)
        end = time.monotonic() + 60
        while True:
            try:
                self.disk = Driver(top / 'line')
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        self.addCleanup(self.disk.close)
        self.disk.begin()

    def set_faults(self, **faults):
        self.faults.write_text(json.dumps(faults))

    def write_secret(self):
        self.disk.memory[DATA:DATA + BLOCK] = SECRET
        self.assertEqual(0, self.disk.io(WRITE, 7))

    def content(self):
        """(status, what block 7 has)."""
        self.disk.memory[DATA:DATA + BLOCK] = b'?' * BLOCK
        status = self.disk.io(READ, 7)
        return status, bytes(self.disk.memory[DATA:DATA + BLOCK])

    def ended(self):
        """The status of the sanitize operation when it does not run."""
        end = time.monotonic() + 60
        while (status := nvme_admin.read_sanitize_status(0)).state == (
                'running'):
            self.assertLess(time.monotonic(), end)
        return status

    def use_ioctl(self):
        self.useFixture(fixtures.MonkeyPatch('fcntl.ioctl', self.disk.ioctl))

    def test_function(self):
        self.assertEqual(0xa824144d, self.disk.read(CONFIG, 0))
        self.assertEqual(0x010802, self.disk.read(CONFIG, 8) >> 8)
        # "enable" and not the number of vectors
        self.disk.write(CONFIG, 0x42, 0x0071, 2)
        self.assertEqual(0x0081, self.disk.read(CONFIG, 0x42, 2))

    def test_what_our_driver_reads(self):
        self.use_ioctl()
        found = nvme_admin.read_controller(0)
        self.assertEqual(
            nvme_admin.Controller('LAB-SANITIZE', 'LAB1', 'crypto', False,
                                  True, (NAMESPACE,), 0, 0,
                                  erases=('CES', 'BES', 'WZS')), found)
        self.assertEqual('never', nvme_admin.read_sanitize_status(0).state)

    def test_warning(self):
        """One that a reset of the controller ends, and one that it does not."""
        self.use_ioctl()
        self.assertEqual(0, nvme_admin.read_health(0).warning)
        for stays in True, False:
            self.set_faults(warning=4, warning_stays=stays)
            self.assertEqual(4, nvme_admin.read_health(0).warning)
            self.disk.write(BAR0, CC, 0)
            self.disk.begin()
            self.assertEqual(4 if stays else 0,
                             nvme_admin.read_health(0).warning)
            os.utime(self.faults, (1, 1))
            self.assertEqual(4, nvme_admin.read_health(0).warning)

    def test_sanitize(self):
        self.use_ioctl()
        self.write_secret()
        self.assertEqual((0, SECRET), self.content())
        for method in ('crypto', 'block', 'overwrite'):
            self.write_secret()
            nvme_admin.start_sanitize(0, method)
            status = nvme_admin.read_sanitize_status(0)
            self.assertEqual(('running', method),
                             (status.state, status.method))
            for opcode in (READ, WRITE, FLUSH):
                self.assertEqual(SANITIZE_IN_PROGRESS, self.disk.io(opcode))
            self.assertRaises(OSError, nvme_admin.start_sanitize, 0, method)
            self.assertEqual('done', self.ended().state)
            self.assertEqual((0, bytes(BLOCK)), self.content())

    def test_sanitize_goes_on_through_resets(self):
        self.use_ioctl()
        self.write_secret()
        self.set_faults(sanitize_seconds=2)
        nvme_admin.start_sanitize(0, 'block')
        self.disk.begin()
        self.assertEqual('running', nvme_admin.read_sanitize_status(0).state)
        self.disk.write(CONFIG, 0x59, 0x80, 1)
        self.assertEqual(0, self.disk.read(CONFIG, 0x59, 1))
        self.assertEqual(0, self.disk.read(BAR0, CSTS))
        self.disk.begin()
        self.assertEqual('running', nvme_admin.read_sanitize_status(0).state)
        self.assertEqual('done', self.ended().state)
        self.assertEqual((0, bytes(BLOCK)), self.content())

    def test_namespaces(self):
        """One that a guest deleted is created again, and is not clean."""
        self.use_ioctl()
        self.write_secret()
        self.assertEqual((0, 0), self.disk.admin(0x0d, 1, namespace=ALL))
        self.assertEqual(INVALID_NAMESPACE, self.content()[0])
        self.assertEqual(INVALID_NAMESPACE,
                         self.disk.admin(0x0d, 1, namespace=ALL)[1])
        self.disk.begin()
        found = nvme_admin.read_controller(0)
        self.assertEqual(((), 0, 1 << 20), (
            found.namespaces, found.detached, found.unallocated))
        self.assertRaises(OSError, nvme_admin.restore_namespaces, 0, 'it',
                          [NAMESPACE, NAMESPACE])
        for wanted in ([NAMESPACE], []):
            nvme_admin.restore_namespaces(0, 'it', wanted)
            found = nvme_admin.read_controller(0)
            self.assertEqual(((NAMESPACE,), 0, 0), (
                found.namespaces, found.detached, found.unallocated))
            self.assertEqual((0, SECRET), self.content())

    def test_namespace_that_is_not_attached(self):
        self.use_ioctl()
        nvme_admin._attach(0, 1, 1, nvme_admin._DETACH)
        found = nvme_admin.read_controller(0)
        self.assertEqual(((), 1, 0), (
            found.namespaces, found.detached, found.unallocated))
        self.assertEqual(INVALID_NAMESPACE, self.content()[0])
        self.assertRaises(OSError, nvme_admin._attach, 0, 1, 2,
                          nvme_admin._ATTACH)
        nvme_admin._attach(0, 1, 1, nvme_admin._ATTACH)
        self.assertEqual(0, self.content()[0])

    def test_failure_mode(self):
        self.use_ioctl()
        self.write_secret()
        self.set_faults(sanitize_seconds=0, sanitize_fails=True)
        nvme_admin.start_sanitize(0, 'crypto')
        self.assertEqual('failed', self.ended().state)
        self.assertEqual(SANITIZE_FAILED, self.content()[0])
        nvme_admin.exit_sanitize_failure(0)
        # the log shows the last operation, and the disk has what it had
        self.assertEqual('failed', self.ended().state)
        self.assertEqual((0, SECRET), self.content())
        self.set_faults(sanitize_seconds=0)
        nvme_admin.start_sanitize(0, 'crypto')
        self.assertEqual('done', self.ended().state)
        self.assertEqual((0, bytes(BLOCK)), self.content())

    def test_failure_mode_that_cannot_be_left(self):
        self.use_ioctl()
        self.set_faults(sanitize_seconds=0, sanitize_fails=True)
        self.assertEqual((0, 0), self.disk.admin(0x84, CRYPTO))
        self.assertEqual('failed', self.ended().state)
        self.assertEqual(SANITIZE_FAILED,
                         self.disk.admin(0x84, EXIT_FAILURE_MODE)[1])
        self.set_faults(sanitize_seconds=0)
        nvme_admin.start_sanitize(0, 'crypto')
        self.assertEqual('done', self.ended().state)
        self.assertEqual(0, self.content()[0])

    def test_lists_of_pages(self):
        """128 KiB in pages that do not follow each other, by two lists."""
        pages = [DATA + 2 * PAGE * n for n in range(32)]
        data = b''.join(bytes([n + 1]) * PAGE for n in range(32))
        # three entries fit before the end of the page
        first, second = 0x9000 - 24, 0xa000
        struct.pack_into('<3Q', self.disk.memory, first, *pages[1:3], second)
        struct.pack_into('<29Q', self.disk.memory, second, *pages[3:])
        for n, page in enumerate(pages):
            self.disk.memory[page:page + PAGE] = data[n * PAGE:][:PAGE]
        where = {'data': pages[0], 'more': first}
        self.assertEqual(0, self.disk.io(WRITE, 16, 256, **where))
        with open(self.medium, 'rb') as file:
            file.seek(16 * BLOCK)
            self.assertEqual(data, file.read(len(data)))
        for page in pages:
            self.disk.memory[page:page + PAGE] = bytes(PAGE)
        self.assertEqual(0, self.disk.io(READ, 16, 256, **where))
        for n, page in enumerate(pages):
            self.assertEqual(data[n * PAGE:][:PAGE],
                             self.disk.memory[page:page + PAGE])

    def test_refusals(self):
        for wanted, kw in (
                (0x0b, {'namespace': 2}), (0x80, {'block': 2048}),
                # memory that the machine does not have
                (0x04, {'data': MEMORY}), (0x02, {'count': 257})):
            self.assertEqual(wanted, self.disk.io(READ, **kw))
        self.assertEqual(0x01, self.disk.io(0x7f))
        self.assertEqual(0x01, self.disk.admin(0x80)[1])
        self.assertEqual(0x109, self.disk.admin(0x02, 0xee)[1])

    def test_interrupt(self):
        os.eventfd_read(self.disk.interrupt)
        self.assertRaises(BlockingIOError, os.eventfd_read,
                          self.disk.interrupt)
        self.assertEqual(0, self.disk.io(FLUSH))
        self.assertEqual(1, os.eventfd_read(self.disk.interrupt))

    def test_access_while_dma_waits(self):
        """A processor of the machine waits for a register, and QEMU answers
        no DMA until it has that."""
        ident = self.disk.send(1, FLUSH, namespace=1)
        for _ in range(3):
            self.assertEqual(1, self.disk.read(BAR0, CSTS))
        self.assertIsNone(self.disk.completion(1, ident))
        self.disk.answer()
        self.assertEqual(1, self.disk.read(BAR0, CSTS))
        self.disk.answer()
        self.assertEqual((0, 0), self.disk.completion(1, ident))

    def test_reset_while_dma_waits(self):
        """A controller that was reset completes nothing."""
        ident = self.disk.send(1, FLUSH, namespace=1)
        self.disk.write(BAR0, CC, 0)
        self.disk.answer()
        self.assertEqual(0, self.disk.read(BAR0, CSTS))
        self.assertEqual([], self.disk.dma)
        self.assertIsNone(self.disk.completion(1, ident))
        self.disk.begin()
        self.assertEqual(0, self.disk.io(FLUSH))
