# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Where in the host the devices of a server are."""

import dataclasses

from nova_accel import exception
from tests.host import base

GPU = 'CUSTOM_ACCELERATOR_GPU'


def below(bus, port=0):
    """The bridges of a device: a root complex and one of its ports."""
    return [f'pci0000:{bus}', f'0000:{bus}:{port:02x}.0']


#: two nodes; two root complexes on each; two GPUs below each of these, in part
#: behind the same port
GPUS = {
    '0000:11:00.0': (0, below('10')), '0000:13:00.0': (0, below('10', 2)),
    '0000:21:00.0': (0, below('20')), '0000:22:00.0': (0, below('20')),
    '0000:91:00.0': (1, below('90')), '0000:92:00.0': (1, below('90')),
    '0000:a1:00.0': (1, below('a0')), '0000:a3:00.0': (1, below('a0', 2)),
}
A, B, C, D, E, F, G, H = GPUS


class TopologyTestCase(base.HostTestCase):

    def start(self, **kinds):
        self.start_host(
            gpus=[{'address': address, 'numa_node': node, 'bridges': bridges}
                  for address, (node, bridges) in GPUS.items()],
            drivers=('gpu', 'pci', 'dfl'), **kinds)

    def boot(self, *amounts, specs=(), allocation=(), **nova):
        """A server with groups of so many GPUs, and more.

        :param nova: what Nova has given it, as in request.Server.
        """
        server = self.host.cloud.add_server({
            **{f'resources{number}:{GPU}': str(amount)
               for number, amount in enumerate(amounts, 1)}, **dict(specs)})
        self.host.cloud.set_server(server, **nova)
        self.host.cloud.allocate(server, {
            **(self.host.allocation(A, GPU, sum(amounts)) if amounts else {}),
            **dict(allocation)})
        self.host.spawn(server)
        return server


class PlannedTest(TopologyTestCase):
    """What is told before Nova chooses the NUMA nodes of a guest."""

    def nodes(self, amount):
        """The nodes on which a guest may be that demands so many GPUs."""
        server = self.host.cloud.add_server({
            f'resources1:{GPU}': str(amount),
            'accel:numa_affinity': 'required'})
        found = []
        for node in (0, 1, 2):
            self.host.cloud.set_server(server, numa_nodes=[node])
            if self.host.accelerators.can_have(
                    self.host.cloud.server(server),
                    self.host.allocation(A, GPU, amount)):
                found.append(node)
        self.assertEqual(
            [], self.host.holdings.of(server))
        return found

    def test_what_is_free_there(self):
        self.start()
        self.assertEqual(([0, 1], []), (self.nodes(4), self.nodes(5)))
        self.boot(3)
        self.assertEqual(([0, 1], [1]), (self.nodes(1), self.nodes(2)))

    def test_server_that_moves_within_its_host(self):
        """It keeps what it has until the move is confirmed."""
        self.start()
        required = {'accel:numa_affinity': 'required'}
        server = self.boot(2, specs=required, numa_nodes=[0])
        bigger = {f'resources1:{GPU}': '4', **required}
        for node, expected in (0, False), (1, True):
            self.assertEqual(expected, self.host.accelerators.can_have(
                dataclasses.replace(
                    self.host.cloud.server(server), extra_specs=bigger,
                    numa_nodes=frozenset([node])),
                self.host.allocation(A, GPU, 4), moving=True), node)
        self.host.migrate_away(server)
        self.host.cloud.set_server(server, extra_specs=bigger, numa_nodes=[1])
        self.host.cloud.allocate(server, self.host.allocation(A, GPU, 4))
        self.host.spawn(server)
        self.assertHas(server, E, F, G, H)

    def test_nothing_allocated(self):
        self.start()
        server = self.host.cloud.add_server({f'resources1:{GPU}': '1'})
        self.assertFalse(self.host.accelerators.can_have(
            self.host.cloud.server(server), {}))


class ClosestTest(TopologyTestCase):

    def test_switch_root_node(self):
        self.start()
        one = self.boot(2)
        self.assertHas(one, C, D)
        # of the other pair nothing is taken for a single one
        self.assertHas(self.boot(1), A)
        self.assertHas(self.boot(1), B)
        self.host.delete(one)
        self.assertHas(self.boot(3), E, F, G)

    def test_groups_of_a_server(self):
        """Together they are as close as one group would be."""
        self.start()
        for amounts in (1, 1), (2,):
            server = self.boot(*amounts)
            self.assertHas(server, C, D)
            self.host.delete(server)
        self.assertHas(self.boot(1), A)
        self.assertHas(self.boot(2, 1, 1), E, F, G, H)

    def test_devices_of_several_kinds(self):
        """A card of which there is one, and GPUs where it is."""
        self.config.config(group='accel', pci_devices=[
            'vendor=1ac1 type=AI'])
        self.start(others=[
            {'address': '0000:a4:00.0', 'vendor': '1ac1', 'device': '0001',
             'numa_node': 1, 'bridges': below('a0', 3)},
            {'address': '0000:14:00.0', 'vendor': '1ac1', 'device': '0001',
             'numa_node': 0, 'bridges': below('10', 3)}])
        name = 'CUSTOM_ACCELERATOR_AI'
        servers = [self.boot(1, specs={f'resources9:{name}': '1'},
                             allocation=self.host.allocation(
                                 '0000:a4:00.0', name)) for _ in range(2)]
        self.assertHas(servers[0], A, '0000:14:00.0')
        self.assertHas(servers[1], G, '0000:a4:00.0')

    def test_region_that_placement_chose(self):
        self.start_host({'address': '0000:96:00.0', 'numa_node': 1,
                         'bridges': below('90', 4)}, gpus=[
            {'address': address, 'numa_node': node, 'bridges': bridges}
            for address, (node, bridges) in GPUS.items()],
            drivers=('gpu', 'dfl'))
        server = self.boot(2, specs={f'resources9:{base.FPGA}': '1'},
                           allocation=self.host.allocation('0000:96:00.0'))
        self.assertHas(server, E, F, '0000:96:00.1')


class NeighborTest(TopologyTestCase):
    """A network card that Nova has given to the server."""

    def test_gpus_near_it(self):
        self.start(nics=[
            {'address': f'0000:{bus}:00.0', 'numa_node': node,
             'bridges': below(root, port)} for bus, node, root, port in (
                ('14', 0, '10', 2), ('94', 1, '90', 5), ('c4', 1, 'c0', 0))])
        # below the same port, the same root complex, on the same node
        self.assertHas(self.boot(1, pci_devices=['0000:14:00.0']), B)
        self.assertHas(self.boot(1, pci_devices=['0000:94:00.0']), E)
        self.assertHas(self.boot(1, pci_devices=['0000:c4:00.0']), F)
        # it is where Nova put it: what the flavor demands is of accelerators
        self.assertHas(self.boot(2, pci_devices=['0000:94:00.0'], specs={
            'accel:same': 'pcie_root'}), G, H)
        self.assertHas(self.boot(2, pci_devices=['0000:94:00.0']), C, D)
        self.assertHas(self.boot(1, pci_devices=['0000:ff:00.0']), A)


class DemandedTest(TopologyTestCase):
    """What the flavor demands, or the build goes elsewhere."""

    def refused(self, *amounts, nova=(), **specs):
        """What the error says; nothing is claimed."""
        before = self.host.seen()
        error = self.assertRaises(exception.DeviceUnavailable, self.boot,
                                  *amounts, specs=specs, **dict(nova))
        self.assertTrue(error.elsewhere)
        self.assertLess(len(str(error)), 255)
        self.assertEqual(before, self.host.seen())
        return str(error)

    def test_one_node(self):
        self.start()
        for specs in ({'accel:numa_affinity': 'required'},
                      {'accel:same': 'numa'}):
            server = self.boot(2, 1, 1, specs=specs)
            self.assertHas(server, A, B, C, D)
            self.host.delete(server)
            self.assertIn(
                'needs all accelerators on one NUMA node, and the free ones '
                'on this host are 4 GPU on node 0, 4 GPU on node 1: the build '
                'is retried on another host.',
                self.refused(5, **specs))

    def test_as_many_nodes_as_the_guest_has(self):
        self.start()
        self.assertHas(self.boot(8, specs={
            'accel:numa_affinity': 'required', 'hw:numa_nodes': '2'}), *GPUS)

    def test_preferred(self):
        self.start()
        self.assertHas(self.boot(8, specs={
            'accel:numa_affinity': 'preferred'}), *GPUS)

    def test_nodes_of_the_guest(self):
        """Nova has placed it on them before it gets devices."""
        self.start()
        required = {'accel:numa_affinity': 'required'}
        on_1 = {'numa_nodes': [1]}
        self.assertHas(self.boot(3, specs=required, **on_1), E, F, G)
        self.assertIn(
            'needs all accelerators on one NUMA node of its guest (1), and the '
            'free ones on this host are 4 GPU on node 0, 1 GPU on node 1: the '
            'build', self.refused(2, nova=on_1, **required))
        both = self.boot(2, 2, numa_nodes=[0, 1], specs={
            **required, 'hw:numa_nodes': '2'})
        self.assertHas(both, A, B, C, D)
        # it starts again with what it has
        self.host.cloud.set_server(both, numa_nodes=[1])
        self.host.reboot(both)
        self.assertHas(both, A, B, C, D)

    def test_node_of_the_guest_preferred(self):
        self.start()
        self.assertHas(self.boot(1, numa_nodes=[1]), G)
        self.assertHas(self.boot(2, specs={'accel:same': 'numa'},
                                 numa_nodes=[1]), E, F)
        # there is one on its node; they are together elsewhere
        self.assertHas(self.boot(2, specs={'accel:same': 'numa'},
                                 numa_nodes=[1]), C, D)
        # which leaves two that are together to the next one
        self.assertHas(self.boot(1, numa_nodes=[0], specs={
            'accel:numa_affinity': 'none'}), H)

    def test_guest_nodes_and_host_that_tells_none(self):
        self.start_host(gpus=[{'address': address} for address in GPUS],
                        drivers=('gpu',))
        self.assertHas(self.boot(1, numa_nodes=[1], specs={
            'accel:numa_affinity': 'required'}), A)

    def test_one_root(self):
        self.start()
        specs = {'accel:same': 'pcie_root'}
        self.assertIn(
            'below one PCI root complex, and the free ones on this host are 2 '
            'GPU below pci0000:10, 2 GPU below pci0000:20, ',
            self.refused(3, **specs))
        self.assertHas(self.boot(1, 1, specs=specs), C, D)
        self.refused(2, 1, **specs)

    def test_server_that_does_not_care(self):
        """It leaves what is close to the next one."""
        self.start()
        server = self.boot(2, specs={'accel:numa_affinity': 'none'})
        self.assertHas(server, A, B)

    def test_region_that_placement_chose(self):
        """The other devices have to be where it is."""
        self.start_host({'address': '0000:96:00.0', 'numa_node': 1,
                         'bridges': below('90', 4)}, gpus=[
            {'address': address, 'numa_node': node, 'bridges': bridges}
            for address, (node, bridges) in GPUS.items()],
            drivers=('gpu', 'dfl'))
        self.boot(2, specs={'accel:same': 'pcie_root'})
        specs = {f'resources9:{base.FPGA}': '1', 'accel:same': 'pcie_root'}
        fpga = self.host.allocation('0000:96:00.0')
        self.assertRaises(exception.DeviceUnavailable, self.boot, 3,
                          specs=specs, allocation=fpga)
        server = self.boot(2, specs=specs, allocation=fpga)
        self.assertHas(server, E, F, '0000:96:00.1')
        # it starts again with what it has
        self.host.reboot(server)
        self.assertHas(server, E, F, '0000:96:00.1')
        self.host.delete(server)
        self.assertHas(self.boot(1, specs=specs, allocation=fpga),
                       E, '0000:96:00.1')

    def test_host_that_tells_no_nodes(self):
        """All of it is one."""
        self.start_host(gpus=[{'address': address} for address in GPUS],
                        drivers=('gpu',))
        self.assertHas(self.boot(8, specs={'accel:same': 'numa'}), *GPUS)
        self.host.delete(*self.host.cloud.running())
        self.refused(2, **{'accel:same': 'pcie_root'})
