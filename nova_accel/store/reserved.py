# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of what is reserved in Placement, and of what waits for the
operator.
"""

from collections.abc import Iterable
import dataclasses
import sqlite3

from nova_accel import model
from nova_accel.store import file


class Reserved(file.File):

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


def waiting(db: sqlite3.Connection) -> tuple[model.Waiting, ...]:
    """The oldest first; raises what file.File._reading() expects."""
    return tuple(map(_waiting, db.execute(
        'SELECT * FROM waiting ORDER BY rowid').fetchall()))


def _waiting(row: sqlite3.Row) -> model.Waiting:
    return model.Waiting(
        model.AttachHandle(model.HandleType(row['handle_type']),
                           row['handle_address']),
        row['device_address'], row['region_index'], bool(row['shown']),
        row['provider_uuid'])
