# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Notice changes of devices without scanning all of them.

A look runs each [accel] discovery_interval, and soon after the kernel reports
a change. It asks each driver for its fingerprint and each card for its state,
which is cheap, and reads the health of each card. What differs from the last
scan is scanned again. For example, a GPU that falls off the bus between two
looks has another state: its card is scanned, and no other.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
import contextlib
import threading

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel.inventory import cards as card_calls
from nova_accel.inventory import conditions
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel.inventory import scan_state
from nova_accel.inventory import scanner as device_scanner
from nova_accel.inventory import users as device_users
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: subsystems of the kernel whose devices drivers look for; '' when events were
#: missed
_WATCHED = frozenset(('', 'pci', 'mdev', 'fpga_region', 'ptp'))


class Looks:
    def __init__(self, drivers: Mapping[str, base.AcceleratorDriver],
                 table: devices.DeviceTable, cards: card_calls.Cards,
                 state: scan_state.ScanState, scanner: device_scanner.Scanner,
                 health: conditions.Conditions, users: device_users.Users):
        self._drivers = drivers
        self._table = table
        self._cards = cards
        self._state = state
        self._scanner = scanner
        self._health = health
        self._users = users
        #: see watch()
        self._after: Sequence[limited.Background] = ()
        self._once = logging.Once()
        self._closed = threading.Event()
        self.background = limited.Background(
            self.run, 'It is not known which devices have changed')

    def run_if_due(self) -> None:
        self.background.start_if_due(CONF.accel.discovery_interval)

    def run(self) -> None:
        """Scan the drivers and cards that have changed or failed, and draw the
        conclusions from the health of all devices."""
        if self._closed.is_set():
            return
        reads_health = not signals.is_off()
        if reads_health:
            self._health.begin()
        names, addresses = self._state.due()
        readings: dict[str, tuple[signals.Reading, ...] | None] = {}
        batch = self._cards.batch(CONF.accel.discovery_timeout)
        for name, driver in self._drivers.items():
            if name not in names:
                batch.add(f'driver:{name}',
                          f'The driver {name} looking for changes',
                          driver.fingerprint, about=(True, name))
        for device in self._to_read(addresses):
            batch.add(device.address,
                      f'Looking whether {device.address} has changed',
                      self._read, device, reads_health,
                      about=(False, device.address))
        for call in batch:
            is_driver, key = call.about
            if is_driver:
                self._compare_driver(key, call, names)
            else:
                self._compare_card(key, call, addresses, readings)
        addresses = {a for a in addresses if not self._cards.hanging(a)}
        if names or addresses:
            self._scanner.scan(names, addresses)
        if reads_health:
            self._health.round(readings)
        for background in self._after:
            background.start()

    def _to_read(self, addresses: set[str]) -> Iterator[model.Device]:
        """Yield the devices whose state must be read.

        :param addresses: of cards that are scanned in any case; receives those
            whose last scan failed.
        """
        for address, device in self._table.snapshot().items():
            if holds.Kind.SCAN_FAILED in self._table.kinds(address):
                addresses.add(address)
            elif (device.driver in self._drivers and address not in addresses
                    and self._table.reports.is_present(address)
                    and not self._table.contents.is_programming(address)
                    and not self._cards.is_busy(address)):
                yield device

    def _compare_driver(self, name: str, call, names: set[str]) -> None:
        """Add a driver to those that list their devices if its fingerprint has
        changed."""
        try:
            if not self._state.is_fingerprint(name, call.outcome()):
                names.add(name)
        except exception.DeviceBusy:
            return
        except Exception as error:
            self._scanner.find_failed(name, error)

    def _compare_card(self, address: str, call, addresses: set[str],
                      readings: dict) -> None:
        """Add a card to those that are scanned if its state has changed.

        :param readings: receives what it reports of its health.
        """
        try:
            state, readings[address] = call.outcome()
            if not self._state.is_state(address, state):
                addresses.add(address)
        except (exception.DeviceBusy, exception.DeviceTimeout):
            # inventory.cards withholds one that hangs
            return
        except Exception:
            addresses.add(address)

    def between_servers(self, address: str) -> None:
        """Read the health of a device between two servers.

        For some kinds of devices this is the only moment at which the host's
        driver has the device. inventory.cards withholds a device that hangs.
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
              ) -> tuple[Hashable, tuple[signals.Reading, ...] | None]:
        """Read the state and the health of a card, in its worker.

        :returns: its state; its readings, None if they cannot be read.
        """
        name, address = device.driver, device.address
        driver = self._drivers[name]
        state = scan_state.state(driver, address, device)
        self._users.ask(device)
        if not reads_health:
            return state, None
        try:
            readings = contract.readings(name, driver.health(device))
        except Exception as error:
            self._once.log(
                ('health', address), LOG.warning,
                'The health of %s cannot be read now: %s', address,
                exception.clause(error))
            return state, None
        self._once.forget('health', address)
        return state, readings

    def watch(self, kernel,
              after: Sequence[limited.Background] = ()) -> None:
        """Start periodic looks, after the first scan.

        :param kernel: nova_accel.host.kernel.Kernel or a simulated one: each
            change of a device that it reports causes a look.
        :param after: what to start after each look.
        """
        self._after = after
        # the scan has just seen all
        self.background.postpone()
        limited.start(self._listen, kernel)

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
                    # several follow each other, such as those of VFs
                    is_changed = True
                    if change.subsystem == 'pci':
                        self._state.forget_card(change.function)
        except Exception as error:
            if self._closed.is_set():
                return
            LOG.warning('The kernel does not report when devices come and go '
                        '(%s); changes are noticed within %d s', error,
                        CONF.accel.discovery_interval)

    def close(self) -> None:
        """Stop looking and listening."""
        self._closed.set()
