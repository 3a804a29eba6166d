# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Decide which handles servers can get, and why not. Pure.

From devices (what drivers report), claims (who has which handle) and holds
(why a handle is withheld: inventory.holds), offers() reports each handle:

=========  ===================================================================
FREE       a server can get it
HELD       a server has it
RELEASING  its last server has released it, and it is not clean yet
WITHHELD   no server has it, and no server can get it because of a hold
=========  ===================================================================

No other module decides this. The inventories in Placement, the choice of
devices for a build and the operator's commands use the result. It does not
depend on the server. Which server gets a FREE handle follows from
planning.reasons (whether Placement offers the handle for the request),
scheduler.cost (in which order candidates are tried) and attach.choice (which
handle of a pool, and refusals that depend on the request).

of_claims(), of_unclean(), of_groups() and of_sets() compute the holds that
follow from claims, policies and other devices. The device table
(inventory.devices) has the other holds.
"""

import collections
from collections.abc import Collection, Iterable, Iterator, Mapping
import contextlib
import enum
import typing

from nova_accel.drivers import handover
from nova_accel.drivers import rules
from nova_accel.host import pci
from nova_accel.inventory import holds
from nova_accel import model
from nova_accel.store import values
from nova_accel import text

Kind = holds.Kind
Part = tuple[str, int | None]
_State = model.ClaimState
#: the reason of the hold "waiting"
WAITS = ('it waits for you: clean it, then run nova-accel release with this '
         'handle')


class State(enum.Enum):
    FREE = 'free'
    HELD = 'held'
    RELEASING = 'releasing'
    WITHHELD = 'withheld'


class Offer(typing.NamedTuple):
    """A handle, and whether a server can get it."""

    #: as Claim.part
    part: Part
    #: None if the driver does not report it any more
    device: model.Device | None
    handle: model.AttachHandle
    state: State
    #: holds of its card, of its part and of the handle itself, including kinds
    #: that do not withhold
    all_holds: tuple[holds.Hold, ...] = ()
    #: of the server that has it, or had it last
    claim: model.Claim | None = None
    #: whether the driver reports it now
    is_shown: bool = True

    @property
    def counts(self) -> bool:
        """Return whether the total in Placement includes the handle: it is
        free, allocated or being released, and no hold of the handle itself
        withholds it."""
        return self.state is not State.WITHHELD and not any(
            hold.handle and hold.kind.withholds for hold in self.all_holds)

    @property
    def is_fit(self) -> bool:
        """Return whether the handle counts, and its card and part have no hold
        that withholds."""
        return self.counts and not any(
            hold.kind.withholds for hold in self.all_holds)

    @property
    def is_used(self) -> bool:
        """Return whether a server has the handle, or the handle is not clean
        after its last server."""
        return self.state is State.HELD or self.has(Kind.NOT_CLEANED)

    def has(self, kind: holds.Kind) -> bool:
        return any(hold.kind is kind for hold in self.all_holds)


class Offers:
    """The handles of a host by part, and the holds of each part.

    Computes the offers of a part when they are read: a build reads few parts
    of a host with many regions.
    """

    def __init__(self, devices: Mapping[str, model.Device],
                 claims: Iterable[model.Claim],
                 found: Iterable[holds.Hold]):
        self._devices = devices
        self._of_card: dict[str, list[holds.Hold]] = (
            collections.defaultdict(list))
        self._of_handle: dict[model.AttachHandle, list[holds.Hold]] = (
            collections.defaultdict(list))
        self._claims = {claim.handle: claim for claim in claims}
        self._claimed: dict[Part, list[model.Claim]] = (
            collections.defaultdict(list))
        for claim in self._claims.values():
            self._claimed[claim.part].append(claim)
        #: as drivers report them
        self._handles: dict[Part, Collection[model.AttachHandle]] = {}
        for device in devices.values():
            # inventory.providers reports a device with an unsupported type
            with contextlib.suppress(TypeError, AttributeError):
                for part, shown in parts(device):
                    self._handles[part] = tuple(shown.handles)
        self.withhold(dict.fromkeys(found))

    def _offer(self, part: Part, handle: model.AttachHandle,
               common: tuple[holds.Hold, ...], claim: model.Claim | None,
               is_shown: bool = True) -> Offer:
        own = self._of_handle.get(handle)
        found = (*common, *own) if own else common
        if claim and claim.state is _State.DELETING:
            state = State.RELEASING
        elif claim and not claim.waits:
            state = State.HELD
        elif found and any(hold.kind.withholds for hold in found):
            state = State.WITHHELD
        else:
            state = State.FREE
        return Offer(part, self._devices.get(part[0]), handle, state, found,
                     claim, is_shown)

    def of(self, part: Part) -> list[Offer]:
        """Return the handles of a part, including claimed ones that the driver
        does not report now."""
        handles = self._handles.get(part, ())
        common = self.holds_of(part)
        return [
            *(self._offer(part, handle, common, self._claims.get(handle))
              for handle in handles),
            *(self._offer(part, claim.handle, common, claim, is_shown=False)
              for claim in self._claimed.get(part, ())
              if claim.handle not in handles
              and not any(claim.handle in others
                          for others in self._handles.values()))]

    def all(self) -> Iterator[Offer]:
        for part in self._handles | self._claimed:
            yield from self.of(part)

    def free(self, part: Part) -> list[model.AttachHandle]:
        """Return the handles of a part that servers can get."""
        return [offer.handle for offer in self.of(part)
                if offer.state is State.FREE]

    def all_wait(self, found: Iterable[Offer]) -> tuple[model.Claim, ...]:
        """Return the claims of handles, the oldest first, if all handles wait
        for the operator to release them. Otherwise return ()."""
        waiting = {offer.handle if offer.has(Kind.WAITING) else None
                   for offer in found}
        if None in waiting:
            return ()
        return tuple([claim for handle, claim in self._claims.items()
                      if handle in waiting])

    def holds_of(self, part: Part) -> tuple[holds.Hold, ...]:
        """Return the holds that apply to all handles of a part."""
        found = self._of_card.get(part[0])
        return tuple([hold for hold in found if hold.region in (
            None, part[1])]) if found else ()

    def withheld_by(self, part: Part) -> tuple[holds.Hold, ...]:
        """Return the holds that withhold a whole part."""
        return tuple([hold for hold in self.holds_of(part)
                      if hold.kind.withholds])

    def why(self, part: Part) -> tuple[holds.Hold, ...]:
        """Return all holds of a part and of its handles, including kinds that
        do not withhold."""
        return tuple(dict.fromkeys((*self.holds_of(part), *(
            hold for offer in self.of(part) for hold in offer.all_holds))))

    def all_holds(self) -> set[holds.Hold]:
        return {hold for of in (self._of_card, self._of_handle)
                for found in of.values() for hold in found}

    def withhold(self, found: Iterable[holds.Hold]) -> None:
        """Add holds."""
        for hold in found:
            if hold.handle:
                self._of_handle[hold.handle].append(hold)
            else:
                self._of_card[hold.device].append(hold)


def offers(devices: Mapping[str, model.Device],
           claims: Iterable[model.Claim], found: Iterable[holds.Hold],
           sets: Iterable[Collection[str]] = ()) -> Offers:
    """Return each handle of a host as FREE, HELD, RELEASING or WITHHELD.

    :param claims: claims of servers, and claims of handles that wait for the
        operator.
    :param found: all holds except those of of_groups() and of_sets().
    :param sets: addresses of devices that are allocated together.
    """
    result = Offers(devices, claims, found)
    result.withhold([*of_groups(result, devices, sets)])
    result.withhold(of_sets(result, devices, sets))
    return result


def parts(device: model.Device,
          ) -> Iterator[tuple[Part, model.Device | model.Region]]:
    """Yield the parts of a device that have handles: the device and its
    regions."""
    yield (device.address, None), device
    for region in device.regions:
        yield (device.address, region.index), region


def of_claims(devices: Mapping[str, model.Device],
              claims: Iterable[model.Claim],
              unallocated: Collection[str] = ()) -> Iterator[holds.Hold]:
    """Yield the holds that follow from claims.

    :param unallocated: UUIDs of claims without an allocation in Placement.
    """
    taken: dict[Part, set[model.AttachHandle]] = collections.defaultdict(set)
    for claim in claims:
        taken[claim.part].add(claim.handle)
        if claim.waits:
            yield _of_claim(
                Kind.WAITING, claim, WAITS, text.to_second(claim.since))
        elif claim.state is _State.DELETING:
            yield _of_release(claim)
        if claim.uuid in unallocated:
            yield _of_claim(Kind.UNALLOCATED, claim, (
                f'server {claim.holder} has it, and its allocation is missing '
                f'in Placement'))
    for part, found in taken.items():
        device = devices.get(part[0])
        for key, shown in parts(device) if device else ():
            if key == part and _overlaps(shown, part[0], found):
                names = ', '.join(sorted(handle.address for handle in found))
                yield holds.Hold(
                    Kind.OVERLAP, part[0],
                    f'a server has or had {names}, and a card is given '
                    f'either as a whole or by its VFs', part[1])


def _overlaps(part: model.Device | model.Region, card: str,
              taken: Collection[model.AttachHandle]) -> bool:
    """Return whether claimed handles block all handles that a part has now,
    because they are other handles of the same hardware.

    A card can be claimed as a whole or by its VFs, and VFs can be grouped in
    different ways. For example, a boot of the host removes the VFs, and the
    guest of the physical function could then read data that the server of a VF
    left in the card.

    :param card: address of the device.
    :param taken: handles of the claims.
    """
    now = {function: handle.address for handle in part.handles
           for function in handle.functions}
    return (not set(part.handles).issuperset(taken) and any(
        handle.address == card for handle in (*taken, *part.handles))) or any(
        now.get(function, handle.address) != handle.address
        for handle in taken for function in handle.functions)


def _of_claim(kind: Kind, claim: model.Claim, reason: str,
              since: str = '') -> holds.Hold:
    return holds.Hold(kind, claim.device_address, reason, claim.region_index,
                      claim.handle, since)


def _of_release(claim: model.Claim) -> holds.Hold:
    reason = f'it is being cleaned after server {claim.holder}'
    if claim.region_index is None or claim.error:
        return _of_claim(Kind.NOT_CLEANED, claim, claim.error or reason)
    return holds.Hold(Kind.CLEANING, claim.device_address, reason,
                      claim.region_index)


def of_unclean(devices: Iterable[model.Device],
               rows: Collection[values.Unclean]) -> Iterator[holds.Hold]:
    """Yield the holds of handles that must be cleaned under the present
    policy.

    :param rows: handles, with the policy that applied to their last release.
    """
    for device in devices if rows else ():
        of_card = [row for row in rows if device.is_of(row.card)]
        for part, shown in parts(device) if of_card else ():
            for handle in shown.handles:
                mine = [row for row in of_card if handle_at(
                    row, device.address) == handle.address]
                had = {row.policy for row in mine}
                policy = handover.policy(device, handle.address)
                if handover.demands_proof(device, handle.address):
                    reason = ('its memory was not shown to be clear after its '
                              'last server, and the policy is shown now')
                else:
                    had.discard(handover.NOT_SHOWN)
                    reason = (f'its last server released it under the policy '
                              f'{min(had, default="")}, and the policy is '
                              f'{policy.value} now')
                if had and (policy is handover.Policy.CLEAR
                            or policy is handover.Policy.RESET
                            and handover.Policy.NONE.value in had):
                    yield holds.Hold(
                        Kind.UNCLEAN, device.address, reason,
                        part[1], handle, min(row.since for row in mine))


def handle_at(row: values.Unclean, address: str) -> str:
    """Return the address of the handle of a row.

    :param address: the present address of the handle's device.
    """
    if address == row.device_address:
        return row.handle_address
    return pci.moved(row.handle_address, row.device_address, address)


def of_groups(found: Offers, devices: Mapping[str, model.Device],
              sets: Iterable[Collection[str]]) -> Iterator[holds.Hold]:
    """Yield a hold for each free handle whose IOMMU group contains handles
    that another server has or could get. The kernel gives a group to one guest
    only."""
    for offer, others in rivals(found, devices, sets):
        if offer.state is State.FREE:
            yield holds.Hold(
                Kind.IOMMU_GROUP, offer.part[0],
                f'{offer.handle.address} is in one IOMMU group with '
                f'{named(others)}, and the kernel gives a group to one '
                f'guest: name them in {rules.SETS}, leave all but one out '
                f'by [accel] exclude_devices, or have ACS divide the group',
                offer.part[1], offer.handle)


def rivals(found: Offers, devices: Mapping[str, model.Device],
           sets: Iterable[Collection[str]],
           ) -> Iterator[tuple[Offer, list[Offer]]]:
    """Yield pairs of a handle and its rivals: the handles in its IOMMU group
    that another server has or could get.

    :param sets: addresses of the devices of each set.
    """
    groups = {group for device in devices.values() for group in device.groups}
    owners = {function: offer for offer in (found.all() if groups else ())
              if offer.state is not State.WITHHELD
              for function in offer.handle.addresses}
    together = {address: members for members in sets for address in members}
    for group in sorted(groups):
        there = {owners[function].handle: owners[function]
                 for function in group if function in owners}.values()
        for offer in there:
            others = [other for other in there if not _is_one_servers(
                offer, other, together.get(offer.part[0], ()))]
            if others:
                yield offer, others


def _is_one_servers(one: Offer, other: Offer, members: Collection[str]) -> bool:
    """Return whether the same server has, or will get, both handles.

    :param members: addresses of the devices in the set of the first handle's
        device; empty if the device is in no set.
    """
    if one.claim and other.claim:
        return one.claim.instance_uuid == other.claim.instance_uuid
    return one is other or one.part[0] != other.part[0] in members


def named(others: Iterable[Offer]) -> str:
    """Return a text for a sentence that lists handles and their servers."""
    return ', '.join(sorted(
        other.handle.address
        + (f' (of server {other.claim.holder})' if other.claim else '')
        for other in others))


def of_sets(found: Offers, devices: Mapping[str, model.Device],
            sets: Iterable[Collection[str]]) -> Iterator[holds.Hold]:
    """Yield a hold for each free device of a set in which another device is
    missing or not free."""
    for members in sets:
        here = {address: [offer for part, _ in parts(devices[address])
                          for offer in found.of(part) if offer.is_shown]
                for address in members if address in devices}
        others = [address for address in members if not here.get(address)
                  or any(offer.state is not State.FREE
                         for offer in here[address])]
        for address in here if others else ():
            if address not in others:
                yield holds.Hold(
                    Kind.INCOMPLETE_SET, address,
                    f'{", ".join(others)} of its set '
                    f'{"is" if len(others) == 1 else "are"} missing or not '
                    f'free')
