# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Server side of the vfio-user protocol, as much as QEMU's client asks for.

Every message has a 16-byte header: id u16, command u16, size u32 (header
included), flags u32 (0-3 type: 0 command, 1 reply; 0x10 no reply wanted; 0x20
error), errno u32. Regions are numbered as in VFIO: 0 is BAR0, 7 the PCI config
space. No region is mmap-able, so that each access of the machine arrives here
as one message.

DMA is a message in the other direction, which QEMU carries out as the device,
through the machine's IOMMU. Its memory cannot be mapped here, because the
machine's RAM is no file; DMA_MAP and DMA_UNMAP are accepted and not used. QEMU
answers a DMA message only while no processor of the machine waits for an
answer to an access: a device first answers, and then does its DMA (work()).
Meanwhile other accesses are answered.
"""

import array
import json
import os
import socket
import struct

VERSION, DMA_MAP, DMA_UNMAP, GET_INFO, GET_REGION_INFO = 1, 2, 3, 4, 5
GET_IRQ_INFO, SET_IRQS, REGION_READ, REGION_WRITE = 7, 8, 9, 10
DMA_READ, DMA_WRITE, RESET = 11, 12, 13
BAR0, CONFIG = 0, 7
TYPE, NO_REPLY, REPLY, ERROR = 0xf, 0x10, 1, 0x20
#: index of MSI among the interrupts; a list of eventfds comes with SET_IRQS
MSI, EVENTFD = 1, 1 << 2
#: bytes; QEMU's limit for one message
MAX_TRANSFER = 1 << 20
EOPNOTSUPP = 95


class DmaError(Exception):
    """The machine has no memory there for this device."""


class Device:
    """A PCI function with one 64-bit BAR and a config space of 256 bytes."""

    bar_size = 0
    #: the client, while there is one
    connection = None

    def __init__(self, vendor, device, pci_class, subsystem, prog_if=0):
        self.bar = bytearray(self.bar_size)
        self.config = c = bytearray(256)
        self.writable = {4, 5, 0x0c, *range(0x10, 0x18), 0x3c}
        self.msi = self.pcie = None
        struct.pack_into('<HHHHBBH', c, 0, vendor, device, 0, 0x10, 0,
                         prog_if, pci_class)
        # BAR0: 64 bits, not prefetchable
        struct.pack_into('<I', c, 0x10, 0x4)
        struct.pack_into('<HH', c, 0x2c, *subsystem)

    def msi_capability(self, at, following=0):
        """MSI of 64 bits with one vector; ends the list by default."""
        self.msi = at
        struct.pack_into('<BBHIIH', self.config, at, 0x05, following, 0x0080,
                         0, 0, 0)
        # the control word, address and data
        self.writable |= {at + 2, *range(at + 4, at + 14)}

    def pcie_capability(self, at, following=0, flr=False, lanes=1):
        """PCI Express endpoint, version 2, 2.5 GT/s; ends the list by default.

        :param flr: whether it has a function level reset.
        """
        self.pcie = at if flr else None
        struct.pack_into('<BBHIHHIHH', self.config, at, 0x10, following, 2,
                         0x8000 | flr << 28, 0, 0, 0x801 | lanes << 4, 0,
                         lanes << 4 | 1)
        # device and link control
        self.writable |= {at + 8, at + 9, at + 16, at + 17}

    def config_read(self, offset, size):
        return bytes(self.config[offset:offset + size])

    def config_write(self, offset, data):
        for at, byte in enumerate(data, offset):
            if at in self.writable:
                self.config[at] = byte
        # BAR sizing: low bits stay fixed
        if offset < 0x18 and offset + len(data) > 0x10:
            v = struct.unpack_from('<Q', self.config, 0x10)[0]
            v &= ~(self.bar_size - 1) & (1 << 64) - 1
            struct.pack_into('<Q', self.config, 0x10, v | 4)
        if self.msi:
            # of the control word only "enable" is writable
            self.config[self.msi + 2] = self.config[self.msi + 2] & 1 | 0x80
        if self.pcie and self.config[self.pcie + 9] & 0x80:
            self.config[self.pcie + 9] &= 0x7f
            self.function_reset()

    def bar_read(self, offset, size):
        return bytes(self.bar[offset:offset + size])

    def bar_write(self, offset, data):
        self.bar[offset:offset + len(data)] = data

    def reset(self):
        """The machine, or the bus of the device, is reset."""

    def function_reset(self):
        self.reset()

    def work(self):
        """Do what the last access asked for, and may need DMA."""

    def dma_read(self, address, size):
        """:raises DmaError: see there."""
        return self.connection.dma_read(address, size)

    def dma_write(self, address, data):
        """:raises DmaError: see there."""
        self.connection.dma_write(address, data)

    def interrupt(self):
        """Send the one interrupt, if the machine wants it."""
        self.connection.interrupt()


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
            'max_msg_fds': 8, 'max_data_xfer_size': MAX_TRANSFER,
            'pgsizes': 4096, 'max_dma_maps': 65535}}
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
        count = int(index == MSI and device.msi is not None)
        return struct.pack('<IIII', 16, 1 if count else 0, index, count)
    if command in (REGION_READ, REGION_WRITE):
        offset, region, count = struct.unpack_from('<QII', p)
        if command == REGION_WRITE:
            write = (device.config_write if region == CONFIG
                     else device.bar_write)
            write(offset, p[16:16 + count])
            return p[:16]
        if region == CONFIG:
            data = device.config_read(offset, count).ljust(count, b'\0')
        elif region == BAR0:
            data = device.bar_read(offset, count)
        else:
            data = bytes(count)
        return p[:16] + data
    if command == RESET:
        device.reset()
        return b''
    return b'' if command in (DMA_MAP, SET_IRQS) else None


class Connection:
    """A client, which is the machine's QEMU, and its device."""

    def __init__(self, connection, device):
        self.connection, self.device = connection, device
        self.last, self.replies, self.eventfd = 0, {}, None
        device.connection = self

    def serve(self):
        """:raises EOFError: the client is gone; or ConnectionError."""
        while True:
            self.message()
            self.device.work()

    def close(self):
        self.set_eventfd(None)
        self.connection.close()

    def message(self):
        """Receive a message, and answer it if it is a command."""
        fds = []
        ident, command, size, flags, error = struct.unpack(
            '<HHIII', receive(self.connection, 16, fds))
        p = receive(self.connection, size - 16, fds) if size > 16 else b''
        if flags & TYPE == REPLY:
            self.replies[ident] = error if flags & ERROR else 0, p
            return
        if command == SET_IRQS:
            self.set_interrupts(p, fds)
        for fd in fds:
            os.close(fd)
        r = answer(self.device, command, p)
        if not flags & NO_REPLY:
            kind, error = ((REPLY | ERROR, EOPNOTSUPP) if r is None
                           else (REPLY, 0))
            self.send(ident, command, kind, r or b'', error)

    def send(self, ident, command, flags, payload, error=0):
        self.connection.sendall(struct.pack(
            '<HHIII', ident, command, 16 + len(payload), flags, error)
            + payload)

    def set_interrupts(self, p, fds):
        """Keep the eventfd of the MSI; without one there is none."""
        _, flags, index, _, _ = struct.unpack_from('<5I', p)
        if index != MSI:
            return
        self.set_eventfd(fds.pop(0) if flags & EVENTFD and fds else None)

    def set_eventfd(self, fd):
        if self.eventfd is not None:
            os.close(self.eventfd)
        self.eventfd = fd

    def interrupt(self):
        if self.eventfd is not None:
            os.eventfd_write(self.eventfd, 1)

    def request(self, command, payload):
        """Send a command, and wait for its reply.

        :raises DmaError: it was refused.
        """
        self.last = ident = self.last + 1 & 0xffff
        self.send(ident, command, 0, payload)
        while ident not in self.replies:
            self.message()
        error, reply = self.replies.pop(ident)
        if error:
            raise DmaError(os.strerror(error))
        return reply

    def dma_read(self, address, size):
        return self.request(DMA_READ, struct.pack('<QQ', address, size))[16:]

    def dma_write(self, address, data):
        self.request(DMA_WRITE, struct.pack('<QQ', address, len(data)) + data)


def serve(path, make_device):
    """Serve one client after the other, each with a device of its own."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    while True:
        client = Connection(listener.accept()[0], make_device())
        print('client', flush=True)
        try:
            client.serve()
        except (EOFError, ConnectionError):
            print('client gone', flush=True)
        finally:
            client.close()
