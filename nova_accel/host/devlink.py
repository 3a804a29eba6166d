# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read versions of firmware from devlink, over generic netlink.

Needs no privileges and no subprocess. Numbers: include/uapi/linux/netlink.h,
genetlink.h and devlink.h of Linux; `devlink dev info` of iproute2 shows the
same.
"""

from collections.abc import Iterator
import errno
import os
import socket
import struct

_NETLINK_GENERIC = 16
_HEADER = struct.Struct('=IHHII')
_ATTRIBUTE = struct.Struct('=HH')
_REQUEST = 1
_ERROR = 2
_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 16, 3, 1, 2
_INFO_GET, _BUS_NAME, _DEVICE_NAME = 51, 1, 2
#: fixed and running versions; stored ones apply after the next start of the
#: card
_VERSIONS = (100, 101)
_VERSION_NAME, _VERSION_VALUE = 103, 104
_SECONDS = 10


def versions(function: str) -> dict[str, str]:
    """Return name -> version for the firmware of a PCI function.

    :returns: {} if the kernel or the function's driver has no devlink.
    :raises OSError: the kernel does not answer.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW,
                       _NETLINK_GENERIC) as kernel:
        kernel.settimeout(_SECONDS)
        kernel.bind((0, 0))
        try:
            family = dict(_ask(kernel, _CONTROL, _GET_FAMILY,
                               {_FAMILY_NAME: 'devlink'}))[_FAMILY_ID]
            answer = _ask(kernel, struct.unpack('=H', family)[0], _INFO_GET,
                          {_BUS_NAME: 'pci', _DEVICE_NAME: function})
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                return {}
            raise
    return dict(_version(value) for kind, value in answer
                if kind in _VERSIONS)


def _version(nested: bytes) -> tuple[str, str]:
    found = {kind: value.rstrip(b'\0').decode(errors='replace')
             for kind, value in attributes(nested)}
    return found.get(_VERSION_NAME, ''), found.get(_VERSION_VALUE, '')


def _ask(kernel, family, command, values) -> list[tuple[int, bytes]]:
    kernel.send(request(family, command, values))
    return answer(kernel.recv(1 << 16))


def request(family: int, command: int, values: dict[int, str]) -> bytes:
    """Return a message of generic netlink, whose attributes are texts."""
    body = struct.pack('=BBH', command, 1, 0)
    for kind, text in values.items():
        value = text.encode() + b'\0'
        body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind)
        body += value + b'\0' * (-len(value) % 4)
    return _HEADER.pack(_HEADER.size + len(body), family, _REQUEST, 1,
                        0) + body


def answer(message: bytes) -> list[tuple[int, bytes]]:
    """Return (kind, value) of each attribute in an answer's first message.

    :raises OSError: the answer is an error.
    """
    if len(message) < _HEADER.size + 4:
        raise OSError(errno.EPROTO, 'the answer of netlink is too short')
    size, kind, *_ = _HEADER.unpack_from(message)
    if kind == _ERROR:
        number = -struct.unpack_from('=i', message, _HEADER.size)[0]
        raise OSError(number, os.strerror(number))
    return list(attributes(message[_HEADER.size + 4:size]))


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, value) of each attribute of a message."""
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size:
            return
        # the two highest bits are flags
        yield kind & 0x3fff, data[at + _ATTRIBUTE.size:at + size]
        at += size + -size % 4
