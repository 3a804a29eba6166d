# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Create the topology file of NCCL: which devices of a guest share a switch.

In a guest each device has a port of its own: NCCL considers any two devices
far from each other, and lets them communicate through the memory of the guest
(its default NCCL_P2P_LEVEL is PXB). The file has the switches of the host
above the addresses in the guest. Facts of xml.cc and topo.cc of NCCL 2.30:

* NCCL reads the attributes of a device from the guest if the file lacks them.
  The guest does not have the switches, so the file has all their attributes:
  without class NCCL fails, without link it assumes 16 lanes of 8 GT/s.
* The element cpu needs only the NUMA node, whose processors NCCL reads in the
  guest. It must be the node that the guest's kernel shows for the device;
  otherwise NCCL would put other devices below another element.
* NCCL takes the slower one of the link of a device and the link of the port
  above it. QEMU's port shows 16 GT/s, so the file has faster links.
* The address of a switch is only a name, and must differ from the addresses of
  devices in the guest.
* NCCL treats the two levels of a Broadcom switch as one, because of its ids.
* NCCL reads 256 elements, without texts, and 16 attributes of 254 characters.

The file reveals the number and product of switches between the devices of the
server, and nothing else about the host.
"""

import collections
from collections.abc import Iterable, Sequence
import contextlib
import typing

from lxml import etree

from nova_accel.host import bus
from nova_accel.host import pci

#: the node that a kernel shows for a device without a node
NO_NODE = -1
#: half of the number that NCCL can read, because it adds those of GPUs and
#: network cards
_ELEMENTS = 128
#: MT/s of a port of QEMU (gen_pcie_root_port.c), which shows 32 lanes
_PORT_SPEED = 16000
#: attributes of the file and of sysfs
_IDS = ('vendor', 'device', 'subsystem_vendor', 'subsystem_device')


class Place(typing.NamedTuple):
    """The place of a device on the host and in the guest."""

    #: address as in model.AttachHandle
    host: str
    #: address in the guest
    guest: str
    #: NUMA node of the guest, or NO_NODE
    node: int


def topology(kernel, places: Iterable[Place]) -> str:
    """Return the topology file for NCCL as one line, or '' if no two devices
    share a switch or the file is too large for NCCL."""
    system = etree.Element('system', version='1')
    cpus: dict[int, etree._Element] = {}
    switches: dict[tuple[int, str], etree._Element] = {}
    devices: collections.Counter[tuple[int, str]] = collections.Counter()
    for host, guest, node in sorted(places, key=lambda place: place.guest):
        # mediated devices have no address on the bus
        above = (pci.bridges(kernel, host) if pci.ADDRESS.fullmatch(host)
                 else ())
        if node not in cpus:
            cpus[node] = etree.SubElement(system, 'cpu', numaid=str(node))
        parent = cpus[node]
        for switch in pci.switches(above):
            key = node, switch
            if key not in switches:
                number = len(switches) + 1
                switches[key] = etree.SubElement(parent, 'pci', {
                    'busid': f'ffff:ff:{number:02x}.0', 'class': '0x060400',
                    **_attributes(kernel, switch, above)})
            parent = switches[key]
            devices[key] += 1
        etree.SubElement(parent, 'pci', busid=guest, **_faster_link(
            kernel, host, above))
    elements = 1 + sum(1 for _ in system.iterdescendants())
    if max(devices.values(), default=0) < 2 or elements > _ELEMENTS:
        return ''
    return etree.tostring(system, encoding='unicode')


def _attributes(kernel, switch: str, above: Sequence[str]) -> dict[str, str]:
    """Return the readable attributes of a switch."""
    found = {}
    with contextlib.suppress(OSError):
        found = kernel.read_some(pci.path(switch), _IDS)
        found |= _link(*bus.most(
            kernel, switch, above[above.index(switch) - 1]))
    return found


def _faster_link(kernel, device: str, above: tuple[str, ...],
                 ) -> dict[str, str]:
    """Return the link of a device's slot if it is faster than the link that
    the port in the guest shows, else {}."""
    with contextlib.suppress(OSError):
        lanes, speed = bus.of_the_slot(kernel, device, above)
        if above and speed > _PORT_SPEED:
            return _link(lanes, speed)
    return {}


def _link(lanes: int, speed: int) -> dict[str, str]:
    return {'link_width': str(lanes), 'link_speed':
            f'{speed / 1000} GT/s PCIe'} if lanes and speed else {}
