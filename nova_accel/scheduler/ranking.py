# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which of the ways to give a server its accelerators is best.

The filter orders the candidates of a host by it, the weigher scores the host
by its best candidate: one ranking, so that they cannot disagree.

A candidate is an allocation request of Placement (GET /allocation_candidates,
1.34 and later): {'allocations': {provider: {'resources': {class: amount}}},
'mappings': {group suffix: [provider]}}, the suffix of the unnumbered group
being ''.
"""

import typing

from nova_accel import naming
from nova_accel import request


class Rank(typing.NamedTuple):
    """The place of a candidate; less is better, fields in that order."""

    #: a device of it is taken since Placement offered it
    taken: bool
    #: groups whose region carries something else and may not be programmed
    stuck: int
    #: groups whose region has to be programmed
    programmings: int
    #: how scarce the functions are that programming would replace: the sum of
    #: 1 / regions with that function, nothing for a region without any
    loss: float = 0.0


def providers(wanted: request.AcceleratorRequest, candidate) -> list[str]:
    """UUIDs of the providers that a candidate gives a request group.

    One, unless the unnumbered group takes the class from several.
    """
    allocations = candidate['allocations']
    mapped = candidate.get('mappings', {}).get(wanted.group, allocations)
    return [rp for rp in mapped
            if rp in allocations
            and wanted.resource_class in allocations[rp]['resources']]


def devices(requests: list[request.AcceleratorRequest],
            candidate) -> set[tuple[str, str, int]]:
    """(provider UUID, class, amount) of the accelerators of a candidate."""
    classes = {r.resource_class for r in requests}
    return {(rp, name, amount)
            for rp, given in candidate['allocations'].items()
            for name, amount in given['resources'].items() if name in classes}


def rank(requests: list[request.AcceleratorRequest], candidate,
         known) -> Rank:
    """The place of a candidate, without the loss of other functions.

    :param known: functions.Scheduling. What it does not know makes no
        difference between candidates.
    """
    stuck = programmings = 0
    for wanted, mapped in _to_program(requests, candidate, known):
        programmable = known.carriers(naming.PROGRAMMABLE)
        programmings += 1
        stuck += (programmable is not None
                  and programmable.isdisjoint(mapped))
    taken = bool(known.full) and not known.full.isdisjoint(
        devices(requests, candidate))
    return Rank(taken, stuck, programmings)


def _to_program(requests, candidate, known):
    for wanted in requests:
        if wanted.programs:
            carriers = known.carriers(wanted.wanted_trait)
            mapped = providers(wanted, candidate)
            if carriers is not None and carriers.isdisjoint(mapped):
                yield wanted, mapped


def _loss(requests, candidate, known) -> float:
    copies = known.copies() or {}
    return sum(
        max((1 / copies[rp] for rp in mapped if rp in copies), default=0.0)
        for _, mapped in _to_program(requests, candidate, known))


def ranked(requests: list[request.AcceleratorRequest], candidates,
           known) -> list[tuple[Rank, dict]]:
    """The candidates of one host with their ranks, best first, stable.

    Where the best candidate has to be programmed, Placement is asked for the
    functions of all regions, and otherwise not.
    """
    ranks = [(rank(requests, c, known), c) for c in candidates]
    best = min((r for r, _ in ranks), default=None)
    if best and best.programmings:
        ranks = [(r._replace(loss=_loss(requests, c, known)), c)
                 for r, c in ranks]
    return sorted(ranks, key=lambda pair: pair[0])


#: A host that can be used at all gets this much more than one that cannot, and
#: a carried function is worth about as much again: at the default multiplier
#: either is more than RAM, disk, CPU and hypervisor weigh together (1 each).
_USABLE = 0.45
#: the part of a group's worth that losing no other function makes up
_KEEPING = 0.2


def score(requests: list[request.AcceleratorRequest], best: Rank) -> float:
    """A host's score from its best candidate's rank; a better rank, a better
    score.

    :returns: from 0, no candidate of the host can be used, to 1, every wanted
        function is there already. 0 for requests without functions, too: they
        have no preference.
    """
    groups = sum(r.programs for r in requests)
    if not groups or best.taken or best.stuck:
        return 0.0
    carried = groups - best.programmings
    if best.programmings:
        carried += _KEEPING * (1 - best.loss / best.programmings)
    return _USABLE + (1 - _USABLE) * carried / groups
