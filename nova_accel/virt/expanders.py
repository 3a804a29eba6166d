# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Add PCIe expander buses, by which a guest sees the NUMA node of a device.

A guest reads the NUMA node of a device from the root of the device's PCI tree
(ACPI _PXM), and the root that every guest has belongs to no node. Each guest
node that is tied to the host node of a device therefore gets a root of its own,
QEMU's pxb-pcie, and each device a root port below it. No root has a free port,
because libvirt would put another device into it.

libvirt keeps the alias of a port. Hence the guest's XML shows the former port
of a device that is attached again (port_of).
"""

from collections.abc import Mapping
import re
from xml.etree import ElementTree

from nova.virt.libvirt import config

from nova_accel import log as logging

LOG = logging.getLogger(__name__)

#: PCI buses of a guest; the lower half belongs to its first root
_ALL_BUSES = 256
_ROOTS_BUSES = 128
#: buses of a root port: its own, and one that the firmware may reserve for hot
#: plug
_PORT_BUSES = 2
#: functions of a PCI slot; a port needs one (multifunction, as libvirt's own)
_FUNCTIONS = 8


class Expander(config.LibvirtConfigGuestController):
    """A root of PCIe devices that belongs to a NUMA node of the guest."""

    def __init__(self, index: int, first_bus: int, node: int):
        super().__init__()
        self.type, self.model = 'pci', 'pcie-expander-bus'
        self.index, self.first_bus, self.node = index, first_bus, node

    def format_dom(self):
        controller = super().format_dom()
        target = self._new_node('target', busNr=str(self.first_bus))
        target.append(self._text_node('node', self.node))
        controller.append(target)
        return controller


class Port(config.LibvirtConfigGuestPCIeRootPortController):
    """The root port of one device, below an expander."""

    def __init__(self, index: int, expander: int, number: int, device: str):
        super().__init__()
        self.index, self.expander = index, expander
        self.number, self.device = number, device

    def format_dom(self):
        controller = super().format_dom()
        controller.append(self._new_node('alias', name=_alias(self.device)))
        slot, function = divmod(self.number, _FUNCTIONS)
        place = address(self.expander, slot, function)
        if not function:
            place.set('multifunction', 'on')
        controller.append(place)
        return controller


class BehindPort:
    """Mixin that puts a hostdev into the port with the given index. If the
    index is None, libvirt chooses the place."""

    port: int | None = None

    def format_dom(self):
        hostdev = super().format_dom()  # type: ignore[misc]
        if self.port is not None:
            hostdev.append(address(self.port))
        return hostdev


def address(bus: int, slot: int = 0, function: int = 0):
    """Return the PCI address of a device in the guest.

    :param bus: index of the PCI controller that the device is plugged into.
    """
    found = config.LibvirtConfigGuestDeviceAddressPCI()
    found.domain, found.bus = '0x0000', f'0x{bus:02x}'
    found.slot, found.function = f'0x{slot:02x}', f'0x{function:x}'
    return found.format_dom()


def add(xml, nodes: Mapping[str, int | None]) -> dict[str, int]:
    """Add expanders and ports to new guest XML.

    :param xml: Nova's LibvirtConfigGuest.
    :param nodes: address as in model.AttachHandle of each device that the
        guest gets -> its NUMA node on the host, or None if unknown.
    :returns: address of a device -> index of its port. libvirt places devices
        without a port, and the log has the reason.
    """
    cells = _cells(xml) if nodes else {}
    if not cells:
        return {}
    below: dict[int, list[str]] = {}
    for device, node in nodes.items():
        if node in cells:
            below.setdefault(cells[node], []).append(device)
        else:
            where = 'an unknown node' if node is None else f'node {node}'
            LOG.info(
                'The guest of server %s cannot see the NUMA node of %s, which '
                'is on %s of the host: the guest is on %s. Use '
                'accel:numa_affinity=required in the flavor if that '
                'matters.', xml.uuid, device, where,
                ', '.join(map(str, sorted(cells))))
    needed = sum(1 + _PORT_BUSES * len(devices) for devices in below.values())
    if needed > _ALL_BUSES - _ROOTS_BUSES:
        LOG.warning(
            'The guest of server %s cannot see the NUMA nodes of its %s '
            'accelerators: that would need %s PCI buses of %s. Use fewer '
            'accelerators in one server if that matters.', xml.uuid,
            sum(map(len, below.values())), needed, _ALL_BUSES - _ROOTS_BUSES)
        return {}
    return _add(xml, below)


def _add(xml, below):
    # after Nova's devices, whose names in the guest must stay. Nova numbers
    # none, and libvirt assigns numbers from 0 up
    index = max(1, sum(getattr(device, 'type', None) == 'pci' and isinstance(
        device, config.LibvirtConfigGuestController)
        for device in xml.devices))
    bus, ports = _ALL_BUSES, {}
    for cell, devices in sorted(below.items()):
        bus -= 1 + _PORT_BUSES * len(devices)
        expander = Expander(index, bus, cell)
        xml.add_device(expander)
        for number, device in enumerate(devices):
            ports[device] = index + 1 + number
            xml.add_device(
                Port(ports[device], expander.index, number, device))
        index += 1 + len(devices)
    return ports


def _cells(xml) -> dict[int, int]:
    """Return the guest nodes that are tied to NUMA nodes of the host: host
    node -> guest node. {} if the guest cannot have expanders."""
    if not getattr(xml.cpu, 'numa', None):
        return {}
    if not (xml.numatune and xml.numatune.memnodes):
        LOG.info('The guest of server %s has NUMA nodes, and cannot see on '
                 'which of them its accelerators are: libvirt does not show '
                 'the NUMA nodes of the host to Nova. See virsh capabilities.',
                 xml.uuid)
        return {}
    # libvirt takes pcie-expander-bus for no other machine type
    if 'q35' not in (xml.os_mach_type or ''):
        LOG.info('The guest of server %s has NUMA nodes, and cannot see on '
                 'which of them its accelerators are: machine type %s has no '
                 'PCIe expander bus. Use an image with hw_machine_type=q35.',
                 xml.uuid, xml.os_mach_type)
        return {}
    cells: dict[int, int] = {}
    for memory in xml.numatune.memnodes:
        for node in memory.nodeset:
            cells.setdefault(node, memory.cellid)
    return cells


def port_of(device: str, xml: str) -> int | None:
    """Return the port that a device had in a guest, to attach it there again.

    :param device: address as in model.AttachHandle.
    :param xml: XML of the guest, from libvirt.
    :returns: index of the port, or None if the device had no port, or the port
        has another device now.
    """
    devices = ElementTree.fromstring(xml).find('devices')
    if devices is None:
        return None
    taken = {int(place.get('bus', '0'), 0)
             for place in devices.iterfind("./*/address[@type='pci']")}
    for controller in devices.iterfind("controller[@type='pci']"):
        alias = controller.find('alias')
        if alias is not None and alias.get('name') == _alias(device):
            index = int(controller.get('index', '0'))
            return None if index in taken else index
    return None


def _alias(device: str) -> str:
    """Return the alias of a device's port. libvirt accepts aliases from users
    that begin with 'ua-' and have letters, digits, '-' and '_' (since 3.9)."""
    return 'ua-accel-' + re.sub('[^0-9A-Za-z]', '-', device)
