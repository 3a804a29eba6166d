# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Record everything that drivers read from a kernel, and refuse changes."""

from collections.abc import Callable
import dataclasses
import errno
import os
import threading
import typing

from nova_accel.sim import tree as sysfs

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


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of an operation, or the number of its error."""

    operation: str
    arguments: tuple
    value: typing.Any = None
    error: int = 0


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

        def refuse(*arguments, **_):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        return refuse

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
