# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The operator's policy for devices between two servers."""

from collections.abc import Mapping
import dataclasses
import enum

from nova_accel import conf
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model

CONF = conf.CONF
OPTION = '[accel] handover'


class Policy(enum.Enum):
    """The values of [accel] handover."""

    #: the device is not cleaned
    NONE = 'none'
    #: only the reset of the function or of the port
    RESET = 'reset'
    #: the reset, and the removal of all state that the driver knows of
    CLEAR = 'clear'
    #: the operator cleans the device, and releases it
    OPERATOR = 'operator'
    #: as CLEAR, with a reset of the bus: see by_bus()
    BUS = 'bus'
    #: as BUS, and the values that the device reports must show that its memory
    #: is clear: see demands_proof()
    SHOWN = 'shown'


#: 'memory' of Cleaned.shown (drivers.base)
CLEARED, NOT_SHOWN = 'cleared', 'not shown'


@dataclasses.dataclass(frozen=True)
class Policies:
    """The parsed value of [accel] handover."""

    #: PCI address, or name of a driver -> policy; '' -> policy of all others
    named: Mapping[str, Policy]
    #: in the order of the option
    by_rule: tuple[tuple[rules.Rule, Policy], ...]

    def about(self, device: model.Device, *addresses: str) -> Policy | None:
        """Return the policy that the option has for a device: by address, then
        by rule, then by driver. Return None if only the policy for all devices
        applies.

        :param addresses: addresses of the handle, if they differ from the
            address of the device.
        """
        for address in (*addresses, device.address):
            if address in self.named:
                return self.named[address]
        for rule, policy in self.by_rule:
            if rule.matches_device(device):
                return policy
        return self.named.get(device.driver)


def policies() -> Policies:
    """Return the policies of [accel] handover.

    :raises ConfigurationError: the option cannot be read.
    """
    named, by_rule, seen = {'': Policy.CLEAR}, [], set()
    for item in CONF.accel.handover:
        about, _, value = (part.strip() for part in item.rpartition('='))
        try:
            chosen = Policy(value)
            if '=' not in about and ':' in about:
                about = pci.address(about)
        except (exception.ConfigurationError, ValueError):
            raise exception.ConfigurationError(
                f'{OPTION} has {item!r}, which is neither <policy>, '
                f'<driver>=<policy>, <PCI address>=<policy> nor <key>=<value> '
                f'...=<policy>, with one of the policies '
                f'{", ".join(p.value for p in Policy)}: correct it.') from None
        if about in seen:
            raise exception.ConfigurationError(
                f'{OPTION} has {about or "a policy for all devices"} twice: '
                f'remove one of the two.')
        seen.add(about)
        if '=' in about:
            rule, = rules.parse(OPTION, [about], rules.KEYS)
            by_rule.append((rule, chosen))
        else:
            named[about] = chosen
    return Policies(named, tuple(by_rule))


def policy(device: model.Device, *addresses: str) -> Policy:
    """Return the policy for a device: the policy of the first listed address,
    else of the first matching rule, else of the driver, else of all devices.

    :param addresses: addresses of one handle, or of all handles that a server
        has.
    :returns: CLEAR in place of BUS and SHOWN.
    :raises ConfigurationError: the option cannot be read.
    """
    found = _chosen(device, addresses)
    return (Policy.CLEAR if found in (Policy.BUS, Policy.SHOWN)
            else found)


def by_bus(device: model.Device, *addresses: str) -> bool:
    """Return whether the policy permits only a bus reset of a device, because
    a function reset could leave state of a server in the device.

    :param addresses: see policy().
    :raises ConfigurationError: the option cannot be read.
    """
    return _chosen(device, addresses) in (Policy.BUS, Policy.SHOWN)


def demands_proof(device: model.Device, *addresses: str) -> bool:
    """Return whether a device is withheld until it shows that its memory is
    clear.

    :param addresses: see policy().
    :raises ConfigurationError: the option cannot be read.
    """
    return _chosen(device, addresses) is Policy.SHOWN


def _chosen(device, addresses) -> Policy:
    found = policies()
    return found.about(device, *addresses) or found.named['']
