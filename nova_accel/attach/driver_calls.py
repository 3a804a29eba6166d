# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Call drivers for the handle of one claim, with a time limit.

A driver gets the handle and a base.Use, which contains the facts of the claim
that the driver may read, and the data that it has stored for the handle.
"""

from collections.abc import Callable
import functools
import json

from nova_accel.attach import holdings as server_holdings
from nova_accel import conf
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request

CONF = conf.CONF

#: characters of JSON that a driver may store for a handle
_MOST_REMEMBERED = 4096


class DriverCalls:
    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings):
        self._inventory = inventory
        self._holdings = holdings

    def call(self, device: model.Device, claim: model.Claim, what: str,
             method: Callable[..., None], *args,
             late: Callable[[], None] | None = None) -> None:
        """Call a method of the driver for the handle of a claim, if the claim
        has not ended.

        Calls for a handle run one at a time.

        :param what: name of the operation, for the beginning of errors.
        :param late: called if the method succeeds after the time limit.
        :raises DeviceTimeout: the call takes longer than [accel]
            device_timeout, and continues.
        :raises AcceleratorError: the driver failed.
        """
        def run():
            try:
                # the claim may have ended while this call waited
                for now in self._holdings.now([claim]):
                    method(device, claim.handle, claim.created_type, *args,
                           self._use(device, now))
            finally:
                self._inventory.table.reports.invalidate(device.address)
        try:
            self._inventory.cards.call(
                claim.key, what, run, seconds=CONF.accel.device_timeout,
                late=late, patient=True)
        except exception.AcceleratorError:
            raise
        except Exception as error:
            raise exception.DeviceError(
                f'{what} failed ({type(error).__name__}: {error}): check '
                f'the device, and read the kernel log.',
                found=f'{what} failed') from error

    def _use(self, device, claim):
        """Return the base.Use of a claim: the facts that its driver may read,
        and the function that stores data of the driver."""
        def remember(value):
            text = json.dumps(value)
            if len(text) > _MOST_REMEMBERED:
                raise ValueError(
                    f'{len(text)} characters are too many to be remembered, '
                    f'{_MOST_REMEMBERED} are the most')
            self._holdings.remember(claim, text)
        found = json.loads(claim.driver_request or '{}')
        return base.Use(
            keys=found.get('keys', {}),
            functions=tuple(found.get('functions', ())),
            bitstream_id=found.get('bitstream_id'),
            memory=json.loads(claim.driver_memory or 'null'),
            remember=remember,
            last_shown=functools.partial(self._holdings.last_shown, device))


def for_driver(wanted: request.AcceleratorRequest) -> str:
    """Return the part of a request that the driver needs, as text for
    Claim.driver_request."""
    return json.dumps({
        'keys': dict(wanted.driver_keys), 'bitstream_id': wanted.bitstream_id,
        'functions': [choice.function_id or choice.function_name
                      for choice in wanted.choices if choice.function_id
                      or choice.function_name]})
