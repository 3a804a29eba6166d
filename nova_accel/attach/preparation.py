# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Prepare handles for the guests of servers.

vGPUs are created, drivers with a prepare() are called, and functions are
unbound from drivers of the host. libvirt would unbind functions without a time
limit, and some drivers wait until no process has a function open.
"""

from collections.abc import Iterable
import contextlib

from nova_accel.attach import driver_calls
from nova_accel.attach import holdings as server_holdings
from nova_accel import exception
from nova_accel.health import signals
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel.host import usage
from nova_accel import model
from nova_accel import request

LOG = logging.getLogger(__name__)

#: time limit for finding the processes that block a call
_NAMING_SECONDS = 5


class Preparation:
    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 calls: driver_calls.DriverCalls):
        self._inventory = inventory
        self._holdings = holdings
        self._calls = calls

    def type_for(self, wanted: request.AcceleratorRequest,
                 device: model.Device) -> str | None:
        """Return the creatable type of a device for a request.

        :returns: the first type with the requested traits that can be created
            now; None for a device without creatable types.
        :raises DeviceUnavailable: no such type can be created.
        """
        if not device.creatable:
            return None
        # traits of the unnumbered group may refer to another device
        asked = wanted.required & {
            t.trait for d in self._inventory.devices.values()
            for t in d.creatable}
        for type_ in device.creatable:
            if (type_.available >= wanted.amount and asked <= {type_.trait}
                    and type_.trait not in wanted.forbidden):
                return type_.name
        what = ' and '.join(sorted(asked)) or 'any type'
        raise exception.DeviceUnavailable(
            f'{wanted} was allocated {device.address}, which cannot create '
            f'{what[:99]} now: the build is retried on another host.')

    def prepare(self, claims: Iterable[model.Claim], fresh: bool) -> None:
        """Prepare handles for the guest of the server that holds them.

        :param fresh: True if the server has just got the handles and has no
            data on them.
        :raises AcceleratorError: a handle could not be prepared.
        """
        for claim in claims:
            device, _ = (
                self._inventory.find(claim.device_address, None) if fresh
                else self._inventory.find_held(claim))
            if claim.created_type:
                self._create(device, claim, fresh)
            elif self._inventory.prepares_every_handle(device):
                self._prepare(device, claim, fresh,
                              f'Preparing {claim.handle.address}')
                if not claim.prepared:
                    self._holdings.mark_prepared(claim, True)

    def _create(self, device, claim, fresh):
        if not claim.prepared:
            # first: after a crash in between the vGPU would not be removed
            self._holdings.mark_prepared(claim, True)
        try:
            self._prepare(device, claim, fresh,
                          f'Making {claim.handle.address} a '
                          f'{claim.created_type} of {device.address}')
        except exception.DeviceUnavailable:
            if not claim.prepared and not any(
                    now.driver_memory for now in self._holdings.now([claim])):
                # nothing was created, so the handle has no data of this server
                self._holdings.mark_prepared(claim, False)
            raise

    def _prepare(self, device, claim, fresh, what):
        driver = self._inventory.driver_of(device)

        def prepare(*args):
            try:
                driver.prepare(*args)
                self._take(driver.kernel, device, claim)
            except exception.AcceleratorError:
                raise
            except Exception as error:
                # the owner of the server reads the error
                LOG.exception('%s failed', what)
                raise exception.DeviceError(
                    f'{what} failed: {exception.for_owner(error)}') from error
        try:
            with self._named(driver.kernel, device, claim.handle):
                self._calls.call(device, claim, what, prepare, fresh)
        except exception.DeviceError:
            if fresh:
                self._inventory.health.mark(device.address, signals.START)
            raise

    def _take(self, kernel, device, claim):
        """Unbind a handle from the drivers of the host."""
        if claim.region_index is not None:
            # drivers of FPGAs do not wait for processes
            return
        # also of a new claim: the build may have waited since the choice, and
        # a driver that waits may have removed the nodes that name the process
        kept = usage.keeping(kernel, device, claim.handle)
        if kept:
            found = (f'{claim.handle.address} cannot be taken from its driver '
                     f'on the host')
            raise exception.DeviceUnavailable(
                f'{found}, because {kept}: end that process, and repeat '
                f'the operation.', found=found)
        if not claim.prepared:
            # first: after a crash in between it would stay without a driver
            self._holdings.mark_prepared(claim, True)
        usage.take(kernel, claim.handle)

    @contextlib.contextmanager
    def _named(self, kernel, device, handle):
        """If the context raises DeviceTimeout, add to the error the processes
        that keep the handle open."""
        try:
            yield
        except exception.DeviceTimeout as error:
            kept = ''
            with contextlib.suppress(exception.AcceleratorError):
                kept = self._inventory.cards.call(
                    f'users:{handle.address}',
                    f'Asking which processes of the host have '
                    f'{handle.address} open', usage.keeping, kernel,
                    device, handle, 1, seconds=_NAMING_SECONDS)
            if not kept:
                raise
            what, _, _ = str(error).partition(': ')
            raise exception.DeviceTimeout(
                f'{what}, because {kept}: end that process.', found=what,
                ) from error
