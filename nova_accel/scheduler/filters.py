# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A filter that orders the allocation candidates of each host.

It drops no host. Nova claims element 0 of host_state.allocation_candidates
(scheduler manager, 31 to 34) and calls weighers only with two or more hosts.
Hence a filter chooses the device, and a weigher chooses the host.
"""

from nova.scheduler.client import report
from nova.scheduler import filters

from nova_accel.scheduler import placement_cache
from nova_accel.scheduler import ranking


def _get(url, version):
    return report.report_client_singleton().get(url, version=version)


#: shared with the weigher
PLACEMENT = placement_cache.PlacementCache(_get)


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
        snapshot = PLACEMENT.snapshot(spec_obj)
        if snapshot.requests:
            _refresh_room(hosts, snapshot)
            for host in hosts:
                snapshot.instances[host.uuid] = host.num_instances
                host.allocation_candidates[:] = [
                    candidate for _, candidate in ranking.ranked(
                        snapshot.requests, host.allocation_candidates,
                        snapshot)]
        return hosts


def _refresh_room(hosts, snapshot):
    """Ask what earlier servers of the same request have taken.

    Nova does not refresh the candidates between the servers of a multi-create.
    It passes the hosts in the order in which it tried them: a claim on the
    hosts before the taken one failed, because another request was faster.
    """
    if not snapshot.instances:
        return
    taken = [number for number, host in enumerate(hosts)
             if host.num_instances > snapshot.instances.get(
                 host.uuid, host.num_instances)]
    for number, host in enumerate(hosts):
        room = snapshot.refresh_room(host.uuid, set().union(*(
            ranking.devices(snapshot.requests, candidate)
            for candidate in host.allocation_candidates)))
        # another filter may have dropped the taken host; then the first host
        # with room was not tried
        if number >= taken[0] if taken else room:
            break
