# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Draw conclusions from the health of devices.

========================  ====================================================
Finding                   Consequence
========================  ====================================================
observed                  logged, and shown to the operator
SUSPECT                   also the hold "suspect", a trait in Placement; except
                          for a guest that QEMU paused
QUARANTINED, of a level   also the hold "unhealthy" while the level lasts
QUARANTINED, sticky       also the hold "defective" until nova-accel enable
========================  ====================================================

A server keeps its device in all cases, and can start again. Drivers report a
device that does not answer as QUARANTINED; inventory.cards withholds a device
at which a call hangs.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import typing

from nova_accel import exception
from nova_accel.health import signals
from nova_accel.health import watch
from nova_accel.host import kernel as host_kernel
from nova_accel.host import pci
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text

LOG = logging.getLogger(__name__)
_State = signals.State
Kind = holds.Kind
_RECOVERY_FAILED = 'recovery_failed'
#: beginning of a kernel event -> signal; after WEDGED= the kernel names methods
#: of recovery (drm-uapi.rst of Linux 6.15)
_EVENTS = (('ERROR_EVENT=FAILED_RECOVERY', _RECOVERY_FAILED),
           ('WEDGED=', 'wedged'))
#: holds because a device is unhealthy
_OF_DEVICE = frozenset((Kind.SCAN_FAILED, Kind.HANGS, Kind.UNHEALTHY,
                        Kind.DEFECTIVE))


class Condition(typing.NamedTuple):
    """The health of a device and its reasons."""

    state: signals.State
    #: clauses, the worst first; '' without findings
    reason: str
    #: the state for the owner of its server: OK, SUSPECT, QUARANTINED or GONE
    for_owner: signals.State
    #: the worst first
    findings: tuple[watch.Finding, ...] = ()


class Conditions:

    def __init__(self, table: devices.DeviceTable,
                 store: claim_store.ClaimStore):
        self._table = table
        self._store = store
        # guards the fields below
        self._lock = locks.Lock('health')
        self._watch = watch.Watch()
        #: logs findings once, by address and (signal, object)
        self._once = logging.Once()
        #: address -> the fields of its findings that round() compares
        self._known: dict[str, list[tuple]] = {}
        #: addresses of devices with a drill
        self._drilled: set[str] = set()
        #: see pause()
        self._paused: Mapping[str, frozenset[str]] = {}
        if signals.acts():
            for address in table.snapshot():
                if signals.FENCED in table.reports.notes(address).marks:
                    table.withheld.withhold(
                        address, Kind.UNHEALTHY,
                        'it was unhealthy before nova-compute started')

    def note(self, change: host_kernel.Change, kernel) -> bool:
        """Store an event of the kernel as a signal for the next round.

        :returns: whether the event concerns one of the devices.
        """
        if not change.said or signals.is_off():
            return False
        with self._lock:
            for address, device in self._table.snapshot().items():
                if change.function in device.functions():
                    if Kind.RECOVERING in self._table.kinds(address):
                        # caused by the resets of its recovery
                        return True
                    for begins, signal in _EVENTS:
                        if change.said.startswith(begins) and (
                                signal != _RECOVERY_FAILED
                                or _have_drivers(kernel, device)):
                            self._watch.note(address, signal)
                    return True
        return False

    @contextlib.contextmanager
    def drilled(self, address: str) -> Iterator[None]:
        """Add the signal "drill" to the readings of a device until the context
        ends, to simulate a problem.

        :raises DeviceUnavailable: another drill of the device is in progress.
        """
        with self._lock:
            if address in self._drilled:
                raise exception.DeviceUnavailable(
                    f'A drill of {address} cannot begin, because another one '
                    f'is in progress: wait for its end.')
            self._drilled.add(address)
        try:
            yield
        finally:
            with self._lock:
                self._drilled.discard(address)

    def pause(self, servers: Mapping[str, frozenset[str]]) -> bool:
        """Set which devices get the signal "guest_paused" in their readings.

        :param servers: address of a device -> the servers that have a part of
            the device and whose guests QEMU has paused.
        :returns: whether servers differs from the last call.
        """
        with self._lock:
            changes = self._paused != servers
            self._paused = servers
        return changes

    def paused(self) -> frozenset[str]:
        """Return the servers whose guests QEMU has paused after an error."""
        with self._lock:
            return frozenset().union(*self._paused.values())

    def begin(self) -> None:
        """Begin a round: the devices are read from now on."""
        with self._lock:
            self._watch.begin()

    def is_current(self, address: str) -> bool:
        """Return whether the findings of a device are current."""
        with self._lock:
            return self._watch.is_current(address)

    def restart_counters(self, address: str, is_reset: bool = True) -> None:
        """Drop the findings of counters and events of all devices in the slot
        of a device, because a reset can cause errors of each of them; see
        watch.Watch.restart_counters()."""
        with self._lock:
            for other in self._table.snapshot():
                if _slot(other) == _slot(address):
                    self._watch.restart_counters(other, is_reset)

    def between_servers(self, address: str,
                        readings: Iterable[signals.Reading]) -> None:
        """Withhold a device if its readings after a server show that it is
        unhealthy. The next look lifts the hold if the device is healthy."""
        with self._lock:
            why = self._watch.fencing(address, readings)
            if why:
                self._table.withheld.withhold(
                    address, Kind.UNHEALTHY, '; '.join(why))

    def round(self, readings: Mapping[str, tuple[signals.Reading, ...] | None],
              is_glance: bool = False) -> bool:
        """Update findings and holds from the readings of a look or a glance.

        :param readings: see watch.Watch.round().
        :returns: whether a finding or a hold has begun or ended.
        """
        generation = self._table.reports.generation
        found, notes = self._table.snapshot(), self._table.reports.all_notes()
        held = {claim.device_address for claim in self._store.claims()}
        reported = self._reported()
        slots = {_slot(address) for address in held}
        whole = {_slot(address) for address in self._held_whole()}
        cards = {
            address: watch.Card(
                (device.driver, device.ids), address in held,
                _slot(address) in slots, notes[address].marks,
                _slot(address) in whole)
            for address, device in found.items() if address in notes}
        with self._lock:
            readings = {address: self._with_own(
                found.get(address), given, reported.get(address, ()))
                for address, given in readings.items()}
            for kind, spared in self._watch.round(
                    cards, readings, is_glance).items():
                LOG.error(
                    '%d devices of the driver %s would be withheld, all since '
                    'the last look (%s): the cause may be the host, so they '
                    'are suspect and stay offered. See the kernel log.',
                    len(spared), kind[0], ', '.join(spared))
            suspects, unhealthy, known = {}, set(), {}
            for address in cards:
                findings = self._watch.findings(address)
                self._log_findings(address, findings)
                if findings:
                    known[address] = [(f.signal, f.about, f.state, f.acts)
                                      for f in findings]
                acting = [f for f in findings if f.acts]
                if not acting:
                    continue
                # only a look disables a device: Watch.round() may spare it
                sticky = [] if is_glance else [f for f in acting if f.is_sticky]
                self._disable(address, found, sticky)
                bad = [f.reason for f in acting if f not in sticky
                       and f.state is _State.QUARANTINED]
                if bad:
                    unhealthy.add(address)
                    self._table.withheld.withhold(
                        address, Kind.UNHEALTHY, '; '.join(bad))
                suspect = [f.reason for f in acting
                           if f.signal != signals.PAUSED]
                if suspect:
                    suspects[address] = '; '.join(suspect)
            # between_servers() or an earlier process may have found more than
            # the present reading shows
            unhealthy |= {address for address in cards
                          if not self._watch.is_current(address)
                          and Kind.UNHEALTHY in self._table.kinds(address)}
            for address in cards.keys() - unhealthy:
                self._table.withheld.lift(address, Kind.UNHEALTHY)
        for address, card in cards.items():
            if (signals.FENCED in card.marks) != (address in unhealthy):
                self._table.reports.set_mark(
                    address, signals.FENCED, address in unhealthy)
        self._table.withheld.set_suspects(suspects)
        before, self._known = self._known, known
        return (before != known
                or self._table.reports.generation != generation)

    def _reported(self) -> dict[str, list[str]]:
        """Return device address -> categories of the problems that owners of
        servers with the device have reported."""
        found: dict[str, set[str]] = {}
        rows = [row for row in self._store.owner_reports() if not row.ended]
        for claim in self._store.claims() if rows else ():
            for row in rows:
                # a server may get a device again that it has released
                if (row.server == claim.instance_uuid
                        and text.to_second(claim.since) <= row.time
                        and row.card.means(claim.card)):
                    found.setdefault(claim.device_address, set()).add(
                        row.category)
        return {address: sorted(names) for address, names in found.items()}

    def _with_own(self, device, readings, categories):
        """Return the readings of a device, with the signals that nova_accel
        itself adds: failed, drill, paused guests and reports of owners."""
        if device and device.failed:
            # a failed device may have no other readings
            readings = (*(readings or ()), signals.Reading('failed'))
        if readings is not None and device:
            address = device.address
            if address in self._drilled:
                readings = (*readings, signals.Reading(signals.DRILL))
            readings = (*readings, *(
                signals.Reading(signals.PAUSED, about=server)
                for server in self._paused.get(address, ())), *(
                signals.Reading(signals.REPORTED, about=category)
                for category in categories))
        return readings

    def is_drilled(self, address: str) -> bool:
        """Return whether a drill of a device is in progress."""
        with self._lock:
            return address in self._drilled

    def mark(self, address: str, signal: str, is_so: bool = True) -> None:
        """Store a mark of a device for the next rounds, or remove it.

        :param signal: one of signals.MARKS.
        :param is_so: True to store the mark, False to remove it.
        """
        if not (is_so and signals.is_off()):
            self._table.reports.set_mark(address, signal, is_so)

    def _log_findings(self, address, findings) -> None:
        # the number of a counter changes while the finding stays
        now = {(f.signal, f.about): f for f in findings}
        for key, finding in now.items():
            if not self._once.has((address, key)):
                self._once.log(
                    (address, key), LOG.warning, 'Device %s%s: %s%s',
                    address, '' if finding.signal == signals.PAUSED
                    else f' is {finding.state.value}', finding.reason,
                    '' if finding.acts else (
                        f' ({signals.OPTION} has it observed only)'))
        if self._once.only(address, now) and not now:
            LOG.info('Device %s reports no more problems', address)

    def _disable(self, address: str, found: Mapping[str, model.Device],
                 findings: list[watch.Finding]) -> None:
        """Disable a device because of sticky findings."""
        if not findings:
            return
        try:
            before = [row for row in self._table.disabled().get(address, ())
                      if row.of_health]
            reason = '; '.join([*(row.reason for row in before),
                                *(f.reason for f in findings)])
            self._store.disable(values.Disabled(
                address, identity.serial_for_claim(
                    address, found, self._table.reports.gone()),
                reason[:values.LONGEST_REASON],
                before[0].since if before else text.now(),
                of_health=True), before)
        except exception.AcceleratorsUnavailable as error:
            LOG.error('Device %s must not be given to another server (%s), '
                      'and this is not stored yet: %s', address,
                      '; '.join(f.reason for f in findings), error)
            return
        self._watch.acknowledge(address, findings)

    def _held_whole(self) -> set[str]:
        """Return the addresses of devices that servers have as a whole."""
        return {claim.device_address for claim in self._store.claims()
                if claim.device_address in claim.handle.addresses}

    def conditions(self) -> dict[str, Condition]:
        whole = self._held_whole()
        found = self._table.snapshot()
        result = {}
        with self._lock:
            for address, device in found.items():
                findings = self._watch.findings(address)
                withheld = self._table.withheld_by(address)
                state = signals.state_of(
                    Kind.GONE in self._table.kinds(address), bool(withheld),
                    any(f.signal != signals.PAUSED for f in findings),
                    self._watch.is_read(address), address in whole)
                result[address] = Condition(
                    state, '; '.join(dict.fromkeys((
                        *(hold.reason for hold in withheld),
                        *(finding.reason for finding in findings)))),
                    self._for_owner(device, findings),
                    tuple(findings))
        return result

    def _for_owner(self, device: model.Device,
                   findings: Iterable[watch.Finding]) -> signals.State:
        """Return the state of a device for owners of servers.

        Reasons of the operator, reasons of the configuration, and findings
        that other servers cause do not count.
        """
        kinds = self._table.kinds(device.address)
        if Kind.GONE in kinds:
            return _State.GONE
        if _OF_DEVICE & kinds or (
                Kind.UNUSABLE in kinds and not device.is_not_offered):
            return _State.QUARANTINED
        return _State.SUSPECT if any(
            finding.acts and finding.signal not in (
                signals.PAUSED, signals.START, signals.REPORTED)
            for finding in findings) else _State.OK


def _slot(address: str) -> str:
    return address.rpartition('.')[0]


def _have_drivers(kernel, device: model.Device) -> bool:
    """Return whether all functions of a device have a driver.

    The kernel recovers all functions of a slot together. If one of them has no
    driver, for example a free VF, the kernel gives up, whatever the error was
    (report_error_detected() in drivers/pci/pcie/err.c of Linux 6.12). An event
    about a failed recovery is meaningless then, and only the counters show the
    error.
    """
    return all(pci.driver(kernel, function) for function in device.functions()
               if pci.ADDRESS.fullmatch(function))
