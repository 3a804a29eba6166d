# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Prevent two commands from working on one device outside of nova-compute.

Such a command locks a file beside the claim store. The kernel ends the lock
with the process, also after SIGKILL. A file without a lock has no meaning.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import os

from nova_accel import exception


@contextlib.contextmanager
def on(store: str, address: str, command: str) -> Iterator[None]:
    """Lock a device inside the context. Other commands that work on devices,
    and nova-accel enable, then refuse the device.

    :param store: path of the claim store.
    :param command: name of the command, for errors of other commands.
    :raises InvalidRequest: another command works on the device, or the file
        cannot be written.
    """
    path = _path(store, address)
    try:
        file = _locked(path, address)
    except OSError as error:
        raise exception.InvalidRequest(
            f'{address} cannot be worked on, because {path} cannot be written '
            f'({error.strerror}): run the command as the user of nova-compute.'
            ) from error
    try:
        os.write(file, f'{command} (process {os.getpid()})'.encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(file)


def check_idle(store: str, address: str) -> None:
    """Check that no command works on a device outside of nova-compute.

    :raises InvalidRequest: a command does.
    """
    path = _path(store, address)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        _lock(file, fcntl.LOCK_SH, address)
        # the file of a process that was killed
        with contextlib.suppress(OSError):
            os.unlink(path)
    finally:
        os.close(file)


def _locked(path, address) -> int:
    while True:
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(file, fcntl.LOCK_EX, address)
            # check_idle() may have removed the file meanwhile
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.lstat(path)):
                    os.truncate(file, 0)
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file, how, address) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        command = os.pread(file, 200, 0).decode(errors='replace')
        raise exception.InvalidRequest(
            f'{address} cannot be enabled or worked on while '
            f'{command or "another command"} works on it: wait for its end, '
            f'or stop it.') from None


def _path(store, address) -> str:
    return f'{os.path.abspath(store)}.{address}.working'
