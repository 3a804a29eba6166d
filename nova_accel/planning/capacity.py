# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How many servers of a flavor fit on hosts, and what limits them.

The result is exact for everything that Placement knows: groups, pools, sets of
devices, NUMA nodes, PCI root complexes, traits, memory, processors. Pure:
callers pass the providers of a host.

Servers of one flavor have equal needs. Hence the calculation counts how often
each provider serves each need, and does not assign providers to servers. A
provider has a few vectors of counts, none of which is dominated by another;
the vectors of several providers are added. Servers whose devices have to be
close are counted by place. With group_policy=isolate no provider serves more
needs than there are servers: then the needs of each server can be given
different providers (edge coloring of a bipartite graph, Koenig 1916).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import operator
import typing

from nova_accel import matching
from nova_accel import naming
from nova_accel.planning import reasons
from nova_accel import request

#: free amounts of each provider, in the order of Host.classes
State = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The demands of one server of a flavor on its host."""

    #: by suffix, as request.groups() returns them, with processors, memory
    #: and disk in the unnumbered one
    groups: Mapping[str, request.Group]
    requests: Sequence[request.AcceleratorRequest] = ()
    #: group_policy
    policy: str | None = None
    affinity: request.Affinity = request.Affinity()

    @functools.cached_property
    def needs(self) -> list['Need']:
        """Return the different needs of a server. Need.times shows how often
        each need occurs."""
        functions = {r.group: frozenset(r.wanted_traits)
                     for r in self.requests if r.programs}
        count: dict[Need, int] = {}
        close = self.affinity.is_strict and len(self.requests) > 1
        for need in reasons.needs(self.groups):
            has_device = reasons.is_of_accelerators(need)
            one = Need(
                need.group and 'numbered', need.resources, need.required,
                need.forbidden, functions.get(need.group, frozenset())
                if has_device else frozenset(), close and has_device)
            count[one] = count.get(one, 0) + 1
        return [dataclasses.replace(one, times=times)
                for one, times in count.items()]


@dataclasses.dataclass(frozen=True)
class Need(reasons.Need):
    """A need of each server. Its group is any numbered one, or ''."""

    #: traits of functions: a region has one of them, or can be programmed
    functions: frozenset[str] = frozenset()
    #: whether it counts for the place of the server's devices
    close: bool = False
    #: how often each server has it
    times: int = 1


class Limit(typing.NamedTuple):
    """The condition that prevents more servers on a host."""

    #: equal on all hosts: classes, or a key of the flavor
    what: str
    #: details of this host, for people
    text: str


class Host:
    """A host whose free inventory changes during the calculation.

    :param providers: all providers of the host, the root provider first.
    """

    def __init__(self, providers: Sequence[reasons.Provider]):
        self.providers = providers
        self.classes = [tuple(sorted(p.inventories)) for p in providers]
        self._capacity = [
            {name: p.free(name) + p.used(name) for name in p.inventories}
            for p in providers]
        self._places = [naming.place_of(p.traits) for p in providers]
        #: the properties of hosts that differ only in free inventory
        self.kind = tuple(
            (p.traits, tuple(sorted(
                (name, *sorted(item.items()))
                for name, item in p.inventories.items())))
            for p in providers)

    @functools.cached_property
    def free(self) -> State:
        return tuple(
            tuple(max(0, provider.free(name)) for name in names)
            for provider, names in zip(self.providers, self.classes))

    def giving(self, wanted: Wanted, need: Need, free: State,
               ) -> Iterator[int]:
        """Yield the providers that can serve a need at least once."""
        for number, provider in enumerate(self.providers):
            if self._may_give(wanted, need, number) and self.often(
                    need, number, free):
                if need.functions and provider.traits.isdisjoint(
                        need.functions) and (
                            naming.PROGRAMMABLE not in provider.traits
                            or self._is_used(need, number, free)):
                    continue
                yield number

    def _may_give(self, wanted, need, number):
        provider = self.providers[number]
        required, forbidden = need.required, need.forbidden
        if not need.group:
            plain = wanted.groups.get('', request.Group({}))
            forbidden = plain.forbidden
            # one of the providers that serve the group must have each trait
            if reasons.is_of_accelerators(need) and number:
                required = plain.required - self.providers[0].traits
        if not required <= provider.traits or forbidden & provider.traits:
            return False
        for name, amount in need.resources.items():
            item = provider.inventories.get(name)
            if (item is None or amount > min(item['total'], item['max_unit'])
                    or amount < item['min_unit']
                    or amount % item['step_size']):
                return False
        return True

    def _is_used(self, need, number, free):
        has = dict(zip(self.classes[number], free[number]))
        return any(has[name] < self._capacity[number][name]
                   for name in need.resources)

    def often(self, need: Need, number: int, free: State) -> int:
        """Return how often the free inventory of a provider satisfies a need.
        """
        has = dict(zip(self.classes[number], free[number]))
        return min(has.get(name, 0) // amount
                   for name, amount in need.resources.items())

    def devices(self, free: State) -> int:
        """Return how many accelerators are free."""
        return sum(has for names, there in zip(self.classes, free)
                   for name, has in zip(names, there)
                   if naming.is_accelerator_class(name))

    def lacks(self, wanted: Wanted) -> frozenset[str]:
        """Return traits of the unnumbered group that no suitable provider has.
        The host's own provider is suitable, and each provider with a resource
        class of the group (Placement API, 1.29)."""
        plain = wanted.groups.get('', request.Group({}))
        return plain.required.difference(*(
            p.traits for number, p in enumerate(self.providers)
            if not number or plain.resources.keys() & p.inventories.keys()))

    def needs(self, wanted: Wanted) -> list[Need]:
        """Return all needs of a server. If no provider of this host has disk,
        leave out the need of disk: hosts may share a provider of disk."""
        shared = not any('DISK_GB' in names for names in self.classes)
        return [need for need in wanted.needs if not (
            shared and need.resources.keys() == {'DISK_GB'})]

    def places(self, wanted: Wanted) -> list[frozenset[str]]:
        """Return the places at which the devices of one server can be."""
        bound = [p for p, place in zip(self.providers, self._places)
                 if any(map(naming.is_accelerator_class, p.inventories))]
        shown = {naming.place_of(p.traits) for p in bound}
        nodes = sorted({node for node, _ in shown if node})
        roots = sorted({root for _, root in shown if root})
        several = [frozenset(nodes)]
        if wanted.affinity.nodes is not None and (
                len(nodes) > wanted.affinity.nodes):
            several = [frozenset(some) for some in itertools.combinations(
                nodes, wanted.affinity.nodes)]
        if not wanted.affinity.one_root or len(roots) < 2:
            return [some | frozenset(roots) for some in several]
        return [some | {root} for some in several for root in roots]

    def hides_places(self, wanted: Wanted) -> bool:
        """Return whether Placement cannot show that devices are in the
        demanded place, because a pool has devices of several places."""
        needs = [need for need in wanted.needs
                 if reasons.is_of_accelerators(need)]
        several = sum(need.times * sum(naming.accelerators(
            need.resources).values()) for need in needs) > 1
        shown = 1 if wanted.affinity.one_root else 0
        return wanted.affinity.is_strict and several and any(
            not naming.place_of(self.providers[n].traits)[shown]
            for need in needs for n in self.giving(wanted, need, self.free))

    def is_at(self, number: int, place: frozenset[str]) -> bool:
        """Return whether the devices of a provider can be at a place. A
        provider without a place fits any place."""
        return place.issuperset(filter(None, self._places[number]))


def count(wanted: Wanted, host: Host, free: State) -> int:
    """Return how many servers fit at most."""
    if host.lacks(wanted):
        return 0
    return _count(wanted, host, free, host.needs(wanted))


def _at_most(wanted, host, free, needs):
    """Return an upper bound: how many servers fit if several providers could
    serve a need together."""
    amounts: dict[str, int] = {}
    givers: dict[str, set[int]] = {}
    for need in needs:
        for name, amount in need.resources.items():
            amounts[name] = amounts.get(name, 0) + amount * need.times
            givers.setdefault(name, set()).update(
                host.giving(wanted, need, free))
    return min(sum(dict(zip(host.classes[n], free[n])).get(name, 0)
                   for n in givers[name]) // amount
               for name, amount in amounts.items())


def limit(wanted: Wanted, host: Host, free: State) -> Limit:
    """Return the condition that limits how many servers fit.

    The condition is a trait that no provider has, or else an exhausted
    resource. Without one, the condition is a demand on all devices of a
    server, if more servers fit without this demand. Otherwise it is the need
    whose removal makes room for most servers.
    """
    lacks = host.lacks(wanted)
    if lacks:
        names = ', '.join(sorted(lacks))
        return Limit(names, f'no provider has the trait {names}')
    needs = host.needs(wanted)
    fitting = _count(wanted, host, free, needs)
    loose = dataclasses.replace(wanted, policy=None,
                                affinity=request.Affinity())
    alone = {need: _count(loose, host, free, [need]) for need in needs}
    # of several exhausted resources, accelerators come first
    used_up = sorted((need for need in needs if alone[need] == fitting),
                     key=lambda need: not reasons.is_of_accelerators(need))
    if used_up:
        return _of_need(wanted, host, free, used_up[0], alone[used_up[0]])
    for key, looser in (
            ('group_policy=isolate', dataclasses.replace(
                wanted, policy=None)),
            (str(wanted.affinity), dataclasses.replace(
                wanted, affinity=request.Affinity()))):
        if count(looser, host, free) > fitting:
            return Limit(key, f'all accelerators {key}'
                         if looser.policy == wanted.policy
                         else f'another provider for each group ({key})')
    need = max(needs, key=lambda need: _count(
        wanted, host, free, [other for other in needs if other != need]))
    return _of_need(wanted, host, free, need, alone[need])


def _of_need(wanted, host, free, need, alone):
    return Limit(' and '.join(sorted(need.resources)),
                 _said(wanted, host, free, need, alone))


def _said(wanted, host, free, need, alone):
    having = [number for number, names in enumerate(host.classes)
              if need.resources.keys() <= set(names)]
    if not having:
        return f'no {" and ".join(sorted(need.resources))}'
    if not alone:
        required = need.required or (
            frozenset() if need.group
            else wanted.groups.get('', request.Group({})).required)
        qualities = sorted(required) + ['the function'] * bool(need.functions)
        other = [n for n in having if host.often(need, n, free)]
        if other and (qualities or need.forbidden):
            return (f'{need} with {", ".join(qualities)}' if qualities
                    else f'{need} without {", ".join(sorted(need.forbidden))}'
                    ) + ' for each, others are free'
    name = min(need.resources)
    left = sum(free[n][host.classes[n].index(name)] for n in having)
    total = sum(host.providers[n].inventories[name]['total'] for n in having)
    return f'{need} for each, {left} free of {total}'


def place(wanted: Wanted, host: Host, free: State) -> State | None:
    """Return the free inventory after one more server on a host, or None if
    the server does not fit.

    The server gets the fullest of the suitable providers, because the
    scheduler stacks servers.
    """
    if host.lacks(wanted):
        return None
    return _place(wanted, host, free, host.needs(wanted))


def _place(wanted, host, free, needs):
    needs = [need for need in needs for _ in range(need.times)]
    isolated = wanted.policy == 'isolate'
    places = host.places(wanted) if any(n.close for n in needs) else [
        frozenset()]
    best: tuple = ()
    for where in places:
        items = []
        for need in needs:
            items.append(matching.Item({
                **need.resources,
                **({'': 1} if isolated and need.group else {})}, {
                str(n): host.often(need, n, free)
                for n in host.giving(wanted, need, free)
                if not need.close or host.is_at(n, where)}))
        chosen = matching.assign(items, {
            str(n): {**dict(zip(names, free[n])), '': 1}
            for n, names in enumerate(host.classes)})
        if chosen is None:
            continue
        cost = sum(d.costs[one] for d, one in zip(items, chosen))
        if not best or cost < best[0]:
            best = cost, chosen
    if not best:
        return None
    left = [dict(zip(names, has)) for names, has in zip(host.classes, free)]
    for need, one in zip(needs, best[1]):
        for name, amount in need.resources.items():
            left[int(one)][name] -= amount
    return tuple(tuple(has.values()) for has in left)


# The count

#: a need and, if its devices have to be close, their place
_Kind = tuple[Need, frozenset[str] | None]
_Vector = tuple[int, ...]


def _count(wanted, host, free, needs):
    if not needs:
        return 0
    if sum(map(reasons.is_of_accelerators, needs)) > 2:
        # placing one server after the other is faster, and mostly as good
        most = _at_most(wanted, host, free, needs)
        often, left = 0, _place(wanted, host, free, needs)
        while left and often < most:
            often, left = often + 1, _place(wanted, host, left, needs)
        if often >= most:
            return often
    places = host.places(wanted) if any(n.close for n in needs) else []
    kinds: list[_Kind] = [
        (need, where) for need in needs
        for where in (places if need.close else [None])]
    serve = {kind: [n for n in host.giving(wanted, kind[0], free)
                    if kind[1] is None or host.is_at(n, kind[1])]
             for kind in kinds}
    most = {kind: sum(host.often(kind[0], n, free) for n in serve[kind])
            // kind[0].times for kind in kinds}
    # the maximum for the scarcest need, at all places
    least = min(sum(most[kind] for kind in kinds if kind[0] == need)
                for need in needs)
    isolated = wanted.policy == 'isolate' and sum(
        need.times for need in needs if need.group) > 1
    # (servers at places, servers by needs without a place): inf without
    # such needs
    found: list[tuple[float, float]] = [(
        0 if any(n.close for n in needs) else math.inf, math.inf)]
    for part in _parts(kinds, serve):
        there = _of_part(host, free, part, serve, most, least, isolated)
        found = list({(bound + more, min(loose, other))
                      for bound, loose in found for more, other in there})
    return int(min(least, max(map(min, found))))


def _parts(kinds, serve):
    """Return groups of kinds that must be counted together. Kinds are in one
    group if they compete for a class of a provider, or if they are for servers
    at the same place."""
    parts: list[tuple[set, list]] = []
    for kind in kinds:
        need, where = kind
        marks: set = {(n, name) for n in serve[kind]
                      for name in need.resources}
        if where is not None:
            marks.add(where)
        joined = [kind]
        rest = []
        for other, members in parts:
            if other & marks:
                marks |= other
                joined = members + joined
            else:
                rest.append((other, members))
        parts = [*rest, (marks, joined)]
    return [members for _, members in parts]


def _of_part(host, free, part, serve, most, least, isolated):
    """Return the numbers of servers that are possible for a group of kinds.

    :returns: pairs. The first number counts the servers at a place of the
        host, and the second one is the most that the needs of no certain place
        allow.
    """
    wheres = list(dict.fromkeys(where for _, where in part))
    caps = {where: min([least, *(most[kind] for kind in part
                                 if kind[1] == where)]) for where in wheres}
    if not (isolated and any(need.group for need, _ in part)):
        return _values(part, _reached(host, free, part, serve, caps, None))
    # how often a provider may serve depends on the number of servers
    found = []
    for numbers in itertools.product(*(range(caps[w] + 1) for w in wheres)):
        at = dict(zip(wheres, numbers))
        for vector in _reached(host, free, part, serve, at, at):
            if all(x == at[where] * need.times
                   for x, (need, where) in zip(vector, part)):
                found += _values(part, [vector])
    return found


def _values(part, vectors):
    result = set()
    for vector in vectors:
        places: dict = {}
        loose = math.inf
        for often, (need, where) in zip(vector, part):
            if where is None:
                loose = min(loose, often // need.times)
            else:
                places[where] = min(places.get(where, math.inf),
                                    often // need.times)
        result.add((sum(places.values()), loose))
    return list(result)


def _reached(host, free, part, serve, caps, isolated):
    """Return how often the providers can serve each kind, as vectors that no
    other vector dominates.

    :param caps: place -> maximum number of servers there.
    :param isolated: place -> number of servers there. A provider may serve
        numbered needs at most this often. None: without this limit.
    """
    limits = [caps[where] * need.times for need, where in part]
    reached: set[_Vector] = {(0,) * len(part)}
    for number in dict.fromkeys(n for kind in part for n in serve[kind]):
        given = _of_provider(host, free, number, [
            (index, kind) for index, kind in enumerate(part)
            if number in serve[kind]], limits, isolated)
        reached = _largest(
            tuple(map(min, map(operator.add, one, other), limits))
            for one in reached for other in given)
    return reached


def _of_provider(host, free, number, kinds, limits, isolated):
    has = dict(zip(host.classes[number], free[number]))
    found: list[_Vector] = []

    def add(position, vector, has, left):
        if position == len(kinds):
            found.append(tuple(vector))
            return
        index, (need, where) = kinds[position]
        most = min(limits[index], *(has[name] // amount
                                    for name, amount in need.resources.items()))
        if isolated is not None and need.group:
            most = min(most, left[where])
        # as many as possible of the last kind
        for often in range(most if position == len(kinds) - 1 else 0,
                           most + 1):
            add(position + 1, [*vector[:index], often, *vector[index + 1:]],
                {**has, **{name: has[name] - often * amount
                           for name, amount in need.resources.items()}},
                left if isolated is None or not need.group
                else {**left, where: left[where] - often})
    add(0, [0] * len(limits), has, isolated)
    return _largest(found)


def _largest(vectors: Iterable[_Vector]) -> set[_Vector]:
    """Return the vectors that no other vector dominates."""
    kept: set[_Vector] = set()
    # the kept vectors without their first numbers: in this order, the first
    # number of a vector is at most that of each vector before it
    tails: list[_Vector] = []
    for vector in sorted(set(vectors), reverse=True):
        tail = vector[1:]
        if not any(all(map(int.__ge__, other, tail)) for other in tails):
            kept.add(vector)
            tails = [other for other in tails
                     if not all(map(int.__ge__, tail, other))] + [tail]
    return kept
