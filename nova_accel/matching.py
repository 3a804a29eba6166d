# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Assign items to places at the least cost: pure, exact and deterministic.

Items of equal amounts are a transport problem, solved by augmenting along
shortest paths in polynomial time. Items of different amounts are a packing
problem, for which no polynomial method is known: there the transport problem,
in which several places may share in an item, gives a bound, and the search
branches upon items that are divided so.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import fractions
import math


@dataclasses.dataclass(frozen=True)
class Item:
    """What one place must provide as a whole."""

    #: {kind: amount}, each from 1 up
    amounts: Mapping[str, int]
    #: {place: cost} of the places that may give it; costs from 0 up
    costs: Mapping[str, int]


def assign(items: Sequence[Item],
           places: Mapping[str, Mapping[str, int]],
           ) -> list[str] | None:
    """Choose a place for each item, at the least sum of costs.

    Among choices of equal cost, the first in the order of items and places;
    where amounts of one kind differ, one that is the same each time.

    :param places: {place: {kind: amount it has}}.
    :returns: the place of each item, in their order; None when the places
        cannot give all of it.
    """
    # the position of a place is a digit below the cost, and the first item
    # has the highest digit: no two choices weigh the same
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
    """A search by branch and bound."""

    #: Bounds that are computed, at some milliseconds each, before the best
    #: choice so far is taken. Equal amounts need one; contrived packings need
    #: exponentially many, and nova-compute has other work.
    LIMIT = 500

    def __init__(self, weight: int):
        #: of one unit of cost
        self._weight = weight
        self._bounds = 0

    def best(self, items, places, below=math.inf):
        """(weight, {item: place}) of a choice of the least cost.

        :returns: None without a choice that costs less than ``below``.
        """
        self._bounds += 1
        relaxed = self._bounds <= self.LIMIT and _relax(items, places)
        if not relaxed or relaxed[0] // self._weight >= below:
            return None
        bound, parts = relaxed
        divided = [n for n, found in parts.items() if len(found) > 1]
        if not divided:
            return bound, {n: found.pop() for n, found in parts.items()}
        # the largest is the hardest to place
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
    """The cheapest way when several places may share in an item.

    :returns: (cost, {item: set of its places}), or None without a way.
    """
    units = {kind: math.gcd(*(d.amounts.get(kind, 0)
                              for d in items.values()))
             for d in items.values() for kind in d.amounts}
    room = {(place, kind): there.get(kind, 0) // unit
            for place, there in places.items()
            for kind, unit in units.items()}
    # the kinds of an item bear its cost in equal parts, so do their units;
    # scaled up to stay whole numbers
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
    """Successive shortest paths.

    :param supplies: {source: units}, all of which have to go somewhere.
    :param costs: {source: {node: cost of one unit}}.
    :param room: {node: units}.
    :returns: {source: {node: units}} at the least cost; None without a way.
    """
    room = dict(room)
    flow: dict[tuple, dict] = {source: {} for source in supplies}
    for source, supply in supplies.items():
        while supply:
            path = _shortest_path(source, costs, flow, room)
            if path is None:
                return None
            # units go from each source of the path to its node, and what the
            # next source had there moves on
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
    """Bellman-Ford: [(source, node), (source moved on, node) ...], or None."""
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
