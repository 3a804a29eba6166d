# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Create the VFs that nova.conf requests, because each boot removes them."""

import errno

from nova_accel import conf
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.host import pci

CONF = conf.CONF
OPTION = '[accel] virtual_functions'
#: a clause: why a device without its VFs is withheld, until
#: AcceleratorDriver.set_up() reports the cause
NONE = (f'{OPTION} requests VFs of it, and it has none: nova-compute creates '
        f'them when it starts, and later if no server has the device')


def wanted() -> dict[str, int]:
    """Return address of a PF -> requested number of VFs.

    :raises ConfigurationError: the option cannot be read.
    """
    return rules.numbers(OPTION, CONF.accel.virtual_functions)


def missing(kernel, pf: str) -> int:
    """Return the number of VFs that must be created for a PF.

    :raises ConfigurationError: more VFs are requested than the PF supports.
    :raises DeviceError: the PF already has VFs, but not the requested number,
        or does not report the number.
    """
    count = wanted().get(pf, 0)
    if not count:
        return 0
    try:
        there = int(kernel.read(pci.path(pf, 'sriov_numvfs')))
        most = int(kernel.read(pci.path(pf, 'sriov_totalvfs')))
    except (OSError, ValueError) as error:
        raise exception.DeviceError(
            f'{OPTION} requests {count} VFs of {pf}, and it does not report '
            f'how many it has ({error}): see that its driver supports '
            f'SR-IOV.') from None
    if count > most:
        raise exception.ConfigurationError(
            f'{OPTION} requests {count} VFs of {pf}, and it can have {most}: '
            f'correct the number.')
    if there in (0, count):
        return count - there
    raise exception.DeviceError(
        f'{OPTION} requests {count} VFs of {pf}, and it has {there}, which may '
        f'be in use: write 0 to its sriov_numvfs when no server has one, and '
        f'nova-compute creates them.')


def make(kernel, pf: str) -> None:
    """Create the requested VFs of a PF. They are not bound to host drivers,
    which must not read data of a server before a reset.

    :raises AcceleratorError: see missing(), or the kernel refused.
    """
    count = missing(kernel, pf)
    if not count:
        return
    try:
        kernel.set_numvfs(pf, count, probe=False)
    except OSError as error:
        raise exception.DeviceError(
            f'{OPTION} requests {count} VFs of {pf}, and the kernel refused '
            f'({error.strerror}): {_remedy(kernel, pf, error)}.') from error


def _remedy(kernel, pf, error) -> str:
    if error.errno != errno.ENOENT:
        return 'read dmesg; nova-compute tries again'
    bound = pci.driver(kernel, pf)
    return (f'its driver {bound} creates none, or creates them itself'
            if bound else 'bind it to its driver')
