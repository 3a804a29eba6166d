# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A cache of bitstreams on the local disk, by the hash of their content.

Several nova-computes of one machine may share the directory:

``<algorithm>-<digest>``
    the data of an image, complete and verified. Its modification time is the
    time of the last use.
``<random>.part``
    a download in progress. If it is older than any download may take, its
    process was killed.
``image-<uuid>``
    a symbolic link to the last known content of a Glance image.

The operator may remove these files, or the directory, while nova-compute runs:
missing data is downloaded again.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import hashlib
import os
import tempfile
import time

from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)

_PART = '.part'
#: seconds beyond the limit of a download until its file counts as abandoned
_SPARE = 600
_LINK = 'image-'
#: maximum number of files: each use examines all of them, and a project can
#: create any number of small ones
_MOST = 1000
#: blocks for long if much data was written
_fsync = limited.blocking(os.fsync)


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """A file of the cache, which is not removed while it is leased."""

    path: str
    #: '<algorithm>-<hex digest>' of the data, also the name of the file
    content: str


class BitstreamCache:
    """The cache directory, as this process uses it."""

    def __init__(self, directory: str, needed: Callable[[], Iterable[str]]
                 = lambda: ()):
        """Remove files above the limits, and files of killed processes.

        :param directory: [accel] bitstream_cache of nova-compute; created if
            missing.
        :param needed: returns the ids of images that servers of this host use.
            The contents of these images are kept, even if they are the least
            recently used.
        :raises ConfigurationError: the directory cannot be written.
        """
        self.directory = directory
        self._needed = needed
        #: guards _under_way
        self._room = locks.condition('room')
        #: content that is being downloaded -> its size in bytes
        self._under_way: dict[str, int] = {}
        #: protects _leases: leased files are not removed
        self._lock = locks.Lock('cache')
        #: content -> number of callers that use it
        self._leases: collections.Counter[str] = collections.Counter()
        self._downloads = locks.Locks(
            'download', 'The data of a bitstream',
            lambda: glance.download_seconds())
        with self._writing():
            self._trim()

    @contextlib.contextmanager
    def fetch(self, client, image: glance.Image) -> Iterator[CachedFile]:
        """Lease the data of an image. Download them if they are not cached.

        The caller has just read the entry of the image from Glance with the
        user's token, so the user may read cached data, too. If several callers
        fetch the same data, one downloads them and the others wait.

        :param client: a glanceclient for the user, see glance.
        :param image: an image that glance.find() returned.
        :raises BitstreamError: see glance.download().
        :raises GlanceUnavailable: see glance.download().
        :raises LockTimeout: another caller's download of the same data took
            longer than a download may take.
        :raises ConfigurationError: the directory cannot be written.
        """
        with self._leased(image.content) as file:
            with self._downloads.held(image.content):
                if not self._is_whole(image.content):
                    self._download(client, image)
            with self._writing():
                self._link(image)
                os.utime(file.path)
            yield file

    @contextlib.contextmanager
    def by_image(self, image_id: str, content: str) -> Iterator[CachedFile]:
        """Lease the content with which a region was programmed.

        Needs no token, because it restores the bitstreams of servers after a
        boot of the host.

        :param image_id: only for errors: any project can reuse the id of a
            purged image (OSSN-0075).
        :param content: the recorded content. If it is '', nothing is found.
        :raises BitstreamError: the content is not in the cache.
        """
        with self._leased(content) as file:
            try:
                if not content or not self._is_whole(content):
                    raise FileNotFoundError(file.path)
                os.utime(file.path)
            except OSError:
                raise exception.BitstreamError(
                    f'Image {image_id} was looked up in the bitstream cache '
                    f'{self.directory} and was not found: repeat the '
                    f'operation as the user of the server, to fetch the image '
                    f'from Glance.') from None
            yield file

    @contextlib.contextmanager
    def _leased(self, content):
        with self._lock:
            self._leases[content] += 1
        try:
            yield CachedFile(self._path(content), content)
        finally:
            with self._lock:
                self._leases[content] -= 1
                if not self._leases[content]:
                    del self._leases[content]
            # the caller must not fail because a file cannot be removed
            with contextlib.suppress(OSError):
                self._trim()

    def _is_whole(self, content) -> bool:
        """Return whether a file exists and its data match its name. Remove a
        file that was changed after its download."""
        try:
            if _digest(self._path(content), content.partition('-')[0]
                       ) == content.partition('-')[2]:
                return True
        except (OSError, ValueError):
            return False
        LOG.warning('%s of the bitstream cache has changed since it was '
                    'downloaded, and is removed', content)
        self._unlink(content)
        return False

    def _path(self, name) -> str:
        return os.path.join(self.directory, name)

    def _names(self) -> list[str]:
        """Return the names in the directory; create it if it is missing."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        return os.listdir(self.directory)

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except OSError as e:
            raise exception.ConfigurationError(
                f'[accel] bitstream_cache = {self.directory} cannot be '
                f'written ({e.strerror}): correct its permissions, or free '
                f'space on its file system.',
                found='The host cannot store the bitstream') from e

    def _unlink(self, name) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def _link(self, image) -> None:
        name = _LINK + _checked(image.id)
        with self._lock:
            self._unlink(name)
            os.symlink(image.content, self._path(name))

    def _download(self, client, image) -> None:
        try:
            with self._writing():
                self._make_room(image)
                # another nova-compute may download the same content, too
                number, path = tempfile.mkstemp(
                    _PART, f'{image.content}.', self.directory)
                try:
                    with open(number, 'wb') as file:
                        glance.download(client, image, file)
                        file.flush()
                        _fsync(file.fileno())
                    os.rename(path, self._path(image.content))
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                    raise
                self._sync()
        finally:
            with self._room:
                self._under_way.pop(image.content, None)
                self._room.notify_all()

    @limited.blocking
    def bytes(self) -> int:
        """Return the size of all files in the directory, or 0 if it is
        missing."""
        with contextlib.suppress(OSError), os.scandir(self.directory) as found:
            return sum(entry.stat(follow_symlinks=False).st_size
                       for entry in found)
        return 0

    def _make_room(self, image) -> None:
        """Reserve room for a download. Wait while other downloads leave no
        room."""
        limit = CONF.accel.bitstream_cache_size << 20
        size = image.size or 0

        def fits():
            others = sum(self._under_way.values())
            # a single download may exceed the limit
            return not others or others + size <= limit
        with self._room:
            if not self._room.wait_for(fits, glance.download_seconds()):
                raise exception.LockTimeout(
                    f'Image {image.id} cannot be downloaded, because the '
                    f'downloads under way leave it no room in [accel] '
                    f'bitstream_cache_size: try again, or raise that.')
            self._under_way[image.content] = size
        self._trim()

    def _sync(self) -> None:
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            _fsync(directory)
        finally:
            os.close(directory)

    def _trim(self) -> None:
        """Remove the least recently used files until the number of files and
        their size, with downloads in progress, are within the limits. Remove
        dangling links and downloads of killed processes, too.

        Leased files, and files that servers need, stay even above the limits.
        """
        limit = CONF.accel.bitstream_cache_size << 20
        # a download updates the time of its file with each chunk
        abandoned = glance.download_seconds() + _SPARE
        kept = set()
        for image_id in self._needed():
            with contextlib.suppress(OSError, exception.BitstreamError):
                kept.add(os.readlink(self._path(_LINK + _checked(image_id))))
        with self._lock:
            files, links = [], []
            for name in self._names():
                if name.startswith(_LINK):
                    links.append(name)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(self._path(name))
                    if not name.endswith(_PART):
                        files.append((stat.st_mtime_ns, stat.st_size, name))
                    elif (time.time() - stat.st_mtime > abandoned
                          # the clock of the host may have been changed
                          and name.partition('.')[0] not in self._under_way):
                        self._unlink(name)
            excess = sum(size for _, size, _ in files) + sum(
                {**self._under_way}.values()) - limit
            surplus = len(files) - _MOST
            for _, size, name in sorted(files):
                if ((excess > 0 or surplus > 0) and name not in self._leases
                        and name not in kept):
                    self._unlink(name)
                    excess -= size
                    surplus -= 1
            for name in links:
                if not os.path.exists(self._path(name)):
                    self._unlink(name)


@limited.blocking
def _digest(path: str, algorithm: str) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _checked(image_id) -> str:
    """Return an image id in the form that file names use."""
    try:
        return model.uuid_hex(image_id)
    except ValueError:
        raise exception.BitstreamError(
            f'{image_id!r} is not the id of a Glance image: give a '
            f'UUID.') from None
