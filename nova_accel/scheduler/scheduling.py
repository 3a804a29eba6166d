# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the state of requests while nova-scheduler schedules them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import enum
import functools
import typing
import weakref

from nova_accel import conf
from nova_accel import demand as demands
from nova_accel import exception
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import near
from nova_accel import request
from nova_accel.scheduler import cost
from nova_accel.scheduler import facts

CONF = conf.CONF
LOG = logging.getLogger(__name__)
_ONCE = logging.Once()
#: maximum number of times that a request is scheduled once more
_RETRIES = 3


class Refusal(enum.Enum):
    """The reason why AcceleratorFilter dropped all hosts with accelerators."""

    #: nova-compute of each host runs another driver
    DRIVER = 'driver'
    #: the devices of each host violate the flavor's demand on places
    PLACES = 'places'
    #: the guest does not fit on the NUMA nodes of the devices of any host, as
    #: the flavor demands
    GUEST = 'guest'
    #: the hosts are not as near to each other as the flavor demands
    NEAR = 'near'


@dataclasses.dataclass(frozen=True)
class Expected:
    """The facts about a request that are not in Placement's answer."""

    #: number of servers that are scheduled together
    servers: int = 1
    #: domains of the hosts of the other members of the server group; None if
    #: they could not be read
    members: tuple[near.Domains, ...] | None = ()
    #: of required levels, for which alone Placement is asked
    only: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: names of the hosts of these members
    hosts: tuple[str, ...] = ()
    #: how often other requests got the chosen room first
    retries: int = 0


def names_host(spec) -> bool:
    """Return whether an operator has named the host of a server."""
    destination = ('requested_destination' in spec
                   and spec.requested_destination)
    return any(name in spec and getattr(spec, name)
               for name in ('force_hosts', 'force_nodes')) or bool(
        destination and 'host' in destination and destination.host)


class Scheduling:
    """The demands of a request and the facts for it, used by one thread.

    :param spec: nova.objects.RequestSpec.
    :param summaries: not modified.
    :param demand: counts the functions that flavors require.
    :param get: callable (url, version), SchedulerReportClient.get of Nova.
    :param named: counts the traits that flavors require of devices without a
        function; None is an empty count.
    """

    def __init__(self, spec, summaries: Mapping[str, facts.Summary],
                 demand: demands.Demand, get: Callable[[str, str], typing.Any],
                 named: demands.Demand | None = None,
                 expected: Expected | None = None):
        self.requests = _requests(spec)
        self.facts = facts.Facts(self.requests, summaries, get)
        self._demand = demand
        self._named = named or demands.Demand()
        #: the place that all accelerators of the server must share
        self.affinity = (request.affinity(spec.flavor.extra_specs)
                         if self.requests else request.Affinity())
        #: whether candidates are compared by the places of their devices.
        #: Devices of one group are of one provider, and the host chooses them
        self.compares_places = len(self.requests) > 1 and (
            self.affinity.close or self.affinity.is_strict)
        packing = self.affinity.packing or CONF.accel.packing
        self.group = spec.instance_group if 'instance_group' in spec else None
        #: 'stack' or 'spread'. None if the server group has a soft policy: the
        #: tenant's wish, which has one of Nova's weights, takes precedence
        self.packing = None if self.group and (
            self.group.policy or '').startswith('soft-') else packing
        #: host UUID -> (servers on it, candidates in the order of the filter),
        #: for requests for several servers
        self.left: dict[str, tuple[int, list[facts.Candidate]]] = {}
        #: None if hosts are left, or another filter dropped them
        self.refused: Refusal | None = None
        #: UUIDs of servers whose demand was added
        self.counted: set[str] = set()
        self.expected = expected or Expected()
        #: the domains whose hosts all servers of the request get; None until
        #: the first server is scheduled
        self.near: near.Choice | None = None
        #: HostState objects of Nova from which near was chosen
        self.hosts: Sequence[typing.Any] = ()
        #: domains whose hosts are all known, although Placement's answer was
        #: cut off
        self.whole: set[str] = set()
        #: the hosts of such domains with room for all servers: UUID -> summary.
        #: Nova filters and weighs them only. None: all hosts of the answer
        self.part: dict[str, facts.Summary] | None = None

    def choose_near(self, free: Mapping[str, int]) -> near.Choice:
        """Choose domains of hosts, once for all servers of the request.

        :param free: UUID of a host -> servers that fit on it.
        """
        members = self.expected.members
        if members is None and not any(
                level.required for level in self.affinity.levels):
            members = ()
        if members is None:
            self.near = near.Choice({}, 'the hosts of the other members of the '
                                        'server group could not be read')
            return self.near
        domains = self.facts.domains(free)
        unreported = near.unreported(self.affinity.levels, domains.values())
        if unreported and self.part is not None:
            unreported = near.unreported(
                self.affinity.levels,
                self.facts.domains(self.facts.hosts()).values())
        for level in self.affinity.levels if free else ():
            if level in unreported:
                _ONCE.log(('near', level), LOG.warning,
                          '%s: set [accel] near of nova-compute there, or '
                          'correct the flavor.', unreported[level])
            else:
                _ONCE.forget('near', level)
        servers = self.expected.servers
        # first domains whose hosts are all known
        whole = {host: count for host, count in free.items()
                 if self.whole.intersection(domains[host].values())}
        for known in whole, free:
            fits = sum(known.values()) >= servers
            # if part does not suffice, Nova gets all hosts; see widen()
            if known and (fits or known is free and self.part is None):
                self.near = near.choose(
                    self.affinity.levels, servers, known,
                    domains, members, fullest=not self.expected.retries)
                if not self.near.refusal:
                    break
        if self.part is not None and self.near and self.near.refusal:
            self.near = None
        return self.near or near.Choice({})

    def fitting(self, candidates: Sequence[facts.Candidate],
                members: int = 0) -> int:
        """Return how many servers of the request fit on a host. The policy of
        the server group (affinity or anti-affinity) limits the number.

        :param candidates: the candidates of the host.
        :param members: number of members of the server group on the host.
        """
        if any(wanted.programs for wanted in self.requests):
            price = self.cost
            candidates = [candidate for candidate in candidates
                          if price(candidate) < cost.UNUSABLE]
        fits = self.facts.servers(candidates)
        policy = self.group.policy if self.group else None
        if self.group and policy == 'anti-affinity':
            # as ServerGroupAntiAffinityFilter has it
            most = int((self.group.rules or {}).get('max_server_per_host', 1))
            return max(0, min(fits, most - members))
        # with affinity, all on one host
        return 0 if policy == 'affinity' and (
            fits < self.expected.servers) else fits

    def count(self, server: str) -> None:
        """Add the demand of a server to the demand for functions and traits.

        Counts each server once, because Nova filters the hosts again to choose
        alternates.
        """
        if server not in self.counted:
            self.counted.add(server)
            for wanted in self.requests:
                if wanted.programs:
                    self._demand.add(wanted.wanted_traits)
                else:
                    self._named.add(wanted.required)

    @functools.cached_property
    def cost(self) -> Callable[[facts.Candidate], float]:
        """Return the function that computes the cost of a candidate.

        Read it again after take() and refresh().
        """
        if not self.requests:
            return lambda candidate: 0.0
        return cost.Costs(
            self.requests, self.facts, self._demand, self._named,
            compares_places=self.compares_places,
            packing=self.packing).function()

    def take(self, candidate: facts.Candidate) -> None:
        """Note that a server of this request got a candidate."""
        self.facts.take(candidate)
        self.forget_costs()

    def refresh(self, root: str) -> None:
        """Ask Placement again for the providers of one host.

        :param root: UUID of the host's root provider.
        """
        self.facts.refresh(root)
        self.forget_costs()

    def forget_costs(self) -> None:
        """Drop computed costs, because the summaries have changed."""
        self.__dict__.pop('cost', None)

    def may_satisfy(self, candidate: facts.Candidate) -> bool:
        """Return whether the devices of a candidate may be in the demanded
        place. Return False only if the providers of the candidate show
        otherwise."""
        if not self.compares_places:
            return True
        nodes, roots = self.facts.places(candidate)
        wanted = self.affinity
        return ((wanted.nodes is None or len(nodes) <= wanted.nodes)
                and (not wanted.one_root or len(roots) <= 1))

    def fewest_places(self, candidates: Iterable[facts.Candidate]) -> str:
        """Return the names of the NUMA nodes and PCI root complexes of the
        candidate with the fewest of them, for a log line.

        :param candidates: the candidates of one host, at least one.
        """
        nodes, roots = min(
            map(self.facts.places, candidates),
            key=lambda found: (len(found[0]), len(found[1])))
        return ', '.join(sorted(nodes | roots))


class Schedulings:
    """The schedulings in progress, for all threads of a scheduler.

    :param get: see Scheduling.
    """

    def __init__(self, get: Callable[[str, str], typing.Any]):
        self._get = get
        self._lock = locks.Lock('scheduling')
        self._demand = demands.Demand()
        self._named = demands.Demand()
        self._expected: weakref.WeakKeyDictionary[
            typing.Any, Expected] = weakref.WeakKeyDictionary()
        #: RequestSpec -> Scheduling; Nova makes one for each request, and
        #: passes the same object for each server of a multi-create
        self._begun: weakref.WeakKeyDictionary[
            typing.Any, Scheduling | None] = weakref.WeakKeyDictionary()

    def expect(self, spec, expected: Expected) -> None:
        """Note facts about a request before begin()."""
        with self._lock:
            self._expected[spec] = expected

    def retry(self, spec) -> bool:
        """Return whether to schedule a request once more that found no host.
        This is the case if other requests took the room in its chosen domain,
        and Nova may not use other domains, or did not get their hosts.
        """
        begun = self._begun.get(spec)
        if (begun is None or begun.near is None or begun.near.refusal
                or begun.part is None and not any(
                    level.required for level in begun.affinity.levels)
                or begun.expected.retries >= _RETRIES):
            return False
        LOG.info('Other requests took the room that was chosen for server %s '
                 'and servers requested with it: other room is chosen.',
                 spec.instance_uuid)
        if 'instance_group' in spec and spec.instance_group:
            # Nova has added hosts that it chose for servers of this request,
            # and these servers to the instances of the hosts
            spec.instance_group.hosts = list(begun.expected.hosts)
            spec.instance_group.obj_reset_changes(['hosts'])
            # one server is on a host already if it moves
            if begun.expected.servers > 1:
                for host in begun.hosts:
                    for server in begun.counted:
                        host.instances.pop(server, None)
        self.expect(spec, dataclasses.replace(
            begun.expected, retries=begun.expected.retries + 1))
        with self._lock:
            # Nova may find no host before it begins
            self._begun.pop(spec, None)
        return True

    def widen(self, spec) -> bool:
        """Return whether to pass all hosts of Placement's answer to Nova,
        because other filters dropped too many hosts of Scheduling.part. No
        server of the request has a host yet.
        """
        begun = self._begun.get(spec)
        if begun is None or begun.part is None or begun.near is not None:
            return False
        begun.part = begun.refused = None
        return True

    def begin(self, spec, summaries: Mapping[str, facts.Summary] | None,
              ) -> Scheduling:
        """Begin a scheduling with the answer of Placement.

        :param spec: nova.objects.RequestSpec.
        :param summaries: None without an answer, as for a rebuild.
        """
        # of() does not retry after an error here
        self.give_up(spec)
        begun = Scheduling(spec, summaries or {}, self._demand, self._get,
                           self._named, self._expected.get(spec))
        with self._lock:
            self._begun[spec] = begun
        return begun

    def give_up(self, spec) -> None:
        """From now on, treat a request as one without accelerators.

        For use after an error of nova_accel was caught.
        """
        with self._lock:
            self._begun[spec] = None

    def end(self, spec) -> None:
        """Forget a request. Otherwise Placement's answer would stay in memory
        until Python collects cycles, because Nova's object refers to itself.
        """
        with self._lock:
            self._begun.pop(spec, None)
            self._expected.pop(spec, None)

    def of(self, spec) -> Scheduling | None:
        """Return the scheduling of a request, or None after give_up(). If Nova
        did not begin the scheduling, it has no facts."""
        # without the lock: once for each host, and a look-up is atomic
        try:
            return self._begun[spec]
        except KeyError:
            return self.begin(spec, None)


def _requests(spec) -> list[request.AcceleratorRequest]:
    if 'extra_specs' not in spec.flavor:
        # not loaded: Nova treats such a flavor like one without extra specs
        return []
    try:
        return request.parse(spec.flavor.extra_specs)
    except exception.AcceleratorError as error:
        # nova-api refuses such flavors, so this one bypassed it; the compute
        # host reports the same error to the user
        LOG.warning('The accelerators of the flavor are ignored in '
                    'scheduling: %s', error)
        return []
