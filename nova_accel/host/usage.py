# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Detect whether the host itself uses a PCI function.

Sources: Documentation/ABI (sysfs-class-net, stable/sysfs-block) and proc(5).
One use is not detected: a process that has a disk open without a mount, a swap
area or a holder, such as a database on a raw partition.
"""

import re

from nova_accel.host import pci

_UP = 0x1


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
