# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel drill: a device reports a false finding for a while.

The reading ``drill`` is added to the readings of a disabled device, with the
consequences of any other signal, so the operator can check that their alert
arrives.
"""

import time

from nova_accel import exception
from nova_accel.health import signals
from nova_accel import inventory as host_inventory
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel import model


def drill(inventory: host_inventory.Inventory, order: str) -> str:
    """Add a false finding to a disabled device for a while.

    :param order: address, a space, and the number of seconds.
    :returns: the expected effects, in one sentence.
    :raises DeviceUnavailable: the operator has not disabled the device, or
        the device has another finding.
    :raises InvalidRequest: the signal is off in [accel] health.
    """
    address, _, seconds = order.partition(' ')
    device, _ = identity.part(address, inventory.devices)
    mode = _check(inventory, device)
    with inventory.health.drilled(address):
        inventory.looks.background.start()
        time.sleep(float(seconds))
    inventory.looks.background.start()
    also = (', Placement and the owners of its servers'
            if mode is signals.Mode.ACT else '')
    return (f'{address} reported a false finding (signal {signals.DRILL}) '
            f'for {seconds} s, to the log, notifications, metrics{also}: '
            f'check that your alert arrived.')


def _check(inventory: host_inventory.Inventory,
           device: model.Device) -> signals.Mode:
    """Check that a drill of a device is permitted. Return the mode of the
    signal ``drill``."""
    address = device.address
    if holds.Kind.DISABLED not in inventory.table.kinds(address):
        raise exception.DeviceUnavailable(
            f'A drill of {address} was asked for, and a server might get '
            f'it meanwhile, because the operator has not disabled it: '
            f'nova-accel disable {address} first.')
    known = inventory.health.conditions().get(address)
    if known is None or known.findings or (
            known.for_owner is not signals.State.OK):
        raise exception.DeviceUnavailable(
            f'A drill of {address} was asked for, and it is not well '
            f'({known.reason if known else "not read yet"}): name a '
            f'device that is.')
    mode = signals.modes()[signals.DRILL]
    if mode is signals.Mode.OFF:
        raise exception.InvalidRequest(
            f'A drill of {address} was asked for, and {signals.OPTION} has '
            f'it off: add {signals.DRILL}=observe or {signals.DRILL}=act '
            f'there, and restart nova-compute.')
    return mode
