# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Server side of the vfio-user protocol, as much as QEMU's client asks for.

Every message has a 16-byte header: id u16, command u16, size u32 (header
included), flags u32 (0-3 type: 0 command, 1 reply; 0x10 no reply wanted; 0x20
error), errno u32. Regions are numbered as in VFIO: 0 is BAR0, 7 the PCI config
space. No region is mmap-able, so that each access of the machine arrives here
as one message. DMA and interrupts are accepted and not used.
"""

import array
import json
import os
import socket
import struct

VERSION, DMA_MAP, DMA_UNMAP, GET_INFO, GET_REGION_INFO = 1, 2, 3, 4, 5
GET_IRQ_INFO, SET_IRQS, REGION_READ, REGION_WRITE, RESET = 7, 8, 9, 10, 13
BAR0, CONFIG = 0, 7
NO_REPLY, REPLY, ERROR = 0x10, 1, 0x20
EOPNOTSUPP = 95


class Device:
    """A PCI function with one 64-bit BAR and a config space of 256 bytes."""

    bar_size = 0
    #: irq index (0 INTx, 1 MSI, 2 MSI-X) -> number of vectors
    vectors = {}

    def __init__(self, vendor, device, pci_class, subsystem, prog_if=0):
        self.bar = bytearray(self.bar_size)
        self.config = c = bytearray(256)
        struct.pack_into('<HHHHBBH', c, 0, vendor, device, 0, 0x10, 0,
                         prog_if, pci_class)
        # BAR0: 64 bits, not prefetchable
        struct.pack_into('<I', c, 0x10, 0x4)
        struct.pack_into('<HH', c, 0x2c, *subsystem)

    def pcie_capability(self, at, following=0, flr=False):
        """PCI Express endpoint, version 2; ends the list by default.

        :param flr: whether it has a function level reset, see flr().
        """
        struct.pack_into('<BBHIHHIHH', self.config, at, 0x10, following, 2,
                         0x8000 | flr << 28, 0, 0, 0x811, 0, 0x11)

    def flr(self, at):
        """Reset the function if that was written to its Device Control.

        :param at: of the PCI Express capability.
        """
        control, = struct.unpack_from('<H', self.config, at + 8)
        if control & 1 << 15:
            struct.pack_into('<H', self.config, at + 8, control & 0x7fff)
            self.reset()

    def config_writable(self, at):
        return at in (4, 5, 0x0c, 0x3c) or 0x10 <= at < 0x18

    def config_write(self, offset, data):
        for at, byte in enumerate(data, offset):
            if self.config_writable(at):
                self.config[at] = byte
        # BAR sizing: low bits stay fixed
        if offset < 0x18 and offset + len(data) > 0x10:
            v = struct.unpack_from('<Q', self.config, 0x10)[0]
            v &= ~(self.bar_size - 1) & (1 << 64) - 1
            struct.pack_into('<Q', self.config, 0x10, v | 4)

    def bar_read(self, offset, size):
        return bytes(self.bar[offset:offset + size])

    def bar_write(self, offset, data):
        self.bar[offset:offset + len(data)] = data

    def reset(self):
        pass


def receive(connection, size, fds):
    data = b''
    while len(data) < size:
        part, ancillary, _, _ = connection.recvmsg(
            size - len(data), socket.CMSG_SPACE(8 * 16))
        for _, _, payload in ancillary:
            a = array.array('i')
            a.frombytes(payload[:len(payload) - len(payload) % 4])
            fds += a
        if not part:
            raise EOFError
        data += part
    return data


def answer(device, command, p):
    if command == VERSION:
        capabilities = {'capabilities': {
            'max_msg_fds': 8, 'max_data_xfer_size': 1 << 20, 'pgsizes': 4096,
            'max_dma_maps': 65535}}
        return p[:4] + json.dumps(capabilities).encode() + b'\0'
    if command == DMA_UNMAP:
        return p
    if command == GET_INFO:
        # resettable PCI, 9 regions, 5 irqs
        return struct.pack('<IIII', 16, 3, 9, 5)
    if command == GET_REGION_INFO:
        index = struct.unpack_from('<IIII', p)[2]
        size = {BAR0: device.bar_size, CONFIG: 256}.get(index, 0)
        return struct.pack('<IIIIQQ', 32, 3 if size else 0, index, 0, size,
                           index << 40)
    if command == GET_IRQ_INFO:
        index = struct.unpack_from('<IIII', p)[2]
        count = device.vectors.get(index, 0)
        return struct.pack('<IIII', 16, 1 if count else 0, index, count)
    if command in (REGION_READ, REGION_WRITE):
        offset, region, count = struct.unpack_from('<QII', p)
        if command == REGION_WRITE:
            write = (device.config_write if region == CONFIG
                     else device.bar_write)
            write(offset, p[16:16 + count])
            return p[:16]
        if region == CONFIG:
            data = bytes(device.config[offset:offset + count]).ljust(
                count, b'\0')
        elif region == BAR0:
            data = device.bar_read(offset, count)
        else:
            data = bytes(count)
        return p[:16] + data
    if command == RESET:
        device.reset()
        return b''
    return b'' if command in (DMA_MAP, SET_IRQS) else None


def serve(path, make_device):
    """Serve one client after the other, each with a device of its own."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    while True:
        connection = listener.accept()[0]
        print('client', flush=True)
        device = make_device()
        try:
            while True:
                fds = []
                ident, command, size, flags, _ = struct.unpack(
                    '<HHIII', receive(connection, 16, fds))
                p = receive(connection, size - 16, fds) if size > 16 else b''
                for fd in fds:
                    os.close(fd)
                r = answer(device, command, p)
                if not flags & NO_REPLY:
                    kind, error = ((REPLY | ERROR, EOPNOTSUPP) if r is None
                                   else (REPLY, 0))
                    connection.sendall(struct.pack(
                        '<HHIII', ident, command, 16 + len(r or b''), kind,
                        error) + (r or b''))
        except (EOFError, ConnectionError):
            print('client gone', flush=True)
