# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which of the free devices a server gets: the closest ones.

Pure and deterministic, and exact up to the amounts of three large wants
(_EXACT). A device has a place: the names of what it is
below, from the widest to the narrowest, for example its NUMA node, its PCI root
complex, a switch, and its card (model.Device.place). Two devices are the
closer, the more names at the beginning of their places they share.

A server may want devices of several kinds. All of them are chosen at once:
what is closest together over all pairs; among equals, what leaves the closest
devices for the next server, so that whole groups stay whole; among equals
still, the first ones.
"""

from collections.abc import Collection, Hashable, Sequence
import itertools
import math
import operator
import typing

Place = tuple[Hashable, ...]


class Want(typing.NamedTuple):
    """So many devices of one kind."""

    #: of what is free, in the order in which equals are taken
    places: Sequence[Place]
    #: from 0 up to the number of places
    amount: int
    #: whether no limit concerns it: what the server has beside
    anywhere: bool = False


class Limit(typing.NamedTuple):
    """Below how many different things the devices may be."""

    #: names at the beginning of a place that say which: 1 for NUMA nodes, 2
    #: for PCI root complexes
    depth: int
    most: int
    #: first names of places that are allowed; None: all
    within: Collection[Hashable] | None = None


class _Choice(typing.NamedTuple):
    #: (pairs of chosen ones below each name, summed over the names; the same
    #: of those that are left), in the order in which they matter
    worth: tuple[int, int]
    #: (number of the want, position) of the chosen ones
    chosen: tuple[tuple[int, int], ...]


#: how many combinations of amounts are compared at most. Of more, wants are
#: chosen one after the other: a build does not wait for minutes
_EXACT = 1000

#: amount of each want -> the best choice of as many
_Best = dict[tuple[int, ...], _Choice]


def choose(wants: Sequence[Want], limit: Limit | None = None,
           together: bool = True) -> list[list[int]] | None:
    """Choose as many places of each want, the closest ones.

    Takes time in the order of the square of the number of places.

    :param limit: what the choice has to satisfy.
    :param together: False where the server does not care: what is left for
        the next one comes first.
    :returns: positions in the places of each want, in their order; None if no
        choice satisfies the limit.
    """
    depth, most, within = limit or Limit(0, 1)
    there = list(dict.fromkeys(
        place[:depth] for want in wants if not want.anywhere
        for place in want.places if within is None or place[0] in within))
    found = [_best_below(wants, set(allowed), depth, together) for allowed
             in itertools.combinations(there, min(most, len(there)))]
    best = max(filter(None, found), key=operator.attrgetter('worth'),
               default=None)
    return best and [
        sorted(position for number, position in best.chosen if number == wanted)
        for wanted in range(len(wants))]


def _best_below(wants, allowed, depth, together) -> _Choice | None:
    """The best choice below some beginnings of places, of so many names."""
    free = [want for want in wants if _is_free(want)]
    if math.prod(want.amount + 1 for want in free) <= _EXACT:
        return _Search(wants, depth, together).best(allowed)
    chosen: list[tuple[int, int]] = []
    best = None
    for number in sorted(range(len(wants)),
                         key=lambda number: _is_free(wants[number])):
        best = _Search([wants[number], *(
            Want([wants[n].places[position]], 1, wants[n].anywhere)
            for n, position in chosen)],
            depth, together).best(allowed)
        if best is None:
            return None
        chosen += [(number, position) for n, position in best.chosen
                   if n == 0]
    return best and best._replace(chosen=tuple(chosen))


def _is_free(want: Want) -> bool:
    """Whether there is something to choose."""
    return len(set(want.places)) > 1


class _Search:

    def __init__(self, wants: Sequence[Want], depth: int, together: bool):
        self._wants = wants
        self._depth = depth
        self._together = together
        self._fixed = [not _is_free(want) for want in wants]

    def best(self, allowed: Collection[Place]) -> _Choice | None:
        """The best choice below some beginnings of places."""
        return self._below([
            (number, position) for number, want in enumerate(self._wants)
            for position in range(len(want.places))], 0, allowed
            ).get(tuple(want.amount for want in self._wants))

    def _below(self, items, at, allowed) -> _Best:
        """The best choices of items that share so many names of their
        places."""
        here = []
        below: dict[Hashable, list] = {}
        for item in items:
            place = self._place(item)
            if len(place) == at:
                here.append(item)
            else:
                below.setdefault(place[at], []).append(item)
        best = self._of_equals(
            here, not here or self._place(here[0])[:self._depth] in allowed)
        for inside in below.values():
            best = self._joined(best, self._below(inside, at + 1, allowed))
        total = len(items)
        return {counts: choice._replace(worth=_sum(
            choice.worth, self._ordered(_pairs(sum(counts)), _pairs(
                total - sum(counts))))) for counts, choice in best.items()}

    def _place(self, item):
        number, position = item
        return self._wants[number].places[position]

    def _of_equals(self, items, allowed) -> _Best:
        """All choices of items with the same place: of each want the first
        ones."""
        mine: list[list] = [[] for _ in self._wants]
        for item in items:
            mine[item[0]].append(item)
        ranges = []
        for want, fixed, found in zip(self._wants, self._fixed, mine):
            most = (min(want.amount, len(found))
                    if allowed or want.anywhere else 0)
            least = want.amount if fixed and found else 0
            ranges.append(range(most, least - 1, -1))
        return {counts: _Choice((0, 0), tuple(
            item for found, count in zip(mine, counts)
            for item in found[:count]))
            for counts in itertools.product(*ranges)}

    def _joined(self, first: _Best, second: _Best) -> _Best:
        """The best choice of each amount from both."""
        joined: _Best = {}
        limits = [want.amount for want in self._wants]
        # of equals the first ones: as many as there are of the first
        for one in sorted(first, reverse=True):
            for two, other in second.items():
                counts = tuple(map(int.__add__, one, two))
                if any(map(int.__gt__, counts, limits)):
                    continue
                worth = _sum(first[one].worth, other.worth)
                if counts not in joined or worth > joined[counts].worth:
                    joined[counts] = _Choice(
                        worth, first[one].chosen + other.chosen)
        return joined

    def _ordered(self, close: int, left: int) -> tuple[int, int]:
        return (close, left) if self._together else (left, close)


def _sum(one: tuple[int, int], two: tuple[int, int]) -> tuple[int, int]:
    return one[0] + two[0], one[1] + two[1]


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
