# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find the processes of the host that have device nodes of a function open.

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
import time
import typing

from nova_accel.host import pci
from nova_accel import model

#: maximum number of processes in an error
_MOST = 3
#: how often to ask which processes have a node open, and seconds between
_ATTEMPTS, _PAUSE = 3, 1


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
