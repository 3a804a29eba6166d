# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Detect whether the host itself uses a PCI function: by a disk, by a network
interface, or by a process that has it open.

Sources: Documentation/ABI (sysfs-class-net, stable/sysfs-block) and proc(5).
usage() does not detect a process that has a disk open without a mount, a swap
area or a holder, such as a database on a raw partition.

When a function is unbound, some drivers wait without a limit until all
processes have closed its nodes: nvidia (nv_pci_remove() in nv-pci.c of its
open kernel modules), and sound (snd_card_free() of Linux). libvirt, which
unbinds the function, would wait as well. Hence nova-compute searches for such
processes first, and unbinds the function itself, with a time limit.

The kernel removes the link from the function to its driver before the driver
begins to wait (__device_release_driver() in drivers/base/dd.c of Linux 6.16).
A function without a driver may therefore be one whose driver still waits, also
after a restart of nova-compute. While it waits, the function is enabled.
"""

from collections.abc import Iterable
import contextlib
import dataclasses
import re
import time
import typing

from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model

_UP = 0x1
#: maximum number of processes in an error
_MOST = 3
#: how often to ask which processes have a node open, and seconds between
_ATTEMPTS, _PAUSE = 3, 1


def usage(kernel, function: str) -> str:
    """Return a clause that describes how the host uses a function. Return ''
    if it does not use the function.

    :param function: PCI address.
    :raises OSError: an attribute cannot be read.
    """
    return _of_disks(kernel, function) or (
        # VFs are meant for guests: a VF's interface that a service brings up
        # after a guest does not count as a use of the host
        '' if pci.physical_function(kernel, function)
        else _of_interfaces(kernel, function))


def fingerprint(kernel):
    """Return a value that changes when the host starts or ends a use.

    This is cheap, because it only reads directory listings and mounts.
    """
    return (*(tuple(_listing(kernel, path)) for path in (
                'class/block', 'class/net', 'fs/btrfs')),
            frozenset(kernel.mounted_devices()))


def disks(kernel, function) -> list[str]:
    """Return the names of the disks and partitions of a function."""
    return _below(kernel, 'class/block', function)


def _of_disks(kernel, function):
    names = disks(kernel, function)
    if not names:
        return ''
    mounted = kernel.mounted_devices()
    in_btrfs = {name for filesystem in _listing(kernel, 'fs/btrfs')
                for name in _listing(kernel,
                                     f'fs/btrfs/{filesystem}/devices')}
    for name in names:
        top = f'class/block/{name}'
        holders = _listing(kernel, f'{top}/holders')
        if holders:
            return f'its disk {name} is used by {holders[0]}'
        if name in in_btrfs:
            return f'its disk {name} is in a mounted btrfs'
        try:
            where = mounted.get(kernel.read(f'{top}/dev'))
        except FileNotFoundError:
            # one of several paths to a disk; paths have no device node
            continue
        if where:
            return f'its disk {name} is {where}'
    return ''


def _of_interfaces(kernel, function):
    for name in _below(kernel, 'class/net', function):
        if int(kernel.read(f'class/net/{name}/flags'), 16) & _UP:
            return f'its network interface {name} is up'
    return ''


def _below(kernel, directory, function) -> list[str]:
    """Return the devices of a function in a directory such as class/block,
    with their partitions."""
    places = {}
    for name in _listing(kernel, directory):
        try:
            places[name] = f'{kernel.readlink(f"{directory}/{name}")}/'
        except OSError:
            # gone since the listing
            continue
    found = {name for name, place in places.items()
             if f'/{function}/' in place}
    # the paths nvme0c1n1 and nvme0c2n1 lead to nvme0n1, which belongs to no
    # controller
    heads = {''.join(path.groups()) for path in map(
        re.compile('(nvme[0-9]+)c[0-9]+(n[0-9]+)').fullmatch, found) if path}
    found.update(name for name, place in places.items()
                 if heads & set(place.split('/')))
    return sorted(found)


def _listing(kernel, path):
    try:
        return kernel.listdir(path)
    except FileNotFoundError:
        return []


# Processes that have nodes of a function open

class Process(typing.NamedTuple):

    #: PCI address of the function whose node it has open
    function: str
    pid: int
    #: as in /proc/<pid>/comm: at most 15 characters
    command: str
    #: path of the node
    node: str


def named(found: Iterable[Process]) -> str:
    """Return a clause with the processes and their open nodes, or '' without
    processes."""
    said = list(dict.fromkeys(
        f'{one.command} (process {one.pid}) has {one.node} open'
        for one in found))
    more = len(said) - _MOST
    return ' and '.join(said[:_MOST]) + (f' and {more} more' * (more > 0))


def keeping(kernel, device: model.Device, handle: model.AttachHandle,
            attempts: int = _ATTEMPTS) -> str:
    """Return a clause with the processes that keep drivers of the host from
    releasing the functions of a handle.

    :param attempts: how often to search for such processes. A tool such as
        nvidia-smi soon ends, and is then no obstacle.
    :returns: '' if no such process was found, or if processes cannot be read.
    """
    found: list[Process] = []
    with contextlib.suppress(OSError):
        functions = of_host(kernel, device, handle)
        for attempt in range(attempts if functions else 0):
            if attempt:
                time.sleep(_PAUSE)
            found = kernel.processes(functions)
            if not found:
                break
    return named(found)


def of_host(kernel, device: model.Device, handle: model.AttachHandle,
            ) -> list[str]:
    """Return which functions of a handle, and of the slot of its device, are
    bound to drivers of the host, or may be released by such a driver now.

    :raises OSError: sysfs cannot be read.
    """
    return [function for function in _without_vfio(
                kernel, dataclasses.replace(handle, companions=tuple(
                    {*handle.companions, *device.company} - {handle.address})))
            if pci.driver(kernel, function) is not None
            or kernel.read(pci.path(function, 'enable')) != '0']


def take(kernel, handle: model.AttachHandle) -> None:
    """Unbind the functions of a handle from drivers of the host, for a guest.

    libvirt then binds the functions to VFIO. When the guest ends, libvirt lets
    the kernel choose their drivers again. This function may block while a
    process has a function open.

    :raises OSError: the kernel refuses.
    """
    for function in _without_vfio(kernel, handle):
        # if it has no driver, its last driver may not have released it yet
        kernel.unbind(function)


def _without_vfio(kernel, handle) -> list[str]:
    """Return the functions of a handle that libvirt binds to VFIO."""
    if handle.type is not model.HandleType.PCI or not handle.managed:
        return []
    return [function for function in handle.addresses
            if not pci.is_for_vfio(kernel, function)]


def restore_drivers(kernel, handle: model.AttachHandle) -> None:
    """Let the kernel choose drivers for functions of a handle that have none.
    They have none after take() if libvirt has not bound them again.

    :raises OSError: the kernel refuses.
    """
    if handle.type is model.HandleType.PCI and handle.managed:
        for function in handle.addresses:
            if pci.driver(kernel, function) is None:
                kernel.probe(function)


# Processes that have a function open by VFIO

def is_open(kernel, handle: model.AttachHandle) -> bool:
    """Return whether a process has a function of a handle open by VFIO."""
    for function in (handle.addresses
                     if handle.type is model.HandleType.PCI else ()):
        with contextlib.suppress(OSError):
            if pci.is_open(kernel, function):
                return True
    return False


def opened(kernel, handle: model.AttachHandle,
           others: Iterable[str] = ()) -> str:
    """Return the first function, of a handle or of others, that a process has
    open by VFIO. Return '' if no process has one open.

    vfio-pci and its variants enable a function that is opened
    (vfio_pci_core_enable() of Linux), but a driver of the host may have left
    it enabled. Hence the group of an enabled function is opened:
    vfio_group_fops_open() in drivers/vfio/group.c refuses this with EBUSY
    while a process has the group open, or a device of it by /dev/vfio/devices
    (vfio_device_block_group(), Linux 6.6). If the group has no node, for
    example without CONFIG_VFIO_GROUP, the processes with an open node of the
    function are searched.

    :param others: the other functions in the IOMMU groups of the handle.
    """
    for function in ((*handle.addresses, *others)
                     if handle.type is model.HandleType.PCI else ()):
        with contextlib.suppress(OSError):
            if (kernel.read(pci.path(function, 'enable')) != '0'
                    and pci.is_for_vfio(kernel, function)
                    and _is_open(kernel, function)):
                return function
    return ''


def _is_open(kernel, function) -> bool:
    try:
        return kernel.is_group_open(function)
    except FileNotFoundError:
        return bool(kernel.processes([function]))


def opened_by(kernel, function: str) -> str:
    """Return a clause that names the process that has a function open through
    VFIO, or the command that finds the process."""
    with contextlib.suppress(OSError):
        found = kernel.processes([function])
        if found:
            return (f'{function} is open through VFIO: '
                    f'{named(found)}')
    return (f'a process of the host has {function} open through VFIO '
            f'("fuser -v /dev/vfio/{pci.group(kernel, function)} '
            f'/dev/vfio/devices/*" shows which)')


def check_not_in_use(kernel, handles: Iterable[model.AttachHandle],
                     refused: str) -> None:
    """Check that no process of the host has one of these handles open by VFIO.

    :param refused: the refused action, as a clause, for the error.
    :raises DeviceUnavailable: a process has one open.
    """
    for handle in handles:
        if function := opened(kernel, handle):
            raise exception.DeviceUnavailable(
                f'{refused}, because {opened_by(kernel, function)}: end that '
                f'process.',
                found=f'{refused} while a process of the host has it open')
