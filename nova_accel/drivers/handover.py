# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is done with a device between two servers: the operator's policy."""

import enum

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import pci

CONF = conf.CONF
OPTION = '[accel] handover'


class Policy(enum.Enum):
    """The values of [accel] handover."""

    #: nothing
    NONE = 'none'
    #: the reset of the function or of the port alone
    RESET = 'reset'
    #: reset, and whatever the driver knows to take away what a server left
    CLEAR = 'clear'
    #: the operator cleans, and gives the device back
    OPERATOR = 'operator'


def policies() -> dict[str, Policy]:
    """By PCI address, name of a driver, and '' for all others.

    :raises ConfigurationError: the option cannot be read.
    """
    result = {'': Policy.CLEAR}
    seen = set()
    for item in CONF.accel.handover:
        about, _, value = (part.strip() for part in item.rpartition('='))
        try:
            chosen = Policy(value)
            if ':' in about:
                about = pci.address(about)
        except (exception.ConfigurationError, ValueError):
            raise exception.ConfigurationError(
                f'{OPTION} has {item!r}, which is neither <policy>, '
                f'<driver>=<policy> nor <PCI address>=<policy>, with one of '
                f'the policies {", ".join(p.value for p in Policy)}: correct '
                f'it.') from None
        if about in seen:
            raise exception.ConfigurationError(
                f'{OPTION} has {about or "a policy for all devices"} twice: '
                f'remove one of the two.')
        seen.add(about)
        result[about] = chosen
    return result


def policy(driver: str, *addresses: str) -> Policy:
    """The policy for a device: of the first address that has one, else of its
    driver, else of all devices.

    :param driver: its name.
    :param addresses: of the handle, then of the device.
    :raises ConfigurationError: the option cannot be read.
    """
    found = policies()
    return next(found[key] for key in (*addresses, driver, '')
                if key in found)
