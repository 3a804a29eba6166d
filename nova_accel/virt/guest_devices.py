# Licensed under the Apache License, Version 2.0. See LICENSE.
"""List the accelerators of a guest in its device metadata.

The metadata service and the config drive list ``devices`` with their tags and
their addresses in the guest. Nova lists three kinds of devices, network cards,
disks and shares, and no other kind
(InstanceMetadata._get_device_metadata(), 31 to 34). Therefore an accelerator
is listed as a disk without serial number and path, and only its tags describe
it. The first tag is ``accelerator``. If several accelerators share a switch of
the host, the first accelerator has the topology file of NCCL as its last tag.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import typing

from lxml import etree
from nova import objects

from nova_accel.host import bus
from nova_accel.host import pci
from nova_accel.virt import guest

#: the first tag of each accelerator
TAG = 'accelerator'
#: the node that a kernel shows for a device without a node
NO_NODE = -1
#: half of the number that NCCL can read: NCCL adds elements for GPUs and
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


def with_accelerators(found: objects.InstanceDeviceMetadata | None, xml: str,
                      roles: Mapping[str, Sequence[str]], kernel,
                      ) -> objects.InstanceDeviceMetadata | None:
    """Return the devices of a guest, accelerators last.

    :param found: the entries of Nova, None if Nova has none.
    :param xml: XML of the guest, as libvirt has defined it.
    :param roles: address of a device, as in model.AttachHandle -> its tags.
    """
    places = [place for place in _places(xml) if place.host in roles]
    if not places:
        return found
    devices = [objects.DiskMetadata(
        bus=objects.PCIDeviceBus(address=place.guest), serial=None,
        tags=[TAG, *roles[place.host]]) for place in places]
    if text := topology(kernel, places):
        devices[0].tags = [*devices[0].tags, text]
    return objects.InstanceDeviceMetadata(devices=[
        *(found.devices if found else ()), *devices])


def _places(xml: str) -> Iterator[Place]:
    """Yield the place of each hostdev on the host and in the guest."""
    devices = etree.fromstring(xml).find('./devices')
    # libvirt uses the index of a controller as the number of its bus
    controllers = {
        int(controller.get('index', '0')): controller for controller
        in devices.iterfind("./controller[@type='pci']")}
    for hostdev in devices.iterfind('./hostdev'):
        source = hostdev.find('./source/address')
        place = hostdev.find("./address[@type='pci']")
        if source is not None and place is not None:
            yield Place(
                source.get('uuid') or guest.address_of(source),
                guest.address_of(place),
                _node(place, controllers))


def _node(place: etree._Element, controllers: Mapping[int, etree._Element],
          ) -> int:
    """Return the guest's NUMA node of a device: the node of the expander above
    its port (virt.expanders).

    :param place: address of the device in the guest.
    :param controllers: index -> PCI controller of the guest.
    """
    above = controllers.get(int(place.get('bus', '0'), 0))
    while above is not None:
        if (node := above.findtext('./target/node')) is not None:
            return int(node)
        place = above.find("./address[@type='pci']")
        above = None if place is None else controllers.get(
            int(place.get('bus', '0'), 0))
    return NO_NODE


# The topology file of NCCL

def topology(kernel, places: Iterable[Place]) -> str:
    """Return the topology file for NCCL as one line, or '' if no two devices
    share a switch or the file is too large for NCCL."""
    system = etree.Element('system', version='1')
    cpus: dict[int, etree._Element] = {}
    switches: dict[tuple[int, str], etree._Element] = {}
    devices: collections.Counter[tuple[int, str]] = collections.Counter()
    for host, slot, node in sorted(places, key=lambda place: place.guest):
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
        etree.SubElement(parent, 'pci', busid=slot, **_faster_link(
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
