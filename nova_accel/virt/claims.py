# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The persistent store of a compute host: claims, and what devices were.

SQLite, because it gives the two things that are needed: a unique constraint
(one handle, one server) and transactions that survive kill -9. One connection
stays open for all threads: opening one anew makes SQLite read its schema, and
closing the last one makes it wait for the disk once more than a commit does.
"""

from collections.abc import Iterable
import contextlib
import dataclasses
import json
import sqlite3
import threading

from nova_accel import exception
from nova_accel import model

_SCHEMA = """
CREATE TABLE IF NOT EXISTS claims (
    uuid TEXT PRIMARY KEY,
    instance_uuid TEXT NOT NULL,
    role TEXT NOT NULL,
    provider_uuid TEXT NOT NULL,
    resource_class TEXT NOT NULL,
    request_group TEXT NOT NULL,
    device_address TEXT NOT NULL,
    region_index INTEGER,
    handle_type TEXT NOT NULL,
    handle_address TEXT NOT NULL,
    handle TEXT NOT NULL,
    consumer_uuid TEXT NOT NULL,
    state TEXT NOT NULL,
    error TEXT NOT NULL,
    function_uuid TEXT,
    bitstream_id TEXT,
    created_type TEXT,
    prepared INTEGER NOT NULL,
    UNIQUE (handle_type, handle_address)
);
CREATE TABLE IF NOT EXISTS devices (
    address TEXT PRIMARY KEY,
    device TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS loaded (
    device_address TEXT NOT NULL,
    region_index INTEGER NOT NULL,
    function_uuid TEXT NOT NULL,
    bitstream_id TEXT NOT NULL,
    function_name TEXT,
    content TEXT NOT NULL,
    PRIMARY KEY (device_address, region_index)
);
"""


class ClaimStore:

    def __init__(self, path: str):
        """:raises AcceleratorsUnavailable: when the file cannot be used."""
        # one thread at a time inside SQLite: under eventlet a second green
        # thread that waited there would stop the first one too
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(
                path, timeout=10, isolation_level=None,
                check_same_thread=False)
            self._db.execute('PRAGMA journal_mode = WAL')
            # a commit is on the disk when it returns
            self._db.execute('PRAGMA synchronous = FULL')
            with self._transaction() as db:
                for statement in _SCHEMA.split(';'):
                    db.execute(statement)
        except sqlite3.Error as error:
            raise exception.AcceleratorsUnavailable(
                f'The claim store {path} cannot be opened ({error}): make it '
                f'writable for nova-compute, or move it away if it is '
                f'damaged.') from None

    @contextlib.contextmanager
    def _transaction(self, write=True):
        with self._lock:
            if write:
                self._db.execute('BEGIN IMMEDIATE')
            try:
                yield self._db
                if write:
                    self._db.execute('COMMIT')
            except BaseException:
                # after some errors SQLite has done so itself
                if self._db.in_transaction:
                    self._db.execute('ROLLBACK')
                raise

    # Claims

    def add(self, claims: Iterable[model.Claim]) -> None:
        """Write all of them or none.

        :raises ClaimConflict: when a handle is held already.
        """
        with self._transaction() as db:
            for claim in claims:
                try:
                    db.execute(
                        f'INSERT INTO claims VALUES '
                        f'({", ".join("?" * 18)})',
                        (claim.uuid, claim.instance_uuid, claim.role.value,
                         claim.provider_uuid, claim.resource_class,
                         claim.group, claim.device_address,
                         claim.region_index, claim.handle.type.value,
                         claim.handle.address, _json(claim.handle),
                         claim.consumer_uuid,
                         claim.state.value, claim.error,
                         claim.function_uuid, claim.bitstream_id,
                         claim.created_type, claim.prepared))
                except sqlite3.IntegrityError:
                    holder = db.execute(
                        'SELECT instance_uuid FROM claims WHERE '
                        'handle_type = ? AND handle_address = ?',
                        (claim.handle.type.value, claim.handle.address),
                    ).fetchone()
                    raise exception.ClaimConflict(
                        f'Server {claim.instance_uuid} was to get '
                        f'{claim.handle.address}, which server '
                        f'{holder[0] if holder else "?"} holds: the build has '
                        f'to go elsewhere.') from None

    def claims(self, instance_uuid: str | None = None,
               role: model.Role | None = None) -> list[model.Claim]:
        """Those of one server, or all; in the order of groups and handles."""
        with self._transaction(write=False) as db:
            rows = db.execute(
                'SELECT * FROM claims '
                'WHERE (?1 IS NULL OR instance_uuid = ?1) '
                'AND (?2 IS NULL OR role = ?2) '
                'ORDER BY request_group, handle_address',
                (instance_uuid, role and role.value)).fetchall()
        return [model.Claim(
            uuid=row[0], instance_uuid=row[1], role=model.Role(row[2]),
            provider_uuid=row[3], resource_class=row[4], group=row[5],
            device_address=row[6], region_index=row[7],
            handle=_handle(json.loads(row[10])), consumer_uuid=row[11],
            state=model.ClaimState(row[12]), error=row[13],
            function_uuid=row[14], bitstream_id=row[15],
            created_type=row[16], prepared=bool(row[17]),
        ) for row in rows]

    def update(self, claims: Iterable[model.Claim], **changes,
               ) -> list[model.Claim]:
        """Change fields of claims: role, state, error and what follows.

        :returns: the claims as they are then.
        """
        columns = ', '.join(f'{name} = ?' for name in changes)
        values = [getattr(v, 'value', v) for v in changes.values()]
        with self._transaction() as db:
            db.executemany(f'UPDATE claims SET {columns} WHERE uuid = ?',
                           [(*values, claim.uuid) for claim in claims])
        return [dataclasses.replace(c, **changes) for c in claims]

    def remove(self, claims: Iterable[model.Claim]) -> None:
        with self._transaction() as db:
            db.executemany('DELETE FROM claims WHERE uuid = ?',
                           [(claim.uuid,) for claim in claims])

    # Devices as they were last seen, for those that a guest has now

    def devices(self) -> dict[str, model.Device]:
        with self._transaction(write=False) as db:
            rows = db.execute('SELECT address, device FROM devices').fetchall()
        return {address: _device(json.loads(text)) for address, text in rows}

    def set_devices(self, devices: dict[str, model.Device]) -> None:
        with self._transaction() as db:
            db.execute('DELETE FROM devices')
            db.executemany(
                'INSERT INTO devices VALUES (?, ?)',
                [(address, _json(device))
                 for address, device in devices.items()])

    # What was programmed

    def loaded(self) -> dict[tuple[str, int], model.Loaded]:
        """By device address and region index."""
        with self._transaction(write=False) as db:
            rows = db.execute('SELECT * FROM loaded').fetchall()
        return {(row[0], row[1]): model.Loaded(*row[2:]) for row in rows}

    def set_loaded(self, address: str, index: int,
                   loaded: model.Loaded | None) -> None:
        """None: it is not known any more what the region carries."""
        with self._transaction() as db:
            db.execute('DELETE FROM loaded WHERE device_address = ? '
                       'AND region_index = ?', (address, index))
            if loaded:
                db.execute('INSERT INTO loaded VALUES (?, ?, ?, ?, ?, ?)',
                           (address, index, loaded.function_uuid,
                            loaded.bitstream_id, loaded.function_name,
                            loaded.content))


def _json(value) -> str:
    return json.dumps(dataclasses.asdict(value),
                      default=lambda enum: enum.value)


def _handle(fields: dict) -> model.AttachHandle:
    return model.AttachHandle(**{
        **fields, 'type': model.HandleType(fields['type']),
        'companions': tuple(fields['companions'])})


def _handles(items) -> tuple[model.AttachHandle, ...]:
    return tuple(_handle(item) for item in items)


def _device(fields: dict) -> model.Device:
    # names of the store of release 0.1
    fields = dict(fields)
    fields['state_traits'] = fields.pop(
        'volatile_traits', fields.get('state_traits', ()))
    for region in fields['regions']:
        if 'open_to_guest' in region:
            region['guest_can_reprogram'] = region.pop('open_to_guest')
    regions = tuple(
        model.Region(**{**region, 'handles': _handles(region['handles']),
                        'health': model.Health(region['health'])})
        for region in fields['regions'])
    return model.Device(**{
        **fields, 'regions': regions, 'handles': _handles(fields['handles']),
        'creatable': tuple(model.CreatableType(**item)
                           for item in fields['creatable']),
        'traits': tuple(fields['traits']),
        'state_traits': tuple(fields['state_traits']),
        'health': model.Health(fields['health'])})
