# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the state of the devices: reports of drivers, and holds.

The table has five parts. They share one lock (Reports.lock), and each has its
own data and a table of its transitions:

===================  =========================================================
reports.Reports      what drivers reported last
holds.Withheld       holds that nova-compute sets and lifts
contents.Contents    what the regions of FPGAs carry
adoption.Shared      devices that several drivers find
adoption.Adoption    which card is at an address
===================  =========================================================

The holds of devices follow from these and the store, and so do the handles that
servers can get (inventory.offers).
"""

from collections.abc import Collection, Iterable, Iterator
import dataclasses
import typing

from nova_accel.drivers import rules
from nova_accel.inventory import adoption
from nova_accel.inventory import contents
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel.inventory import offers
from nova_accel.inventory import reports
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values

LOG = logging.getLogger(__name__)
Kind = holds.Kind

_OWNER_UNKNOWN = (
    'it may contain data of a server, and nova-compute finds out which: see '
    'its log')
_RETURNED = ('it may contain data of a server that is gone, and is cleaned '
             'first')
# without the operator's reason, because owners of servers read it
_DISABLED = {Kind.DISABLED: 'the operator has disabled it',
             Kind.DEFECTIVE: 'nova-compute has disabled it',
             Kind.PLANNED: 'the operator will disable it at {}'}


class _Now(typing.NamedTuple):
    """The facts derived from the five parts and the store."""

    #: the generations of the table and of the store
    made_of: tuple[int, int] | None = None
    devices: dict[str, model.Device] = {}
    holds_of: dict[str, tuple[holds.Hold, ...]] = {}
    #: identity.places() and identity.disabled() for these devices
    places: dict[str, tuple[identity.Where, model.Device]] = {}
    disabled: dict[str, tuple[values.Disabled, ...]] = {}
    #: handles that servers have, or that are being released
    claimed: frozenset[model.AttachHandle] = frozenset()
    #: addresses of the devices of these claims
    claimed_devices: frozenset[str] = frozenset()


class DeviceTable:

    def __init__(self, store: claim_store.ClaimStore, order: Iterable[str]):
        """
        :param order: names of the drivers; an earlier one has precedence.
        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        self._store = store
        self.reports = reports.Reports(store)
        self.withheld = holds.Withheld(self.reports)
        self.contents = contents.Contents(self.reports, store)
        self.shared = adoption.Shared(self.reports, self.withheld, order)
        self.adoption = adoption.Adoption(
            self.reports, self.contents, self.shared, store)
        self._snapshot = _Now()
        #: UUIDs of claims without an allocation in Placement, which could
        #: allocate their devices to others: offered() withholds them
        self.unallocated: frozenset[str] = frozenset()
        #: the inputs of the last offered(), and its result
        self._offered: tuple[tuple | None, offers.Offers] = (
            None, offers.Offers({}, (), ()))
        self._once = logging.Once()

    @property
    def generation(self) -> int:
        """Return a number that changes with each change of snapshot()."""
        return self.reports.generation

    def snapshot(self) -> dict[str, model.Device]:
        """Return the devices by address, as their drivers reported them last.

        Do not change the dict.
        """
        return self._now().devices

    def holds_of(self, address: str) -> tuple[holds.Hold, ...]:
        """Return the holds of a device and its parts, except those that
        inventory.offers computes from claims, policies and other devices."""
        return self._now().holds_of.get(address, ())

    def all_holds(self) -> list[holds.Hold]:
        return [hold for found in self._now().holds_of.values()
                for hold in found]

    def kinds(self, address: str) -> set[holds.Kind]:
        """Return the kinds of holds that withhold the whole card."""
        return {hold.kind for hold in self.withheld_by(address)}

    def withheld_by(self, address: str) -> list[holds.Hold]:
        """Return the holds of a device that withhold the whole card."""
        return [hold for hold in self.holds_of(address)
                if hold.scope is holds.Scope.CARD and hold.kind.withholds]

    def earlier_traits(self) -> dict[str, tuple[str, ...]]:
        return {address: self.reports.notes(address).earlier_traits
                for address in self.snapshot()}

    def is_misplaced(self, address: str) -> bool:
        """Return whether a claim is for another card at this address, or for
        this card at another address."""
        return Kind.MISPLACED in self.kinds(address)

    def place(self, claim: model.Claim,
              ) -> tuple[identity.Where, model.Device | None]:
        """Return whether the card of a claim is at its address, and the device
        where the card is; see identity.whereabouts()."""
        now = self._now()
        where, device = now.places.get(claim.uuid, (identity.Where.HERE, None))
        address = device.address if device else claim.device_address
        return where, now.devices.get(address)

    def moved(self) -> dict[str, str]:
        """Return uuid of a claim -> present address of its card, for claims
        whose cards are at other addresses now."""
        return {uuid: device.address for uuid, (where, device)
                in self._now().places.items() if where is identity.Where.MOVED}

    def disabled(self) -> dict[str, tuple[values.Disabled, ...]]:
        """Return address -> rows, for the devices that are disabled now. Rows
        whose planned time has not come are omitted."""
        return {address: found
                for address, rows in self._now().disabled.items()
                if (found := tuple(row for row in rows if not row.is_planned))}

    def planned_work(self) -> dict[str, values.Disabled]:
        """Return address -> the row with the earliest planned time at which
        the operator drains the device. The time may have passed."""
        return {address: min(found, key=lambda row: row.at)
                for address, rows in self._now().disabled.items()
                if (found := [row for row in rows if row.at])}

    @property
    def claimed(self) -> frozenset[model.AttachHandle]:
        return self._now().claimed

    def is_claimed(self, address: str) -> bool:
        """Return whether a claim is for a device or a part of it."""
        return address in self._now().claimed_devices

    def offered(self, ends: Collection[str] = (),
                moved: Iterable[model.Claim] = ()) -> offers.Offers:
        """Return all handles of the host, and why servers cannot get some of
        them.

        :param ends: UUIDs of claims that end soon, and are ignored.
        :param moved: changed claims that are not stored yet. They replace the
            stored claims with the same UUIDs.
        """
        moving = {claim.uuid: claim for claim in moved}
        if ends or moving:
            return self._offers([
                moving.get(claim.uuid, claim)
                for claim in self._store.all_claims()
                if claim.uuid not in ends])
        # read first, so a later change causes another computation
        made_of = (self._store.generation, self.generation, self.unallocated)
        known, offered = self._offered
        if known != made_of:
            offered = self._offers(self._store.all_claims())
            self._log_rivals(offered)
            self._offered = made_of, offered
        return offered

    def _offers(self, claims: Collection[model.Claim]) -> offers.Offers:
        found = self.snapshot()
        return offers.offers(found, claims, (
            *self.all_holds(),
            *offers.of_claims(found, claims, self.unallocated),
            *offers.of_unclean(found.values(), self._store.unclean())),
            rules.sets())

    def _log_rivals(self, offered: offers.Offers) -> None:
        found = {hold.handle: hold.reason for hold in offered.all_holds()
                 if hold.kind is holds.Kind.IOMMU_GROUP}
        found |= {
            offer.handle: f'{offers.named([offer])} is in one IOMMU group '
                          f'with {offers.named(others)}, and only one of '
                          f'these servers can run at a time'
            for offer, others in self.rivals(offered)}
        for handle, why in found.items():
            self._once.log(('group', handle), LOG.warning, '%s', why)
        self._once.only('group', found)

    def rivals(self, offered: offers.Offers | None = None):
        """Return the result of offers.rivals() for the devices of this host:
        handles that share an IOMMU group with handles of other servers."""
        return offers.rivals(offered or self.offered(), self.snapshot(),
                             rules.sets())

    def remove(self, address: str) -> None:
        """Remove an absent device and its holds; see Reports.remove()."""
        with self.reports.lock:
            self.reports.remove(address)
            self.withheld.drop(address)
        self.reports.save()

    def _now(self) -> _Now:
        with self.reports.lock:
            # claims change which devices are misplaced
            made_of = self.reports.generation, self._store.generation
            if self._snapshot.made_of != made_of:
                self._snapshot = self._compute(made_of)
            return self._snapshot

    def _compute(self, made_of: tuple[int, int]) -> _Now:
        reported = self.reports.devices
        claims = self._store.claims()
        gone = self.reports.gone()
        places = identity.places(self._store.all_claims(), reported, gone)
        disabled = identity.disabled(reported, (
            *self._store.disabled(), *self._store.planned()), gone)
        misplaced = identity.misplaced(claims, places)
        claimed = frozenset(claim.device_address for claim in claims)
        handles = frozenset(claim.handle for claim in claims)
        found = {
            address: tuple([
                *_reported(device, self.reports.notes(address)),
                # the guest of a server that was claimed since has it
                *(hold for hold in self.withheld.of(address)
                  if hold.kind is not Kind.IN_USE
                  or hold.handle not in handles),
                *self._whose(device, misplaced.get(address), claimed),
                *_disabled(address, disabled.get(address, ()))])
            for address, device in reported.items()}
        return _Now(made_of, {
            address: self._with_contents(device)
            for address, device in reported.items()
        }, found, places, disabled, handles, claimed)

    def _whose(self, device: model.Device, misplaced: str | None,
               claimed: frozenset[str]) -> Iterator[holds.Hold]:
        """Yield the hold of a device that may contain data of a server or of
        an unknown program. If several kinds apply, yield the first only."""
        rows = [row for row in self._store.unsettled() if row.means(device)]
        if misplaced:
            yield holds.Hold(Kind.MISPLACED, device.address, misplaced)
        elif any(row.by_address for row in rows):
            yield holds.Hold(
                Kind.OWNER_UNKNOWN, device.address, _OWNER_UNKNOWN,
                since=min(row.since for row in rows if row.by_address))
        elif rows:
            yield holds.Hold(Kind.RETURNED, device.address, _RETURNED,
                             since=min(row.since for row in rows))
        elif device.foreign and device.address not in claimed:
            yield holds.Hold(Kind.FOREIGN, device.address, device.foreign)

    def _with_contents(self, device: model.Device) -> model.Device:
        regions = tuple(
            self.contents.with_content(device.address, region)
            for region in device.regions)
        if regions != device.regions:
            device = dataclasses.replace(device, regions=regions)
        return device


def _reported(device: model.Device,
              notes: values.Notes) -> Iterator[holds.Hold]:
    if notes.gone:
        yield holds.Hold(holds.kind_of_gone(notes), device.address, notes.gone,
                         since=notes.gone_since)
    elif device.health is not model.Health.OK:
        yield holds.Hold(Kind.UNUSABLE, device.address, device.reason)
    for region in device.regions:
        if region.health is not model.Health.OK:
            yield holds.Hold(Kind.UNUSABLE, device.address, region.reason,
                             region.index)


def _disabled(address: str, rows: Iterable[values.Disabled],
              ) -> Iterator[holds.Hold]:
    for row in rows:
        kind = holds.of_disabled(row)
        yield holds.Hold(
            kind, address, _DISABLED[kind].format(row.at),
            since=row.since if kind is Kind.PLANNED else row.at or row.since)
