# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Turn readings of all devices into findings, round by round. No I/O.

A *round* reads all signals of all devices. A *glance* is a round that reads
only some signals (inventory.looks). There are several glances between two full
rounds. Two limits are counted from one full round to the next: the least
growth of a counter that is a finding, and the number of devices that may fail
together. A *level* is a signal that shows a present state, unlike a counter or
an event.

=====================  ================================  ===================
A finding              begins with                       ends with
=====================  ================================  ===================
of a level             a reading of it                   a round without it
of a counter           growth since the last round       restart_counters(), or
                                                         acknowledge()
of an event            note()                            the same
of Card.marks          its presence there                its absence there
=====================  ================================  ===================

The first round after the start has no earlier values to compare with.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import typing

from nova_accel.health import signals

_Mode, _State = signals.Mode, signals.State


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem of a device that a signal, or one of Card.marks, reports."""

    signal: str
    about: str
    value: int
    state: signals.State
    #: whether the mode is act: it changes the state of the device
    acts: bool

    @property
    def reason(self) -> str:
        """Return the reason as a clause."""
        return signals.SIGNALS[self.signal].said.format(
            value=self.value, about=self.about)

    @property
    def is_sticky(self) -> bool:
        return (signals.SIGNALS[self.signal].sticky and self.acts
                and self.state is _State.QUARANTINED)


class Card(typing.NamedTuple):
    """The facts about a device by which its readings are judged."""

    #: (driver, product), by which devices are compared
    kind: tuple[str, str]
    #: whether it has a claim, including one that is being released
    held: bool
    #: whether any function of its slot has a claim: the port counts the errors
    #: of all functions, and the kernel reports an event of one for all
    slot_held: bool
    #: store.values.Notes.marks
    marks: tuple[str, ...] = ()
    #: whether a server has a whole function of its slot, and hence controls
    #: the link
    slot_whole: bool = False


@dataclasses.dataclass
class _Known:
    """The remembered health of a device."""

    #: (signal, object) of a counter -> its last value
    counters: dict[tuple[str, str], int] = dataclasses.field(
        default_factory=dict)
    #: findings of counters and events
    kept: dict[tuple[str, str], Finding] = dataclasses.field(
        default_factory=dict)
    #: findings of levels
    levels: dict[tuple[str, str], Finding] = dataclasses.field(
        default_factory=dict)
    #: findings without consequences, because too many devices had them at once
    spared: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    is_read: bool = False
    #: whether it could be read before: then a counter without a value was 0
    was_read: bool = False

    def findings(self) -> dict[tuple[str, str], Finding]:
        return {**self.levels, **self.kept}

    def is_bad(self) -> bool:
        return any(finding.state is _State.QUARANTINED
                   for finding in self.findings().values())


def may_be_the_host(bad: int, alike: int) -> bool:
    """Return whether the host may be the cause of bad devices, rather than the
    devices. This is assumed if at least two devices, and at least half of
    their kind, are bad.

    :param bad: number of bad devices.
    :param alike: number of all devices of their kind.
    """
    return bad > 1 and 2 * bad >= alike


class Watch:
    """The known health of the devices of a host. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        #: address -> signals of events since the last round
        self._events: dict[str, list[str]] = {}
        self._looks = 0
        #: address -> number of the look before its counters restarted; removed
        #: when a later look has read the device
        self._again: dict[str, int] = {}
        #: devices whose counters restarted and whose link errors are ignored
        self._reset: set[str] = set()
        #: kind -> devices that would be quarantined since the last full round
        self._turned: dict[tuple[str, str], dict[str, None]] = {}

    def begin(self) -> None:
        """Begin to read the devices for the next round."""
        self._looks += 1

    def restart_counters(self, address: str, is_reset: bool) -> None:
        """Drop the findings of counters and events of a device.

        A reset causes errors, and errors that a server has caused must not
        withhold the device from other servers. Hence the next reading is
        ignored, and also the one after it if devices are being read now. The
        counters restart from there.

        :param is_reset: whether the whole device was reset. If not, findings
            that no server can cause stay.
        """
        self._again[address] = self._looks
        if is_reset:
            self._reset.add(address)
        self._events.pop(address, None)

    def is_current(self, address: str) -> bool:
        """Return whether a device's health is known: it was read since the
        start of nova-compute and since restart_counters()."""
        return (address in self._known and self._known[address].was_read
                and address not in self._again)

    def note(self, address: str, signal: str) -> None:
        """Note an event of a device for the next round."""
        self._events.setdefault(address, []).append(signal)

    def acknowledge(self, address: str,
                    findings: Iterable[Finding]) -> None:
        """Drop findings of counters and events that have become holds."""
        known = self._known.get(address, _Known())
        for finding in findings:
            known.kept.pop((finding.signal, finding.about), None)

    def findings(self, address: str) -> list[Finding]:
        """Return the findings of a device, beginning with the worst."""
        known = self._known.get(address, _Known())
        return sorted(known.findings().values(),
                      key=lambda f: (-f.state.rank, f.signal, f.about))

    def is_read(self, address: str) -> bool:
        """Return whether the signals of a device were readable in the last
        round."""
        return address in self._known and self._known[address].is_read

    def fencing(self, address: str,
                readings: Iterable[signals.Reading]) -> list[str]:
        """Return reasons to withhold a device from the next server, from
        readings after a server has released it.

        Counters are ignored, because a reset causes errors. Signals that are
        only observed are ignored, too.
        """
        modes = signals.modes()
        known = self._known.get(address, _Known())
        return [
            signals.SIGNALS[signal].said.format(value=value, about=about)
            for signal, value, about in readings
            if signals.SIGNALS[signal].free is _State.QUARANTINED
            and not signals.SIGNALS[signal].counts
            and modes[signal] is _Mode.ACT
            and (signal, about) not in known.spared]

    def round(self, cards: Mapping[str, Card],
              readings: Mapping[str, Iterable[signals.Reading] | None],
              is_glance: bool = False) -> dict[tuple[str, str], list[str]]:
        """Update the findings from the readings of one round.

        :param cards: all present devices, by address.
        :param readings: address -> readings of a device that was examined.
            None if the device could not be read; then its findings stay.
        :param is_glance: whether only some signals were read.
        :returns: kind -> addresses of devices, for kinds of which too many
            devices would be quarantined at once. The host or nova_accel may be
            the cause. Hence these devices become SUSPECT instead.
        """
        modes = signals.modes()
        events, self._events = self._events, {}
        self._known = {address: self._known.get(address, _Known())
                       for address in cards}
        turned: set[tuple[str, str]] = set()
        for address, card in cards.items():
            known = self._known[address]
            was_bad = known.is_bad() or signals.FENCED in card.marks
            if self._again.get(address, -1) >= self._looks - 1:
                # the kernel reports the reset itself, possibly after its end
                events.pop(address, None)
                known.kept = {key: finding for key, finding
                              in known.kept.items() if finding.is_sticky}
            for signal in events.get(address, ()):
                self._found(known, card, modes, signals.Reading(signal))
            if address in readings:
                found = readings[address]
                known.is_read = found is not None
                if found is not None:
                    self._read(known, card, modes, found,
                               address in self._again, address in self._reset,
                               is_glance)
                    known.was_read = True
            for signal in signals.MARKS:
                known.levels.pop((signal, ''), None)
                if signal in card.marks:
                    self._found(known, card, modes, signals.Reading(signal))
            if not (known.levels or known.kept):
                known.spared.clear()
                continue
            known.spared &= known.findings().keys()
            if known.is_bad() and not was_bad:
                turned.add(card.kind)
                self._turned.setdefault(card.kind, {})[address] = None
        self._again = {
            address: look for address, look in self._again.items()
            if address in cards and (
                look == self._looks or readings.get(address) is None)}
        self._reset &= self._again.keys()
        result = {kind: addresses for kind in turned
                  if self._breaks(cards, kind, addresses := [
                      a for a in self._turned[kind] if a in cards])}
        if not is_glance:
            self._turned.clear()
        return result

    def _read(self, known, card, modes, found, is_again, is_reset,
              is_glance) -> None:
        known.levels.clear()
        for reading in found:
            key = reading.signal, reading.about
            if not signals.SIGNALS[reading.signal].counts:
                self._found(known, card, modes, reading)
                continue
            before = known.counters.get(key, 0 if known.was_read else None)
            known.counters[key] = reading.value
            row = signals.SIGNALS[reading.signal]
            if before is None or is_again and (
                    is_reset or row.held is not _State.QUARANTINED):
                continue
            # counters restart at 0 after the kernel has removed the device
            growth = reading.value - (before if before <= reading.value else 0)
            if growth >= row.least:
                self._found(known, card, modes, reading._replace(value=growth))
            elif is_glance and before <= reading.value:
                known.counters[key] = before

    @staticmethod
    def _found(known, card, modes, reading) -> None:
        row, mode = signals.SIGNALS[reading.signal], modes[reading.signal]
        held = card.slot_held if row.counts else card.held
        state = row.state(held, card.slot_whole)
        if mode is _Mode.OFF or state is _State.OK:
            return
        key = reading.signal, reading.about
        if mode is _Mode.OBSERVE or key in known.spared:
            state = min(state, _State.SUSPECT, key=lambda s: s.rank)
        into = known.kept if row.counts else known.levels
        before = into.get(key)
        into[key] = Finding(
            reading.signal, reading.about, reading.value + (
                before.value if before else 0),
            max(state, before.state, key=lambda s: s.rank)
            if before else state, mode is _Mode.ACT)

    def _breaks(self, cards, kind, addresses) -> bool:
        """Reduce the state of devices from QUARANTINED to SUSPECT, if too many
        devices of their kind would be quarantined in this round.

        :param addresses: the devices of the kind that would be quarantined.
        :returns: whether too many would be.
        """
        alike = sum(card.kind == kind for card in cards.values())
        if not may_be_the_host(len(addresses), alike):
            return False
        for address in addresses:
            known = self._known[address]
            for into in (known.kept, known.levels):
                for key, finding in into.items():
                    if finding.state is _State.QUARANTINED:
                        known.spared.add(key)
                        into[key] = dataclasses.replace(
                            finding, state=_State.SUSPECT)
        return True
