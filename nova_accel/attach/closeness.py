# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Choose the free devices that are closest to each other.

Pure and deterministic. A *want* is a number of devices of one kind. A device
has a *place*: the names of the topology levels above it, from the widest to the
narrowest, for example NUMA node, PCI root complex, switch and card
(model.Device.place). The more leading names two places share, the closer the
devices are. The result is optimal for one want and for several small ones
(_EXACT).

A server may want devices of several kinds, which are chosen at once. The first
criterion is the closeness of all pairs of chosen devices. The second criterion
is the closeness of the devices that are left for the next server. Of equal
choices, the first in the order of Want.places is taken.
"""

import collections
from collections.abc import Collection, Hashable, Sequence
import itertools
import math
import operator
import typing

Place = tuple[Hashable, ...]


class Want(typing.NamedTuple):
    """A number of devices of one kind to choose, and the places of the free
    devices of this kind."""

    #: places of the free devices; of equal places, the first one is chosen
    places: Sequence[Place]
    #: from 0 up to the number of places
    amount: int
    #: True for devices that the server has already: limits do not apply
    anywhere: bool = False


class Limit(typing.NamedTuple):
    """A condition for a choice: the chosen devices are below at most ``most``
    NUMA nodes (depth 1) or PCI root complexes (depth 2)."""

    #: number of leading names of a place that the limit compares: 1 for NUMA
    #: nodes, 2 for PCI root complexes
    depth: int
    most: int
    #: first names of places that are allowed; None: all
    within: Collection[Hashable] | None = None

    def allows(self, want: Want, place: Place) -> bool:
        return (want.anywhere or self.within is None
                or place[0] in self.within)


class _Choice(typing.NamedTuple):
    #: (number of pairs of chosen devices with a common prefix, summed over all
    #: prefixes; the same for the remaining devices), compared in this order
    worth: tuple[int, int]
    #: (number of the want, position) of the chosen devices
    chosen: tuple[tuple[int, int], ...]


#: How many combinations of amounts and prefixes are compared at most. Above
#: that, wants are chosen one after the other, because a build must not wait
#: for seconds. For devices of two kinds the result is less close on three of
#: ten random hosts (tests.bench.closeness)
_EXACT = 200
#: how many sets of prefixes are compared, and how many sets with enough places
#: are tried
_LOOKED_AT = 10000
_TRIED = 20

#: (amount of each want, prefixes of places in use) -> the best choice of these
#: amounts
_Best = dict[tuple[int, ...], _Choice]


def choose(wants: Sequence[Want], limit: Limit | None = None,
           together: bool = True) -> list[list[int]] | None:
    """Choose devices for each want such that all chosen devices are close.

    The time is proportional to the square of the number of places.

    :param limit: the condition that the choice has to meet.
    :param together: False if the server does not need close devices. The
        second criterion of the module's docstring then comes first.
    :returns: for each want, the positions of the chosen devices in
        want.places. None if no choice meets the limit. For many large wants,
        None may also mean that the search tried too few choices.
    """
    limit = limit or Limit(0, 1)
    if limit.most >= len(_beginnings(wants, limit)):
        # every allowed place is below this few prefixes
        limit = limit._replace(depth=0, most=1)
    amounts = math.prod(want.amount + 1 for want in wants if _is_free(want))
    if amounts * limit.most <= _EXACT:
        best = _Search(wants, limit, together).best()
    else:
        best = _one_after_the_other(wants, limit, together)
    return best and [
        sorted(position for number, position in best.chosen if number == wanted)
        for wanted in range(len(wants))]


def _beginnings(wants, limit) -> list[Place]:
    return list(dict.fromkeys(
        place[:limit.depth] for want in wants if not want.anywhere
        for place in want.places if limit.allows(want, place)))


def _one_after_the_other(wants, limit, together):
    """Return a good choice for many large wants, not always the best. To save
    time, compare only some sets of prefixes, and choose the places of one want
    after the other."""
    sets = itertools.combinations(_beginnings(wants, limit), limit.most)
    places = [(want.amount, collections.Counter(
        place[:limit.depth] for place in want.places
        if limit.allows(want, place))) for want in wants if not want.anywhere]
    enough = (allowed for allowed in itertools.islice(sets, _LOOKED_AT)
              if all(sum(map(found.__getitem__, allowed)) >= amount
                     for amount, found in places))
    return max((_in_turn(wants, limit, together, allowed)
                for allowed in itertools.islice(enough, _TRIED)),
               key=operator.attrgetter('worth'), default=None)


def _in_turn(wants, limit, together, allowed):
    """Return a choice in which each want is close to the wants before it.

    :param allowed: prefixes that together have enough places for each want.
    """
    chosen: list[tuple[int, int]] = []
    best = None
    for number in sorted(range(len(wants)),
                         key=lambda number: _is_free(wants[number])):
        best = _Search([wants[number], *(
            Want([wants[n].places[position]], 1, wants[n].anywhere)
            for n, position in chosen)],
            limit, together).best(allowed)
        assert best, 'there are enough places for each want'
        chosen += [(number, position) for n, position in best.chosen
                   if n == 0]
    return best and best._replace(chosen=tuple(chosen))


def _is_free(want: Want) -> bool:
    """Return whether the places of a want differ: only then is there a choice.
    """
    return len(set(want.places)) > 1


class _Search:

    def __init__(self, wants: Sequence[Want], limit: Limit, together: bool):
        self._wants = wants
        self._limit = limit
        self._limited = [not want.anywhere for want in wants]
        self._together = together
        self._fixed = [not _is_free(want) for want in wants]

    def best(self, allowed: Collection[Place] | None = None) -> _Choice | None:
        """Return the best choice, or None if no choice meets the limit.

        :param allowed: prefixes of the places that may be used; None for all
            places.
        """
        found = self._below([
            (number, position) for number, want in enumerate(self._wants)
            for position, place in enumerate(want.places)
            if self._limit.allows(want, place) and (
                allowed is None or want.anywhere
                or place[:self._limit.depth] in allowed)], 0)
        amounts = [want.amount for want in self._wants]
        return max((choice for key, choice in found.items()
                    if [*key[:-1]] == amounts),
                   key=operator.attrgetter('worth'), default=None)

    def _below(self, items, at) -> _Best:
        """Return the best choice from items for each combination of amounts.

        :param items: free devices as (number of a want, position in
            want.places). The places of all items begin with the same names.
        :param at: the number of names with which all these places begin.
        """
        here = []
        below: dict[Hashable, list] = {}
        for item in items:
            place = self._place(item)
            if len(place) == at:
                here.append(item)
            else:
                below.setdefault(place[at], []).append(item)
        best = self._of_equals(here, at)
        for inside in below.values():
            best = self._joined(best, self._below(inside, at + 1))
        if at == self._limit.depth:
            # all of them are below one prefix
            best = {(*counts, self._counts(counts)): choice
                    for (*counts, _), choice in best.items()}
        total = len(items)
        return {key: choice._replace(worth=_sum(
            choice.worth, self._ordered(_pairs(sum(key[:-1])), _pairs(
                total - sum(key[:-1]))))) for key, choice in best.items()}

    def _place(self, item):
        number, position = item
        return self._wants[number].places[position]

    def _of_equals(self, items, at) -> _Best:
        """Return the choices from items that all have the same place: for each
        combination of amounts, the first items of each want."""
        mine: list[list] = [[] for _ in self._wants]
        for item in items:
            mine[item[0]].append(item)
        ranges = []
        for want, fixed, found in zip(self._wants, self._fixed, mine):
            least = want.amount if fixed and found else 0
            ranges.append(range(min(want.amount, len(found)), least - 1, -1))
        # a place that is shorter than the prefix counts as a prefix
        short = at < self._limit.depth
        return {(*counts, short * self._counts(counts)): _Choice(
            (0, 0), tuple(item for found, count in zip(mine, counts)
                          for item in found[:count]))
            for counts in itertools.product(*ranges)}

    def _counts(self, counts) -> int:
        """Return 1 if the amounts include a device to which the limit applies,
        else 0."""
        return int(any(itertools.compress(counts, self._limited)))

    def _joined(self, first: _Best, second: _Best) -> _Best:
        joined: _Best = {}
        limits = [*(want.amount for want in self._wants), self._limit.most]
        # in descending order: of equal choices, the one with most from first
        for one in sorted(first, reverse=True):
            (close, left), chosen = first[one]
            room = list(map(operator.sub, limits, one))
            for two, (more, others) in second.items():
                if any(map(operator.gt, two, room)):
                    continue
                counts = tuple(map(operator.add, one, two))
                worth = close + more[0], left + more[1]
                if counts not in joined or worth > joined[counts].worth:
                    joined[counts] = _Choice(worth, chosen + others)
        return joined

    def _ordered(self, close: int, left: int) -> tuple[int, int]:
        return (close, left) if self._together else (left, close)


def _sum(one: tuple[int, int], two: tuple[int, int]) -> tuple[int, int]:
    return one[0] + two[0], one[1] + two[1]


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
