# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is reserved in Placement: by the operator, and by nova_accel.

``reserved`` of an inventory is one number that both write. The ledger has, for
each inventory of which nova_accel reserves something, and for each pool, what
nova_accel wrote last and the generation of the provider after that
(model.Reserved). Another value in Placement is the operator's. A row is in the
store before Placement is written, so a kill between any two writes heals.

======================================  ====================================
Placement has, in place of our value    the operator
======================================  ====================================
less                                    releases the handles that wait for
                                        him, the oldest first; then he
                                        reserves less
more                                    reserves more
another value, while all of it was      reserves that value
reserved whatever he says
no row, any value                       reserves that value; nothing where the
                                        provider has the trait FENCED and all
                                        is reserved: release 0.1, or the store
                                        was lost
======================================  ====================================

While it is not known whether our last write reached Placement, the value before
it is nova_accel's as well, and of the two the lower one counts: rather more
stays reserved than he asked for than less. Only a raise to the very value that
did not arrive, before the next report, is taken for nova_accel's. A write that
Placement has refused is known not to have arrived.
"""

from collections.abc import Collection, Iterable, Mapping
import dataclasses
import typing

from nova_accel import model
from nova_accel.store import claim_store

Key = tuple[str, str]


class Found(typing.NamedTuple):
    """An inventory as Placement has it."""

    reserved: int
    total: int
    #: of the provider; None where Nova's tree does not tell
    generation: int | None = None


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What nova_accel wants to reserve of an inventory."""

    total: int
    #: how many, beside the operator's; total or more: all of it
    reserved: int = 0
    #: addresses of handles that wait for the operator, the oldest first
    waiting: tuple[str, ...] = ()
    #: at most as much may be reserved, because the rest will be allocated
    room: int | None = None
    #: addresses of the devices behind it
    addresses: tuple[str, ...] = ()
    #: of a pool: its traits, without those of others
    traits: tuple[str, ...] | None = None


class Balance(typing.NamedTuple):
    #: for Placement
    value: int
    #: for the ledger; None: no row is needed
    row: model.Reserved | None
    #: addresses of handles that the operator has released
    returned: tuple[str, ...]


def balance(row: model.Reserved | None, found: Found | None, wanted: Wanted,
            marked: bool = False) -> Balance:
    """Return what has to be reserved of an inventory; pure.

    :param row: of the ledger.
    :param found: what Placement has; None where it has no such inventory.
    :param marked: whether the provider has the trait FENCED there. As long as
        it has, a row stays: without it, the value would count as nova_accel's.
    """
    operators, returned = _operators_word(row, found, marked)
    waiting = tuple(a for a in wanted.waiting if a not in returned)
    value = min(operators + wanted.reserved + len(waiting), wanted.total,
                wanted.total if wanted.room is None else wanted.room)
    there = found.reserved if found else 0
    now = model.Reserved(
        operators, value, generation=found.generation if found else None,
        before=None if found and there == value else there,
        all=0 < wanted.total <= wanted.reserved, waiting=waiting,
        addresses=wanted.addresses, traits=wanted.traits)
    if row and row == dataclasses.replace(now, generation=row.generation) and (
            now.before is None or now.generation == row.generation):
        # others changed the provider, and not this
        now = row
    if not (_is_needed(now) or row and marked):
        return Balance(value, None, returned)
    return Balance(value, now, returned)


def written(row: model.Reserved, generation: int | None,
            marked: bool = False) -> model.Reserved | None:
    """Return a row after Placement took its value.

    :param generation: of the provider then.
    :param marked: as in balance().
    :returns: None: it is not needed any more.
    """
    now = dataclasses.replace(row, generation=generation, before=None)
    return now if marked or _is_needed(now) else None


def _is_needed(row: model.Reserved) -> bool:
    return bool(row.all or row.waiting or row.value != row.operators
                or row.before is not None or row.traits is not None)


def _operators_word(row, found, marked) -> tuple[int, tuple[str, ...]]:
    """Return how many the operator reserves, and what he has released."""
    if found is None:
        return row.operators if row else 0, ()
    if row is None:
        full = marked and found.reserved == found.total
        return 0 if full else found.reserved, ()
    change = found.reserved - _expected(row, found)
    if not change:
        return row.operators, ()
    if row.all:
        return found.reserved, ()
    if change > 0:
        return row.operators + change, ()
    returned = row.waiting[:-change]
    # more of him than that was not shown where there are fewer devices
    return min(found.reserved, max(
        0, row.operators + change + len(returned))), returned


def _expected(row, found) -> int:
    """Return what Placement has where the operator has written nothing
    since."""
    if row.value < 0:
        # an earlier release noted only what is the operator's
        shown = row.operators + len(row.waiting)
        return found.reserved if found.reserved in (
            found.total, row.operators) else shown
    if row.before is None:
        nobody_wrote = (row.generation is not None
                        and found.generation is not None
                        and found.generation <= row.generation)
        return found.reserved if nobody_wrote else row.value
    if found.reserved in (row.before, row.value):
        return found.reserved
    return min(row.before, row.value)


class Ledger:
    """The rows, in the store and in memory; nothing else writes them.

    Not thread-safe: see tree.Tree.
    """

    def __init__(self, store: claim_store.ClaimStore):
        self._store = store
        self._rows: dict[str, dict[str, model.Reserved]] | None = None

    def _read(self) -> dict[str, dict[str, model.Reserved]]:
        if self._rows is None:
            rows: dict[str, dict[str, model.Reserved]] = {}
            for (uuid, name), row in self._store.reserved().items():
                rows.setdefault(uuid, {})[name] = row
            self._rows = rows
        return self._rows

    def of(self, uuid: str) -> Mapping[str, model.Reserved]:
        """Return the rows of a provider by resource class."""
        return self._read().get(uuid, {})

    def all(self) -> dict[Key, model.Reserved]:
        """Return all rows, by provider uuid and resource class."""
        return {(uuid, name): row for uuid, rows in self._read().items()
                for name, row in rows.items()}

    def write(self, rows: Mapping[Key, model.Reserved | None],
              returned: Iterable[model.Claim] = ()) -> None:
        """Write rows, all or none, where they have changed.

        :param rows: None: the inventory needs none.
        :param returned: handles that the operator has released.
        :raises AcceleratorsUnavailable: nothing is written.
        """
        now = self.all()
        changes = {key: row for key, row in rows.items()
                   if row != now.get(key)}
        returned = tuple(returned)
        if not changes and not returned:
            return
        self._store.set_reserved(changes, returned)
        for (uuid, name), row in changes.items():
            mine = self._read().setdefault(uuid, {})
            if row is None:
                mine.pop(name, None)
            else:
                mine[name] = row
            if not mine:
                del self._read()[uuid]


def share(amount: int, totals: Mapping[str, int]) -> dict[str, int]:
    """Return how many of an operator's reservation each successor of a
    provider gets: the first ones first, each at most its total.

    :param totals: of the successors, by uuid.
    """
    shares = {}
    for uuid, total in totals.items():
        shares[uuid] = min(amount, total)
        amount -= shares[uuid]
    return {uuid: count for uuid, count in shares.items() if count}


def by_address(waiting: Iterable[model.Claim], addresses: Collection[str],
               ) -> tuple[model.Claim, ...]:
    """Return those whose handle has one of these addresses."""
    return tuple(w for w in waiting if w.handle.address in addresses)
