# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Recover failed devices and regions of cards that no server uses.

AcceleratorDriver.recover() recovers regions. A device is recovered if
nova-compute acts on a finding whose signal has ``recovers`` (health.signals).
The steps of LADDER that the driver has (AcceleratorDriver.steps()) are tried
in order until the device is healthy. The device is then on probation: the
device stays suspect until a server has used it.

A device that fails again on probation is not recovered again. If no step
helps, boot the host or exchange the card.
"""

from collections.abc import Mapping
import contextlib
import dataclasses

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import pci
from nova_accel.inventory import cards as card_calls
from nova_accel.inventory import conditions as device_conditions
from nova_accel.host import usage
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: names of steps, in the order of what they affect, the least first
LADDER = ('function reset', 'controller reset', 'driver rebind', 'card reset')
#: kinds of holds that a device to recover may have
_MAY_HAVE = {holds.Kind.UNUSABLE, holds.Kind.UNHEALTHY, holds.Kind.FOREIGN,
             holds.Kind.DEFECTIVE}


@dataclasses.dataclass(eq=False)
class Recovery:
    _table: devices.DeviceTable
    _cards: card_calls.Cards
    _store: claim_store.ClaimStore
    _claiming: locks.Lock
    _drivers: Mapping[str, base.AcceleratorDriver]
    _health: device_conditions.Conditions

    def __post_init__(self) -> None:
        #: address -> the reasons for which a recovery was tried
        self._tried: dict[str, list[str]] = {}
        #: address -> the reasons for which steps of LADDER were tried
        self._climbed: dict[str, list[str]] = {}
        #: address -> the step that helped last; '' if none did
        self.steps: dict[str, str] = {}

    def run(self) -> list[str]:
        """Recover unused cards; see Inventory.recover().

        Failures may be old: a region fails if its programming is interrupted,
        and is not recovered while a server has a part of the card.

        :returns: addresses of the cards that have to be scanned.
        """
        batch = self._cards.batch(CONF.accel.programming_timeout)
        chosen = []
        failed = self._failed()
        with self._claiming:
            claimed = {c.device_address for c in self._store.claims()}
            for address, reasons in (*failed.items(),
                                     *self._candidates().items()):
                device = self._table.reports.reported(address)
                if (device is None or address in claimed
                        or not self._table.withheld.withhold(
                            address, holds.Kind.RECOVERING,
                            'it is being recovered')):
                    continue
                chosen.append(address)
                driver = self._drivers[device.driver]
                LOG.info('Device %s is recovered: %s', address,
                         '; '.join(reasons))
                if address in failed:
                    self._climbed[address] = reasons
                    batch.add(address, f'Recovering {address}', self._climb,
                              driver, device, reasons, about=address)
                else:
                    self._tried[address] = reasons
                    batch.add(address, f'Recovering {address}', self._recover,
                              driver, device, about=address)
        for call in batch:
            try:
                call.outcome()
            except Exception as error:
                LOG.error('Device %s could not be recovered: %s', call.about,
                          error)
            self._table.reports.invalidate(call.about)
            self._table.withheld.lift(call.about, holds.Kind.RECOVERING)
        return chosen

    # In the worker of the card, even after the caller stopped waiting

    def _recover(self, driver, device) -> None:
        address = device.address
        if _is_used(driver.kernel, device):
            # the next comparison retries
            self._tried.pop(address, None)
            return
        try:
            driver.recover(address)
        finally:
            self._health.restart_counters(address)

    def _climb(self, driver, device, reasons) -> None:
        address = device.address
        try:
            step = climb(driver, device)
        except exception.DeviceUnavailable:
            # the next comparison retries
            self._climbed.pop(address, None)
            return
        finally:
            self._health.restart_counters(address)
        self.steps[address] = step
        if not step:
            LOG.error('Device %s has failed (%s), and nova-compute has no step '
                      'that helps: boot the host, or exchange the card',
                      address, '; '.join(reasons))
            return
        LOG.warning('Device %s had failed (%s), and has recovered by: %s',
                    address, '; '.join(reasons), step)
        if not self._health.is_drilled(address):
            self._health.mark(address, signals.RECOVERED)
            # this mark prevents another try until a server has had the device
            self._climbed.pop(address, None)

    def _failed(self) -> dict[str, list[str]]:
        """Return address -> the reasons of failed devices that can be
        recovered now."""
        found: dict[str, list[str]] = {}
        if not signals.acts():
            return found
        for address, known in self._health.conditions().items():
            if not any(signals.SIGNALS[f.signal].recovers
                       for f in known.findings):
                self._climbed.pop(address, None)
                self.steps.pop(address, None)
            device = self._table.reports.reported(address)
            reasons = sorted(
                f.reason for f in known.findings
                if f.acts and f.state is signals.State.QUARANTINED
                and signals.SIGNALS[f.signal].recovers)
            if (reasons and device and address not in self._climbed
                    and signals.RECOVERED not in
                    self._table.reports.notes(address).marks
                    and device.driver in self._drivers
                    # the operator may be working on a disabled device
                    and self._table.kinds(address) <= _MAY_HAVE | (
                        {holds.Kind.DISABLED}
                        if self._health.is_drilled(address) else set())
                    and not self._cards.hanging(address)):
                found[address] = reasons
        return found

    def forget_well(self) -> None:
        """Forget the attempts to recover regions of devices that are healthy
        now, to recover them again after a new failure."""
        for address, device in self._table.snapshot().items():
            if not self._table.kinds(address) and not _failed_regions(device):
                self._tried.pop(address, None)

    def _candidates(self) -> dict[str, list[str]]:
        found = {}
        self.forget_well()
        for address, device in self._table.snapshot().items():
            reasons = _failed_regions(device)
            if (reasons and not self._table.kinds(address)
                    and reasons != self._tried.get(address)
                    and device.driver in self._drivers
                    and not self._table.contents.is_programming(address)
                    and not self._cards.hanging(address)):
                found[address] = reasons
        return found


def _failed_regions(device: model.Device) -> list[str]:
    return sorted(r.reason for r in device.regions
                  if r.health is model.Health.QUARANTINED)


def _is_used(kernel, device: model.Device) -> bool:
    """Return whether a process has a part of a device open, either through
    VFIO (for example a guest that Nova does not know), or through a node of a
    host driver."""
    for function in device.functions():
        with contextlib.suppress(OSError):
            if pci.is_open(kernel, function):
                return True
    for handle in device.all_handles:
        if kept := usage.keeping(kernel, device, handle, 1):
            LOG.info('Device %s is not recovered while %s', device.address,
                     kept)
            return True
    return False


def climb(driver: base.AcceleratorDriver, device: model.Device) -> str:
    """Take one step of LADDER after another until a device is healthy.

    Runs in the worker of the card.

    :returns: the name of the step that helped, or ''.
    :raises DeviceUnavailable: a process has the device open.
    """
    steps = driver.steps(device)
    for name in LADDER:
        if name not in steps:
            continue
        if _is_used(driver.kernel, device):
            raise exception.DeviceUnavailable(
                f'{device.address} is not recovered, because a process has '
                f'it open: it is tried again.')
        try:
            steps[name]()
            if _is_well(driver, device):
                return name
            LOG.warning('Device %s still reports problems after: %s',
                        device.address, name)
        except (OSError, exception.AcceleratorError) as error:
            LOG.warning('Device %s still reports problems, and %s failed: %s',
                        device.address, name, error)
    return ''


def _is_well(driver: base.AcceleratorDriver, device: model.Device) -> bool:
    found = contract.device(device.driver, device.address, driver.examine(
        device.address, device))
    return found is not None and not found.failed and not any(
        signals.SIGNALS[reading.signal].recovers for reading
        in contract.readings(device.driver, driver.health(found)))
