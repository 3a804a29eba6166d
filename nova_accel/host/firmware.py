# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Files that xclmgmt loads where a guest asks for an xclbin.

With its attribute config_xclbin_change at 1, xclmgmt takes of what a guest
sends only the UUID, and programs the file of that name from a directory that
is one for the host (xclmgmt_xclbin_fetch_and_download() in mgmt-utils.c of
XRT). Each card has a directory of its own below it, with the file of what it
carries; a link where xclmgmt looks leads there. A file that an operator has
placed is not touched.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
import uuid

#: where xclmgmt looks
XCLBINS = '/lib/firmware/xilinx/xclbins'
_OURS = 'nova_accel'
_LAYOUT = 'layout'
#: a lock is held for the time that one file takes to be written
_SECONDS = 30
_INTERFACE = re.compile('[0-9A-Za-z-]{1,64}')


def file_name(function: str, interface: str) -> str:
    """Return the name under which xclmgmt looks for a function.

    :param function: UUID of the xclbin, in any spelling.
    :param interface: the interface UUID as the card's shell spells it.
    :raises ValueError: one of them is not such a thing.
    """
    if not _INTERFACE.fullmatch(interface):
        raise ValueError(interface)
    return f'{uuid.UUID(function)}_{interface}.xclbin'


def offer(place: str, card: str, name: str, content: bytes, ip_layout: bytes,
          ) -> None:
    """Place a file for a card, in place of the earlier one.

    :param place: XCLBINS, or a simulated host's.
    :param card: PCI address of its management function, already checked.
    :param name: see file_name().
    :param content: of the file.
    :param ip_layout: what layout() returns from now on.
    :raises OSError: it cannot be written, as on a file system that is
        read-only, or another process keeps the directory locked.
    """
    own = os.path.join(place, _OURS, card)
    os.makedirs(own, exist_ok=True)
    with _locked(place):
        _empty(own)
        # another project's bitstream is for the kernel alone
        with open(os.path.join(own, '.new'), 'wb', opener=_secret) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with open(os.path.join(own, _LAYOUT), 'wb') as file:
            file.write(ip_layout)
        os.replace(os.path.join(own, '.new'), os.path.join(own, name))
        _link(place)


def withdraw(place: str, card: str) -> None:
    """Offer nothing for a card.

    :raises OSError: the file cannot be removed, or another process keeps the
        directory locked.
    """
    if os.path.isdir(os.path.join(place, _OURS, card)):
        with _locked(place):
            _empty(os.path.join(place, _OURS, card))
            _link(place)


def is_offered(place: str, name: str) -> bool:
    """Return whether xclmgmt finds a file, also one of the operator."""
    return os.path.exists(os.path.join(place, name))


def layout(place: str, card: str) -> bytes | None:
    """Return the IP_LAYOUT of the file offered for a card, as offer() was
    given it; None where none is."""
    try:
        with open(os.path.join(place, _OURS, card, _LAYOUT), 'rb') as file:
            return file.read()
    except FileNotFoundError:
        return None


def _secret(path, flags):
    return os.open(path, flags | os.O_EXCL, mode=0o600)


@contextlib.contextmanager
def _locked(place):
    """Cards are programmed side by side, also by several processes."""
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
    """Create one link for each file that is offered, and remove others."""
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
