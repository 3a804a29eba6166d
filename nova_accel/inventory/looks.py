# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Notice changes of devices without scanning all of them.

A *look* runs within each [accel] discovery_interval, and soon after the kernel
reports a change. It reads the fingerprint of each driver, and the state and
the health of each card. Drivers and cards that differ from the last scan are
scanned again. For example, the state of a GPU changes if the GPU falls off the
bus, and the next look scans only this card.

A *glance*, twice between two looks, reads only cheap signals: those of
host.bus, and whether a card answers. If the counters of a card have restarted
after a hand-over, a glance reads all signals of the card. Placement, owners
and metrics are informed after each look, and after a glance that has found a
change.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import threading

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import bus
from nova_accel.host import limited
from nova_accel.host import pci
from nova_accel.inventory import cards as card_calls
from nova_accel.inventory import conditions
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel.inventory import scan_state
from nova_accel.inventory import scanner as device_scanner
from nova_accel.inventory import users as device_users
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: kernel subsystems of the devices that drivers find; '' if events were missed
_WATCHED = frozenset(('', 'pci', 'mdev', 'fpga_region', 'ptp'))
#: part of [accel] discovery_interval from a look or a glance to the next: 18 s
#: by default, so a finding is reported at most 20 s after the fault
_PART = .3


@dataclasses.dataclass(eq=False)
class Looks:
    _drivers: Mapping[str, base.AcceleratorDriver]
    _table: devices.DeviceTable
    _cards: card_calls.Cards
    _state: scan_state.ScanState
    _scanner: device_scanner.Scanner
    _health: conditions.Conditions
    _users: device_users.Users

    def __post_init__(self) -> None:
        #: see watch()
        self._after: Sequence[limited.Background] = ()
        self._once = logging.Once()
        self._closed = threading.Event()
        #: held during a look or a glance
        self._looking = locks.Lock('looking')
        self._sweep = card_calls.Sweep()
        #: address -> whether the card answered in the last glance
        self._answers: dict[str, bool] = {}
        #: cache of bus.readings()
        self._bus: dict[tuple, tuple] = {}
        #: address -> the readings of its last look, without those of the bus
        self._of_card: dict[str, tuple[signals.Reading, ...]] = {}
        self.background = limited.Background(
            self.run, 'It is not known which devices have changed')
        self.glances = limited.Background(
            self.glance, 'The health of devices is not read between two looks')

    def run(self) -> None:
        """Scan the drivers and cards that have changed or failed, and update
        the findings of all devices (a look)."""
        with self._looking:
            self._look()
            self.glances.postpone()
        self._start_after()

    def glance(self) -> None:
        """Read the cheap signals of all devices, unless a look runs."""
        if self._closed.is_set() or signals.is_off() or self.background.runs:
            return
        with self._looking:
            found = self._glance()
        if found:
            self._start_after()

    def _start_after(self) -> None:
        for background in () if self._closed.is_set() else self._after:
            background.start()

    def _glance(self) -> bool:
        """Read the cheap signals of all devices.

        :returns: whether Placement, owners and metrics must be informed.
        """
        self._health.begin()
        readings: dict[str, tuple[signals.Reading, ...] | None] = {}
        batch = self._cards.batch(CONF.accel.discovery_timeout)
        cheap = []
        for device in self._to_read(set()):
            address = device.address
            if self._once.has(('health', address)):
                # it cannot be read; a look tries it again
                continue
            if address not in self._of_card or not (
                    self._health.is_current(address)):
                self._add(batch, device)
            elif isinstance(self._drivers[device.driver], base.PciDriver) and (
                    pci.ADDRESS.fullmatch(address)):
                cheap.append((address, device))
        found, hang = self._sweep.run(self._read_bus, cheap)
        if hang:
            # the look withholds a card at which its own call hangs, too
            self.background.start()
        changed: set[str] = set()
        for address, (answers, of_bus) in found.items():
            if of_bus is not None:
                readings[address] = *of_bus, *self._of_card[address]
            if answers != self._answers.get(address, True):
                changed.add(address)
            self._answers[address] = answers
        for call in batch:
            self._compare_card(call.about[1], call.outcome, changed, readings)
        if self._closed.is_set():
            return False
        if changed:
            self._scanner.scan((), changed)
        return self._health.round(readings, is_glance=True) or bool(changed)

    def _read_bus(self, device: model.Device,
                  ) -> tuple[bool, tuple[signals.Reading, ...] | None]:
        """Return whether a card answers, and the signals of the bus or None if
        they cannot be read."""
        kernel, address = self._drivers[device.driver].kernel, device.address
        try:
            return pci.answers(kernel, address), bus.readings(
                kernel, address, device.bridges, self._bus, is_glance=True)
        except (OSError, ValueError):
            return False, None

    def _is_of_bus(self, device: model.Device) -> bool:
        """Return whether all signals of a device are signals of the PCI bus,
        which a look reads without a worker for the card."""
        return (contract.is_of_bus(type(self._drivers[device.driver]))
                and bool(pci.ADDRESS.fullmatch(device.address)))

    def _attempt(self, device: model.Device, reads_health: bool) -> Callable:
        """Call _read() now, for a device with signals of the PCI bus only.
        Return a function that returns the result, or raises the error, of that
        call."""
        try:
            found = self._read(device, reads_health, is_of_bus=True)
        except Exception as error:
            failure = error

            def fail():
                raise failure
            return fail
        return lambda: found

    def _look(self) -> None:
        if self._closed.is_set():
            return
        reads_health = not signals.is_off()
        if reads_health:
            self._health.begin()
        names, addresses = self._state.due()
        readings: dict[str, tuple[signals.Reading, ...] | None] = {}
        cards = list(self._to_read(addresses))
        found, _ = self._sweep.run(
            lambda device: self._attempt(device, reads_health),
            [(device.address, device) for device in cards
             if self._is_of_bus(device)])
        batch = self._cards.batch(CONF.accel.discovery_timeout)
        for name, driver in self._drivers.items():
            if name not in names:
                batch.add(f'driver:{name}',
                          f'The driver {name} looking for changes',
                          driver.fingerprint, about=(True, name))
        for address, outcome in found.items():
            self._compare_card(address, outcome, addresses, readings)
        for device in cards:
            if device.address not in found:
                self._add(batch, device, reads_health)
        for call in batch:
            is_driver, key = call.about
            if is_driver:
                self._compare_driver(key, call, names)
            else:
                self._compare_card(key, call.outcome, addresses, readings)
        addresses = {a for a in addresses if not self._cards.hanging(a)}
        if names or addresses:
            self._scanner.scan(names, addresses)
        if reads_health:
            self._health.round(readings)

    def _add(self, batch, device: model.Device, reads_health=True) -> None:
        batch.add(device.address,
                  f'Looking whether {device.address} has changed',
                  self._read, device, reads_health,
                  about=(False, device.address))

    def _to_read(self, addresses: set[str]) -> Iterator[model.Device]:
        """Yield the devices whose state must be read.

        :param addresses: cards that are scanned in any case, and hence not
            yielded. The cards whose last scan failed are added to this set.
        """
        addresses |= {hold.device for hold in self._table.all_holds()
                      if hold.kind is holds.Kind.SCAN_FAILED}
        present = self._table.reports.all_notes()
        for address, device in self._table.snapshot().items():
            if (device.driver in self._drivers and address not in addresses
                    and address in present
                    and not self._table.contents.is_programming(address)
                    and not self._cards.is_busy(address)):
                yield device

    def _compare_driver(self, name: str, call, names: set[str]) -> None:
        """Add a driver to names, the drivers whose devices the look scans, if
        the fingerprint of the driver has changed."""
        try:
            if not self._state.is_fingerprint(name, call.outcome()):
                names.add(name)
        except exception.DeviceBusy:
            return
        except Exception as error:
            self._scanner.find_failed(name, error)

    def _compare_card(self, address: str, outcome: Callable,
                      addresses: set[str], readings: dict) -> None:
        """Add a card to addresses, the cards that the look scans, if the state
        of the card has changed.

        :param outcome: returns the result of _read(), or raises its error.
        :param readings: receives the health readings of the card.
        """
        try:
            state, readings[address] = outcome()
            if not self._state.is_state(address, state):
                addresses.add(address)
        except (exception.DeviceBusy, exception.DeviceTimeout):
            # inventory.cards withholds a card that hangs
            return
        except Exception:
            addresses.add(address)

    def between_servers(self, address: str) -> None:
        """Read the health of a device after a server has released it and
        before the next server gets it. Withhold the device if it is unhealthy.

        Some devices have their host driver, which reports health, only at that
        time. inventory.cards withholds a device that hangs.
        """
        device = self._table.snapshot().get(address)
        if (signals.is_off() or device is None
                or device.driver not in self._drivers
                or not self._table.reports.is_present(address)):
            return
        with contextlib.suppress(exception.AcceleratorError):
            _, readings = self._cards.call(
                address, f'Reading the health of {address}', self._read,
                device, True, seconds=CONF.accel.discovery_timeout)
            self._health.between_servers(address, readings or ())

    def _read(self, device: model.Device, reads_health: bool,
              is_of_bus: bool = False,
              ) -> tuple[Hashable, tuple[signals.Reading, ...] | None]:
        """Read the state and the health of a card.

        :param is_of_bus: see _is_of_bus(); with False called in its worker.
        :returns: the state, and the readings or None if they cannot be read.
        """
        name, address = device.driver, device.address
        driver = self._drivers[name]
        state = scan_state.state(driver, address, device)
        self._users.ask(device)
        if not reads_health:
            return state, None
        try:
            readings = contract.readings(name, (
                bus.readings(driver.kernel, address, device.bridges, self._bus)
                if is_of_bus else driver.health(device)))
        except Exception as error:
            self._once.log(
                ('health', address), LOG.warning,
                'The health of %s cannot be read now: %s', address,
                exception.clause(error))
            return state, None
        self._once.forget('health', address)
        self._of_card[address] = tuple(
            one for one in readings if one.signal not in bus.SIGNALS)
        return state, readings

    def watch(self, kernel,
              after: Sequence[limited.Background] = ()) -> None:
        """Start periodic looks and glances, after the first scan.

        :param kernel: nova_accel.host.kernel.Kernel, or a simulated kernel.
            Each change of a device that the kernel reports causes a look.
        :param after: functions to start after each look, and after a glance
            that has found a change.
        """
        self._after = after
        # the first scan has just read everything
        self.background.postpone()
        limited.start(self._listen, kernel)
        limited.start(self._poll)

    def _poll(self) -> None:
        while not self._closed.wait(1):
            seconds = _PART * CONF.accel.discovery_interval
            self.background.start_if_due(3 * seconds)
            self.glances.start_if_due(seconds)

    def _listen(self, kernel) -> None:
        is_changed = False
        try:
            for change in kernel.changes(self._closed):
                if change is None:
                    if is_changed:
                        is_changed = False
                        self.background.start()
                elif (self._health.note(change, kernel) if change.said
                      else change.subsystem in _WATCHED):
                    # several events follow each other, for example those of
                    # VFs
                    is_changed = True
                    if change.subsystem == 'pci':
                        self._state.forget_card(change.function)
        except Exception as error:
            if self._closed.is_set():
                return
            LOG.warning('The kernel does not report which devices come or go '
                        '(%s); changes are noticed within %d s', error,
                        CONF.accel.discovery_interval)

    def close(self) -> None:
        """Stop the looks, and the thread that waits for kernel events."""
        self._closed.set()
