# Licensed under the Apache License, Version 2.0. See LICENSE.

import re

from tests.lab import machine
from tests.lab.trials import base

#: on NUMA node 1 of the machine
FAR = '0000:81:00.0'
_OPTIONS = ('[accel]\npci_devices = vendor=1af4 product=1044 '
            f'address={FAR} type=AI\n')


class Nodes(base.Trial):
    """A device on the second of the host's two NUMA nodes."""

    def setUp(self):
        super().setUp()
        self.addCleanup(self.restart, '')
        self.restart(_OPTIONS)

    def restart(self, text):
        super().restart(text)
        self.cloud.wait('the far device in Placement', lambda: (
            FAR in self.cloud.providers()) == bool(text))

    def flavor(self, nodes):
        return self.cloud.flavor(nodes, **{
            'resources1:CUSTOM_ACCELERATOR_AI': '1',
            'accel:numa_affinity': 'required',
            'hw:numa_nodes': str(nodes)})

    def nodes(self, server):
        """(NUMA node on which the guest sees the device, {node of the guest:
        node of the host})."""
        console = self.cloud.console(server)
        bridges = {int(bus, 16): int(node, 16) for bus, node in re.findall(
            r'^BRIDGE bus=(..) node=(..)$', console, re.MULTILINE)}
        # Nova gives each guest such a device of its own, at no such bridge
        device, = (
            bus for bus in (int(found, 16) for found in re.findall(
                r'^PCI (..):00.0 1af4:1044', console, re.MULTILINE))
            if bridges and bus > min(bridges))
        # its bus is the next one below the bridge's
        bridge = max(bus for bus in bridges if bus < device)
        xml = machine.check(f'virsh dumpxml {server.id}')
        return bridges[bridge], {
            int(cell): int(node) for cell, node in re.findall(
                r"<memnode cellid='(.)'.* nodeset='(.)'", xml)}

    def test_1_guest_is_where_its_device_is(self):
        """Nova would take the first node of the host; the device is on the
        second, and the guest is told."""
        seen, host = self.nodes(self.cloud.boot(self.flavor(1)))
        self.assertEqual((0, {0: 1}), (seen, host))

    def test_2_guest_of_two_nodes(self):
        """The guest reads from its own PCI topology which of its nodes the
        device is on."""
        seen, host = self.nodes(self.cloud.boot(self.flavor(2)))
        self.assertEqual({0, 1}, {*host.values()})
        self.assertEqual(1, host[seen])
