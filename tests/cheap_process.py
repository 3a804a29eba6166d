# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What makes any process of tests cheap.

* The garbage collector runs seldom. It would go through all that is imported
  each time.
* Temporary files lie in memory, where the machine has room for them there. A
  claim store waits for the disk at each write.
"""

import gc
import os

#: of Linux, for files in memory; containers may have 64 MiB of it
MEMORY = '/dev/shm'
#: bytes that have to be free there
ROOM = 1 << 30


def collector() -> None:
    """Have the garbage collector run seldom."""
    gc.set_threshold(100000, 20, 100)
    # what is imported stays
    gc.freeze()


def files() -> None:
    """Have this process and those that it starts write into memory."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return
    # tests run programs that they write
    if (found.f_bavail * found.f_frsize >= ROOM
            and not found.f_flag & os.ST_NOEXEC):
        os.environ.setdefault('TMPDIR', MEMORY)
