# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Where in the host the devices of a server are."""

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

    def boot(self, *amounts, specs=(), allocation=()):
        """A server with groups of so many GPUs, and more."""
        return self.host.boot({
            **{f'resources{number}:{GPU}': str(amount)
               for number, amount in enumerate(amounts, 1)}, **dict(specs)},
            {**(self.host.allocation(A, GPU, sum(amounts)) if amounts else {}),
             **dict(allocation)})


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
