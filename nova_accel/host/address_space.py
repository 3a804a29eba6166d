# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Calculate the room in a guest's address space for memory regions (BARs) of
devices.

A guest cannot use a device if the guest's firmware finds no place for the
region of the device. For example, servers with 256, 512 and 768 GiB of memory
saw three, two and one of their four H100 (blog.rackspacecloud.com, December
2025). By default QEMU gives a guest 40 bits of physical addresses. The number
differs if the guest has the CPU of the host, or if it is configured
(x86_cpu_realizefn(), host_cpu_max_instance_init() in target/i386 of QEMU).
"""

from collections.abc import Iterable, Sequence

from nova_accel.host import pci

#: bits of a guest with a CPU model (TCG_PHYS_ADDR_BITS of QEMU)
DEFAULT_BITS = 40
#: OVMF and SeaBIOS use no more bits, because of old Linux kernels
#: (PlatformAddressWidthFromCpuid() in OvmfPkg, 2026)
MOST_BITS = 46
#: minimum bytes of a region that fits only above the first 4 GiB of a guest
LARGE = 1 << 32
#: OVMF treats 40 bits as a default, and has one window of this size then
_CLASSIC_WINDOW = 32 << 30
#: at most this much of the memory is below 4 GiB, the rest above it (q35)
_BELOW_4G = 2 << 30
#: number of BARs, which are the first lines of the attribute resource
_BARS = 6
#: CPU modes in which a guest has as many address bits as the host
HOSTS_CPU = ('host-passthrough', 'maximum')
#: flag of a memory region; source: IORESOURCE_MEM in include/linux/ioport.h
_IS_MEMORY = 0x200


def largest(kernel, address: str) -> int:
    """Return the size in bytes of a function's largest memory region, or 0 if
    the kernel does not show the regions.

    Source: resource in Documentation/PCI/sysfs-pci.rst of Linux.
    """
    try:
        rows = [[int(word, 16) for word in line.split()] for line in
                kernel.read(pci.path(address, 'resource')).splitlines()[:_BARS]]
        return max((end - start + 1 for start, end, flags in rows
                    if flags & _IS_MEMORY), default=0)
    except (OSError, ValueError):
        return 0


def guest_bits(host_bits: int, cpu_mode: str | None, mode: str | None,
               bits: object) -> int | None:
    """Return how many bits of physical addresses a guest under KVM has, or
    None if the number depends on the guest's CPU model.

    :param host_bits: physical address bits of the host's CPU.
    :param cpu_mode: CPU mode of the guest: a value of [libvirt] cpu_mode.
    :param mode: hw:maxphysaddr_mode of its flavor or image, if any.
    :param bits: hw:maxphysaddr_bits, if any.
    """
    if mode:
        return host_bits if mode == 'passthrough' else int(
            str(bits or DEFAULT_BITS))
    return host_bits if cpu_mode in HOSTS_CPU else None


def unseen(memory: int, sizes: Sequence[int], bits: int) -> str:
    """Return a clause with the reason why a guest cannot address all of its
    devices. Return '' if it can.

    :param memory: memory of the guest in bytes.
    :param sizes: size of the largest region of each device in bytes.
    :param bits: number of bits of the guest's physical addresses.
    """
    large = [size for size in sizes if size >= LARGE]
    fit = placed(memory, large, bits)
    if fit == len(large):
        return ''
    return (f'of its {len(large)} devices with large memory regions '
            f'{fit} fit above its {memory >> 30} GiB of memory into {bits} '
            f'bits of physical addresses')


def placed(memory: int, sizes: Iterable[int], bits: int) -> int:
    """Return how many devices have room for their regions above a guest's
    memory.

    A region begins at a multiple of its size. The window of the device's port
    has the large region, and beside it the small regions of the device. Hence
    the next large region begins two sizes later (issue 12997 of
    tianocore/edk2).

    :param memory: memory of the guest in bytes.
    :param sizes: the largest region of each device, bytes, a power of two.
    :param bits: number of bits of the guest's physical addresses.
    """
    at, count = memory + _BELOW_4G, 0
    end = 1 << min(bits, MOST_BITS)
    for size in sorted(sizes, reverse=True):
        at += -at % size
        if at + size <= end:
            count += 1
        at += 2 * size
    return count


def fits_uefi(sizes: Iterable[int], bits: int) -> bool:
    """Return whether the regions fit into OVMF's window for them, an eighth of
    the address space (PlatformDynamicMmioWindow() until August 2026).

    :param sizes: see placed().
    :param bits: see placed().
    """
    window = (_CLASSIC_WINDOW if bits <= DEFAULT_BITS
              else 1 << min(bits, MOST_BITS) - 3)
    # a port's window is as long as a multiple of its alignment, and the guest
    # has other devices
    return 2 * sum(sizes) < window
