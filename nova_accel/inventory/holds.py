# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Holds: reasons not to give a device, a region or a handle to a server.

A hold applies to a card, to a part of it (a region, or all of a device without
regions), or to one handle. A handle with at least one hold is withheld, except
if all its holds are of the kinds cleaning, suspect and planned (see below).

================  ======  =============================  ======================
Kind              Scope   Meaning                        Lifted by
================  ======  =============================  ======================
gone              card    its driver does not find it    the driver finds it
left-out          card    its driver is not enabled, or  the operator: nova.conf
                          no rule names it any more
unusable          part    its driver reports that it     a scan
                          cannot be given to a guest
scan-failed       card    its driver or its scan failed  a scan
hangs             card    a call of its driver does not  the call returns
                          return
recovering        card    nova-compute recovers it from  the end of that
                          a failure
conflict          card    an option of Nova names it,    the operator: nova.conf
                          too
shared            card    another driver has one of its  the operator: nova.conf
                          functions
in-guest          card    a guest has a part of it       the guest stops, or is
                          without a claim                claimed
in-use            handle  a process of the host has it   the process ends, or
                          open                           closes it
unhealthy         card    a health finding quarantines   a health reading
                          it
disabled *        card    the operator has disabled it   nova-accel enable
defective *       card    a health finding quarantines   nova-accel enable
                          it until nova-accel enable
misplaced *       card    a claim is for another card    the card is put back,
                          at its address, or for this    or the server is
                          card at another address        deleted
owner-unknown *   card    it may contain data of a       nova-compute finds the
                          server, and no claim names     server
                          that server
returned *        card    it is here again, and may      nova-compute cleans it
                          contain data of a server that
                          was deleted meanwhile
foreign *         card    it contains data that neither  nova-accel clean
                          a server nor nova_accel wrote
unclean *         handle  it was released under a        nova-compute cleans it
                          policy that cleans less than
                          the present one
waiting *         handle  the policy "operator" applies  nova-accel release
                          to it
not-cleaned *     handle  it is not clean yet after its  a cleaning that
                          last server, or could not be   succeeds
                          cleaned
unallocated       handle  a server has it, and its       nova-compute allocates
                          allocation is missing in       it, or the server is
                          Placement                      deleted
overlap *         part    a server has the PF of these   the server is deleted
                          VFs, or VFs of this PF
cleaning          part    a region is cleaned after its  the end of that
                          last server
incomplete-set    card    another device of its set is   all devices of the set
                          missing or withheld            are here
iommu-group       handle  another server has, or could   the operator:
                          get, a part of its IOMMU       nova.conf, or ACS
                          group
suspect           card    a health finding makes it      a health reading
                          suspect: servers get it last
planned *         card    the operator will disable it   nova-accel undrain
================  ======  =============================  ======================

A kind with * survives a restart of nova-compute. A hold of scope part or handle
may also apply to the whole card. Three kinds do not remove a handle from
Placement: a server can be allocated a region that is *cleaning* and waits for
it, and a *suspect* or *planned* device is the last choice.

For example, the operator disables a card of two VFs, and a container has one VF
open. Both VFs have the hold "disabled" of the card, and the second one has
"in-use" as well. After ``nova-accel enable``, servers can get the first VF, and
the second one when the container has closed it.
"""

from collections.abc import Collection, Hashable, Iterable
import dataclasses
import enum

from nova_accel.inventory import reports as device_reports
from nova_accel import model
from nova_accel.store import values
from nova_accel import text


class Scope(enum.Enum):
    """The objects to which a hold applies."""

    CARD = 'card'
    PART = 'part'
    HANDLE = 'handle'


class Kind(enum.Enum):
    """The kind of a hold; see the table of the module."""

    def __new__(cls, name: str, *_args):
        kind = object.__new__(cls)
        kind._value_ = name
        return kind

    def __init__(self, _name: str, scope: Scope, is_durable: bool,
                 lifted_by: str):
        #: the narrowest scope of holds of this kind
        self.scope = scope
        #: whether it survives a restart of nova-compute
        self.is_durable = is_durable
        #: the person, program or event that lifts it
        self.lifted_by = lifted_by

    GONE = 'gone', Scope.CARD, False, 'the driver finds it'
    LEFT_OUT = 'left-out', Scope.CARD, False, 'the operator: nova.conf'
    UNUSABLE = 'unusable', Scope.PART, False, 'a scan'
    SCAN_FAILED = 'scan-failed', Scope.CARD, False, 'a scan'
    HANGS = 'hangs', Scope.CARD, False, 'the call returns'
    RECOVERING = 'recovering', Scope.CARD, False, 'the end of that'
    CONFLICT = 'conflict', Scope.CARD, False, 'the operator: nova.conf'
    SHARED = 'shared', Scope.CARD, False, 'the operator: nova.conf'
    IN_GUEST = ('in-guest', Scope.CARD, False,
                'the guest stops, or is claimed')
    IN_USE = ('in-use', Scope.HANDLE, False,
              'the process ends, or closes it')
    UNHEALTHY = 'unhealthy', Scope.CARD, False, 'a health reading'
    DISABLED = 'disabled', Scope.CARD, True, 'nova-accel enable'
    DEFECTIVE = 'defective', Scope.CARD, True, 'nova-accel enable'
    MISPLACED = ('misplaced', Scope.CARD, True,
                 'the card is put back, or the server is deleted')
    OWNER_UNKNOWN = ('owner-unknown', Scope.CARD, True,
                     'nova-compute finds the server')
    RETURNED = 'returned', Scope.CARD, True, 'nova-compute cleans it'
    FOREIGN = 'foreign', Scope.CARD, True, 'nova-accel clean'
    UNCLEAN = 'unclean', Scope.HANDLE, True, 'nova-compute cleans it'
    WAITING = 'waiting', Scope.HANDLE, True, 'nova-accel release'
    NOT_CLEANED = ('not-cleaned', Scope.HANDLE, True,
                   'a cleaning that succeeds')
    UNALLOCATED = ('unallocated', Scope.HANDLE, False,
                   'nova-compute allocates it, or the server is deleted')
    OVERLAP = 'overlap', Scope.PART, True, 'the server is deleted'
    CLEANING = 'cleaning', Scope.PART, False, 'the end of that'
    INCOMPLETE_SET = ('incomplete-set', Scope.CARD, False,
                      'all devices of the set are here')
    IOMMU_GROUP = ('iommu-group', Scope.HANDLE, False,
                   'the operator: nova.conf, or ACS')
    SUSPECT = 'suspect', Scope.CARD, False, 'a health reading'
    PLANNED = 'planned', Scope.CARD, True, 'nova-accel undrain'

    @property
    def withholds(self) -> bool:
        """Return whether Placement does not count the handle."""
        return self not in (Kind.CLEANING, Kind.SUSPECT, Kind.PLANNED)


@dataclasses.dataclass(frozen=True)
class Hold:
    """One reason why servers do not get a card, a part of it or a handle, or
    get it last."""

    kind: Kind
    #: address of the device
    device: str
    #: one clause for the operator
    reason: str
    #: index of the region; None for the whole card, and for a device without
    #: regions
    region: int | None = None
    #: None for all handles of the card or of the region
    handle: model.AttachHandle | None = None
    #: UTC, as 2026-11-22T02:17:43+00:00; '' if unknown. It is for people: two
    #: holds that differ only in this are equal
    since: str = dataclasses.field(default='', compare=False)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Return all fields except reason and since, which may change while
        the hold lasts."""
        return self.kind, self.device, self.region, self.handle

    @property
    def scope(self) -> Scope:
        if self.handle:
            return Scope.HANDLE
        return Scope.CARD if self.region is None else Scope.PART

    def applies_to(self, part: tuple[str, int | None],
                   handle: model.AttachHandle | None = None) -> bool:
        """Return whether the hold applies to a handle, or to a whole part.

        :param part: (device address, region index or None), as Claim.part.
        :param handle: a handle of the part, or None to ask about the whole
            part.
        """
        device, region = part
        return (self.device == device and self.region in (None, region)
                and self.handle in (None, handle))

    def __str__(self) -> str:
        return (f'{self.kind.value}'
                f'{f" since {self.since}" if self.since else ""}: '
                f'{self.reason}')


def of_disabled(row: values.Disabled) -> Kind:
    """Return the kind of hold for a row of the table of disabled devices."""
    if row.is_planned:
        return Kind.PLANNED
    return Kind.DEFECTIVE if row.of_health else Kind.DISABLED


def kind_of_gone(notes: values.Notes) -> Kind:
    """Return LEFT_OUT for an absent device that nova.conf excludes, or GONE.
    """
    return Kind.LEFT_OUT if notes.left_out else Kind.GONE


def reasons(found: Iterable[Hold]) -> str:
    """Return the reasons of holds as one clause."""
    return '; '.join(dict.fromkeys(hold.reason for hold in found))


def described(found: Iterable[Hold]) -> str:
    """Return the kinds, start times and reasons of holds for a table cell."""
    return '; '.join(dict.fromkeys(map(str, found)))


class Withheld:
    """Keep the holds that nova-compute sets and lifts while it runs, in memory
    only.

    ==============  ================  =========================================
    Hold            Begins with       Ends with
    ==============  ================  =========================================
    SUSPECT         set_suspects()    set_suspects()
    IN_USE          set_in_use()      set_in_use(); drop()
    any other kind  withhold()        lift(); drop(): the device is removed
    ==============  ================  =========================================

    A device has at most one hold of each kind, and a handle at most one of
    IN_USE.
    """

    def __init__(self, reports: device_reports.Reports):
        self._reports = reports
        self._holds: dict[str, dict[Kind, Hold]] = {}
        self._suspects: dict[str, Hold] = {}
        self._in_use: dict[str, list[Hold]] = {}

    def withhold(self, address: str, kind: Kind, reason: str) -> bool:
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
            hold = Hold(kind, address, reason,
                        since=before.since if before else text.now())
            if before == hold:
                return False
            mine[kind] = hold
            self._reports.changed()
            return True

    def lift(self, address: str, kind: Kind) -> None:
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

    def in_use(self, address: str) -> list[Hold]:
        """Return the IN_USE holds of a device's handles."""
        with self._reports.lock:
            return list(self._in_use.get(address, ()))

    def set_in_use(self, address: str, found: Collection[Hold],
                   about: Collection[model.AttachHandle] | None = None,
                   ) -> tuple[list[Hold], list[Hold]]:
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
            now = {address: Hold(Kind.SUSPECT, address, reason,
                                 since=text.now())
                   for address, reason in suspects.items()}
            if now != self._suspects:
                self._suspects = {
                    address: self._suspects[address]
                    if self._suspects.get(address) == hold else hold
                    for address, hold in now.items()}
                self._reports.changed()

    def of(self, address: str) -> list[Hold]:
        """Return the holds of a device."""
        with self._reports.lock:
            suspect = self._suspects.get(address)
            return [*self._holds.get(address, {}).values(),
                    *self._in_use.get(address, ()),
                    *([suspect] if suspect else [])]
