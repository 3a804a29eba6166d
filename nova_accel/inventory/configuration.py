# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Compare the configuration with the devices of the host."""

from collections.abc import Iterator, Mapping
import dataclasses

from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel.drivers import rules
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Configuration:
    _drivers: Mapping[str, base.AcceleratorDriver]
    _table: devices.DeviceTable
    _rules: rules.DeviceRules

    def check(self) -> None:
        """Log rules and addresses of nova.conf that have no effect. Called at
        start, after the first scan.

        :raises ConfigurationError: see without_effect().
        """
        for sentence in self.without_effect():
            LOG.warning('%s', sentence)

    def without_effect(self) -> list[str]:
        """Return a sentence for each rule and address of nova.conf that has no
        effect.

        :raises ConfigurationError: two drivers find the same device, an option
            of Nova also names a device of nova_accel, or an option cannot be
            read.
        """
        self._check_owners()
        return [*self._missing_members(),
                *self._rules.unused(self._functions),
                *self._missing_addresses()]

    def _functions(self) -> list[rules.Function]:
        return next((rules.functions(driver.kernel)
                     for driver in self._drivers.values()), [])

    def _check_owners(self) -> None:
        for address, names in self._table.shared.found_twice().items():
            raise exception.ConfigurationError(
                f'{address} is found by the drivers {" and ".join(names)} of '
                f'[accel] enabled_drivers: disable one of the two, or narrow '
                f'the rules of [accel] pci_devices.')
        for hold in self._table.all_holds():
            if hold.kind is holds.Kind.CONFLICT:
                driver = self._table.snapshot()[hold.device].driver
                raise exception.ConfigurationError(
                    f'{hold.reason} and found by the driver {driver} of '
                    f'[accel] enabled_drivers: take it out of one of the two.')

    def _missing_addresses(self) -> Iterator[str]:
        present = [device for address, device
                   in self._table.snapshot().items()
                   if self._table.reports.is_present(address)]
        functions = {function for device in present
                     for function in device.functions()}
        policies = handover.policies()
        for rule, _ in policies.by_rule:
            if not any(map(rule.matches_device, present)):
                yield rule.without_match(
                    self._functions(), self._rules.left_out)
        for option, addresses in (
                (sriov.OPTION, sriov.wanted()),
                (handover.OPTION, [about for about in policies.named
                                   if ':' in about]),
                (base.WHOLE_CARDS, sorted(base.whole_cards()))):
            for address in addresses:
                if address not in functions:
                    yield self._missing(option, address)

    def _missing(self, option: str, address: str) -> str:
        if address in self._rules.left_out:
            return (f'{option} names {address}, which {rules.INCLUDE} and '
                    f'{rules.EXCLUDE} leave out: include it, or take it out '
                    f'of the option.')
        is_there = any(driver.kernel.exists(pci.path(address))
                       for driver in self._drivers.values())
        return (f'{option} names {address}, which no driver of [accel] '
                f'enabled_drivers finds: '
                + ('enable its driver.' if is_there else
                   'correct the address, or enable its driver.'))

    # Device sets

    def _missing_members(self) -> Iterator[str]:
        """Yield a sentence for each absent device of a set.

        :raises ConfigurationError: a set contains a device that cannot be in a
            set, or devices of different types.
        """
        found = self._table.snapshot()
        for members in rules.sets():
            present = [found[address] for address in members
                       if address in found]
            for device in present:
                self._check_member(device, present[0])
            for address in sorted({*members} - found.keys()):
                yield (f'{rules.SETS} names {address}, which no driver of '
                       f'[accel] enabled_drivers finds: no server gets its set '
                       f'until the device is present.')

    def _check_member(self, device: model.Device, first: model.Device) -> None:
        why = self._not_for_sets(device)
        if not why and device.type != first.type:
            why = f'is a {device.type}, and {first.address} is a {first.type}'
        if why:
            raise exception.ConfigurationError(
                f'{rules.SETS} names {device.address}, which {why}: a set '
                f'consists of whole devices of one type, of the drivers gpu, '
                f'nvme and pci, or of the only VF of each.')

    def _not_for_sets(self, device: model.Device) -> str:
        """Return a clause why a device cannot be in a set, or '' if it can."""
        driver = self._drivers.get(device.driver)
        if driver is None or device.regions or device.creatable or not (
                # the only VF of a GPU may be the whole GPU, for example with
                # AMD's gim
                driver.POOLED or device.handles):
            return f'is of the driver {device.driver}'
        if len(device.handles) > 1:
            return f'is given to servers by {len(device.handles)} VFs'
        return ''
