# Licensed under the Apache License, Version 2.0. See LICENSE.
"""List the present holds in the claim store, for commands.

Some holds are known only to the running nova-compute, for example devices in
guests without a claim. Each report to Placement writes all of them into the
store. The commands nova-accel discover and claims read them there. When
nova-compute starts, it reads the start times of the holds there.
"""

from collections.abc import Iterable

from nova_accel import exception
from nova_accel.inventory import holds
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text

LOG = logging.getLogger(__name__)


class Listing:
    """The holds as last written. Not thread-safe: Nova's resource tracker
    holds its own lock when it calls."""

    def __init__(self, store: claim_store.ClaimStore):
        """:raises AcceleratorsUnavailable: the store cannot be read."""
        self._store = store
        self._written = store.withheld()
        self._once = logging.Once()

    def write(self, found: Iterable[holds.Hold]) -> None:
        """Write the holds that apply now.

        A hold without a start time gets the time of the first call that writes
        it. An error is logged once, and the next call retries.
        """
        before = {_key(row): row.since for row in self._written}
        now = text.now()
        rows = frozenset(
            row._replace(since=row.since or before.get(_key(row), now))
            for row in map(_row, found))
        if rows == self._written:
            return
        try:
            self._store.set_withheld(rows)
        except exception.AcceleratorsUnavailable as error:
            self._once.log(('store',), LOG.error, 'nova-accel discover does '
                           'not show all that is withheld now: %s', error)
            return
        self._written = rows
        self._once.forget('store')


def read(store: claim_store.ClaimStore) -> list[holds.Hold]:
    """Return the holds that nova-compute wrote last.

    :raises AcceleratorsUnavailable: the store cannot be read.
    """
    by_name = {kind.value: kind for kind in holds.Kind}
    return [holds.Hold(
        by_name[row.kind], row.device, row.reason, row.region,
        model.AttachHandle(
            model.HandleType(row.handle_type), row.handle_address)
        if row.handle_address else None, row.since)
        for row in sorted(store.withheld(), key=str) if row.kind in by_name]


def _row(hold: holds.Hold) -> values.Withheld:
    handle = hold.handle
    return values.Withheld(
        hold.device, hold.region, handle.type.value if handle else '',
        handle.address if handle else '', hold.kind.value, hold.reason,
        hold.since)


def _key(row: values.Withheld):
    return row._replace(reason='', since='')
