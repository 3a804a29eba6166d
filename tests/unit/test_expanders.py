# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Guest XML: PCIe expander buses and ports, as Nova's classes write it."""

from xml.etree import ElementTree

import fixtures
from nova.virt.libvirt import config
from nova.virt.libvirt import designer
import testtools

from nova_accel import model
from nova_accel.virt import guest

PCI, MDEV = model.HandleType.PCI, model.HandleType.MDEV
A = model.AttachHandle(PCI, '0000:3b:00.1')
B = model.AttachHandle(PCI, '0000:5e:00.0', companions=('0000:5e:00.1',))
C = model.AttachHandle(MDEV, '8a6e0a3c-62d8-4a4e-9d3b-6fd0f1e5f3aa')
D = model.AttachHandle(PCI, '0000:d8:00.0')


def guest_xml(host_nodes=(1, 0), machine='pc-q35-10.0', ports=2):
    """As Nova makes it, of a server whose nodes are tied to these."""
    xml = config.LibvirtConfigGuest()
    xml.uuid, xml.name, xml.virt_type = 'the-server', 'instance-1', 'kvm'
    xml.os_type, xml.os_mach_type = 'hvm', machine
    xml.cpu = config.LibvirtConfigGuestCPU()
    if host_nodes is not None:
        xml.cpu.numa = config.LibvirtConfigGuestCPUNUMA()
        xml.numatune = config.LibvirtConfigGuestNUMATune()
        for cell, node in enumerate(host_nodes):
            memory = config.LibvirtConfigGuestNUMATuneMemNode()
            designer.set_numa_memnode(memory, cell, node)
            xml.numatune.memnodes.append(memory)
    xml.add_device(config.LibvirtConfigGuestUSBHostController())
    if ports:
        xml.add_device(config.LibvirtConfigGuestPCIeRootController())
    for _ in range(ports):
        xml.add_device(config.LibvirtConfigGuestPCIeRootPortController())
    return xml


def add(xml, nodes, *handles):
    hostdevs().add(xml, handles, nodes)
    return ElementTree.fromstring(xml.to_xml())


def hostdevs():
    return guest.Hostdevs(
        lambda hostdev, managed: setattr(hostdev, 'managed', managed))


def controllers(xml):
    """(index, model, first bus and node, or where it is plugged in)."""
    for controller in xml.iterfind("devices/controller[@type='pci']"):
        target, place = controller.find('target'), controller.find('address')
        yield (controller.get('index'), controller.get('model'),
               (target.get('busNr'), target.findtext('node'))
               if target is not None else place_of(place))


def place_of(address):
    return address is not None and tuple(filter(None, map(
        address.get, ('bus', 'slot', 'function', 'multifunction'))))


def ports(xml):
    """Source of a hostdev -> index of the port that it is behind."""
    found = {}
    for hostdev in xml.iterfind('devices/hostdev'):
        source, place = hostdev.find('source/address'), hostdev.find('address')
        name = source.get('uuid') or '{}:{}.{}'.format(*(
            source.get(part)[2:] for part in ('bus', 'slot', 'function')))
        found[name] = place is not None and int(place.get('bus'), 0)
    return found


class ExpandersTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger(
            'nova_accel.virt.expanders'))

    def test_each_device_on_its_node(self):
        xml = add(guest_xml(), {A.address: 1, B.address: 0, C.address: 1},
                  A, B, C)
        self.assertEqual([
            (None, 'pcie-root', False),
            (None, 'pcie-root-port', False), (None, 'pcie-root-port', False),
            ('3', 'pcie-expander-bus', ('251', '0')),
            ('4', 'pcie-root-port', ('0x03', '0x00', '0x0', 'on')),
            ('5', 'pcie-root-port', ('0x03', '0x00', '0x1')),
            ('6', 'pcie-expander-bus', ('246', '1')),
            ('7', 'pcie-root-port', ('0x06', '0x00', '0x0', 'on')),
            ('8', 'pcie-root-port', ('0x06', '0x00', '0x1'))],
            list(controllers(xml)))
        self.assertEqual({'3b:00.1': 4, C.address: 5, '5e:00.0': 7,
                          '5e:00.1': 8}, ports(xml))
        self.assertEqual('', self.log.output)

    def test_nova_reads_it_back(self):
        xml = add(guest_xml(), {A.address: 1, C.address: 1}, A, C)
        read = config.LibvirtConfigGuest()
        read.parse_str(ElementTree.tostring(xml))
        self.assertEqual(
            {A.address, C.address},
            {guest._address(device) for device in read.devices} - {''})

    def test_without_ports_of_nova(self):
        """libvirt then makes the root, number 0, and the ports it needs."""
        xml = add(guest_xml(ports=0), {A.address: 0}, A)
        self.assertEqual(['1', '2'], [c[0] for c in controllers(xml)])
        self.assertEqual({'3b:00.1': 2}, ports(xml))

    def test_more_ports_than_functions_of_a_slot(self):
        vfs = [model.AttachHandle(PCI, f'0000:3b:{n // 8:02x}.{n % 8}')
               for n in range(10)]
        xml = add(guest_xml((0,)), {vf.address: 0 for vf in vfs}, *vfs)
        *_, eighth, ninth, tenth = controllers(xml)
        self.assertEqual([
            ('0x03', '0x00', '0x7'), ('0x03', '0x01', '0x0', 'on'),
            ('0x03', '0x01', '0x1')], [eighth[2], ninth[2], tenth[2]])
        self.assertEqual(10, len({*ports(xml).values()}))

    def test_device_on_another_node(self):
        xml = add(guest_xml(), {A.address: 1, D.address: 2}, A, B, D)
        self.assertEqual({'3b:00.1': 4, '5e:00.0': False, '5e:00.1': False,
                          'd8:00.0': False}, ports(xml))
        self.assertIn('cannot see the NUMA node of 0000:d8:00.0, which is on '
                      'node 2 of the host: the guest is on 0, 1.',
                      self.log.output)
        self.assertIn('0000:5e:00.0, which is on an unknown node of the host',
                      self.log.output)

    def test_too_many(self):
        vfs = [model.AttachHandle(PCI, f'0000:3b:{n // 8:02x}.{n % 8}')
               for n in range(64)]
        for count, told in ((63, 63), (64, 0)):
            xml = add(guest_xml((0,)), dict.fromkeys(
                (vf.address for vf in vfs), 0), *vfs[:count])
            self.assertEqual(told, len([*filter(None, ports(xml).values())]))
        self.assertIn('its 64 accelerators: that would need 129 PCI buses of '
                      '128.', self.log.output)

    def left_alone(self, *args, **kwargs):
        xml = guest_xml(*args, **kwargs)
        before = list(controllers(ElementTree.fromstring(xml.to_xml())))
        after = add(xml, {A.address: 0}, A)
        self.assertEqual(before, list(controllers(after)))
        self.assertEqual({'3b:00.1': False}, ports(after))
        return self.log.output

    def test_server_without_devices(self):
        add(guest_xml(machine='pc'), {})
        self.assertEqual('', self.log.output)

    def test_guest_without_nodes(self):
        self.assertEqual('', self.left_alone(None))

    def test_machine_type(self):
        self.assertIn('machine type pc has no PCIe expander bus',
                      self.left_alone(machine='pc'))
        self.assertIn('machine type virt has no', self.left_alone(
            machine='virt'))
        self.left_alone(machine=None)

    def test_unknown_host_nodes(self):
        self.assertIn('libvirt does not show the NUMA nodes of the host',
                      self.left_alone(()))


class Running:
    """A guest that runs, as nova.virt.libvirt.guest.Guest."""

    def __init__(self, xml):
        self.xml = xml

    def get_xml_desc(self):
        return self.xml

    def attach_device(self, device, persistent=False, live=False):
        tree = ElementTree.fromstring(self.xml)
        tree.find('devices').append(ElementTree.fromstring(device.to_xml()))
        self.xml = ElementTree.tostring(tree)

    def detach(self, *sources):
        tree = ElementTree.fromstring(self.xml)
        devices = tree.find('devices')
        for hostdev in list(devices.iterfind('hostdev')):
            if ports_of(hostdev) & set(sources):
                devices.remove(hostdev)
        self.xml = ElementTree.tostring(tree)


def ports_of(hostdev):
    domain = ElementTree.Element('domain')
    ElementTree.SubElement(domain, 'devices').append(hostdev)
    return set(ports(domain))


class AttachTest(testtools.TestCase):
    """A device comes back: after suspend, or when it was programmed."""

    def setUp(self):
        super().setUp()
        xml = guest_xml()
        add(xml, {A.address: 1, B.address: 0, C.address: 1}, A, B, C)
        self.guest = Running(xml.to_xml())
        self.before = ports(ElementTree.fromstring(self.guest.xml))

    def now(self):
        return ports(ElementTree.fromstring(self.guest.xml))

    def test_to_where_it_was(self):
        self.guest.detach('5e:00.0', '5e:00.1', C.address)
        self.assertEqual({'3b:00.1': 4}, self.now())
        hostdevs().attach(self.guest, [A, B, C])
        self.assertEqual(self.before, self.now())

    def test_port_that_another_device_took(self):
        self.guest.detach('3b:00.1')
        tree = ElementTree.fromstring(self.guest.xml)
        disk = ElementTree.SubElement(tree.find('devices'), 'disk')
        ElementTree.SubElement(disk, 'address', type='pci', bus='0x04')
        self.guest.xml = ElementTree.tostring(tree)
        hostdevs().attach(self.guest, [A])
        self.assertEqual({**self.before, '3b:00.1': False}, self.now())

    def test_device_that_had_none(self):
        hostdevs().attach(self.guest, [D])
        self.assertEqual({**self.before, 'd8:00.0': False}, self.now())

    def test_before_it_starts(self):
        self.guest.detach('3b:00.1', C.address)
        xml = self.guest.xml.decode()
        guest = Running(hostdevs().complete(xml, [A, B, C]))
        self.assertEqual(
            self.before, ports(ElementTree.fromstring(guest.xml)))
        self.assertEqual(guest.xml, hostdevs().complete(
            guest.xml, [A, B, C]))
