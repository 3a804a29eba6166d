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
