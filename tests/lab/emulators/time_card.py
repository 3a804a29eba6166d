# Licensed under the Apache License, Version 2.0. See LICENSE.
"""An OCP time card (1d9b:0400), as the kernel's ptp_ocp sees it.

    time_card.py SOCKET FAULTS

BAR0 is 32 MiB, registers of 32 bits (drivers/ptp/ptp_ocp.c of Linux):
  0x00020000  image version; with bit 15 set the low bits are the loader's
  0x01000000  clock control: 1 adjust time, 30 read time, 31 read done
  0x01000004  clock status: 0 in sync          0x0100000c  clock version
  0x01000010  time read: ns, s                 0x01000020  time to set: ns, s
One MSI vector only: the driver then skips the blocks whose vector is out of
range (serial ports, signal generators, i2c, flash) and keeps the PTP clock,
which follows the host's clock plus what the machine sets. The frequency cannot
be adjusted.

FAULTS is a file with JSON, read when the machine asks for the link's state:

  lanes (8)     how many of its eight the link has
"""

import json
import struct
import sys
import time

import vfio_user

IMAGE_VERSION, CLOCK, MSI, PCIE = 0x20000, 0x1000000, 0x40, 0x50
CONTROL, STATUS, VERSION = CLOCK, CLOCK + 4, CLOCK + 0xc
TIME, SET = CLOCK + 0x10, CLOCK + 0x20
LANES = 8
LINK_STATUS = PCIE + 0x12
ADJUST_TIME, READ_TIME, READ_DONE = 1 << 1, 1 << 30, 1 << 31


class Ocp(vfio_user.Device):

    bar_size = 32 << 20

    def __init__(self, faults):
        # class: system peripheral
        super().__init__(0x1d9b, 0x0400, 0x0880, (0x1d9b, 0x0400))
        self.config[0x34] = MSI
        self.msi_capability(MSI, PCIE)
        self.pcie_capability(PCIE, flr=True, lanes=LANES)
        self.faults = faults
        self.reset()

    def reset(self):
        self.offset = 0
        self.bar[:] = bytes(self.bar_size)
        self.put(IMAGE_VERSION, 0x8003)
        self.put(VERSION, 0x01020000)
        self.put(STATUS, 1)

    def put(self, at, value):
        struct.pack_into('<I', self.bar, at, value & 0xffffffff)

    def config_read(self, offset, size):
        if offset <= LINK_STATUS < offset + size:
            with open(self.faults) as file:
                lanes = json.load(file).get('lanes', LANES)
            struct.pack_into('<H', self.config, LINK_STATUS, lanes << 4 | 1)
        return super().config_read(offset, size)

    def bar_write(self, offset, data):
        super().bar_write(offset, data)
        if offset != CONTROL:
            return
        v = struct.unpack('<I', data[:4])[0]
        if v & ADJUST_TIME:
            ns, s = struct.unpack_from('<II', self.bar, SET)
            self.offset = s * 10**9 + ns - time.time_ns()
        if v & READ_TIME:
            now = time.time_ns() + self.offset
            self.put(TIME, now % 10**9)
            self.put(TIME + 4, now // 10**9)
            v |= READ_DONE
        self.put(CONTROL, v & ~READ_TIME)


if __name__ == '__main__':
    socket, faults = sys.argv[1:]
    vfio_user.serve(socket, lambda: Ocp(faults))
