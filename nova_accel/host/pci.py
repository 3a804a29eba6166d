# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read the sysfs attributes that every PCI function has.

The functions take a kernel (nova_accel.host.kernel or a simulated one) and a
PCI address in sysfs form. They raise OSError as the kernel does, unless
documented otherwise. Source: Documentation/ABI/testing/sysfs-bus-pci of Linux.
"""

from collections.abc import Iterable
import os
import re

from nova_accel import exception

DEVICES = 'bus/pci/devices'
#: base class of bridges
BRIDGE = 0x06
#: classes and subclasses: VGA, 3D, and other display controllers
DISPLAYS = frozenset((0x0300, 0x0302, 0x0380))
#: the domain has more than four digits if no firmware has numbered it, for
#: example that of Intel's VMD: 10000:01:00.0
ADDRESS = re.compile('([0-9a-f]{4}|[1-9a-f][0-9a-f]{4,7}):'
                     '[0-9a-f]{2}:[01][0-9a-f][.][0-7]')
#: the driver of a function that a guest has, or may have
VFIO = 'vfio-pci'
#: drivers that VFIO accepts on the other members of an IOMMU group
_HARMLESS = frozenset((VFIO, 'pci-stub', 'pcieport'))
#: devices of Intel that vfio-pci refuses: QAT of generation 2 and its VFs, DSA,
#: IAA; source: vfio_pci_dev_in_denylist() in vfio_pci.c of Linux
_DENYLIST = frozenset((
    '0435', '0443', '19e2', '19e3', '37c8', '37c9', '0b25', '0cfe'))
#: resets that affect every function of a bus, which the kernel refuses if
#: there are several; source: pci_parent_bus_reset() in pci.c of Linux
_OF_THE_BUS = frozenset(('bus', 'cxl_bus'))
#: virPCIDeviceAddressIsValid() in src/util/virpci.c of libvirt
_LAST_DOMAIN = 0xffff
#: bit of ACS control: requests of a device to another one below the same
#: switch go up to the root complex. Source: PCI_ACS_RR in pci_regs.h of Linux
ACS_REDIRECTS = 0x04


def as_in_sysfs(text: str) -> str:
    """Return an address, or a pattern of addresses, as sysfs writes it.

    Other tools write upper case, and domains of eight digits.
    """
    return re.sub('^0+(?=[0-9a-f]{4,}:)', '', text.strip().lower())


def address(text: str) -> str:
    """Return text as a PCI address in sysfs form.

    :raises ConfigurationError: text is not a PCI address.
    """
    lower = as_in_sysfs(text)
    if not ADDRESS.fullmatch(lower):
        raise exception.ConfigurationError(
            f'{text!r} is not a PCI address: write it like 0000:3b:00.0.')
    return lower


def from_lspci(text: str) -> str:
    """Convert an address as lspci writes it to the form of sysfs. In a name of
    a region, convert the address at its beginning. Return any other text
    unchanged.

    lspci omits the domain if all devices of the machine are in 0000.
    """
    address, mark, region = text.partition('_')
    lower = as_in_sysfs(address)
    return next((found + mark + region for found in (lower, f'0000:{lower}')
                 if ADDRESS.fullmatch(found)), text)


def addresses(option: str, texts: Iterable[str]) -> frozenset[str]:
    """Return the PCI addresses in the value of an option.

    :param option: name of the option for errors, ``[accel] fixed_devices``.
    :raises ConfigurationError: one of the texts is not a PCI address.
    """
    result = set()
    for text in texts:
        try:
            result.add(address(text))
        except exception.ConfigurationError:
            raise exception.ConfigurationError(
                f'{option} has {text!r}, which is not a PCI address: write it '
                f'like 0000:3b:00.0.') from None
    return frozenset(result)


def moved(function: str, card: str, now: str) -> str:
    """Return the present address of a function whose card has moved to another
    address.

    The functions and VFs of a card are at fixed distances in the numbers of
    bus, device and function (PCI Express Base Specification, routing IDs).

    :param function: earlier address of the function.
    :param card: earlier address of the card's first function.
    :param now: present address of the card's first function.
    """
    number = routing_id(now) + routing_id(function) - routing_id(card)
    return (f'{now.partition(":")[0]}:{number >> 8 & 0xff:02x}:'
            f'{number >> 3 & 31:02x}.{number & 7}')


def routing_id(function: str) -> int:
    """Return the number of a function within its PCI domain. Its 16 bits are
    those of bus, device and function."""
    _, bus, rest = function.split(':')
    device, _, number = rest.partition('.')
    return int(bus, 16) << 8 | int(device, 16) << 3 | int(number)


def path(function: str, *parts: str) -> str:
    """Return the path of a function, or of a part of it, below /sys."""
    return '/'.join((DEVICES, function, *parts))


def identifier(kernel, function: str, attribute: str) -> str:
    """Return an id as four hex digits.

    :param attribute: vendor, device, subsystem_vendor or subsystem_device.
    """
    return f'{int(kernel.read(path(function, attribute)), 16):04x}'


def ids(kernel, function: str) -> tuple[str, str]:
    """Return the vendor and device ids."""
    return (identifier(kernel, function, 'vendor'),
            identifier(kernel, function, 'device'))


def subsystem(kernel, function: str) -> str:
    """Return the vendor and device ids of the subsystem, for example
    10de:1533. Return '' for functions without a subsystem, such as bridges."""
    try:
        return ':'.join(identifier(kernel, function, f'subsystem_{what}')
                        for what in ('vendor', 'device'))
    except (OSError, ValueError):
        return ''


def class_code(kernel, function: str) -> int:
    """Return class, subclass and programming interface, 24 bits in all."""
    return int(kernel.read(path(function, 'class')), 16)


def numa_node(kernel, function: str) -> int | None:
    """Return the NUMA node, or None if the platform reports -1."""
    try:
        node = int(kernel.read(path(function, 'numa_node')))
    except (OSError, ValueError):
        return None
    # MAX_NUMNODES of Linux is below
    return node if 0 <= node < 1 << 16 else None


def bridges(kernel, function: str) -> tuple[str, ...]:
    """Return the bridges above a function, the uppermost first.

    The bridges are the root complex ('pci0000:3a', with its domain and first
    bus), the root port, and the ports of switches. A VF has the bridges of its
    PF. Source: the directory of the function in sysfs, Documentation/PCI/
    sysfs-pci.rst and pci_create_root_bus() of Linux.

    :returns: () if the kernel does not show them.
    """
    try:
        *above, _ = kernel.readlink(path(function)).split('/')
    except OSError:
        return ()
    for number, name in enumerate(above):
        # the element before it may be the platform device of the root complex
        if re.fullmatch('pci[0-9a-f]{4,}:[0-9a-f]{2}', name):
            return tuple(above[number:])
    return ()


def ports(kernel, function: str) -> str:
    """Return a name of the slot of a function: the path of ports to the
    function.

    The path consists of the root complex, and the device and function numbers
    of each bridge and of the function. It omits the bus numbers, because
    firmware and kernel assign them at each boot, in the order in which they
    find bridges. The path of a VF is that of its PF, followed by the distance
    between the two. The root complex is named as in ACPI (firmware_node/path;
    sysfs-devices-firmware_node and sysfs-bus-acpi in Documentation/ABI/testing
    of Linux), or as in sysfs on hosts without ACPI.

    :returns: for example '\\_SB_.PC00/01.0/00.0', or 'pci0000:00/01.0/00.0';
        '' if the kernel does not show the path.
    """
    above = bridges(kernel, function)
    if not above:
        return ''
    pf = physical_function(kernel, function)
    if pf:
        return (f'{ports(kernel, pf)}+'
                f'{routing_id(function) - routing_id(pf)}')
    try:
        root = kernel.read(f'devices/{above[0]}/firmware_node/path').strip()
    except OSError:
        root = above[0]
    return '/'.join((root, *(name.rpartition(':')[2]
                             for name in (*above[1:], function))))


def below_root(above: tuple[str, ...]) -> tuple[str, ...]:
    """Return the bridges between a function and the closest root complex above
    it, the root port first. Intel's VMD is a function above a root complex."""
    roots = [number for number, name in enumerate(above)
             if name.startswith('pci')]
    return above[roots[-1] + 1:] if roots else above


def ports_between(above: tuple[str, ...], switch: str) -> tuple[str, ...]:
    """Return the downstream ports on the way from a switch to a function below
    it, including the port of the switch itself.

    :param above: bridges() of the function.
    :param switch: one of switches().
    """
    return above[above.index(switch) + 1::2]


def switches(above: tuple[str, ...]) -> tuple[str, ...]:
    """Return the upstream ports of the switches above a function, that of the
    uppermost switch first.

    A switch consists of two bridges, one below the other. The last bridge of
    bridges() is the port to the function. NCCL walks up in the same way
    (ncclTopoGetXmlFromSys() in xml.cc of 2.30).
    """
    return below_root(above)[-2::-2][::-1]


def driver(kernel, function: str) -> str | None:
    """Return the driver to which the function is bound, or None."""
    return _target(kernel, path(function, 'driver'))


def is_for_vfio(kernel, function: str) -> bool:
    """Return whether the function is bound to vfio-pci or to a variant of it.

    A variant, for example mlx5_vfio_pci or xe-vfio-pci, is recognized by the
    VFIO device of the function (vfio_init_device() of Linux 6.1).
    """
    return (driver(kernel, function) == VFIO
            or kernel.exists(path(function, 'vfio-dev')))


def is_open(kernel, function: str) -> bool:
    """Return whether a process has opened the function by VFIO.

    vfio-pci and its variants enable a function while a process has it open
    (vfio_pci_core_enable() and enable_show() of Linux).
    """
    return (is_for_vfio(kernel, function)
            and kernel.read(path(function, 'enable')) != '0')


def physical_function(kernel, function: str) -> str | None:
    """Return the PF of a VF, or None if the function is not a VF."""
    return _target(kernel, path(function, 'physfn'))


def virtual_functions(kernel, function: str) -> list[str]:
    """Return the VFs of a PF in the order of their numbers."""
    links = [name for name in kernel.listdir(path(function))
             if re.fullmatch('virtfn[0-9]+', name)]
    links.sort(key=lambda name: int(name.removeprefix('virtfn')))
    return [os.path.basename(kernel.readlink(path(function, name)))
            for name in links]


def has_vfs(kernel, function: str) -> bool:
    """Return whether a function has VFs now."""
    return kernel.exists(path(function, 'virtfn0'))


def can_have_vfs(kernel, function: str) -> bool:
    """Return whether a function is a PF, whether it has VFs now or not.

    :raises ValueError: sriov_totalvfs is not a number.
    """
    try:
        return int(kernel.read(path(function, 'sriov_totalvfs'))) > 0
    except OSError:
        # the function does not support SR-IOV
        return False


def answers(kernel, function: str) -> bool:
    """Return whether the configuration space of a PF can be read.

    If a device fell off the bus, each byte of its configuration space reads as
    0xff, while the attribute ``vendor`` keeps the value from boot. This
    function is not for VFs, whose ids read as 0xffff by the SR-IOV
    specification.
    """
    return kernel.read_bytes(path(function, 'config'), 2) != b'\xff\xff'


def has_lost_vfs(kernel, function: str) -> bool:
    """Return whether sysfs shows VFs of a PF that no longer answer.

    A failed reset of a PF disables the VFs, but sriov_numvfs still counts
    them. Only a successful reset restores the VFs (sriov_restore_state() in
    drivers/pci/iov.c of Linux 6.12). If a VF answers, only its ids read 0xffff
    (SR-IOV specification). If a VF is lost, each byte reads 0xff.
    """
    try:
        first = kernel.read_bytes(path(function, 'virtfn0', 'config'), 16)
    except FileNotFoundError:
        return False
    return first == b'\xff' * 16


def reads_as_ones(kernel, function: str) -> bool:
    """Return whether an id is ffff, which the kernel reads of a dead device.
    """
    return 'ffff' in ids(kernel, function)


def group(kernel, function: str) -> str | None:
    """Return the number of the function's IOMMU group, or None."""
    return _target(kernel, path(function, 'iommu_group'))


def group_members(kernel, function: str) -> list[str] | None:
    """Return all functions in the IOMMU group of a function, or None if the
    host does not use an IOMMU.
    """
    try:
        return kernel.listdir(path(function, 'iommu_group', 'devices'))
    except FileNotFoundError:
        return None


def obstacle(kernel, function: str, companions=()) -> str:
    """Return the reason why the function cannot be given to a guest by VFIO,
    and the remedy. Return '' if it can.

    VFIO accepts a function only if no other member of its IOMMU group is bound
    to a driver of the host.

    :param companions: functions that the guest gets as well.
    """
    if is_denied(kernel, function):
        return (f'vfio-pci refuses {function}, whose kind is on its '
                f'deny-list: load vfio-pci with disable_denylist=1 (a line '
                f'"options vfio-pci disable_denylist=1" in /etc/modprobe.d) '
                f'if you trust the guests')
    if int(function.partition(':')[0], 16) > _LAST_DOMAIN:
        return (f'libvirt does not support PCI domains above '
                f'{_LAST_DOMAIN:x}: disable VMD for it in the firmware, if '
                f'VMD creates the domain')
    members = group_members(kernel, function)
    if members is None:
        return (f'{function} has no IOMMU group: enable the IOMMU in the '
                f'firmware and on the kernel command line')
    for member in members:
        if member == function or member in companions:
            continue
        name = driver(kernel, member)
        if name is not None and name not in _HARMLESS and (
                not is_for_vfio(kernel, member)):
            return (f'{function} shares its IOMMU group with {member}, which '
                    f'the driver {name} of the host keeps')
    return ''


def is_denied(kernel, function: str) -> bool:
    """Return whether vfio-pci refuses the function because of its deny list."""
    if (identifier(kernel, function, 'vendor') != '8086'
            or identifier(kernel, function, 'device') not in _DENYLIST):
        return False
    module = 'module/vfio_pci'
    try:
        return kernel.read(f'{module}/parameters/disable_denylist') != 'Y'
    except FileNotFoundError:
        # Linux before 5.9 has no such list; a module that is not loaded may
        # have one
        return not kernel.exists(module)


def siblings(kernel, function: str) -> list[str]:
    slot = function.rpartition('.')[0]
    return [other for other in _on_bus(kernel, function)
            if other.rpartition('.')[0] == slot]


def _on_bus(kernel, function: str) -> list[str]:
    """Return the other functions on the bus of a function.

    The directory of the bridge above has these functions. It also has VFs on
    other buses, which are omitted (virtfn_add_bus() in drivers/pci/iov.c of
    Linux).
    """
    above = os.path.dirname(kernel.readlink(path(function)))
    bus = function.rpartition(':')[0]
    return [other for other in kernel.listdir(
                os.path.normpath(os.path.join(DEVICES, above)))
            if other != function and other.rpartition(':')[0] == bus
            and ADDRESS.fullmatch(other)]


def reset_methods(kernel, function: str) -> tuple[str, ...]:
    """Return the reset methods that work for a function, in the kernel's
    order.

    A reset of the whole bus is omitted if the bus has other functions. The
    kernel refuses such a reset, although it lists the method for the first
    function that it finds on the bus (pci_reset_bus_function() of Linux).

    :returns: names as in the attribute reset_method. ('any',) from kernels
        before 5.15, which do not name the methods. () if no method works.
    """
    try:
        methods = tuple(kernel.read(path(function, 'reset_method')).split())
    except FileNotFoundError:
        return ('any',) if kernel.exists(path(function, 'reset')) else ()
    if not _OF_THE_BUS.isdisjoint(methods) and _on_bus(kernel, function):
        methods = tuple(m for m in methods if m not in _OF_THE_BUS)
    return methods


def _target(kernel, link: str) -> str | None:
    try:
        return os.path.basename(kernel.readlink(link))
    except FileNotFoundError:
        return None
