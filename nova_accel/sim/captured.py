# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Captures: record a kernel, redact the record, write, read and replay it.

The file is YAML with the keys ``capture`` (the version of the format),
``sysfs`` (a tree of names) and ``answers`` (the results of operations). In the
tree, ``!link`` is a link with the path of its target below /sys, ``!error`` an
attribute that cannot be read, and ``!!binary`` an attribute that is not text.
A replayed capture is read-only: drivers can read it, but operations that
change devices fail.

A redacted capture has stand-ins for the identity of the host and its devices.
Within a capture, equal values have equal stand-ins, and different values have
different stand-ins. A stand-in has the form of the replaced value, because
drivers check the form: the letters and digits of a serial number become
digits.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import errno
import os
import re
import threading
import typing

import yaml

from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import nvme_admin
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
#: operations that only read. Others change the host, and are refused
QUESTIONS = frozenset((
    'has_iova_bitmap', 'mounted_devices', 'offers_xclbin',
    'physical_address_bits', 'read_afu',
    'read_device_serial', 'read_firmware', 'read_nvme', 'read_nvme_health',
    'read_nvme_sanitize', 'read_nvme_vfs', 'read_qat_heartbeat',
    'read_signatures', 'vfio_module', 'xclbin_layout'))
#: placeholder for an attribute that exists but was not read
UNREAD = sysfs.Errno(errno.ENODATA)
_TEXTS = (str, bytes)
_DENIED = (errno.EACCES, errno.EPERM)
#: maximum number of links in one path (MAXSYMLINKS of Linux)
_LINKS = 40
#: attributes of sysfs that identify a device: PCI and network devices, NVMe,
#: time cards, cards under XRT, AMD's GPUs
_ATTRIBUTES = frozenset((
    'serial', 'serialnum', 'serial_num', 'serial_number', 'unique_id',
    'subsysnqn', 'hostnqn', 'hostid', 'wwid', 'nguid', 'eui', 'uuid',
    'address', 'phys_switch_id', 'permaddr', 'board_id'))
_MAC = re.compile('(?<![0-9a-fA-F:])[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}'
                  '(?![0-9a-fA-F:])')
#: names of interfaces that systemd derives from the MAC address
_NAMED_BY_MAC = re.compile('(?<=en[xs])[0-9a-f]{12}|(?<=wlx)[0-9a-f]{12}')
#: minimum length of a value that is also replaced within other text
_LEAST = 6
_HOST = 'host'


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of an operation, or the number of its error."""

    operation: str
    arguments: tuple
    value: typing.Any = None
    error: int = 0


def _refusing(name):
    """Return the operation of a read-only kernel: it fails."""
    def refuse(*arguments, **_):
        raise sysfs.error(errno.EROFS, name)
    return refuse


class Recorder:
    """Records everything that is read from a host.kernel.Kernel. Thread-safe.

    The recorded tree has each attribute at its real path, as in sysfs. Hence
    drivers that replay the tree find the attribute through other links as
    well.
    """

    def __init__(self, kernel):
        """:param kernel: the machine's, or a simulated one."""
        self._kernel = kernel
        self._lock = threading.Lock()
        self.tree: sysfs.Directory = {}
        #: (operation, arguments) -> answer
        self.answers: dict[tuple, Answer] = {}
        #: paths and operations that need more permissions
        self.denied: set[str] = set()
        #: path -> target of the link, None if the path is not a link
        self._links: dict[str, str | None] = {}

    # Reads, see Kernel

    def read(self, path):
        return self._read(path, lambda: self._kernel.read(path))

    def read_bytes(self, path, size):
        return self._read(path, lambda: self._kernel.read_bytes(path, size))

    def _read(self, path, read: Callable[[], typing.Any]):
        place = self._place(path)
        try:
            value = read()
        except OSError as error:
            if error.errno != errno.ENOENT or self._kernel.exists(path):
                self._note(place, sysfs.Errno(error.errno or errno.EIO))
            if error.errno in _DENIED:
                self.denied.add(f'/sys/{place}')
            raise
        self._note(place, value)
        return value

    def read_some(self, path, names):
        found = self._kernel.read_some(path, names)
        place = self._place(path)
        for name in names:
            if name in found:
                self._note(f'{place}/{name}', found[name])
            elif self._kernel.exists(f'{path}/{name}'):
                self._note(f'{place}/{name}', sysfs.Errno(errno.EIO))
        return found

    def listdir(self, path):
        place = self._place(path)
        try:
            names = self._kernel.listdir(path)
        except PermissionError:
            self.denied.add(f'/sys/{place}')
            raise
        self._note(place, {})
        for name in names:
            self._note_unread(f'{place}/{name}')
        return names

    def exists(self, path):
        found = self._kernel.exists(path)
        if found:
            self._note_unread(self._place(path))
        return found

    def readlink(self, path):
        target = self._kernel.readlink(path)
        self._place(path, follow_last=False)
        return target

    def changes(self, over):
        yield from self._kernel.changes(over)

    # Operations, see Kernel

    def __getattr__(self, name):
        operation = getattr(self._kernel, name)
        if name in QUESTIONS:
            return lambda *arguments: self._ask(name, operation, arguments)

        return _refusing(name)

    def _ask(self, name, operation, arguments):
        try:
            value = operation(*arguments)
        except Exception as error:
            # without the privileged process, errors of other classes occur
            number = getattr(error, 'errno', None)
            if number in (*_DENIED, None):
                self.denied.add(' '.join((name, *map(str, arguments))))
            self._answered(Answer(name, arguments, error=(
                number or errno.EACCES)))
            raise
        self._answered(Answer(name, arguments, value))
        return value

    def _answered(self, answer):
        with self._lock:
            self.answers[answer.operation, answer.arguments] = answer

    # The tree

    def _place(self, path, follow_last=True) -> str:
        parts = [part for part in path.split('/') if part]
        at: list[str] = []
        links = 0
        while parts:
            name = parts.pop(0)
            here = '/'.join((*at, name))
            target = self._target(here)
            if target is None or not (parts or follow_last):
                at.append(name)
                continue
            links += 1
            if links > _LINKS:
                break
            parts = target.split('/') + parts
            at = []
        return '/'.join(at)

    def _target(self, place) -> str | None:
        if place not in self._links:
            try:
                link = self._kernel.readlink(place)
            except OSError:
                target = None
            else:
                target = os.path.normpath(os.path.join(
                    '/sys', os.path.dirname(place), link)
                    ).removeprefix('/sys/')
                self._note(place, sysfs.Link(target))
            self._links[place] = target
        return self._links[place]

    def _note_unread(self, place):
        with self._lock:
            if self._node(place) is not None:
                return
        if self._target(place) is not None:
            return
        try:
            self._kernel.listdir(place)
        except NotADirectoryError:
            self._note(place, UNREAD)
        except OSError:
            # the directory cannot be listed, or has disappeared
            pass
        else:
            self._note(place, {})

    def _node(self, place):
        node: typing.Any = self.tree
        for name in place.split('/'):
            if not isinstance(node, dict) or name not in node:
                return None
            node = node[name]
        return node

    def _note(self, place, value):
        *above, name = place.split('/')
        with self._lock:
            directory = self.tree
            for part in above:
                found = directory.get(part)
                if not isinstance(found, dict):
                    found = directory[part] = {}
                directory = found
            before = directory.get(name)
            # keep what is known: it is more than an empty directory, a part of
            # the attribute, or a later error
            if not (isinstance(before, dict) or isinstance(before, _TEXTS) and (
                    not isinstance(value, _TEXTS)
                    or len(before) >= len(value))):
                directory[name] = value


class Redaction:
    """The stand-ins of one capture."""

    def __init__(self, hosts: Iterable[str]):
        """:param hosts: names of this host."""
        names = sorted({part for name in hosts if name
                        for part in (name, name.partition('.')[0])},
                       key=len, reverse=True)
        self._hosts = re.compile('(?<![A-Za-z0-9_])(?:%s)(?![A-Za-z0-9_])'
                                 % '|'.join(map(re.escape, names)
                                            )) if names else None
        #: value -> its stand-in
        self.stand_ins: dict[str, str] = {}

    def learn(self, tree: sysfs.Directory,
              answers: Iterable[Answer]) -> None:
        """Find the serial numbers of a capture, and choose their stand-ins."""
        for path, value in _attributes(tree):
            if path.rpartition('/')[2] in _ATTRIBUTES:
                self._stand_in(value.strip())
        for answer in answers:
            if answer.operation == 'read_device_serial' and answer.value:
                self._stand_in(answer.value)
            elif answer.operation == 'read_nvme' and answer.value:
                self._stand_in(answer.value.serial.strip())

    def _stand_in(self, value: str) -> str:
        """Return the stand-in of a serial number. If the value does not
        identify a device, for example only zeros, return the value itself."""
        places = sum(map(str.isalnum, value))
        if not re.search('[1-9]', value):
            # all zeros, or a word such as "unknown": not a serial number
            return value
        if value not in self.stand_ins:
            digits = iter(str(len(self.stand_ins) + 1).zfill(places))
            made = ''.join(next(digits) if c.isalnum() else c for c in value)
            self.stand_ins[value] = made + ''.join(digits)
        return self.stand_ins[value]

    def tree(self, node: typing.Any, name: str = '') -> typing.Any:
        if isinstance(node, dict):
            return {self.name(key): self.tree(value, key)
                    for key, value in node.items()}
        if isinstance(node, sysfs.Link):
            return sysfs.Link(self.name(node))
        if isinstance(node, str):
            if name in _ATTRIBUTES and node.strip() in self.stand_ins:
                return node.replace(node.strip(),
                                    self.stand_ins[node.strip()])
            return self.text(node)
        return node

    def name(self, path: str) -> str:
        """Return a path with stand-ins. No names of hosts are replaced,
        because paths of the kernel have none."""
        for value, stand_in in self._long():
            path = path.replace(value, stand_in)
        return _NAMED_BY_MAC.sub(lambda m: self._of_mac(m[0]), path)

    def text(self, text: str) -> str:
        """Return a text with stand-ins."""
        text = _MAC.sub(lambda m: self._stand_in(m[0]), self.name(text))
        return self._hosts.sub(_HOST, text) if self._hosts else text

    def value(self, value: typing.Any) -> typing.Any:
        """Return an answer (lists, mappings and texts) with stand-ins."""
        if isinstance(value, dict):
            return {self.value(k): self.value(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, str):
            return self.stand_ins.get(value) or self.text(value)
        return value

    def _of_mac(self, digits):
        """Return the stand-in for a MAC address without colons, in a name."""
        return self._stand_in(':'.join(
            digits[n:n + 2] for n in range(0, 12, 2))).replace(':', '')

    def _long(self):
        """Return (value, stand-in) of the values to replace in texts, the
        longest value first, because it may contain a shorter one."""
        return sorted(((v, s) for v, s in self.stand_ins.items()
                       if sum(map(str.isalnum, v)) >= _LEAST),
                      key=lambda item: -len(item[0]))


def _attributes(node, path='') -> Iterator[tuple[str, str]]:
    for name in sorted(node):
        value = node[name]
        if isinstance(value, dict):
            yield from _attributes(value, f'{path}/{name}')
        elif isinstance(value, str) and not isinstance(value, sysfs.Link):
            yield f'{path}/{name}', value


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


def dump(tree: sysfs.Directory, answers: Iterable[Answer],
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
        if name in QUESTIONS:
            return lambda *arguments: self._answer(name, arguments)

        return _refusing(name)

    def _answer(self, name, arguments):
        found = self._answers.get((name, arguments))
        if found is None:
            raise sysfs.error(errno.ENODATA, name)
        if 'error' in found:
            raise sysfs.error(found['error'], name)
        return _FROM_PLAIN.get(name, lambda value: value)(found['value'])
