# Licensed under the Apache License, Version 2.0. See LICENSE.
"""An Intel PAC with Arria 10 (8086:09c4), as the kernel's DFL drivers see it.

    dfl_card.py SOCKET CONFIG

DFL: a Device Feature List is a chain of 64-bit headers (DFH) in BAR0: 63-60
type (1 AFU, 3 private feature, 4 FIU), 40 end of list, 39-16 offset of the
next, 11-0 feature id. All registers are 64 bits, little endian
(drivers/fpga/dfl.h, dfl-fme-mgr.c of Linux):

  0x00000  FME (FPGA management engine)   DFH: FIU, id 0, next 0x1000
    +0x30    capability     19-17 number of ports
    +0x38+8n port n         60 implemented, 34-32 BAR, 23-0 offset of its list
    +0x60    bitstream_id   +0x68 bitstream_metadata
  0x01000  PR engine                      DFH: private feature, id 5, next
                                               0x1000
    +0x08    control        0 reset, 4 reset ack, 9-7 port, 12 start,
                            13 all data pushed
    +0x10    status         8-0 credits, 16 error
    +0x18    data           one 32-bit word per write
    +0x20    error, W1C     0 operation, 1 crc, 2 incompatible, 3 protocol,
                            4 fifo overflow
    +0xa8    interface id, low and high: the compat_id of every region
  0x02000  errors (dfl-fme-error.c)       DFH: private feature, id 4, end
    +0x50    nonfatal, +0x60 catastrophic and fatal: what is injected
    +0x68    injects errors: 0 catastrophic, 1 fatal, 2 nonfatal
  0x40000  port 0 (port n: 0x40000 * (n + 1))   DFH: FIU, id 1, end of list
    +0x18    offset of the AFU (0x20000)
    +0x30    capability     1-0 number, 23-8 MMIO size in KiB
    +0x38    control        0 soft reset, 4 reset ack
    +0x20000 AFU            DFH: AFU, end of list; +8, +0x10: id, low and high
      +0x18  a register that a guest writes; 0 after a reset of the port and
             after a PR
      +0x20  a word of the card's memory; 0 after the PR of a payload that
             clears memory

A pushed bitstream is the payload of what nova_accel.sim.make_gbs() writes: AFU
id and interface id, 16 bytes little endian each. If the interface id is the one
that this card accepts, the port's AFU id becomes the other; if not, the engine
reports "incompatible", as for a file pushed with its header. A reset of the
function keeps the AFU; a new client finds a power-cycled card. After the ids a
payload may say that it clears the memory of the card.

The config file is JSON, all keys optional; the pr_* and accept_id keys are
read again at each PR, so that a trial can change them while the machine runs:

  ports (1)             1 to 4
  interface_id          what compat_id shows
  accept_id             interface id that bitstreams must carry, if not
                        interface_id
  afu_ids               list, initial AFU id of each port
  bitstream_id, bitstream_metadata    integers
  pr_seconds (0)        how long a PR takes; the driver gives up after 8
  pr_error              operation | crc | incompatible | protocol | fifo |
                        timeout
  pr_error_count (-1)   how many PRs fail so, counted since the file changed
"""

import json
import os
import struct
import sys
import time
import uuid

import vfio_user

FME, PR, ERRORS_AT, PORT, AFU = 0x0, 0x1000, 0x2000, 0x40000, 0x20000
AFU_REGISTER, AFU_MEMORY = AFU + 0x18, AFU + 0x20
CLEARS_MEMORY = b'clears memory'
PR_CTRL, PR_STATUS, PR_DATA = PR + 8, PR + 0x10, PR + 0x18
PR_ERROR, PR_INTERFACE = PR + 0x20, PR + 0xa8
NONFATAL, FATAL, INJECT = (ERRORS_AT + at for at in (0x50, 0x60, 0x68))
RESET, RESET_ACK, START, COMPLETE = 1 << 0, 1 << 4, 1 << 12, 1 << 13
STATUS_ERROR = 1 << 16
ERRORS = {'operation': 1, 'crc': 2, 'incompatible': 4, 'protocol': 8,
          'fifo': 16}
DEFAULTS = {
    'ports': 1, 'interface_id': '9926ab6d-6c92-5a68-aabc-a7d84c545738',
    'accept_id': None,
    'afu_ids': ['d8424dc4-a4a3-c413-f89e-433683f9040b'],    # NLB mode 0
    'bitstream_id': 0x0123000200000185, 'bitstream_metadata': 0x17091911,
    'pr_seconds': 0, 'pr_error': None, 'pr_error_count': -1}


def dfh(kind, ident, following=0, end=False):
    return kind << 60 | end << 40 | following << 16 | ident


class Config:

    def __init__(self, path):
        self.path, self.stamp, self.failed = path, None, 0
        self.load()

    def load(self):
        stamp = os.stat(self.path).st_mtime_ns
        if stamp == self.stamp:
            return
        with open(self.path) as f:
            given = json.load(f)
        unknown = set(given) - set(DEFAULTS)
        error = given.get('pr_error')
        if unknown or (error and error not in (*ERRORS, 'timeout')):
            raise ValueError(f'bad keys or values: {sorted(unknown)} {error}')
        self.value = dict(DEFAULTS, **given)
        self.stamp, self.failed = stamp, 0

    def __getattr__(self, name):
        return self.value[name]

    def injected(self):
        """The error that this PR must have, or None."""
        if self.pr_error and (self.pr_error_count < 0
                              or self.failed < self.pr_error_count):
            self.failed += 1
            return self.pr_error


class Dfl(vfio_user.Device):

    bar_size = 2 << 20

    def __init__(self, config):
        # class: processing accelerator
        super().__init__(0x8086, 0x09c4, 0x1200, (0x8086, 0))
        self.cfg = config
        self.config[0x34] = 0x40
        self.pcie_capability(0x40)
        self.data, self.done_at, self.outcome = bytearray(), None, None
        self.ports = config.ports
        if not 1 <= self.ports <= 4:
            raise ValueError('ports is 1 to 4')
        q = self.put
        q(FME, dfh(4, 0, PR))
        q(FME + 0x30, self.ports << 17 | 1)
        q(FME + 0x60, config.bitstream_id)
        q(FME + 0x68, config.bitstream_metadata)
        q(PR, dfh(3, 5, ERRORS_AT - PR))
        q(ERRORS_AT, dfh(3, 4, end=True))
        q(PR_STATUS, 0x1ff)
        self.put_uuid(PR_INTERFACE, config.interface_id)
        for n in range(self.ports):
            base = PORT * (n + 1)
            q(FME + 0x38 + 8 * n, 1 << 60 | base)
            q(base, dfh(4, 1, end=True))
            q(base + 0x18, AFU)
            q(base + 0x30, 4 << 8 | n)
            # a port begins in reset
            q(base + 0x38, RESET | RESET_ACK)
            q(base + AFU, dfh(1, 0, end=True))
            self.put_uuid(base + AFU + 8,
                          config.afu_ids[n % len(config.afu_ids)])

    def put(self, at, value):
        struct.pack_into('<Q', self.bar, at, value)

    def get(self, at):
        return struct.unpack_from('<Q', self.bar, at)[0]

    def put_uuid(self, at, value):
        v = uuid.UUID(str(value)).int
        self.put(at, v & (1 << 64) - 1)
        self.put(at + 8, v >> 64)

    def bar_read(self, offset, size):
        if (self.done_at and offset & ~7 == PR_CTRL
                and time.monotonic() >= self.done_at):
            self.finish()
        return super().bar_read(offset, size)

    def bar_write(self, offset, data):
        register, low = offset & ~7, not offset & 7
        if register == PR_DATA:
            if low:
                self.data += data[:4]
        elif register == PR_ERROR:
            self.put(PR_ERROR, 0)
            self.put(PR_STATUS, self.get(PR_STATUS) & ~STATUS_ERROR)
        elif register == PR_CTRL:
            old = self.get(register)
            super().bar_write(offset, data)
            if low:
                self.control(old, self.get(register))
        elif register == INJECT:
            super().bar_write(offset, data)
            injected = self.get(INJECT)
            # the bits of injected errors
            self.put(FATAL, (injected & 1) << 11 | (injected & 2) << 9)
            self.put(NONFATAL, (injected & 4) << 4)
        elif offset >= PORT:
            # the rest of the FME is read-only
            super().bar_write(offset, data)
            port = register - 0x38
            if low and port % PORT == 0 and port // PORT <= self.ports:
                v = self.get(register)
                self.put(register, v | RESET_ACK if v & RESET
                         else v & ~RESET_ACK)
                if v & RESET:
                    self.put(port + AFU_REGISTER, 0)

    def control(self, old, v):
        v = v | RESET_ACK if v & RESET else v & ~RESET_ACK
        if v & RESET:
            # also ends a PR that timed out
            v, self.done_at = v & ~(START | COMPLETE), None
        if v & START and not old & START:
            self.data, self.done_at = bytearray(), None
            self.cfg.load()
            print('PR begins', flush=True)
        if v & COMPLETE:
            v &= ~COMPLETE
            self.outcome = self.cfg.injected()
            # on timeout "start" stays set
            if self.outcome != 'timeout':
                self.done_at = time.monotonic() + self.cfg.pr_seconds
        self.put(PR_CTRL, v)

    def finish(self):
        """The engine is done: clear "start"; bring the AFU in, or the error."""
        self.done_at = None
        control, error = self.get(PR_CTRL), self.outcome
        self.put(PR_CTRL, control & ~START)
        port, ids = control >> 7 & 7, bytes(self.data[:32])
        wanted = uuid.UUID(self.cfg.accept_id or self.cfg.interface_id)
        if not error and (len(ids) < 32
                          or uuid.UUID(bytes_le=ids[16:]) != wanted):
            error = 'incompatible'
        if not error and port >= self.ports:
            error = 'operation'
        print(f'PR of port {port}, {len(self.data)} bytes: {error or "ok"}',
              flush=True)
        if error:
            self.put(PR_ERROR, ERRORS[error])
            self.put(PR_STATUS, self.get(PR_STATUS) | STATUS_ERROR)
        else:
            base = PORT * (port + 1)
            self.put_uuid(base + AFU + 8, uuid.UUID(bytes_le=ids[:16]))
            self.put(base + AFU_REGISTER, 0)
            if self.data[32:].startswith(CLEARS_MEMORY):
                self.put(base + AFU_MEMORY, 0)


if __name__ == '__main__':
    path, config = sys.argv[1:]
    # complain now rather than at connect
    Config(config)
    vfio_user.serve(path, lambda: Dfl(Config(config)))
