# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The tables of uses: for how long servers had devices.

A claim is a *use* while it belongs to its server (Claim.is_use). A row of the
table ``uses`` has the seconds of one use. The table ``used`` has the sums of
all uses, which never decrease. Only this module counts. Notifications, metrics
and the commands read these rows.

count_uses() adds the seconds since the last count, and writes the row of a new
claim (a build does not write it). The transaction that ends a use adds the
rest. The clock is CLOCK_MONOTONIC, which is independent of the wall clock. For
a use across a boot of the host, the wall clock counts unless it was set back.

For example, a server gets a GPU at 10:00:00.2. At 10:00:40 the row has 39.8
seconds. A resize sets the claim aside at 10:01:10.2, and the row ends with 70
seconds, while the new claim counts from its beginning. If the resize is
reverted, the first claim begins a second row.
"""

from collections.abc import Collection, Iterable
import datetime
from typing import NamedTuple
import uuid

from oslo_utils import uuidutils

from nova_accel import model
from nova_accel import naming
from nova_accel.store import file
from nova_accel.store import schema
from nova_accel.store import values
from nova_accel import text

#: days for which a use is kept after its end, and the maximum number of uses
DAYS_OF_USES = 400
MOST_USES = 200_000


class _Now(NamedTuple):
    moment: str
    #: the wall clock
    wall: str

    @classmethod
    def read(cls):
        return cls(text.moment(), text.now(to='microseconds'))

    def after(self, moment: str, wall: str) -> float:
        """Return the seconds from an earlier time to this one.

        :param moment: text.moment() of the earlier time.
        :param wall: the wall clock at that time, used after a boot of the
            host.
        """
        seconds = text.elapsed(moment, self.moment)
        return _between(wall, self.wall) if seconds is None else seconds


class Uses(file.File):

    #: at the last count_uses() of this process
    _counted: _Now | None = None
    #: see count_uses()
    _without: Collection[str] = ()

    def count_uses(self, without: Collection[str] | None = None,
                   ) -> list[values.Use]:
        """Count the seconds of all uses until now.

        :param without: uuids of claims whose seconds do not count from now on,
            or None for those of the last call.
        :returns: the uses whose end has not been reported, the oldest first.
        """
        with self._transaction() as db:
            now = _Now.read()
            if without is not None:
                self._without = without
            for claim in self._known.claims:
                if claim.is_use:
                    self._count_use(db, claim, now)
            # a few at a time, the oldest first: each round drops more
            db.execute(
                "DELETE FROM uses WHERE counted = '' AND number IN (SELECT "
                'number FROM uses ORDER BY number LIMIT 1000) AND (until < ? '
                'OR number <= (SELECT max(number) FROM uses) - ?)',
                (text.now(DAYS_OF_USES), MOST_USES))
            found = schema.select(
                db, values.Use, "WHERE sent <> 'end' ORDER BY number")
        self._counted = now
        return found

    def note_reported(self, uses: Iterable[tuple[values.Use, str]]) -> None:
        """Store which event was sent last about each use, and the seconds that
        it had."""
        rows = [(event, use.seconds, use.number) for use, event in uses]
        if rows:
            with self._transaction() as db:
                db.executemany('UPDATE uses SET sent = ?, reported = ? '
                               'WHERE number = ?', rows)

    def uses(self) -> list[values.Use]:
        """Return all stored uses, the oldest first."""
        with self._transaction(write=False) as db:
            return schema.select(db, values.Use, 'ORDER BY number')

    def used(self) -> dict[tuple[str, str, str], float]:
        """Return (project, type, product) -> the seconds of all uses since the
        store was created, including dropped rows."""
        with self._transaction(write=False) as db:
            return {tuple(row)[:3]: row['seconds'] for row in db.execute(
                'SELECT project, type, product, seconds FROM used')}

    def raise_used(self, found: dict[tuple[str, str, str], float]) -> None:
        """Raise sums of used() to sums that were published earlier, if the
        stored ones are lower, because the store was lost or replaced by an
        older copy."""
        known = self.used()
        low = {key: seconds for key, seconds in found.items()
               if seconds > known.get(key, 0)}
        if low:
            with self._transaction() as db:
                for key, seconds in low.items():
                    _add_used(db, key, seconds - known.get(key, 0))

    def _follow_uses(self, db, before: Iterable[model.Claim],
                     after: Iterable[model.Claim]) -> None:
        """End the uses of claims that were removed, or do not belong to their
        servers any more. Begin a row for claims that belong to their servers
        again. The use of a new claim gets its row at the next count."""
        old = {claim.uuid: claim for claim in before}
        new = {claim.uuid: claim for claim in after}
        now = _Now.read()
        for claim in old.values():
            if claim.is_use and not (claim.uuid in new
                                     and new[claim.uuid].is_use):
                self._count_use(db, claim, now)
                db.execute("UPDATE uses SET counted = '' WHERE claim = ?",
                           (claim.uuid,))
        for known, claim in new.items():
            if claim.is_use and known in old and not old[known].is_use:
                _begin(db, claim, now.wall, now)

    def _restore_uses(self, db, claims: Iterable[model.Claim],
                      gone: Iterable[model.Claim]) -> None:
        """Write the uses of claims that were restored from the guests, because
        the store is new or an older copy. Their beginning is not reported
        again.

        :param gone: claims that ended at an unknown time, while another store
            was in use.
        """
        again = {claim.uuid: claim for claim in claims if claim.is_use}
        db.executemany("UPDATE uses SET counted = '' WHERE claim = ?",
                       [(c.uuid,) for c in gone if c.uuid not in again])
        now = _Now.read()
        for claim in again.values():
            ended, = db.execute('SELECT max(until) FROM uses WHERE claim = ?',
                                (claim.uuid,)).fetchone()
            since = max(claim.since or now.wall, ended or '')
            if not _open(db, claim):
                _begin(db, claim, since, now, _between(since, now.wall),
                       'exists')

    def _count_use(self, db, claim, now):
        row = _open(db, claim)
        if row:
            number, seconds = row['number'], now.after(
                row['counted'], row['until'])
        else:
            number = _begin(db, claim, claim.since, now)
            # the use began after the last count, whatever the wall clock was
            # set to
            seconds = _between(claim.since, now.wall)
            if self._counted:
                seconds = min(seconds, now.after(*self._counted))
        if claim.uuid in self._without:
            db.execute('UPDATE uses SET counted = ? WHERE number = ?',
                       (now.moment, number))
            return
        db.execute('UPDATE uses SET seconds = seconds + ?, until = ?, '
                   'counted = ?, part = ? WHERE number = ?',
                   (seconds, now.wall, now.moment, _part(claim), number))
        _add_used(db, _key(claim), seconds)


def _open(db, claim):
    return db.execute("SELECT number, counted, until FROM uses WHERE claim = ? "
                      "AND counted <> ''", (claim.uuid,)).fetchone()


def _begin(db, claim, since, now, seconds=0.0, sent=''):
    return schema.insert(db, values.Use(
        0, claim.uuid, claim.instance_uuid, claim.project_id or '',
        claim.flavor, naming.type_of(claim.resource_class), claim.product,
        _part(claim), claim.device_address, since, now.wall, now.moment,
        seconds, sent))


def _add_used(db, key, seconds):
    db.execute(
        'INSERT INTO used VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET '
        'seconds = seconds + excluded.seconds', (*key, seconds))


def _key(claim):
    return (claim.project_id or '', naming.type_of(claim.resource_class),
            claim.product)


def _part(claim: model.Claim) -> str:
    """Return the type of a vGPU, or the UUID of the function of a region, or
    '' for other devices."""
    function = claim.restore_function or ''
    return claim.created_type or (
        str(uuid.UUID(function)) if uuidutils.is_uuid_like(function)
        else function)


def _between(since: str, until: str) -> float:
    """Return the seconds between two wall-clock times, or 0 if the clock was
    set back or a time is malformed."""
    try:
        return max(0.0, (datetime.datetime.fromisoformat(until)
                         - datetime.datetime.fromisoformat(since)
                         ).total_seconds())
    except (ValueError, TypeError):
        # of a guest's metadata
        return 0.0
