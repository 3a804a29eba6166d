# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The persistent store of a compute host: claims, and what devices were.

nova-compute writes it. So do the operator's commands, in tables of their own,
of which nova-compute hears by look().

SQLite, because it gives the two things that are needed: a unique constraint
(one handle, one server) and transactions that survive kill -9. One connection
stays open for all threads: opening a new one makes SQLite read its schema, and
closing the last one makes it wait for the disk once more than a commit does.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import datetime
import errno
import json
import os
import sqlite3
import time
from typing import Any
from urllib import parse

from oslo_log import log as logging

from nova_accel.attach import schema
from nova_accel import exception
from nova_accel import locks
from nova_accel import model

LOG = logging.getLogger(__name__)

_LOADED_COLUMNS = ('device_address', 'region_index', 'function_uuid',
                   'bitstream_id', 'function_name', 'content', 'origin')
#: path of a store that lives in memory, without a file
MEMORY = ':memory:'
#: seconds after which an order that nova-compute has not begun is void
ORDER_SECONDS = 30
#: how many hand-overs of a device are kept
MOST_HANDOVERS = 1000
#: days in which no more than MOST_IN_THAT_TIME of a device go
DAYS_OF_HANDOVERS = 90
#: some hundred bytes each; a device that is taken and released each ten seconds
#: has as many in a week
MOST_IN_THAT_TIME = 60_000
_HANDOVER_COLUMNS = tuple(f.name for f in dataclasses.fields(model.Handover))
#: columns that are named as the fields of model.Claim are, or here
_RENAMED = {'group': 'request_group'}
_FIELDS = tuple(f.name for f in dataclasses.fields(model.Claim)
                if f.name != 'handle')
_HANDLE_COLUMNS = ('handle_type', 'handle_address', 'handle')
_CLAIM_COLUMNS = tuple(_RENAMED.get(f, f) for f in _FIELDS) + _HANDLE_COLUMNS
_SELECT = f'SELECT {", ".join(_CLAIM_COLUMNS)} FROM claims'
_INSERT = (f'INSERT INTO claims ({", ".join(_CLAIM_COLUMNS)}) '
           f'VALUES ({", ".join(f":{name}" for name in _CLAIM_COLUMNS)})')

_ADVICE = {
    sqlite3.SQLITE_FULL: 'make room on its file system',
    sqlite3.SQLITE_BUSY: 'see which other process has it open',
    sqlite3.SQLITE_CORRUPT: (
        'repair it, or restore a backup from after the last change; if it is '
        'moved away, nova-compute asks libvirt and Placement which server has '
        'which device, and cleans or fences all others'),
}
_ADVICE[sqlite3.SQLITE_NOTADB] = _ADVICE[sqlite3.SQLITE_CORRUPT]
_OTHER_ADVICE = ('see that nova-compute may write it and that its disk has no '
                 'errors')
#: milliseconds that SQLite waits for another process; seconds until it is
#: asked again
_BUSY_MS, _BUSY_PAUSE = 20, 0.02


def file_name(host: str) -> str:
    """Return the name of the store of a compute host."""
    return f'accel_claims_{host}.sqlite'


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is read so often that the memory has it, as it is in the file."""

    #: in the order of ClaimStore.claims()
    claims: tuple[model.Claim, ...] = ()
    #: the handles that wait for the operator, the oldest first
    waiting: tuple[model.Waiting, ...] = ()
    unsettled: frozenset[model.Unsettled] = frozenset()
    unclean: frozenset[model.Unclean] = frozenset()
    #: by address
    disabled: tuple[model.Disabled, ...] = ()
    #: the oldest first
    orders: tuple[model.Order, ...] = ()


class ClaimStore:
    """Each method is one transaction; all may be called from any thread.

    Each may raise AcceleratorsUnavailable, in one sentence with the name of
    the file: disk full, file locked, damaged or of a newer release.
    """

    def __init__(self, path: str, source: sqlite3.Connection | None = None,
                 timeout: float = 10, name: str = ''):
        """Open the store, make it or bring it to this release's version.

        :param path: of the file; its directory is made if need be.
        :param source: of a store that is copied into this one first.
        :param timeout: seconds to wait for another process that writes.
        :param name: of the file in errors, where path is not that of source.
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
        #: PRAGMA data_version when look() last read the file
        self._data_version: int | None = None
        self._known = _Known()
        #: what it will be when the transaction under way ends, if it changes
        #: it
        self._changed: _Known | None = None
        with self._one_sentence():
            # none for MEMORY
            if os.path.dirname(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _make_private(path)
            self._db = sqlite3.connect(
                path, timeout=timeout, isolation_level=None,
                check_same_thread=False)
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
            # before anything is written
            self._check(self._version())
            self._db.execute('PRAGMA journal_mode = WAL')
            # a commit is on the disk when it returns
            self._db.execute('PRAGMA synchronous = FULL')
        while self._migrate() < schema.VERSION:
            pass
        with self._transaction(write=False) as db:
            rows = db.execute(_SELECT).fetchall()
            with self._reading('claims'):
                claims = _in_order(map(_claim, rows))
            rows = db.execute('SELECT * FROM waiting ORDER BY rowid'
                              ).fetchall()
            with self._reading('waiting'):
                waiting = tuple(map(_waiting, rows))
            self._changed = _Known(claims, waiting, frozenset(
                model.Unsettled(row['address'], row['serial'], row['ids'],
                                frozenset(row['but_for'].split()))
                for row in db.execute(
                    'SELECT address, serial, ids, but_for FROM unsettled')),
                frozenset(model.Unclean(**row) for row in db.execute(
                    'SELECT * FROM unclean')),
                _disabled(db), _orders(db))
        # from now on other green threads run meanwhile: _begin()
        self._db.execute(f'PRAGMA busy_timeout = {_BUSY_MS}')

    def _version(self) -> int:
        return self._db.execute('PRAGMA user_version').fetchone()[0]

    def _check(self, version):
        if version > schema.VERSION:
            raise exception.AcceleratorsUnavailable(
                f'The claim store {self._name} has version {version}, and this '
                f'release of nova_accel knows no later one than '
                f'{schema.VERSION}: '
                f'install the release that wrote it, or restore the backup '
                f'from before the upgrade.')

    def _migrate(self) -> int:
        """One step, in one transaction; the version after it."""
        with self._transaction() as db:
            version = self._version()
            self._check(version)
            is_new = schema.is_new(db)
            if not is_new and version == schema.VERSION:
                return version
            if not is_new and self.path != MEMORY:
                LOG.info('The claim store %s has version %d and gets '
                         'version %d', self.path, version, version + 1)
            after = schema.migrate(db, version)
            if is_new and self.path != MEMORY:
                # the host may have had another file
                db.execute('INSERT INTO unsettled (address, serial) '
                           "VALUES ('', '')")
        return after

    @contextlib.contextmanager
    def _transaction(self, write=True) -> Iterator[sqlite3.Connection]:
        with self._lock, self._one_sentence():
            if write:
                self._begin()
            try:
                yield self._db
                if write:
                    self._db.execute('COMMIT')
                if self._changed is not None:
                    self._known = self._changed
                    self._generation += 1
            except BaseException:
                # after some errors SQLite has done so itself
                if self._db.in_transaction:
                    self._db.execute('ROLLBACK')
                raise
            finally:
                self._changed = None

    def _begin(self):
        """Begin to write; wait while another process writes.

        A wait inside of SQLite would stop every green thread.
        """
        end = time.monotonic() + self._timeout
        while True:
            try:
                self._db.execute('BEGIN IMMEDIATE')
                return
            except sqlite3.OperationalError as error:
                if (error.sqlite_errorcode & 0xff != sqlite3.SQLITE_BUSY
                        or time.monotonic() > end):
                    raise
            time.sleep(_BUSY_PAUSE)

    def _change(self, **fields):
        """Have the memory follow, once the transaction is written."""
        self._changed = dataclasses.replace(
            self._changed or self._known, **fields)

    @contextlib.contextmanager
    def _one_sentence(self):
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            # extended codes have the plain one in their lowest byte
            code = getattr(error, 'sqlite_errorcode', -1) & 0xff
            raise exception.AcceleratorsUnavailable(
                f'The claim store {self._name} cannot be used ({error}): '
                f'{_ADVICE.get(code, _OTHER_ADVICE)}.',
                found='The claim store of this host cannot be used'
                ) from error

    @contextlib.contextmanager
    def _reading(self, table):
        """What was written is JSON of fields that this release knows."""
        try:
            yield
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise exception.AcceleratorsUnavailable(
                f'The claim store {self._name} has a row in its table {table} '
                f'that cannot be read ({error}): '
                f'{_ADVICE[sqlite3.SQLITE_CORRUPT]}.') from error

    # Claims

    @property
    def generation(self) -> int:
        """Another number after each change of claims, of what waits for the
        operator, of what he disabled, or of what is not settled; begins with
        each object."""
        return self._generation

    def add(self, claims: Iterable[model.Claim]) -> None:
        """Write all of them or none.

        :raises ClaimConflict: when a handle is held already.
        :raises DeviceUnavailable: the operator has disabled a device, maybe
            just now: once a command has said so, no claim follows.
        """
        claims = tuple(claims)
        with self._transaction() as db:
            # from the file: another process writes this table
            disabled = _disabled(db)
            for claim in claims:
                if any(word.means(claim.device_address, claim.serial)
                       for word in disabled):
                    raise exception.DeviceUnavailable(
                        f'Server {claim.instance_uuid} was to get '
                        f'{claim.handle.address}, which the operator has '
                        f'disabled: the build is retried on another host.')
            self._add(db, claims)

    def _add(self, db, claims):
        since = datetime.datetime.now(datetime.UTC).isoformat(
            timespec='seconds')
        claims = [dataclasses.replace(claim, since=claim.since or since)
                  for claim in claims]
        for claim in claims:
            row = _row(claim)
            try:
                db.execute(_INSERT, row)
            except sqlite3.IntegrityError:
                holder = db.execute(
                    'SELECT instance_uuid FROM claims WHERE '
                    'handle_type = :handle_type AND '
                    'handle_address = :handle_address', row).fetchone()
                if holder is None:
                    raise
                # the owner of the one is not told who the other is
                LOG.warning('Server %s was to get %s, which server %s '
                            'holds', claim.instance_uuid,
                            claim.handle.address, holder[0])
                raise exception.ClaimConflict(
                    f'Server {claim.instance_uuid} was to get '
                    f'{claim.handle.address}, which another server '
                    f'holds: the build has to go elsewhere.') from None
        self._change(claims=_in_order((*self._known.claims, *claims)))

    def claims(self, instance_uuid: str | None = None,
               role: model.Role | None = None) -> list[model.Claim]:
        """Those of one server, or all; in the order of groups and handles.

        From memory: this process alone writes them.
        """
        return [claim for claim in self._known.claims
                if instance_uuid in (None, claim.instance_uuid)
                and role in (None, claim.role)]

    def by_uuid(self, uuids: Collection[str]) -> list[model.Claim]:
        """Those of these claims that are there, in the order of claims()."""
        return [c for c in self.claims() if c.uuid in uuids]

    def update(self, claims: Iterable[model.Claim], **changes: Any,
               ) -> list[model.Claim]:
        """Change fields of claims, by their uuid.

        :param changes: fields of model.Claim, but neither uuid nor handle.
        :returns: the claims as they are then, in the order given, without
            those that were removed meanwhile.
        :raises TypeError: for another field.
        """
        unknown = set(changes) - set(_FIELDS) | {'uuid'} & set(changes)
        if unknown:
            raise TypeError(f'Claims have no {", ".join(sorted(unknown))} '
                            f'that can be changed')
        columns = ', '.join(f'{_RENAMED.get(name, name)} = :{name}'
                            for name in changes)
        values = {name: getattr(value, 'value', value)
                  for name, value in changes.items()}
        uuids = [claim.uuid for claim in claims]
        if not uuids:
            # a server that holds nothing does not depend on this file
            return []
        with self._transaction() as db:
            if changes:
                db.executemany(
                    f'UPDATE claims SET {columns} WHERE uuid = :uuid',
                    [{**values, 'uuid': uuid} for uuid in uuids])
            now = {claim.uuid: claim for claim in self._known.claims}
            for uuid in now.keys() & set(uuids):
                now[uuid] = dataclasses.replace(now[uuid], **changes)
            self._change(claims=_in_order(now.values()))
        return [now[uuid] for uuid in uuids if uuid in now]

    def remove(self, claims: Iterable[model.Claim]) -> None:
        """Give their handles free."""
        uuids = {claim.uuid for claim in claims}
        if not uuids:
            return
        with self._transaction() as db:
            db.executemany('DELETE FROM claims WHERE uuid = ?',
                           [(uuid,) for uuid in uuids])
            self._change(claims=tuple(
                c for c in self._known.claims if c.uuid not in uuids))

    # Devices as they were last seen, for those that a guest has now

    def devices(self) -> dict[str, model.Device]:
        """By address."""
        with self._transaction(write=False) as db:
            rows = db.execute('SELECT address, device FROM devices').fetchall()
        with self._reading('devices'):
            return {address: model.Device.from_dict(
                        {**json.loads(text), 'address': address})
                    for address, text in rows}

    def set_devices(self, devices: Mapping[str, model.Device]) -> None:
        """These and no others."""
        with self._transaction() as db:
            db.execute('DELETE FROM devices')
            db.executemany(
                'INSERT INTO devices (address, device) VALUES (?, ?)',
                [(address, _json(device))
                 for address, device in devices.items()])

    # Records of cards that gave way to others, by serial number

    def records(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """As Device.record."""
        with self._transaction(write=False) as db:
            rows = db.execute('SELECT serial, record FROM records').fetchall()
        with self._reading('records'):
            return {serial: tuple((str(name), str(value))
                                  for name, value in json.loads(text))
                    for serial, text in rows}

    def keep_record(self, serial: str,
                    record: Iterable[tuple[str, str]]) -> None:
        """Of a card in whose place another one is."""
        with self._transaction() as db:
            db.execute('INSERT OR REPLACE INTO records (serial, record) '
                       'VALUES (?, ?)', (serial, json.dumps(list(record))))

    # What was programmed

    def loaded(self) -> dict[tuple[str, int], model.Loaded]:
        """By device address and region index.

        A region that is not in it carries what its driver reads, which is the
        operator's.
        """
        with self._transaction(write=False) as db:
            rows = db.execute(f'SELECT {", ".join(_LOADED_COLUMNS)} '
                              f'FROM loaded').fetchall()
        return {(row['device_address'], row['region_index']): _loaded(row)
                for row in rows}

    def set_loaded(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        names = ', '.join(f':{name}' for name in _LOADED_COLUMNS)
        with self._transaction() as db:
            db.execute(
                f'INSERT OR REPLACE INTO loaded '
                f'({", ".join(_LOADED_COLUMNS)}) VALUES ({names})',
                {**dataclasses.asdict(loaded),
                 'device_address': address, 'region_index': index})

    def drop_loaded(self, address: str, index: int) -> None:
        """The region carries what its driver reads, the operator's."""
        with self._transaction() as db:
            db.execute('DELETE FROM loaded WHERE device_address = ? '
                       'AND region_index = ?', (address, index))

    def origins(self) -> dict[tuple[str, int], str | None]:
        """Origins of what regions carry that is not the operator's, by serial
        number of the card and region index; as Region.origin."""
        with self._transaction(write=False) as db:
            rows = db.execute('SELECT serial, region_index, origin '
                              'FROM origins').fetchall()
        return {(row['serial'], row['region_index']): row['origin']
                for row in rows}

    def set_origin(self, serial: str, index: int, origin: str | None) -> None:
        """:param origin: model.OPERATOR is what is not in the table."""
        with self._transaction() as db:
            db.execute('DELETE FROM origins WHERE serial = ? '
                       'AND region_index = ?', (serial, index))
            if origin != model.OPERATOR:
                db.execute('INSERT INTO origins (serial, region_index, '
                           'origin) VALUES (?, ?, ?)', (serial, index, origin))

    # What was reserved in Placement before we reserved all of it

    def reserved(self) -> dict[tuple[str, str], int]:
        """{(provider uuid, resource class): what the operator had reserved}
        of the inventories that are fenced."""
        with self._transaction(write=False) as db:
            rows = db.execute('SELECT provider_uuid, resource_class, reserved '
                              'FROM reserved').fetchall()
        return {(row['provider_uuid'], row['resource_class']): row['reserved']
                for row in rows}

    def set_reserved(self, provider_uuid: str, resource_class: str,
                     reserved: int) -> None:
        """:param reserved: the operator's value."""
        with self._transaction() as db:
            db.execute(
                'INSERT OR REPLACE INTO reserved '
                '(provider_uuid, resource_class, reserved) VALUES (?, ?, ?)',
                (provider_uuid, resource_class, reserved))

    def drop_reserved(self, provider_uuid: str, resource_class: str) -> None:
        """The inventory has the operator's value again."""
        with self._transaction() as db:
            db.execute('DELETE FROM reserved WHERE provider_uuid = ? '
                       'AND resource_class = ?',
                       (provider_uuid, resource_class))

    def pools(self) -> dict[str, model.Reserved]:
        """What is reserved of pools, by provider uuid."""
        with self._transaction(write=False) as db:
            rows = db.execute('SELECT provider_uuid, operators, least, most '
                              'FROM pools').fetchall()
        return {row['provider_uuid']: model.Reserved(
                    row['operators'], row['least'], row['most'])
                for row in rows}

    # Handles that wait for the operator

    def waiting(self) -> tuple[model.Waiting, ...]:
        """Those that the operator has to give back, the oldest first; from
        memory."""
        return self._known.waiting

    def change_waiting(self, add: Iterable[model.Waiting] = (),
                       remove: Iterable[model.Waiting] = (),
                       shown: Iterable[model.Waiting] = (),
                       pools: Iterable[tuple[str, model.Reserved | None]]
                       = ()) -> None:
        """
        :param add: that wait from now on; those that do already stay.
        :param remove: that the operator has given back.
        :param shown: that Placement shows as reserved.
        :param pools: (provider uuid, what is reserved of it from now on);
            None: what is reserved is the operator's.
        """
        with self._transaction() as db:
            waiting = {w.handle: w for w in self._known.waiting}
            for new in add:
                waiting.setdefault(new.handle, new)
            for known in shown:
                if known.handle in waiting:
                    waiting[known.handle] = dataclasses.replace(
                        known, shown=True)
            for old in remove:
                waiting.pop(old.handle, None)
            db.execute('DELETE FROM waiting')
            db.executemany(
                'INSERT INTO waiting (handle_type, handle_address, '
                'device_address, region_index, shown, provider_uuid) '
                'VALUES (?, ?, ?, ?, ?, ?)',
                [(w.handle.type.value, w.handle.address, w.device_address,
                  w.region_index, w.shown, w.provider_uuid)
                 for w in waiting.values()])
            for provider_uuid, reserved in pools:
                db.execute('DELETE FROM pools WHERE provider_uuid = ?',
                           (provider_uuid,))
                if reserved is not None:
                    db.execute(
                        'INSERT INTO pools (provider_uuid, operators, least, '
                        'most) VALUES (?, ?, ?, ?)', (
                            provider_uuid, *dataclasses.astuple(reserved)))
            self._change(waiting=tuple(waiting.values()))

    # Devices that may have data of a server, and no claim says so

    def unsettled(self) -> frozenset[model.Unsettled]:
        """From memory."""
        return self._known.unsettled

    def settle(self, done: Iterable[model.Unsettled] = (),
               todo: Iterable[model.Unsettled] = (),
               claims: Iterable[model.Claim] = ()) -> None:
        """
        :param done: not unsettled any more.
        :param todo: unsettled from now on.
        :param claims: what was found; written all or none, with the rest.
        :raises ClaimConflict: one of the handles is held already.
        """
        done, todo, claims = set(done), set(todo), tuple(claims)
        with self._transaction() as db:
            # read here: another thread may have settled something meanwhile
            now = self._known.unsettled - done | todo
            db.execute('DELETE FROM unsettled')
            db.executemany(
                'INSERT INTO unsettled (address, serial, ids, but_for) '
                'VALUES (?, ?, ?, ?)', [
                    (row.address, row.serial, row.ids,
                     ' '.join(sorted(row.but_for))) for row in now])
            if claims:
                self._add(db, claims)
            self._change(unsettled=now)

    # Handles that were released without cleaning

    def unclean(self) -> frozenset[model.Unclean]:
        """From memory."""
        return self._known.unclean

    def change_unclean(self, done: Iterable[model.Unclean],
                       todo: Iterable[model.Unclean]) -> None:
        """
        :param done: handles that are clean, or about which todo says more.
        :param todo: handles that are not.
        """
        done, todo = set(done), set(todo)
        if done == todo:
            return
        with self._transaction() as db:
            now = self._known.unclean - done | todo
            db.execute('DELETE FROM unclean')
            db.executemany(
                'INSERT INTO unclean (handle_address, device_address, serial, '
                'ids, policy) VALUES (?, ?, ?, ?, ?)',
                map(dataclasses.astuple, now))
            self._change(unclean=now)

    # What the operator's commands say

    def look(self) -> bool:
        """Read what commands have written since the last call.

        Where they have not, it is one look at memory that SQLite shares
        between processes (PRAGMA data_version), some microseconds.

        :returns: whether something is new.
        """
        with self._transaction(write=False) as db:
            version = db.execute('PRAGMA data_version').fetchone()[0]
            if version == self._data_version:
                return False
            found = _disabled(db), _orders(db)
            self._data_version = version
            if found == (self._known.disabled, self._known.orders):
                return False
            self._change(disabled=found[0], orders=found[1])
        return True

    def disabled(self) -> tuple[model.Disabled, ...]:
        """Devices that no other server is to get; from memory."""
        return self._known.disabled

    def disable(self, word: model.Disabled,
                instead: Iterable[model.Disabled] = ()) -> None:
        """:param instead: words that it replaces."""
        self._change_disabled(instead, [word])

    def enable(self, words: Iterable[model.Disabled]) -> None:
        """The operator takes these words back."""
        self._change_disabled(words, ())

    def _change_disabled(self, old, new):
        with self._transaction() as db:
            for word in (*old, *new):
                db.execute('DELETE FROM disabled WHERE address = ? '
                           'AND serial = ?',
                           (word.device_address, word.serial))
            db.executemany(
                'INSERT INTO disabled (address, serial, reason, since) '
                'VALUES (?, ?, ?, ?)', map(dataclasses.astuple, new))
            self._change(disabled=_disabled(db))

    def orders(self) -> tuple[model.Order, ...]:
        """What commands ask of nova-compute, the oldest first; from memory."""
        return self._known.orders

    def give_order(self, verb: str, argument: str) -> int:
        """Ask nova-compute for something; returns the number of the order."""
        with self._transaction() as db:
            number = db.execute(
                'INSERT INTO orders (verb, argument, since, state, answer) '
                "VALUES (?, ?, ?, 'new', '') RETURNING number",
                (verb, argument, _now())).fetchone()[0]
            self._change(orders=_orders(db))
        return number

    def begin_order(self, number: int) -> bool:
        """Take an order on; False where it has been withdrawn or is too old:
        the command that gave it has ended."""
        with self._transaction() as db:
            began = any(
                order.number == number and order.state is model.OrderState.NEW
                and _is_recent(order.since) for order in _orders(db))
            if began:
                db.execute("UPDATE orders SET state = 'begun' "
                           "WHERE number = ?", (number,))
            else:
                db.execute('DELETE FROM orders WHERE number = ?', (number,))
            self._change(orders=_orders(db))
        return began

    def answer_order(self, number: int, state: model.OrderState,
                     answer: str) -> None:
        """End an order."""
        with self._transaction() as db:
            db.execute('UPDATE orders SET state = ?, answer = ? '
                       'WHERE number = ?', (state.value, answer, number))
            self._change(orders=_orders(db))

    def withdraw_order(self, number: int, states: Collection[model.OrderState],
                       ) -> model.Order | None:
        """Remove an order from the store where it is in one of these states.

        :returns: the order as it is; None where it has been removed already.
        """
        with self._transaction() as db:
            found = {order.number: order for order in _orders(db)}.get(number)
            if found and found.state in states:
                db.execute('DELETE FROM orders WHERE number = ?', (number,))
            self._change(orders=_orders(db))
        return found

    # The record of hand-overs

    def add_handover(self, handover: model.Handover) -> None:
        """Write one; of its device those go that are older than
        DAYS_OF_HANDOVERS and not among the newest MOST_HANDOVERS.

        One that failed takes the place of the failed one before it of the
        same server and handle: errors that alternate while a release is tried
        again drive no other record out.
        """
        columns = ', '.join(_HANDOVER_COLUMNS)
        names = ', '.join(f':{name}' for name in _HANDOVER_COLUMNS)
        with self._transaction() as db:
            if handover.failed:
                ends = ', '.join('?' * len(model.ENDS))
                db.execute(
                    f'DELETE FROM handovers WHERE number = (SELECT '
                    f'max(number) FROM handovers WHERE handle = ? AND server '
                    f'= ?) AND result NOT IN ({ends})',
                    (handover.handle, handover.server, *model.ENDS))
            db.execute(f'INSERT INTO handovers ({columns}) VALUES ({names})',
                       dataclasses.asdict(handover))
            since = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(
                DAYS_OF_HANDOVERS)).isoformat(timespec='seconds')
            for most, before in ((MOST_HANDOVERS, since),
                                 (MOST_IN_THAT_TIME, '~')):
                # not by number: rows that were replaced left gaps
                db.execute(
                    'DELETE FROM handovers WHERE device = ?1 AND time < ?2 '
                    'AND number <= (SELECT number FROM handovers WHERE '
                    'device = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?3)',
                    (handover.device, before, most))

    def handovers(self) -> list[model.Handover]:
        """All that are kept, the oldest first."""
        with self._transaction(write=False) as db:
            rows = db.execute(f'SELECT {", ".join(_HANDOVER_COLUMNS)} '
                              f'FROM handovers ORDER BY number').fetchall()
        return [model.Handover(**{name: str(row[name])
                                  for name in _HANDOVER_COLUMNS})
                for row in rows]


def copy_of(path: str) -> ClaimStore:
    """A store in memory with what is in a file, which is not changed, and
    which another process may have open.

    The copy is of this release's version, whatever the file is of.

    :raises NoClaimStore: there is none.
    :raises AcceleratorsUnavailable: it cannot be read, or is of a later
        release.
    """
    _check_exists(path)
    try:
        with contextlib.closing(sqlite3.connect(
                f'file:{parse.quote(path)}?mode=ro', uri=True)) as file:
            return ClaimStore(MEMORY, file, name=path)
    except (sqlite3.Error, OSError) as error:
        raise _refused(path, 'read', error) from error


def existing(path: str) -> ClaimStore:
    """The store of a host, for a command that writes into it while nova-compute
    may run.

    It is neither made nor changed in version: nova-compute does that.

    :raises NoClaimStore: there is none.
    :raises AcceleratorsUnavailable: it cannot be written, or is of another
        release.
    """
    _check_exists(path)
    try:
        with contextlib.closing(sqlite3.connect(
                f'file:{parse.quote(path)}?mode=rw', uri=True)) as file:
            version = file.execute('PRAGMA user_version').fetchone()[0]
    except (sqlite3.Error, OSError) as error:
        raise _refused(path, 'written', error) from error
    # SQLite says so only when something is to be written
    if not os.access(path, os.W_OK, effective_ids=True):
        raise _refused(path, 'written', os.strerror(errno.EACCES))
    if version < schema.VERSION:
        raise exception.AcceleratorsUnavailable(
            f'The claim store {path} has version {version}, and this release '
            f'of nova_accel writes version {schema.VERSION}: start '
            f'nova-compute of the same release as this command first.')
    # which says what is to be done with one of a later release
    return ClaimStore(path)


def _make_private(path):
    """Let only its user read a store, which names projects and servers.

    Also one of an earlier release. SQLite gives the files beside it the same
    mode (unixOpen() of SQLite).
    """
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    # another user's, as the command of an operator meets it, stays
    with contextlib.suppress(PermissionError):
        for file in (path, f'{path}-wal', f'{path}-shm'):
            with contextlib.suppress(FileNotFoundError):
                os.chmod(file, 0o600)


def _check_exists(path):
    try:
        os.stat(path)
    except FileNotFoundError:
        raise exception.NoClaimStore(
            f'The claim store {path} does not exist: nova-compute makes it at '
            f'its first start; else name the file of this host by --store.'
            ) from None
    except OSError:
        # who opens it says why
        pass


def _refused(path, what, error):
    code = getattr(error, 'sqlite_errorcode', -1) & 0xff
    advice = _ADVICE.get(code, 'run the command as the user of nova-compute')
    return exception.AcceleratorsUnavailable(
        f'The claim store {path} cannot be {what} ({error}): {advice}.')


def _disabled(db: sqlite3.Connection) -> tuple[model.Disabled, ...]:
    return tuple(
        model.Disabled(row['address'], row['serial'], row['reason'],
                       row['since'])
        for row in db.execute('SELECT address, serial, reason, since FROM '
                              'disabled ORDER BY address, serial'))


def _now() -> str:
    """A moment that compares whatever the clock of the host is set to: the
    boot of the host, and seconds of that (proc_sys_kernel(5), clock_gettime(2):
    CLOCK_MONOTONIC is the same one for all processes)."""
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as file:
        return f'{file.read().strip()} {time.monotonic()}'


def _is_recent(moment: object) -> bool:
    """Whether _now() was that moment in the last ORDER_SECONDS; an earlier
    release wrote time.time(), which says nothing of that."""
    boot, _, seconds = str(moment).partition(' ')
    now, _, here = _now().partition(' ')
    return bool(seconds) and boot == now and (
        float(here) - float(seconds) < ORDER_SECONDS)


def _orders(db: sqlite3.Connection) -> tuple[model.Order, ...]:
    """Without those that another release wrote."""
    known = {state.value: state for state in model.OrderState}
    return tuple(
        model.Order(row['number'], row['verb'], row['argument'], row['since'],
                    known[row['state']], row['answer'])
        for row in db.execute(
            'SELECT number, verb, argument, since, state, answer FROM orders '
            'ORDER BY number') if row['state'] in known)


def _waiting(row: sqlite3.Row) -> model.Waiting:
    return model.Waiting(
        model.AttachHandle(model.HandleType(row['handle_type']),
                           row['handle_address']),
        row['device_address'], row['region_index'], bool(row['shown']),
        row['provider_uuid'])


def _json(value) -> str:
    return json.dumps(dataclasses.asdict(value),
                      default=lambda enum: enum.value)


def _in_order(claims: Iterable[model.Claim]) -> tuple[model.Claim, ...]:
    return tuple(sorted(claims, key=lambda c: (c.group, c.handle.address)))


def _row(claim: model.Claim) -> dict[str, Any]:
    """Values by column."""
    row = {_RENAMED.get(name, name): getattr(claim, name) for name in _FIELDS}
    return {**row, 'role': claim.role.value, 'state': claim.state.value,
            'handle_type': claim.handle.type.value,
            'handle_address': claim.handle.address,
            'handle': _json(claim.handle)}


def _claim(row: sqlite3.Row) -> model.Claim:
    """:raises ValueError: for a handle that this release cannot know."""
    fields: dict[str, Any] = {name: row[_RENAMED.get(name, name)]
                              for name in _FIELDS}
    handle = model.AttachHandle.from_dict({
        **json.loads(row['handle']), 'type': row['handle_type'],
        'address': row['handle_address']})
    try:
        state = model.ClaimState(row['state'])
    except ValueError:
        state = model.ClaimState.UNKNOWN
        fields['error'] = fields['error'] or (
            f'state {row["state"]} is of another release')
    try:
        role = model.Role(row['role'])
    except ValueError:
        # nothing but its server's end releases it
        role = model.Role.CURRENT
    return model.Claim(**{**fields, 'handle': handle, 'state': state,
                          'role': role, 'prepared': bool(row['prepared'])})


def _loaded(row: sqlite3.Row) -> model.Loaded:
    if row['function_uuid'] is None and (
            row['content'] is None or row['bitstream_id'] is not None):
        return model.Loaded(None, None, None, None, row['origin'])
    return model.Loaded(
        function_uuid=row['function_uuid'], bitstream_id=row['bitstream_id'],
        function_name=row['function_name'], content=row['content'],
        origin=row['origin'])
