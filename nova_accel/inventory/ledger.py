# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the operator's ``reserved`` of each inventory in Placement.

``reserved`` belongs to the operator. While an inventory has a fit handle
(offers.Offer.is_fit), ``total`` counts only handles that servers may get. If
no handle is fit, ``total`` counts all handles, and nova_accel reserves all. In
this case, and if the operator reserves more than the total, the ledger keeps
the operator's number and the value that nova_accel wrote. For example, the
operator reserves 1 of the 4 GPUs of a pool, and all 4 fail: nova_accel writes
``reserved`` 4, and the ledger keeps 1 and 4. When the GPUs recover, nova_accel
writes 1 again. If the operator writes 2 before that, the value differs from
the 4 of nova_accel, and therefore is the operator's new number.

===========================  ===============================================
``reserved`` in Placement    Number of the operator
===========================  ===============================================
last value of nova_accel     the number in the ledger
the value before that, until the number in the ledger, because the write may
the write is confirmed       not have arrived
another value                that value
any value, without a row     that value, or 0 if the provider has the trait
                             FENCED and all is reserved (the store was lost)
===========================  ===============================================

If every handle of a device waits for the operator, lowering ``reserved`` by n
also releases n handles (Nova's protocol for devices of one-time use).

A row, with the value that Placement has, is written to the store before the
new value is written to Placement. A kill between the writes does no harm.
"""

from collections.abc import Iterable, Mapping
import typing

from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values

Key = tuple[str, str]


class Found(typing.NamedTuple):
    """An inventory in Placement."""

    reserved: int
    total: int
    #: whether its provider has the trait FENCED
    marked: bool = False


def balance(row: values.Reserved | None, found: Found | None, total: int,
            full: bool = False, room: int | None = None,
            ) -> tuple[int, values.Reserved | None]:
    """Return the value to write as ``reserved`` of an inventory, and the row
    that the ledger must have then. Pure.

    :param found: None if Placement has no such inventory.
    :param full: whether the inventory has no fit handle.
    :param room: the maximum of the value, if the same request to Placement
        also allocates from the inventory; otherwise None.
    :returns: the value, and the row or None if the ledger needs no row.
    """
    number = operators(row, found)
    value = min(total if full else number, total,
                total if room is None else room)
    # None if Placement has this value already, or no such inventory
    before = found.reserved if found and found.reserved != value else None
    needed = (full or value != number or before is not None
              or (bool(number) if found is None else
                  # without a row, the value would count as nova_accel's
                  row is not None and found.marked))
    return value, values.Reserved(number, value, before) if needed else None


def confirmed(row: values.Reserved, found: Found) -> values.Reserved | None:
    """Return the new version of a row whose value Placement has accepted, or
    None if the row is no longer needed.

    :param found: the inventory in Placement after the write.
    """
    needed = (found.marked or row.value != row.operators
              or row.value == found.total)
    return row._replace(before=None) if needed else None


def released(row: values.Reserved | None, found: Found | None) -> int:
    """Return the number of handles that the operator has released by lowering
    ``reserved``. All handles of the inventory wait for the operator."""
    if (row is None or row.before is not None or row.value < row.operators
            or found is None or found.marked):
        return 0
    return max(0, row.value - found.reserved)


def operators(row: values.Reserved | None, found: Found | None) -> int:
    """Return the operator's number (see the module) for an inventory."""
    if found is None:
        return row.operators if row else 0
    if row is None:
        return 0 if found.marked and found.reserved == found.total else (
            found.reserved)
    if released(row, found):
        return min(row.operators, found.reserved)
    return (row.operators if found.reserved in (row.value, row.before)
            else found.reserved)


class Ledger:
    """The rows of the ledger, in the store and in memory.

    Not thread-safe: see tree.Tree.
    """

    def __init__(self, store: claim_store.ClaimStore):
        self._store = store
        self._rows: dict[str, dict[str, values.Reserved]] | None = None

    def _read(self) -> dict[str, dict[str, values.Reserved]]:
        if self._rows is None:
            rows: dict[str, dict[str, values.Reserved]] = {}
            for (uuid, name), row in self._store.reserved().items():
                rows.setdefault(uuid, {})[name] = row
            self._rows = rows
        return self._rows

    def of(self, uuid: str) -> Mapping[str, values.Reserved]:
        """Return the rows of a provider by resource class."""
        return self._read().get(uuid, {})

    def all(self) -> dict[Key, values.Reserved]:
        """Return all rows, by provider uuid and resource class."""
        return {(uuid, name): row for uuid, rows in self._read().items()
                for name, row in rows.items()}

    def write(self, rows: Mapping[Key, values.Reserved | None],
              returned: Iterable[model.Claim] = ()) -> None:
        """Write changed rows of the ledger, all or none.

        :param rows: the new rows, or None to remove the row of an inventory.
        :param returned: claims of handles that the operator has released.
        :raises AcceleratorsUnavailable: nothing is written.
        """
        changes = {(uuid, name): row for (uuid, name), row in rows.items()
                   if row != self.of(uuid).get(name)}
        returned = tuple(returned)
        if not changes and not returned:
            return
        self._store.set_reserved(changes, returned)
        for (uuid, name), row in changes.items():
            of_provider = self._read().setdefault(uuid, {})
            if row is None:
                of_provider.pop(name, None)
            else:
                of_provider[name] = row
            if not of_provider:
                del self._read()[uuid]
