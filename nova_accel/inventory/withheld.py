# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the holds that nova-compute sets and lifts while it runs, in memory
only.

=================  ===================  =======================================
Hold               Begins with          Ends with
=================  ===================  =======================================
SUSPECT            set_suspects()       set_suspects()
IN_USE             set_in_use()         set_in_use(); drop()
any other kind     withhold()           lift(); drop(): the device is removed
=================  ===================  =======================================

A device has at most one hold of each kind, and a handle at most one of IN_USE.
"""

from collections.abc import Collection

from nova_accel.inventory import holds
from nova_accel.inventory import reports as device_reports
from nova_accel import model
from nova_accel import text


class Withheld:

    def __init__(self, reports: device_reports.Reports):
        self._reports = reports
        self._holds: dict[str, dict[holds.Kind, holds.Hold]] = {}
        self._suspects: dict[str, holds.Hold] = {}
        self._in_use: dict[str, list[holds.Hold]] = {}

    def withhold(self, address: str, kind: holds.Kind, reason: str) -> bool:
        """Withhold a device from all servers.

        :param reason: one clause.
        :returns: whether the device did not have this hold, or had another
            reason.
        """
        with self._reports.lock:
            if self._reports.reported(address) is None:
                return False
            mine = self._holds.setdefault(address, {})
            before = mine.get(kind)
            hold = holds.Hold(kind, address, reason,
                              since=before.since if before else text.now())
            if before == hold:
                return False
            mine[kind] = hold
            self._reports.changed()
            return True

    def lift(self, address: str, kind: holds.Kind) -> None:
        """Lift the hold of one kind from a device."""
        with self._reports.lock:
            if self._holds.get(address, {}).pop(kind, None):
                self._reports.changed()

    def drop(self, address: str) -> None:
        """Forget the holds of a device that is removed."""
        with self._reports.lock:
            if (self._holds.pop(address, None)
                    or self._in_use.pop(address, None)):
                self._reports.changed()

    def in_use(self, address: str) -> list[holds.Hold]:
        """Return the IN_USE holds of a device's handles."""
        with self._reports.lock:
            return list(self._in_use.get(address, ()))

    def set_in_use(self, address: str, found: Collection[holds.Hold],
                   about: Collection[model.AttachHandle] | None = None,
                   ) -> tuple[list[holds.Hold], list[holds.Hold]]:
        """Replace the IN_USE holds of a device's handles.

        :param found: the holds that apply now.
        :param about: the handles whose holds to replace, or None for all.
        :returns: the holds that begin, and the holds that end.
        """
        with self._reports.lock:
            before = self._in_use.get(address, [])
            begun = [hold for hold in found if hold not in before]
            ended = [hold for hold in before if hold not in found
                     and (about is None or hold.handle in about)]
            if begun or ended:
                self._in_use[address] = [
                    *(hold for hold in before if hold not in ended), *begun]
                self._reports.changed()
            return begun, ended

    def set_suspects(self, suspects: dict[str, str]) -> None:
        """Set which devices are suspect: servers get them last.

        :param suspects: address -> the reason, a clause.
        """
        with self._reports.lock:
            now = {address: holds.Hold(holds.Kind.SUSPECT, address, reason,
                                       since=text.now())
                   for address, reason in suspects.items()}
            if now != self._suspects:
                self._suspects = {
                    address: self._suspects[address]
                    if self._suspects.get(address) == hold else hold
                    for address, hold in now.items()}
                self._reports.changed()

    def of(self, address: str) -> list[holds.Hold]:
        """Return the holds of a device."""
        with self._reports.lock:
            suspect = self._suspects.get(address)
            return [*self._holds.get(address, {}).values(),
                    *self._in_use.get(address, ()),
                    *([suspect] if suspect else [])]
