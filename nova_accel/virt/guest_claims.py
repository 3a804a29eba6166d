# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep claims in the metadata of guests, as an element of our own namespace.

libvirt keeps <metadata> unchanged, and no guest can reach it. Nova writes its
own element there, and leaves others alone (Guest.set_metadata, 31 to 34).
"""

from lxml import etree
from nova.virt.libvirt import config
from nova.virt.libvirt import driver as libvirt_driver

NAMESPACE = 'http://nova-accel/xmlns/claims/1'
PREFIX = 'accel'
_TAG = 'claims'


class Claims(config.LibvirtConfigObject):
    """The element with the claims in new guest XML."""

    def __init__(self, text: str):
        super().__init__(root_name=_TAG, ns_prefix=PREFIX, ns_uri=NAMESPACE)
        self._text = text

    def format_dom(self):
        element = super().format_dom()
        element.text = self._text
        return element


def read(xml: str) -> str:
    """Return the text in the metadata of a guest, or '' if they have no text.

    :param xml: XML of the guest, from libvirt.
    """
    return etree.fromstring(xml).findtext(
        f'./metadata/{{{NAMESPACE}}}{_TAG}') or ''


def write(guest, text: str) -> None:
    """Write the text into the metadata of a guest: of the running guest and of
    its definition.

    :param guest: nova.virt.libvirt.guest.Guest
    :param text: '' removes the element.
    :raises libvirt.libvirtError: libvirt refuses.
    """
    libvirt = libvirt_driver.libvirt
    flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG
    if guest.is_active():
        flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE
    element = None
    if text:
        # libvirt puts it into the namespace (virXMLInjectNamespace)
        found = etree.Element(_TAG)
        found.text = text
        element = etree.tostring(found, encoding='unicode')
    guest._domain.setMetadata(
        libvirt.VIR_DOMAIN_METADATA_ELEMENT, element, PREFIX, NAMESPACE,
        flags)
