# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check the devices of a host, for nova-accel check.

A device can send a request to another device below its PCIe switch. ACS of the
port at which the request enters the switch determines its way: directly to the
other device, or through the root complex, where the IOMMU checks the request
(PCI Express Base Specification, Access Control Services).
"""

from collections.abc import Iterator
import contextlib
import operator

from nova_accel.cmd import check_services
from nova_accel import conf
from nova_accel.drivers import handover
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel.host import vfio
from nova_accel.inventory import offers
from nova_accel import text

CONF = conf.CONF
Line = check_services.Line
split = check_services.split
OK, WARNING = check_services.OK, check_services.WARNING
FAILURE = check_services.FAILURE


# Each device

def state(host, device) -> Iterator[Line]:
    """Check that servers get a device."""
    try:
        missing = sriov.missing(host.kernel, device.address)
    except exception.AcceleratorError as error:
        yield Line(FAILURE, *split(str(error)))
        return
    if missing:
        yield Line(OK, f'{device.type} of the driver {device.driver}; '
                       f'nova-compute makes its {missing} VFs when it starts')
        return
    bad = dict.fromkeys(
        hold.reason for part, _ in offers.parts(device)
        for hold in (*host.offered.withheld_by(part), *(
            hold for offer in host.offered.of(part)
            for hold in offer.all_holds if hold.kind.withholds)))
    # reasons of regions without a handle
    bad |= dict.fromkeys(
        region.reason for region in device.regions if region.reason)
    for reason in bad:
        found, remedy = split(reason)
        yield Line(FAILURE, f'it is not given to servers: {found}', remedy)
    unreported = host.unreported.get(device.address)
    if unreported:
        yield Line(FAILURE, f'it is not reported to Placement: '
                            f'{unreported.rstrip(".")}',
                   f'correct what the driver {device.driver} reports of it')
    if not bad and not unreported:
        yield Line(OK, f'{device.type} of the driver {device.driver}, '
                       f'{_cleaning(host, device)}')


def _cleaning(host, device) -> str:
    """Return a clause about how a device is cleaned between two servers."""
    if device.all_handles and {
            handover.policy(device, handle.address)
            for handle in device.all_handles} <= {
                handover.Policy.NONE, handover.Policy.OPERATOR}:
        return 'not cleaned between two servers'
    driver = host.drivers[device.driver]
    resets = {method for handle in device.all_handles
              if getattr(driver, 'RESETS', False)
              and driver.is_reset(device, handle)
              for method in driver.reset_methods(
                  device, handle, handle.address)}
    return (f'reset by {", ".join(sorted(resets))}' if resets
            else 'cleaned by its driver')


def conflict(host, device) -> Iterator[Line]:
    """Check that Nova itself does not use a device."""
    why = host.taken_elsewhere(device)
    if why:
        yield Line(FAILURE, f'{why}, and found by the driver {device.driver}',
                   'take it out of one of the two')


def kept(host, device) -> Iterator[Line]:
    """Check that no process has a device open, because libvirt may wait
    without a limit until the process closes the device."""
    try:
        kept = usage.named(host.kernel.processes(sorted({
            function for handle in device.all_handles for function
            in usage.of_host(host.kernel, device, handle)})))
    except OSError:
        # the line on privileges reports the error
        return
    if kept:
        yield Line(FAILURE, f'{kept}, and no server gets it meanwhile',
                   'end that process, or have it leave the device alone; or '
                   'bind the device to vfio-pci when the host boots')


def answers(host, device) -> Iterator[Line]:
    """Check what the driver of a device reports about it."""
    try:
        yield from map(of_driver, host.drivers[device.driver].check(device))
    except OSError as error:
        if pci.is_for_vfio(host.kernel, device.address):
            # a guest has it
            return
        yield Line(WARNING, f'the driver {device.driver} cannot read it with '
                            f'privileges ({error.strerror or error})',
                   'see the line on privileges and the kernel log')


def of_driver(finding) -> Line:
    """Return the line for a finding of a driver."""
    return Line(FAILURE if finding.is_failure else WARNING, finding.found,
                finding.remedy)


# All devices

def migration(host) -> Iterator[Line]:
    """Report whether a live migration moves a device, or why it does not.

    No line has the result failure, because flavors determine which guests
    migrate with their devices.
    """
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


def peers(host) -> Iterator[Line]:
    """Check each switch that is above two or more devices."""
    below: dict[str, list[str]] = {}
    for address, device in sorted(host.devices.items()):
        for switch in pci.switches(device.bridges):
            below.setdefault(switch, []).append(address)
    # of nested switches above the same devices, take only the lowest
    for addresses, switch in {tuple(addresses): switch for switch, addresses
                              in below.items()}.items():
        if len(addresses) > 1:
            try:
                yield from _of_switch(host, switch, addresses)
            except OSError as error:
                yield Line(
                    WARNING, f'ACS of the ports of the switch {switch} cannot '
                             f'be read ({error.strerror or error})',
                    'see the line on privileges')


def _of_switch(host, switch, addresses):
    #: address -> the ports above it that redirect its requests
    redirects = {
        address: [port for port in pci.ports_between(
                      host.devices[address].bridges, switch)
                  if (host.kernel.read_acs(port) or 0) & pci.ACS_REDIRECTS]
        for address in addresses}
    ports = sorted({port for found in redirects.values() for port in found})
    if ports:
        some = ', '.join(a for a in addresses if redirects[a])
        yield Line(OK, f'requests of {some} to other devices below the switch '
                       f'{switch} go up to the root complex, by ACS of '
                       f'{", ".join(ports)}')
    direct = ', '.join(a for a in addresses if not redirects[a])
    groups = {tuple(pci.group_members(host.kernel, address) or ())
              for address in addresses}
    if direct and len(groups) > 1:
        yield Line(
            WARNING, f'requests of {direct} to other devices below the switch '
                     f'{switch} bypass the IOMMU, although these devices have '
                     f'other IOMMU groups: a server can reach devices of '
                     f'others',
            'have the kernel set ACS: without pcie_acs_override, '
            'disable_acs_redir and config_acs on its command line; or give '
            'them together, with device_sets')
    elif direct:
        yield Line(OK, f'requests of {direct} to other devices below the '
                       f'switch {switch} go there directly')
