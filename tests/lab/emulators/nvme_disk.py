# Licensed under the Apache License, Version 2.0. See LICENSE.
"""An NVMe disk with Sanitize, and nothing else that erases it.

    nvme_disk.py SOCKET FILE FAULTS

It has the numbers of a Samsung disk (144d:a824), by which device profiles tell
it from QEMU's, which has no Sanitize. One namespace of 512-byte blocks, which
is the file; one pair of I/O queues; PRPs; one MSI. There is no Format NVM,
Dataset Management changes nothing, and a namespace that is deleted and created
again has what it had: zeros that nobody wrote come from Sanitize. Registers,
commands, data structures and status codes are those of the NVM Express Base
Specification 2.0 and of the NVM Command Set Specification 1.0.

A sanitize operation (crypto erase, block erase or overwrite, each of which
leaves zeros here) goes on through resets of the controller. While it runs, and
in the failure mode after one that failed, the disk refuses to read and write.
Exit Failure Mode is refused after an operation without AUSE. The status log
goes on to show the last operation.

FAULTS is a file with JSON, read when it matters; all keys are optional:

  sanitize_seconds (3)      how long it takes
  sanitize_fails (false)    it ends in failure mode, with the data as it was
  warning (0)               Critical Warning of the log page about health
  warning_stays (true)      else a reset of the controller ends it, until the
                            file changes
"""

import dataclasses
import json
import os
import struct
import sys
import time

import vfio_user

CAP, VS, CC, CSTS, AQA, ASQ, ACQ = 0, 8, 0x14, 0x1c, 0x24, 0x28, 0x30
DOORBELLS = 0x1000
ENABLE, SHUTDOWN, READY, FATAL, SHUTDOWN_DONE = 1, 3 << 14, 1, 2, 2 << 2
MSI, PCIE = 0x40, 0x50
PAGE, BLOCK = 4096, 512
#: entries of a queue; bytes of a submission and of a completion
DEPTH, COMMAND, COMPLETION = 64, 64, 16
#: exponent of the pages that a command can transfer
MAX_PAGES = 5
CRYPTO, BLOCKS, OVERWRITE = 1, 2, 4
#: Sanitize Action
EXIT_FAILURE_MODE, ACTIONS = 1, {2: 'block', 3: 'overwrite', 4: 'crypto'}
#: Sanitize Status
NEVER, DONE, RUNNING, FAILED = range(4)
GLOBAL_DATA_ERASED, UNRESTRICTED, NOT_RUNNING = 1 << 8, 1 << 3, 0xffff
ALL = 0xffffffff
# status codes; those from 0x100 on are specific to the command
INVALID_OPCODE, INVALID_FIELD, TRANSFER_ERROR = 0x01, 0x02, 0x04
INVALID_NAMESPACE, OUT_OF_RANGE = 0x0b, 0x80
SANITIZE_FAILED, SANITIZE_IN_PROGRESS = 0x1c, 0x1d
INVALID_COMPLETION_QUEUE, INVALID_QUEUE = 0x100, 0x101
INVALID_QUEUE_SIZE, INVALID_LOG_PAGE = 0x102, 0x109
NO_CAPACITY, NO_IDENTIFIER, ATTACHED, NOT_ATTACHED = (
    0x115, 0x116, 0x118, 0x11a)
#: asked again, the disk answers the same
DO_NOT_RETRY = 1 << 14


class Refused(Exception):
    """A status code."""

    def __init__(self, status):
        super().__init__(hex(status))
        self.status = status


class Media:
    """What a reset does not change: data, and the sanitize operation."""

    def __init__(self, path, faults):
        self.file = open(path, 'r+b', buffering=0)
        self.size = self.file.seek(0, os.SEEK_END)
        self.faults = faults
        self.state, self.word, self.seconds = NEVER, 0, 0
        self.ends, self.fails = 0, False
        self.is_erased = self.in_failure_mode = False
        #: of the namespace
        self.is_there = self.is_attached = True
        #: when the file was written whose warning has ended
        self.ended = 0

    def settle(self):
        """End the sanitize operation if its time has come."""
        if self.state != RUNNING or time.monotonic() < self.ends:
            return
        if self.fails:
            self.state, self.in_failure_mode = FAILED, True
        else:
            self.file.truncate(0)
            self.file.truncate(self.size)
            self.state, self.is_erased = DONE, True
        print(f'Sanitize: {"failed" if self.fails else "ok"}', flush=True)

    def sanitize(self, word, pattern):
        self.settle()
        if self.state == RUNNING:
            raise Refused(SANITIZE_IN_PROGRESS)
        action = word & 7
        if action == EXIT_FAILURE_MODE:
            if self.in_failure_mode and not self.word & UNRESTRICTED:
                raise Refused(SANITIZE_FAILED)
            self.in_failure_mode = False
            print('Sanitize: failure mode ends', flush=True)
            return
        if action not in ACTIONS or pattern:
            raise Refused(INVALID_FIELD)
        faults = self.told()
        self.seconds = faults.get('sanitize_seconds', 3)
        self.fails = faults.get('sanitize_fails', False)
        self.ends = time.monotonic() + self.seconds
        self.state, self.word = RUNNING, word
        self.is_erased = self.in_failure_mode = False
        print(f'Sanitize: {ACTIONS[action]} begins', flush=True)

    def told(self):
        with open(self.faults) as file:
            return json.load(file)

    def health_log(self):
        """300 K, and all of the spare blocks."""
        ended = self.ended == os.stat(self.faults).st_mtime_ns
        return struct.pack('<BHB', 0 if ended else self.told().get(
            'warning', 0), 300, 100)

    def reset(self):
        if not self.told().get('warning_stays', True):
            self.ended = os.stat(self.faults).st_mtime_ns

    def sanitize_log(self):
        self.settle()
        left = self.ends - time.monotonic()
        progress = (max(0, int((1 - left / self.seconds) * 0xffff))
                    if self.state == RUNNING else NOT_RUNNING)
        return struct.pack('<HHI', progress, self.state | (
            GLOBAL_DATA_ERASED if self.is_erased else 0), self.word)

    def check(self, block, count):
        """:raises Refused: these blocks cannot be read or written now."""
        self.settle()
        if self.state == RUNNING:
            raise Refused(SANITIZE_IN_PROGRESS)
        if self.in_failure_mode:
            raise Refused(SANITIZE_FAILED)
        if (block + count) * BLOCK > self.size:
            raise Refused(OUT_OF_RANGE)

    def read(self, block, count):
        self.check(block, count)
        return os.pread(self.file.fileno(), count * BLOCK, block * BLOCK)

    def write(self, block, data):
        self.check(block, len(data) // BLOCK)
        self.is_erased = False
        os.pwrite(self.file.fileno(), data, block * BLOCK)


@dataclasses.dataclass
class Queue:
    """A submission queue; our next entry is at its head."""

    base: int
    entries: int
    completions: 'Completions'
    head: int = 0


@dataclasses.dataclass
class Completions:
    """A completion queue; our next entry is at its tail."""

    number: int
    base: int
    entries: int
    interrupts: bool
    tail: int = 0
    phase: int = 1


class Nvme(vfio_user.Device):

    bar_size = 0x4000

    def __init__(self, media):
        # class: mass storage, non-volatile memory, NVM Express
        super().__init__(0x144d, 0xa824, 0x0108, (0x144d, 0xa824), 0x02)
        self.media = media
        self.config[0x34] = MSI
        self.msi_capability(MSI, PCIE)
        self.pcie_capability(PCIE, flr=True)
        self.reset()

    # Registers

    def reset(self):
        self.disable()
        self.bar[:] = bytes(self.bar_size)
        # ready within 10 s, the NVM command set, contiguous queues
        struct.pack_into('<QI', self.bar, CAP,
                         1 << 37 | 20 << 24 | 1 << 16 | DEPTH - 1, 0x10400)

    def disable(self):
        # a new dict: a command that waits for DMA sees that it is too late
        self.queues, self.completions, self.features = {}, {}, {}
        self.bar[DOORBELLS:] = bytes(len(self.bar) - DOORBELLS)

    def get(self, at):
        return struct.unpack_from('<I', self.bar, at)[0]

    def put(self, at, value):
        struct.pack_into('<I', self.bar, at, value)

    def bar_write(self, offset, data):
        if not (CC <= offset < CC + 4 or AQA <= offset < ACQ + 8
                or offset >= DOORBELLS):
            return
        super().bar_write(offset, data)
        if offset == CC:
            self.control(self.get(CC))

    def control(self, value):
        ready = self.get(CSTS) & READY
        if value & ENABLE and not ready:
            sizes = self.get(AQA)
            base, completions = struct.unpack_from('<QQ', self.bar, ASQ)
            self.completions[0] = Completions(
                0, completions, (sizes >> 16 & 0xfff) + 1, True)
            self.queues[0] = Queue(base, (sizes & 0xfff) + 1,
                                   self.completions[0])
        elif ready and not value & ENABLE:
            self.disable()
            self.media.reset()
        self.put(CSTS, (READY if value & ENABLE else 0)
                 | (SHUTDOWN_DONE if value & SHUTDOWN else 0))

    # Queues

    def work(self):
        while any([self.next(number) for number in list(self.queues)]):
            pass

    def next(self, number):
        """Carry out the next command of a queue; False: there is none."""
        queues = self.queues
        queue = queues.get(number)
        if not queue:
            return False
        done = queue.completions
        tail = self.get(DOORBELLS + 8 * number) % queue.entries
        seen = self.get(DOORBELLS + 8 * done.number + 4) % done.entries
        if queue.head == tail or (done.tail + 1) % done.entries == seen:
            return False
        try:
            command = self.dma_read(queue.base + COMMAND * queue.head,
                                    COMMAND)
            if queues is not self.queues:
                return False
            queue.head = (queue.head + 1) % queue.entries
            result, status = self.run(number, command)
            # it may have been reset meanwhile
            if queues is self.queues and result is not None:
                self.complete(number, queue, command, result, status)
        except vfio_user.DmaError as error:
            print(f'queue {number}: {error}', flush=True)
            if queues is self.queues:
                self.queues = {}
                self.put(CSTS, self.get(CSTS) | FATAL)
        return True

    def run(self, number, command):
        """Return (result, status code); None for the result: no completion."""
        commands = self.IO if number else self.ADMIN
        try:
            if command[0] not in commands:
                raise Refused(INVALID_OPCODE)
            words = struct.unpack_from('<6I', command, 40)
            namespace, = struct.unpack_from('<I', command, 4)
            return commands[command[0]](self, command, namespace, words), 0
        except Refused as refused:
            return 0, refused.status | DO_NOT_RETRY
        except vfio_user.DmaError:
            return 0, TRANSFER_ERROR | DO_NOT_RETRY

    def complete(self, number, queue, command, result, status):
        done = queue.completions
        ident, = struct.unpack_from('<H', command, 2)
        self.dma_write(done.base + COMPLETION * done.tail, struct.pack(
            '<IIHHHH', result, 0, queue.head, number, ident,
            status << 1 | done.phase))
        done.tail = (done.tail + 1) % done.entries
        if not done.tail:
            done.phase ^= 1
        if done.interrupts:
            self.interrupt()

    # Data

    def segments(self, command, size):
        """Return the (address, bytes) of the data of a command: its PRPs."""
        if size > PAGE << MAX_PAGES:
            raise Refused(INVALID_FIELD)
        first, second = struct.unpack_from('<QQ', command, 24)
        found = [(first, min(size, PAGE - first % PAGE))]
        size -= found[0][1]
        pages = -(-size // PAGE)
        addresses = [second] if pages == 1 else []
        while len(addresses) < pages:
            left = pages - len(addresses)
            room = (PAGE - second % PAGE) // 8
            listed = struct.unpack(f'<{min(left, room)}Q', self.dma_read(
                second, 8 * min(left, room)))
            if left > room:
                # the last entry is the next list
                *listed, second = listed
            addresses += listed
        for address in addresses:
            begin, length = found[-1]
            part = min(size, PAGE)
            if begin + length == address:
                found[-1] = begin, length + part
            else:
                found.append((address, part))
            size -= part
        return found

    def take(self, command, size):
        return b''.join(self.dma_read(*segment)
                        for segment in self.segments(command, size))

    def give(self, command, data):
        for address, length in self.segments(command, len(data)):
            self.dma_write(address, data[:length])
            data = data[length:]

    # Admin commands

    def identify(self, command, namespace, words):
        page = bytearray(PAGE)
        put = struct.pack_into
        what = words[0] & 0xff
        blocks, media = self.media.size // BLOCK, self.media
        if (what in (0, 3, 0x11, 0x12) and namespace != 1
                and (what, namespace) != (0, ALL)):
            raise Refused(INVALID_NAMESPACE)
        if what in (0, 0x11):
            # of one that is not active, zeros; of all, what they have in
            # common: the only block format
            if media.is_there and (what or media.is_attached
                                   and namespace == 1):
                # size, capacity, use
                put('<QQQ', page, 0, blocks, blocks, blocks)
                put('<Q', page, 120, 0x5ec2e7)
            if any(page) or namespace == ALL:
                put('<HB', page, 128, 0, BLOCK.bit_length() - 1)
        elif what == 1:
            put('<HH20s40s8s', page, 0, 0x144d, 0x144d, b'LAB-SANITIZE'.ljust(
                20), b'disk of the lab'.ljust(40), b'LAB1'.ljust(8))
            put('<BHI', page, 77, MAX_PAGES, 1, 0x10400)
            # an I/O controller
            page[111] = 1
            # Namespace Management; capacity, and what no namespace has of it
            put('<H', page, 256, 1 << 3)
            put('<QQQ', page, 280, media.size, 0,
                0 if media.is_there else media.size)
            # commands to be aborted, events to be waited for, one less
            page[258] = page[259] = 3
            put('<I', page, 328, CRYPTO | BLOCKS | OVERWRITE)
            # sizes of queue entries, commands at once, namespaces; Dataset
            # Management and Write Zeroes; a volatile cache
            put('<BBHIH', page, 512, 0x66, 0x44, DEPTH, 1, 1 << 2 | 1 << 3)
            page[525] = 1
            put('<256s', page, 768, b'nqn.2014-08.org.nvmexpress:lab-sanitize')
        elif what in (2, 0x10):
            there = media.is_there and (what == 0x10 or media.is_attached)
            put('<I', page, 0, 1 if there and namespace < 1 else 0)
        elif what == 3:
            # an EUI-64
            put('<BBHQ', page, 0, 1, 8, 0, 0x5ec2e7)
        elif what == 0x12:
            put('<HH', page, 0, *([1, 1] if media.is_attached else [0, 0]))
        else:
            raise Refused(INVALID_FIELD)
        self.give(command, bytes(page))
        return 0

    def get_log_page(self, command, namespace, words):
        size = ((words[0] >> 16 | (words[1] & 0xffff) << 16) + 1) * 4
        # errors, health, firmware, changed namespaces
        page = {1: lambda: b'', 2: self.media.health_log,
                3: lambda: b'\1', 4: lambda: b'',
                0x81: self.media.sanitize_log}.get(words[0] & 0xff)
        if not page:
            raise Refused(INVALID_LOG_PAGE)
        if words[2] or words[3]:
            raise Refused(INVALID_FIELD)
        self.give(command, page()[:size].ljust(size, b'\0'))
        return 0

    def create_completions(self, command, namespace, words):
        number, entries = words[0] & 0xffff, (words[0] >> 16) + 1
        if number != 1 or number in self.completions:
            raise Refused(INVALID_QUEUE)
        if not 2 <= entries <= DEPTH:
            raise Refused(INVALID_QUEUE_SIZE)
        if not words[1] & 1 or words[1] >> 16:
            # not contiguous, or of another interrupt
            raise Refused(INVALID_FIELD)
        base, = struct.unpack_from('<Q', command, 24)
        self.put(DOORBELLS + 8 * number + 4, 0)
        self.completions[number] = Completions(number, base, entries,
                                               bool(words[1] & 2))
        return 0

    def create_queue(self, command, namespace, words):
        number, entries = words[0] & 0xffff, (words[0] >> 16) + 1
        if number != 1 or number in self.queues:
            raise Refused(INVALID_QUEUE)
        if not 2 <= entries <= DEPTH:
            raise Refused(INVALID_QUEUE_SIZE)
        if words[1] >> 16 != 1 or 1 not in self.completions:
            raise Refused(INVALID_COMPLETION_QUEUE)
        base, = struct.unpack_from('<Q', command, 24)
        self.put(DOORBELLS + 8 * number, 0)
        self.queues[number] = Queue(base, entries, self.completions[1])
        return 0

    def delete_completions(self, command, namespace, words):
        # with a submission queue it would be in use
        if words[0] & 0xffff != 1 or 1 in self.queues:
            raise Refused(INVALID_QUEUE)
        self.delete(self.completions, 1)
        return 0

    def delete_queue(self, command, namespace, words):
        if words[0] & 0xffff != 1:
            raise Refused(INVALID_QUEUE)
        self.delete(self.queues, 1)
        return 0

    @staticmethod
    def delete(of, number):
        if of.pop(number, None) is None:
            raise Refused(INVALID_QUEUE)

    def abort(self, command, namespace, words):
        # every command has ended before the next begins
        return 1

    def set_features(self, command, namespace, words):
        self.features[words[0] & 0xff] = words[1]
        return self.get_features(command, namespace, words)

    def get_features(self, command, namespace, words):
        feature = words[0] & 0xff
        # number of queues, one less: one of each kind
        return 0 if feature == 7 else self.features.get(feature, 0)

    def wait_for_event(self, command, namespace, words):
        return None

    def keep_alive(self, command, namespace, words):
        return 0

    def sanitize(self, command, namespace, words):
        self.media.sanitize(*words[:2])
        return 0

    def manage_namespace(self, command, namespace, words):
        media = self.media
        if words[0] & 15 == 1 and media.is_there:
            self.check_number(namespace, ALL)
            media.is_there = media.is_attached = False
            print('Namespace: deleted', flush=True)
            return 0
        if words[0] & 15 == 1:
            raise Refused(INVALID_NAMESPACE)
        if words[0] & 15:
            raise Refused(INVALID_FIELD)
        size, = struct.unpack_from('<Q', self.take(command, PAGE))
        if media.is_there:
            raise Refused(NO_IDENTIFIER)
        if size * BLOCK != media.size:
            raise Refused(NO_CAPACITY)
        media.is_there = True
        print('Namespace: created', flush=True)
        return 1

    def attach_namespace(self, command, namespace, words):
        self.check_number(namespace)
        count, controller = struct.unpack_from('<HH', self.take(command, PAGE))
        if (not self.media.is_there or words[0] & 15 > 1
                or (count, controller) != (1, 1)):
            raise Refused(INVALID_FIELD)
        attach = not words[0] & 15
        if attach == self.media.is_attached:
            raise Refused(ATTACHED if attach else NOT_ATTACHED)
        self.media.is_attached = attach
        return 0

    # I/O commands

    def flush(self, command, namespace, words):
        self.check_namespace(namespace, ALL)
        self.media.check(0, 0)
        return 0

    def read(self, command, namespace, words):
        self.check_namespace(namespace)
        block, count = self.blocks(words)
        self.give(command, self.media.read(block, count))
        return 0

    def write(self, command, namespace, words):
        self.check_namespace(namespace)
        block, count = self.blocks(words)
        self.media.check(block, count)
        self.media.write(block, self.take(command, count * BLOCK))
        return 0

    def write_zeroes(self, command, namespace, words):
        self.check_namespace(namespace)
        block, count = self.blocks(words)
        self.media.write(block, bytes(count * BLOCK))
        return 0

    def manage_dataset(self, command, namespace, words):
        self.check_namespace(namespace)
        self.media.check(0, 0)
        return 0

    def check_namespace(self, namespace, *more):
        self.check_number(namespace, *more)
        if not self.media.is_attached:
            raise Refused(INVALID_NAMESPACE)

    @staticmethod
    def check_number(namespace, *more):
        if namespace not in (1, *more):
            raise Refused(INVALID_NAMESPACE)

    @staticmethod
    def blocks(words):
        return words[0] | words[1] << 32, (words[2] & 0xffff) + 1

    ADMIN = {0x00: delete_queue, 0x01: create_queue, 0x02: get_log_page,
             0x04: delete_completions, 0x05: create_completions,
             0x06: identify, 0x08: abort, 0x09: set_features,
             0x0a: get_features, 0x0c: wait_for_event,
             0x0d: manage_namespace, 0x15: attach_namespace,
             0x18: keep_alive, 0x84: sanitize}
    IO = {0x00: flush, 0x01: write, 0x02: read, 0x08: write_zeroes,
          0x09: manage_dataset}


if __name__ == '__main__':
    socket, path, faults = sys.argv[1:]
    media = Media(path, faults)
    vfio_user.serve(socket, lambda: Nvme(media))
