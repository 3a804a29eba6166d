# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Accelerators in new guest XML and in running guests.

A guest gets hostdevs, and address bits for large devices (see
nova_accel.host.address_space). Its metadata has the claims of its server as an
element of our own namespace: libvirt keeps <metadata> unchanged, and no guest
can reach it. Nova writes its own element there, and leaves others alone
(Guest.set_metadata, 31 to 34).

XML is of Nova's config classes, and guests are nova.virt.libvirt.guest.Guest.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import time

from lxml import etree
from nova.virt.libvirt import config
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel import exception
from nova_accel.host import address_space
from nova_accel import log as logging
from nova_accel import model
from nova_accel.virt import errors
from nova_accel.virt import expanders

LOG = logging.getLogger(__name__)

#: seconds that a guest may take to release a device
_DETACH_SECONDS = 20
#: VIR_DOMAIN_PAUSED_UNKNOWN of virDomainPausedReason
_UNKNOWN = 0
#: the element with claims
NAMESPACE = 'http://nova-accel/xmlns/claims/1'
PREFIX = 'accel'
_TAG = 'claims'


class Hostdevs:

    def __init__(self, set_managed: Callable):
        """:param set_managed: LibvirtDriver._set_managed_mode. It sets whether
            libvirt binds a PCI function to VFIO and back."""
        self._set_managed = set_managed

    def add(self, xml, handles: Iterable[model.AttachHandle],
            nodes: Mapping[str, int],
            iommufd: Collection[str] = ()) -> None:
        """Add devices to xml, Nova's LibvirtConfigGuest.

        :param nodes: address of a handle -> the NUMA node of its device on
            this host, if known.
        :param iommufd: addresses of handles that QEMU opens by iommufd.
        """
        # Nova attaches again every mdev of an earlier guest
        there = _addresses(xml.devices)
        hostdevs = [(hostdev, nodes.get(handle.address)) for handle in handles
                    if handle.address not in there
                    for hostdev in self._hostdevs(handle, iommufd)]
        ports = expanders.add(xml, {
            _address(hostdev): node for hostdev, node in hostdevs})
        for hostdev, _ in hostdevs:
            hostdev.port = ports.get(_address(hostdev))
            xml.add_device(hostdev)

    def attach(self, guest, handles: Iterable[model.AttachHandle],
               lasts: bool = False, iommufd: Collection[str] = ()) -> None:
        """Attach missing devices to a running guest. A device that the guest
        had before returns to its port.

        :param lasts: whether to add the devices to the persistent definition,
            too.
        :param iommufd: see add().
        :raises Exception: the first error of libvirt, after an attempt for
            each device.
        """
        failure = None
        for hostdev in self._missing(
                handles, self.addresses(guest), iommufd):
            hostdev.port = expanders.port_of(
                _address(hostdev), guest.get_xml_desc())
            try:
                guest.attach_device(hostdev, persistent=lasts, live=True)
            except Exception as error:
                failure = failure or error
        if failure:
            raise failure

    def complete(self, xml: str,
                 handles: Iterable[model.AttachHandle]) -> str:
        """Add missing devices to guest XML of libvirt, and return the XML. If
        the XML has a port for a device, the device gets this port."""
        earlier = config.LibvirtConfigGuest()
        earlier.parse_str(xml)
        missing = list(self._missing(handles, _addresses(earlier.devices)))
        if not missing:
            return xml
        document = etree.fromstring(xml)
        for hostdev in missing:
            hostdev.port = expanders.port_of(_address(hostdev), xml)
            document.find('devices').append(hostdev.format_dom())
        return etree.tostring(document, encoding='unicode')

    def _missing(self, handles, there, iommufd=()):
        for handle in handles:
            for hostdev in self._hostdevs(handle, iommufd):
                if _address(hostdev) not in there:
                    yield hostdev

    def detach(self, guest, handles: Iterable[model.AttachHandle]) -> None:
        """Detach devices from a running guest, and wait for their release.

        :raises DeviceError: the guest does not release a device.
        """
        there = self.addresses(guest)
        hostdevs = [hostdev for handle in handles
                    for hostdev in self._hostdevs(handle)
                    if _addresses([hostdev]) <= there]
        left = _addresses(hostdevs)
        for hostdev in hostdevs:
            try:
                guest.detach_device(hostdev, live=True)
            except Exception as error:
                if not _is_going(error):
                    raise
        deadline = time.monotonic() + _DETACH_SECONDS
        while left := left & self.addresses(guest):
            if time.monotonic() > deadline:
                raise exception.DeviceError(
                    f'Guest {guest.uuid} must release '
                    f'{", ".join(sorted(left))} and did not within '
                    f'{_DETACH_SECONDS} s: stop using the device inside the '
                    f'server, or shut the server down.')
            time.sleep(0.2)

    @staticmethod
    def addresses(guest) -> set[str]:
        """Return the addresses, as in model.AttachHandle, of the hostdevs of a
        guest. A guest that no longer exists has none.

        :raises libvirt.libvirtError: libvirt does not answer.
        """
        # get_all_devices() returns no device if libvirt fails
        now = config.LibvirtConfigGuest()
        if xml := xml_of(guest):
            now.parse_str(xml)
        return _addresses(now.devices)

    def _hostdevs(self, handle, iommufd=()):
        if handle.type is model.HandleType.MDEV:
            hostdev = _Mdev()
            hostdev.uuid = handle.address
            yield hostdev
            return
        for address in handle.addresses:
            hostdev = _Function()
            hostdev.domain, hostdev.bus, rest = address.split(':')
            hostdev.slot, hostdev.function = rest.split('.')
            self._set_managed(hostdev, 'true' if handle.managed else 'false')
            hostdev.iommufd = address in iommufd
            yield hostdev


class _Mdev(expanders.BehindPort, config.LibvirtConfigGuestHostdevMDEV):
    pass


class _Function(expanders.BehindPort, config.LibvirtConfigGuestHostdevPCI):

    #: whether QEMU opens it by iommufd instead of its IOMMU group
    iommufd = False

    def format_dom(self):
        """Return the element of the hostdev, with iommufd='yes' if QEMU must
        use iommufd. libvirt 12.1 and later know this (formatdomain.rst)."""
        hostdev = super().format_dom()
        if self.iommufd:
            hostdev.append(etree.Element('driver', iommufd='yes'))
        return hostdev


def without_iommufd(xml: str, addresses: Iterable[str]) -> set[str]:
    """Return the given PCI functions that QEMU has not opened by iommufd.

    :param xml: XML of a running guest, from libvirt.
    """
    return set(addresses) - {
        address_of(source)
        for hostdev in etree.fromstring(xml).iterfind('./devices/hostdev')
        if hostdev.find("./driver[@iommufd='yes']") is not None
        and (source := hostdev.find('./source/address')) is not None}


def xml_of(guest) -> str:
    """Return the XML of a guest, or '' if the guest no longer exists.

    :raises libvirt.libvirtError: libvirt does not answer.
    """
    try:
        return guest.get_xml_desc()
    except Exception as error:
        if not _is_gone(error):
            raise
        return ''


def is_paused(guest) -> bool:
    """Return whether libvirt shows a guest as paused for an unknown reason.

    :raises libvirt.libvirtError: libvirt does not answer.
    """
    try:
        state, reason = guest._domain.state()
    except Exception as error:
        if not _is_gone(error):
            raise
        return False
    return (state, reason) == (
        libvirt_driver.libvirt.VIR_DOMAIN_PAUSED, _UNKNOWN)


def _is_gone(error) -> bool:
    return (errors.is_of_libvirt(error) and error.get_error_code()
            == libvirt_driver.libvirt.VIR_ERR_NO_DOMAIN)


def _is_going(error) -> bool:
    """Return whether the error of a detach shows that the guest is releasing
    the device, or has released it (LibvirtDriver._detach_sync, Nova 31 to 34).
    """
    return errors.is_of_libvirt(error) and (
        error.get_error_code() == libvirt_driver.libvirt.VIR_ERR_DEVICE_MISSING
        or 'already in the process of unplug' in str(error))


def _addresses(devices) -> set[str]:
    return set(filter(None, map(_address, devices)))


def _address(device) -> str:
    """Return the address of a hostdev as in model.AttachHandle, or '' for any
    other device."""
    if isinstance(device, config.LibvirtConfigGuestHostdevMDEV):
        return device.uuid
    if isinstance(device, config.LibvirtConfigGuestHostdevPCI):
        return pci_address(
            device.domain, device.bus, device.slot, device.function)
    return ''


def address_of(element: etree._Element) -> str:
    """Return a PCI address in XML of libvirt, as in model.AttachHandle."""
    return pci_address(*(element.get(part, '0') for part in (
        'domain', 'bus', 'slot', 'function')))


def pci_address(*parts: str) -> str:
    """Return a PCI address as in model.AttachHandle.

    :param parts: domain, bus, slot and function as libvirt writes them.
    """
    return '{:04x}:{:02x}:{:02x}.{:x}'.format(*(
        int(part, 16) for part in parts))


# Address bits

def make_room(xml, handles: Iterable[model.AttachHandle], kernel,
              can_emulate: bool, is_new: bool) -> None:
    """Ensure that a guest can address each of its devices.

    :param xml: Nova's LibvirtConfigGuest.
    :param can_emulate: whether libvirt and QEMU can emulate address bits
        (libvirt 8.7).
    :param is_new: whether the server is being built. An existing server starts
        in any case, and the log explains which devices are missing.
    :raises DeviceUnavailable: a new guest could not address a device.
    """
    problem = _widen(
        xml, [address_space.largest(kernel, function)
              for handle in handles if handle.type is model.HandleType.PCI
              for function in handle.functions],
        kernel.physical_address_bits(), can_emulate)
    if problem and is_new:
        raise exception.DeviceUnavailable(
            f'A guest would not see all of its devices: {problem}. Use a '
            f'flavor with less memory, fewer devices, or more '
            f'hw:maxphysaddr_bits.')
    if problem:
        LOG.warning(
            'The guest of server %s does not see all of its devices: %s. '
            'Resize it to a flavor with less memory, fewer devices, or more '
            'hw:maxphysaddr_bits.', xml.uuid, problem)


def _widen(xml, sizes: Sequence[int], host_bits: int | None,
           can_emulate: bool) -> str:
    """Give a guest as many address bits as its host has if its devices need
    them, unless its flavor or image specifies the address bits.

    Nova has written hw:maxphysaddr_mode and hw:maxphysaddr_bits into xml.cpu
    (_get_guest_cpu_config_maxphysaddr() of its driver, Nova 27 and later).
    Mode emulate works with each CPU model, mode passthrough only with the
    host's.

    :param xml: Nova's LibvirtConfigGuest.
    :param sizes: the largest region of each device that the guest gets.
    :param host_bits: address bits of the host's CPU, None if unknown.
    :param can_emulate: see make_room().
    :returns: why a device will be unusable, as a clause; '' if all are usable.
    """
    if not host_bits or max(sizes, default=0) < address_space.LARGE:
        return ''
    cpu = xml.cpu
    bits: int | None = address_space.DEFAULT_BITS
    # QEMU could emulate others without KVM, but no real guest runs so
    if cpu is not None and xml.virt_type == 'kvm':
        asked = cpu.maxphysaddr
        bits = address_space.guest_bits(
            host_bits, cpu.mode, asked and asked.mode,
            asked and asked.bits)
        if bits is None and can_emulate:
            cpu.maxphysaddr = config.LibvirtConfigGuestCPUMaxPhysAddr()
            cpu.maxphysaddr.mode = 'emulate'
            cpu.maxphysaddr.bits = bits = host_bits
    return address_space.unseen((xml.memory or 0) << 10, sizes,
                                bits or address_space.DEFAULT_BITS)


# Claims

class Claims(config.LibvirtConfigObject):
    """The element with the claims in new guest XML."""

    def __init__(self, text: str):
        super().__init__(root_name=_TAG, ns_prefix=PREFIX, ns_uri=NAMESPACE)
        self._text = text

    def format_dom(self):
        element = super().format_dom()
        element.text = self._text
        return element


def read_claims(xml: str) -> str:
    """Return the text in the metadata of a guest, or '' if they have no text.

    :param xml: XML of the guest, from libvirt.
    """
    return etree.fromstring(xml).findtext(
        f'./metadata/{{{NAMESPACE}}}{_TAG}') or ''


def write_claims(guest, text: str) -> None:
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
