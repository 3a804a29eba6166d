# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check the values of [accel] that have a syntax of their own."""

from collections.abc import Callable

from oslo_config import cfg

from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel.drivers import pci_rule
from nova_accel.drivers import qat
from nova_accel.drivers import rules
from nova_accel.drivers import sriov
from nova_accel.drivers import timecard
from nova_accel.drivers import vgpu
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import domains
from nova_accel import naming

CONF = conf.CONF


def _handover():
    """Check that the drivers that [accel] handover names are installed. A
    policy for an unknown driver would have no effect, and the devices for
    which the operator wrote it would have another policy.

    :raises ConfigurationError: a driver is not installed.
    """
    drivers.check_installed(handover.OPTION, [
        about for about in handover.policies().named
        if about and ':' not in about])


#: each raises ConfigurationError, which names the option
_READERS: tuple[Callable[[], object], ...] = (
    rules.DeviceRules, base.fixed_devices, base.whole_cards, sriov.wanted,
    rules.sets, _handover, naming.class_traits, pci_rule.wanted,
    qat.wanted_services, timecard.named, vgpu.wanted_types, vgpu.wanted_quotas,
    signals.modes, domains.wanted)


def malformed() -> list[str]:
    """Return a sentence for each option of [accel] with a malformed value.

    Options of drivers that are not enabled are checked as well.
    """
    found = conf.malformed()
    for read in _READERS:
        try:
            read()
        except exception.ConfigurationError as error:
            found.append(str(error))
        except (cfg.Error, ValueError):
            # another reader has reported the same option
            continue
    return found


def check() -> None:
    """Refuse to start if any option has a malformed value.

    :raises ConfigurationError: an option is malformed; names all such options.
    """
    found = malformed()
    if found:
        raise exception.ConfigurationError(' '.join(found))
