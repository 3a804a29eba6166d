# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NCCL's topology file, read by NCCL's rules, against paths of the host."""

import collections
import itertools
import json
import os
import random
import re
import subprocess
import sys

import testtools

from nova_accel.host import pci
from nova_accel.virt import guest_devices
from tests.unit.host import SimulatedHost

ROOT, PORT, UP = 'pci0000:17', '0000:17:01.0', '0000:18:00.0'
#: two below one switch, one below another of the same root
NEAR, NEAR_TOO, FAR = '0000:1a:00.0', '0000:1b:00.0', '0000:3a:00.0'
THREE = [
    {'address': NEAR, 'bridges': [ROOT, PORT, UP, '0000:19:00.0']},
    {'address': NEAR_TOO, 'bridges': [ROOT, PORT, UP, '0000:19:01.0']},
    {'address': FAR, 'bridges': [ROOT, '0000:17:02.0', '0000:38:00.0',
                                 '0000:39:00.0']}]
PAGE = os.path.join(os.path.dirname(__file__), '../../docs/source/tenants.rst')

XML = """<domain><devices>
<controller type="pci" index="0" model="pcie-root"/>
<controller type="pci" index="1" model="pcie-root-port">
 <address type="pci" domain="0x0000" bus="0x00" slot="0x01" function="0x0"/>
</controller>
<controller type="pci" index="2" model="pcie-expander-bus">
 <target busNr="250"><node>1</node></target>
 <address type="pci" domain="0x0000" bus="0x00" slot="0x03" function="0x0"/>
</controller>
<controller type="pci" index="3" model="pcie-root-port">
 <address type="pci" domain="0x0000" bus="0x02" slot="0x00" function="0x0"/>
</controller>
<controller type="pci" index="4" model="pcie-root-port">
 <address type="pci" domain="0x0000" bus="0x02" slot="0x01" function="0x0"/>
</controller>
<controller type="usb" index="3"/>
{}
</devices></domain>"""


def hostdev(address, bus):
    """In guest XML, behind the controller with an index."""
    domain, of_host, slot, function = re.split('[:.]', address)
    return (f'<hostdev><source><address domain="0x{domain}" bus="0x{of_host}" '
            f'slot="0x{slot}" function="0x{function}"/></source>'
            f'<address type="pci" domain="0x0000" bus="0x{bus:02x}" '
            f'slot="0x00" function="0x0"/></hostdev>')


def parsed(text):
    """(name, attributes, children), as xmlGetNode() of NCCL reads elements:
    a blank before each attribute, quotes, and nothing between elements."""
    top, rest = _element(text)
    if rest:
        raise ValueError(rest)
    return top


def _element(text):
    opened = re.match(r'<([a-z]+)((?: [a-z_]+="[^"]{0,253}")*)(/?)>', text)
    name, attributes, closed = opened.groups()
    attributes = dict(re.findall(' ([a-z_]+)="([^"]*)"', attributes))
    text, children = text[opened.end():], []
    while not closed:
        if text.startswith(f'</{name}>'):
            text, closed = text[len(name) + 3:], True
        else:
            child, text = _element(text)
            children.append(child)
    return (name, attributes, children), text


class Graph:
    """What NCCL makes of a file."""

    def __init__(self, text):
        name, attributes, cpus = parsed(text)
        assert (name, attributes) == ('system', {'version': '1'}), text
        self.above, self.bus_ids = {}, []
        for cpu in cpus:
            assert cpu[0] == 'cpu' and list(cpu[1]) == ['numaid'], cpu
            self._add(cpu[2], f'cpu {cpu[1]["numaid"]}')

    def _add(self, nodes, parent):
        for name, attributes, children in nodes:
            assert name == 'pci' and len(attributes) <= 16, name
            bus_id = attributes['busid']
            assert re.fullmatch(
                '[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-9a-f]', bus_id)
            if bus_id.startswith('ffff'):
                # the guest cannot read the class of it
                assert attributes['class'] == '0x060400'
                assert children
            else:
                assert not children
            self.bus_ids.append(bus_id)
            self.above[bus_id] = parent
            self._add(children, bus_id)

    def path(self, device):
        found = []
        while device in self.above:
            device = self.above[device]
            found.append(device)
        return found

    def distance(self, one, other):
        """The type of a path, as ncclTopoSetPaths() of paths.cc has it."""
        return distance(self.path(one), self.path(other))


def distance(one, other):
    """:param one: switches above a device, the next first, then its CPU."""
    if one[-1] != other[-1]:
        return 'SYS'
    meets = next(name for name in one if name in other)
    if meets == one[-1]:
        return 'PHB'
    return 'PIX' if meets == one[0] == other[0] else 'PXB'


def walked(place, node):
    """The same of a directory of sysfs, as ncclTopoGetXmlFromSys() walks up:
    two names at a time, until one is not an address."""
    parts, found = place.split('/'), []
    at = len(parts) - 1
    while True:
        for step in 1, 2:
            if not pci.ADDRESS.fullmatch(parts[at - step]):
                return [*found, f'cpu {node}']
        at -= 2
        found.append(parts[at])


def trees(seed):
    """Devices of a host, below ports, bridges and cascades of switches."""
    choose, devices = random.Random(seed), []
    numbers = (f'0000:{bus:02x}:{slot:02x}.0'
               for bus in range(1, 250) for slot in range(4))
    for root in range(choose.randint(1, 3)):
        #: chains below which devices may be
        chains = [[f'pci{root:04x}:00']]
        for _ in range(choose.randint(1, 8)):
            above = choose.choice(chains)
            # a port, a bridge below it, or a whole switch
            for _ in range(choose.choice((1, 1, 2, 2, 2))):
                above = [*above, next(numbers)]
                chains.append(above)
        for _ in range(choose.randint(1, 5)):
            devices.append({
                'address': next(numbers), 'numa_node': root,
                'bridges': choose.choice(chains)})
    return devices


class TopologyTest(testtools.TestCase):

    def topology(self, devices, nodes=None):
        """:returns: the file, and host address -> guest address."""
        self.kernel = self.useFixture(SimulatedHost(gpus=devices)).kernel
        guest = {device['address']: f'0000:{n:02x}:00.0'
                 for n, device in enumerate(devices, 1)}
        return guest_devices.topology(self.kernel, [
            guest_devices.Place(host, place, nodes[host] if nodes
                                else guest_devices.NO_NODE)
            for host, place in guest.items()]), guest

    def test_brute_force(self):
        """Each two devices are as far from each other as on the host."""
        seen = collections.Counter()
        for seed in range(60):
            devices = trees(seed)
            nodes = {d['address']: d['numa_node'] for d in devices}
            text, guest = self.topology(devices, nodes)
            above = {host: walked(self.kernel.readlink(pci.path(host)), node)
                     for host, node in nodes.items()}
            expected = {pair: distance(*(above[host] for host in pair))
                        for pair in itertools.combinations(nodes, 2)}
            if not text:
                self.assertLessEqual({*expected.values()}, {'PHB', 'SYS'})
                continue
            graph = Graph(text)
            self.assertEqual(expected, {
                pair: graph.distance(*(guest[host] for host in pair))
                for pair in expected}, seed)
            self.assertEqual(len(graph.above), len(graph.bus_ids))
            self.assertLessEqual({*guest.values()}, {*graph.bus_ids})
            seen.update(expected.values())
        self.assertLess(20, min(seen[kind] for kind in (
            'PIX', 'PXB', 'PHB', 'SYS')), seen)

    def test_all_that_is_told(self):
        """Of switches what a guest cannot read; nothing of their places."""
        text, _ = self.topology(THREE)
        switch = ('class="0x060400" vendor="0x10b5" device="0x8747" '
                  'subsystem_vendor="0x10b5" subsystem_device="0x8747" '
                  'link_width="16" link_speed="16.0 GT/s PCIe"')
        self.assertEqual(
            f'<system version="1"><cpu numaid="-1"><pci '
            f'busid="ffff:ff:01.0" {switch}><pci busid="0000:01:00.0"/>'
            f'<pci busid="0000:02:00.0"/></pci><pci busid="ffff:ff:02.0" '
            f'{switch}><pci busid="0000:03:00.0"/></pci></cpu></system>', text)

    def test_link_of_a_switch(self):
        """It has what both of its ends can."""
        kernel = self.useFixture(SimulatedHost(gpus=THREE)).kernel
        read, of_port = kernel.read_some, {}
        kernel.read_some = lambda path, names: (
            of_port if path.endswith(PORT) else read(path, names))
        for width, speed, link in (
                ('8', '2.5 GT/s PCIe', ('8', '2.5 GT/s PCIe')),
                ('32', '64.0 GT/s PCIe', ('16', '16.0 GT/s PCIe')),
                # NCCL takes what it does not read for 16 lanes of 8 GT/s
                ('16', 'Unknown', (None, None))):
            of_port.update(max_link_width=width, max_link_speed=speed)
            text = guest_devices.topology(kernel, [
                guest_devices.Place(NEAR, '0000:01:00.0', -1),
                guest_devices.Place(NEAR_TOO, '0000:02:00.0', -1)])
            _, _, ((_, _, ((_, switch, _),)),) = parsed(text)
            self.assertEqual(link, (switch.get('link_width'),
                                    switch.get('link_speed')))

    def test_link_that_the_port_in_the_guest_hides(self):
        """QEMU's port has 16 GT/s, and NCCL takes the lower of two."""
        self.topology(THREE)
        for address, at_port, link in (
                (NEAR, '32.0 GT/s PCIe', ('16', '32.0 GT/s PCIe')),
                (NEAR_TOO, '16.0 GT/s PCIe', (None, None))):
            self.kernel.set_fault(
                address, attributes={'max_link_speed': '32.0 GT/s PCIe'},
                port={'max_link_speed': at_port})
            text = guest_devices.topology(self.kernel, [
                guest_devices.Place(address, '0000:01:00.0', -1),
                guest_devices.Place(address, '0000:02:00.0', -1)])
            _, _, ((_, _, ((_, _, ((_, found, _), _)),)),) = parsed(text)
            self.assertEqual(link, (found.get('link_width'),
                                    found.get('link_speed')))

    def test_nothing_to_tell(self):
        """Then NCCL finds in the guest what there is."""
        self.assertEqual('', self.topology(THREE[1:])[0])
        self.assertEqual('', self.topology([
            {'address': NEAR, 'bridges': [ROOT]},
            {'address': FAR, 'bridges': [ROOT]}])[0])
        kernel = self.useFixture(SimulatedHost(gpus=THREE)).kernel
        self.assertEqual('', guest_devices.topology(kernel, [
            guest_devices.Place('5c3e8c0e-5b1c-4d0e-9c59-6a3a4d1f2b7a',
                                '0000:01:00.0', -1)]))

    def test_more_than_nccl_can_read(self):
        devices = [{'address': f'0000:{bus:02x}:00.{function}',
                    'bridges': [ROOT, PORT, UP, f'0000:19:{bus:02x}.0']}
                   for bus in range(0x1a, 0x1f) for function in range(8)]
        places = [
            guest_devices.Place(device['address'], f'0000:{n:02x}:00.0', -1)
            for n, device in enumerate(devices * 4)]
        kernel = self.useFixture(SimulatedHost(gpus=devices)).kernel
        self.assertEqual('', guest_devices.topology(kernel, places))
        self.assertNotEqual('', guest_devices.topology(kernel, places[:100]))


class GuestTest(testtools.TestCase):
    """What is in the list of devices that a guest reads."""

    def setUp(self):
        super().setUp()
        self.kernel = self.useFixture(SimulatedHost(gpus=THREE)).kernel

    def devices(self, **buses):
        """:param buses: name of an address above -> controller of the guest
            behind which it is."""
        places = {globals()[name]: bus for name, bus in buses.items()}
        return guest_devices.with_accelerators(
            None, XML.format(''.join(itertools.starmap(
                hostdev, places.items()))),
            {address: ('accel1', 'GPU') for address in places},
            self.kernel).devices

    def test_last_tag_of_the_first(self):
        first, *others = self.devices(NEAR=3, NEAR_TOO=4, FAR=1)
        self.assertEqual(['accelerator', 'accel1', 'GPU'], first.tags[:-1])
        graph = Graph(first.tags[-1])
        # the root at which libvirt puts devices belongs to no node
        self.assertEqual('cpu 1', graph.path('0000:03:00.0')[-1])
        self.assertEqual('cpu -1', graph.path('0000:01:00.0')[-1])
        self.assertEqual('PIX', graph.distance('0000:03:00.0', '0000:04:00.0'))
        for device in others:
            self.assertEqual(['accelerator', 'accel1', 'GPU'], device.tags)

    def test_no_switch_of_two(self):
        self.assertEqual([['accelerator', 'accel1', 'GPU']] * 2, [
            device.tags for device in self.devices(NEAR=3, FAR=4)])

    def test_command_of_the_page(self):
        """A guest has the file by what the page says."""
        with open(PAGE, encoding='utf-8') as file:
            program, = re.findall(
                r"\| python3 -c '\n(.*?)' >", file.read(), re.DOTALL)
        for devices in (self.devices(NEAR=3, NEAR_TOO=4),
                        self.devices(NEAR=3, FAR=4), ()):
            data = json.dumps({'devices': [
                {'type': 'disk', 'tags': device.tags} for device in devices]
                + [{'type': 'nic', 'tags': []}]})
            done = subprocess.run(
                [sys.executable, '-c', re.sub('(?m)^    ', '', program)],
                input=data, capture_output=True, text=True, check=True)
            self.assertEqual(''.join(
                f'{tag}\n' for device in devices for tag in device.tags[3:]),
                done.stdout)
