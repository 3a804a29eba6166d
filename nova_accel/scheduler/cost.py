# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The cost of an allocation candidate: how badly its devices suit a server.

The filter sorts the candidates of each host by cost. Nova claims the first
candidate, whose negative cost is the weight of the host. Hence a host with one
more candidate never weighs less.

The unit is that of Nova's weights: RAM, CPU, disk, I/O and hypervisor version
weigh 1 each at most, and Nova multiplies a cost by [accel] weight_multiplier,
10 by default. Each drawback of a device adds its price, shared by the request
groups of the server:

    groups 1 (function A) and 2 (function B), a free region with A on node 0,
    an empty region on node 1:  (0 + .44) / 2 + .16 * 1/2 / 2 = .26
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
import typing

from nova_accel import demand as demands
from nova_accel import naming
from nova_accel import request
from nova_accel.scheduler import facts

#: price of a device that was allocated since Placement offered it
TAKEN = 10_000_000.0
#: price of a region that carries another function and must not be programmed
UNUSABLE = 100_000.0
#: price of an unhealthy device
SUSPECT = 5_000.0
#: price of a host, for each domain that servers fill before its own
NEAR = 2_000.0


class Prices(typing.NamedTuple):
    """The prices of a device's drawbacks, the worst drawback first."""

    #: its region must be programmed
    programming: float
    #: its function or preferred trait comes later in the flavor's list: number
    #: of those before it -> cost
    later: Callable[[int], float]
    #: the devices are on several NUMA nodes: half of it for two nodes
    apart: float
    #: a build waits until it is cleaned
    cleaning: float
    #: programming overwrites a function, and other flavors ask for the
    #: device's traits; each is multiplied by 0 to 1
    loss: float
    #: each surplus device of the host, and of the pool: free devices if
    #: servers are stacked, used ones if they are spread. Not shared by the
    #: groups
    of_host: float = 0.0
    of_pool: float = 0.0


#: for servers that request functions only. The prices are comparable with
#: Nova's weights, which spread the load: a programming counts more than four
#: weights, the second of two functions and the usual loss about one and a
#: half, and two nodes less than a half
FUNCTIONS = Prices(
    programming=.44, later=lambda n: .2 * n / (1 + n), apart=.16, cleaning=.03,
    loss=.11)
#: for servers that request a device without a function: more than Nova's
#: weights, otherwise hosts would not stay empty. A preferred trait counts more
#: than the free devices of a host, up to a hundred
DEVICES = Prices(
    programming=1000.0, later=lambda n: 100.0 * n, apart=20.0, cleaning=10.0,
    loss=10.0, of_host=.5, of_pool=.02)


class Costs:
    """The costs of candidates, valid until a server of the request gets a
    candidate.

    :param requests: the groups of one server, at least one.
    :param demand: demand for functions.
    :param named: demand for the traits that flavors require of devices without
        a function.
    :param compares_places: whether NUMA nodes and PCI root complexes count.
    :param packing: 'stack' to prefer fuller hosts, 'spread' to prefer emptier
        ones; None if the free accelerators of a host do not count.
    """

    def __init__(self, requests: Sequence[request.AcceleratorRequest],
                 known: facts.Facts, demand: demands.Demand,
                 named: demands.Demand, *,
                 compares_places: bool, packing: str | None):
        self._requests = requests
        self._facts = known
        self._demand, self._named = demand, named
        self._compares_places = compares_places
        self._packing = packing
        programs = [wanted.programs for wanted in requests]
        self._prices = FUNCTIONS if all(programs) else DEVICES
        # a region that is missing in the answer is programmed without a loss
        unknown = _exact(self._prices.programming / len(requests))
        #: for each group: provider -> cost, and the cost of any other one
        self._groups = [(wanted, self._of_providers(wanted),
                         unknown if wanted.programs else 0.0)
                        for wanted in requests]

    def function(self) -> Callable[[facts.Candidate], float]:
        [wanted, costs, unknown], *others = self._groups
        if wanted.group and not others and not self._facts.has_taken:
            # there are thousands of candidates, most of them of one group
            return functools.partial(_of_one, wanted.group, costs, unknown)
        return self._of_several

    def _of_several(self, candidate):
        cost = TAKEN if self._facts.is_taken(candidate) else 0.0
        for wanted, costs, unknown in self._groups:
            for provider in facts.providers(wanted, candidate):
                cost += costs.get(provider, unknown)
        if self._compares_places:
            cost += self._of_places(*self._facts.places(candidate))
        return cost

    def _of_places(self, nodes, roots):
        # a pool without a node: its host chooses devices, possibly on one node
        spread = max(1, len(nodes)) + max(0, len(roots) - 1) / 10
        return _exact(
            self._prices.apart * (1 - 1 / spread) / len(self._requests))

    def _of_providers(self, wanted) -> Mapping[str, float]:
        kinds = self._facts.kinds(wanted.resource_class)
        losses = _losses(self._demand, {
            kind: len(providers) for kind, providers in kinds.items()})
        if not wanted.programs:
            for kind, asked in _asked(self._named, wanted, kinds).items():
                losses[kind] += asked
        functions = wanted.wanted_traits
        costs: dict[str, float] = {}
        for kind, providers in kinds.items():
            costs.update(dict.fromkeys(providers, self._of_kind(
                wanted, functions, kind, losses[kind])))
        if self._packing and not wanted.programs:
            self._add_packing(costs, kinds)
        return costs

    def _of_kind(self, wanted, functions, kind, loss):
        traits = kind.traits.split(',')
        prices = self._prices
        later = _place(wanted.prefer, traits)
        fixed, shared = SUSPECT * (naming.SUSPECT in traits), 0.0
        if wanted.programs:
            loaded = _place(functions, traits)
            if loaded < len(functions):
                later += loaded
                loss = 0.0
            else:
                shared = prices.programming
                # a server uses it, or will soon
                if kind.used or naming.PROGRAMMABLE not in traits:
                    fixed += UNUSABLE
        shared += (prices.later(later) + prices.loss * loss
                   + prices.cleaning * (naming.CLEANING in traits))
        return fixed + _exact(shared / len(self._requests))

    def _add_packing(self, costs, kinds):
        # host -> surplus devices
        of_hosts: collections.Counter[str] = collections.Counter()
        for kind, providers in kinds.items():
            for provider in providers:
                of_hosts[self._facts.root(provider)] += self._over(kind)
        for kind, providers in kinds.items():
            for provider in providers:
                costs[provider] += _exact(
                    self._prices.of_host * of_hosts[self._facts.root(provider)]
                    + self._prices.of_pool * self._over(kind))

    def _over(self, kind):
        return (kind.capacity - kind.used if self._packing == 'stack'
                else kind.used)


def without_accelerators(free: int) -> float:
    """Return the cost of a host for a server that wants no accelerators.

    :param free: number of free accelerators of the host.
    """
    return DEVICES.of_host * free


def _of_one(group, costs, unknown, candidate):
    for provider in candidate['mappings'].get(group, ()):
        return costs.get(provider, unknown)
    return unknown


def _exact(cost):
    """Round a cost so that sums of equal costs are equal in any order:
    floating-point numbers that are multiples of a power of two are added
    exactly."""
    return round(cost * 2 ** 20) / 2 ** 20


def _place(wanted, traits):
    """Return the position, in the list of wanted traits, of the first trait
    that a device has. If it has none, return the number of wanted traits."""
    return next((number for number, trait in enumerate(wanted)
                 if trait in traits), len(wanted))


def _losses(demand, kinds):
    """Return what is lost if a region is overwritten: kind -> 0 to 1.

    The loss is x / (x + mean). x is the demand for the function of the region,
    divided among the idle copies of the function. mean is the average x of all
    idle regions. Hence 0.5 is a usual loss. A region that carries nothing
    loses nothing.

    :param kinds: kind -> number of providers.
    """
    contents = {
        kind: tuple(filter(naming.is_content, kind.traits.split(',')))
        for kind in kinds if kind.used < kind.capacity}
    regions: collections.Counter[tuple[str, ...]] = collections.Counter()
    for kind, content in contents.items():
        regions[content] += kinds[kind]
    # no content, no loss
    del regions[()]
    losses = demand.losses(regions, demands.copies(regions))
    mean = (sum(losses[content] * regions[content] for content in losses)
            / max(1, sum(regions.values())))
    return {kind: losses[content] / (losses[content] + mean) if content
            else 0.0 for kind in kinds
            for content in [contents.get(kind)]}


def _asked(named, wanted, kinds):
    """Return how much other flavors request the traits of each kind, 0 to 1.

    Traits that this flavor requires, or that all kinds have, do not count.
    """
    traits = {kind: set(kind.traits.split(',')) - wanted.required
              for kind in kinds}
    counts = named.counts(set().union(*traits.values()))
    sums = {kind: sum(counts[trait] for trait in found)
            for kind, found in traits.items()}
    least = min(sums.values(), default=0)
    most = max(sums.values(), default=0) - least
    return {kind: (found - least) / most if most else 0.0
            for kind, found in sums.items()}
