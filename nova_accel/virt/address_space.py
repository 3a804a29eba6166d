# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Physical address bits of guests with large devices: see
nova_accel.host.address_space."""

from collections.abc import Iterable, Sequence

from nova.virt.libvirt import config

from nova_accel import exception
from nova_accel.host import address_space
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)


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
    problem = widen(
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


def widen(xml, sizes: Sequence[int], host_bits: int | None,
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
