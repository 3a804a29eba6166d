# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Ranks of allocation candidates: which devices suit a server best.

The filter orders the candidates of a host by rank, and the weigher scores the
host by its first candidate, which Nova claims. Both use this ranking and
cannot disagree.
"""

from collections.abc import Callable, Iterable
import functools

from nova_accel import request
from nova_accel.scheduler import scheduling as schedulings


def providers(wish: schedulings.Wish | request.AcceleratorRequest,
              candidate: schedulings.Candidate) -> Iterable[str]:
    """Return the UUIDs of the providers that serve a request group.

    It is one provider: Placement takes all of a class in a group from one
    (granular resource requests, 1.25). The unnumbered group may take its
    other classes from others.
    """
    group = wish.group
    mapped = candidate['mappings'].get(group, ())
    if group:
        return mapped
    allocations = candidate['allocations']
    return [provider for provider in mapped
            if provider in allocations
            and wish.resource_class in allocations[provider]['resources']]


def ranker(scheduling: schedulings.Scheduling,
           ) -> Callable[[schedulings.Candidate], schedulings.Rank]:
    """Return the function that ranks the candidates of a scheduling.

    A region of which nothing is known counts as one that has to be programmed
    and carries nothing. The function holds until a server of the request gets
    its candidate (Scheduling.take, Scheduling.refresh).
    """
    if scheduling.is_of_one_provider and scheduling.wishes[0].group:
        [wish], [ranks] = scheduling.wishes, scheduling.ranks
        return functools.partial(_rank_of_one, wish.group, ranks)
    return functools.partial(_rank_of_several, scheduling)


def _rank_of_one(group, ranks, candidate):
    # a scheduling ranks thousands of candidates, most of them of one group
    for provider in candidate['mappings'].get(group, ()):
        return ranks.get(provider, schedulings.UNKNOWN_REGION)
    return schedulings.UNKNOWN_REGION


def _rank_of_several(scheduling, candidate):
    # one pass, for the same reason
    stuck = suspects = programmings = choice = liking = cleanings = 0
    over = host_over = 0
    loss = asked = 0.0
    for wish, ranks in zip(scheduling.wishes, scheduling.ranks):
        for provider in providers(wish, candidate):
            one = ranks.get(provider, schedulings.UNKNOWN_REGION)
            stuck += one.stuck
            suspects += one.suspects
            programmings += one.programmings
            choice += one.choice
            liking += one.liking
            cleanings += one.cleanings
            loss += one.loss
    for wanted, ranks in zip(scheduling.plain, scheduling.plain_ranks):
        for provider in providers(wanted, candidate):
            if provider in ranks:
                one = ranks[provider]
                suspects += one.suspects
                liking += one.liking
                cleanings += one.cleanings
                loss += one.loss
                asked += one.asked
                over += one.over
                host_over += one.host_over
    nodes, roots = places(scheduling, candidate)
    return schedulings.Rank(
        scheduling.is_taken(candidate), stuck, suspects, programmings, choice,
        liking, cleanings, len(nodes), len(roots), loss, asked, over, host_over)


def places(scheduling: schedulings.Scheduling,
           candidate: schedulings.Candidate) -> tuple[set[str], set[str]]:
    """Return the NUMA nodes and the PCI root complexes of a candidate.

    Those that its providers show; a pool whose devices differ shows none, and
    the compute host chooses devices that are close.

    :returns: as traits; both empty where that does not matter.
    """
    if not scheduling.compares_places:
        return set(), set()
    return shown_places(scheduling, candidate)


def shown_places(scheduling: schedulings.Scheduling,
                 candidate: schedulings.Candidate,
                 ) -> tuple[set[str], set[str]]:
    """As places(), also where candidates are not compared by them."""
    nodes: set[str] = set()
    roots: set[str] = set()
    for wanted in scheduling.requests:
        for provider in providers(wanted, candidate):
            node, root = scheduling.place(provider)
            if node:
                nodes.add(node)
            if root:
                roots.add(root)
    return nodes, roots


def may_satisfy(scheduling: schedulings.Scheduling,
                candidate: schedulings.Candidate) -> bool:
    """Whether the devices of a candidate may be where the server needs them;
    False where its providers show that they are not."""
    nodes, roots = places(scheduling, candidate)
    wanted = scheduling.affinity
    return ((wanted.nodes is None or len(nodes) <= wanted.nodes)
            and (not wanted.one_root or len(roots) <= 1))


def fewest_places(scheduling: schedulings.Scheduling,
                  candidates: Iterable[schedulings.Candidate]) -> str:
    """Name the nodes and roots of the candidate that has the fewest.

    :param candidates: of one host, at least one.
    """
    nodes, roots = min(
        (shown_places(scheduling, c) for c in candidates),
        key=lambda found: (len(found[0]), len(found[1])))
    return ', '.join(sorted(nodes | roots))


#: Score of a usable host. A loaded function adds about as much again. At the
#: default multiplier either exceeds the sum of RAM, disk, CPU and hypervisor
#: weights (1 each).
_USABLE = 0.45
#: the part of a group's score for losing nothing. At the default multiplier
#: about that of one of Nova's weights
_KEEPING = 0.2
#: the most that is taken off a group's score because its region carries a
#: later one of the functions that will do, or its device has a later one of
#: the preferred traits; the second costs half of it, at the default multiplier
#: about as much as one of Nova's weights
_LATER = 0.4
#: the most that is taken off, for each accelerator group, because the devices
#: are apart; two groups on two NUMA nodes cost half of it, about half of one
#: of Nova's weights. The four together are less than 1, which a programming
#: is worth
_APART = 0.3
#: what is taken off, for each accelerator group, because its region is being
#: cleaned, for which a build waits
_CLEANING = 0.05
#: the part of its score that a host keeps whose devices are not well: less than
#: the least of the others
_OF_SUSPECTS = 0.25
#: scores of servers without a function go from 1 to this one: they say which
#: of many hosts is the fullest, against Nova's weights, which spread
MOST = 1000.0
#: of each preferred trait that a device lacks and that comes before what it
#: has: more than all that follows, in hosts of up to a hundred devices
_LIKED = 100.0
#: the score of one device more that is free. At the default multiplier it
#: exceeds the sum of RAM, disk, CPU and I/O weights (1 each)
_ONE_FREE = 0.5
#: and of one more that is free in the same pool, of hosts that are as full
_ONE_OF_POOL = 0.02
#: the most that each group is worth by what is lost, by what others ask for,
#: and by being apart; all of these come before what is free
_PREFERRED = 10.0


def score(scheduling: schedulings.Scheduling, best: schedulings.Rank) -> float:
    """Return a host's score; a better rank gives a better score.

    What a rank compares one after the other once the programmings are alike
    is added up here: the function's place in the list, how far apart the
    devices are, and what is lost.

    :param best: the rank of the host's first candidate.
    :returns: 0 (no candidate can be used) to 1 (every wanted function, the
        first of those that will do, is loaded, and all devices are close);
        to MOST for a server without a function (nothing is lost, and the host
        has nothing else that is free).
    """
    groups = len(scheduling.wishes)
    if best.taken or best.stuck or not scheduling.requests:
        return 0.0
    # of pools that show no node the host chooses, and may find one
    apart = 1 - 1 / (max(1, best.nodes) + max(0, best.roots - 1) / 10)
    if not groups:
        found = _score_without_function(scheduling, best, apart)
        return found / MOST if best.suspects else found
    carried: float = groups - best.programmings
    if best.programmings:
        carried += _KEEPING * (1 - min(1.0, best.loss / best.programmings))
    carried -= _LATER * (1 - 1 / (1 + best.choice + best.liking))
    part = carried / groups
    found = _USABLE + (1 - _USABLE) * (
        part - (_APART * apart + _CLEANING * best.cleanings)
        / len(scheduling.requests))
    return _OF_SUSPECTS * found if best.suspects else found


def _score_without_function(scheduling, best, apart):
    cost = _LIKED * best.liking / len(scheduling.plain) + _PREFERRED * (
        apart + (best.cleanings + best.loss + best.asked)
        / len(scheduling.plain))
    if scheduling.packs_hosts:
        cost += _ONE_FREE * best.host_over + _ONE_OF_POOL * best.over
    return max(1.0, MOST - cost)


def score_without_accelerators(free: int) -> float:
    """Return the score of a host for a server that wants no accelerators.

    :param free: accelerators of the host.
    :returns: MOST where none is free.
    """
    return max(1.0, MOST - _ONE_FREE * free)
