# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Wrap methods of Nova's scheduler to read data that no filter or weigher gets.

The answer: SchedulerManager._select_destinations is the first method that gets
Placement's answer, with candidates and provider summaries, and passes the
summaries to no filter or weigher (Nova 31 to 34). It is wrapped to note the
answer, and to add candidates that Placement cut off. Nova calls it once for
each scheduling, after it has merged the answer to a fallback query, and with
None for a rebuild, which has no answer. If it finds no host among some of the
hosts, it is called again with all of them, and sends the notification
select_destinations.start again.

The summaries are kept with the request, not with the thread: this works in both
threading modes of Nova, and they are discarded with the request.

The error: if Placement has no candidate, select_destinations raises
NoValidHost before any filter, and nova-conductor makes its text the fault of
the server. select_destinations is wrapped to add the reason.
"""

from collections.abc import Callable
import inspect
import itertools
import random
import time
import typing

from nova import exception
from nova.scheduler import manager
import oslo_messaging as messaging

from nova_accel import log as logging
from nova_accel import wrapping

LOG = logging.getLogger(__name__)

_ANSWERED = '_select_destinations'
_ANSWER = ['self', 'context', 'spec_obj', 'instance_uuids',
           'alloc_reqs_by_rp_uuid', 'provider_summaries']
#: an RPC: nova-conductor passes its arguments by name (SchedulerAPI, 31 to
#: 34). The decorator of Nova's hides its parameters
_RPC = 'select_destinations'
#: seconds between two attempts to schedule a request
_LONGEST_DELAY = 30


def install_answer(look: Callable[..., typing.Any],
                   widen: Callable[[typing.Any], bool] = lambda spec: False,
                   ) -> bool:
    """Call a function with Placement's answer before Nova reads it; idempotent.

    :param look: takes the SchedulerManager, the context, the RequestSpec, the
        candidates by provider and the summaries, and may add to both. If it
        returns the summaries of some hosts, Nova gets only these hosts. Its
        errors are logged, and the scheduling continues.
    :param widen: takes the RequestSpec if Nova found no host among some hosts,
        and returns whether Nova gets all hosts now.
    :returns: whether this Nova has the method in a known form. If not, that is
        logged as an error, and servers are scheduled without regard to loaded
        functions.
    """
    original = getattr(manager.SchedulerManager, _ANSWERED, None)
    if original is None or list(inspect.signature(original).parameters)[
            :len(_ANSWER)] != _ANSWER:
        LOG.error(
            'nova_accel looks for SchedulerManager.%(method)s(%(parameters)s) '
            'in nova.scheduler.manager, and this Nova does not have it: '
            'servers are scheduled without regard to loaded functions until '
            'you install a release of nova_accel that knows this Nova.',
            {'method': _ANSWERED, 'parameters': ', '.join(_ANSWER[1:])})
        return False

    def shown(original, self, context, spec_obj, instance_uuids,
              alloc_reqs_by_rp_uuid, provider_summaries, *args, **kwargs):
        def scheduled(summaries):
            return original(self, context, spec_obj, instance_uuids,
                            alloc_reqs_by_rp_uuid, summaries, *args, **kwargs)

        some = None
        # a rebuild has no answer
        if alloc_reqs_by_rp_uuid is not None:
            try:
                some = look(self, context, spec_obj, alloc_reqs_by_rp_uuid,
                            provider_summaries)
            except Exception as error:
                LOG.warning('A server is scheduled with the part of the '
                            'answer that Placement gave: %s', error)
        if some is not None:
            try:
                return scheduled(some)
            except exception.NoValidHost:
                if not _is_retried(widen, spec_obj):
                    raise
        return scheduled(provider_summaries)
    wrapping.wrap(manager.SchedulerManager, _ANSWERED, shown)
    return True


def install_reason(why: Callable[[typing.Any, typing.Any, typing.Any, int,
                                  float], str],
                   end: Callable[[typing.Any], typing.Any] = lambda spec: None,
                   before: Callable[..., typing.Any] = lambda *args: None,
                   retry: Callable[[typing.Any], bool] = lambda spec: False,
                   ) -> None:
    """Add nova_accel's reason to NoValidHost in this process. Idempotent.

    :param why: takes the SchedulerManager, the context, the RequestSpec, the
        number of servers and the seconds that it took to find no host, and
        returns the reason or ''. Its errors are logged, and Nova's own error
        is raised.
    :param end: takes the RequestSpec when the request has ended.
    :param before: takes the context, the RequestSpec and the UUIDs of the
        servers before Placement is asked. Its errors are logged, and the
        scheduling continues.
    :param retry: takes the RequestSpec that found no host, and returns whether
        it is scheduled once more, after a random delay.
    """
    if not hasattr(manager.SchedulerManager, _RPC):
        return

    @messaging.expected_exceptions(exception.NoValidHost)
    def wrapped(original, self, context, *args, **kwargs):
        if kwargs.get('spec_obj') is not None:
            try:
                before(context, kwargs['spec_obj'],
                       kwargs.get('instance_uuids'))
            except Exception:
                LOG.exception('Members of a server group do not count for '
                              'accel:near: report this error to nova_accel.')
        try:
            return tried(original, self, context, *args, **kwargs)
        finally:
            if kwargs.get('spec_obj') is not None:
                try:
                    end(kwargs['spec_obj'])
                except Exception:
                    LOG.exception('The data of a request stay in memory: '
                                  'report this error to nova_accel.')

    def tried(original, self, context, *args, **kwargs):
        spec = kwargs.get('spec_obj')
        for retries in itertools.count(1):
            began = time.monotonic()
            try:
                return original(self, context, *args, **kwargs)
            except messaging.ExpectedException as error:
                raised = error.exc_info[1]
            except exception.NoValidHost as error:
                raised = error
            # the error of a request filter has the reason already
            is_refused = isinstance(raised.__context__,
                                    exception.RequestFilterFailed)
            seconds = time.monotonic() - began
            if is_refused or not _is_retried(retry, spec):
                break
            # requests that took room from each other must not do so again; a
            # slow Placement must not keep the caller waiting for minutes
            delay = min(seconds * 2 ** retries, _LONGEST_DELAY)
            time.sleep(random.uniform(0, delay))
        reason = ''
        if spec is not None and not is_refused:
            servers = kwargs.get('instance_uuids')
            try:
                reason = why(self, context, spec, len(servers) if servers
                             else spec.num_instances, seconds)
            except Exception:
                LOG.exception('The owner of a server without a host reads no '
                              'more than "No valid host": report this error '
                              'to nova_accel.')
        raise exception.NoValidHost(reason=reason) if reason else raised

    wrapping.wrap(manager.SchedulerManager, _RPC, wrapped)


def _is_retried(retry, spec) -> bool:
    try:
        return spec is not None and retry(spec)
    except Exception:
        LOG.exception('A request is not scheduled once more: report this '
                      'error to nova_accel.')
        return False
