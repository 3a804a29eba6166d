# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A filter that orders the allocation candidates of each host.

It drops candidates and hosts in three cases only. The flavor demands that all
devices are on one NUMA node, below one PCI root complex, or on the nodes of the
guest. The flavor demands hosts near those of other servers (accel:near). Or a
host has providers of nova_accel in Placement, but its nova-compute runs
another driver, which would start the server without its devices.

Nova claims element 0 of host_state.allocation_candidates
(scheduler manager, 31 to 34) and calls weighers only with two or more hosts.
Hence a filter chooses the device, and a weigher chooses the host.
"""

import functools
import random

from nova.scheduler.client import report
from nova.scheduler import filters
from nova.virt import hardware

from nova_accel import log as logging
from nova_accel import naming
from nova_accel.scheduler import facts
from nova_accel.scheduler import fault
from nova_accel.scheduler import peers
from nova_accel.scheduler import scheduling as schedulings
from nova_accel.scheduler import seam
from nova_accel.scheduler import unseen

LOG = logging.getLogger(__name__)


def _get(url, version):
    return report.report_client_singleton().get(url, version=version)


#: shared with the weigher
SCHEDULINGS = schedulings.Schedulings(_get)
#: 0 to 1: decides between candidates of equal cost
_chance = random.random
#: maximum number of hosts in a line of the log
_SAID = 10
#: shown in the log if an error of nova_accel was caught, once for each request
UNTOLD = ('A server is scheduled without regard to its accelerators: report '
          'this error to nova_accel.')
_ONCE = logging.Once()
seam.install_reason(lambda *args: fault.reason(_get, SCHEDULINGS, *args),
                    lambda spec: SCHEDULINGS.end(spec),
                    lambda *args: peers.expect(SCHEDULINGS, *args),
                    lambda spec: SCHEDULINGS.retry(spec))


class Listed(list[facts.Candidate]):
    """A list of candidates that copy.deepcopy copies without its elements.

    Placement's answer has such a list for each provider, and Nova copies it
    for each host, because filters drop candidates. A deep copy takes longer
    than all other work of nova_accel for a scheduling. A new list is enough:
    each candidate is of one host, and Nova and its filters write into none
    (SchedulerManager, claim_resources of SchedulerReportClient, 31 to 34).
    """

    __slots__ = ()

    def __deepcopy__(self, memo):
        return list(self)


def _look(manager, context, spec, candidates, summaries):
    candidates.default_factory = Listed
    for provider, listed in candidates.items():
        candidates[provider] = Listed(listed)
    try:
        found = SCHEDULINGS.begin(spec, summaries)
    except Exception:
        LOG.exception(UNTOLD)
        return None
    if found.requests:
        unseen.add(_get, found, manager, context, spec, candidates, summaries)
        unseen.order_forced(found, spec, candidates)
    return found.part


seam.install_answer(_look, lambda spec: SCHEDULINGS.widen(spec))


class AcceleratorFilter(filters.BaseHostFilter):
    """Puts the candidate with the best devices for the server first."""

    # a rebuild has no candidates: the server keeps its devices
    RUN_ON_REBUILD = False

    def filter_all(self, filter_obj_list, spec_obj):
        """Order the candidates of all hosts for one server of a request.

        :param filter_obj_list: list of HostState.
        :param spec_obj: RequestSpec.
        :returns: list of the same HostState.
        """
        hosts = list(filter_obj_list)
        try:
            return self._order(hosts, spec_obj)
        # an error of nova_accel must not exclude hosts for servers without
        # accelerators. nova-compute checks the demands of a flavor again
        except Exception:
            LOG.exception(UNTOLD)
            SCHEDULINGS.give_up(spec_obj)
            return hosts

    @staticmethod
    def _order(hosts, spec_obj):
        scheduling = SCHEDULINGS.of(spec_obj)
        if scheduling is None or not scheduling.requests:
            return hosts
        _note_claims(hosts, scheduling)
        with_driver = [host for host in hosts
                       if _has_driver(host, scheduling)]
        if hosts and not with_driver:
            scheduling.refused = schedulings.Refusal.DRIVER
        hosts = with_driver
        if not _is_retry(spec_obj):
            scheduling.count(spec_obj.instance_uuid)
        hosts = _where_the_flavor_demands(hosts, scheduling, spec_obj)
        hosts = _near(hosts, scheduling, spec_obj)
        several = spec_obj.num_instances > 1
        cost = scheduling.cost
        for host in hosts:
            if len(host.allocation_candidates) > 1:
                _sort(host.allocation_candidates, cost)
            if several:
                scheduling.left[host.uuid] = (
                    host.num_instances, list(host.allocation_candidates))
        return hosts


def _sort(candidates, cost):
    """Sort candidates by cost, and candidates with equal costs randomly.

    Simultaneous requests get the same answer of Placement. If all took the
    first of several equal regions, one request would get this region, and the
    other requests would try another host, because Nova tries one candidate of
    each host.
    """
    candidates.sort(key=lambda c: (cost(c), _chance()))


def _has_driver(host, scheduling):
    """Return whether a host runs nova_accel, or has candidates without devices
    of nova_accel. In the second case, drop the other candidates.

    Providers stay in Placement when a host returns to Nova's own driver. That
    driver starts servers without the devices, and reports no error. Candidates
    without providers of nova_accel may be vGPUs of Nova, in standard resource
    classes.
    """
    if naming.STATISTIC in (host.stats or {}):
        _ONCE.forget('driver', host.uuid)
        return True
    candidates = host.allocation_candidates
    if not candidates:
        return True
    kept = [c for c in candidates if not scheduling.facts.takes_ours(c)]
    if kept:
        candidates[:] = kept
    else:
        _ONCE.log(
            ('driver', host.uuid), LOG.warning,
            'Host %(host)s gets no servers with accelerators: Placement has '
            'providers of nova_accel for it, and its nova-compute does not run '
            'the driver accel.AccelLibvirtDriver. Set [DEFAULT] compute_driver '
            'there and restart nova-compute, or remove the providers with '
            '"nova-accel providers purge %(node)s".',
            {'host': host.host, 'node': host.nodename})
    return bool(kept)


def _where_the_flavor_demands(hosts, scheduling, spec):
    """Drop candidates that violate the flavor's demands on places. If no host
    is left, log the places that the hosts offered."""
    guest = _guest(scheduling, spec)
    if not guest and not (
            scheduling.compares_places and scheduling.affinity.is_strict):
        return hosts
    left, refused = [], []
    for host in hosts:
        candidates = host.allocation_candidates
        kept = [c for c in candidates or ()
                if scheduling.may_satisfy(c)]
        if guest:
            fits = functools.cache(functools.partial(_fits, host, guest))
            kept = [c for c in kept if fits(frozenset(
                scheduling.facts.places(c)[0]))]
        if kept or not candidates:
            if candidates:
                candidates[:] = kept
            left.append(host)
        else:
            refused.append(host)
    if refused and not left:
        scheduling.refused = (schedulings.Refusal.GUEST if guest
                              else schedulings.Refusal.PLACES)
        LOG.info(
            'Server %(server)s needs all accelerators %(where)s, and no host '
            'has that: %(there)s.',
            {'server': spec.instance_uuid, 'where': f'{scheduling.affinity}'
             + (', where its guest fits' if guest else ''),
             'there': '; '.join(
                 f'{host.host} offers them on '
                 + scheduling.fewest_places(host.allocation_candidates)
                 for host in refused[:_SAID])})
    return left


def _near(hosts, scheduling, spec):
    """Drop hosts that are not as near to the hosts of other servers as the
    flavor demands (accel:near)."""
    if not scheduling.affinity.levels or schedulings.names_host(spec):
        return hosts
    choice = scheduling.near
    if choice is None:
        scheduling.hosts = hosts
        choice = scheduling.choose_near(_free(hosts, scheduling))
    if choice.refusal:
        scheduling.refused = schedulings.Refusal.NEAR
        LOG.info('Server %(server)s has no host: %(why)s.',
                 {'server': spec.instance_uuid, 'why': choice.refusal})
    return [host for host in hosts if host.uuid in choice.order]


def _free(hosts, scheduling):
    """Return how many servers of the request fit on each host, by UUID."""
    members = set(scheduling.group.members) if scheduling.group else set()
    return {host.uuid: scheduling.fitting(
        host.allocation_candidates,
        len(host.instances.keys() & members) if members else 0)
        for host in hosts}


def _guest(scheduling, spec):
    if not scheduling.affinity.with_guest or 'numa_topology' not in spec:
        return None
    return spec.numa_topology


def _fits(host, guest, shown):
    """Return whether a guest fits on the nodes of its devices, or True if that
    is unknown.

    Nova claims one candidate of a host, and does not try the next candidate
    when nova-compute refuses. Memory and processors are checked, with the
    limits that nova-compute will get, if NUMATopologyFilter ran earlier (its
    arguments are the same in Nova 31 to 34).

    :param shown: traits of the nodes.
    """
    if not host.numa_topology or len(shown) != len(guest):
        return True
    nodes = {int(trait.rpartition('_')[2]) for trait in shown}
    topology = host.numa_topology.obj_clone()
    for cell in topology.cells:
        # in the same way as nova_accel.virt.guest_nodes
        if cell.id not in nodes:
            cell.cpuset, cell.pcpuset = set(), set()
    # a try writes its result into the guest's topology
    return bool(hardware.numa_fit_instance_to_host(
        topology, guest.obj_clone(), provider_mapping=None,
        limits=host.limits.get('numa_topology')))


def _is_retry(spec):
    """Return whether the request repeats a build that has failed on all hosts
    of an earlier request."""
    retry = spec.retry if 'retry' in spec else None
    return retry is not None and retry.num_attempts > 1


def _note_claims(hosts, scheduling):
    """Subtract allocations to earlier servers of the request from the facts.

    Nova does not refresh the candidates between the servers of a multi-create.
    It passes the hosts in the order in which it tried them for the last
    server. On hosts before the chosen host the claim has failed, because
    another request was faster. Hence Placement is asked again about these
    hosts.
    """
    if not scheduling.left:
        return
    taken = next((number for number, host in enumerate(hosts)
                  if host.num_instances > _left(scheduling, host)[0]), None)
    for host in hosts[:taken]:
        if host.uuid not in scheduling.left:
            # the host was dropped, and not tried
            continue
        scheduling.refresh(host.uuid)
        # another filter may have dropped the chosen host; then the first host
        # with room was not tried
        if taken is None and not all(
                map(scheduling.facts.is_taken, host.allocation_candidates)):
            return
    if taken is not None:
        _note_claim(hosts[taken], scheduling)


def _left(scheduling, host):
    return scheduling.left.get(host.uuid, (host.num_instances, []))


def _note_claim(host, scheduling):
    """Subtract the allocation of the last server on a host."""
    left = _left(scheduling, host)[1]
    if len(left) == len(host.allocation_candidates) and all(
            map(lambda a, b: a is b, left, host.allocation_candidates)):
        scheduling.take(left[0])
    else:
        # another filter dropped candidates, before or after the claim
        scheduling.refresh(host.uuid)
