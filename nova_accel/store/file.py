# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A SQLite file: its version, its transactions, and its errors as sentences.

SQLite provides the two required features: a unique constraint (one handle, one
server) and transactions that survive kill -9. One connection stays open for
all threads, because SQLite reads the schema when it opens a connection, and
waits for the disk once more when it closes the last connection.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import fcntl
import json
import os
import sqlite3
import time

from nova_accel import exception
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import rows
from nova_accel.store import schema
from nova_accel.store import values

LOG = logging.getLogger(__name__)

#: path of a store that lives in memory, without a file
MEMORY = ':memory:'
_MOVED_AWAY = ('nova-compute asks libvirt and Placement which server has '
               'which device, and cleans or fences all others')
ADVICE = {
    sqlite3.SQLITE_FULL: 'make room on its file system',
    sqlite3.SQLITE_BUSY: 'see which other process has it open',
    sqlite3.SQLITE_CORRUPT: (
        'repair it, or restore a backup from after the last change; if it is '
        f'moved away, {_MOVED_AWAY}'),
}
ADVICE[sqlite3.SQLITE_NOTADB] = ADVICE[sqlite3.SQLITE_CORRUPT]
_OTHER_ADVICE = ('see that nova-compute may write it and that its disk has no '
                 'errors')
#: seconds that SQLite waits for another process, and until the next try
_BUSY_SECONDS, _BUSY_PAUSE = 0.02, 0.02

#: path of a store -> its lock, as long as this process lives: threads that
#: clean and program devices write the store after nova-compute was asked to
#: stop. A record lock goes with its process, also after SIGKILL, and children
#: do not inherit it (fcntl(2)); closing any descriptor of the file would end it
_LOCKS: dict[str, int] = {}


@dataclasses.dataclass(frozen=True)
class Memory:
    """The frequently read rows of the file, kept in memory."""

    #: in the order of claims.Claims.claims(), including waiting ones
    claims: tuple[model.Claim, ...] = ()
    #: by device address and region index
    loaded: Mapping[tuple[str, int], model.Loaded] = dataclasses.field(
        default_factory=dict)
    #: address -> the facts by which its card is identified
    keys: Mapping[str, model.CardKey] = dataclasses.field(
        default_factory=dict)
    #: cards that are at no address now
    away: tuple[values.Card, ...] = ()
    unsettled: frozenset[values.Unsettled] = frozenset()
    unclean: frozenset[values.Unclean] = frozenset()
    #: by address
    disabled: tuple[values.Disabled, ...] = ()
    #: by address, of devices whose planned time has not come
    planned: tuple[values.Disabled, ...] = ()
    #: the oldest first
    orders: tuple[values.Order, ...] = ()
    lineage: values.Lineage = values.Lineage()


class File:
    """A file with transactions, and with frequently read rows in memory.

    The subclasses define what the tables mean and how they change.
    """

    def __init__(self, path: str, source: sqlite3.Connection | None = None,
                 timeout: float = 10, name: str = ''):
        """Open the store. Create it, or migrate it to the version of this
        release, if necessary.

        :param path: path of the file. A missing directory is created.
        :param source: an open store to copy into this file first.
        :param timeout: seconds to wait for another process that writes.
        :param name: name of the file in errors, if it differs from path.
        """
        self.path = path
        self._name = name or path
        # one thread at a time inside SQLite: under eventlet a second green
        # thread that waited there would stop the first one too
        self._lock = locks.Lock(
            'store', f'The rows of the claim store {self._name}',
            lambda: timeout, exception.AcceleratorsUnavailable)
        self._timeout = timeout
        self._generation = 0
        #: PRAGMA data_version when refresh() last read the file
        self._data_version: int | None = None
        self._known = Memory()
        #: _known after the present transaction; None if that changes nothing
        self._changed: Memory | None = None
        with self._one_sentence():
            # MEMORY has no directory
            if os.path.dirname(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _make_private(path)
            # a short timeout, because _wait_for() lets other green threads run
            self._db = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None,
                check_same_thread=False)
        #: device and inode of the file; None for MEMORY
        self._inode = _inode(path)
        try:
            if source:
                source.backup(self._db)
            self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self):
        self._db.row_factory = sqlite3.Row
        with self._one_sentence():
            self._wait_for(self._set_up)
        self._migrate()
        with self._transaction(write=False) as db:
            self._changed = self._read(db)

    def _set_up(self):
        # before anything is written
        check_version(self._db, self._name)
        self._db.execute('PRAGMA journal_mode = WAL')
        # a commit is on the disk when it returns
        self._db.execute('PRAGMA synchronous = FULL')

    def _read(self, db: sqlite3.Connection) -> Memory:
        raise NotImplementedError

    def _migrate(self) -> None:
        with self._transaction() as db:
            version = check_version(db, self._name)
            is_new = schema.is_new(db)
            if not is_new and version == schema.VERSION:
                return
            if not is_new and self.path != MEMORY:
                LOG.info('The claim store %s has version %d and gets version '
                         '%d', self.path, version, schema.VERSION)
            with self._reading(f'of version {version}'):
                schema.migrate(db, version)
            if is_new and self.path != MEMORY:
                # the host may have had another file before
                rows.unsettle(db, values.EVERYTHING)

    @contextlib.contextmanager
    def _transaction(self, write=True) -> Iterator[sqlite3.Connection]:
        with self._lock, self._one_sentence():
            if write:
                self._begin()
            try:
                yield self._db
                if write:
                    self._check_in_place()
                    self._db.execute('COMMIT')
                if self._changed is not None:
                    self._known = self._changed
                    self._generation += 1
            except BaseException:
                # after some errors SQLite has rolled back already
                if self._db.in_transaction:
                    self._db.execute('ROLLBACK')
                raise
            finally:
                self._changed = None

    def _check_in_place(self) -> None:
        """Check that the path still names the open file.

        Rows that are written into a removed or replaced file are lost when
        this process ends.
        """
        now = _inode(self.path)
        if now != self._inode:
            found = ('which is another one than this process opened' if now
                     else 'and it was removed since this process opened it')
            raise exception.AcceleratorsUnavailable(
                f'The claim store must be the file {self._name}, {found}: '
                f'start nova-compute again, which compares it with Placement '
                f'and the guests.',
                found='The claim store of this host is not in its place')

    def _begin(self):
        self._wait_for(self._db.execute, 'BEGIN IMMEDIATE')

    def _wait_for(self, call, *args):
        """Call a function, and repeat the call while another process has the
        store locked. Do not wait inside SQLite, which would stop every green
        thread."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                call(*args)
                return
            except sqlite3.OperationalError as error:
                if (error.sqlite_errorcode & 0xff != sqlite3.SQLITE_BUSY
                        or time.monotonic() > end):
                    raise
            time.sleep(_BUSY_PAUSE)

    def _change(self, **fields):
        """Set fields of Memory when the present transaction is committed."""
        self._changed = dataclasses.replace(
            self._changed or self._known, **fields)

    @contextlib.contextmanager
    def _one_sentence(self):
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            # the lowest byte of an extended code is the plain code
            code = getattr(error, 'sqlite_errorcode', -1) & 0xff
            raise exception.AcceleratorsUnavailable(
                f'The claim store {self._name} cannot be used ({error}): '
                f'{ADVICE.get(code, _OTHER_ADVICE)}.',
                found='The claim store of this host cannot be used'
                ) from error

    @contextlib.contextmanager
    def _reading(self, where):
        """Convert errors of reading a row to AcceleratorsUnavailable. The row
        is damaged, or has fields that this release does not know."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise exception.AcceleratorsUnavailable(
                f'The claim store {self._name} has a row {where} that '
                f'cannot be read ({error}): '
                f'{ADVICE[sqlite3.SQLITE_CORRUPT]}.') from error

    @property
    def generation(self) -> int:
        """Return a number that changes with each change of the rows in memory.
        Do not compare the numbers of two objects."""
        return self._generation


def use_alone(path: str) -> None:
    """Prevent other nova-compute processes from using a claim store.

    Each process decides by the rows in its own memory. Hence two processes
    could give one device to two servers.

    :param path: path of the store.
    :raises AcceleratorsUnavailable: another process uses the store.
    """
    path = os.path.abspath(path)
    if path in _LOCKS:
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(f'{path}.lock', os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        # then the store cannot be written either, and its error reports it
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        other = os.pread(file, 20, 0).decode(errors='replace').strip()
        os.close(file)
        raise exception.AcceleratorsUnavailable(
            f'The claim store {path} is used by another nova-compute on this '
            f'host (process {other or "unknown"}): stop that one, or give '
            f'this one a state_path and a host of its own in nova.conf.'
        ) from None
    except OSError:
        # a file system without locks
        os.close(file)
        return
    _LOCKS[path] = file
    # for the error of another process; on a full file system it is omitted
    with contextlib.suppress(OSError):
        os.truncate(file, 0)
        os.write(file, b'%d\n' % os.getpid())


def check_version(db: sqlite3.Connection, name: str) -> int:
    """Return the version of a store.

    :param name: the name of the file in errors.
    :raises AcceleratorsUnavailable: this release can neither read nor migrate
        the store.
    """
    version = db.execute('PRAGMA user_version').fetchone()[0]
    if version > schema.VERSION:
        raise exception.AcceleratorsUnavailable(
            f'The claim store {name} has version {version}, and this release '
            f'of nova_accel knows no later one than {schema.VERSION}: install '
            f'the release that wrote it, or restore the backup from before '
            f'the upgrade.')
    if (version < schema.VERSION and version not in schema.MIGRATIONS
            and not schema.is_new(db)):
        raise exception.AcceleratorsUnavailable(
            f'The claim store {name} has version {version}, which a commit '
            f'before the first release wrote, and no release can read it: '
            f'move it away, and {_MOVED_AWAY}.')
    return version


def _make_private(path):
    """Let only the owner of a store read and write it, because it names
    projects and servers. SQLite gives the same mode to its files beside the
    store (unixOpen() of SQLite)."""
    # only a new file: closing a descriptor ends this process' locks of a file
    # (fcntl(2)), including those of SQLite, and other processes would remove
    # its WAL
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL
                         | os.O_CLOEXEC, 0o600))
    # a store of another user, for example if an operator's command opens it,
    # stays
    with contextlib.suppress(PermissionError):
        for file in (path, f'{path}-wal', f'{path}-shm'):
            with contextlib.suppress(FileNotFoundError):
                os.chmod(file, 0o600)


def _inode(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None for MEMORY or a missing
    file."""
    if path == MEMORY:
        return None
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def as_json(value) -> str:
    return json.dumps(dataclasses.asdict(value),
                      default=lambda enum: enum.value)
