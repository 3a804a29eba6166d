# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Build queries to Placement about the accelerators and the hosts of a
request.
"""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import time
import typing
from urllib import parse

from nova_accel import request

#: parameters of Nova's question that restrict the hosts of a server, whatever
#: its resources (ResourceRequest.to_querystring, Nova 31 to 34)
_OF_HOSTS = ('in_tree', 'member_of', 'required', 'root_required')


def answer(response: typing.Any, **parts: type) -> dict[str, typing.Any]:
    """Return the JSON of an answer of Placement.

    :param response: what SchedulerReportClient.get of Nova returned.
    :param parts: required keys, each with its type: list or dict.
    :raises ConnectionError: no answer, another status, or a body that is not
        Placement's, such as the HTML of a proxy.
    """
    if response is None or response is False:
        raise ConnectionError('no connection')
    if response.status_code != 200:
        raise ConnectionError(f'HTTP {response.status_code}')
    with contextlib.suppress(ValueError, TypeError, LookupError,
                             RecursionError):
        found = response.json()
        if all(isinstance(found[name], kind) for name, kind in parts.items()):
            return found
    raise ConnectionError('HTTP 200, and not the JSON of Placement')


class Zones:
    """The hosts of availability zones, as Placement listed them.

    A zone is listed once in SECONDS, because Placement reads all hosts of the
    cloud for the list. Each request still asks Placement whether a host
    satisfies the request.
    """

    SECONDS = 60
    #: number of questions whose hosts are kept
    _MOST = 100

    def __init__(self) -> None:
        #: question -> when it was asked, and the answer
        self._known: dict[str, tuple[float, frozenset[str]]] = {}

    def hosts(self, question: str, ask: Callable[[], Iterable[str]],
              ) -> frozenset[str]:
        """Return the UUIDs of the hosts of a zone.

        :param question: path and query from url_of_hosts().
        :param ask: function that asks Placement and returns the UUIDs in its
            answer.
        """
        now = time.monotonic()
        known = self._known.get(question)
        if known is None or now > known[0] + self.SECONDS:
            known = now, frozenset(ask())
            if len(self._known) >= self._MOST:
                self._known.clear()
            self._known[question] = known
        return known[1]


#: of this nova-scheduler
ZONES = Zones()


def url(groups: Mapping[str, request.Group], limit: int, *,
        policy: str | None = None, root_forbidden: Iterable[str] = (),
        in_tree: str | None = None) -> str:
    """Return the path and query of GET /allocation_candidates, 1.35 or later.

    :param groups: suffix -> group, the result of request.groups().
    :param limit: maximum number of candidates.
    :param policy: group_policy, which Placement requires for two or more
        groups with a suffix; 'none' by default.
    :param root_forbidden: traits that no host may have.
    :param in_tree: UUID of the only host to query.
    """
    query = _of_groups(groups, policy)
    if root_forbidden:
        query.append(('root_required', ','.join(
            f'!{trait}' for trait in root_forbidden)))
    return _joined(query + _in_tree(groups, in_tree), limit)


def url_of_part(query: str, groups: Mapping[str, request.Group],
                in_tree: str | None = None) -> str:
    """Return the path and query that ask Placement whether a host satisfies
    some groups of a request.

    The query also has the restrictions of the whole request on hosts. It
    always requests one MiB of the host's memory, because Placement needs a
    resource.

    :param query: Nova's question for the whole request, a query string.
    :param groups: these groups by suffix. The unnumbered group gets the traits
        of ``query``, which include traits of Nova and of the image.
    :param in_tree: UUID of the only host to query.
    """
    asked = parse.parse_qsl(query)
    host = {'MEMORY_MB': 1}
    groups = {**groups, '': request.Group(
        {**host, **groups[''].resources} if '' in groups else host)}
    return _joined(
        [(key, value) for key, value in asked if key in _OF_HOSTS]
        + _of_groups(groups, dict(asked).get('group_policy'))
        + _in_tree(groups, in_tree), limit=1)


class Merged(typing.NamedTuple):
    """A question whose only numbered group is in the unnumbered group.

    The candidates are the same, and Placement needs about half the time: for
    the unnumbered group it reads only hosts with the required traits, and for
    a numbered group all hosts with a free device
    (placement/objects/allocation_candidate.py, Placement 16).
    """

    query: list[tuple[str, str]]
    #: of the numbered group
    suffix: str
    resource_class: str
    #: suffix -> values of its "required" parameters
    required: dict[str, list[str]]

    def split(self, answer: dict[str, typing.Any]) -> None:
        """Move the provider of the numbered group back to this group in each
        candidate. Remove candidates whose providers lack a trait that their
        group requires, or have one that it forbids.

        :param answer: of Placement; modified.
        """
        summaries = answer['provider_summaries']
        kept = []
        for candidate in answer['allocation_requests']:
            mapping: dict[str, list[str]] = {'': [], self.suffix: []}
            for provider, given in candidate['allocations'].items():
                for name in given['resources']:
                    listed = mapping[self.suffix if name == self.resource_class
                                     else '']
                    if provider not in listed:
                        listed.append(provider)
            if all(_has_traits(self.required[suffix], set().union(*(
                    summaries[provider]['traits'] for provider in providers)))
                    for suffix, providers in mapping.items()):
                kept.append({**candidate, 'mappings': mapping})
        answer['allocation_requests'] = kept


def merged(query: list[tuple[str, str]]) -> Merged | None:
    """Return a question for the same candidates as another one.

    :param query: parameters of a question for allocation candidates.
    :returns: None if the question has not exactly one numbered group, or this
        group has several classes, or one of the unnumbered group.
    """
    groups = {key.removeprefix('resources'): value for key, value in query
              if key.startswith('resources')}
    if len(groups) != 2 or '' not in groups:
        return None
    suffix, = groups.keys() - {''}
    classes = [item.partition(':')[0] for value in groups.values()
               for item in value.split(',')]
    name = groups[suffix].partition(':')[0]
    if ',' in groups[suffix] or classes.count(name) > 1 or any(
            key.endswith(suffix) and key not in (
                f'resources{suffix}', f'required{suffix}')
            or key == 'same_subtree' for key, _ in query):
        return None
    required: dict[str, list[str]] = {'': [], suffix: []}
    rest = [('resources', f'{groups[""]},{groups[suffix]}')]
    for key, value in query:
        if key in ('required', f'required{suffix}'):
            required[key.removeprefix('required')].append(value)
            # a trait that one group must not have may be in the other one
            traits = [trait for trait in value.split(',')
                      if not trait.startswith('!')]
            if traits:
                rest.append(('required', ','.join(traits)))
        elif not key.startswith('resources'):
            rest.append((key, value))
    return Merged(rest, suffix, name, required)


def _has_traits(required, traits):
    """Return whether traits satisfy values of "required" parameters."""
    for value in required:
        if value.startswith('in:'):
            if traits.isdisjoint(value.removeprefix('in:').split(',')):
                return False
        elif not all((trait.removeprefix('!') in traits)
                     != trait.startswith('!') for trait in value.split(',')):
            return False
    return True


def names_host(query: str) -> bool:
    """Return whether a question is for one host that the operator named."""
    return any(key.startswith('in_tree') for key, _ in parse.parse_qsl(query))


def url_of_providers(suffix: str, group: request.Group) -> str:
    """Return the path and query for providers of any host with free inventory
    for a group. For the unnumbered group, ask only for one class, because
    other classes and the traits may be from other providers."""
    classes = sorted((name, amount) for name, amount
                     in group.resources.items() if amount)
    query = [('resources', ','.join(
        f'{name}:{amount}' for name, amount
        in (classes if suffix else classes[:1])))]
    traits = [*sorted(group.required), *(f'!{trait}' for trait
                                         in sorted(group.forbidden))]
    if suffix and traits:
        query.append(('required', ','.join(traits)))
    return f'/resource_providers?{parse.urlencode(query, safe=":,!")}'


def url_of_hosts(query: str) -> str:
    """Return the path and query for the hosts that a server may use,
    regardless of its resources.

    The query asks for memory, because the provider of a host has it, and
    Placement applies the restrictions to the provider of the resource
    (Placement API, 1.29).

    :param query: Nova's question for the whole request, a query string.
    """
    asked = parse.parse_qsl(query)
    traits = [value for key, value in asked
              if key in ('required', 'root_required')]
    found = [('resources', 'MEMORY_MB:1'), *(
        (key, value) for key, value in asked if key in _OF_HOSTS
        and not key.endswith('required'))]
    if traits:
        found.append(('required', ','.join(traits)))
    return f'/resource_providers?{parse.urlencode(found, safe=":,!")}'


def _in_tree(groups, root):
    return [(f'in_tree{suffix}', root) for suffix, group in groups.items()
            if root and any(group.resources.values())]


def _of_groups(groups, policy):
    query = []
    granular = [suffix for suffix, group in groups.items()
                if suffix and any(group.resources.values())]
    for suffix, group in groups.items():
        resources = ','.join(
            f'{name}:{amount}'
            for name, amount in sorted(group.resources.items()) if amount)
        traits = [*sorted(group.required),
                  *(f'!{trait}' for trait in sorted(group.forbidden))]
        if resources:
            query.append((f'resources{suffix}', resources))
        if traits:
            query.append((f'required{suffix}', ','.join(traits)))
    if len(granular) > 1:
        query.append(('group_policy', policy or 'none'))
    return query


def _joined(query, limit):
    query = [*query, ('limit', str(limit))]
    return f'/allocation_candidates?{parse.urlencode(query, safe=":,!")}'
