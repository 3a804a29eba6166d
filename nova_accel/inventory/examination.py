# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Examine a card, in the worker of the card.

The driver reads the card. nova_accel adds the serial number, the operator's
rules, the hand-over policy, and conflicts with Nova's own options.
"""

from collections.abc import Callable, Hashable, Mapping
import dataclasses
import typing


from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel.drivers import handover
from nova_accel.drivers import rules
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.host import vfio
from nova_accel.inventory import devices
from nova_accel.inventory import scan_state
from nova_accel.inventory import users as device_users
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

LOG = logging.getLogger(__name__)


#: why a device is left out, a clause
EXCLUDED = f'{rules.INCLUDE} and {rules.EXCLUDE} leave it out'


class Examined(typing.NamedTuple):
    """The result of one examination."""

    #: Reports.ticket() from before the card was read
    ticket: int
    #: scan_state.state() from before the card was read
    state: Hashable
    #: None if the driver does not find it, or the operator excludes it
    device: model.Device | None
    #: which of Nova's own options names the device as well, a clause; '' if
    #: none
    conflict: str
    #: whether nova-compute still has to set the device up: each look examines
    #: it again
    awaits_set_up: bool = False
    #: if device is None: the option of nova.conf that is the reason, a clause;
    #: '' if the device is gone
    left_out: str = ''


@dataclasses.dataclass(eq=False)
class Examiner:
    _drivers: Mapping[str, base.AcceleratorDriver]
    _table: devices.DeviceTable
    _state: scan_state.ScanState
    _rules: rules.DeviceRules
    _users: device_users.Users
    #: see Inventory
    _taken_elsewhere: Callable[[model.Device], str]
    #: see Inventory
    _reads_serials: bool
    #: drivers whose configure() has ended
    configured: set[str] = dataclasses.field(default_factory=set)

    def examine(self, name: str, address: str) -> Examined:
        """Read a card with the driver of this name, after a set-up if the card
        has no users.

        :raises Exception: any error of the driver.
        """
        driver = self._drivers[name]
        trouble = self._set_up(name, address)
        ticket = self._table.reports.ticket()
        state = scan_state.state(
            driver, address, self._table.reports.reported(address))
        serial = self._serial(name, address)
        ports = pci.ports(driver.kernel, address)
        before, device = self._read(name, address, serial, ports)
        if device is not None and address not in base.whole_cards() and (
                contract.confines(type(driver))
                and self._table.contents.note_open(device)):
            # regions that a guest can reprogram have another origin now
            ticket = self._table.reports.ticket()
            before, device = self._read(name, address, serial, ports)
        if device is not None:
            device = contract.device(name, address, driver.confine(device))
        left_out = EXCLUDED
        if device is None:
            left_out = contract.left_out(driver, before) if before else ''
        else:
            if serial is None and before and (
                    self._table.reports.is_present(address)):
                serial = before.serial
            device = self._rules.applied(dataclasses.replace(
                device, serial=serial or '', ports=ports,
                serial_can_change=driver.SERVER_CAN_CHANGE_SERIAL))
        if device is None:
            return Examined(ticket, state, None, '', left_out=left_out)
        awaits = device.reason == sriov.NONE
        if awaits and trouble:
            device = dataclasses.replace(device, reason=trouble)
        device = dataclasses.replace(
            _with_policy(device),
            groups=vfio.shared_groups(driver.kernel, device))
        self._users.ask(device)
        if driver.NEEDS_RULE and not self._rules.includes(device):
            return Examined(ticket, state, device, '')
        return Examined(ticket, state, *self._compared_with_nova(device),
                        awaits)

    def _set_up(self, name: str, address: str) -> str:
        """Call set_up() of a driver, unless a server or a process uses the
        card.

        :returns: why the set-up failed, as a clause, or '' if it did not fail.
        """
        driver = self._drivers[name]
        if (name in self.configured and contract.sets_up(type(driver))
                and self._users.are_none(address, driver.kernel)):
            try:
                driver.set_up(address)
            except exception.AcceleratorError as error:
                return exception.clause(error)
        return ''

    def _read(self, name: str, address: str, serial: str | None, ports: str,
              ) -> tuple[model.Device | None, model.Device | None]:
        """Examine a card with a driver. Return the previous report of this
        driver, and the new one."""
        before = self._table.reports.reported(address)
        if before and before.driver != name:
            before = None
        return before, contract.device(
            name, address, self._drivers[name].examine(
                address, self._with_own_record(before, serial, ports)))

    def _serial(self, name: str, address: str) -> str | None:
        """Return the serial number of a device, or None if it cannot be read
        now. The number is read once, when a device appears in its slot.
        """
        serial = self._state.serial(address)
        if serial is None and self._reads_serials:
            try:
                serial = contract.serial(
                    name, self._drivers[name].serial(address))
            except Exception as error:
                LOG.warning('The serial number of %s cannot be read (%s); '
                            'nova-compute will not notice if the device is '
                            'exchanged or moved', address,
                            exception.clause(error))
                serial = ''
            if serial is not None:
                self._state.set_serial(address, serial)
        return serial

    def _with_own_record(self, before: model.Device | None,
                         serial: str | None, ports: str,
                         ) -> model.Device | None:
        """Return the last report of an address. If another card is there now,
        the report has the stored record of that card.

        :param before: the last report.
        """
        if before is None or (before.serial == serial if serial
                              else before.ports == ports):
            return before
        record = self._table.adoption.record_of(
            model.CardKey('', serial or '', '', ports))
        if record is None and (serial or not before.ports):
            return before
        return dataclasses.replace(before, record=record or ())

    def _compared_with_nova(self, device: model.Device,
                            ) -> tuple[model.Device, str]:
        """Return a device, and a clause if an option of Nova names it,
        otherwise ''.

        If an option names only another function of its slot, the returned
        device is quarantined.
        """
        conflict = self._conflict(dataclasses.replace(device, company=()))
        if conflict or not device.company:
            return device, conflict
        of_slot = self._conflict(device)
        if of_slot:
            # nova-compute refuses to start with the first conflict, but not
            # with the second
            device = dataclasses.replace(
                device, health=model.Health.QUARANTINED,
                reason=f'{of_slot}, and is a function of the same slot, which '
                       f'one guest gets as a whole: take it out of there')
        return device, ''

    def _conflict(self, device: model.Device) -> str:
        try:
            return self._taken_elsewhere(device)
        except Exception as error:
            LOG.warning('Device %s is not compared with the options of Nova: '
                        '%s', device.address, error)
            return ''


def _with_policy(device: model.Device) -> model.Device:
    """Return a device as the hand-over policy "operator" changes it, if any of
    its handles has this policy: with the trait ONE_TIME_USE, or quarantined if
    its vGPUs are created on demand.

    :raises ConfigurationError: [accel] handover cannot be read.
    """
    if naming.ONE_TIME_USE in device.traits:
        # an unhealthy device keeps the traits of its last report
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
    return dataclasses.replace(
        device, traits=(*device.traits, naming.ONE_TIME_USE))
