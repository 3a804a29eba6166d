# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Prepare devices for their server: program, prepare and bind them.

Regions are programmed, vGPUs are created, drivers with a prepare() are called,
and functions are unbound from drivers of the host. libvirt would unbind
functions without a time limit, and some drivers wait until no process has a
function open.

BOUND is stored last: after a crash, a claim in another state is made ready
again. For example, a server starts after its host lost the power. Its FPGA
region is programmed with the function of the claim, its vGPU is created again,
and its GPU is bound to vfio-pci.

A driver gets the handle and a base.Use, which contains the facts of the claim
that the driver may read, and the data that it has stored for the handle.
"""

from collections.abc import Callable, Iterable, Sequence
import contextlib
import dataclasses
import functools
import json

from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import programming as region_programming
from nova_accel.attach import regions as free_regions
from nova_accel import conf
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import usage
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: characters of JSON that a driver may store for a handle
_MOST_REMEMBERED = 4096
#: time limit for finding the processes that block a call
_NAMING_SECONDS = 5


@dataclasses.dataclass(eq=False)
class Readiness:
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _programming: region_programming.Programming
    _regions: free_regions.Regions

    def prepare_new(self, context, server: request.Server, claimed: Iterable[
            tuple[request.AcceleratorRequest, Sequence[model.Claim]]],
            ) -> None:
        """Prepare devices that a server has just got.

        :param claimed: each request with its claims.
        :raises AcceleratorError: a device is not ready.
        """
        claimed = list(claimed)
        for wanted, claims in claimed:
            if not wanted.programs:
                self._regions.clean_before(claims)
            self._programming.provision(
                context, server.project_id, wanted, claims, scheduled=True)
        for wanted, claims in claimed:
            self.prepare(claims, fresh=True)
            self.bind(claims, wanted.chosen_by_owner)

    def prepare_held(self, context, server: request.Server,
                     keep: plan.Keep) -> None:
        """Prepare the devices that a server already had. Their content stays
        unless the image of the server names another bitstream.

        :raises AcceleratorError: a device is not ready; the server keeps it.
        """
        claims = keep.claims
        with self._holdings.kept_on_error(claims):
            if keep.wanted in server.requests and any(
                    c.restore_function or c.restore_bitstream
                    for c in claims):
                self._programming.restore(
                    context, server.project_id, claims,
                    {keep.wanted.group: keep.wanted})
            else:
                if keep.wanted in server.wanted:
                    self._holdings.ask(
                        claims, for_driver(keep.wanted))
                self._programming.provision(
                    context, server.project_id, keep.wanted, claims)
            self.prepare(claims, fresh=False)
            if any(c.state is not model.ClaimState.BOUND or c.error
                   for c in self._holdings.now(claims)):
                self.bind(claims, keep.wanted.chosen_by_owner)

    def restore(self, context, server: request.Server,
                claims: Sequence[model.Claim]) -> None:
        """Restore devices that are in no running guest.

        :raises AcceleratorError: a device is not restored.
        """
        self.rescan(claims)
        self._programming.restore(
            context, server.project_id, claims,
            {r.group: r for r in server.requests})
        self.prepare(claims, fresh=False)
        self._holdings.bound_as_before(
            [c for c in self._holdings.now(claims)
             if c.state is not model.ClaimState.BOUND or c.error])

    def bind(self, claims: Iterable[model.Claim], by_owner: bool) -> None:
        """Store that the devices of claims are ready, and store the present
        content of their regions.

        :param by_owner: see Holdings.bound().
        """
        for mine in server_holdings.by_region(claims).values():
            self._holdings.bound(
                mine, self._inventory.find_held(mine[0])[1], by_owner)

    def rescan(self, claims: Iterable[model.Claim]) -> None:
        """Scan the cards of claims that a guest could have changed. A guest
        can change a card if it could reprogram a region or had the whole card.
        """
        claims, again = list(claims), set()
        self._inventory.scanner.scan_confined(
            {claim.device_address for claim in claims})
        for claim in claims:
            address, index = claim.device_address, claim.region_index
            if index is not None and self._inventory.guest_can_reprogram(
                    address, index):
                # only the guest knows what it loaded
                self._inventory.contents.forget(
                    address, index, claim.project_id)
                again.add(address)
        if again:
            self._inventory.scanner.scan(addresses=again)
        self._rescan_missing(claims)
        self.rescan_cards(claims)

    def _rescan_missing(self, claims):
        """Scan the cards of claimed handles that the last scan did not find.
        For example, the claim store was new, and a guest had the handle."""
        devices = self._inventory.devices
        missing = {
            claim.device_address for claim in claims
            if claim.created_type is None
            and (device := devices.get(claim.device_address))
            and claim.handle not in device.all_handles}
        if missing:
            self._inventory.scanner.scan(addresses=missing)

    def rescan_cards(self, claims: Iterable[model.Claim]) -> None:
        """Scan cards that a guest had as a whole."""
        whole = {claim.device_address for claim in claims
                 if claim.handle.address == claim.device_address}
        if whole:
            self._inventory.scanner.scan(addresses=whole)

    def rescan_siblings(self, claims: Iterable[model.Claim]) -> None:
        """Scan the devices on which vGPUs of claims were created or removed.
        This changes which other vGPUs the devices can create."""
        created = {c.device_address for c in claims if c.created_type}
        if created:
            self._inventory.scanner.scan(addresses=created)

    # Handles

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
                # nothing was created: the handle has no data of this server
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
                self.call(device, claim, what, prepare, fresh)
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

    # Drivers

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
