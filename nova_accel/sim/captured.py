# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read and write captures, and replay a capture as a kernel.

The file is YAML with the keys ``capture`` (the version of the format),
``sysfs`` (a tree of names) and ``answers`` (the results of operations). In the
tree, ``!link`` is a link with the path of its target below /sys, ``!error`` an
attribute that cannot be read, and ``!!binary`` an attribute that is not text.
A replayed capture is read-only: drivers can read it, but operations that
change devices fail.
"""

from collections.abc import Iterable
import dataclasses
import errno
import os
import re
import typing

import yaml

from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import nvme_admin
from nova_accel.sim import recorder
from nova_accel.sim import tree as sysfs

VERSION = 1
#: seconds between two checks whether devices appeared or disappeared
_LOOK = 1
#: operation -> function that converts its answer from YAML
_FROM_PLAIN: dict[str, typing.Any] = {
    'read_nvme': nvme_admin.Controller.from_tuple,
    'read_nvme_health': lambda fields: nvme_admin.HealthLog(*fields),
    'read_nvme_sanitize': lambda fields: nvme_admin.SanitizeStatus(*fields),
    'read_nvme_vfs': lambda found: [
        nvme_admin.Secondary.from_tuple(fields) for fields in found],
    'read_signatures': lambda found: [tuple(pair) for pair in found],
}


class _Loader(getattr(yaml, 'CSafeLoader', yaml.SafeLoader)):  # type: ignore
    pass


class _Dumper(getattr(yaml, 'CSafeDumper', yaml.SafeDumper)):  # type: ignore
    def ignore_aliases(self, data):
        return True


def _error(loader, node):
    name = loader.construct_scalar(node)
    if name not in errno.errorcode.values():
        raise yaml.constructor.ConstructorError(
            None, None, f'{name!r} is not the name of an error, such as EIO',
            node.start_mark)
    return sysfs.Errno(getattr(errno, name))


_Loader.add_constructor(
    '!link', lambda loader, node: sysfs.Link(loader.construct_scalar(node)))
_Loader.add_constructor('!error', _error)
_Dumper.add_representer(sysfs.Link, lambda dumper, link: (
    dumper.represent_scalar('!link', str(link))))
_Dumper.add_representer(sysfs.Errno, lambda dumper, number: (
    dumper.represent_scalar('!error', errno.errorcode[number])))


def is_capture(path: str) -> bool:
    """Return whether a file is a capture, by its first key.

    Return False for an unreadable file, because the caller then loads it as a
    description, and reports the reason.
    """
    try:
        with open(path, encoding='utf-8', errors='replace') as file:
            for line in file:
                if line.strip() and not line.startswith(('#', '---')):
                    return bool(re.match('capture *:', line))
    except OSError:
        pass
    return False


def dump(tree: sysfs.Directory, answers: Iterable[recorder.Answer],
         about: dict[str, typing.Any], file: typing.TextIO) -> None:
    """Write a capture.

    :param about: further keys, for people who read the file.
    """
    yaml.dump({'capture': VERSION, **about}, file, Dumper=_Dumper,
              sort_keys=False, allow_unicode=True)
    yaml.dump({'answers': [_to_plain(answer) for answer in answers],
               'sysfs': tree}, file, Dumper=_Dumper, allow_unicode=True)


def plain(value: typing.Any) -> typing.Any:
    """Convert an answer to lists, mappings and scalars, for YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.astuple(value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _to_plain(answer):
    made = {'operation': answer.operation,
            'arguments': list(answer.arguments)}
    if answer.error:
        return {**made, 'error': sysfs.Errno(answer.error)}
    return {**made, 'value': answer.value}


def _load(path):
    """Read a capture. Return (tree, answers, options of [accel])."""
    try:
        with open(path, encoding='utf-8') as file:
            found = yaml.load(file, Loader=_Loader)
        if found['capture'] != VERSION:
            raise exception.InvalidSimulation(
                f'The capture {path} has the version {found["capture"]!r}, '
                f'and this release plays version {VERSION}: use the release '
                f'that wrote it.')
        tree = found['sysfs']
        answers = {(item['operation'], tuple(item['arguments'])): item
                   for item in found['answers']}
        if not isinstance(tree, dict):
            raise TypeError('sysfs is not a mapping')
        options = found.get('options', {})
        if not isinstance(options, dict):
            raise TypeError('options is not a mapping')
    except (OSError, yaml.YAMLError, KeyError, TypeError,
            ValueError) as error:
        raise exception.InvalidSimulation(
            f'The capture {path} cannot be used '
            f'({" ".join(str(error).split()) or repr(error)}): have '
            f'"nova-accel capture" write it again, or correct it.') from error
    for place in ('bus/pci/devices', 'bus/pci/drivers'):
        directory = tree
        for name in place.split('/'):
            directory = directory.setdefault(name, {})
    return tree, answers, options


class CapturedKernel(sysfs.Reads):
    """Replays a capture, with the interface of host.kernel.Kernel."""

    def __init__(self, path: str):
        """:param path: path of the file with the capture.

        :raises InvalidSimulation: the file is malformed.
        """
        self._sysfs, self._answers, found = _load(path)
        #: options of [accel] on the captured host, except defaults, by name
        self.options: dict[str, typing.Any] = found

    def _tree(self):
        return self._sysfs

    def changes(self, over):
        while not over.wait(_LOOK):
            yield None

    def __getattr__(self, name):
        if not hasattr(host_kernel.Kernel, name):
            raise AttributeError(name)
        if name in recorder.QUESTIONS:
            return lambda *arguments: self._answer(name, arguments)

        def refuse(*arguments, **_):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        return refuse

    def _answer(self, name, arguments):
        found = self._answers.get((name, arguments))
        if found is None:
            raise sysfs.error(errno.ENODATA, name)
        if 'error' in found:
            raise sysfs.error(found['error'], name)
        return _FROM_PLAIN.get(name, lambda value: value)(found['value'])
