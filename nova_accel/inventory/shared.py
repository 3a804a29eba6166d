# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Detect devices and functions that several drivers find.

===================  =======================================  ================
State of a device    Begins with                              Ends with
===================  =======================================  ================
found by two         note(): a later driver finds it, too     gone()
drivers
withheld (SHARED)    check(): another driver has one of its   check()
                     functions
===================  =======================================  ================
"""

from collections.abc import Iterable

from nova_accel.inventory import holds
from nova_accel.inventory import reports as device_reports
from nova_accel.inventory import withheld as device_holds
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)


class Shared:

    def __init__(self, reports: device_reports.Reports,
                 withheld: device_holds.Withheld, order: Iterable[str]):
        """
        :param order: names of the drivers; an earlier one has precedence.
        """
        self._reports = reports
        self._withheld = withheld
        self._order = {name: number for number, name in enumerate(order)}
        #: address -> the two drivers that find the device
        self._found: dict[str, tuple[str, str]] = {}

    def found_twice(self) -> dict[str, tuple[str, str]]:
        """Return address -> the two drivers that find the device. The first
        one owns the device."""
        with self._reports.lock:
            return dict(self._found)

    def owner(self, address: str, one: str, other: str) -> str:
        """Return which of two drivers that find the same device has
        precedence."""
        owner, loser = sorted((one, other), key=self._rank)
        with self._reports.lock:
            if self._found.get(address) != (owner, loser):
                self._found[address] = owner, loser
                LOG.error('Device %s is found by the drivers %s and %s; the '
                          'first has it', address, owner, loser)
        return owner

    def gone(self, address: str) -> str:
        """Forget a device that its owner does not find any more.

        :returns: the other driver that found the device, or ''.
        """
        with self._reports.lock:
            return self._found.pop(address, ('', ''))[1]

    def _rank(self, driver: str) -> int:
        return self._order.get(driver, len(self._order))

    def check(self) -> None:
        """Withhold each device that uses a function of another driver.

        A function belongs to the driver that finds the function itself as a
        device. Otherwise it belongs to the driver that finds a device in the
        same slot with this function, or else to the first driver that uses it.
        """
        with self._reports.lock:
            present = sorted(
                (device for address, device in self._reports.devices.items()
                 if self._reports.is_present(address)),
                key=lambda device: self._rank(device.driver))
            owners = {d.address: d.driver for d in present}
            for device in present:
                slot = device.address.rpartition('.')[0]
                for function in device.functions():
                    if function.rpartition('.')[0] == slot:
                        owners.setdefault(function, device.driver)
            for device in present:
                self._check(device, owners)

    def _check(self, device: model.Device, owners: dict[str, str]) -> None:
        """Withhold a device if another driver has one of its functions.

        :param owners: PCI function -> its driver. If the device is not
            withheld, its functions are added.
        """
        functions = device.functions()
        others = sorted({owners.get(f, device.driver)
                         for f in functions} - {device.driver})
        if not others:
            owners.update(dict.fromkeys(functions, device.driver))
            self._withheld.lift(device.address, holds.Kind.SHARED)
            return
        both = min(f for f in functions if owners.get(f) == others[0])
        if self._withheld.withhold(device.address, holds.Kind.SHARED,
                                   f'the driver {others[0]} has {both}'):
            LOG.error('Device %s of the driver %s is withheld, because '
                      'the driver %s has %s of it as well: disable '
                      'one of the two, or narrow the rules of '
                      '[accel] pci_devices', device.address,
                      device.driver, others[0], both)
