# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Allow one nova-compute for each claim store."""

import contextlib
import fcntl
import os

from nova_accel import exception

#: path of a store -> its lock, as long as this process lives: threads that
#: clean and program devices write the store after nova-compute was asked to
#: stop. A record lock goes with its process, also after SIGKILL, and children
#: do not inherit it (fcntl(2)); closing any descriptor of the file would end it
_LOCKS: dict[str, int] = {}


def use(path: str) -> None:
    """Prevent other nova-compute processes from using a claim store.

    Each process decides by the rows in its own memory. Hence two processes
    could give one device to two servers.

    :param path: path of the store.
    :raises AcceleratorsUnavailable: another process uses the store.
    """
    path = os.path.abspath(path)
    if path in _LOCKS:
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(f'{path}.lock', os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        # then the store cannot be written either, and its error reports it
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        other = os.pread(file, 20, 0).decode(errors='replace').strip()
        os.close(file)
        raise exception.AcceleratorsUnavailable(
            f'The claim store {path} is used by another nova-compute on this '
            f'host (process {other or "unknown"}): stop that one, or give '
            f'this one a state_path and a host of its own in nova.conf.'
        ) from None
    except OSError:
        # a file system without locks
        os.close(file)
        return
    _LOCKS[path] = file
    # for the error of another process; on a full file system it is omitted
    with contextlib.suppress(OSError):
        os.truncate(file, 0)
        os.write(file, b'%d\n' % os.getpid())
