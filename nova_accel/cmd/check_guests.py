# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What nova-accel check says of guests: whether they see what they get."""

from collections.abc import Iterator, Mapping
import os
import typing

from nova_accel.cmd import check_line
from nova_accel.cmd import check_services
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import address_space
from nova_accel import profiles
from nova_accel import request
from nova_accel import text

CONF = conf.CONF
Line = check_line.Line
OK, WARNING = check_line.OK, check_line.WARNING


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
    types = dict(item.partition('=')[::2]
                 for item in CONF.libvirt.hw_machine_type or ())
    if 'q35' not in types.get('x86_64', ''):
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
    """Return how many bits a guest with large devices is told at most."""
    try:
        return host.kernel.physical_address_bits()
    except OSError:
        return None


def flavors(host) -> Iterator[Line]:
    """Check that the guests of Nova's flavors see all devices that they get
    of this host. Asks Nova only where a device has a large memory region."""
    guests = host.guests
    if not guests.are_large:
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
            why = guests.unseen(specs, flavor['ram'] << 20)
        except KeyError:
            unknown.append(flavor['name'])
            continue
        except exception.AcceleratorError:
            # nova-api refuses it
            continue
        if why:
            yield Line(
                WARNING, f'a guest of the flavor {flavor["name"]} does not see '
                         f'all that it gets on this host: {why}',
                'give it less memory, fewer devices, or more '
                'hw:maxphysaddr_bits; its servers are not built here')
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
        #: address of a device -> bytes of the largest memory region of each
        #: function of each of its handles
        self._regions: dict[str, list[list[int]]] = {
            address: [[address_space.largest(host.kernel, function)
                       for function in handle.functions]
                      for handle in device.all_handles]
            for address, device in host.devices.items()}

    @property
    def are_large(self) -> bool:
        """Whether a device has a large memory region."""
        return os.uname().machine == 'x86_64' and any(
            size >= address_space.LARGE
            for handles in self._regions.values() for sizes in handles
            for size in sizes)

    def offers(self, specs: Mapping[str, str]) -> bool:
        """Whether this host has all devices that extra specs ask for.

        :raises AcceleratorError: they are malformed.
        """
        return all(len(self._sizes(wanted)) >= wanted.amount
                   for wanted in request.parse(specs))

    def unseen(self, specs: Mapping[str, str], memory: int) -> str:
        """Return why a guest would not see each device, a clause; '' where it
        would, or this host has not all of them.

        :param specs: extra specs that a server is built with.
        :param memory: of the guest, bytes.
        :raises AcceleratorError: the extra specs are malformed.
        """
        host_bits = address_bits(self._host)
        sizes = [size for wanted in request.parse(specs)
                 for sizes in self._sizes(wanted)[:wanted.amount]
                 for size in sizes]
        if (not host_bits or not self.offers(specs)
                or max(sizes, default=0) < address_space.LARGE):
            return ''
        bits = address_space.DEFAULT_BITS
        if CONF.libvirt.virt_type == 'kvm':
            bits = address_space.guest_bits(
                host_bits, CONF.libvirt.cpu_mode,
                specs.get('hw:maxphysaddr_mode'),
                specs.get('hw:maxphysaddr_bits')) or host_bits
        return address_space.unseen(memory, sizes, bits)

    def _sizes(self, wanted: request.AcceleratorRequest) -> list[list[int]]:
        """The regions of each handle that a group may get here, the largest
        first."""
        return sorted((
            sizes for provider in self._host.providers
            if wanted.resource_class in provider.inventory
            and provider.traits >= wanted.required
            and not provider.traits & wanted.forbidden
            for address in provider.addresses
            for sizes in self._regions[address]), key=sum, reverse=True)
