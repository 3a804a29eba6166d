# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Add candidates that Placement's answer omits in a large cloud.

Placement returns the first [scheduler] max_placement_results candidates, in an
order that does not depend on functions. If it has cut its answer off and no
candidate carries the function of a group, nova_accel asks Placement which
providers carry the function, and then repeats Nova's question for a few of
their hosts. Both answers are short, because a common function would be among
the first candidates. For servers that have to be near each other, nova_accel
asks for all hosts of some domains, because the cut answer has only some hosts
of each. The candidates are added to those that Nova filters, weighs and
claims. If these domains have room for all servers, Nova gets only their hosts
(Scheduling.part).
"""

from collections.abc import Callable
import random
import typing
from urllib import parse

import nova.conf
from nova.scheduler import utils

from nova_accel import log as logging
from nova_accel import near
from nova_accel import request
from nova_accel.scheduler import candidates as placement
from nova_accel.scheduler import scheduling

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

#: maximum number of hosts whose candidates are added, and of hosts that are
#: queried: other demands of the server may exclude some
_HOSTS = 3
_ASKED = 6
#: maximum number of candidates of one host
_CANDIDATES = 16
#: number of domains in each query. A query takes longer if it has more domains
_DOMAINS = 6, 18, 24
#: maximum number of candidates of the domains in a query
_OF_DOMAINS = 1000
#: version of Placement with required=in:, also several times
_VERSION = '1.39'
#: chooses hosts if there are many
_sample = random.sample


def add(get: Callable, found: scheduling.Scheduling, manager, context, spec,
        candidates: typing.Any, summaries: typing.Any) -> None:
    """If Placement has cut off its answer, add candidates that it omitted.

    :param get: callable (url, version), SchedulerReportClient.get of Nova.
    :param manager: nova.scheduler.manager.SchedulerManager.
    :param spec: nova.objects.RequestSpec.
    :param candidates: defaultdict, provider -> its candidates; modified.
    :param summaries: provider -> summary; modified.
    """
    missing = [wanted for wanted in found.requests if wanted.programs
               and not _is_carried(wanted, candidates, summaries)]
    if not (missing or found.affinity.levels) or not _is_cut(candidates):
        return
    # Nova's own
    question = utils.resources_from_request_spec(
        context, spec, manager.host_manager).to_querystring()
    if placement.names_host(question):
        return
    query = [(key, value) for key, value in parse.parse_qsl(question)
             if key != 'limit']
    if found.affinity.levels:
        _add_domains(get, found, query, candidates, summaries)
    # near hosts are more important than loaded functions
    if missing and found.part is None:
        _add_carrying(get, missing, question, query, candidates, summaries)


def _add_carrying(get, missing, question, query, candidates, summaries):
    """Add candidates of a few hosts that carry the wanted functions."""
    #: host -> the groups whose function it carries
    carrying: dict[str, list[request.AcceleratorRequest]] = {}
    for wanted in missing:
        for root in _carrying(get, wanted):
            carrying.setdefault(root, []).append(wanted)
    if len(carrying) > _ASKED and any(key == 'member_of' for key, _ in query):
        # hosts outside the zone would be queried in vain
        url = placement.url_of_hosts(question)
        there = placement.ZONES.hosts(url, lambda: [
            host['uuid'] for host in _providers(get, url)])
        carrying = {root: groups for root, groups in carrying.items()
                    if root in there}
    # random, because other requests search for the same; hosts that carry the
    # most first
    roots = sorted(_sample(sorted(carrying), len(carrying)),
                   key=lambda root: -len(carrying[root]))
    left = _HOSTS
    for root in roots[:_ASKED]:
        answer = _of_host(get, query, root, carrying[root])
        if not answer['allocation_requests']:
            continue
        _add(answer, candidates, summaries)
        left -= 1
        if not left:
            return


def _add_domains(get, found, query, candidates, summaries):
    """Add all candidates of some domains if Placement's answer was cut off.

    Placement is asked once for several domains, and if a level is required,
    again for other domains if none of the first has room for all servers. If
    the domains have room, Nova gets only their hosts.
    """
    levels, servers = found.affinity.levels, found.expected.servers
    level = next((level for level in levels if level.required), levels[-1])
    if found.expected.retries and not level.required:
        # the hosts of whole domains did not suffice
        return
    room = _room(found, level, found.facts.hosts(), candidates)
    wanted = list(dict.fromkeys((
        *(member[level.name] for member in found.expected.members or ()
          if level.name in member),
        *sorted(_sample(sorted(room), len(room)), key=lambda domain: (
            # the fullest one that is known to have room for all, or else the
            # one with the most room
            (0, not found.expected.retries and room[domain])
            if room[domain] >= servers else (1, -room[domain]))))))
    for number in _DOMAINS if level.required else _DOMAINS[:1]:
        some, wanted = wanted[:number], wanted[number:]
        if not some:
            return
        answer = _of_domains(get, query, some)
        _add(answer, candidates, summaries)
        found.forget_costs()
        found.whole.update(some)
        # a host without candidates would be the first one for Nova
        hosts = [provider for provider in answer['provider_summaries']
                 if found.facts.root(provider) == provider
                 and candidates.get(provider)]
        room_of = _room(found, level, hosts, candidates)
        if max(room_of.values(), default=0) >= servers or (
                not level.required and sum(room_of.values()) >= servers):
            found.part = {host: summaries[host] for host in hosts}
            return


def _of_domains(get, query, domains):
    """Send Nova's question for the hosts of some domains to Placement."""
    query = [*query, ('required', f'in:{",".join(sorted(domains))}')]
    merged = placement.merged(query)
    answer = _ask(get, '/allocation_candidates?' + parse.urlencode([
        *(merged.query if merged else query), ('limit', str(_OF_DOMAINS))]),
        allocation_requests=list, provider_summaries=dict)
    if merged:
        merged.split(answer)
    return answer


def _room(found, level, hosts, candidates):
    """Return how many servers of the request fit into each domain."""
    domains = found.facts.domains(hosts)
    return near.room(level.name, {
        host: found.fitting(candidates.get(host, ()))
        for host in hosts if level.name in domains[host]},
        domains, found.affinity.levels)


def _is_cut(candidates):
    return len({id(one) for listed in candidates.values() for one in listed
                }) >= CONF.scheduler.max_placement_results


def _add(answer, candidates, summaries):
    for candidate in answer['allocation_requests']:
        providers = candidate['allocations']
        # a disk provider that hosts share has the candidates of all of them
        if candidate not in min((candidates.get(provider, ())
                                 for provider in providers), key=len):
            for provider in providers:
                candidates[provider].append(candidate)
    for provider, summary in answer['provider_summaries'].items():
        summaries.setdefault(provider, summary)


def _is_carried(wanted, candidates, summaries):
    traits = set(wanted.wanted_traits)
    return any(
        wanted.resource_class in summaries[provider]['resources']
        and not traits.isdisjoint(summaries[provider]['traits'])
        for provider in candidates if provider in summaries)


def _carries(wanted):
    return f'in:{",".join(sorted(wanted.wanted_traits))}'


def _carrying(get, wanted):
    """Return hosts that carry the function of a group on a provider with room.
    """
    traits = [*sorted(wanted.required),
              *(f'!{trait}' for trait in sorted(wanted.forbidden))]
    query = [('resources', f'{wanted.resource_class}:{wanted.amount}'),
             ('required', _carries(wanted))]
    if traits:
        query.append(('required', ','.join(traits)))
    return {provider['root_provider_uuid'] for provider in _providers(
        get, f'/resource_providers?{parse.urlencode(query)}')}


def _providers(get, url):
    return _ask(get, url, resource_providers=list)['resource_providers']


def _of_host(get, query, root, groups):
    """Send Nova's question for one host to Placement, restricted to regions
    that carry the wanted functions."""
    suffixes = {key.removeprefix('resources') for key, _ in query
                if key.startswith('resources')}
    query = [*query, *((f'required{wanted.group}', _carries(wanted))
                       for wanted in groups), ('limit', str(_CANDIDATES))]
    answer = {}
    # a disk provider that hosts share is not in the tree of any host
    for pinned in suffixes, suffixes - {''}:
        if pinned:
            answer = _ask(get, '/allocation_candidates?' + parse.urlencode(
                query + [(f'in_tree{s}', root) for s in sorted(pinned)]),
                allocation_requests=list, provider_summaries=dict)
            if answer['allocation_requests']:
                break
    return answer


def _ask(get, url, **parts):
    """Request a URL of Placement, and return the checked parts of the answer.

    :param parts: see candidates.answer().
    """
    try:
        return placement.answer(get(url, _VERSION), **parts)
    except ConnectionError as error:
        raise ConnectionError(
            f'Placement was asked for {url} and did not answer: {error}'
            ) from error


def order_forced(found: scheduling.Scheduling, spec,
                 candidates: typing.Any) -> None:
    """Put the best candidate first for a host that an operator has forced:
    Nova calls no filter for it, and claims the first candidate.

    :param candidates: provider -> its candidates; the lists are modified.
    """
    if not scheduling.names_host(spec):
        return
    for listed in candidates.values():
        listed.sort(key=found.cost)
