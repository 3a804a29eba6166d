# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Place files that xclmgmt loads when a guest requests an xclbin.

If the attribute config_xclbin_change of a card is 1, xclmgmt reads only the
UUID from a guest's request. It programs the card with the file that a
directory of the host has for this UUID (xclmgmt_xclbin_fetch_and_download() in
mgmt-utils.c of XRT). This module keeps a subdirectory for each card, with the
file of the card's present function, and a link to this file in the directory.
Files of an operator stay untouched.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
import uuid

#: the directory from which xclmgmt reads
XCLBINS = '/lib/firmware/xilinx/xclbins'
_OURS = 'nova_accel'
_LAYOUT = 'layout'
#: seconds for which a lock is held at most: one file is written
_SECONDS = 30
_INTERFACE = re.compile('[0-9A-Za-z-]{1,64}')


def file_name(function: str, interface: str) -> str:
    """Return the name of the file that xclmgmt reads for a function.

    :param function: UUID of the xclbin, in any spelling.
    :param interface: the interface UUID, spelled as in the card's shell.
    :raises ValueError: an argument is malformed.
    """
    if not _INTERFACE.fullmatch(interface):
        raise ValueError(interface)
    return f'{uuid.UUID(function)}_{interface}.xclbin'


def offer(place: str, card: str, name: str, content: bytes, ip_layout: bytes,
          ) -> None:
    """Place a file for a card, and remove the card's earlier file.

    :param place: XCLBINS, or the directory of a simulated host.
    :param card: PCI address of the management function, already checked.
    :param name: see file_name().
    :param content: content of the file.
    :param ip_layout: the section IP_LAYOUT of the file, which layout()
        returns.
    :raises OSError: the file cannot be written, for example on a read-only
        file system, or another process keeps the directory locked.
    """
    own = os.path.join(place, _OURS, card)
    os.makedirs(own, exist_ok=True)
    with _locked(place):
        _empty(own)
        # only the kernel may read another project's bitstream
        with open(os.path.join(own, '.new'), 'wb', opener=_secret) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with open(os.path.join(own, _LAYOUT), 'wb') as file:
            file.write(ip_layout)
        os.replace(os.path.join(own, '.new'), os.path.join(own, name))
        _link(place)


def withdraw(place: str, card: str) -> None:
    """Remove the file of a card.

    :raises OSError: the file cannot be removed, or another process keeps the
        directory locked.
    """
    if os.path.isdir(os.path.join(place, _OURS, card)):
        with _locked(place):
            _empty(os.path.join(place, _OURS, card))
            _link(place)


def is_offered(place: str, name: str) -> bool:
    """Return whether xclmgmt finds a file of nova-compute or the operator."""
    return os.path.exists(os.path.join(place, name))


def layout(place: str, card: str) -> bytes | None:
    """Return the IP_LAYOUT that offer() stored for a card, or None if no file
    is placed for it."""
    try:
        with open(os.path.join(place, _OURS, card, _LAYOUT), 'rb') as file:
            return file.read()
    except FileNotFoundError:
        return None


def _secret(path, flags):
    return os.open(path, flags | os.O_EXCL, mode=0o600)


@contextlib.contextmanager
def _locked(place):
    """Lock the subdirectories of cards inside the context, because several
    processes may place files at the same time."""
    fd = os.open(os.path.join(place, _OURS), os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(
                        errno.ETIMEDOUT, f'another process has had the lock '
                        f'of {place}/{_OURS} for {_SECONDS} s') from None
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _empty(own):
    for name in os.listdir(own):
        os.unlink(os.path.join(own, name))


def _link(place):
    """Create a link to each card's file, and remove links to missing files."""
    wanted = {name: os.path.join(_OURS, card, name)
              for card in os.listdir(os.path.join(place, _OURS))
              for name in os.listdir(os.path.join(place, _OURS, card))
              if name.endswith('.xclbin')}
    for name in os.listdir(place):
        path = os.path.join(place, name)
        if os.path.islink(path) and os.readlink(path).startswith(f'{_OURS}/'):
            if name in wanted and os.path.exists(path):
                del wanted[name]
            else:
                os.unlink(path)
    for name, target in wanted.items():
        # an operator's file of that name stays
        with contextlib.suppress(FileExistsError):
            os.symlink(target, os.path.join(place, name))
