# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstreams on the local disk, by the hash of their content.

Several nova-computes of one machine may share the directory:

``<algorithm>-<digest>``
    the data of an image, complete and verified. Its modification time is the
    time of the last use.
``<random>.part``
    a download that has not ended. One that is older than a download may take
    is of a process that was killed.
``image-<uuid>``
    a symbolic link to the content that a Glance image had last.

The operator may remove any of it, or the directory, while nova-compute runs:
what is needed again is downloaded again.
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
#: seconds that a download may be over before its file counts as abandoned
_SPARE = 600
_LINK = 'image-'
#: files that are kept: each use examines all of them, and a project can make
#: any number of small ones
_MOST = 1000
#: of much data takes long
_fsync = limited.blocking(os.fsync)


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """A file that is not removed while it is leased."""

    path: str
    #: '<algorithm>-<hex digest>', which is also its name
    content: str


class BitstreamCache:
    """The directory of bitstreams of this process."""

    def __init__(self, directory: str, needed: Callable[[], Iterable[str]]
                 = lambda: ()):
        """Remove surplus files, and those of killed processes.

        :param directory: [accel] bitstream_cache of nova-compute; created if
            missing.
        :param needed: returns ids of the images that servers of this host
            have: their contents stay, whatever is used later.
        :raises ConfigurationError: the directory cannot be written.
        """
        self.directory = directory
        self._needed = needed
        #: guards the next field
        self._room = locks.condition('room')
        #: content that is being downloaded -> bytes that it will have
        self._under_way: dict[str, int] = {}
        #: protects the leases: no file is removed that has one
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
        """Lease the data of an image; download them if they are not cached.

        The entry of the image is the permission to use cached data: it was
        just read from Glance with the user's own token. One of several
        concurrent callers downloads, the others wait.

        :param client: a glanceclient for the user, see glance.
        :param image: as found by glance.find.
        :raises BitstreamError: see glance.download.
        :raises GlanceUnavailable: see glance.download.
        :raises LockTimeout: another caller downloads the same data, and has
            not ended in the time that one download may take.
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

        Needs no token. A host that boots uses it to restore the bitstreams of
        its servers.

        :param image_id: for errors alone: any project can choose the id of a
            purged image for another one (OSSN-0075).
        :param content: as it was recorded, '' where it was not: then nothing
            is found.
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
            # a file that cannot be removed must not fail the caller
            with contextlib.suppress(OSError):
                self._trim()

    def _is_whole(self, content) -> bool:
        """Return whether a file exists and has the content of its name. Remove
        a file that has changed since its download."""
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
                # another nova-compute may download the same content
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
        """The size of all files in the directory, 0 if it is missing."""
        with contextlib.suppress(OSError), os.scandir(self.directory) as found:
            return sum(entry.stat(follow_symlinks=False).st_size
                       for entry in found)
        return 0

    def _make_room(self, image) -> None:
        """Count a download from its beginning on; wait while those that are
        under way leave it no room."""
        limit = CONF.accel.bitstream_cache_size << 20
        size = image.size or 0

        def fits():
            others = sum(self._under_way.values())
            # a single one may be larger than the limit
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
        """Remove the least recently used files down to the size limit, with
        the downloads under way, and to _MOST; links that lead nowhere; and
        downloads of killed processes.

        Leased files, and those that servers need, stay, even above the limits.
        """
        limit = CONF.accel.bitstream_cache_size << 20
        # each chunk that arrives sets the time of the file
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
                          # the clock may have been set
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
