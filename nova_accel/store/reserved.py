# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The ledger of what is reserved in Placement (inventory.ledger)."""

from collections.abc import Mapping
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
        with self._reading('in its table ledger'):
            return {(row['provider_uuid'], row['resource_class']): _row(row)
                    for row in rows}


def write(db: sqlite3.Connection,
          rows: Mapping[tuple[str, str], model.Reserved | None]) -> None:
    """Write rows, inside a transaction; None removes one."""
    for key, row in rows.items():
        db.execute('DELETE FROM ledger WHERE provider_uuid = ? '
                   'AND resource_class = ?', key)
        if row:
            db.execute(_INSERT, (
                *key, row.operators, row.value, row.generation, row.before,
                row.all, json.dumps(row.waiting), json.dumps(row.addresses),
                None if row.traits is None else json.dumps(row.traits)))


def _row(row: sqlite3.Row) -> model.Reserved:
    return model.Reserved(
        row['operators'], row['value'], row['generation'], row['before'],
        bool(row['all_of_it']), tuple(json.loads(row['waiting'])),
        tuple(json.loads(row['addresses'])),
        None if row['traits'] is None else tuple(json.loads(row['traits'])))
