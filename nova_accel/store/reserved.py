# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The ledger of what is reserved in Placement (inventory.ledger), and the
handles that wait for the operator.
"""

from collections.abc import Iterable, Mapping
import json
import sqlite3

from nova_accel import model
from nova_accel.store import file

_COLUMNS = ('operators', 'value', 'generation', 'before', 'all_of_it',
            'waiting', 'addresses', 'traits')
_KEY = ('provider_uuid', 'resource_class')
_INSERT = (f'INSERT INTO ledger ({", ".join((*_KEY, *_COLUMNS))}) VALUES '
           f'({", ".join("?" * len((*_KEY, *_COLUMNS)))})')


class Reserved(file.File):

    def reserved(self) -> dict[tuple[str, str], model.Reserved]:
        """Return the ledger, by provider uuid and resource class."""
        with self._transaction(write=False) as db:
            rows = db.execute(
                f'SELECT {", ".join((*_KEY, *_COLUMNS))} FROM ledger'
                ).fetchall()
        with self._reading('ledger'):
            return {(row['provider_uuid'], row['resource_class']): _row(row)
                    for row in rows}

    def set_reserved(
            self, rows: Mapping[tuple[str, str], model.Reserved | None],
            returned: Iterable[model.Waiting] = ()) -> None:
        """Write rows of the ledger, all or none.

        :param rows: by provider uuid and resource class; None removes one.
        :param returned: handles that the operator has released, and that wait
            no more.
        """
        returned = tuple(returned)
        with self._transaction() as db:
            for key, row in rows.items():
                db.execute('DELETE FROM ledger WHERE provider_uuid = ? '
                           'AND resource_class = ?', key)
                if row:
                    db.execute(_INSERT, (
                        *key, row.operators, row.value, row.generation,
                        row.before, row.all, json.dumps(row.waiting),
                        json.dumps(row.addresses),
                        None if row.traits is None
                        else json.dumps(row.traits)))
            if returned:
                self._set_waiting(db, {
                    w.handle: w for w in self._known.waiting
                    if w not in returned})

    def waiting(self) -> tuple[model.Waiting, ...]:
        """Return the handles that wait for the operator, the oldest first;
        from memory."""
        return self._known.waiting

    def await_operator(self, new: model.Waiting) -> None:
        """Write down a handle that waits; one that does already stays."""
        with self._transaction() as db:
            waiting = {w.handle: w for w in self._known.waiting}
            waiting.setdefault(new.handle, new)
            self._set_waiting(db, waiting)

    def _set_waiting(self, db, waiting):
        db.execute('DELETE FROM waiting')
        db.executemany(
            'INSERT INTO waiting (handle_type, handle_address, '
            'device_address, region_index) VALUES (?, ?, ?, ?)',
            [(w.handle.type.value, w.handle.address, w.device_address,
              w.region_index) for w in waiting.values()])
        self._change(waiting=tuple(waiting.values()))


def waiting(db: sqlite3.Connection) -> tuple[model.Waiting, ...]:
    """Return the oldest first; raises what file.File._reading() expects."""
    return tuple(map(_waiting, db.execute(
        'SELECT * FROM waiting ORDER BY rowid').fetchall()))


def _waiting(row: sqlite3.Row) -> model.Waiting:
    return model.Waiting(
        model.AttachHandle(model.HandleType(row['handle_type']),
                           row['handle_address']),
        row['device_address'], row['region_index'])


def _row(row: sqlite3.Row) -> model.Reserved:
    return model.Reserved(
        row['operators'], row['value'], row['generation'], row['before'],
        bool(row['all_of_it']), tuple(json.loads(row['waiting'])),
        tuple(json.loads(row['addresses'])),
        None if row['traits'] is None else tuple(json.loads(row['traits'])))
