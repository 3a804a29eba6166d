# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A GPU of NVIDIA (10de:26b9, an L40S), as far as it clears its memory.

    gpu.py SOCKET FAULTS

BAR0 is 16 MiB, and has the words of nova_accel.host.nvidia: it boots after a
reset of its bus, from the first reading on, then clears its memory. A reset of
the function leaves the words as they are. Each reset is a line of its log.

FAULTS is a file with JSON, read at each reading:

  boot_seconds (1), clear_seconds (1)
  clears (true)  whether the clearing ends
  mode (0)       what its word about ECC reads as
"""

import json
import struct
import sys
import time

import vfio_user

PCIE = 0x40
BOOT, CLEAR, ECC = 0x118234, 0x100b20, 0x9a0470


class Gpu(vfio_user.Device):

    bar_size = 16 << 20

    def __init__(self, faults):
        super().__init__(0x10de, 0x26b9, 0x0302, (0x10de, 0x1851))
        self.config[0x34] = PCIE
        self.pcie_capability(PCIE, flr=True, lanes=16)
        self.faults = faults
        #: when it was read first after its last reset; None: not since
        self.booted = 0

    def reset(self):
        print('bus reset', flush=True)
        self.booted = None

    def function_reset(self):
        print('function reset', flush=True)

    def bar_read(self, offset, size):
        if offset not in (BOOT, CLEAR, ECC):
            return super().bar_read(offset, size)
        if self.booted is None:
            self.booted = time.monotonic()
        with open(self.faults) as file:
            said = json.load(file)
        boots = said.get('boot_seconds', 1)
        passed = time.monotonic() - self.booted
        value = {
            BOOT: 0x3ff * (passed > boots),
            CLEAR: int(said.get('clears', True)
                       and passed > boots + said.get('clear_seconds', 1)),
            ECC: said.get('mode', 0)}[offset]
        return struct.pack('<I', value)[:size]

    def bar_write(self, offset, data):
        print(f'write {offset:#x}', flush=True)


if __name__ == '__main__':
    socket, faults = sys.argv[1:]
    vfio_user.serve(socket, lambda: Gpu(faults))
