# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Orders the allocation candidates of each host; drops no host.

Nova claims element 0 of host_state.allocation_candidates (scheduler manager,
31 to 34), and calls weighers only with two hosts or more: so that it takes a
filter to choose the device, and a weigher to choose the host.
"""

from nova.scheduler.client import report
from nova.scheduler import filters

from nova_accel.scheduler import functions
from nova_accel.scheduler import ranking


def _get(url, version):
    return report.report_client_singleton().get(url, version=version)


#: shared with the weigher
PLACEMENT = functions.Functions(_get)


class AcceleratorFilter(filters.BaseHostFilter):
    """Puts the candidate first whose devices suit the server best."""

    # there are no candidates in a rebuild: the server keeps its devices
    RUN_ON_REBUILD = False

    def filter_all(self, filter_obj_list, spec_obj):
        """Called once for each server of a request, with all hosts.

        :param filter_obj_list: list of HostState.
        :param spec_obj: RequestSpec.
        :returns: list of the same HostState.
        """
        hosts = list(filter_obj_list)
        known = PLACEMENT.scheduling(spec_obj)
        if known.requests:
            _look_again(hosts, known)
            for host in hosts:
                known.instances[host.uuid] = host.num_instances
                host.allocation_candidates[:] = [
                    candidate for _, candidate in ranking.ranked(
                        known.requests, host.allocation_candidates, known)]
        return hosts


def _look_again(hosts, known):
    """Learn what the servers scheduled before in this request have taken.

    Nova does not refresh the candidates between the servers of a multi-create,
    but hands the hosts over in the order in which it tried them: those before
    the one that was taken failed to be claimed, because somebody else was
    faster.
    """
    if not known.instances:
        return
    taken = [number for number, host in enumerate(hosts)
             if host.num_instances > known.instances.get(
                 host.uuid, host.num_instances)]
    for number, host in enumerate(hosts):
        room = known.look_again(host.uuid, set().union(*(
            ranking.devices(known.requests, candidate)
            for candidate in host.allocation_candidates)))
        # another filter may have dropped the host that was taken; then the
        # first with room is one that was not tried
        if number >= taken[0] if taken else room:
            break
