# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which of the free devices of a pool a server gets: the closest ones.

Pure, exact and deterministic. A device has a place: the names of what it is
below, from the widest to the narrowest, for example its NUMA node and its card.
Two devices are the closer, the more names at the beginning of their places they
share. What is closest together over all pairs is chosen; among equals, what
leaves the closest devices for the next server, so that whole groups stay whole;
among equals still, the first ones.
"""

from collections.abc import Hashable, Sequence
import typing

Place = tuple[Hashable, ...]


class _Choice(typing.NamedTuple):
    #: pairs of chosen ones below each name, summed over the names
    close: int
    #: the same of those that are left
    left: int
    #: positions of the chosen ones
    chosen: tuple[int, ...]


def choose(places: Sequence[Place], amount: int) -> list[int]:
    """Choose as many places, the closest ones.

    Takes time in the order of the square of the number of places.

    :param places: of what is free, in the order in which equals are taken.
    :param amount: from 0 up to the number of places.
    :returns: positions in places, in their order.
    """
    return sorted(_best(places, range(len(places)), 0)[amount].chosen)


def _best(places, positions, depth) -> list[_Choice]:
    """The best choice of 0, 1, 2 ... of the positions, which share the first
    names of their places, as many as depth."""
    here: list[int] = []
    below: dict[Hashable, list[int]] = {}
    for position in positions:
        place = places[position]
        if len(place) == depth:
            here.append(position)
        else:
            below.setdefault(place[depth], []).append(position)
    best = [_Choice(0, 0, tuple(here[:count]))
            for count in range(len(here) + 1)]
    for inside in below.values():
        best = _joined(best, _best(places, inside, depth + 1))
    total = len(best) - 1
    return [choice._replace(
        close=choice.close + _pairs(count),
        left=choice.left + _pairs(total - count))
        for count, choice in enumerate(best)]


def _joined(first: list[_Choice], second: list[_Choice]) -> list[_Choice]:
    """The best choice of each amount from both."""
    joined: list[_Choice | None] = [None] * (len(first) + len(second) - 1)
    # of equals the first ones: as many as there are of the first
    for one in reversed(range(len(first))):
        for two, other in enumerate(second):
            found = _Choice(first[one].close + other.close,
                            first[one].left + other.left,
                            first[one].chosen + other.chosen)
            known = joined[one + two]
            if known is None or found[:2] > known[:2]:
                joined[one + two] = found
    return typing.cast(list[_Choice], joined)


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
