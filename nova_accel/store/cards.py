# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of cards and regions: identities, contents, data that servers may
have left, and disabled devices."""

from collections.abc import Iterable, Mapping
import contextlib
import dataclasses
import json
import sqlite3
from typing import Any

from nova_accel import model
from nova_accel.store import file
from nova_accel.store import rows
from nova_accel.store import schema
from nova_accel.store import values

_LOADED = ('function_uuid', 'bitstream_id', 'function_name', 'content',
           'origin')


class Cards(file.File):

    # Cards at the addresses of this host

    def devices(self) -> dict[str, model.Device]:
        """Return devices by address, as their drivers reported them last."""
        with self._transaction(write=False) as db:
            found = db.execute(
                'SELECT address, device, record FROM cards '
                'WHERE placed AND device IS NOT NULL').fetchall()
        with self._reading('in its table cards'):
            return {address: model.from_dict(model.Device, {
                        **json.loads(text), 'address': address,
                        'record': json.loads(record)})
                    for address, text, record in found}

    def notes(self) -> dict[str, values.Notes]:
        """Return the notes about devices by address."""
        with self._transaction(write=False) as db:
            found = db.execute(
                'SELECT address, notes FROM cards '
                'WHERE placed AND device IS NOT NULL').fetchall()
        with self._reading('in its table cards'):
            return {address: model.from_dict(values.Notes, json.loads(notes))
                    for address, notes in found}

    def gone(self) -> set[str]:
        """Return the addresses of devices that their drivers do not find."""
        return {address for address, notes in self.notes().items()
                if notes.gone}

    def keys(self) -> Mapping[str, model.CardKey]:
        """Return address -> identity of the card that is or was there, from
        memory. The identity has the last known serial number, even if the card
        reports none now."""
        return self._known.keys

    def set_devices(self, devices: Mapping[str, model.Device],
                    notes: Mapping[str, values.Notes] = {}) -> None:
        """Write the devices by address, with the notes about them.

        All cards at other addresses count as absent from now on.
        """
        serials = rows.own_serials(devices, notes)
        with self._transaction() as db, self._facts(db):
            there: dict[str, sqlite3.Row] = {}
            for row in db.execute(
                    'SELECT number, address, serial, ids, ports, device, '
                    'record, notes FROM cards WHERE placed').fetchall():
                device = devices.get(row['address'])
                if device is None or row['serial'] and (
                        device.serial not in ('', row['serial'])):
                    rows.put_away(db, row['address'])
                    continue
                there[row['address']] = row
                if device.serial and row['address'] not in serials:
                    # several cards have this number
                    db.execute("UPDATE cards SET serial = '' "
                               'WHERE number = ?', (row['number'],))
            for address, device in devices.items():
                serial, before = serials.get(address, ''), there.get(address)
                its_notes = notes.get(address, values.Notes())
                number = (before['number'] if before else _arriving(
                    db, address, serial, device, its_notes))
                if serial and not (before and before['serial'] == serial):
                    rows.take(db, number, serial)
                now = (device.ids, device.ports, file.as_json(
                    dataclasses.replace(device, record=())),
                    json.dumps(device.record),
                    file.as_json(its_notes))
                if not before:
                    rows.put(db, number, address)
                if not before or now != tuple(before)[3:]:
                    db.execute(
                        'UPDATE cards SET ids = ?, ports = ?, device = ?, '
                        'record = ?, notes = ? WHERE number = ?',
                        (*now, number))

    def place(self, device: model.Device, has_moved: bool,
              loaded: Mapping[int, model.Loaded]) -> None:
        """Store that a different card now occupies an address.

        The row of the previous card stays, because the card may return.

        :param has_moved: True if the new card is certainly the stored card
            with its serial number. False if two cards may have the number: the
            row and the holds are then copied, to apply to both cards.
        :param loaded: the contents of the new card's regions, by index.
        """
        with self._transaction() as db, self._facts(db):
            rows.put_away(db, device.address)
            number = rows.arriving(db, device.address, device.serial,
                                   device.ids, device.ports)
            if not has_moved and device.serial:
                number = rows.copy(db, number)
            rows.put(db, number, device.address)
            db.execute('UPDATE cards SET ids = ?, ports = ? WHERE number = ?',
                       (device.ids, device.ports, number))
            db.execute('DELETE FROM regions WHERE card = ?', (number,))
            for index, content in loaded.items():
                self._write(db, number, index, content)

    def away(self) -> tuple[values.Card, ...]:
        """Return the cards that are at no address, from memory. They include
        cards whose discovery was interrupted."""
        return self._known.away

    # Contents of regions

    def loaded(self) -> Mapping[tuple[str, int], model.Loaded]:
        """Return contents by device address and region index, from memory.

        A region without an entry has the content that its driver reads. This
        content counts as the operator's.
        """
        return self._known.loaded

    def set_loaded(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        with self._transaction() as db, self._facts(db):
            if loaded != model.AS_READ:
                self._write(db, rows.card_at(db, address), index, loaded)
                return
            db.execute(
                'DELETE FROM regions WHERE region_index = ? AND card = ('
                'SELECT number FROM cards WHERE placed AND address = ?)',
                (index, address))

    @staticmethod
    def _write(db, number, index, loaded):
        db.execute(
            f'INSERT OR REPLACE INTO regions (card, region_index, '
            f'{", ".join(_LOADED)}) VALUES (?, ?, ?, ?, ?, ?, ?)', (
                number, index, *(getattr(loaded, name) for name in _LOADED)))

    # Data of servers on cards

    def unsettled(self) -> frozenset[values.Unsettled]:
        """Return the cards that may contain data of a server without a claim,
        from memory."""
        return self._known.unsettled

    def unclean(self) -> frozenset[values.Unclean]:
        """Return the unclean handles (values.Unclean), from memory."""
        return self._known.unclean

    def change_unclean(self, done: Iterable[values.Unclean],
                       todo: Iterable[values.Unclean]) -> None:
        """Replace rows of unclean handles.

        :param done: rows to remove.
        :param todo: rows to add.
        """
        done, todo = set(done), set(todo)
        if done == todo:
            return
        with self._transaction() as db, self._facts(db):
            for row in done:
                rows.set_clean(db, row)
            for row in todo:
                rows.set_unclean(db, row)

    # Holds of nova-compute, for commands

    def withheld(self) -> frozenset[values.Withheld]:
        """Return the holds that applied at nova-compute's last report."""
        with self._transaction(write=False) as db:
            return frozenset(schema.select(db, values.Withheld))

    def set_withheld(self, found: Iterable[values.Withheld]) -> None:
        """Replace the holds of nova-compute's last report."""
        with self._transaction() as db:
            db.execute('DELETE FROM withheld')
            for row in found:
                schema.insert(db, row)

    # Disabled devices

    def disabled(self) -> tuple[values.Disabled, ...]:
        """Return the devices that the operator or a health finding has
        disabled, from memory."""
        return self._known.disabled

    def planned(self) -> tuple[values.Disabled, ...]:
        """Return the devices that will be disabled at a planned time, from
        memory."""
        return self._known.planned

    def disable(self, row: values.Disabled,
                instead: Iterable[values.Disabled] = ()) -> None:
        """Store that the operator or a health finding disables a device, now
        or at a planned time.

        :param instead: earlier rows, which the new row replaces.
        """
        self._change_disabled(instead, [row])

    def begin_planned(self) -> None:
        """Mark each device whose planned time has come as disabled. The device
        stays disabled even if the clock is set back later."""
        if not all(row.begun or not row.at for row in self._known.disabled):
            with self._transaction() as db:
                rows.begin_planned(db)
                self._change(**rows.disabled(db))

    def enable(self, gone: Iterable[values.Disabled]) -> None:
        """Remove rows of disabled devices."""
        self._change_disabled(gone, ())

    def _change_disabled(self, old, new):
        with self._transaction() as db, self._facts(db):
            for row in old:
                rows.enable(db, row)
            for row in new:
                rows.disable(db, row)

    @contextlib.contextmanager
    def _facts(self, db):
        """Update the facts about cards in memory when the context ends, inside
        a transaction that changes cards."""
        yield
        rows.drop_unknown(db)
        self._remember(db)

    def _remember(self, db):
        now = self._facts_of_cards(db)
        if any(getattr(self._known, name) != value
               for name, value in now.items()):
            self._change(**now)

    def _facts_of_cards(self, db) -> dict[str, Any]:
        with self._reading('in its table cards'):
            return {'loaded': _loaded(db), 'away': _away(db),
                    'keys': {row['address']: model.CardKey(*row)
                             for row in db.execute(
                                 'SELECT address, serial, ids, ports FROM '
                                 'cards WHERE placed')},
                    'unsettled': rows.unsettled(db),
                    'unclean': rows.unclean(db),
                    **rows.disabled(db)}


def _arriving(db, address, serial, device, notes):
    if notes.gone and not (serial or device.ports):
        # its card is at another address, and no card is at this one
        return rows.add(db, address, '', device.ids)
    return rows.arriving(db, address, serial, device.ids, device.ports)


def _away(db: sqlite3.Connection) -> tuple[values.Card, ...]:
    loaded: dict[int, dict[int, model.Loaded]] = {}
    for row in db.execute(
            f'SELECT card, region_index, {", ".join(_LOADED)} FROM regions '
            f'JOIN cards ON card = number WHERE device IS NULL'):
        loaded.setdefault(row['card'], {})[row['region_index']] = _content(row)
    return tuple(values.Card(
        model.CardKey(row['address'], row['serial'], row['ids'],
                      row['ports']), tuple(
            (str(name), str(value))
            for name, value in json.loads(row['record'])),
        loaded.get(row['number'], {}),
        model.from_dict(values.Notes, json.loads(row['notes'])).marks)
        for row in db.execute(
            'SELECT number, address, serial, ids, ports, record, notes FROM '
            "cards WHERE device IS NULL AND address || serial <> ''"))


def _loaded(db: sqlite3.Connection) -> dict[tuple[str, int], model.Loaded]:
    return {(row['address'], row['region_index']): _content(row)
            for row in db.execute(
                f'SELECT address, region_index, {", ".join(_LOADED)} FROM '
                f'regions JOIN cards ON card = number WHERE placed')}


def _content(row: sqlite3.Row) -> model.Loaded:
    if row['function_uuid'] is None and (
            row['content'] is None or row['bitstream_id'] is not None):
        return model.Loaded(None, None, None, None, row['origin'])
    return model.Loaded(
        function_uuid=row['function_uuid'], bitstream_id=row['bitstream_id'],
        function_name=row['function_name'], content=row['content'],
        origin=row['origin'])
