# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Ask drivers for the devices of the host, and examine each card.

A scan asks every driver for the addresses of its devices, and examines each
card in a thread of its own (inventory.examination), with one time limit for
all. A card that fails or hangs is withheld, and does not delay the others.
"""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import functools
import time

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.inventory import cards as card_calls
from nova_accel.inventory import devices
from nova_accel.inventory import examination
from nova_accel.inventory import holds
from nova_accel.inventory import scan_state
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)

Kind = holds.Kind
#: stands for the address in reasons that several devices share
_ITS_ADDRESS = '<its address>'


@dataclasses.dataclass(eq=False)
class Scanner:
    _drivers: Mapping[str, base.AcceleratorDriver]
    _table: devices.DeviceTable
    _cards: card_calls.Cards
    _state: scan_state.ScanState
    _rules: rules.DeviceRules
    _examiner: examination.Examiner

    def __post_init__(self) -> None:
        self._reports = self._table.reports
        self._adoption = self._table.adoption
        self._contents = self._table.contents
        self._withheld = self._table.withheld
        #: time.monotonic() at which the start has to end
        self._start_ends: float | None = None
        self._once = logging.Once()

    def configure(self) -> None:
        """Let all drivers configure their devices in parallel.

        Waits for at most half of [accel] discovery_timeout, and leaves the
        rest to the first scan(). If a driver takes longer, its devices are
        scanned when its call ends.

        :raises ConfigurationError: a driver cannot read its options.
        """
        limit = CONF.accel.discovery_timeout
        self._start_ends = time.monotonic() + limit
        batch = self._cards.batch(limit / 2)
        for name, driver in self._drivers.items():
            batch.add(f'configure:{name}',
                      f'Configuring the devices of the driver {name}',
                      self._configure, name, about=name,
                      late=functools.partial(self.scan, [name]))
        refused = None
        for call in batch:
            try:
                call.outcome()
            except exception.ConfigurationError as error:
                refused = refused or error
            except Exception as error:
                LOG.error('Devices of the driver %s are not as configured: '
                          '%s', call.about, error)
        if refused:
            raise refused

    def _configure(self, name: str) -> None:
        try:
            self._drivers[name].configure()
        finally:
            self._examiner.configured.add(name)

    def scan(self, names: Iterable[str] | None = None,
             addresses: Iterable[str] | None = None) -> None:
        """Scan devices, with one time limit for all. With neither parameter,
        scan the devices of all drivers.

        A card whose driver raises or does not answer in time is withheld, and
        its last report stays. Errors are logged, never raised.

        :param names: the drivers whose devices to find and examine.
        :param addresses: cards to examine in addition.
        """
        everything = names is None and addresses is None
        if everything:
            self._drop_drivers()
        wanted = set(self._drivers if everything else names or ())
        batch = self._cards.batch(self._seconds())
        chosen = [n for n in self._drivers if n in wanted]
        for name in chosen:
            batch.add(f'driver:{name}',
                      f'The driver {name} finding its devices',
                      self._find, name, about=(name, None))
        for address in dict.fromkeys(addresses or ()):
            owner = self._driver_of(address)
            if owner in self._drivers and owner not in chosen:
                self._add_card(batch, owner, address)
        withheld: dict[str, list[str]] = collections.defaultdict(list)
        for call in batch:
            name, about = call.about
            try:
                if about is None:
                    self._found(batch, name, call)
                else:
                    self._examined(batch, name, about, call, withheld)
            except Exception:
                LOG.exception('A scan by the driver %s failed', name)
        _log_withheld(withheld)
        self._reports.save()

    def scan_confined(self, addresses: Iterable[str]) -> str:
        """Scan the given cards whose drivers can remove a guest's means to
        reprogram a device (AcceleratorDriver.confine).

        Only a scan detects that a guest could reprogram a region. Then the
        content of the region counts as content of the guest's project.

        :returns: a clause why cards could not be examined, or ''.
        """
        wanted = {address for address in addresses
                  if self._confines(self._driver_of(address))}
        if wanted:
            self.scan(addresses=wanted)
        return '; '.join(
            f'{address} could not be examined ({why or "it is busy"})'
            for address, why in self._state.due_reasons(wanted).items())

    def _confines(self, name: str) -> bool:
        return name in self._drivers and contract.confines(
            type(self._drivers[name]))

    def _drop_drivers(self) -> None:
        ticket = self._reports.ticket()
        for address, device in self._table.snapshot().items():
            if device.driver not in self._drivers:
                self._gone(address, device.driver, ticket, left_out=(
                    f'its driver {device.driver} is not in [accel] '
                    f'enabled_drivers'))

    def _driver_of(self, address: str) -> str:
        """Return the driver of a card, or '' if no driver knows the card."""
        device = self._reports.reported(address)
        return device.driver if device else self._state.driver_of(address)

    def _seconds(self) -> float:
        """Return the time limit of a scan, in seconds. The first scan gets the
        time that configure() has not used."""
        limit, ends = CONF.accel.discovery_timeout, self._start_ends
        self._start_ends = None
        left = ends - time.monotonic() if ends else 0
        return max(left, limit / 2) if left > 0 else limit

    # Drivers

    def _find(self, name: str) -> tuple:
        """Find devices, in the worker of the driver."""
        driver = self._drivers[name]
        ticket = self._reports.ticket()
        fingerprint = driver.fingerprint()
        found = contract.addresses(name, driver.find())
        self._rules.found(name, found, driver.kernel)
        not_found = {}
        for address in self._reports.not_found(name, found):
            device = self._reports.reported(address)
            if device:
                not_found[address] = contract.left_out(driver, device)
        return ticket, fingerprint, found, not_found

    def _found(self, batch, name: str, call) -> None:
        try:
            ticket, fingerprint, addresses, not_found = call.outcome()
        except exception.DeviceBusy:
            self._state.find_again(name)
            return
        except Exception as error:
            self.find_failed(name, error)
            return
        self._state.found(name, fingerprint)
        for address, left_out in not_found.items():
            self._gone(address, name, ticket, batch, left_out)
        for address in dict.fromkeys(addresses):
            if not self._rules.excludes(address):
                self._add_card(batch, name, address)
            else:
                self._gone(address, name, ticket,
                           left_out=examination.EXCLUDED)

    def find_failed(self, name: str, error: Exception) -> None:
        """Withhold the devices of a driver whose find() failed."""
        why = exception.clause(error)
        is_new = self._state.find_failed(name, exception.sentence(error))
        for address in self._reports.of_driver(name):
            self._withheld.withhold(
                address, Kind.SCAN_FAILED, f'its driver failed: {why}')
        if is_new:
            LOG.error('Devices of the driver %s are withheld: %s', name, why,
                      exc_info=exception.without_sentence(error))

    # Cards

    def _gone(self, address, name, ticket, batch=None, left_out=''):
        """Report a device as gone.

        :param batch: the batch of the scan, or None. If another driver has
            found the card, its examination by that driver is added to the
            batch.
        :param left_out: see Adoption.gone().
        """
        other = self._adoption.gone(address, name, ticket, left_out)
        self._state.gone(address)
        self._once.forget('here', address)
        if other and batch is not None:
            self._add_card(batch, other, address)

    def _add_card(self, batch, name: str, address: str) -> None:
        if self._contents.is_programming(address):
            self._state.examine_again(address, name)
            return
        batch.add(address, f'The scan of {address} by the driver {name}',
                  self._examiner.examine, name, address,
                  about=(name, address))

    def _examined(self, batch, name: str, address: str, call,
                  withheld: dict[str, list[str]]) -> None:
        """Handle the result of an examination.

        :param withheld: receives the devices and regions that begin to be
            withheld; see _log_withheld().
        """
        try:
            examined = call.outcome()
        except exception.DeviceBusy:
            self._state.examine_again(address, name)
        except exception.DeviceTimeout as error:
            # inventory.cards withholds it (HANGS)
            self._state.examine_again(address, name, str(error))
        except Exception as error:
            self._card_failed(name, address, error)
        else:
            if examined.device is None:
                self._gone(address, name, examined.ticket, batch,
                           examined.left_out)
            else:
                self._adopt(batch, name, examined.device, examined, withheld)

    def _adopt(self, batch, name: str, device: model.Device,
               examined: examination.Examined,
               withheld: dict[str, list[str]]) -> None:
        address = device.address
        before = self._reports.reported(address)
        is_back = bool(before) and not self._reports.is_present(address)
        try:
            is_adopted = self._adoption.adopt(device, examined.ticket)
        except exception.AcceleratorsUnavailable as error:
            if self._state.examine_again(address, name, str(error)):
                LOG.error('The device at %s is not accepted yet: %s', address,
                          error)
            return
        if not is_adopted:
            owner = self._reports.reported(address)
            if owner and owner.driver == name:
                self._state.examine_again(address, name)
            elif owner and not self._reports.is_present(address):
                # the other driver lost it while this one examined it
                self._add_card(batch, name, address)
            return
        self._state.examined(address, examined.state)
        if examined.awaits_set_up or _is_withheld(device):
            # state() may not show that the cause has ended
            self._state.forget_state(address)
        self._withheld.lift(address, Kind.SCAN_FAILED)
        self._withhold_conflict(device, examined.conflict)
        self._log_changes(device, before, is_back, withheld)

    def _withhold_conflict(self, device: model.Device, conflict: str) -> None:
        if not conflict:
            self._withheld.lift(device.address, Kind.CONFLICT)
        elif self._withheld.withhold(device.address, Kind.CONFLICT, conflict):
            LOG.error('Device %s of the driver %s is withheld, because %s: '
                      'take it out of one of the two', device.address,
                      device.driver, conflict)

    def _log_changes(self, device: model.Device, before: model.Device | None,
                     is_back: bool, withheld: dict[str, list[str]]) -> None:
        address = device.address
        is_new = not self._once.has(('here', address))
        if is_new:
            self._once.log(
                ('here', address), LOG.info, 'Device %s is %s: %s %s of '
                'vendor %s, found by the driver %s', address,
                'back' if is_back else 'here', device.type, device.product_id,
                device.vendor_id, device.driver)
        earlier = _reasons(before) if before and not is_new else {}
        now = _reasons(device)
        for part, reason in now.items():
            if earlier.get(part) != reason:
                withheld[reason.replace(address, _ITS_ADDRESS)].append(part)
        for part in earlier.keys() - now.keys():
            LOG.info('%s can be given to servers again', part)

    def _card_failed(self, name, address, error):
        known = self._reports.reported(address)
        if known is not None and known.driver != name:
            return
        reason = f'its scan failed: {exception.clause(error)}'
        if self._state.examine_again(address, name, reason):
            LOG.error('Device %s of the driver %s is withheld: %s', address,
                      name, reason,
                      exc_info=exception.without_sentence(error))
        self._withheld.withhold(address, Kind.SCAN_FAILED, reason)


def _log_withheld(withheld: Mapping[str, list[str]]) -> None:
    """Log the devices that are withheld, with one line for all reasons that
    differ only in the address.

    :param withheld: a reason with the placeholder _ITS_ADDRESS -> the names of
        devices and regions.
    """
    for reason, parts in withheld.items():
        if len(parts) == 1:
            LOG.warning('%s is not given to servers, because %s', parts[0],
                        reason.replace(_ITS_ADDRESS, parts[0].split()[0]))
        else:
            LOG.warning('Each of %s is not given to servers, because %s',
                        ', '.join(sorted(parts)), reason)


def _reasons(device: model.Device) -> dict[str, str]:
    """Return the name of a device or region -> why its driver withholds it."""
    if device.health is not model.Health.OK:
        return {device.address: device.reason}
    return {f'{device.address} {region.name}': region.reason
            for region in device.regions if region.reason}


def _is_withheld(device: model.Device) -> bool:
    """Return whether a driver withholds a device or one of its regions for a
    reason that may end while nova-compute runs."""
    if device.health is not model.Health.OK:
        return not device.is_not_offered
    return any(r.health is not model.Health.OK for r in device.regions)
