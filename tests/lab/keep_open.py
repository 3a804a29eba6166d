# Licensed under the Apache License, Version 2.0. See LICENSE.
"""In the machine: keeps the VFIO device of the guest open beyond its end.

As a process that hangs in the kernel does; by pidfd_getfd(2).
"""

import ctypes
import os
import pathlib
import signal

PIDFD_GETFD = 438


def device():
    """(process, descriptor) of the first VFIO device that a guest has."""
    for fd in pathlib.Path('/proc').glob('[0-9]*/fd/*'):
        try:
            if os.readlink(fd) == 'anon_inode:[vfio-device]':
                return int(fd.parts[2]), int(fd.name)
        except OSError:
            continue
    raise SystemExit('no guest has a VFIO device')


def main():
    process, descriptor = device()
    mine = ctypes.CDLL(None, use_errno=True).syscall(
        PIDFD_GETFD, os.pidfd_open(process), descriptor, 0)
    if mine < 0:
        raise OSError(ctypes.get_errno(), 'pidfd_getfd')
    pathlib.Path('/run/kept').touch()
    # until it is told to end
    signal.pause()


if __name__ == '__main__':
    main()
