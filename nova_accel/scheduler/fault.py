# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Report what was missing to the owner of a server without a host.

Placement is asked only after Nova has found no host, and only about hosts that
this server may use.
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
#: maximum length of a reason in a fault (nova.db.main.models,
#: InstanceFault.message) after "No valid host was found. "
_ROOM = 255 - 25
#: number of requests that are examined at the same time: a user whose requests
#: fail often must not keep Placement busy, and hanging requests must not
#: collect threads
_AT_ONCE = threading.BoundedSemaphore(4)
#: version of Placement with which Nova asks for candidates (31 to 34)
_VERSION = '1.36'
#: maximum number of hosts that are queried one by one
_FEW = 4
#: chooses hosts if there are many
_sample = random.sample


def reason(get: Callable, begun: scheduling.Schedulings, manager, context,
           spec, servers: int, seconds: float = 0) -> str:
    """Return which accelerators of a request were missing.

    :param get: callable (url, version), SchedulerReportClient.get of Nova.
    :param manager: nova.scheduler.manager.SchedulerManager.
    :param spec: nova.objects.RequestSpec that found no host.
    :param servers: how many servers were requested together.
    :param seconds: how long Placement took for the answer without a host.
    :returns: a sentence for the owner; '' if no accelerators are missing, or
        the check took longer than LIMIT seconds.
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
    """Ask whether a host has free inventory for groups.

    A question for candidates makes Placement read all hosts of the cloud, even
    for one host. Hence this function first asks for the providers of each
    group, which costs much less. Then it asks for candidates on the hosts that
    have providers for every group.

    :raises ConnectionError: Placement does not answer.
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
                # hosts outside the zone would be queried in vain
                url = candidates.url_of_hosts(query)
                hosts &= candidates.ZONES.hosts(
                    url, lambda: _hosts(get, url))
            # a host with many free devices is most likely to satisfy several
            # groups
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
    """Placement does not know a class or a trait, because no host has reported
    it."""


def _hosts(get, url):
    """Return the hosts in an answer: UUID of the root provider -> number of
    its providers in the answer."""
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
    """Return the result of a call, or '' if the call fails or takes too long.

    A call that takes too long continues in its own thread: Placement may take
    as long as nova.conf allows ([placement] timeout), or for ever.
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
                'Placement was asked which accelerators a server lacks, and '
                'did not answer (%s): its owner reads only "No valid '
                'host".', error)
        finally:
            _AT_ONCE.release()
    # not a pool: its threads would keep nova-scheduler from stopping
    thread = threading.Thread(target=run, daemon=True,
                              name='accel-fault')
    thread.start()
    thread.join(max(0, end - time.monotonic()))
    if thread.is_alive():
        LOG.warning('Placement did not answer within %s seconds which '
                    'accelerators a server lacks.', LIMIT)
    return found[0] if found else ''
