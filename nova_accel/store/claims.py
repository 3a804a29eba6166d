# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The table of claims: which server has which handle, and which handles wait
for the operator.

The history of these claims shows whether a store is an older copy. Each process
that changes claims is a *run*, and counts its changes. The metadata of a guest
has its claims, with the run and the count of their last change. A store that
does not have the run, or has a lower count for the run, lacks changes of these
claims: it is an older copy, or another store.
"""

from collections.abc import Collection, Iterable, Mapping
import dataclasses
import json
import sqlite3
from typing import Any

from oslo_utils import uuidutils

from nova_accel import exception
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import file
from nova_accel.store import schema
from nova_accel.store import uses
from nova_accel.store import values
from nova_accel import text

LOG = logging.getLogger(__name__)

_FIELDS = schema.FIELDS[model.Claim]
_COLUMNS = (*_FIELDS, 'handle_type', 'handle_address')
_INSERT = (f'INSERT INTO claims ({schema.listed(_COLUMNS)}) '
           f'VALUES ({", ".join(f":{name}" for name in _COLUMNS)})')


class Claims(uses.Uses):

    def __init__(self, *args, **kwargs):
        #: the run of this process
        self._run = uuidutils.generate_uuid()
        super().__init__(*args, **kwargs)

    def _exchange_claims(self, db, old, new, are_restored=False):
        """Remove old claims and write new claims, inside a transaction.

        :param are_restored: whether _restore_uses() has written the uses of
            the new claims.
        """
        uuids = {claim.uuid for claim in old}
        db.executemany('DELETE FROM claims WHERE uuid = ?',
                       [(uuid,) for uuid in uuids])
        new = [dataclasses.replace(claim, since=claim.since or text.now(
            to='microseconds'))
               for claim in new]
        for claim in new:
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
                # the owner of one server must not learn who has the other
                LOG.warning('Server %s cannot get %s, which server %s '
                            'holds', claim.instance_uuid,
                            claim.handle.address, holder[0])
                raise exception.ClaimConflict(
                    f'Server {claim.instance_uuid} cannot get '
                    f'{claim.handle.address}, which another server '
                    f'holds: the build is retried on another host.') from None
        if uuids or new:
            if not are_restored:
                self._follow_uses(db, [
                    c for c in self._known.claims if c.uuid in uuids], new)
            self._count(db)
            self._change(claims=_in_order((*(
                c for c in self._known.claims if c.uuid not in uuids), *new)))

    def claims(self, instance_uuid: str | None = None,
               role: model.Role | None = None) -> list[model.Claim]:
        """Return the claims of a server in the order of groups and handles.
        Claims of handles that wait for the operator are omitted.

        The claims are in memory, because only this process writes claims.

        :param instance_uuid: the server, or None for all servers.
        :param role: the role of the claims, or None for all roles.
        """
        return [claim for claim in self._known.claims
                if instance_uuid in (None, claim.instance_uuid)
                and role in (None, claim.role)
                and not claim.waits]

    def all_claims(self) -> tuple[model.Claim, ...]:
        """Return claims(), and the claims of handles that wait for the
        operator, the oldest of these first."""
        return self._known.claims

    def await_operator(self, claim: model.Claim) -> None:
        """End a claim, and let its handle wait for the operator.

        :raises ClaimConflict: another server holds the handle.
        """
        with self._transaction() as db:
            self._end(db, [claim])
            self._exchange_claims(db, [claim], [claim.that_waits()] if not any(
                c.waits and c.handle == claim.handle
                for c in self._known.claims) else ())

    def by_uuid(self, uuids: Collection[str]) -> list[model.Claim]:
        """Return the claims of servers that have one of these uuids."""
        return [c for c in self.claims() if c.uuid in uuids]

    def update(self, claims: Iterable[model.Claim], **changes: Any,
               ) -> list[model.Claim]:
        """Change fields of claims.

        :param claims: claims whose stored versions to change, by their uuids.
        :param changes: fields of model.Claim except uuid and handle.
        :returns: the changed claims in the order given. Claims that were
            removed meanwhile are omitted.
        :raises TypeError: changes has another name.
        """
        return self.change([(claims, changes)])

    def change(self, steps: Iterable[tuple[
            Iterable[model.Claim], Mapping[str, Any]]]) -> list[model.Claim]:
        """Change several groups of claims, all or none; see update()."""
        todo = [([claim.uuid for claim in claims], changes)
                for claims, changes in steps]
        for _, changes in todo:
            unknown = set(changes) - set(_FIELDS) | (
                {'uuid', 'handle'} & set(changes))
            if unknown:
                raise TypeError(f'Claims have no {", ".join(sorted(unknown))} '
                                f'that can be changed')
        uuids = [uuid for some, _ in todo for uuid in some]
        if not uuids:
            # a server without claims does not depend on this file
            return []
        with self._transaction() as db:
            now = {claim.uuid: claim for claim in self._known.claims}
            before = [now[uuid] for uuid in now.keys() & set(uuids)]
            for some, changes in todo:
                for uuid in now.keys() & set(some) if changes else ():
                    now[uuid] = dataclasses.replace(now[uuid], **changes)
                    row = _row(now[uuid])
                    names = ', '.join(
                        f'"{name}" = :{name}' for name in changes)
                    db.execute(
                        f'UPDATE claims SET {names} WHERE uuid = :uuid', row)
            self._follow_uses(db, before, [now[c.uuid] for c in before])
            self._count(db)
            self._change(claims=_in_order(now.values()))
        return [now[uuid] for uuid in uuids if uuid in now]

    def remove(self, claims: Iterable[model.Claim]) -> None:
        """Remove claims, which frees their handles."""
        claims = tuple(claims)
        if claims:
            with self._transaction() as db:
                self._end(db, claims)
                self._exchange_claims(db, claims, ())

    def _end(self, db, claims):
        db.executemany('INSERT OR IGNORE INTO ended VALUES (?, ?)', [
            (claim.instance_uuid, claim.resource_class)
            for claim in claims if claim.instance_uuid])

    def _begin_claims(self, db, claims):
        db.executemany(
            'DELETE FROM ended WHERE server = ? AND resource_class = ?',
            [(claim.instance_uuid, claim.resource_class) for claim in claims])

    def ended(self) -> set[tuple[str, str]]:
        """Return the pairs (server, resource class) whose claims have ended. A
        pair is kept until the server has new claims of the class, or until
        forget_ended().

        Placement may still have an allocation of such a pair, for a while or
        as long as the server is in ERROR. This is not an error.
        """
        with self._transaction(write=False) as db:
            return set(map(tuple, db.execute(
                'SELECT server, resource_class FROM ended').fetchall()))

    def forget_ended(self, left: Collection[tuple[str, str]]) -> None:
        """Drop the pairs of ended() that have no allocation in Placement any
        more.

        :param left: the pairs that still have allocations.
        """
        gone = self.ended() - set(left)
        if gone:
            with self._transaction() as db:
                db.executemany('DELETE FROM ended WHERE server = ? AND '
                               'resource_class = ?', list(gone))

    # The history of the store

    def lineage(self) -> values.Lineage:
        """Return the history, from memory."""
        return self._known.lineage

    def latest(self) -> tuple[str, int]:
        """Return the run that changed claims last, and its count, or ('', 0)
        before the first change."""
        runs = self.lineage().runs
        run = self._run if self._run in runs else next(reversed(list(runs)), '')
        return run, runs.get(run, 0)

    def set_node(self, node: str) -> None:
        """Store the compute node to which this store belongs.

        :param node: provider uuid of the compute node.
        """
        if node != self.lineage().node:
            with self._transaction() as db:
                db.execute('DELETE FROM node')
                db.execute('INSERT INTO node (uuid) VALUES (?)', (node,))
                self._change(lineage=read_lineage(db))

    def _count(self, db):
        """Count a change of claims, inside the transaction of the change."""
        self._learn(db, self._run, self.lineage().runs.get(self._run, 0) + 1)

    def _learn(self, db, run, count):
        """Store that this store has all changes of a run up to this count."""
        db.execute('INSERT INTO runs (run, changes) VALUES (?, ?) ON CONFLICT '
                   '(run) DO UPDATE SET changes = max(changes, '
                   'excluded.changes)', (run, count))
        self._change(lineage=read_lineage(db))


def read(db: sqlite3.Connection) -> tuple[model.Claim, ...]:
    """Return all claims. Call this inside file.File._reading(), which converts
    the errors of damaged rows."""
    return _in_order(map(_claim, db.execute(
        f'SELECT {schema.listed(_COLUMNS)} FROM claims ORDER BY rowid'
        ).fetchall()))


def read_lineage(db: sqlite3.Connection) -> values.Lineage:
    """Return the history of a store."""
    node = db.execute('SELECT uuid FROM node').fetchone()
    return values.Lineage(node['uuid'] if node else '', {
        row['run']: row['changes'] for row in db.execute(
            'SELECT run, changes FROM runs ORDER BY number')})


def _in_order(claims: Iterable[model.Claim]) -> tuple[model.Claim, ...]:
    # waiting claims have no group and keep their order
    return tuple(sorted(claims, key=lambda c: (
        c.group, '' if c.waits else c.handle.address)))


def _row(claim: model.Claim) -> dict[str, Any]:
    """Return the values of a claim by column."""
    return {**{name: getattr(claim, name) for name in _FIELDS},
            'state': claim.state.value,
            'handle_type': claim.handle.type.value,
            'handle_address': claim.handle.address,
            'handle': file.as_json(claim.handle)}


def _claim(row: sqlite3.Row) -> model.Claim:
    handle = model.from_dict(model.AttachHandle, {
        **json.loads(row['handle']), 'type': row['handle_type'],
        'address': row['handle_address']})
    return model.Claim(**{
        **{name: row[name] for name in _FIELDS}, 'handle': handle,
        'state': model.ClaimState(row['state']),
        'prepared': bool(row['prepared'])})
