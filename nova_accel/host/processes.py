# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find the processes of the host that have device nodes of a function open.

When a function is unbound, its driver may wait for the last close without a
limit: nvidia does (nv_pci_remove() in nv-pci.c of its open kernel modules), and
sound (snd_card_free() of Linux). libvirt would wait as well. Therefore
nova-compute asks which processes have a node open before it unbinds a function.
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
    """Return a clause with the processes that block unbinding a handle from
    the host's drivers.

    :param attempts: how often to ask while a process has a node open, because
        a tool such as nvidia-smi ends soon.
    :returns: '' if no process blocks, or if the processes cannot be read.
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
    """Return the functions of a handle, and of the slot of a device, that are
    bound to drivers of the host.

    :raises OSError: sysfs cannot be read.
    """
    return _of_host(kernel, dataclasses.replace(handle, companions=tuple(
        {*handle.companions, *device.company} - {handle.address})))


def take(kernel, handle: model.AttachHandle) -> None:
    """Take the functions of a handle from the host's drivers.

    libvirt binds them to VFIO, and has the kernel choose their drivers again
    when the guest ends. May block while a process has a function open.

    :raises OSError: the kernel refuses.
    """
    for function in _of_host(kernel, handle):
        kernel.unbind(function)


def is_taken(kernel, handle: model.AttachHandle) -> bool:
    """Return whether no driver of the host has a function of a handle.

    :raises OSError: sysfs cannot be read.
    """
    return not _of_host(kernel, handle)


def _of_host(kernel, handle) -> list[str]:
    if handle.type is not model.HandleType.PCI or not handle.managed:
        return []
    return [function for function in handle.addresses
            if pci.driver(kernel, function) is not None
            and not pci.is_for_vfio(kernel, function)]


def restore_drivers(kernel, handle: model.AttachHandle) -> None:
    """Let the kernel choose drivers for functions without one, for example
    after take(), if libvirt has not done so.

    :raises OSError: the kernel refuses.
    """
    if handle.type is model.HandleType.PCI and handle.managed:
        for function in handle.addresses:
            if pci.driver(kernel, function) is None:
                kernel.probe(function)
