# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Domains as QEMU gets them: hostdevs are hidden, volumes are files.

Their <hostdev> elements are in their metadata. Nova takes the volumes of
volumes.py for block devices.
"""

from lxml import etree

NAMESPACE = 'urn:nova-accel-tests'
HOLDER = f'{{{NAMESPACE}}}hostdevs'
VOLUMES = '/lab/volumes'


def key_of(hostdev) -> str:
    """Return the UUID or the PCI address that the simulated kernel knows."""
    at = hostdev.find('./source/address')
    return at.get('uuid') or '{:04x}:{:02x}:{:02x}.{:x}'.format(*(
        int(at.get(part), 16)
        for part in ('domain', 'bus', 'slot', 'function')))


def hold(hostdevs, tag):
    """Return an element with hostdevs as libvirt completes them."""
    holder = etree.Element(tag)
    for number, hostdev in enumerate(hostdevs):
        # not the element itself: it would leave its tree
        hostdev = etree.fromstring(etree.tostring(hostdev, with_tail=False))
        if hostdev.find('alias') is None:
            etree.SubElement(hostdev, 'alias', name=f'hostdev{number}')
        if hostdev.find('./address') is None:
            etree.SubElement(
                hostdev, 'address', type='pci', domain='0x0000', bus='0x00',
                slot=f'{0x1e - number:#04x}', function='0x0')
        holder.append(hostdev)
    return holder


def _volumes(root, kind, attribute, others) -> None:
    for source in root.iterfind(f".//source[@{attribute}]"):
        if source.get(attribute).startswith(VOLUMES):
            source.getparent().set('type', kind)
            source.set(others, source.attrib.pop(attribute))


def as_files(xml: str) -> str:
    """Return a domain or a disk with volumes as QEMU opens them."""
    if VOLUMES not in xml:
        return xml
    root = etree.fromstring(xml)
    _volumes(root, 'file', 'dev', 'file')
    return etree.tostring(root, encoding='unicode')


def hide(xml: str) -> str:
    """Move the hostdevs of a domain into its metadata."""
    xml = as_files(xml)
    root = etree.fromstring(xml)
    found = root.findall('./devices/hostdev')
    if not found:
        return xml
    metadata = root.find('metadata')
    if metadata is None:
        metadata = etree.SubElement(root, 'metadata')
    metadata.append(hold(found, HOLDER))
    for hostdev in found:
        hostdev.getparent().remove(hostdev)
    return etree.tostring(root, encoding='unicode')


def show(xml: str) -> str:
    """Undo hide()."""
    root = etree.fromstring(xml)
    _volumes(root, 'block', 'file', 'dev')
    holder = root.find(f'./metadata/{HOLDER}')
    if holder is not None:
        holder.getparent().remove(holder)
        root.find('devices').extend(holder)
    return etree.tostring(root, encoding='unicode')
