# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read BAR0 of an unused PCI function, and reset its bus.

by_vfio() uses VFIO, which resets the function at opening and closing.
by_sysfs() uses sysfs, which a locked down kernel does not allow. Both
functions read four bytes at a time, and never write to BAR0. Sources:
include/uapi/linux/vfio.h, vfio_pci_core.c and pci-sysfs.c of Linux.
"""

from collections.abc import Callable, Iterator
import contextlib
import errno
import fcntl
import mmap
import os
import struct

#: _IO(VFIO_TYPE, VFIO_BASE)
_VFIO = ord(';') << 8 | 100
_SET_IOMMU, _SET_CONTAINER, _GET_DEVICE, _REGION_INFO, _HOT_RESET, _BIND = (
    _VFIO + number for number in (2, 4, 6, 8, 13, 18))
_TYPE1_IOMMU = 1
#: argsz, flags, index, cap_offset, size, offset
_REGION = struct.Struct('=IIIIQQ')
#: argsz, flags, iommufd, out_devid
_BINDING = struct.Struct('=IIiI')

#: reads the four bytes at an offset
Read = Callable[[int], int]
Reset = Callable[[], None]


@contextlib.contextmanager
def by_vfio(sys: str, dev: str, function: str,
            ) -> Iterator[tuple[Read, Reset]]:
    """Open a function that is bound to vfio-pci, and yield functions to read
    its BAR0 and to reset its bus. On kernels without VFIO groups, the node of
    the function is opened in place of the node of its group.

    :param sys: directory of sysfs.
    :param dev: directory of device nodes.
    :raises OSError: EBUSY: a process has it open.
    """
    device = f'{sys}/bus/pci/devices/{function}'
    with contextlib.ExitStack() as stack:
        def opened(path, flags=os.O_RDONLY):
            # the node of a group may be another user's, and is not written
            fd = os.open(path, flags | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            return fd
        group = os.path.basename(os.readlink(f'{device}/iommu_group'))
        groups = []
        try:
            groups.append(opened(f'{dev}/vfio/{group}'))
        except FileNotFoundError:
            name, = os.listdir(f'{device}/vfio-dev')
            fd = opened(f'{dev}/vfio/devices/{name}', os.O_RDWR)
            fcntl.ioctl(fd, _BIND, _BINDING.pack(
                _BINDING.size, 0, opened(f'{dev}/iommu', os.O_RDWR), 0))
        else:
            container = opened(f'{dev}/vfio/vfio', os.O_RDWR)
            fcntl.ioctl(groups[0], _SET_CONTAINER,
                        struct.pack('=i', container))
            fcntl.ioctl(container, _SET_IOMMU, _TYPE1_IOMMU)
            # with a mutable buffer, the result is that of the call
            fd = fcntl.ioctl(groups[0], _GET_DEVICE,
                             bytearray(function.encode('ascii') + b'\0'))
            stack.callback(os.close, fd)
        *_, size, begin = _REGION.unpack(fcntl.ioctl(
            fd, _REGION_INFO, _REGION.pack(_REGION.size, 0, 0, 0, 0, 0)))

        def read(offset):
            check_size(size, offset)
            return int.from_bytes(os.pread(fd, 4, begin + offset), 'little')

        def reset():
            # for a reset of the bus the kernel demands the groups of all its
            # functions or, without groups, that this process has their nodes
            # open
            fcntl.ioctl(fd, _HOT_RESET, struct.pack(
                f'=III{len(groups)}i', 12 + 4 * len(groups), 0, len(groups),
                *groups))
        yield read, reset


@contextlib.contextmanager
def by_sysfs(sys: str, function: str, write: Callable[[str, str], None],
             ) -> Iterator[tuple[Read, Reset]]:
    """Map BAR0 of a function without a driver, and yield functions to read it
    and to reset the bus. The reset_method of the function must be bus.

    If the function does not answer, reads return only ones, after the
    completion timeout of PCI Express.

    :param write: writes an attribute.
    :raises OSError: EPERM: the kernel is locked down.
    """
    device = f'{sys}/bus/pci/devices/{function}'
    with contextlib.ExitStack() as stack:
        write(f'{device}/enable', '1')
        stack.callback(write, f'{device}/enable', '0')
        fd = os.open(f'{device}/resource0',
                     os.O_RDONLY | os.O_SYNC | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        size = os.fstat(fd).st_size
        area = stack.enter_context(mmap.mmap(
            fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
        # one access of four bytes for each item
        items = stack.enter_context(
            stack.enter_context(memoryview(area)).cast('I'))

        def read(offset):
            check_size(size, offset)
            return items[offset // 4]
        yield read, lambda: write(f'{device}/reset', '1')


def check_size(size: int, offset: int) -> None:
    """Raise ERANGE if a BAR0 of this size has no four bytes at offset."""
    if offset + 4 > size:
        raise OSError(errno.ERANGE, f'its BAR0 has {size} bytes, and no word '
                                    f'at {offset:#x}')
