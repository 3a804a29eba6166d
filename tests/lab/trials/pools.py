# Licensed under the Apache License, Version 2.0. See LICENSE.

import json

from tests.lab import machine
from tests.lab.trials import base
from tests.lab.trials import kinds

NIC_OF_TWO = {'CUSTOM_ACCELERATOR_NIC': 2}


class Pool(base.Trial):
    """Four VFs of a network card share one provider."""

    def setUp(self):
        super().setUp()
        self.addCleanup(self.as_usual)
        self.restart('[accel]\npools = host\n'
                     f'virtual_functions = {kinds.NIC}=4\n')

    def restart(self, text):
        """Start nova-compute with these options; the VFs are made anew."""
        self.compute.stop()
        machine.check(f'echo 0 > /sys/bus/pci/devices/{kinds.NIC}/'
                      f'sriov_numvfs')
        self.compute.configure(text)
        before = self.compute.reported()
        machine.check('systemctl --no-block start nova-compute')
        self.cloud.wait('nova-compute', lambda: (
            machine.check_compute() or self.compute.reported() != before))
        self.cloud.wait('VFs in Placement', lambda: (
            self.pool() if text else kinds.NIC in self.cloud.providers()))

    def as_usual(self):
        # no VF is taken away under a guest, or before it is clean
        self.cloud.clear()
        self.wait_clean()
        self.restart('')

    def pool(self):
        """Name of the provider with all four, if there is one."""
        return next((name for name, provider in self.cloud.providers().items()
                     if name.startswith('pool_NIC_') and provider[
                         'inventories'].get('CUSTOM_ACCELERATOR_NIC', {}).get(
                             'total') == 4), None)

    def test_1_two_servers_of_two(self):
        """Two servers of two VFs each, from one provider of four; no third.

        A VF of the first server is the next one's when that is gone.
        """
        flavor = self.cloud.of_profile({
            'resources:CUSTOM_ACCELERATOR_NIC': 2})
        servers = [self.cloud.boot(flavor) for _ in range(2)]
        pool = self.pool()
        for server in servers:
            self.assertEqual({pool: NIC_OF_TWO},
                             self.cloud.allocations(server))
            self.assertEqual(2, self.cloud.console(server).count(
                ' 8086:10ca class=020000'))
        held = [self.held(server) for server in servers]
        self.assertEqual(4, len(set().union(*held)))
        _server, fault = self.cloud.refused(flavor, host=None)
        self.assertIn('No valid host', fault)
        self.cloud.delete(servers[0])
        self.wait_released(held[0])
        self.assertEqual(held[0], self.held(self.cloud.boot(flavor)))

    def claims(self):
        return json.loads(machine.check(
            '/opt/openstack/bin/nova-accel claims -f json'))

    def held(self, server):
        """Addresses of the VFs that a server has."""
        return {claim['Handle'] for claim in self.claims()
                if claim['Server'] == server.id}

    def wait_released(self, handles):
        self.cloud.wait('VFs that are free', lambda: not handles & {
            claim['Handle'] for claim in self.claims()})
