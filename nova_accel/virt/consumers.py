# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find the consumers of many providers of a host in few requests to Placement.

Placement answers for one provider at a time, and a host may have hundreds. Two
requests cover all providers of a tree. The answers show which providers have
not changed since the last time:

* the generation of each provider, which counts up when an allocation is
  created or changed (``_set_allocations`` of placement.objects.allocation,
  16.0);
* the providers that have room for an amount of a class. If all allocations of
  a consumer are deleted (``delete_all``), the generation does not change, but
  a provider that was full has room. A provider with room for its whole
  inventory has no allocation.

All other providers, and providers with an older copy in Nova, are queried
again.
"""

from collections.abc import Callable, Iterable, Mapping
import typing
from urllib import parse

#: of Placement: in_tree of resource providers
_VERSION = '1.14'
#: up to this number, providers are queried one by one
_FEW = 3

#: consumer -> {'resources': {class: amount}}
Allocations = Mapping[str, Mapping[str, Mapping[str, int]]]
#: consumer -> class -> amount
Given = dict[str, Mapping[str, int]]


class _Full(typing.NamedTuple):
    """The last answer about a provider without free inventory of a class."""

    generation: int
    resource_class: str
    given: Given


class Consumers:

    def __init__(self, listed: Callable[[str, str], dict[str, int]],
                 allocations: Callable[[str], Allocations],
                 copy_of: Callable[[str], tuple[int | None, Mapping] | None]):
        """:param listed: function: path and version of a request to Placement
            -> {uuid: generation} of the providers in the answer.
        :param allocations: function: uuid of a provider -> its allocations.
        :param copy_of: function: uuid of a provider -> its generation and its
            inventory in Nova's copy, or None if the copy lacks the provider.
        """
        self._listed = listed
        self._allocations = allocations
        self._copy_of = copy_of
        self._full: dict[str, _Full] = {}

    def of(self, provider_uuids: Iterable[str]) -> dict[str, Given]:
        """Return the consumers of each provider, with their amounts.

        :raises PlacementUnavailable: the answer for a provider is missing.
        """
        uuids = sorted(provider_uuids)
        anchor = next(filter(self._copy_of, uuids), None)
        if len(uuids) <= _FEW or anchor is None:
            return {uuid: _given(self._allocations(uuid)) for uuid in uuids}
        # first the room, then the generations: a provider that was full, and
        # has the same generation afterwards, was unchanged at the time of the
        # first answer. The copy is read before both: a refresh in between
        # would bring the generation of a change that the first answer lacks
        known, copied = self._full, {
            uuid: self._generation(uuid) for uuid in uuids}
        queries = {uuid: f'{known[uuid].resource_class}:1' if uuid in known
                   else self._all_of(uuid) for uuid in uuids}
        has_room = {query: self._providers(anchor, resources=query)
                    for query in sorted(filter(None, {*queries.values()}))}
        now = self._providers(anchor)
        found, is_full = {}, {}
        for uuid in uuids:
            full, query = known.get(uuid), queries[uuid]
            if full and full.generation == now.get(uuid) and (
                    query and uuid not in has_room[query]):
                found[uuid] = full.given
            elif not full and copied[uuid] == now.get(uuid, -1) and (
                    query == '' or query and uuid in has_room[query]):
                found[uuid] = {}
            else:
                found[uuid] = _given(self._allocations(uuid))
                full = self._if_full(uuid, now.get(uuid), found[uuid])
            if full:
                is_full[uuid] = full
        # in one step, because an order of the operator may query meanwhile. A
        # call about some providers keeps what is known of the others
        self._full = {**{uuid: full for uuid, full in known.items()
                         if uuid not in uuids and uuid in now}, **is_full}
        return found

    def _providers(self, anchor: str, **query: str) -> dict[str, int]:
        """Return the generations of the providers of a tree, by uuid."""
        return self._listed('/resource_providers?' + parse.urlencode(
            {'in_tree': anchor, **query}, safe=':'), _VERSION)

    def _generation(self, uuid: str) -> int | None:
        return (self._copy_of(uuid) or (None,))[0]

    def _all_of(self, uuid: str) -> str | None:
        """Return all that can be allocated from a provider, as the value of
        `resources` in a query to Placement.

        :returns: '' if nothing can be allocated. None if the amounts are
            unknown, or if a single allocation cannot contain all of them.
        """
        copy = self._copy_of(uuid)
        if copy is None:
            return None
        found = []
        for name, item in sorted(copy[1].items()):
            room = _room(item)
            if not (room >= 1 and room == int(room)
                    and item.get('max_unit', room) >= room):
                return None
            found.append(f'{name}:{int(room)}')
        return ','.join(found)

    def _if_full(self, uuid: str, generation: int | None,
                 given: Given) -> _Full | None:
        copy = self._copy_of(uuid)
        if not given or copy is None or copy[0] is None or (
                copy[0] != generation):
            return None
        for name, item in copy[1].items():
            used = [has.get(name, 0) for has in given.values()]
            if all(used) and sum(used) == _room(item):
                return _Full(copy[0], name, given)
        return None


def _room(item: Mapping) -> float:
    """Return how much of an inventory can be allocated in total. Return 0 if
    it cannot be allocated in steps of 1."""
    # the item was written with the defaults of Placement
    return item.get('allocation_ratio', 1.0) * (
        item['total'] - item.get('reserved', 0)) * (
            item.get('min_unit', 1) == item.get('step_size', 1) == 1)


def _given(allocations: Allocations) -> Given:
    return {consumer: allocation['resources']
            for consumer, allocation in allocations.items()}
