# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Asking the drivers: which devices they have, and how each card is.

A scan asks every driver for the addresses of its devices, and has each card
examined alone; all of that side by side under one time limit. A look, each
[accel] discovery_interval and when the kernel tells of a change, finds out
cheaply which drivers and cards have to be scanned. A card that fails or hangs
is withheld, and the others go on.
"""

from collections.abc import (
    Callable, Hashable, Iterable, Iterator, Mapping, Sequence)
import contextlib
import dataclasses
import functools
import threading
import time
from typing import Any

import os_traits

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel.drivers import handover
from nova_accel.drivers import rules
from nova_accel.drivers import sets
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel.inventory import cards as card_calls
from nova_accel.inventory import conditions
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel.inventory import users as device_users
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: subsystems of the kernel whose devices drivers look for; '' when events were
#: missed
_WATCHED = frozenset(('', 'pci', 'mdev', 'fpga_region', 'ptp'))

Kind = holds.Kind
_FIND, _EXAMINE = 'find', 'examine'


class Scanner:

    def __init__(self, drivers: Mapping[str, base.AcceleratorDriver],
                 table: devices.DeviceTable, cards: card_calls.Cards,
                 taken_elsewhere: Callable[[model.Device], str],
                 health: conditions.Conditions, users: device_users.Users,
                 reads_serials: bool = True):
        """:raises ConfigurationError: a rule of the operator cannot be
        read."""
        self._reads_serials = reads_serials
        self._drivers = drivers
        self._table = table
        self._reports = table.reports
        self._adoption = table.adoption
        self._contents = table.contents
        self._withheld = table.withheld
        self._cards = cards
        self._taken_elsewhere = taken_elsewhere
        self._health = health
        self._users = users
        self.rules = rules.DeviceRules()
        #: see watch()
        self._after_look: Sequence[limited.Background] = ()
        # guards the fields below
        self._lock = locks.Lock('scan')
        #: driver -> its fingerprint at its last find()
        self._fingerprints: dict[str, object] = {}
        #: address -> its state at its last examine()
        self._states: dict[str, object] = {}
        #: address -> serial number of its device, read when the device came
        self._serials: dict[str, str] = {}
        #: drivers whose last find() failed -> why
        self._failed: dict[str, str] = {}
        #: cards that could not be examined, or whose result did not count ->
        #: the driver to ask, and why
        self._due: dict[str, tuple[str, str]] = {}
        #: time.monotonic() until which the start may take
        self._start_ends: float | None = None
        self._once = logging.Once()
        self.looks = limited.Background(
            self.look, 'It is not known which devices have changed')
        self._closed = threading.Event()

    # Scans

    def configure(self) -> None:
        """Have all drivers configure their devices, side by side.

        Waits for half of [accel] discovery_timeout at most; the first scan()
        has the rest of it. A driver that takes longer goes on, and is scanned
        when it has ended.

        :raises ConfigurationError: a driver cannot read its options.
        """
        limit = CONF.accel.discovery_timeout
        self._start_ends = time.monotonic() + limit
        batch = self._cards.batch(limit / 2)
        for name, driver in self._drivers.items():
            batch.add(f'configure:{name}',
                      f'Configuring the devices of the driver {name}',
                      driver.configure, about=name,
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

    def scan(self, names: Iterable[str] | None = None,
             addresses: Iterable[str] | None = None) -> None:
        """Ask the drivers, card by card, all under one time limit.

        A card whose driver raises or does not answer in time is withheld, and
        its last report stays. Errors are logged, never raised.

        :param names: of the drivers to ask which devices they have; by
            default all.
        :param addresses: scan these cards only, and search no others.
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
                      self._find, name, about=(_FIND, name, None))
        for address in dict.fromkeys(addresses or ()):
            owner = self._driver_of(address)
            if owner in self._drivers and owner not in chosen:
                self._add_card(batch, owner, address)
        for call in batch:
            kind, name, address = call.about
            try:
                if kind is _FIND:
                    self._found(batch, name, call)
                else:
                    self._examined(batch, name, address, call)
            except Exception:
                LOG.exception('A scan by the driver %s failed', name)
        self._reports.save()
        if everything:
            self.looks.postpone()

    def scan_confined(self, addresses: Iterable[str]) -> str:
        """Scan those of these cards of whose guests only a look tells that
        they could reprogram a region (AcceleratorDriver.confine).

        A region of which that is found while a server has it carries what is
        its project's from then on.

        :returns: why one could not be examined, a clause; '' when all were.
        """
        wanted = {address for address in addresses
                  if self._confines(self._driver_of(address))}
        if wanted:
            self.scan(addresses=wanted)
        with self._lock:
            left = {a: self._due[a][1] for a in sorted(wanted & {*self._due})}
        return '; '.join(f'{address} could not be examined '
                         f'({why or "it is busy"})'
                         for address, why in left.items())

    def _drop_drivers(self) -> None:
        """Devices of drivers that are not enabled any more are gone."""
        ticket = self._reports.ticket()
        for address, device in self._table.snapshot().items():
            if device.driver not in self._drivers:
                self._gone(address, device.driver, ticket)

    def _driver_of(self, address: str) -> str:
        """Return the driver that knows a card; '' if none does."""
        device = self._reports.reported(address)
        with self._lock:
            return (device.driver if device
                    else self._due.get(address, ('', ''))[0])

    def _seconds(self) -> float:
        """Return the limit of a scan; of the first, what configure() has
        left."""
        limit, ends = CONF.accel.discovery_timeout, self._start_ends
        self._start_ends = None
        left = ends - time.monotonic() if ends else 0
        return max(left, limit / 2) if left > 0 else limit

    def _find(self, name: str) -> tuple:
        """Find devices, in the worker of the driver."""
        driver = self._drivers[name]
        ticket = self._reports.ticket()
        fingerprint = driver.fingerprint()
        return ticket, fingerprint, contract.addresses(name, driver.find())

    def _found(self, batch, name: str, call) -> None:
        try:
            ticket, fingerprint, found = call.outcome()
        except exception.DeviceBusy:
            with self._lock:
                self._fingerprints.pop(name, None)
            return
        except Exception as error:
            self._driver_failed(name, error)
            return
        with self._lock:
            self._failed.pop(name, None)
            self._fingerprints[name] = fingerprint
        for address in set(self._reports.of_driver(name)).difference(found):
            self._gone(address, name, ticket, batch)
        for address in dict.fromkeys(found):
            if not self.rules.excludes(address):
                self._add_card(batch, name, address)
            else:
                self._gone(address, name, ticket)

    def _gone(self, address, name, ticket, batch=None):
        """
        :param batch: of the scan, in which the card is examined for a driver
            that found it before this one had lost it.
        """
        other = self._adoption.gone(address, name, ticket)
        self._forget_card(address)
        with self._lock:
            self._due.pop(address, None)
        self._once.forget('here', address)
        if other and batch is not None:
            self._add_card(batch, other, address)

    def _driver_failed(self, name: str, error: Exception) -> None:
        with self._lock:
            new = name not in self._failed
            self._failed[name] = _sentence(error)
        for address in self._reports.of_driver(name):
            self._withheld.withhold(address, Kind.SCAN_FAILED,
                                    f'its driver failed: {_clause(error)}')
        if new:
            LOG.error('Devices of the driver %s are withheld: %s', name,
                      _clause(error),
                      exc_info=exception.without_sentence(error))

    def _add_card(self, batch, name: str, address: str) -> None:
        if self._contents.is_programming(address):
            self._note_due(address, name)
            return
        batch.add(address, f'The scan of {address} by the driver {name}',
                  self._examine, name, address,
                  about=(_EXAMINE, name, address))

    def _note_due(self, address: str, name: str, reason: str = '') -> bool:
        """Have the next look scan the card; returns whether the reason is
        new."""
        with self._lock:
            before = self._due.get(address, ('', ''))
            self._due[address] = name, reason
            return reason != before[1]

    def _examine(self, name: str, address: str) -> tuple:
        """In the worker of the card."""
        driver = self._drivers[name]
        ticket = self._reports.ticket()
        before = self._reported_by(name, address)
        state = driver.state(address)
        serial = self._serial(name, address)
        device = contract.device(name, address, driver.examine(
            address, self._with_own_record(before, serial)))
        if device is not None and address not in base.whole_cards() and (
                self._confines(name) and self._contents.note_open(device)):
            ticket = self._reports.ticket()
            before = self._reported_by(name, address)
            device = contract.device(name, address, driver.examine(
                address, self._with_own_record(before, serial)))
        if device is not None:
            device = contract.device(name, address, driver.confine(device))
        if device is not None:
            if serial is None and before and (
                    before.health is not model.Health.GONE):
                serial = before.serial
            device = dataclasses.replace(
                device, serial=serial or '',
                serial_can_change=driver.SERVER_CAN_CHANGE_SERIAL)
            device = self.rules.applied(device)
        if device is not None:
            device = _with_policy(device)
            self._ask_users(device)
        conflict = ''
        if device is not None and (not driver.NEEDS_RULE
                                   or self.rules.includes(device)):
            conflict = self._conflict(dataclasses.replace(device, company=()))
            kept = ('' if conflict or not device.company
                    else self._conflict(device))
            if kept:
                # it does not belong to it alone: quarantine lets the host start
                device = dataclasses.replace(
                    device, health=model.Health.QUARANTINED,
                    reason=f'{kept}, and goes with it as a function of the '
                           f'same slot: take it out of there')
        return ticket, state, device, conflict

    def _ask_users(self, device: model.Device) -> None:
        if self._reads_serials:
            self._users.ask(device)

    def _reported_by(self, name: str, address: str) -> model.Device | None:
        """Return what a driver said last of a device, None where it did
        not."""
        before = self._reports.reported(address)
        return before if before and before.driver == name else None

    def _confines(self, name: str) -> bool:
        """Return whether a driver takes from guests what they can do to a
        device."""
        return (name in self._drivers and type(self._drivers[name]).confine
                is not base.AcceleratorDriver.confine)

    def _serial(self, name: str, address: str) -> str | None:
        """Return the serial number of a device, which is read when it comes.

        :returns: None where it cannot be read now.
        """
        with self._lock:
            serial = self._serials.get(address)
        if serial is None and self._reads_serials:
            try:
                serial = contract.serial(
                    name, self._drivers[name].serial(address))
            except Exception as error:
                LOG.warning('The serial number of %s cannot be read (%s); '
                            'nova-compute will not notice if the device is '
                            'exchanged or moved', address,
                            _clause(error))
                serial = ''
            if serial is not None:
                with self._lock:
                    self._serials[address] = serial
        return serial

    def _with_own_record(self, before, serial):
        """Return what was known of a device, with the record of the card that
        is there now, where it was at another address before."""
        if not serial or before and before.serial == serial:
            return before
        record = self._adoption.record_of(serial)
        if record is None:
            return before
        if before is None:
            return None
        return dataclasses.replace(before, record=record)

    def _conflict(self, device: model.Device) -> str:
        try:
            return self._taken_elsewhere(device)
        except Exception as error:
            LOG.warning('Device %s is not compared with the options of Nova: '
                        '%s', device.address, error)
            return ''

    def _examined(self, batch, name: str, address: str, call) -> None:
        try:
            ticket, state, device, conflict = call.outcome()
        except exception.DeviceBusy:
            self._note_due(address, name)
            return
        except exception.DeviceTimeout as error:
            # Cards withholds it (HANGS)
            self._note_due(address, name, str(error))
            return
        except Exception as error:
            self._card_failed(name, address, error)
            return
        if device is None:
            self._gone(address, name, ticket, batch)
            return
        before = self._reports.reported(address)
        try:
            adopted = self._adoption.adopt(device, ticket)
        except exception.AcceleratorsUnavailable as error:
            if self._note_due(address, name, str(error)):
                LOG.error('What is at %s now is not taken over: %s', address,
                          error)
            return
        if not adopted:
            owner = self._reports.reported(address)
            if owner and owner.driver == name:
                self._note_due(address, name)
            elif owner and owner.health is model.Health.GONE:
                # the other driver has lost it while this one examined it
                self._add_card(batch, name, address)
            return
        with self._lock:
            self._states[address] = state
            if device.health is not model.Health.OK and (
                    before is None or before.health is model.Health.OK):
                # it may have been so for a moment only, after its state was
                # read
                del self._states[address]
            self._due.pop(address, None)
        self._withheld.lift(address, Kind.SCAN_FAILED)
        if not conflict:
            self._withheld.lift(address, Kind.CONFLICT)
        elif self._withheld.withhold(address, Kind.CONFLICT, conflict):
            LOG.error('Device %s of the driver %s is withheld, because %s: '
                      'take it out of one of the two', address, name, conflict)
        self._tell(device, before)

    def _tell(self, device, before):
        """Log what changed: the device is here, is withheld, is offered again.
        """
        address = device.address
        new = not self._once.has(('here', address))
        if new:
            self._once.say(
                ('here', address), LOG.info, 'Device %s is %s: %s %s of '
                'vendor %s, found by the driver %s', address,
                'back' if before and before.health is model.Health.GONE
                else 'here', device.type, device.product_id, device.vendor_id,
                device.driver)
        earlier = _reasons(before) if before and not new else {}
        now = _reasons(device)
        for part, reason in now.items():
            if earlier.get(part) != reason:
                LOG.warning('%s is not given to servers, because %s', part,
                            reason)
        for part in earlier.keys() - now.keys():
            LOG.info('%s can be given to servers again', part)

    def _card_failed(self, name, address, error):
        known = self._reports.reported(address)
        if known is not None and known.driver != name:
            return
        reason = f'its scan failed: {_clause(error)}'
        if self._note_due(address, name, reason):
            LOG.error('Device %s of the driver %s is withheld: %s', address,
                      name, reason,
                      exc_info=exception.without_sentence(error))
        self._withheld.withhold(address, Kind.SCAN_FAILED, reason)

    # Configuration

    def check_configuration(self) -> None:
        """Log rules without effect; at start, after the first scan.

        :raises ConfigurationError: two drivers find the same device, one of
            Nova's options has it as well, or an option cannot be read.
        """
        for sentence in self.without_effect():
            LOG.warning('%s', sentence)

    def without_effect(self) -> list[str]:
        """Return what check_configuration() logs, for a command.

        :returns: a sentence for each rule without effect.
        :raises ConfigurationError: as check_configuration().
        """
        return list(self._without_effect())

    def _without_effect(self) -> Iterator[str]:
        for address, names in self._table.shared.found_twice().items():
            raise exception.ConfigurationError(
                f'{address} is found by the drivers {" and ".join(names)} of '
                f'[accel] enabled_drivers: disable one of the two, or narrow '
                f'the rules of [accel] pci_devices.')
        seen: set[str] = set()
        there = []
        for address, device in self._table.snapshot().items():
            if device.health is not model.Health.GONE:
                there.append(device)
                seen |= device.functions()
            for hold in self._table.holds_of(address):
                if hold.kind is not Kind.CONFLICT:
                    continue
                raise exception.ConfigurationError(
                    f'{hold.reason} and found by the driver {device.driver} of '
                    f'[accel] enabled_drivers: take it out of one of the two.')
        yield from self._check_sets()
        policies = handover.policies()
        yield from self.rules.unused()
        for rule, _ in policies.by_rule:
            if not any(map(rule.matches_device, there)):
                yield rule.without_match()
        for option, addresses in (
                (sriov.OPTION, sriov.wanted()),
                (handover.OPTION, [about for about in policies.named
                                   if ':' in about]),
                (base.WHOLE_CARDS, sorted(base.whole_cards()))):
            for address in addresses:
                if address not in seen:
                    yield (f'{option} names {address}, which no driver of '
                           f'[accel] enabled_drivers finds: correct the '
                           f'address, or enable its driver.')

    def _check_sets(self) -> Iterator[str]:
        """Yield a sentence for each device of a set that is not there.

        :raises ConfigurationError: of a set that can never be given.
        """
        found = self._table.snapshot()
        for members in sets.wanted():
            there = [found[address] for address in members if address in found]
            for device in there:
                why = self._no_part_of_a_set(device)
                if not why and device.type != there[0].type:
                    why = (f'is a {device.type}, and {there[0].address} is a '
                           f'{there[0].type}')
                if why:
                    raise exception.ConfigurationError(
                        f'{sets.OPTION} names {device.address}, which {why}: '
                        f'a set is of whole devices of one type, of the '
                        f'drivers gpu, nvme and pci, or of the one VF of '
                        f'each.')
            for address in sorted({*members} - found.keys()):
                yield (f'{sets.OPTION} names {address}, which no driver of '
                       f'[accel] enabled_drivers finds: its set is given to '
                       f'no server until it is there.')

    def _no_part_of_a_set(self, device: model.Device) -> str:
        driver = self._drivers.get(device.driver)
        if driver is None or device.regions or device.creatable or not (
                # a GPU of which one VF is all, as with gim of AMD
                driver.POOLED or device.handles):
            return f'is of the driver {device.driver}'
        if len(device.handles) > 1:
            return f'is given to servers by {len(device.handles)} VFs'
        return ''

    def failures(self) -> dict[str, str]:
        """Return what could not be asked, 'driver <name>' or an address ->
        why."""
        with self._lock:
            return {**{f'driver {name}': why
                       for name, why in self._failed.items()},
                    **{address: why
                       for address, (_, why) in self._due.items() if why}}

    # Looks

    def scan_if_due(self) -> None:
        """Look in the background, each [accel] discovery_interval, which
        drivers and cards have changed, and scan those."""
        self.looks.start_if_due(CONF.accel.discovery_interval)

    def look(self) -> None:
        """Scan those drivers and cards of which another answer can be
        expected."""
        if self._closed.is_set():
            return
        batch = self._cards.batch(CONF.accel.discovery_timeout)
        reads_health = not signals.is_off()
        readings: dict[str, Any] = {}
        if reads_health:
            self._health.begin()
        with self._lock:
            names, addresses = set(self._failed), set(self._due)
        for name, driver in self._drivers.items():
            if name not in names:
                batch.add(f'driver:{name}',
                          f'The driver {name} looking for changes',
                          driver.fingerprint, about=(_FIND, name))
        for address, device in self._table.snapshot().items():
            if Kind.SCAN_FAILED in self._table.kinds(address):
                addresses.add(address)
            elif (device.driver in self._drivers and address not in addresses
                    and device.health is not model.Health.GONE
                    and not self._contents.is_programming(address)
                    and not self._cards.is_busy(address)):
                batch.add(address, f'Looking whether {address} has changed',
                          self._look_at, device, reads_health,
                          about=(_EXAMINE, address))
        for call in batch:
            kind, key = call.about
            known = self._fingerprints if kind is _FIND else self._states
            try:
                with self._lock:
                    before = known.get(key, call)
                now = call.outcome()
                if kind is _EXAMINE:
                    now, readings[key] = now
                if now == before:
                    continue
            except exception.DeviceBusy:
                continue
            except Exception as error:
                if kind is _FIND:
                    self._driver_failed(key, error)
                    continue
                if isinstance(error, exception.DeviceTimeout):
                    continue
            (names if kind is _FIND else addresses).add(key)
        addresses = {a for a in addresses if not self._cards.hanging(a)}
        if names or addresses:
            self.scan(names, addresses)
        if reads_health:
            self._health.round(readings)
        for background in self._after_look:
            background.start()

    def look_between_servers(self, address: str) -> None:
        """Read the health of a device that a server has had, before another
        one gets it: for some kinds the only moment, because the host's driver
        has the device. Cards withholds one that hangs."""
        device = self._table.snapshot().get(address)
        if (signals.is_off() or device is None
                or device.driver not in self._drivers
                or device.health is model.Health.GONE):
            return
        with contextlib.suppress(exception.AcceleratorError):
            _, readings = self._cards.call(
                address, f'Reading the health of {address}', self._look_at,
                device, True, seconds=CONF.accel.discovery_timeout)
            self._health.between_servers(address, readings or ())

    def _look_at(self, device: model.Device, reads_health: bool,
                 ) -> tuple[Hashable, tuple[signals.Reading, ...] | None]:
        """In the worker of the card: its state, and what it tells of its
        health, None where that cannot be read."""
        name, address = device.driver, device.address
        driver = self._drivers[name]
        state = driver.state(address)
        self._ask_users(device)
        if not reads_health:
            return state, None
        try:
            found = contract.readings(name, driver.health(device))
        except Exception as error:
            self._once.say(
                ('health', address), LOG.warning,
                'Of the health of %s nothing is known now: %s', address,
                _clause(error))
            return state, None
        self._once.forget('health', address)
        return state, found

    def watch(self, kernel,
              after_look: Sequence[limited.Background] = ()) -> None:
        """Look again soon after the kernel says that a device came or went.

        :param kernel: nova_accel.host.kernel.Kernel or a simulated one.
        :param after_look: what to start after each look from now on.
        """
        self._after_look = after_look

        def listen():
            changed = False
            try:
                for change in kernel.changes(self._closed):
                    if change is None:
                        if changed:
                            changed = False
                            self.looks.start()
                    elif (self._health.note(change, kernel) if change.said
                          else change.subsystem in _WATCHED):
                        # as for VFs, many come at a time
                        changed = True
                        if change.subsystem == 'pci':
                            self._forget_card(change.function)
            except Exception as error:
                if self._closed.is_set():
                    return
                LOG.warning('The kernel does not say when devices come and '
                            'go (%s); they are noticed within %d s', error,
                            CONF.accel.discovery_interval)
        limited.start(listen)

    def _forget_card(self, address: str) -> None:
        """Drop cached state: the slot may hold a different card."""
        with self._lock:
            self._states.pop(address, None)
            self._serials.pop(address, None)

    def close(self) -> None:
        """See Inventory.close()."""
        self._closed.set()


def _reasons(device: model.Device) -> dict[str, str]:
    """Return why a device, or regions of it, are not given to servers, by
    name."""
    if device.health is not model.Health.OK:
        return {device.address: device.reason}
    return {f'{device.address} {region.name}': region.reason
            for region in device.regions if region.reason}


def _with_policy(device: model.Device) -> model.Device:
    """Return the device, with what the operator's policy changes in Placement.

    :raises ConfigurationError: [accel] handover cannot be read.
    """
    if naming.ONE_TIME_USE in device.traits:
        # a device that is not well has the traits from before
        device = dataclasses.replace(device, traits=tuple(
            t for t in device.traits if t != naming.ONE_TIME_USE))
    if not any(handover.policy(device, address) is handover.Policy.OPERATOR
               for address in (device.address, *(
                   h.address for h in device.all_handles))):
        return device
    if device.creatable:
        return dataclasses.replace(
            device, health=model.Health.QUARANTINED,
            reason=f'{handover.OPTION} has the policy operator for it, and '
                   f'vGPUs that are made on demand cannot wait for the '
                   f'operator: set another policy')
    if not hasattr(os_traits, naming.ONE_TIME_USE):
        # a Placement as old as that would refuse all of Nova's report
        return device
    return dataclasses.replace(
        device, traits=(*device.traits, naming.ONE_TIME_USE))


def _clause(error: BaseException) -> str:
    """Return an error as a clause of a longer sentence."""
    return _sentence(error).rstrip('.')


def _sentence(error: BaseException) -> str:
    """Return the text of an error, with the type of one not in nova_accel."""
    if not str(error):
        return repr(error)
    if isinstance(error, exception.AcceleratorError):
        return str(error)
    return f'{type(error).__name__}: {error}'
