# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Who uses many providers of a host, in few requests to Placement.

Placement answers for one provider at a time, and a host may have hundreds. Two
of its answers are about all providers of a tree, and tell which are as they
were when they were asked before:

* the generation, which counts up where an allocation is made or changed
  (``_set_allocations`` of placement.objects.allocation, 16.0);
* which of them have room for one of a class. A deletion of all that a consumer
  has (``delete_all``) leaves the generation as it is; but a provider that was
  full has room then.

A provider that was not full, or of which Nova's copy is older, is asked again.
"""

from collections.abc import Callable, Iterable, Mapping
import typing
from urllib import parse

#: of Placement: in_tree of resource providers
_VERSION = '1.14'
#: so many providers are asked each
_FEW = 3

#: consumer -> {'resources': {class: amount}}
Allocations = Mapping[str, Mapping[str, Mapping[str, int]]]
#: consumer -> class -> amount
Given = dict[str, Mapping[str, int]]


class _Full(typing.NamedTuple):
    """A provider without free inventory of a class."""

    generation: int
    resource_class: str
    given: Given


class Consumers:

    def __init__(self, listed: Callable[[str, str], dict[str, int]],
                 allocations: Callable[[str], Allocations],
                 copy_of: Callable[[str], tuple[int | None, Mapping] | None]):
        """
        :param listed: path and version -> the generations of the providers in
            Placement's answer, by uuid.
        :param allocations: uuid of a provider -> what is allocated from it.
        :param copy_of: uuid of a provider -> its generation and its inventory
            in Nova's copy; None where that does not have it.
        """
        self._listed = listed
        self._allocations = allocations
        self._copy_of = copy_of
        self._full: dict[str, _Full] = {}

    def of(self, provider_uuids: Iterable[str]) -> dict[str, Given]:
        """Return the consumers of each provider, with their amounts.

        :raises PlacementUnavailable: of one of them it is not known.
        """
        uuids = sorted(provider_uuids)
        anchor = next(filter(self._copy_of, uuids), None)
        if len(uuids) <= _FEW or anchor is None:
            return {uuid: _given(self._allocations(uuid)) for uuid in uuids}
        # room first: what was full and has its generation after that was as it
        # was before, at the time of the first answer
        known = self._full
        has_room = {name: self._providers(anchor, resources=f'{name}:1')
                    for name in sorted({known[uuid].resource_class
                                        for uuid in uuids if uuid in known})}
        now = self._providers(anchor)
        found, is_full = {}, {}
        for uuid in uuids:
            full = known.get(uuid)
            if not full or full.generation != now.get(uuid) or (
                    uuid in has_room[full.resource_class]):
                found[uuid] = _given(self._allocations(uuid))
                full = self._if_full(uuid, now.get(uuid), found[uuid])
            else:
                found[uuid] = full.given
            if full:
                is_full[uuid] = full
        # at once: an order of the operator may ask meanwhile
        self._full = is_full
        return found

    def _providers(self, anchor: str, **query: str) -> dict[str, int]:
        """Return the generations of the providers of a tree, by uuid."""
        return self._listed('/resource_providers?' + parse.urlencode(
            {'in_tree': anchor, **query}, safe=':'), _VERSION)

    def _if_full(self, uuid: str, generation: int | None,
                 given: Given) -> _Full | None:
        copy = self._copy_of(uuid)
        if not given or copy is None or copy[0] is None or (
                copy[0] != generation):
            return None
        for name, item in copy[1].items():
            used = [has.get(name, 0) for has in given.values()]
            # what was written with the defaults of Placement
            room = item.get('allocation_ratio', 1.0) * (
                item['total'] - item.get('reserved', 0))
            if all(used) and sum(used) == room and (
                    # Placement has no room for one otherwise
                    item.get('min_unit', 1) == item.get('step_size', 1) == 1):
                return _Full(copy[0], name, given)
        return None


def _given(allocations: Allocations) -> Given:
    return {consumer: allocation['resources']
            for consumer, allocation in allocations.items()}
