# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The ledger of what is reserved in Placement (inventory.ledger)."""

from collections.abc import Mapping
import sqlite3

from nova_accel.store import file
from nova_accel.store import values

_COLUMNS = ('operators', 'value', 'before')
_KEY = ('provider_uuid', 'resource_class')
_INSERT = (f'INSERT INTO ledger ({", ".join((*_KEY, *_COLUMNS))}) VALUES '
           f'({", ".join("?" * len((*_KEY, *_COLUMNS)))})')


class Reserved(file.File):

    def reserved(self) -> dict[tuple[str, str], values.Reserved]:
        """Return the ledger, by provider uuid and resource class."""
        with self._transaction(write=False) as db:
            rows = db.execute(
                f'SELECT {", ".join((*_KEY, *_COLUMNS))} FROM ledger'
                ).fetchall()
        with self._reading('in its table ledger'):
            return {tuple(row)[:2]: values.Reserved(*tuple(row)[2:])
                    for row in rows}


def write(db: sqlite3.Connection,
          rows: Mapping[tuple[str, str], values.Reserved | None]) -> None:
    """Write rows, inside a transaction; None removes one."""
    for key, row in rows.items():
        db.execute('DELETE FROM ledger WHERE provider_uuid = ? '
                   'AND resource_class = ?', key)
        if row:
            db.execute(_INSERT, (*key, *row))
