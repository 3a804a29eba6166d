# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is known while the servers of one request are scheduled.

The facts come from the provider summaries of Placement's answer (GET
/allocation_candidates, 1.29 and later: all providers of each tree in which
there is a candidate): {provider: {'resources': {class: {'capacity': amount,
'used': amount}}, 'traits': [trait]}}. Nova asks for that answer anyway.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
import copy
import enum
import functools
import itertools
import typing
import weakref

from nova_accel import conf
from nova_accel import demand as demands
from nova_accel import exception
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import naming
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

Summary = Mapping[str, typing.Any]
#: an allocation request of Placement, 1.34 and later: {'allocations':
#: {provider: {'resources': {class: amount}}}, 'mappings': {group suffix:
#: [provider]}}. The unnumbered group has the suffix ''
Candidate = dict[str, typing.Any]

#: what a ranking sees of a provider: its traits, and of the wanted class its
#: capacity and what is used. Most regions are of a kind with many others, and
#: one text of all traits is quicker to hash than each of them
_Kind = tuple[str, int, int]

# in_tree of allocation candidates
_CANDIDATES_VERSION = '1.31'


class Listed(list[Candidate]):
    """Candidates of one provider, which Nova copies for each host.

    copy.deepcopy asks each object how it is copied and whether it was met
    before; it takes longer than all else that nova_accel does for a scheduling.
    A copy of this list shares nothing with it, and is a plain list.
    """

    def __deepcopy__(self, memo):
        try:
            return list(map(_copied, self))
        # Nova copies those of servers without accelerators, too
        except Exception:
            LOG.exception('Candidates are copied as Nova does it: report this '
                          'error to nova_accel.')
            return copy.deepcopy([*self], memo)


def _copied(candidate):
    # loops: each comprehension is a call of a function (Python 3.11)
    new = candidate.copy()
    new['allocations'] = allocations = {}
    for provider, given in candidate['allocations'].items():
        allocations[provider] = one = given.copy()
        one['resources'] = given['resources'].copy()
    new['mappings'] = mappings = {}
    for group, mapped in candidate['mappings'].items():
        mappings[group] = mapped.copy()
    return new


class Refusal(enum.Enum):
    """Why AcceleratorFilter left no host of those that have accelerators."""

    #: their nova-computes run another driver
    DRIVER = 'driver'
    #: their devices are not where the flavor demands
    PLACES = 'places'
    #: the guest does not fit where their devices are, as the flavor demands
    GUEST = 'guest'


class Wish(typing.NamedTuple):
    """What a request group wants to find on its provider."""

    group: str
    resource_class: str
    #: a region with one of them needs no programming; in the order of
    #: preference, one for each function that will do
    traits: tuple[str, ...]
    #: of devices that do better, the best one first
    prefer: tuple[str, ...] = ()


class Rank(typing.NamedTuple):
    """The rank of a candidate; less is better, compared field by field."""

    #: whether a device was allocated since Placement offered it
    taken: bool
    #: groups whose region carries another function and must not be programmed
    stuck: int
    #: groups whose device is not well
    suspects: int
    #: groups whose region has to be programmed
    programmings: int
    #: how many functions the flavor names before those that the regions carry
    choice: int = 0
    #: how many traits it prefers to those that the devices have
    liking: int = 0
    #: groups whose region is being cleaned, for which a build waits
    cleanings: int = 0
    #: NUMA nodes, and PCI root complexes, that the devices are known to be
    #: on; 0 where the server does not care, or has one group
    nodes: int = 0
    roots: int = 0
    #: what programming would lose, 0 to 1 for each of these groups, and for
    #: each group without a function, whose server may change its region
    loss: float = 0.0
    #: how much others ask for what only this product has, 0 to 1 for each
    #: group without a function
    asked: float = 0.0
    #: of the groups without a function: how many devices the provider and,
    #: between hosts only, the host have too many: free ones where servers are
    #: stacked, used ones where they are spread
    over: int = 0
    host_over: int = 0


#: of a region of which nothing is known: it is programmed and loses nothing
UNKNOWN_REGION = Rank(False, 0, 0, 1)


class Scheduling:
    """The facts for one request, used by one thread.

    :param spec: nova.objects.RequestSpec.
    :param summaries: not modified.
    :param demand: that of this scheduler.
    :param get: callable (url, version), SchedulerReportClient.get of Nova.
    :param named: for the traits that flavors name of devices without a
        function; None counts none.
    """

    def __init__(self, spec, summaries: Mapping[str, Summary],
                 demand: demands.Demand, get: Callable[[str, str], typing.Any],
                 named: demands.Demand | None = None):
        self.requests = _requests(spec)
        self.wishes = [
            Wish(r.group, r.resource_class, tuple(r.wanted_traits), r.prefer)
            for r in self.requests if r.programs]
        #: the groups without a function
        self.plain = [r for r in self.requests if not r.programs]
        #: where all accelerators of the server must be
        self.affinity = (request.affinity(spec.flavor.extra_specs)
                         if self.requests else request.Affinity())
        #: whether candidates are compared by where their devices are. Those
        #: of one group are of one provider: which of them, its host chooses
        self.compares_places = len(self.requests) > 1 and (
            self.affinity.close or self.affinity.is_strict)
        #: whether the rank of a candidate is that of one provider: as long as
        #: nothing is known to be taken since Placement's answer
        self.is_of_one_provider = (
            len(self.requests) == len(self.wishes) == 1)
        self.packing = self.affinity.packing or CONF.accel.packing
        #: whether that counts between hosts: a tenant's own wish, which has
        #: the weight of one of Nova's, counts more
        group = spec.instance_group if 'instance_group' in spec else None
        self.packs_hosts = group is None or not (group.policy or '').startswith(
            'soft-')
        self._places: dict[str, tuple[str | None, str | None]] = {}
        #: host UUID -> (servers on it, candidates in the order that we left),
        #: of requests for several servers
        self.left: dict[str, tuple[int, list[Candidate]]] = {}
        #: None where hosts are left, or another filter dropped them
        self.refused: Refusal | None = None
        self._classes = {r.resource_class for r in self.requests}
        #: with what servers of this request got since Placement's answer
        self._summaries = summaries
        self._demand = demand
        self._named = named or demands.Demand()
        self._counted: set[str] = set()
        self._get = get
        #: (provider, class) of which something was taken since that answer
        self._taken: set[tuple[str, str]] = set()
        #: provider -> traits that its region gets from servers of this request
        self._promised: dict[str, tuple[str, ...]] = {}

    def count(self, server: str) -> None:
        """Count what one server asks for, once for each server.

        Nova has its hosts filtered once more for the alternates.
        """
        if server not in self._counted:
            self._counted.add(server)
            for wish in self.wishes:
                self._demand.add(wish.traits)
            for wanted in self.plain:
                self._named.add(wanted.required)

    def place(self, provider: str) -> tuple[str | None, str | None]:
        """Return the NUMA node and the PCI root complex of a provider, as
        naming.place_of()."""
        found = self._places.get(provider)
        if found is None:
            summary = self._summaries.get(provider)
            found = self._places[provider] = naming.place_of(
                summary['traits'] if summary else ())
        return found

    def is_taken(self, candidate: Candidate) -> bool:
        """Whether a device was allocated since Placement offered it."""
        return bool(self._taken) and any(
            (provider, name) in self._taken
            and amount > self._room(provider, name)
            for provider, given in candidate['allocations'].items()
            for name, amount in given['resources'].items())

    def takes_ours(self, candidate: Candidate) -> bool:
        """Return whether a candidate takes an accelerator from nova_accel.

        Only nova_accel has custom classes of accelerators; its providers of a
        standard class have the owner trait.
        """
        return any(
            naming.is_custom(name) or CONF.accel.owner_trait
            in self._summaries.get(provider, {}).get('traits', ())
            for provider, given in candidate['allocations'].items()
            for name in naming.accelerators(given['resources']))

    def take(self, candidate: Candidate, providers: Callable[
            [Wish, Candidate], Iterable[str]]) -> None:
        """Note that a server of this request was given a candidate.

        :param providers: returns the providers of a wish in a candidate.
        """
        for wish, ranks in zip(self.wishes, self.ranks):
            for provider in providers(wish, candidate):
                if ranks.get(provider, UNKNOWN_REGION).programmings:
                    self._promised[provider] = wish.traits
        for provider, given in candidate['allocations'].items():
            for name, amount in given['resources'].items():
                if name in self._classes:
                    self._use(provider, name, amount)
        self._forget_ranks()

    def _forget_ranks(self):
        self.__dict__.pop('ranks', None)
        self.__dict__.pop('plain_ranks', None)

    def _use(self, provider, name, amount):
        summary = self._summaries.get(provider)
        if summary and name in summary['resources']:
            summary = _using(
                summary, name, summary['resources'][name]['used'] + amount)
        self._show(provider, name, summary)

    def _show(self, provider, name, summary):
        """Replace a summary of which something of a class was taken."""
        self._taken.add((provider, name))
        self.is_of_one_provider = False
        promised = self._promised.get(provider)
        if summary and promised:
            # what the region carries is going to be overwritten
            summary = {**summary, 'traits': [*promised, *itertools.filterfalse(
                naming.is_content, summary['traits'])]}
        if summary:
            # a new one: the old one may be Nova's own
            self._summaries = {**self._summaries, provider: summary}

    def refresh(self, root: str) -> None:
        """Ask Placement again for the providers of one host.

        The first of them may have been taken by another request, which the
        answer that Nova has cannot tell. Without an answer nothing changes.

        :param root: UUID of the host's root provider.
        """
        for name in sorted(self._classes):
            url = (f'/allocation_candidates?in_tree={root}'
                   f'&resources={name}:1&limit=1')
            try:
                response = self._get(url, _CANDIDATES_VERSION)
                if not response:
                    raise ConnectionError(
                        'no connection' if response in (None, False)
                        else f'HTTP {response.status_code}')
                found = response.json()['provider_summaries']
            # keystoneauth has some thirty, and none may fail a scheduling
            except Exception as error:
                LOG.warning(
                    'Placement was asked for %(url)s, to learn what another '
                    'request took, and did not answer (%(error)s): the '
                    'scheduling goes on with the answer from before.',
                    {'url': url, 'error': error})
                return
            self._update(root, name, found)
        self._forget_ranks()

    def _update(self, root, name, found):
        """Take over what Placement tells of a class in the tree of a host."""
        for provider, summary in list(self._summaries.items()):
            if (summary.get('root_provider_uuid') == root
                    and name in summary['resources']):
                # Placement sums up no tree without room
                self._show(provider, name, found.get(provider) or _using(
                    summary, name, summary['resources'][name]['capacity']))

    @functools.cached_property
    def ranks(self) -> list[dict[str, Rank]]:
        """The rank of each provider where it serves a wish, for each wish.

        The loss is the demand for what the region carries, for each idle copy
        of that, against the mean of all idle regions: x / (x + mean). Hence
        0.5 is a usual loss. A region that carries nothing loses nothing.
        Providers without the classes of the wishes have no entry.
        """
        kinds = self._kinds({wish.resource_class for wish in self.wishes})
        losses = self._losses({
            kind: len(providers) for kind, providers in kinds.items()})
        result: list[dict[str, Rank]] = []
        for wish in self.wishes:
            result.append({})
            for kind, providers in kinds.items():
                result[-1].update(dict.fromkeys(
                    providers, self._rank(wish, kind, losses[kind])))
        return result

    def _kinds(self, names) -> dict[_Kind, list[str]]:
        kinds: dict[_Kind, list[str]] = collections.defaultdict(list)
        for name in names:
            for provider, summary in self._summaries.items():
                found = summary['resources'].get(name)
                if found:
                    kinds[','.join(summary['traits']), found['capacity'],
                          found['used']].append(provider)
        return kinds

    @functools.cached_property
    def plain_ranks(self) -> list[dict[str, Rank]]:
        """The same for each group without a function, of `plain`."""
        return list(map(self._ranks_without_function, self.plain))

    def _ranks_without_function(self, wanted):
        kinds = self._kinds({wanted.resource_class})
        losses = self._losses({
            kind: len(providers) for kind, providers in kinds.items()})
        asked = self._asked(wanted, kinds)
        over = {kind: kind[1] - kind[2] if self.packing == 'stack'
                else kind[2] for kind in kinds}
        of_hosts: collections.Counter[str] = collections.Counter()
        for kind, providers in kinds.items():
            for provider in providers:
                of_hosts[self._root(provider)] += over[kind]
        return {
            provider: Rank(
                False, 0, int(naming.SUSPECT in kind[0]), 0,
                liking=_liking(wanted, kind[0].split(',')),
                cleanings=int(naming.CLEANING in kind[0]),
                loss=losses[kind], asked=asked[kind], over=over[kind],
                host_over=of_hosts[self._root(provider)])
            for kind, providers in kinds.items() for provider in providers}

    def _root(self, provider):
        return self._summaries[provider].get('root_provider_uuid', provider)

    def _asked(self, wanted, kinds):
        """0 to 1 for each kind: the part of requests that name what it has
        and this one does not name."""
        traits = {kind: set(kind[0].split(',')) - wanted.required
                  for kind in kinds}
        counts = self._named.counts(set().union(*traits.values()))
        sums = {kind: sum(counts[trait] for trait in found)
                for kind, found in traits.items()}
        least = min(sums.values(), default=0)
        most = max(sums.values(), default=0) - least
        return {kind: (found - least) / most if most else 0.0
                for kind, found in sums.items()}

    def free_of_hosts(self) -> Mapping[str, int]:
        """Return how many accelerators of any kind are free, by the UUID of a
        root provider; hosts without a free one are not named."""
        result: dict[str, int] = {}
        # a class -> whether it is of accelerators. There are many providers,
        # most of which have no class, and few classes
        known: dict[str, bool] = {}
        for summary in self._summaries.values():
            resources = summary['resources']
            if not resources:
                continue
            for name in resources:
                if name not in known:
                    known[name] = naming.is_accelerator_class(name)
                if known[name]:
                    found = resources[name]
                    free = found['capacity'] - found['used']
                    if free:
                        root = summary.get('root_provider_uuid', '')
                        result[root] = result.get(root, 0) + free
        return result

    @staticmethod
    def _rank(wish, kind, loss):
        joined, _, used = kind
        traits = joined.split(',')
        cleanings = int(naming.CLEANING in traits)
        suspects = int(naming.SUSPECT in traits)
        liking = _liking(wish, traits)
        for choice, trait in enumerate(wish.traits):
            if trait in traits:
                return Rank(False, 0, suspects, 0, choice, liking, cleanings)
        # a server uses it, or is about to
        stuck = used or naming.PROGRAMMABLE not in traits
        return Rank(False, int(bool(stuck)), suspects, 1, liking=liking,
                    cleanings=cleanings, loss=loss)

    def _losses(self, kinds):
        """0 to 1 for each kind: 0 for those that carry nothing or are full."""
        contents = {
            (traits, capacity, used): tuple(
                filter(naming.is_content, traits.split(',')))
            for traits, capacity, used in kinds if used < capacity}
        regions: collections.Counter[tuple[str, ...]] = collections.Counter()
        for kind, content in contents.items():
            regions[content] += kinds[kind]
        # no content, no loss
        del regions[()]
        lost = self._demand.losses(regions, demands.copies(regions))
        mean = (sum(lost[content] * regions[content] for content in lost)
                / max(1, sum(regions.values())))
        return {kind: lost[content] / (lost[content] + mean) if content
                else 0.0 for kind in kinds
                for content in [contents.get(kind)]}

    def _room(self, provider, name):
        summary = self._summaries.get(provider)
        if summary is None or name not in summary['resources']:
            return 0
        found = summary['resources'][name]
        return found['capacity'] - found['used']


def _liking(wanted, traits):
    """How many of the preferred traits are better than what a device has."""
    return next((number for number, trait in enumerate(wanted.prefer)
                 if trait in traits), len(wanted.prefer))


def _using(summary, name, used):
    """A summary in which so much of a class is used."""
    resources = summary['resources']
    return {**summary, 'resources': {
        **resources, name: {**resources[name], 'used': used}}}


class Schedulings:
    """The schedulings under way, for all threads of a scheduler.

    :param get: as for Scheduling.
    """

    def __init__(self, get: Callable[[str, str], typing.Any]):
        self._get = get
        self._lock = locks.Lock('scheduling')
        self._demand = demands.Demand()
        self._named = demands.Demand()
        #: RequestSpec -> Scheduling; Nova makes one for each request, and
        #: passes the same object for each server of a multi-create
        self._begun: weakref.WeakKeyDictionary[
            typing.Any, Scheduling | None] = weakref.WeakKeyDictionary()

    def begin(self, spec, summaries: Mapping[str, Summary] | None,
              ) -> Scheduling:
        """Begin a scheduling with what Placement answered.

        :param spec: nova.objects.RequestSpec.
        :param summaries: None without an answer, as for a rebuild.
        """
        # what raises here is not tried again by of()
        self.give_up(spec)
        begun = Scheduling(spec, summaries or {}, self._demand, self._get,
                           self._named)
        with self._lock:
            self._begun[spec] = begun
        return begun

    def give_up(self, spec) -> None:
        """Schedule the rest of a request as if it wanted no accelerators.

        For use after an error of nova_accel was caught.
        """
        with self._lock:
            self._begun[spec] = None

    def end(self, spec) -> None:
        """Forget a request. Nova's refers to itself, and what Placement
        answered would stay in memory until Python looks for such objects."""
        with self._lock:
            self._begun.pop(spec, None)

    def of(self, spec) -> Scheduling | None:
        """Return the scheduling of a request; one without facts where Nova
        did not begin it, and None where an error of nova_accel was caught."""
        # without the lock: once for each host, and a look-up is atomic
        try:
            return self._begun[spec]
        except KeyError:
            return self.begin(spec, None)


def _requests(spec) -> list[request.AcceleratorRequest]:
    if 'extra_specs' not in spec.flavor:
        # not loaded: Nova treats such a flavor as one without extra specs
        return []
    try:
        return request.parse(spec.flavor.extra_specs)
    except exception.AcceleratorError as error:
        # nova-api refuses such flavors, so this one bypassed it; the compute
        # host reports the same error to the user
        LOG.warning('The accelerators of the flavor are ignored in '
                    'scheduling: %s', error)
        return []
