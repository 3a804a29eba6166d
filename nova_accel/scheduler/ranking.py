# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Ranks of allocation candidates: which devices suit a server best.

The filter orders the candidates of a host by rank, and the weigher scores the
host by its best candidate. Both use this ranking and cannot disagree.

A candidate is an allocation request of Placement (GET /allocation_candidates,
1.34 and later): {'allocations': {provider: {'resources': {class: amount}}},
'mappings': {group suffix: [provider]}}. The unnumbered group has the suffix
''.
"""

from collections.abc import Iterable, Iterator
import typing

from nova_accel import naming
from nova_accel import request
from nova_accel.scheduler import placement_cache

Candidate = dict[str, typing.Any]


class Rank(typing.NamedTuple):
    """The rank of a candidate; less is better, compared field by field."""

    #: whether a device was allocated since Placement offered it
    taken: bool
    #: groups whose region carries another function and must not be programmed
    stuck: int
    #: groups whose region has to be programmed
    programmings: int
    #: scarcity of the functions that programming would replace: the sum of
    #: 1 / regions with that function, 0 for a region without a function
    loss: float = 0.0


def providers(wanted: request.AcceleratorRequest,
              candidate: Candidate) -> list[str]:
    """Return the UUIDs of the providers that serve a request group.

    It is one provider, except that the unnumbered group may take the class
    from several.
    """
    allocations = candidate['allocations']
    mapped = candidate.get('mappings', {}).get(wanted.group, allocations)
    return [rp for rp in mapped
            if rp in allocations
            and wanted.resource_class in allocations[rp]['resources']]


def devices(requests: list[request.AcceleratorRequest],
            candidate: Candidate) -> set[tuple[str, str, int]]:
    """Return (provider UUID, class, amount) of a candidate's accelerators."""
    classes = {r.resource_class for r in requests}
    return {(rp, name, amount)
            for rp, given in candidate['allocations'].items()
            for name, amount in given['resources'].items() if name in classes}


def rank(requests: list[request.AcceleratorRequest], candidate: Candidate,
         snapshot: placement_cache.Snapshot) -> Rank:
    """Return the rank of a candidate, without the loss of other functions.

    A fact that the snapshot lacks does not distinguish candidates.
    """
    stuck = programmings = 0
    for wanted, mapped in _to_program(requests, candidate, snapshot):
        programmable = snapshot.carriers(naming.PROGRAMMABLE)
        programmings += 1
        stuck += (programmable is not None
                  and programmable.isdisjoint(mapped))
    taken = bool(snapshot.full) and not snapshot.full.isdisjoint(
        devices(requests, candidate))
    return Rank(taken, stuck, programmings)


def _to_program(requests, candidate, snapshot) -> Iterator[
        tuple[request.AcceleratorRequest, list[str]]]:
    for wanted in requests:
        if wanted.programs:
            carriers = snapshot.carriers(wanted.wanted_trait)
            mapped = providers(wanted, candidate)
            if carriers is not None and carriers.isdisjoint(mapped):
                yield wanted, mapped


def _loss(requests, candidate, snapshot) -> float:
    copies = snapshot.copies() or {}
    return sum(
        max((1 / copies[rp] for rp in mapped if rp in copies), default=0.0)
        for _, mapped in _to_program(requests, candidate, snapshot))


def ranked(requests: list[request.AcceleratorRequest],
           candidates: Iterable[Candidate], snapshot: placement_cache.Snapshot,
           ) -> list[tuple[Rank, Candidate]]:
    """Return the candidates of one host with their ranks, best first, stable.

    Asks Placement for the functions of all regions only if the best candidate
    has to be programmed.
    """
    ranks = [(rank(requests, c, snapshot), c) for c in candidates]
    best = min((r for r, _ in ranks), default=None)
    if best and best.programmings:
        ranks = [(r._replace(loss=_loss(requests, c, snapshot)), c)
                 for r, c in ranks]
    return sorted(ranks, key=lambda pair: pair[0])


#: Score of a usable host. A loaded function adds about as much again. At the
#: default multiplier either exceeds the sum of RAM, disk, CPU and hypervisor
#: weights (1 each).
_USABLE = 0.45
#: the part of a group's score for replacing no other function
_KEEPING = 0.2


def score(requests: list[request.AcceleratorRequest], best: Rank) -> float:
    """Return a host's score; a better rank gives a better score.

    :param best: the rank of the host's best candidate.
    :returns: 0 (no candidate can be used) to 1 (every wanted function is
        loaded). 0 also for requests without functions, which have no
        preference.
    """
    groups = sum(r.programs for r in requests)
    if not groups or best.taken or best.stuck:
        return 0.0
    carried: float = groups - best.programmings
    if best.programmings:
        carried += _KEEPING * (1 - best.loss / best.programmings)
    return _USABLE + (1 - _USABLE) * carried / groups
