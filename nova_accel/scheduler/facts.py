# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the facts about providers while the servers of a request are scheduled.

The facts come from the provider summaries of Placement's answer (GET
/allocation_candidates, 1.29 and later: all providers of each tree with a
candidate): {provider: {'resources': {class: {'capacity': amount, 'used':
amount}}, 'traits': [trait]}}. Nova requests this answer in any case.
"""

import collections
from collections.abc import (
    Callable, Collection, Iterable, Mapping, Sequence)
import functools
import itertools
import typing

from nova_accel import conf
from nova_accel import log as logging
from nova_accel import naming
from nova_accel import request
from nova_accel.scheduler import candidates

CONF = conf.CONF
LOG = logging.getLogger(__name__)

Summary = Mapping[str, typing.Any]
#: an allocation request of Placement, 1.34 and later: {'allocations':
#: {provider: {'resources': {class: amount}}}, 'mappings': {group suffix:
#: [provider]}}. The unnumbered group has the suffix ''
Candidate = dict[str, typing.Any]


class Kind(typing.NamedTuple):
    """The properties of a provider on which costs depend. Most regions share
    their kind with many others."""

    #: joined, because one string is hashed faster than all traits
    traits: str
    #: of the wanted class
    capacity: int
    used: int


_NOTHING: Summary = {'resources': {}}
# in_tree of allocation candidates
_CANDIDATES_VERSION = '1.31'


def providers(wanted: request.AcceleratorRequest, candidate: Candidate,
              ) -> Iterable[str]:
    """Return the UUIDs of the providers that serve a request group.

    A group has one provider per class, because Placement takes a whole class
    of a group from one provider (granular resource requests, 1.25). For the
    unnumbered group, only the provider of the accelerators is returned.
    """
    group = wanted.group
    mapped = candidate['mappings'].get(group, ())
    if group:
        return mapped
    allocations = candidate['allocations']
    return [provider for provider in mapped
            if provider in allocations
            and wanted.resource_class in allocations[provider]['resources']]


class Facts:
    """Placement's answer, updated by later allocations to servers of the
    request.

    :param requests: the request groups of one server.
    :param summaries: not modified.
    :param get: callable (url, version), SchedulerReportClient.get of Nova.
    """

    def __init__(self, requests: list[request.AcceleratorRequest],
                 summaries: Mapping[str, Summary],
                 get: Callable[[str, str], typing.Any]):
        self._requests = requests
        self._classes = {r.resource_class for r in requests}
        self._summaries = summaries
        self._get = get
        self._places: dict[str, tuple[str | None, str | None]] = {}
        #: (provider, class) with an allocation since the answer
        self._taken: set[tuple[str, str]] = set()
        #: provider -> traits that its region gets from servers of this request
        self._promised: dict[str, list[str]] = {}

    # Providers

    def kinds(self, resource_class: str) -> dict[Kind, list[str]]:
        result: dict[Kind, list[str]] = collections.defaultdict(list)
        for provider, summary in self._summaries.items():
            found = summary['resources'].get(resource_class)
            if found:
                result[Kind(','.join(summary['traits']), found['capacity'],
                            found['used'])].append(provider)
        return result

    def root(self, provider: str) -> str:
        """Return the UUID of the root of the provider's tree, its host."""
        return self._summaries[provider].get('root_provider_uuid', provider)

    def hosts(self) -> list[str]:
        """Return the UUIDs of the root providers."""
        return [provider for provider, summary in self._summaries.items()
                if summary.get('root_provider_uuid', provider) == provider]

    def place(self, provider: str) -> tuple[str | None, str | None]:
        """Return the NUMA node and the PCI root complex of a provider; see
        naming.place_of()."""
        found = self._places.get(provider)
        if found is None:
            summary = self._summaries.get(provider)
            found = self._places[provider] = naming.place_of(
                summary['traits'] if summary else ())
        return found

    def free_of_hosts(self) -> Mapping[str, int]:
        """Return UUID of a root provider -> number of free accelerators. Hosts
        without free accelerators are omitted."""
        result: dict[str, int] = {}
        # a class -> whether it is of accelerators, cached because there are
        # many providers and few classes
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

    def domains(self, roots: Collection[str],
                ) -> dict[str, Mapping[str, str]]:
        """Return the domains of hosts: root -> level -> domain.

        Sets of traits are intersected, which takes less time than to read each
        name: hosts have many traits, few of which are domains.
        """
        shown = frozenset(filter(naming.is_near, set().union(
            *map(self._traits, roots))))
        of = functools.cache(naming.near_of)
        return {root: of(shown.intersection(self._traits(root)))
                for root in roots}

    # Candidates

    def servers(self, candidates: Sequence[Candidate]) -> int:
        """Return how many servers of the request fit on a host at most.

        :param candidates: the candidates of the host.
        """
        if not candidates:
            return 0
        if len(candidates) == 1:
            # a quicker way for most hosts with pools
            fitting = []
            for provider, given in candidates[0]['allocations'].items():
                room = self._summaries.get(provider, _NOTHING)['resources']
                for name, amount in given['resources'].items():
                    found = room.get(name)
                    fitting.append((found['capacity'] - found['used'])
                                   // amount if found else 0)
            return min(fitting)
        wanted: collections.Counter[str] = collections.Counter()
        unit: dict[str, int] = {}
        for given in candidates[0]['allocations'].values():
            for name, amount in given['resources'].items():
                wanted[name] += amount
                unit[name] = min(amount, unit.get(name, amount))
        there = {(provider, name) for candidate in candidates
                 for provider, given in candidate['allocations'].items()
                 for name in given['resources']}
        has: collections.Counter[str] = collections.Counter()
        for provider, name in there:
            # a group has all of a class from one provider
            has[name] += self._room(provider, name) // unit[name] * unit[name]
        return min(has[name] // amount for name, amount in wanted.items())

    def places(self, candidate: Candidate) -> tuple[set[str], set[str]]:
        """Return the NUMA nodes and the PCI root complexes of a candidate.

        Traits of the providers name the places. A pool with devices of several
        places has no such trait. Its compute host chooses close devices.
        """
        nodes: set[str] = set()
        roots: set[str] = set()
        for wanted in self._requests:
            for provider in providers(wanted, candidate):
                node, root = self.place(provider)
                if node:
                    nodes.add(node)
                if root:
                    roots.add(root)
        return nodes, roots

    def takes_ours(self, candidate: Candidate) -> bool:
        """Return whether a candidate has an accelerator of nova_accel.

        A custom class of accelerators is always from nova_accel. Providers of
        nova_accel with a standard class have the trait [accel] owner_trait.
        """
        return any(
            naming.is_custom(name) or CONF.accel.owner_trait
            in self._traits(provider)
            for provider, given in candidate['allocations'].items()
            for name in naming.accelerators(given['resources']))

    def _traits(self, provider):
        return self._summaries.get(provider, {}).get('traits', ())

    @property
    def is_answered(self) -> bool:
        """Return whether Placement's answer had a candidate."""
        return bool(self._summaries)

    @property
    def has_taken(self) -> bool:
        """Return whether this scheduler knows of an allocation that was made
        after Placement's answer."""
        return bool(self._taken)

    def is_taken(self, candidate: Candidate) -> bool:
        """Return whether a candidate is no longer possible, because a device
        was allocated after Placement's answer."""
        return bool(self._taken) and any(
            (provider, name) in self._taken
            and amount > self._room(provider, name)
            for provider, given in candidate['allocations'].items()
            for name, amount in given['resources'].items())

    def _room(self, provider, name):
        summary = self._summaries.get(provider)
        if summary is None or name not in summary['resources']:
            return 0
        found = summary['resources'][name]
        return found['capacity'] - found['used']

    # Allocations since the answer

    def take(self, candidate: Candidate) -> None:
        """Note that a server of this request got a candidate."""
        for wanted in self._requests:
            for provider in providers(wanted, candidate):
                if wanted.programs and set(wanted.wanted_traits).isdisjoint(
                        self._traits(provider)):
                    self._promised[provider] = wanted.wanted_traits
        for provider, given in candidate['allocations'].items():
            for name, amount in given['resources'].items():
                if name in self._classes:
                    self._use(provider, name, amount)

    def _use(self, provider, name, amount):
        summary = self._summaries.get(provider)
        if summary and name in summary['resources']:
            summary = _using(
                summary, name, summary['resources'][name]['used'] + amount)
        self._show(provider, name, summary)

    def _show(self, provider, name, summary):
        """Replace the summary of a provider after an allocation from the
        provider. If its region will be programmed, show the new function."""
        self._taken.add((provider, name))
        promised = self._promised.get(provider)
        if summary and promised:
            # the function of the region is going to be overwritten
            summary = {**summary, 'traits': [*promised, *itertools.filterfalse(
                naming.is_content, summary['traits'])]}
        if summary:
            # a new one: the old one may be Nova's own
            self._summaries = {**self._summaries, provider: summary}

    def refresh(self, root: str) -> None:
        """Ask Placement again for the providers of one host.

        Another request may have taken devices since Nova got its answer. If
        Placement does not answer, nothing changes.

        :param root: UUID of the host's root provider.
        """
        for name in sorted(self._classes):
            url = (f'/allocation_candidates?in_tree={root}'
                   f'&resources={name}:1&limit=1')
            try:
                found = candidates.answer(
                    self._get(url, _CANDIDATES_VERSION),
                    provider_summaries=dict)['provider_summaries']
            # keystoneauth has some thirty, and none may fail a scheduling
            except Exception as error:
                LOG.warning(
                    'Placement did not answer %(url)s (%(error)s), so '
                    'allocations of other requests are not known: the '
                    'scheduling continues with the earlier answer.',
                    {'url': url, 'error': error})
                return
            self._update(root, name, found)

    def _update(self, root, name, found):
        """Update the room of a resource class on the providers of one host
        from a new answer of Placement. A provider that the answer omits has
        no room."""
        for provider, summary in list(self._summaries.items()):
            if (summary.get('root_provider_uuid') == root
                    and name in summary['resources']):
                # Placement's answer omits trees without room
                self._show(provider, name, found.get(provider) or _using(
                    summary, name, summary['resources'][name]['capacity']))


def _using(summary, name, used):
    """Return a copy of a summary in which another amount of a class is used.
    """
    resources = summary['resources']
    return {**summary, 'resources': {
        **resources, name: {**resources[name], 'used': used}}}
