# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Make Nova place a guest on the NUMA nodes of its accelerators.

This is for flavors with accel:numa_affinity=required. When Nova claims
resources (nova.compute.claims.Claim), it chooses the nodes of a guest by free
memory and processors. Only then does it call the driver. If all devices that
the server can get are on another node, the build would fail here, and on each
similar host.

Two places of Nova (31 to 34) are wrapped: the resource tracker's claims, which
have the allocations, and Claim._test_numa_topology, which fits the guest into
the entry of the host. The wrapped Claim._test_numa_topology gets an entry in
which only the nodes of the devices have processors. If the guest does not fit
there, Nova chooses without this limit, and the build fails.
"""

from collections.abc import Iterable
import dataclasses
import functools
import inspect
import itertools
import math
import threading

from nova.compute import claims
from nova import objects
from oslo_serialization import jsonutils

from nova_accel.attach import accelerators
from nova_accel import log as logging
from nova_accel.virt import cloud
from nova_accel import wrapping

LOG = logging.getLogger(__name__)

_METHOD = '_test_numa_topology'
_PARAMETERS = ['self', 'compute_node', 'limit']
#: of the resource tracker
_CLAIMS = ('instance_claim', '_move_claim')
_MARK = '_nova_accel_guest_nodes'
#: maximum number of sets of nodes that are tried, under the lock of every
#: build
_SETS = 32


class GuestNodes:
    """Finds the NUMA nodes on which guests can get their devices."""

    def __init__(self, found: accelerators.Accelerators):
        self._accelerators = found
        #: allocations of the server that this thread claims for
        self._claiming = threading.local()

    def watch(self, manager) -> None:
        """Wrap the claims of a nova.compute.manager.ComputeManager, to read
        the allocations of each claim."""
        tracker = getattr(manager, 'rt', None)
        if not (all(hasattr(tracker, name) for name in _CLAIMS)
                and _wrapped()):
            LOG.warning('This release of Nova does not show when it places a '
                        'guest: with accel:numa_affinity=required a build is '
                        'refused if the guest is on another NUMA node than '
                        'its accelerators')
            return
        for name in _CLAIMS:
            wrapping.wrap(tracker, name, functools.partial(
                self._claim, inspect.signature(getattr(tracker, name))))
        setattr(tracker, _MARK, self)

    def _claim(self, parameters, claim, *args, **kwargs):
        try:
            given = parameters.bind(*args, **kwargs).arguments
        except TypeError:
            # an unknown release of Nova; it raises what it must
            given = {}
        self._claiming.allocations = given.get('allocations')
        try:
            return claim(*args, **kwargs)
        finally:
            self._claiming.allocations = None

    def suitable(self, claim, compute_node) -> list[tuple[int, ...]]:
        """Return the sets of NUMA nodes on which a server can get its devices.
        Return [] if Nova's choice of nodes need not be limited, or if no set
        is suitable.

        :param claim: nova.compute.claims.Claim of this thread.
        :param compute_node: nova.objects.ComputeNode
        """
        allocations = getattr(self._claiming, 'allocations', None)
        wanted = claim.numa_topology
        if not (allocations and wanted and 'numa_topology' in compute_node
                and compute_node.numa_topology):
            return []
        server = cloud.server_of(claim.instance)
        moving = isinstance(claim, claims.MoveClaim)
        if moving:
            server = dataclasses.replace(
                server, extra_specs=claim.flavor.extra_specs)
        if not (server.requests and server.affinity.with_guest):
            return []
        nodes = [cell.id for cell in objects.NUMATopology.obj_from_db_obj(
            compute_node.numa_topology).cells]
        count = len(wanted)
        sets = list(itertools.islice(
            itertools.combinations(nodes, count), _SETS))
        found = [chosen for chosen in sets
                 if self._accelerators.can_have(dataclasses.replace(
                     server, numa_nodes=frozenset(chosen)), allocations,
                     moving)]
        if len(found) == math.comb(len(nodes), count):
            return []
        # Nova prefers one of several single nodes itself
        return [tuple(itertools.chain(*found))] if count == 1 and found \
            else found


def _wrapped() -> bool:
    """Wrap Claim._test_numa_topology once. Return whether this Nova has the
    method with the known parameters."""
    original = getattr(claims.Claim, _METHOD, None)
    if original is None or list(
            inspect.signature(original).parameters) != _PARAMETERS:
        return False
    wrapping.wrap(claims.Claim, _METHOD, _test)
    return True


def _test(original, claim, compute_node, limit):
    for nodes in _suitable(claim, compute_node):
        # a try writes its result into the topology
        requested = claim.instance.numa_topology
        claim.instance.numa_topology = requested and requested.obj_clone()
        if original(claim, _only(compute_node, nodes), limit) is None:
            return None
        claim.instance.numa_topology = requested
    return original(claim, compute_node, limit)


def _suitable(claim, compute_node):
    guests = getattr(claim.tracker, _MARK, None)
    try:
        return guests.suitable(claim, compute_node) if guests else []
    except Exception:
        LOG.exception('Server %s is placed without regard to its '
                      'accelerators', claim.instance.uuid)
        return []


def _only(compute_node, nodes: Iterable[int]):
    """Return a copy of a compute node on which guests fit only on some nodes.

    The other NUMA nodes have no processors in the copy. They stay there,
    because Nova reads all nodes to find the node of a physical network.
    """
    limited = compute_node.obj_clone()
    topology = objects.NUMATopology.obj_from_db_obj(limited.numa_topology)
    for cell in topology.cells:
        if cell.id not in nodes:
            cell.cpuset, cell.pcpuset = set(), set()
    limited.numa_topology = jsonutils.dumps(topology.obj_to_primitive())
    return limited
