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


# What a host costs. Nova multiplies that by [accel] weight_multiplier, and its
# own weights of RAM, CPU, disk, I/O and hypervisor version are 1 each at most

#: of a host whose first candidate cannot be had, and of one whose devices are
#: not well: more than all that follows
_UNUSABLE, _SUSPECT = 10000.0, 5000.0
#: of all regions to be programmed, where a server wants nothing but functions.
#: At the default multiplier it exceeds the sum of Nova's weights
_FUNCTIONS = 0.55
#: the part of that for what programming loses. At the default multiplier
#: about as much as one of Nova's weights
_LOSING = 0.2
#: the most, of the same, because a region carries a later one of the functions
#: that will do, or its device has a later one of the preferred traits; the
#: second costs half of it, at the default multiplier about as much as one of
#: Nova's weights
_LATER = 0.4
#: the most, of the same, because the devices are apart; two groups on two NUMA
#: nodes cost half of it, about half of one of Nova's weights. The four together
#: are less than 1, which a programming is worth
_APART = 0.3
#: of the same, for each region that is being cleaned, for which a build waits
_CLEANING = 0.05
#: of all regions to be programmed, where a server wants devices without a
#: function, too: more than all that follows
_PROGRAMMED = 1000.0
#: of each trait, or function, that comes before what a device has: more than
#: all that follows, in hosts of up to a hundred devices
_LIKED = 100.0
#: the most that each group costs by what is lost, by what others ask for, and
#: by being apart or cleaned; all of these come before what is free
_PREFERRED = 10.0
#: of one device more that is free. At the default multiplier it exceeds the sum
#: of RAM, disk, CPU and I/O weights
_ONE_FREE = 0.5
#: and of one more that is free in the same pool, of hosts that are as full
_ONE_OF_POOL = 0.02


def score(scheduling: schedulings.Scheduling, best: schedulings.Rank) -> float:
    """Return a host's score; a better rank gives a better score.

    What a rank compares one after the other is added up here.

    :param best: the rank of the host's first candidate.
    :returns: 0 at best, and less for all that speaks against the host. So the
        multiplier of an aggregate makes none of its hosts better.
    """
    if not scheduling.requests:
        return 0.0
    if best.taken or best.stuck:
        return -_UNUSABLE
    # of pools that show no node the host chooses, and may find one
    apart = 1 - 1 / (max(1, best.nodes) + max(0, best.roots - 1) / 10)
    cost = _of_devices if scheduling.plain else _of_functions
    # -cost would be -0.0 at best
    return 0.0 - cost(scheduling, best, apart) - _SUSPECT * bool(best.suspects)


def _of_functions(scheduling, best, apart):
    """Return the cost for a server that wants nothing but functions.

    It is comparable with Nova's weights, which spread the load of hosts.
    """
    lost = (best.programmings * (1 - _LOSING)
            + _LOSING * min(best.loss, best.programmings))
    later = _LATER * (1 - 1 / (1 + best.choice + best.liking))
    return _FUNCTIONS * (lost + later + _APART * apart
                         + _CLEANING * best.cleanings) / len(scheduling.wishes)


def _of_devices(scheduling, best, apart):
    """Return the cost for a server that wants devices without a function, and
    maybe functions too.

    It is more than Nova's weights: else whole hosts would not stay whole.
    """
    groups = len(scheduling.requests)
    cost = (_LIKED * (best.choice + best.liking) / groups
            + _PREFERRED * (apart + (best.cleanings + best.loss
                                     + best.asked) / groups))
    if scheduling.wishes:
        cost += _PROGRAMMED * best.programmings / len(scheduling.wishes)
    if scheduling.packs_hosts:
        cost += _ONE_FREE * best.host_over + _ONE_OF_POOL * best.over
    return cost


def score_without_accelerators(free: int) -> float:
    """Return the score of a host for a server that wants no accelerators.

    :param free: accelerators of the host.
    """
    return 0.0 - _ONE_FREE * free
