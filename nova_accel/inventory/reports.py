# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the last reports of drivers, in memory and in the store.

=================  =======================================  ==================
Report             Begins with                              Ends with
=================  =======================================  ==================
of a present       put() of Adoption.adopt()                put(); set_gone()
device
of an absent       set_gone() of Adoption.gone()            put(): it is back;
device                                                      remove()
=================  =======================================  ==================

A scan takes a ticket() before it begins. The result of the scan is discarded
if the card was scanned or changed (invalidate()) meanwhile.

All parts of the device table (inventory.devices) share the lock and the
generation of Reports. Each part holds the lock while it changes, and calls
changed() afterwards.
"""

from collections.abc import Collection, Mapping
import dataclasses
import itertools

from nova_accel import exception
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text

LOG = logging.getLogger(__name__)


class Reports:

    def __init__(self, store: claim_store.ClaimStore):
        """:raises AcceleratorsUnavailable: the store cannot be read."""
        self._store = store
        #: held while any part of the device table is read or changed
        self.lock = locks.Lock('devices', reentrant=True)
        #: held while the store is written, always taken before lock
        self.writing = locks.Lock('changes', reentrant=True)
        self._devices: dict[str, model.Device] = dict(store.devices())
        self._notes: dict[str, values.Notes] = store.notes()
        self._saved = dict(self._devices), dict(self._notes)
        self._once = logging.Once()
        self._clock = itertools.count(1)
        #: address -> ticket of its newest valid scan or change
        self._since: dict[str, int] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        """Return the number of changes up to now in all parts of the table."""
        with self.lock:
            return self._generation

    def changed(self) -> None:
        """Count a change."""
        with self.lock:
            self._generation += 1

    @property
    def devices(self) -> Mapping[str, model.Device]:
        """Return the reports by address, for callers that hold the lock."""
        return self._devices

    def reported(self, address: str) -> model.Device | None:
        """Return the last report of a device, even an absent one, or None."""
        with self.lock:
            return self._devices.get(address)

    def is_present(self, address: str) -> bool:
        """Return whether a driver finds a device."""
        with self.lock:
            return address in self._devices and not self.notes(address).gone

    def gone(self) -> set[str]:
        """Return the addresses of devices that no driver finds any more."""
        with self.lock:
            return {address for address, notes in self._notes.items()
                    if notes.gone}

    def of_driver(self, name: str) -> list[str]:
        """Return the addresses of a driver's present devices."""
        with self.lock:
            return [a for a, d in self._devices.items()
                    if d.driver == name and self.is_present(a)]

    def notes(self, address: str) -> values.Notes:
        """Return the facts about a device that are stored with its report."""
        with self.lock:
            return self._notes.get(address, values.Notes())

    def all_notes(self) -> dict[str, values.Notes]:
        """Return notes() of the present devices, by address."""
        with self.lock:
            found = {a: self._notes.get(a, values.Notes())
                     for a in self._devices}
        return {a: notes for a, notes in found.items() if not notes.gone}

    def put(self, device: model.Device,
            notes: values.Notes | None = None) -> None:
        """Replace the report of a device.

        :param notes: the new notes of the device, or None to keep the notes.
        """
        with self.lock:
            self._devices[device.address] = device
            if notes:
                self._notes[device.address] = notes
            self.changed()

    def not_found(self, name: str, found: Collection[str]) -> list[str]:
        """Return the addresses of a driver's devices that it no longer finds
        or that nova.conf excludes.

        :param found: addresses that the driver finds.
        """
        with self.lock:
            return [a for a, d in self._devices.items()
                    if d.driver == name and a not in found
                    and (self.is_present(a) or self.notes(a).left_out)]

    def set_gone(self, address: str, why: str, left_out: bool = False) -> None:
        """Store that a device is not at its address any more.

        :param why: a clause.
        :param left_out: whether nova.conf excludes the device.
        """
        with self.lock:
            self.put(self._devices[address], dataclasses.replace(
                self.notes(address), gone=why, gone_since=text.now(),
                left_out=left_out))

    def set_mark(self, address: str, signal: str, is_so: bool) -> None:
        """Store or remove a mark of a device.

        :param signal: one of health.signals.MARKS.
        :param is_so: True to store the mark, False to remove it.
        """
        with self.lock:
            device, notes = self._devices.get(address), self.notes(address)
            if device is None or (signal in notes.marks) == is_so:
                return
            self.put(device, notes.with_mark(signal, is_so))
        self.save()

    def remove(self, address: str) -> None:
        """Forget an absent device that has neither claims nor providers.

        :raises IllegalTransition: the device is present.
        """
        with self.lock:
            device = self._devices.get(address)
            if device is None:
                return
            if not self.notes(address).gone:
                raise exception.IllegalTransition(
                    f'{address} cannot be removed, because it is here.')
            del self._devices[address]
            self._notes.pop(address, None)
            self.changed()

    def ticket(self) -> int:
        """Return the ticket of a scan that begins now."""
        with self.lock:
            return next(self._clock)

    def invalidate(self, address: str) -> None:
        """Discard the results of scans of a card that began before this
        call."""
        with self.lock:
            self._since[address] = next(self._clock)

    def note_scan(self, address: str, ticket: int) -> None:
        """Discard the results of scans of a card that began before the scan
        with this ticket."""
        with self.lock:
            self._since[address] = ticket

    def is_stale(self, address: str, ticket: int) -> bool:
        """Return whether the result of a scan must be discarded."""
        with self.lock:
            return ticket < self._since.get(address, 0)

    def was_scanned(self, address: str) -> bool:
        """Return whether this process has scanned the card, or called
        invalidate()."""
        with self.lock:
            return address in self._since

    def save(self) -> None:
        """Write the reports to the store if they have changed.

        An error is logged, and the next call retries.
        """
        with self.writing:
            with self.lock:
                now = dict(self._devices), dict(self._notes)
            if now == self._saved:
                return
            try:
                self._store.set_devices(*now)
            except exception.AcceleratorError as error:
                self._once.log(('store',), LOG.error, 'Reports of drivers '
                               'could not be stored: %s', error)
                return
            self._saved = now
            self._once.forget('store')
