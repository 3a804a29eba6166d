# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstreams on the local disk, by the hash of their content.

The directory is the whole state of the cache:

``<algorithm>-<digest>``
    the data of an image, complete and verified. Its modification time is the
    time of the last use. A reader holds a shared lock (flock) on it; removal
    needs an exclusive one.
``<algorithm>-<digest>.part``
    a download; the downloading thread holds an exclusive lock on it.
``image-<uuid>``
    a symbolic link to the content that a Glance image had last.

A lock ends with its process. Locks exclude threads of one process as well as
other processes. Waiting for a lock polls, which does not block the eventlet
hub.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import os
import time
import typing

from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import model

CONF = conf.CONF

_PART = '.part'
_LINK = 'image-'
#: seconds between looks whether another thread has finished a download
_POLL = 0.05
#: of much data takes long
_fsync = limited.blocking(os.fsync)


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """A file that is not removed while it is leased."""

    path: str
    #: '<algorithm>-<hex digest>', which is also its name
    content: str


class BitstreamCache:
    """A directory of bitstreams; processes may share it."""

    def __init__(self, directory: str):
        """Remove what a killed process left.

        :param directory: [accel] bitstream_cache of nova-compute; created if
            missing.
        :raises ConfigurationError: the directory cannot be written.
        """
        self.directory = directory
        with self._writing():
            os.makedirs(directory, mode=0o700, exist_ok=True)
            for name in os.listdir(directory):
                if name.endswith(_PART):
                    self._remove(name)
                elif name.startswith(_LINK) and not os.path.exists(
                        self._path(name)):
                    self._unlink(name)
            self._trim()

    @contextlib.contextmanager
    def fetch(self, client, image: glance.Image) -> Iterator[CachedFile]:
        """Lease the data of an image; download them if they are not cached.

        The record of the image is the permission to use cached data: it was
        just read from Glance with the user's own token. One of several
        concurrent callers downloads, the others wait.

        :param client: a glanceclient for the user, see glance.
        :param image: as found by glance.find.
        :raises BitstreamError: see glance.download.
        :raises GlanceUnavailable: see glance.download.
        :raises ConfigurationError: the directory cannot be written.
        """
        while True:
            with self._writing():
                file = self._open(image.content)
            if file:
                break
            self._download(client, image)
        with self._leased(file, image.content) as cached:
            with self._writing():
                self._link(image)
            yield cached

    @contextlib.contextmanager
    def by_image(self, image_id: str) -> Iterator[CachedFile]:
        """Lease the content that an image had when this host used it last.

        Needs no token. A host that boots uses it to restore the bitstreams of
        its servers.

        :raises BitstreamError: the content is not in the cache.
        """
        name = _LINK + _checked(image_id)
        file = content = None
        with contextlib.suppress(OSError):
            content = os.readlink(self._path(name))
            file = self._open(content)
        if file is None:
            raise exception.BitstreamError(
                f'Image {image_id} was looked up in the bitstream cache '
                f'{self.directory} and was not found: repeat the operation as '
                f'the user of the server, to fetch the image from Glance.')
        with self._leased(file, content) as cached:
            yield cached

    @contextlib.contextmanager
    def _leased(self, file, content):
        try:
            with file:
                with self._writing():
                    os.utime(file.fileno())
                yield CachedFile(self._path(content), content)
        finally:
            # a file that cannot be removed must not fail the caller
            with contextlib.suppress(OSError):
                self._trim()

    def _path(self, name) -> str:
        return os.path.join(self.directory, name)

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except OSError as e:
            raise exception.ConfigurationError(
                f'[accel] bitstream_cache = {self.directory} cannot be '
                f'written ({e.strerror}): correct its permissions, or free '
                f'space on its file system.') from e

    # Files and locks

    def _lock(self, name, mode, flag) -> typing.BinaryIO | None:
        """Open and lock a file; None if it is missing or locked."""
        path = self._path(name)
        try:
            file = open(path, mode, opener=_private)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, flag | fcntl.LOCK_NB)
            # another process may remove or rename it before we have the lock
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _open(self, content) -> typing.BinaryIO | None:
        """Open the complete file under a shared lock; None if missing."""
        while True:
            file = self._lock(content, 'rb', fcntl.LOCK_SH)
            if file or not os.path.exists(self._path(content)):
                return file
            # another process is removing it
            time.sleep(_POLL)

    def _unlink(self, name) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def _remove(self, name) -> bool:
        """Remove a file unless it is in use; return whether it is removed."""
        file = self._lock(name, 'rb', fcntl.LOCK_EX)
        if file:
            with file:
                self._unlink(name)
        return bool(file)

    def _link(self, image) -> None:
        name = _LINK + _checked(image.id)
        with contextlib.suppress(OSError):
            if os.readlink(self._path(name)) == image.content:
                return
        self._unlink(name)
        with contextlib.suppress(FileExistsError):
            os.symlink(image.content, self._path(name))

    # Filling and emptying

    def _download(self, client, image) -> None:
        """Download the file, or wait a moment if another thread does."""
        name = image.content + _PART
        with self._writing():
            file = self._lock(name, 'ab', fcntl.LOCK_EX)
        if file is None:
            time.sleep(_POLL)
            return
        with file:
            if os.path.exists(self._path(image.content)):
                self._unlink(name)
                return
            try:
                with self._writing():
                    file.truncate(0)
                    self._trim(room=image.size or 0)
                    glance.download(client, image, file)
                    file.flush()
                    _fsync(file.fileno())
                    os.rename(self._path(name), self._path(image.content))
                    self._sync()
            except BaseException:
                self._unlink(name)
                raise

    def _sync(self) -> None:
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            _fsync(directory)
        finally:
            os.close(directory)

    def _trim(self, room: int = 0) -> None:
        """Remove the least recently used files down to the size limit.

        Leased files stay, even above the limit.

        :param room: bytes that will be added next.
        """
        limit = CONF.accel.bitstream_cache_size << 20
        files = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.is_symlink() or entry.name.endswith(_PART):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    files.append((stat.st_mtime_ns, stat.st_size, entry.name))
        excess = sum(size for _, size, _ in files) + room - limit
        for _, size, name in sorted(files):
            if excess <= 0:
                break
            if self._remove(name):
                excess -= size


def _private(path, flags):
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _checked(image_id) -> str:
    """Return an image id in the form that file names use."""
    try:
        return model.uuid_hex(image_id)
    except ValueError:
        raise exception.BitstreamError(
            f'{image_id!r} is not the id of a Glance image: give a '
            f'UUID.') from None
