# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Assign items to places at the least cost: pure, exact and deterministic.

If all items have equal amounts, this is a transport problem, which successive
shortest paths solve in polynomial time. Otherwise it is a packing problem, for
which no polynomial method is known. In the *relaxed* problem, an item may be
divided among several places. The cost of the relaxed solution is a lower
bound, and the search branches on the items that this solution divides.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import fractions
import math


@dataclasses.dataclass(frozen=True)
class Item:
    """A demand that one place must satisfy as a whole."""

    #: {kind: amount}, each at least 1
    amounts: Mapping[str, int]
    #: {place: cost} of the permitted places; costs are at least 0
    costs: Mapping[str, int]


def assign(items: Sequence[Item],
           places: Mapping[str, Mapping[str, int]],
           ) -> list[str] | None:
    """Choose a place for each item, with the least sum of costs.

    If several choices cost the same, the order of items and places decides,
    and the first one is returned. If amounts of a kind differ, the result is
    still deterministic, but may be another one of these choices.

    :param places: {place: {kind: available amount}}.
    :returns: the place of each item, in the order of items, or None if the
        places cannot satisfy all items.
    """
    # below the cost, each item has a digit for the position of its place, the
    # first item the highest digit: hence no two choices have the same weight
    base = len(places) + 1
    weight = base ** len(items)
    digits = {place: number for number, place in enumerate(places)}
    weighed = {}
    for number, item in enumerate(items):
        digit = base ** (len(items) - 1 - number)
        weighed[number] = Item(item.amounts, {
            place: cost * weight + digits[place] * digit
            for place, cost in item.costs.items() if place in digits})
    best = _Search(weight).best(weighed, places)
    return best and [best[1][number] for number in range(len(items))]


class _Search:
    """A branch-and-bound search for the assignment of the least weight."""

    #: Number of bounds to compute, some milliseconds each, before the best
    #: assignment so far is accepted. Equal amounts need one bound; contrived
    #: packings need exponentially many and would delay nova-compute.
    LIMIT = 500

    def __init__(self, weight: int):
        #: weight of one unit of cost
        self._weight = weight
        self._bounds = 0

    def best(self, items, places, below=math.inf):
        """Return the assignment of the least weight, as (weight, {item:
        place}).

        :param below: the cost of the assignment must be below this limit.
        :returns: None if no such assignment exists.
        """
        self._bounds += 1
        relaxed = self._bounds <= self.LIMIT and _relax(items, places)
        if not relaxed or relaxed[0] // self._weight >= below:
            return None
        bound, parts = relaxed
        divided = [n for n, found in parts.items() if len(found) > 1]
        if not divided:
            return bound, {n: found.pop() for n, found in parts.items()}
        # branch on the largest item, which is the hardest to place
        number = max(divided, key=lambda n: sum(items[n].amounts.values()))
        fixed = items[number]
        rest = {n: item for n, item in items.items() if n != number}
        best = None
        for place, cost in sorted(fixed.costs.items(),
                                  key=lambda pair: pair[1]):
            found = _fits(fixed, places[place]) and self.best(
                rest, {**places, place: _without(places[place], fixed)},
                below - cost // self._weight)
            if found:
                best = found[0] + cost, {**found[1], number: place}
                below = best[0] // self._weight
                if below == bound // self._weight:
                    break
        return best


def _without(there, item):
    return {kind: amount - item.amounts.get(kind, 0)
            for kind, amount in there.items()}


def _fits(item, there):
    return all(there.get(kind, 0) >= amount
               for kind, amount in item.amounts.items())


def _relax(items, places):
    """Solve the relaxed problem, in which an item may be divided among places.

    :returns: (cost, {item: set of its places}), or None if it has no solution.
    """
    units = {kind: math.gcd(*(d.amounts.get(kind, 0)
                              for d in items.values()))
             for d in items.values() for kind in d.amounts}
    room = {(place, kind): there.get(kind, 0) // unit
            for place, there in places.items()
            for kind, unit in units.items()}
    # each kind of an item bears an equal part of its cost, and each unit of a
    # kind an equal part of that; the scale makes these parts whole numbers
    scale = math.lcm(*(amount // units[kind] * len(item.amounts)
                       for item in items.values()
                       for kind, amount in item.amounts.items()))
    supplies, costs = {}, {}
    for number, item in items.items():
        fitting = [p for p in item.costs if _fits(item, places[p])]
        for kind, amount in item.amounts.items():
            count = supplies[number, kind] = amount // units[kind]
            part = scale // (count * len(item.amounts))
            costs[number, kind] = {(place, kind): item.costs[place] * part
                                   for place in fitting}
    flow = _transport(supplies, costs, room)
    if flow is None:
        return None
    parts: dict[int, set] = {number: set() for number in items}
    total = 0
    for (number, kind), given in flow.items():
        for node, count in given.items():
            total += count * costs[number, kind][node]
            parts[number].add(node[0])
    return fractions.Fraction(total, scale), parts


def _transport(supplies, costs, room):
    """Solve a transport problem by successive shortest paths.

    :param supplies: {source: units to send}.
    :param costs: {source: {node: cost of one unit}}.
    :param room: {node: units that it accepts}.
    :returns: the cheapest {source: {node: units}}, or None if the nodes cannot
        accept all units.
    """
    room = dict(room)
    flow: dict[tuple, dict] = {source: {} for source in supplies}
    for source, supply in supplies.items():
        while supply:
            path = _shortest_path(source, costs, flow, room)
            if path is None:
                return None
            # each source on the path sends units to its node, from which the
            # next source withdraws as many
            count = min([supply, room[path[-1][1]]] + [
                flow[follower][node] for (_, node), (follower, _)
                in zip(path, path[1:])])
            for number, (giver, node) in enumerate(path):
                flow[giver][node] = flow[giver].get(node, 0) + count
                if number + 1 < len(path):
                    follower = flow[path[number + 1][0]]
                    follower[node] -= count
                    if not follower[node]:
                        del follower[node]
            room[path[-1][1]] -= count
            supply -= count
    return flow


def _shortest_path(source, costs, flow, room):
    """Return the cheapest way to give a source one more unit, by Bellman-Ford.
    A unit can take the place of a unit of another source, which then moves on:
    [(source, node), (displaced source, its new node) ...], or None."""
    users = collections.defaultdict(list)
    for user, given in flow.items():
        for node in given:
            users[node].append(user)
    length = dict(costs[source])
    via = {node: (source, None) for node in length}
    queue = collections.deque(length)
    while queue:
        node = queue.popleft()
        for user in users[node]:
            before = length[node] - costs[user][node]
            for other, cost in costs[user].items():
                if other not in length or before + cost < length[other]:
                    length[other] = before + cost
                    via[other] = user, node
                    queue.append(other)
    free = [node for node in length if room[node]]
    if not free:
        return None
    path, node = [], min(free, key=length.__getitem__)
    while node is not None:
        giver, before = via[node]
        path.append((giver, node))
        node = before
    return path[::-1]
