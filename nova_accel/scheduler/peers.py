# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find the hosts of the other members of a server group, before Placement is
asked.

RequestSpec.instance_group names these hosts, but also the host of a server that
moves, and Placement's answer lacks full hosts. Hence the members are read from
the cells, as nova-conductor did for the names. The entries of their compute
nodes have the domains (naming.NEAR_STATISTIC).
"""

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.servicegroup import api as servicegroup

from nova_accel import exception
from nova_accel import log as logging
from nova_accel import naming
from nova_accel import near
from nova_accel import request
from nova_accel.scheduler import scheduling

LOG = logging.getLogger(__name__)


def expect(schedulings: scheduling.Schedulings, context, spec,
           servers: list[str] | None) -> None:
    """Note the domains of the other members of the server group of a request.
    If the flavor requires nearness, restrict Nova's query to these domains.

    :param spec: nova.objects.RequestSpec; changed.
    :param servers: UUIDs of the servers that are scheduled.
    """
    wanted = _wanted(spec)
    if not wanted:
        return
    servers = servers or [spec.instance_uuid]
    members: tuple[near.Domains, ...] | None = ()
    group = spec.instance_group if 'instance_group' in spec else None
    hosts = group.hosts if group and 'hosts' in group else None
    if group and hosts:
        try:
            members = tuple(_domains(context, group, servers))
        except Exception as error:
            LOG.warning('The hosts of the server group %(group)s could not be '
                        'read from the cells: %(error)s',
                        {'group': group.uuid, 'error': error})
            members = None
    only = ({} if scheduling.names_host(spec)
            else near.shared(wanted, members or ()))
    schedulings.expect(spec, scheduling.Expected(
        len(servers), members, only, tuple(hosts or ())))
    spec.root_required.update(only.values())


def _wanted(spec):
    if 'extra_specs' not in spec.flavor:
        return ()
    try:
        return request.affinity(spec.flavor.extra_specs).levels
    except exception.AcceleratorError:
        # nova-api refuses such flavors, so this one bypassed it
        return ()


def _domains(context, group, servers):
    """Return the domains of the hosts that the other members of a server group
    are on.

    If one of the servers is evacuated, members on hosts that are down are left
    out, because they have to be evacuated as well.

    :param servers: UUIDs of the servers that are scheduled.

    :raises LookupError: a cell did not answer.
    """
    def in_cell(cell):
        found = []
        services = servicegroup.API()
        for server in objects.InstanceList.get_by_filters(
                cell, {'uuid': group.members, 'deleted': False},
                expected_attrs=[]):
            if not server.host:
                continue
            try:
                node = objects.ComputeNode.get_by_host_and_nodename(
                    cell, server.host, server.node)
                is_up = services.service_is_up(
                    objects.Service.get_by_compute_host(cell, server.host))
            except nova_exception.NotFound:
                # it was deleted
                continue
            found.append((server.uuid in servers, is_up, naming.near_of(
                (node.stats or {}).get(naming.NEAR_STATISTIC, '').split())))
        return found

    answers = nova_context.scatter_gather_skip_cell0(context, in_cell)
    for cell, answer in answers.items():
        if nova_context.is_cell_failure_sentinel(answer):
            raise LookupError(f'cell {cell} did not answer')
    there = [one for answer in answers.values() for one in answer]
    evacuates = any(is_own and not is_up for is_own, is_up, _ in there)
    return [domains for is_own, is_up, domains in there
            if not is_own and (is_up or not evacuates)]
