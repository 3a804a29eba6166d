# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The second story of the demo: two hosts with eight GPUs each."""

from tests.demo import screen
from tests.functional import base
from tests.functional import pools
from tests.functional import process

GPUS = pools.GPUS[:8]
KEY = 'accel1:health'


class FirstHostIsLarger:
    """Give the first host more memory. Nova prefers it among hosts with equal
    devices, so each run takes the host that the picture shows."""

    def _get_connection(self, host_info=None, *more):
        if more[-1] == next(iter(self.HOSTS)):
            host_info = base.fakelibvirt.HostInfo(
                cpu_nodes=2, cpu_cores=2, cpu_threads=2, kB_mem=32 << 20)
        return super()._get_connection(host_info, *more)


class GpuStory(FirstHostIsLarger, pools.PoolsTestBase):

    FRESH_CLOUD = True
    HOSTS = {'gpu1': {'gpus': pools.gpus(GPUS)},
             'gpu2': {'gpus': pools.gpus(GPUS)}}
    #: of the process: set by the demo
    screen: screen.Screen

    def runTest(self):
        self.flags(health=['act'], group='accel')
        self.names, self.failed = {}, set()
        self.screen.forget()
        self.screen.step('Two hosts with eight GPUs each. Small servers and a '
                         'large one share them', 'nova-accel tree')
        self.show()
        self.small_servers()
        train = self.large_server()
        self.gpu_fails(train)
        self.deleted()

    def small_servers(self):
        self.screen.step(
            'Small servers leave a host whole. Each wants one GPU, and all go '
            'to the same host',
            'openstack flavor create gpu1 ... \\\n  --property '
            'resources1:CUSTOM_ACCELERATOR_GPU=1',
            'openstack server create a --flavor gpu1 ...')
        for name in 'a', 'b', 'c':
            self.create(name, 1)
        host, = {self.host_of(server) for server in self.names.values()}
        self.show()
        self.screen.line(f'The filter and the weigher fill {host} first, '
                         f'although Nova spreads servers by default.')

    def large_server(self):
        self.screen.step('Server train wants eight GPUs. One host has them',
                         'openstack server create train --flavor gpu8 ...')
        train = self.create('train', 8)
        self.assertEqual(GPUS, self.assertServer(train, 8))
        self.show()
        return train

    def gpu_fails(self, train):
        self.screen.step('One GPU of server train fails. Its owner reads that '
                         'in the metadata of the server',
                         'openstack server show train -c properties')
        host = self.host_of(train)
        self.kernel(host).set_fault(GPUS[2], dead=True)
        self.failed.add((host, GPUS[2]))
        self.look(host)
        process.until(lambda: self.assertEqual(
            'failed: 1 of 8', self.metadata(train).get(KEY)))
        self.assertServer(train, 8)
        self.show()
        self.screen.line(f'The metadata of train: {KEY} = '
                         f'{self.metadata(train)[KEY]}. The server keeps its '
                         f'devices.')

    def deleted(self):
        self.screen.step('Server train is deleted. No server gets the failed '
                         'GPU',
                         'openstack server delete train',
                         'nova-accel discover')
        train = self.names.pop('train')
        host = self.host_of(train)
        self._delete_server(train)
        self.look(host)
        self.report()
        totals = sorted(total for name, (total, *_) in self.amounts().items()
                        if total)
        self.assertEqual([7, 8], totals)
        self.show()
        self.screen.line(f'Placement offers seven GPUs of {host} now. A server '
                         f'with eight finds no host:')
        refused = self.boot(self.flavor(8), expected_state='ERROR')
        self.screen.line(f'"{self.fault(refused)}"')
        self._delete_server(refused)
        for server in self.names.values():
            self._delete_server(server)

    def look(self, host):
        self.parts(host).inventory.looks.run()

    def metadata(self, server):
        return self.api.get_server(server['id'])['metadata']

    @staticmethod
    def flavor(amount):
        return pools.groups(amount)

    def create(self, name, amount):
        self.names[name] = server = self.boot(self.flavor(amount))
        return server

    def show(self):
        """The GPUs of each host, with the servers whose guests have them."""
        users = {(self.host_of(server), address): name
                 for name, server in self.names.items()
                 for address in self.hostdevs(server)}
        self.screen.rows([
            screen.Card(str(n), host,
                        'failed' if (host, address) in self.failed else '',
                        users.get((host, address), ''))
            for host in self.HOSTS for n, address in enumerate(GPUS, 1)])
