# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of devices: what they were, carry and may have of a server."""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import sqlite3

from nova_accel import model
from nova_accel.store import file

_LOADED_COLUMNS = ('device_address', 'region_index', 'function_uuid',
                   'bitstream_id', 'function_name', 'content', 'origin')


class Cards(file.File):

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
                [(address, file.as_json(device))
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

    # Devices that may have data of a server, and no claim says so

    def unsettled(self) -> frozenset[model.Unsettled]:
        """From memory."""
        return self._known.unsettled

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

    # Devices that no other server is to get

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
            self._change(disabled=disabled(db))


def unsettled(db: sqlite3.Connection) -> frozenset[model.Unsettled]:
    return frozenset(
        model.Unsettled(row['address'], row['serial'], row['ids'],
                        frozenset(row['but_for'].split()))
        for row in db.execute(
            'SELECT address, serial, ids, but_for FROM unsettled'))


def unclean(db: sqlite3.Connection) -> frozenset[model.Unclean]:
    return frozenset(model.Unclean(**row)
                     for row in db.execute('SELECT * FROM unclean'))


def disabled(db: sqlite3.Connection) -> tuple[model.Disabled, ...]:
    return tuple(
        model.Disabled(row['address'], row['serial'], row['reason'],
                       row['since'])
        for row in db.execute('SELECT address, serial, reason, since FROM '
                              'disabled ORDER BY address, serial'))


def _loaded(row: sqlite3.Row) -> model.Loaded:
    if row['function_uuid'] is None and (
            row['content'] is None or row['bitstream_id'] is not None):
        return model.Loaded(None, None, None, None, row['origin'])
    return model.Loaded(
        function_uuid=row['function_uuid'], bitstream_id=row['bitstream_id'],
        function_name=row['function_name'], content=row['content'],
        origin=row['origin'])
