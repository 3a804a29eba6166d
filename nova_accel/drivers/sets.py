# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read the operator's sets of devices that are allocated together."""

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import pci

CONF = conf.CONF
OPTION = '[accel] device_sets'

#: sorted addresses of the devices
Set = tuple[str, ...]


def wanted() -> list[Set]:
    """Return the sets of this host.

    :raises ConfigurationError: the option cannot be read, or a device is in
        two sets.
    """
    result: list[Set] = []
    owner: dict[str, str] = {}
    for line in CONF.accel.device_sets:
        try:
            addresses = [pci.address(word) for word in line.split()]
        except exception.ConfigurationError as error:
            raise exception.ConfigurationError(
                f'{OPTION} has the set {line!r}, and {error}') from None
        if len(addresses) < 2:
            raise exception.ConfigurationError(
                f'{OPTION} has the set {line!r}, which is not two or more PCI '
                f'addresses with spaces between them: correct it.')
        for address in addresses:
            if address in owner:
                raise exception.ConfigurationError(
                    f'{OPTION} has {address} twice, in {owner[address]!r} and '
                    f'in {line!r}: a device can be in one set only.')
            owner[address] = line
        result.append(tuple(sorted(addresses)))
    return result


def of(address: str) -> Set | None:
    """Return the set of a device, or None if the device is in no set.

    :raises ConfigurationError: the option cannot be read.
    """
    return next((found for found in wanted() if address in found), None)
