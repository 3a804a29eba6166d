# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Checks of nova-accel check about guests: whether they start here, can
address their devices, and have room to attach devices later."""

from collections.abc import Iterator, Mapping
import contextlib
import os
import typing

from oslo_utils import strutils

from nova_accel.cmd import check_services
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import address_space
from nova_accel import model
from nova_accel import profiles
from nova_accel import request
from nova_accel import text

CONF = conf.CONF
Line = check_services.Line
OK, WARNING = check_services.OK, check_services.WARNING

#: directory of each NUMA node, with a directory for each size of huge pages;
#: source: Documentation/admin-guide/mm/hugetlbpage.rst of Linux
_NODES = 'devices/system/node'
#: PCI ports that a guest of Nova needs besides those for accelerators: for a
#: disk, an interface, and the memory balloon
_OTHER_PORTS = 3
#: extra specs that give NUMA nodes to a guest, and ports of their own to its
#: devices (nova_accel.virt.expanders)
_WITH_NODES = ('hw:numa_nodes', 'hw:mem_page_size', 'hw:cpu_policy')


def large_regions(host, device) -> Iterator[Line]:
    """Check that guests can map the memory regions of a device."""
    if os.uname().machine != 'x86_64':
        return
    sizes = {address: address_space.largest(host.kernel, address)
             for address in sorted(device.functions())}
    address = max(sizes, key=lambda a: sizes[a], default='')
    largest = sizes.get(address, 0)
    if largest < address_space.LARGE:
        return
    if not is_q35():
        yield Line(
            WARNING, f'{address} has a memory region of {largest >> 30} GiB, '
                     f'which guests of the machine type pc may not be able to '
                     f'map',
            'set [libvirt] hw_machine_type = x86_64=q35, or '
            'hw_machine_type=q35 and hw_firmware_type=uefi on the images')
    alike = {
        other.address: size for other in host.devices.values()
        if (other.driver, other.vendor_id, other.product_id) == (
            device.driver, device.vendor_id, device.product_id)
        and (size := address_space.largest(host.kernel, other.address)
             ) >= address_space.LARGE}
    bits = address_bits(host)
    if bits and device.address == min(alike, default='') and (
            not address_space.fits_uefi(alike.values(), bits)):
        yield Line(
            WARNING, f'a guest with all {len(alike)} of its kind on this host '
                     f'may not see each: the UEFI of a guest has an eighth of '
                     f'its address space for devices, and the CPU of this '
                     f'host has {bits} bits',
            'offer fewer to one server, or use an OVMF of September 2026 or '
            'later')


def address_bits(host) -> int | None:
    """Return the number of address bits that a guest can have at most, or None
    if the kernel does not report it."""
    try:
        return host.kernel.physical_address_bits()
    except OSError:
        return None


def memory(host) -> Iterator[Line]:
    """Check that Nova does not overcommit memory on this host, if VFIO pins
    all memory of guests."""
    ratio = (CONF.ram_allocation_ratio
             or CONF.initial_ram_allocation_ratio)
    if ratio > 1 and host.guests.hold_memory:
        yield Line(
            WARNING, f'Nova gives guests up to {ratio:g} times the memory of '
                     f'this host, and VFIO pins all memory of a running guest '
                     f'with a PCI device: if guests need more memory than the '
                     f'host has, the kernel kills one',
            'set [DEFAULT] ram_allocation_ratio = 1.0 here')


def flavors(host) -> Iterator[Line]:
    """Check that guests of Nova's flavors start on this host and can address
    all their devices. Nova is queried only if the host offers PCI functions,
    because other devices cause no such problem."""
    guests = host.guests
    if not guests.hold_memory:
        return
    try:
        found, unread = check_services.flavors()
    except exception.NoCredentials:
        yield Line(OK, 'Nova was not asked for flavors, because '
                       '[service_user] has no credentials')
        return
    if unread:
        yield unread
    known = {p.name: p for here in profiles.load(
        CONF.accel.device_profiles).good.values() for p in here}
    unknown = []
    for flavor in found:
        try:
            specs = profiles.expand(flavor['extra_specs'], known.__getitem__)
            problems = list(guests.problems(specs, flavor['ram'] << 20))
        except KeyError:
            unknown.append(flavor['name'])
            continue
        except exception.AcceleratorError:
            # nova-api refuses such a flavor
            continue
        for why, remedy in problems:
            yield Line(WARNING, f'a guest of the flavor {flavor["name"]} '
                                f'{why}', remedy)
    if unknown:
        yield Line(OK, f'flavors with profiles that are not on this host were '
                       f'not checked: {text.some(unknown)}',
                   'run "nova-accel profile show --memory" here with a copy '
                   'of the profiles')


class Guests:
    """The guests that this host could have.

    :param host: nova_accel.cmd.checks.Host.
    """

    def __init__(self, host: typing.Any):
        self._host = host
        #: address of a device -> for each of its handles, for each function,
        #: bytes of the largest memory region
        self._regions: dict[str, list[list[int]]] = {
            address: [[address_space.largest(host.kernel, function)
                       for function in handle.functions]
                      for handle in device.all_handles]
            for address, device in host.devices.items()}

    @property
    def hold_memory(self) -> bool:
        """Return whether a guest can get a PCI function. For a PCI function,
        VFIO pins all memory of the guest.

        Mediated devices do not count, because their drivers pin only memory in
        use (vfio_pin_pages() of Linux).
        """
        return any(handle.type is model.HandleType.PCI
                   for device in self._host.devices.values()
                   for handle in device.all_handles)

    @property
    def are_large(self) -> bool:
        """Return whether a device of this host has a large memory region."""
        return os.uname().machine == 'x86_64' and any(
            size >= address_space.LARGE
            for handles in self._regions.values() for sizes in handles
            for size in sizes)

    def offers(self, specs: Mapping[str, str]) -> bool:
        """Return whether this host has all devices that extra specs request.

        :raises AcceleratorError: the extra specs are malformed.
        """
        return all(len(self._sizes(wanted)) >= wanted.amount
                   for wanted in request.parse(specs))

    def problems(self, specs: Mapping[str, str], memory: int,
                 ) -> Iterator[tuple[str, str]]:
        """Yield (problem, remedy) for each problem of a guest on this host.

        The problem is a clause without its subject, for example "has no port
        left". Yield nothing if this host lacks a requested device.

        :param specs: extra specs with which a server is built.
        :param memory: memory of the guest in bytes.
        :raises AcceleratorError: the extra specs are malformed.
        """
        wanted = request.parse(specs)
        if not wanted or not self.offers(specs):
            return
        handles = [sizes for group in wanted
                   for sizes in self._sizes(group)[:group.amount]]
        why = self._unseen(specs, memory, [
            size for sizes in handles for size in sizes])
        if why:
            yield (f'does not see all that it gets on this host: {why}',
                   'give it less memory, fewer devices, or more '
                   'hw:maxphysaddr_bits; its servers are not built here')
        yield from self._without_pages(specs, memory)
        count = sum(map(len, handles))
        ports = CONF.libvirt.num_pcie_ports
        if (ports and ports <= count + _OTHER_PORTS and is_q35()
                and not any(name in specs for name in _WITH_NODES)):
            yield (f'has no port left for volumes and interfaces that are '
                   f'attached while it runs: it gets {count} PCI functions, '
                   f'and [libvirt] num_pcie_ports is {ports}',
                   'raise it, to at most 28, or set it to 0, with which '
                   'libvirt leaves one or two')

    def _unseen(self, specs, memory, sizes) -> str:
        """Return a clause with the reason why a guest cannot address all of
        its devices. Return '' if it can.

        :param sizes: size in bytes of the largest memory region of each
            function.
        """
        host_bits = address_bits(self._host)
        if not host_bits or max(sizes, default=0) < address_space.LARGE:
            return ''
        bits = address_space.DEFAULT_BITS
        if CONF.libvirt.virt_type == 'kvm':
            bits = address_space.guest_bits(
                host_bits, CONF.libvirt.cpu_mode,
                specs.get('hw:maxphysaddr_mode'),
                specs.get('hw:maxphysaddr_bits')) or host_bits
        return address_space.unseen(memory, sizes, bits)

    def _without_pages(self, specs, memory) -> Iterator[tuple[str, str]]:
        """Yield (problem, remedy) if this host has too few huge pages of the
        size that the guest requests; see problems()."""
        asked = specs.get('hw:mem_page_size', '')
        size = _page_size(asked)
        if size is None:
            return
        pages = self._huge_pages()
        count = specs.get('hw:numa_nodes', '1')
        # Nova places each guest node on a host node of its own
        cells = int(count) if count.isdigit() and int(count) else 1
        need = -(-memory // cells)
        if not any(size in (0, kib) and need % (kib << 10) == 0 and sum(
                number * kib << 10 >= need for number in of_nodes) >= cells
                for kib, of_nodes in pages.items()):
            there = ', '.join(
                f'{"+".join(map(str, of_nodes))} of {kib >> 10} MiB'
                for kib, of_nodes in sorted(pages.items())) or 'none'
            yield (f'is not built on this host, because {cells} times '
                   f'{need >> 30} GiB are not in huge pages of one NUMA node '
                   f'(hw:mem_page_size={asked}), of which this host has '
                   f'{there}',
                   'reserve them on its kernel command line (hugepagesz=1G '
                   'hugepages=<number>)')

    def _huge_pages(self) -> dict[int, list[int]]:
        """Return the huge pages of the host: size in KiB -> the number of
        pages on each NUMA node."""
        kernel = self._host.kernel
        found: dict[int, list[int]] = {}
        try:
            nodes = kernel.listdir(_NODES)
        except OSError:
            return {}
        for node in nodes:
            # a kernel without huge pages lacks these directories
            with contextlib.suppress(OSError, ValueError):
                for name in kernel.listdir(f'{_NODES}/{node}/hugepages'):
                    kib = int(
                        name.removeprefix('hugepages-').removesuffix('kB'))
                    found.setdefault(kib, []).append(int(kernel.read(
                        f'{_NODES}/{node}/hugepages/{name}/nr_hugepages')))
        return found

    def _sizes(self, wanted: request.AcceleratorRequest) -> list[list[int]]:
        """Return the memory regions of each handle that can satisfy the
        request, as a list: the size of the largest region of each function, in
        bytes. The handle with the largest sum comes first."""
        return sorted((
            sizes for provider in self._host.providers
            if wanted.resource_class in provider.inventory
            and provider.traits >= wanted.required
            and not provider.traits & wanted.forbidden
            for address in provider.addresses
            for sizes in self._regions[address]), key=sum, reverse=True)


def _page_size(asked: str) -> int | None:
    """Return the size in KiB of the huge pages that a guest requests.

    Source: _get_numa_pagesize_constraint() in nova/virt/hardware.py; a number
    without a unit is in KiB.

    :param asked: value of the extra spec hw:mem_page_size.
    :returns: 0 for huge pages of any size, or None for no huge pages.
    """
    if asked in ('', 'small', 'any'):
        return None
    if asked == 'large':
        return 0
    try:
        kib = int(asked) if asked.isdigit() else int(
            strutils.string_to_bytes(asked, return_int=True)) >> 10
    except ValueError:
        # Nova refuses the value
        return None
    return kib if kib << 10 > os.sysconf('SC_PAGE_SIZE') else None


def is_q35() -> bool:
    """Return whether guests are PCI Express machines (q35) unless their image
    specifies another machine type."""
    types = dict(item.partition('=')[::2]
                 for item in CONF.libvirt.hw_machine_type or ())
    return 'q35' in types.get('x86_64', '')
