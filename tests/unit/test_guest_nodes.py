# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Claims of Nova for guests that may not be on all NUMA nodes of a host."""

import logging
import types
from unittest import mock

from nova.compute import claims
from nova import exception
from nova import objects
import testtools

from nova_accel.virt import guest_nodes

SERVER = '00000000-0000-4000-8000-000000000001'
#: KiB of the pages of the host; Nova's "small", the smallest there is
SMALL, ANY_SMALL = 4, -1


def host(*memory, physnet_on=None):
    """A record of a host with four processors on each node.

    :param memory: MiB of each node that are free.
    :param physnet_on: the node that has the network "net".
    """
    cells = [objects.NUMACell(
        id=number, cpuset=set(range(4 * number, 4 * number + 4)),
        pcpuset=set(), memory=free, cpu_usage=0, memory_usage=0,
        pinned_cpus=set(), siblings=[], mempages=[objects.NUMAPagesTopology(
            size_kb=SMALL, total=256 * free, used=0)],
        socket=0, network_metadata=objects.NetworkMetadata(
            physnets={'net'} if number == physnet_on else set(),
            tunneled=False)) for number, free in enumerate(memory)]
    return objects.ComputeNode(
        numa_topology=objects.NUMATopology(cells=cells)._to_json())


class ClaimTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()
        before = getattr(claims.Claim, guest_nodes._METHOD)
        self.addCleanup(setattr, claims.Claim, guest_nodes._METHOD, before)
        self.assertTrue(guest_nodes._wrapped())

    def claim(self, compute_node, suitable, cells=1, **limits):
        """The nodes on which Nova places a guest of 64 MiB on each.

        :param suitable: sets of nodes, or an error.
        """
        instance = objects.Instance(
            uuid=SERVER, numa_topology=objects.InstanceNUMATopology(cells=[
                objects.InstanceNUMACell(
                    id=number, cpuset={number}, pcpuset=set(), memory=64,
                    pagesize=ANY_SMALL) for number in range(cells)]))
        found = mock.Mock(side_effect=[suitable])
        tracker = types.SimpleNamespace(
            pci_tracker=types.SimpleNamespace(stats=None),
            **{guest_nodes._MARK: types.SimpleNamespace(suitable=found)})
        made = claims.Claim(
            None, instance, 'node', tracker, compute_node,
            objects.InstancePCIRequests(requests=[]),
            limits={'numa_topology': objects.NUMATopologyLimits(
                cpu_allocation_ratio=1.0, ram_allocation_ratio=1.0,
                **limits)})
        return [cell.id for cell in made.claimed_numa_topology.cells]

    def test_among_the_suitable(self):
        for suitable, expected in (
                ([], [1]), ([(0,)], [0]), ([(2,)], [2]), ([(0, 2)], [2]),
                # on none of them there is room
                ([(3,)], [1])):
            with self.subTest(suitable):
                self.assertEqual(expected, self.claim(
                    host(100, 300, 200, 10), suitable))

    def test_sets_of_nodes_in_turn(self):
        """After a try that failed Nova is asked for what the flavor says."""
        self.assertEqual([0, 2], sorted(self.claim(
            host(100, 300, 200, 10), [(0, 3), (0, 2), (1, 2)], cells=2)))

    def test_network_on_another_node(self):
        """Which its physical network is on, Nova demands before ours."""
        net = objects.NetworkMetadata(physnets={'net'}, tunneled=False)
        self.assertEqual([1], self.claim(
            host(100, 100, physnet_on=1), [(0,)], network_metadata=net))

    def test_error_of_ours(self):
        logging.disable(logging.CRITICAL)
        self.addCleanup(logging.disable, logging.NOTSET)
        self.assertEqual([1], self.claim(host(100, 300), OSError('broken')))

    def test_no_room(self):
        with self.assertRaises(exception.ComputeResourcesUnavailable):
            self.claim(host(10, 10), [(0,)])

    def test_other_release(self):
        """Nova without what we listen to: said, and nothing else."""
        tracker = types.SimpleNamespace(instance_claim=lambda: None)
        before = dict(vars(tracker))
        with self.assertLogs('nova_accel', 'WARNING') as log:
            guest_nodes.GuestNodes(None).watch(
                types.SimpleNamespace(rt=tracker))
        self.assertIn('does not show when it places a guest', log.output[0])
        self.assertEqual(before, vars(tracker))
