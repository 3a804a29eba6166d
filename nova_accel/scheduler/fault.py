# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Report to the owner of a server without a host what was missing.

Placement is asked only after Nova has found no host, with the hosts to which
this server may go and nothing of other servers.
"""

import collections
from collections.abc import Callable
import functools
import random
import threading
import time

from nova.scheduler import utils

from nova_accel import exception
from nova_accel import log as logging
from nova_accel import request
from nova_accel.scheduler import candidates
from nova_accel.scheduler import missing
from nova_accel.scheduler import scheduling
from nova_accel.scheduler import slow

LOG = logging.getLogger(__name__)

#: seconds by which Nova's error may be delayed
LIMIT = 3
#: characters of the reason that fit into a fault (nova.db.main.models,
#: InstanceFault.message) after "No valid host was found. "
_ROOM = 255 - 25
#: requests that are examined at a time: a user who fails often must not
#: keep Placement busy, and one that hangs must not collect threads
_AT_ONCE = threading.BoundedSemaphore(4)
#: of Placement, with which Nova asks for candidates (31 to 34)
_VERSION = '1.36'
#: hosts that are asked for one by one
_FEW = 4
#: of many hosts, which ones
_sample = random.sample


def reason(get: Callable, begun: scheduling.Schedulings, manager, context,
           spec, servers: int, seconds: float = 0) -> str:
    """Return what of its accelerators a request did not find.

    :param get: callable (url, version), SchedulerReportClient.get of Nova.
    :param manager: nova.scheduler.manager.SchedulerManager.
    :param spec: nova.objects.RequestSpec that found no host.
    :param servers: how many servers were requested together.
    :param seconds: that Placement took to find no host.
    :returns: a sentence for the owner; '' where accelerators are not missing,
        or it could not be found out within LIMIT seconds.
    """
    if utils.request_is_rebuild(spec) or 'extra_specs' not in spec.flavor:
        # a server that is rebuilt keeps its devices
        return ''
    try:
        groups = missing.of_accelerators(
            request.groups(spec.flavor.extra_specs))
    except exception.AcceleratorError:
        # nova-api refuses such flavors, so this one bypassed it
        return ''
    if not groups:
        return ''
    found = missing.refusal(begun.of(spec))
    if not found:
        query = utils.resources_from_request_spec(
            context, spec, manager.host_manager).to_querystring()
        ask = functools.partial(
            _ask, functools.cache(lambda url: get(url, _VERSION)), query)
        found = _within_limit(lambda: missing.reason(groups, servers, ask))
    if advice := slow.advice(seconds, groups.values()):
        LOG.warning('No host for server %(server)s: %(advice)s',
                    {'server': spec.instance_uuid, 'advice': advice})
        both = ' '.join(filter(None, (found, advice)))
        found = both if len(both) <= _ROOM else found or advice
    if found:
        LOG.info('No host for server %(server)s: %(reason)s',
                 {'server': spec.instance_uuid, 'reason': found})
    return found


def _ask(get, query, groups) -> missing.Answer:
    """Ask whether a host has groups free.

    A question for candidates makes Placement read all hosts of the cloud, also
    for one of them. Which providers have a group free is a small part of that:
    where none has, or the host of one of them has all groups, that is the
    answer.

    :raises ConnectionError: Placement does not say.
    """
    try:
        if not groups:
            return (missing.Answer.FREE if _providers(
                get, candidates.url_of_hosts(query)) else missing.Answer.NONE)
        if not candidates.names_host(query):
            free = [_hosts(get, candidates.url_of_providers(suffix, group))
                    for suffix, group in groups.items()]
            hosts = set.intersection(*map(set, free))
            if len(hosts) > _FEW and 'member_of' in query:
                # those outside of the zone would be asked in vain
                url = candidates.url_of_hosts(query)
                hosts &= candidates.ZONES.hosts(
                    url, lambda: _hosts(get, url))
            # several groups find all on a host that has much of it
            for host in sorted(
                    _sample(sorted(hosts), len(hosts)),
                    key=lambda host: -sum(one[host] for one in free))[:_FEW]:
                if _offers(get, query, groups, host):
                    return missing.Answer.FREE
            if len(hosts) <= _FEW:
                return missing.Answer.NONE
        return (missing.Answer.FREE if _offers(get, query, groups)
                else missing.Answer.NONE)
    except _NeverReported:
        return missing.Answer.UNKNOWN


class _NeverReported(Exception):
    """A class or a trait."""


def _hosts(get, url):
    """UUIDs of roots -> how many of their providers are in an answer."""
    return collections.Counter(provider['root_provider_uuid']
                               for provider in _providers(get, url))


def _providers(get, url):
    return _answer(get(url), 'resource_providers')


def _offers(get, query, groups, host=None):
    return _answer(get(candidates.url_of_part(query, groups, host)),
                   'allocation_requests')


def _answer(response, part):
    # TraitNotFound and ResourceClassNotFound of Placement
    if response is not None and response.status_code == 400 and (
            'No such ' in response.text):
        raise _NeverReported()
    return candidates.answer(response, **{part: list})[part]


def _within_limit(look: Callable[[], str]) -> str:
    """Return what a call returns, '' if it fails or takes too long.

    It goes on in a thread of its own then: Placement may take as long as
    nova.conf lets it ([placement] timeout), or for ever.
    """
    end = time.monotonic() + LIMIT
    if not _AT_ONCE.acquire(timeout=LIMIT):
        return ''
    found = []

    def run():
        try:
            found.append(look())
        # keystoneauth has some thirty, and Nova's error is reported in any case
        except Exception as error:
            LOG.warning(
                'Placement was asked what of accelerators a server did not '
                'find, and did not answer (%s): its owner reads no more than '
                '"No valid host".', error)
        finally:
            _AT_ONCE.release()
    # not a pool: its threads would keep nova-scheduler from stopping
    thread = threading.Thread(target=run, daemon=True,
                              name='accel-fault')
    thread.start()
    thread.join(max(0, end - time.monotonic()))
    if thread.is_alive():
        LOG.warning('Placement did not say in %s seconds what of accelerators '
                    'a server did not find.', LIMIT)
    return found[0] if found else ''
