# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The history of a store, to detect an older copy of the store.

Each process that changes claims is a *run*, and counts its changes. The
metadata of a guest has its claims, with the run and the count of their last
change. A store that does not have the run, or has a lower count for the run,
lacks changes of these claims: it is an older copy, or another store.
"""

import sqlite3
import uuid

from nova_accel import exception
from nova_accel.store import file
from nova_accel.store import values


class History(file.File):

    def __init__(self, *args, **kwargs):
        #: the run of this process
        self._run = str(uuid.uuid4())
        super().__init__(*args, **kwargs)

    def lineage(self) -> values.Lineage:
        """Return the history, from memory."""
        return self._known.lineage

    def latest(self) -> tuple[str, int]:
        """Return the run that changed claims last, and its count, or ('', 0)
        before the first change."""
        runs = self.lineage().runs
        run = self._run if self._run in runs else next(reversed(list(runs)), '')
        return run, runs.get(run, 0)

    def check_node(self, node: str) -> None:
        """Check that this store is not of another compute node, because its
        claims would be about other devices with the same addresses.

        :param node: provider uuid of the compute node, or '' if unknown.
        :raises AcceleratorsUnavailable: it is of another compute node.
        """
        known = self.lineage().node
        if node and known not in ('', node):
            raise exception.AcceleratorsUnavailable(
                f'The claim store {self._name} is of the compute node {known}, '
                f'and this host is {node}: put the claim store of this host in '
                f'its place, or move it away, and {file.MOVED_AWAY}.')

    def set_node(self, node: str) -> None:
        """Store the compute node to which this store belongs.

        :param node: provider uuid of the compute node.
        :raises AcceleratorsUnavailable: see check_node().
        """
        self.check_node(node)
        if node != self.lineage().node:
            with self._transaction() as db:
                db.execute('DELETE FROM node')
                db.execute('INSERT INTO node (uuid) VALUES (?)', (node,))
                self._change(lineage=read(db))

    def _count(self, db):
        """Count a change of claims, inside the transaction of the change."""
        self._learn(db, self._run, self.lineage().runs.get(self._run, 0) + 1)

    def _learn(self, db, run, count):
        """Store that this store has all changes of a run up to this count."""
        db.execute('INSERT INTO runs (run, changes) VALUES (?, ?) ON CONFLICT '
                   '(run) DO UPDATE SET changes = max(changes, '
                   'excluded.changes)', (run, count))
        self._change(lineage=read(db))


def read(db: sqlite3.Connection) -> values.Lineage:
    """Return the history of a store."""
    node = db.execute('SELECT uuid FROM node').fetchone()
    return values.Lineage(node['uuid'] if node else '', {
        row['run']: row['changes'] for row in db.execute(
            'SELECT run, changes FROM runs ORDER BY number')})
