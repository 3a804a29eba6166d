# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check devices that share a PCIe switch, for nova-accel check.

A device can send a request to another device below the switch. ACS of the port
at which the request enters the switch determines its way: directly to the
other device, or through the root complex, where the IOMMU checks the request
(PCI Express Base Specification, Access Control Services).
"""

from collections.abc import Iterator

from nova_accel.cmd import check_line
from nova_accel.host import pci

Line = check_line.Line
OK, WARNING = check_line.OK, check_line.WARNING


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
