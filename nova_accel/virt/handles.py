# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Handles that are made for a server and undone after it.

vGPUs that are made on demand, and what else a driver attends to at each change
of owner. Each call of a driver has a time limit, and a handle one at a time.
"""

import collections
from collections.abc import Callable, Iterable
import threading

from oslo_log import log as logging

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import model
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class Handles:

    def __init__(self, inventory, store):
        self._inventory = inventory
        self._store = store
        #: one thread at a time makes or undoes a handle; the others of its
        #: device can be made meanwhile
        self._locks = collections.defaultdict(threading.Lock)

    def type_for(self, wanted: request.AcceleratorRequest,
                 device: model.Device) -> str | None:
        """Which of the device's types a request is for, None without types.

        The first that it asks for by trait, or that there is, and that can be
        made.

        :raises DeviceUnavailable: none can be made.
        """
        if not device.creatable:
            return None
        # traits of the unnumbered group may be those of another device
        asked = wanted.required & {
            t.trait for d in self._inventory.devices.values()
            for t in d.creatable}
        for type_ in device.creatable:
            if (type_.available >= wanted.amount and asked <= {type_.trait}
                    and type_.trait not in wanted.forbidden):
                return type_.name
        what = ' and '.join(sorted(asked)) or 'any type'
        raise exception.DeviceUnavailable(
            f'{wanted} was allocated {device.address}, which cannot make '
            f'{what[:99]} of that now: the build has to go elsewhere.')

    def prepare(self, claims: Iterable[model.Claim], fresh: bool) -> None:
        """Make the handles into what they are to be, where that is to be done.

        :param fresh: the server has just got them, so that what is there is
            not its own.
        :raises AcceleratorError: one could not be made.
        """
        for claim in claims:
            device, _ = self._inventory.find(claim.device_address, None)
            attended = self._inventory.attends(device)
            if not attended and claim.created_type is None:
                continue
            driver = self._inventory.driver_of(device)
            if fresh and claim.created_type:
                self._store.update([claim], state=model.ClaimState.PROVISIONING)
            what = (f'Making {claim.handle.address} a {claim.created_type} of '
                    f'{device.address}' if claim.created_type
                    else f'Preparing {claim.handle.address}')
            try:
                self._on_handle(device, claim, what, driver.prepare, fresh)
            except exception.DeviceUnavailable:
                if fresh and claim.created_type:
                    # nothing was made, so that there is nothing to take back
                    self._store.update([claim], state=model.ClaimState.INITIAL)
                raise
            if attended and not claim.prepared:
                self._store.update([claim], prepared=True)

    def undo(self, claim: model.Claim, late: Callable) -> bool:
        """Whether nothing of a server is left in a handle, by now.

        Where something is, the claim has to stay, so that nobody is given it.

        :param late: called when it is undone after all.
        """
        device = self._inventory.devices.get(claim.device_address)
        if device is None or claim.created_type is None and not claim.prepared:
            return True
        if claim.created_type and (claim.state is model.ClaimState.INITIAL
                                   or device.health is model.Health.GONE):
            return True
        try:
            self._on_handle(
                device, claim, f'Taking {claim.handle.address} of '
                f'{device.address} back',
                self._inventory.driver_of(device).release,
                late=late)
            return True
        except exception.AcceleratorError as error:
            if str(error) != claim.error:
                LOG.error('What server %s had is given to nobody: %s',
                          claim.instance_uuid, error)
            self._store.update([claim], error=str(error))
            return False

    def _on_handle(self, device, claim, what, method, *args, late=None):
        """Call method of a driver for the handle of a claim, alone and with a
        time limit, unless the claim is gone.

        :param late: called when it has ended well after the limit.
        :raises DeviceTimeout: it goes on, and keeps the handle locked.
        """
        seconds = CONF.accel.device_timeout
        lock = self._locks[claim.handle.key]

        def run():
            try:
                # who waited for the lock may come when somebody else has the
                # handle
                if any(c.uuid == claim.uuid for c in
                       self._store.claims(claim.instance_uuid)):
                    method(device, claim.handle, claim.created_type, *args)
            finally:
                self._inventory.changed(device.address)
                lock.release()
        if not lock.acquire(timeout=seconds):
            raise exception.DeviceTimeout(
                f'{what} has to wait for an earlier call that did not end '
                f'within {seconds} s: look who keeps it open, and into the '
                f'kernel log.')
        running = limited.start(run)
        try:
            limited.wait(running, seconds, what)
        except exception.DeviceTimeout:
            if late:
                running.add_done_callback(
                    lambda ended: ended.exception() or late())
            raise exception.DeviceTimeout(
                f'{what} did not end within {seconds} s: look who keeps it '
                f'open, and into the kernel log.') from None
        except exception.AcceleratorError:
            raise
        except Exception as error:
            raise exception.DeviceError(
                f'{what} failed ({type(error).__name__}: {error}): look at '
                f'the device and the kernel log.') from error
