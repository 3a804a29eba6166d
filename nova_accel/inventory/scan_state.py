# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the results of scans of drivers and cards for the next look.

A look (inventory.looks) compares the fingerprint of each driver and the state
of each card with those of the last scan. It scans the drivers and cards that
differ, and those that are *due* because they failed or were busy. For example,
a card that is being programmed during a scan is due. Hence the next look scans
it, even if its state has not changed.
"""

from collections.abc import Hashable

from nova_accel.drivers import base
from nova_accel.host import pci
from nova_accel import locks
from nova_accel import model


def state(driver: base.AcceleratorDriver, address: str,
          device: model.Device | None) -> Hashable:
    """Return a value that changes if a new examination of a card would have
    another result.

    The value contains the driver's state of the card, and the host drivers of
    the functions that share an IOMMU group with it.

    :param device: the last report of the card.
    """
    return driver.state(address), tuple(
        (function, pci.driver(driver.kernel, function))
        for group in (device.groups if device else ())
        for function in group)


class ScanState:
    """Fingerprints, states, serial numbers and failures of the last scans.

    Any thread may call the methods.
    """

    def __init__(self):
        self._lock = locks.Lock('scan')
        #: driver -> its fingerprint at its last find()
        self._fingerprints: dict[str, Hashable] = {}
        #: address -> state of the card at its last examine()
        self._states: dict[str, Hashable] = {}
        #: address -> serial number of the device in that slot
        self._serials: dict[str, str] = {}
        #: drivers whose last find() failed -> the reason
        self._failed: dict[str, str] = {}
        #: address of a card to scan again -> the driver to ask, and the reason
        #: of the last failure
        self._due: dict[str, tuple[str, str]] = {}

    # Drivers

    def found(self, driver: str, fingerprint: Hashable) -> None:
        """Note the fingerprint of a driver whose find() succeeded."""
        with self._lock:
            self._failed.pop(driver, None)
            self._fingerprints[driver] = fingerprint

    def find_failed(self, driver: str, why: str) -> bool:
        """Note that find() of a driver failed, and must be called again.

        :returns: whether this is the first failure since find() last
            succeeded.
        """
        with self._lock:
            is_new = driver not in self._failed
            self._failed[driver] = why
            return is_new

    def find_again(self, driver: str) -> None:
        """Let the next look query a driver again, because the driver was busy.
        """
        with self._lock:
            self._fingerprints.pop(driver, None)

    def is_fingerprint(self, driver: str, fingerprint: Hashable) -> bool:
        """Return whether a driver had this fingerprint at its last find()."""
        with self._lock:
            return (driver in self._fingerprints
                    and self._fingerprints[driver] == fingerprint)

    # Cards

    def examined(self, address: str, state: Hashable) -> None:
        """Note the state of a card whose scan succeeded."""
        with self._lock:
            self._states[address] = state
            self._due.pop(address, None)

    def examine_again(self, address: str, driver: str,
                      reason: str = '') -> bool:
        """Let the next look scan a card.

        :param reason: why its scan failed, or '' if the card was busy.
        :returns: whether the reason is new.
        """
        with self._lock:
            _, before = self._due.get(address, ('', ''))
            self._due[address] = driver, reason
            return reason != before

    def forget_state(self, address: str) -> None:
        """Let the next look scan a card even if its state has not changed."""
        with self._lock:
            self._states.pop(address, None)

    def forget_card(self, address: str) -> None:
        """Drop the state and the serial number of a slot, which may hold
        another card now."""
        with self._lock:
            self._states.pop(address, None)
            self._serials.pop(address, None)

    def gone(self, address: str) -> None:
        """Forget a card that its driver does not find any more."""
        self.forget_card(address)
        with self._lock:
            self._due.pop(address, None)

    def is_state(self, address: str, state: Hashable) -> bool:
        """Return whether a card had this state at its last scan."""
        with self._lock:
            return (address in self._states
                    and self._states[address] == state)

    def serial(self, address: str) -> str | None:
        """Return the serial number of a device, or None if it was not read."""
        with self._lock:
            return self._serials.get(address)

    def set_serial(self, address: str, serial: str) -> None:
        """Store the serial number of a device until another card may be in its
        slot."""
        with self._lock:
            self._serials[address] = serial

    # Scans that are due

    def driver_of(self, address: str) -> str:
        """Return the driver of a card that is due, or '' for other cards."""
        with self._lock:
            return self._due.get(address, ('', ''))[0]

    def due(self) -> tuple[set[str], set[str]]:
        """Return the drivers and the addresses of cards to scan again."""
        with self._lock:
            return set(self._failed), set(self._due)

    def due_reasons(self, addresses: set[str]) -> dict[str, str]:
        """Return address -> why the scan failed ('' if the card was busy), for
        each given card that is due."""
        with self._lock:
            return {address: self._due[address][1]
                    for address in sorted(addresses & self._due.keys())}

    def failures(self) -> dict[str, str]:
        """Return the failures of the last scans. The keys are 'driver <name>'
        or an address, and the values are the reasons."""
        with self._lock:
            return {**{f'driver {name}': why
                       for name, why in self._failed.items()},
                    **{address: why
                       for address, (_, why) in self._due.items() if why}}
