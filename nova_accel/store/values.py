# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Types of rows in the store, in addition to those of nova_accel.model."""

from collections.abc import Mapping
import dataclasses
import enum
from typing import NamedTuple

from nova_accel import model
from nova_accel import text


@dataclasses.dataclass(frozen=True)
class Notes:
    """The facts about a device that are stored with the report of its driver.
    """

    #: traits of earlier cards at the address, or of earlier shells of this
    #: card, which its providers must not have
    earlier_traits: tuple[str, ...] = ()
    #: signals of actions of nova-compute, see health.signals.MARKS
    marks: tuple[str, ...] = ()
    #: why the device is gone, a clause; '' if its driver finds it
    gone: str = ''
    #: when it was lost, UTC, as 2026-11-22T02:17:43+00:00
    gone_since: str = dataclasses.field(default='', compare=False)
    #: whether nova.conf is the reason why its driver does not find it
    left_out: bool = False

    def with_mark(self, mark: str, is_so: bool) -> 'Notes':
        """Return a copy of the notes with the mark added or removed."""
        others = {*self.marks} - {mark}
        return dataclasses.replace(self, marks=tuple(sorted(
            {*others, mark} if is_so else others)))


#: results of a hand-over after which the device is released.
#: EXCHANGED: another card is in its place. MEMORY_KEPT: nothing of the server
#: is left, except in the memory of an FPGA card, for which the operator has no
#: clearing image. RESET_ONLY: the policy demands less than clear
CLEAN, MEMORY_KEPT = 'clean', 'clean, memory kept'
RESET_ONLY = 'reset only'
EXCHANGED = 'another card is in its place'
ENDS = (CLEAN, MEMORY_KEPT, RESET_ONLY, 'not cleaned',
        'waits for the operator', EXCHANGED)
#: beginning of the result if a hand-over announces a key (store.chain)
NEW_KEY = 'new key '


@dataclasses.dataclass(frozen=True)
class Handover:
    """A hand-over: the cleaning of a device after a server or by an order of
    the operator (admin.maintenance).

    Every field is a text, '' if unknown.
    """

    #: when it was judged, UTC, as 2026-11-22T02:17:43+00:00
    time: str
    device: str
    #: serial number of the device
    serial: str
    #: address of the handle that the server had
    handle: str
    server: str
    #: the origin of the region's content
    origin: str = ''
    #: the method, as AcceleratorDriver.release() returned it, or 'none'
    method: str = 'none'
    #: content of the region before and after
    before: str = ''
    after: str = ''
    #: one of ENDS, 'ordered', or why it failed
    result: str = ''
    #: when the server got the device, in the format of time
    since: str = ''
    #: where the device is plugged in (Device.ports)
    ports: str = ''
    #: Cleaned.shown of its driver (drivers.base)
    shown: str = ''
    # store.chain; '' if it is not signed
    version: str = ''
    #: hash of the card's previous hand-over
    previous: str = ''
    #: number in the chain of the card, from 1; '' of a failed attempt
    place: str = ''
    salt: str = ''
    #: the public key
    key: str = ''
    signature: str = ''

    @property
    def failed(self) -> bool:
        """Return whether the release of a server's device failed, and will be
        retried."""
        return bool(self.server) and self.result not in ENDS

    @property
    def is_key(self) -> bool:
        """Return whether the row only announces a key."""
        return self.result.startswith(NEW_KEY)

    @property
    def card(self) -> str:
        """Return the name of the card, which is also the name of its chain."""
        return self.serial or self.ports or self.device


@dataclasses.dataclass(frozen=True)
class Use:
    """A period in which a server had a device (store.uses)."""

    number: int
    claim: str
    server: str
    #: '' if it is unknown
    project: str
    #: id of the flavor in Nova's API
    flavor: str
    #: Device.type and Device.product
    type: str
    product: str
    #: name of the vGPU type (CreatableType), or function of the region; '' of
    #: other devices
    part: str
    #: address of the device
    device: str
    #: UTC, as 2026-11-22T02:17:43.123456+00:00
    since: str
    #: when it ended, or was counted last
    until: str
    #: text.moment() of the last count; '' if the use has ended
    counted: str
    #: by CLOCK_MONOTONIC
    seconds: float
    #: the last event that was sent about it, '' before the first one, and its
    #: seconds at that time
    sent: str = ''
    reported: float = 0


@dataclasses.dataclass(frozen=True)
class Card:
    """The stored facts about a card that is absent, or has left its stored
    address."""

    #: its serial is '' if it is unknown, or other cards of the host had it
    key: model.CardKey
    #: Device.record
    record: tuple[tuple[str, str], ...]
    #: by index, of regions that were programmed
    loaded: Mapping[int, model.Loaded]
    #: Notes.marks
    marks: tuple[str, ...] = ()

    @property
    def origins(self) -> dict[int, str | None]:
        """Return region index -> origin, for regions that were programmed."""
        return {index: loaded.origin for index, loaded in self.loaded.items()}


#: maximum length of the reason of a disabled device
LONGEST_REASON = 200


@dataclasses.dataclass(frozen=True)
class Disabled:
    """A row of a device that the operator, or nova-compute because of a health
    finding, has disabled or will disable. The row lasts until nova-accel
    enable.

    inventory.identity.disabled() finds the device of the row.
    """

    #: address of the device when it was disabled
    device_address: str
    #: '' if it was unknown, or other devices of the host had it
    serial: str
    #: '' if the operator gave none
    reason: str
    #: when, UTC, as 2026-11-22T02:17:43+00:00
    since: str
    #: Device.ids of the card that was there at that time
    ids: str = ''
    #: True: set by nova-compute, the hold "defective"; False: set by the
    #: operator, the hold "disabled"
    of_health: bool = False
    #: Device.ports of that card
    ports: str = ''
    #: planned time (drain --at), in the format of since; '' if not planned.
    #: Owners of servers read the reason of planned work, too
    at: str = ''
    #: whether nova-compute has found that this time has come: it stays so if
    #: the clock is set back
    begun: bool = dataclasses.field(default=False, compare=False)

    @property
    def card(self) -> model.CardKey:
        return model.CardKey(
            self.device_address, self.serial, self.ids, self.ports)

    @property
    def is_planned(self) -> bool:
        """Return whether the planned time has not come yet."""
        return not self.begun and self.at > text.now()


@dataclasses.dataclass(frozen=True)
class OwnerReport:
    """A report by the owner of a server about a device of the server."""

    number: int
    #: UTC, as 2026-11-22T02:17:43+00:00
    time: str
    #: address and identity of the device, as in its claim
    device: str
    serial: str
    ids: str
    ports: str
    server: str
    #: one of attach.owner_reports.CATEGORIES
    category: str
    #: of the owner, printable
    words: str
    #: when the operator ended it (nova-accel enable), '' if not
    ended: str = ''

    @property
    def card(self) -> model.CardKey:
        return model.CardKey(self.device, self.serial, self.ids, self.ports)


class OrderState(enum.StrEnum):
    """The state of an order: NEW -> BEGUN -> DONE or REFUSED. An order can be
    withdrawn in any state."""

    NEW = 'new'
    BEGUN = 'begun'
    DONE = 'done'
    REFUSED = 'refused'


@dataclasses.dataclass(frozen=True)
class Order:
    """A request of an operator's command to nova-compute."""

    number: int
    #: 'release', 'clean', 'program' or 'drill'
    verb: str
    #: argument of the method of admin.maintenance.Maintenance with this name
    argument: str
    #: text.moment() at which it was written
    since: str
    state: OrderState = OrderState.NEW
    #: sentences for the operator, once it is DONE or REFUSED
    answer: str = ''


@dataclasses.dataclass(frozen=True)
class Lineage:
    """The compute node of a claim store, and the changes that the store
    contains (store.claims)."""

    #: provider uuid of the compute node; '' before Nova's first report
    node: str = ''
    #: run -> how often it has changed claims, the oldest run first
    runs: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def knows(self, run: str, count: int) -> bool:
        """Return whether the store contains the changes of a run up to this
        count."""
        return count <= self.runs.get(run, -1)


@dataclasses.dataclass(frozen=True)
class Unsettled:
    """A device that may contain data of a server without a claim.

    The device is identified by its serial number, its ports or its address. A
    row without a number, ports and address applies to every device of the
    host.
    """

    address: str = ''
    serial: str = ''
    #: with an address: only a card of this product (Device.ids), if it reports
    #: no serial number
    ids: str = ''
    #: parts() that are settled; the others had no handle, for example a VF
    #: that is still bound to VFIO
    settled: frozenset[str] = frozenset()
    #: the card has left its address: the row applies to it at any address
    moved: bool = False
    #: when it was written, UTC, as 2026-11-22T02:17:43+00:00
    since: str = dataclasses.field(default='', compare=False)
    #: Device.ports, '' if unknown, or if the row is by_address and the card
    #: has not moved
    ports: str = ''

    @property
    def by_address(self) -> bool:
        """Return whether the owner of the data is unknown, and the row
        identifies the device by its present or former address."""
        return self.moved or not self.serial and (
            not self.ids or bool(self.settled))

    def means(self, device: model.Device) -> bool:
        if self.settled and self.parts(device) <= self.settled:
            return False
        return model.CardKey(
            self.address, self.serial, self.ids, self.ports).means(device.card)

    @staticmethod
    def parts(device: model.Device) -> frozenset[str]:
        """Return the parts of a device that a server could have now: the
        indexes of regions with handles. For a device without regions, return
        the addresses of its handles."""
        return frozenset(
            [str(r.index) for r in device.regions if r.handles]
            if device.regions else [h.address for h in device.handles])


@dataclasses.dataclass(frozen=True)
class Unclean:
    """A handle whose last hand-over did not prove that the handle is clean.

    The device is identified by its serial number, or by product and ports, or
    by product and address.
    """

    handle_address: str
    device_address: str
    serial: str
    ids: str
    #: [accel] handover when it was released: 'none' or 'reset'; 'not shown'
    #: (drivers.handover): it was cleaned, and its memory was not shown to be
    #: clear
    policy: str
    #: when, UTC, as 2026-11-22T02:17:43+00:00
    since: str = dataclasses.field(default='', compare=False)
    #: Device.ports of its device
    ports: str = ''

    @property
    def card(self) -> model.CardKey:
        return model.CardKey(
            self.device_address, self.serial, self.ids, self.ports)


class Withheld(NamedTuple):
    """A hold as of nova-compute's last report (inventory.shown)."""

    device: str
    #: index of the region; None for the whole card
    region: int | None
    #: '' for all handles
    handle_type: str
    handle_address: str
    #: value of inventory.holds.Kind
    kind: str
    reason: str
    #: UTC, as 2026-11-22T02:17:43+00:00
    since: str


#: in a new store, until nova-compute has found the devices
EVERYTHING = Unsettled()


class Reserved(NamedTuple):
    """A row of inventory.ledger: the reserved amounts of an inventory."""

    #: the amount that the operator reserves
    operators: int
    #: the value that nova_accel wrote last
    value: int
    #: the value in Placement before a write that is not confirmed
    before: int | None = None
