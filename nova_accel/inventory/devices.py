# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The state of the devices: one owner, one lock.

A device's health combines the report of its driver with fences, which are
nova_accel's own reasons to withhold it.

=================  =======================================  ==================
state of a device  comes by                                 goes by
=================  =======================================  ==================
reported OK        adopt() of a sound device                adopt(), gone()
reported           adopt() of one with a defect             adopt(), gone()
QUARANTINED
reported GONE      gone(): its driver does not find it      adopt(): it is
                                                            back; remove()
fence of a cause   fence()                                  unfence()
=================  =======================================  ==================

GONE is computed as such; with any fence a device that is reported OK is
QUARANTINED. A device may have fences of several causes. Some causes follow from
what the store has, and last as long as that is so. A device that is suspect
(inventory.conditions) has no fence, and servers get it last.

Any other way raises IllegalTransition.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import typing

from nova_accel.inventory import adoption
from nova_accel.inventory import fences as device_fences
from nova_accel.inventory import identity
from nova_accel import model
from nova_accel.store import claim_store

Fence = device_fences.Fence


class _Now(typing.NamedTuple):
    """What counts, by what drivers say, our fences and the store."""

    #: the generations of the table and of the store
    made_of: tuple[int, int] | None = None
    devices: dict[str, model.Device] = {}
    fences: device_fences.ByCause = {}
    #: identity.places() and identity.disabled() of these devices
    places: dict[str, tuple[identity.Where, model.Device]] = {}
    disabled: dict[str, model.Disabled] = {}


class DeviceTable(adoption.Adoption):

    def __init__(self, store: claim_store.ClaimStore, order: Iterable[str]):
        super().__init__(store, order)
        self._snapshot = _Now()

    def snapshot(self) -> dict[str, model.Device]:
        """Return the devices by address with computed health; not to be
        changed."""
        with self._lock:
            return self._now().devices

    def fences(self, address: str) -> Mapping[Fence, str]:
        """Return why no server gets a device, a clause for each cause."""
        with self._lock:
            return self._now().fences.get(address, {})

    def is_misplaced(self, address: str) -> bool:
        """Return whether a claim is about another card at this address, or
        about this card at another one."""
        return Fence.MISPLACED in self.fences(address)

    def place(self, claim: model.Claim,
              ) -> tuple[identity.Where, model.Device | None]:
        """Return where the card of a claim is: see identity.whereabouts()."""
        with self._lock:
            now = self._now()
            where, device = now.places.get(claim.uuid, (
                identity.Where.HERE, None))
            address = device.address if device else claim.device_address
            return where, now.devices.get(address)

    def disabled(self) -> dict[str, model.Disabled]:
        """See identity.disabled()."""
        with self._lock:
            return self._now().disabled

    def is_only_disabled(self, address: str) -> bool:
        """Return whether nothing else keeps servers from a device."""
        with self._lock:
            device = self._reported.get(address)
            return (device is not None and device.health is model.Health.OK
                    and self._now().fences[address].keys() == {Fence.DISABLED})

    def _now(self) -> _Now:
        # claims change what is misplaced
        made_of = self._generation, self._store.generation
        if self._snapshot.made_of != made_of:
            claims = self._store.claims()
            places = identity.places(claims, self._reported)
            disabled = identity.disabled(
                self._reported, self._store.disabled())
            found = self._all_fences(
                claims, identity.misplaced(claims, places), disabled)
            self._snapshot = _Now(made_of, {
                address: self._computed(device, found[address].values())
                for address, device in self._reported.items()
            }, found, places, disabled)
        return self._snapshot

    def of_driver(self, name: str) -> list[str]:
        """Return the addresses of a driver's devices that are not gone."""
        with self._lock:
            return [a for a, d in self._reported.items() if d.driver == name
                    and d.health is not model.Health.GONE]

    def _computed(self, device: model.Device, fences: Iterable[str],
                  ) -> model.Device:
        """:param fences: clauses."""
        regions = tuple(self._with_content(device.address, region)
                        for region in device.regions)
        if regions != device.regions:
            device = dataclasses.replace(device, regions=regions)
        suspect = self._suspects.get(device.address, '')
        if suspect != device.suspect:
            device = dataclasses.replace(device, suspect=suspect)
        if fences and device.health is not model.Health.GONE:
            reasons = [*([device.reason] if device.health
                         is not model.Health.OK else []), *fences]
            device = dataclasses.replace(
                device, health=model.Health.QUARANTINED,
                reason='; '.join(reasons))
        return device
