# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Describe for nova-accel check which devices move in a live migration.

No line has the result failure, because flavors determine which guests migrate
with their devices.
"""

from collections.abc import Iterator
import contextlib
import operator

from nova_accel.cmd import check_line
from nova_accel import conf
from nova_accel.host import vfio
from nova_accel import text

CONF = conf.CONF
Line = check_line.Line
OK = check_line.OK


def devices(host) -> Iterator[Line]:
    """Report whether a live migration moves a device, or why it does not."""
    versions: tuple = ()
    # another check reports an unreachable libvirt
    with contextlib.suppress(Exception):
        *_, versions = host.libvirt
    alike: dict[tuple[str, str], list] = {}
    for address in sorted(host.devices):
        device = host.devices[address]
        by = device.migrates_by
        alike.setdefault((by, '' if by else device.stays), []).append(device)
    for (by, why), found in alike.items():
        which = text.some([device.address for device in found])
        needed = vfio.versions(by)
        if by and any(map(operator.lt, versions, needed)):
            yield Line(OK, f'guests would take {which} along when they migrate '
                           f'live, by {by}, with {vfio.named(needed)}, and '
                           f'this host has {vfio.named(versions)}')
        elif by:
            yield from _takes(which, by, max(
                (type_.memory for device in found
                 for type_ in device.creatable), default=0))
        else:
            yield Line(OK, f'guests do not take {which} along when they '
                           f'migrate live: {why}')


def _takes(which, by, memory):
    found, remedy = (f'guests take {which} along when they migrate live, by '
                     f'{by}'), ''
    if memory:
        seconds = vfio.seconds_to_copy(
            memory, CONF.libvirt.live_migration_bandwidth)
        found += (f', and pause for up to {seconds:.1f} s for a device with '
                  f'{memory} MiB')
        # Nova has the option since its release 33
        connections = getattr(
            CONF.libvirt, 'live_migration_parallel_connections', 1)
        if connections > 1:
            found += (f', which QEMU 10.0 and later send over {connections} '
                      f'connections')
        if seconds > CONF.libvirt.live_migration_downtime / 1000:
            remedy = 'set accel:max_downtime in their flavors'
    if CONF.libvirt.live_migration_permit_post_copy:
        found += ', but for [libvirt] live_migration_permit_post_copy'
        remedy = 'set that to false for guests that take devices along'
    yield Line(OK, found, remedy)
