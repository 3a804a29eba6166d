# Licensed under the Apache License, Version 2.0. See LICENSE.
"""List the accelerators of a guest in its device metadata.

The metadata service and the config drive list ``devices`` with their tags and
their addresses in the guest. Nova lists three kinds of devices, network cards,
disks and shares, and no other kind
(InstanceMetadata._get_device_metadata(), 31 to 34). Therefore an accelerator
is listed as a disk without serial number and path, and only its tags describe
it. The first tag is ``accelerator``. If several accelerators share a switch of
the host, the first accelerator has the topology file of NCCL as its last tag.
"""

from collections.abc import Iterator, Mapping, Sequence

from lxml import etree
from nova import objects

from nova_accel.virt import guest
from nova_accel.virt import nccl

#: the first tag of each accelerator
TAG = 'accelerator'


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
    if text := nccl.topology(kernel, places):
        devices[0].tags = [*devices[0].tags, text]
    return objects.InstanceDeviceMetadata(devices=[
        *(found.devices if found else ()), *devices])


def _places(xml: str) -> Iterator[nccl.Place]:
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
            yield nccl.Place(
                source.get('uuid') or _address(source), _address(place),
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
    return nccl.NO_NODE


def _address(element: etree._Element) -> str:
    return guest.pci_address(*(element.get(part, '0') for part in (
        'domain', 'bus', 'slot', 'function')))
