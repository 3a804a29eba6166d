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

===================  ============================  ===========================
content of a region  comes by                      goes by
===================  ============================  ===========================
as the driver reads  forget(), ended(report)       begin(), set_loaded()
being programmed     begin(); durably unknown,     programmed(), ended()
                     with its origin
known                programmed(), set_loaded()    begin(), forget()
unknown              ended(report=False), or the   begin(), forget(),
                     process was killed meanwhile  set_loaded()
===================  ============================  ===========================

Each content has an origin (model.Region.origin). As the driver reads: the
operator's from the start, then what forget() was given, or the project of a
server that was found to be able to load what it likes (note_open()). Known:
that of the image; where the driver reads another function, as after a power
cut, the project's, because its function can answer as any other; the
operator's is not known then. Being programmed, unknown, and as the driver
reads after ended(): a project's where the image is, or where the region had a
project's content before, and not known where both are the operator's: the card
may have taken all of the image, a part or nothing of it.

Which card is at an address is found out when it is adopted: _place().

================================  ============================================
what is adopted at an address     what is known of it
================================  ============================================
the card that was there, or one   what was known there
that cannot be distinguished
one from another address, or one  its record, the origins of its contents, and
that returns                      all that the store says of it; not what else
                                  its regions carry
a new one in place of another     nothing, nor what its regions carry
a new one where none was          nothing; its regions carry the operator's
the same, without serial number,  nothing; its regions carry a project's
while a project's content is on
a card that is away
one with the serial number of     the same as of that one, until it is seen
another that is here              whether both are: then each is known by its
                                  address and product
================================  ============================================

Any other way raises IllegalTransition. While a region is being programmed, or
where a change came in between, what a scan saw of the device is discarded:
every look takes a ticket() before it begins.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
import enum
import itertools
import typing

from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.inventory import identity
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store

LOG = logging.getLogger(__name__)

Key = tuple[str, int]
_UNSETTLED = ('it may have data of a server, and it is being found out whose, '
              'see the log of nova-compute')
# not why: owners of servers read it
_DISABLED = 'the operator has disabled it'
_OF_HEALTH = 'nova-compute has disabled it'


class Fence(enum.Enum):
    """Why a device that its driver finds is given to no server."""

    #: its driver failed, or its scan did
    DISCOVERY = 'discovery'
    #: a call about it does not return, whatever the call is for
    HANGS = 'hangs'
    #: it is being recovered
    RECOVERY = 'recovery'
    #: one of Nova's options has it as well
    CONFLICT = 'conflict'
    #: another driver has one of its functions
    SHARED = 'shared'
    #: a guest has a part of it without a claim
    GUEST = 'guest'
    #: what it tells of its health (nova_accel.health)
    HEALTH = 'health'
    # the others follow from the store, and come and go with what it has
    #: a claim is about another card at its address, or about this one at
    #: another address (inventory.identity)
    MISPLACED = 'misplaced'
    #: it may have data of a server (attach.settling)
    UNSETTLED = 'unsettled'
    #: it has something that nova_accel has not put there (Device.foreign), and
    #: no server has a claim on it
    FOREIGN = 'foreign'
    #: nova-accel disable, or inventory.conditions, until nova-accel enable
    DISABLED = 'disabled'


_Fences = dict[str, dict[Fence, str]]


class _Now(typing.NamedTuple):
    """What counts, by what drivers say, our fences and the store."""

    #: the generations of the table and of the store
    made_of: tuple[int, int] | None = None
    devices: dict[str, model.Device] = {}
    fences: _Fences = {}
    #: identity.places() and identity.disabled() of these devices
    places: dict[str, tuple[identity.Where, model.Device]] = {}
    disabled: dict[str, model.Disabled] = {}


class DeviceTable:

    def __init__(self, store: claim_store.ClaimStore,
                 order: Iterable[str]):
        """
        :param order: names of the drivers; an earlier one has precedence.
        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        self._store = store
        self._order = {name: number for number, name in enumerate(order)}
        # guards all that follows
        self._lock = locks.Lock('devices')
        # held while the store is written, always taken before _lock
        self._writing = locks.Lock('changes', reentrant=True)
        self._reported: dict[str, model.Device] = dict(store.devices())
        #: (function, type of region) -> name, by the operator's images
        self._names: dict[tuple[str, str | None], str] = {}
        self._saved = dict(self._reported)
        self._once = logging.Once()
        self._fences: dict[str, dict[Fence, str]] = {}
        #: address -> why servers get it last
        self._suspects: dict[str, str] = {}
        self._programming: set[Key] = set()
        #: regions that are being cleaned, as they were before
        self._returning: dict[Key, model.Region] = {}
        #: address -> the two drivers that find it
        self._shared: dict[str, tuple[str, str]] = {}
        self._clock = itertools.count(1)
        #: address -> ticket of the newest look or change that counts
        self._since: dict[str, int] = {}
        self._generation = 0
        self._snapshot = _Now()

    # Reading

    @property
    def generation(self) -> int:
        """Another number whenever snapshot() would have changed."""
        with self._lock:
            return self._generation

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
            fences = self._all_fences(
                claims, identity.misplaced(claims, places), disabled)
            self._snapshot = _Now(made_of, {
                address: self._computed(device, fences[address].values())
                for address, device in self._reported.items()
            }, fences, places, disabled)
        return self._snapshot

    def _all_fences(self, claims, misplaced, disabled) -> _Fences:
        unsettled = self._store.unsettled()
        claimed = {claim.device_address for claim in claims}
        found: _Fences = {}
        for address, device in self._reported.items():
            fences = found[address] = {**self._fences.get(address, {})}
            if address in misplaced:
                fences[Fence.MISPLACED] = misplaced[address]
            elif any(row.means(device) for row in unsettled):
                fences[Fence.UNSETTLED] = _UNSETTLED
            elif device.foreign and address not in claimed:
                # while it is found out whose it is, it may be a server's
                fences[Fence.FOREIGN] = device.foreign
            if address in disabled:
                fences[Fence.DISABLED] = (
                    _DISABLED if disabled[address].is_operators
                    else _OF_HEALTH)
        return found

    def reported(self, address: str) -> model.Device | None:
        """Return what the driver said last, for the driver's next look."""
        with self._lock:
            return self._reported.get(address)

    def record_of(self, serial: str,
                  ) -> tuple[tuple[str, str], ...] | None:
        """Return the record of the device with a serial number, wherever it
        was; None for an unknown one."""
        with self._lock:
            known = self._known(serial, self._at(serial))
            return known.record if known else None

    def of_driver(self, name: str) -> list[str]:
        """Addresses of the devices of a driver that are not gone."""
        with self._lock:
            return [a for a, d in self._reported.items() if d.driver == name
                    and d.health is not model.Health.GONE]

    def is_programming(self, address: str) -> bool:
        with self._lock:
            return self._is_programming(address)

    @property
    def shared(self) -> dict[str, tuple[str, str]]:
        """Address -> the drivers that both find it, the owner first."""
        with self._lock:
            return dict(self._shared)

    def _is_programming(self, address):
        return any(a == address for a, _ in self._programming)

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

    def _with_content(self, address: str, region: model.Region,
                      ) -> model.Region:
        key = (address, region.index)
        function, image, name = region.function_uuid, None, None
        origin: str | None = model.OPERATOR
        loaded = self._store.loaded().get(key)
        if loaded:
            origin = (None if loaded.origin == model.OPERATOR
                      else loaded.origin)
            if loaded.content is None:
                function = None
            elif loaded.function_uuid == function:
                image, name = loaded.bitstream_id, loaded.function_name
                origin = loaded.origin
            elif not (loaded.function_uuid or loaded.bitstream_id):
                origin = loaded.origin
        if function and name is None and origin == model.OPERATOR:
            name = self._names.get((function, region.region_type_uuid))
        if (function, image, name, origin) == (
                region.function_uuid, region.bitstream_id,
                region.function_name, region.origin):
            return region
        return dataclasses.replace(
            region, function_uuid=function, bitstream_id=image,
            function_name=name, origin=origin)

    def content_of(self, address: str, index: int, image_id: str) -> str:
        """Return the hash of the content of an image that a region had last, as
        it was recorded; '' where the region had another one, or none."""
        loaded = self._store.loaded().get((address, index))
        return (loaded.content or '' if loaded
                and loaded.bitstream_id == image_id else '')

    def is_unknown(self, address: str, index: int | None) -> bool:
        """Return whether what a region carries is not known, as while a
        programming hangs, or after one whose end was not seen."""
        return index is not None and self._store.loaded().get(
            (address, index), model.AS_READ).content is None

    # What drivers say

    def ticket(self) -> int:
        """To be taken before a scan of the hardware begins."""
        with self._lock:
            return next(self._clock)

    def invalidate(self, address: str) -> None:
        """Discard results of scans of this card that began before now."""
        with self._lock:
            self._since[address] = next(self._clock)

    def _is_stale(self, address, ticket) -> bool:
        return (self._is_programming(address)
                or ticket < self._since.get(address, 0))

    def adopt(self, device: model.Device, ticket: int) -> bool:
        """Take over what a driver says of a device.

        :returns: False where that does not count: it is older than what is
            known, or an earlier driver has the device.
        """
        address = device.address
        known = self._place(device)
        with self._lock:
            if self._is_stale(address, ticket):
                return False
            before = self._reported.get(address)
            if before and before.driver != device.driver and (
                    before.health is not model.Health.GONE):
                owner, other = sorted(
                    (before.driver, device.driver),
                    key=lambda n: self._order.get(n, len(self._order)))
                self._note_shared(address, owner, other)
                if owner != device.driver:
                    return False
            self._since[address] = ticket
            device = self._with_record(device, before, known)
            if before:
                device = _with_earlier_traits(device, before)
            if before and not identity.is_other_card(before, device):
                device = self._with_past(dataclasses.replace(
                    device, marks=before.marks), before)
            else:
                device = dataclasses.replace(device, marks=())
            if before != device:
                self._reported[address] = device
                self._generation += 1
                self._fence_shared()
            return True

    def _with_record(self, device, before, known):
        """Return the device with its record from before, where what the driver
        reads now may be the work of a server."""
        same = before and not identity.is_other_card(before, device)
        if same or not known:
            known = before if same else None
        if (known and known.record != device.record
                and self._may_be_changed(device)
                # the operator takes it as it is
                and handover.policy(device)
                is not handover.Policy.NONE):
            device = dataclasses.replace(device, record=known.record)
        return device

    def _with_past(self, device, before):
        """Return the device as it is kept while a server has a claim on it: a
        region that the server could reprogram may carry what it loaded
        then."""
        were_open = {r.index for r in before.regions if r.guest_can_reprogram}
        if not any(r.index in were_open and not r.guest_can_reprogram
                   for r in device.regions) or not any(
                       c.device_address == device.address
                       for c in self._store.claims()):
            return device
        return dataclasses.replace(device, regions=tuple(
            dataclasses.replace(r, guest_can_reprogram=(
                r.guest_can_reprogram or r.index in were_open))
            for r in device.regions))

    def _may_be_changed(self, device) -> bool:
        """Return whether a server has or had the device, which is not clean
        yet."""
        return any(c.card.means(device.card) for c in self._store.claims()
                   ) or any(row.means(device)
                            for row in self._store.unsettled())

    def _place(self, device: model.Device) -> model.Card | None:
        """Find out which card is at an address, and write it down where it is
        another one than before.

        :returns: what is known of it, where it comes from another address.
        """
        address = device.address
        with self._writing:
            with self._lock:
                before = self._reported.get(address)
                is_other = bool(
                    before and identity.is_other_card(before, device))
                stays = before and device.serial == (
                    before.serial or self._store.serials().get(address, ''))
                same = [] if stays else self._at(device.serial, address)
                known = None if stays else self._known(device.serial, same)
                may_be_moved = (not before and not known
                                and self._may_be_moved(device))
                present = list(filter(self._is_present, same))
            if not (is_other or known or may_be_moved):
                return None
            origins = known.origins if known else {}
            loaded = {region.index: model.Loaded(
                None, None, None, '', model.SOME_PROJECT if may_be_moved
                else _not_the_operators(origins.get(region.index)))
                for region in device.regions}
            self._store.place(device, not present, loaded)
            with self._lock:
                # what is gone from another address is this card
                for other in same if not present else ():
                    if other in self._reported:
                        self._reported[other] = dataclasses.replace(
                            self._reported[other], serial='')
                self._generation += 1
        self._say_both(device, present)
        return known

    def _at(self, serial: str, but_at: str = '') -> list[str]:
        """Return the addresses of cards with a serial number, also of those
        that do not tell their own now."""
        serials = {**self._store.serials(), **{
            address: device.serial for address, device
            in self._reported.items() if device.serial}}
        return [address for address, other in serials.items()
                if other == serial and address != but_at]

    def _is_present(self, address):
        device = self._reported.get(address)
        return (device is not None
                and device.health is not model.Health.GONE)

    def _known(self, serial: str, addresses: Iterable[str],
               ) -> model.Card | None:
        """Return what is known of the card with a serial number.

        :param addresses: of _at(), with self._lock.
        """
        for address in addresses:
            there = self._reported.get(address)
            return model.Card(
                serial, there.ids if there else '',
                there.record if there else (),
                {index: loaded.origin for (a, index), loaded
                 in self._store.loaded().items() if a == address})
        return next((card for card in self._store.away()
                     if serial and card.serial == serial), None)

    def _say_both(self, device, present):
        # where this process has looked: a card that was moved is seen at its
        # new place first
        for other in present:
            if other in self._since:
                LOG.error(
                    'Devices %s and %s both say that their serial number is '
                    '%s: nova-compute tells them by their addresses, and does '
                    'not notice if they are exchanged; ask their vendor for '
                    'other firmware', other, device.address, device.serial)

    def _may_be_moved(self, device) -> bool:
        """Return whether a card without serial number may be one from another
        address with what a project has loaded."""
        if device.serial:
            return False
        for (address, _), loaded in self._store.loaded().items():
            # what is gone is noted before what has come is scanned
            there = self._reported.get(address)
            if address != device.address and _is_a_projects(loaded.origin) and (
                    there is None or not self._is_present(address)
                    and not there.serial
                    and not identity.is_other_card(there, device)):
                return True
        return any(any(map(_is_a_projects, card.origins.values()))
                   and not model.are_other_products(card.ids, device.ids)
                   for card in self._store.away())

    def gone(self, address: str, driver: str, ticket: int) -> str:
        """Return a driver does not find a device any more.

        :returns: the driver that found it as well, and did not get it from
            this one; '' without one.
        """
        with self._lock:
            device = self._reported.get(address)
            if (device is None or device.driver != driver
                    or device.health is model.Health.GONE
                    or self._is_stale(address, ticket)):
                return ''
            LOG.warning('Device %s is not found any more', address)
            self._since[address] = ticket
            self._reported[address] = dataclasses.replace(
                device, health=model.Health.GONE,
                reason='its driver does not find it any more')
            _, other = self._shared.pop(address, ('', ''))
            self._generation += 1
            self._fence_shared()
            return other

    def remove(self, address: str) -> None:
        """Nothing of a device that is gone is left anywhere.

        :raises IllegalTransition: it is not gone.
        """
        with self._lock:
            device = self._reported.get(address)
            if device is None:
                return
            if device.health is not model.Health.GONE:
                raise exception.IllegalTransition(
                    f'{address} cannot be removed, because it is '
                    f'{device.health.value}.')
            del self._reported[address]
            self._fences.pop(address, None)
            self._generation += 1
        self.save()

    def _note_shared(self, address, owner, other):
        if self._shared.get(address) != (owner, other):
            self._shared[address] = owner, other
            LOG.error('Device %s is found by the drivers %s and %s; the first '
                      'has it', address, owner, other)

    def _fence_shared(self):
        """The driver that finds a device has its function and those in its
        slot, of others the first driver; devices of others with it are fenced.
        """
        present = [d for d in self._reported.values()
                   if d.health is not model.Health.GONE]
        present.sort(key=lambda d: self._order.get(
            d.driver, len(self._order)))
        owners = {d.address: d.driver for d in present}
        for device in present:
            slot = device.address.rpartition('.')[0]
            for function in device.functions():
                if function.rpartition('.')[0] == slot:
                    owners.setdefault(function, device.driver)
        for device in present:
            functions = device.functions()
            others = sorted({owners.get(f, device.driver)
                             for f in functions} - {device.driver})
            if others:
                both = min(f for f in functions
                           if owners.get(f) == others[0])
                if self._fence(device.address, Fence.SHARED,
                               f'the driver {others[0]} has {both}'):
                    LOG.error('Device %s of the driver %s is fenced, because '
                              'the driver %s has %s of it as well: disable '
                              'one of the two, or narrow the rules of '
                              '[accel] pci_devices', device.address,
                              device.driver, others[0], both)
                continue
            owners.update(dict.fromkeys(functions, device.driver))
            if Fence.SHARED in self._fences.get(device.address, {}):
                self._unfence(device.address, Fence.SHARED)

    # Fences

    def fence(self, address: str, cause: Fence, reason: str) -> bool:
        """Withhold the device from all servers.

        :param reason: one clause.
        :returns: whether that is new.
        """
        with self._lock:
            return address in self._reported and self._fence(
                address, cause, reason)

    def _fence(self, address, cause, reason) -> bool:
        fences = self._fences.setdefault(address, {})
        if fences.get(cause) == reason:
            return False
        fences[cause] = reason
        self._generation += 1
        return True

    def unfence(self, address: str, cause: Fence) -> None:
        with self._lock:
            self._unfence(address, cause)

    def _unfence(self, address, cause):
        fences = self._fences.get(address, {})
        if fences.pop(cause, None) is not None:
            self._generation += 1
        if not fences:
            self._fences.pop(address, None)

    def set_suspects(self, suspects: dict[str, str]) -> None:
        """Servers get these devices last, and no others.

        :param suspects: address -> why, one clause.
        """
        with self._lock:
            if suspects != self._suspects:
                self._suspects = dict(suspects)
                self._generation += 1

    def set_mark(self, address: str, signal: str, is_so: bool) -> None:
        """Write down whether a device has one of signals.MARKS."""
        with self._lock:
            device = self._reported.get(address)
            if device is None or (signal in device.marks) == is_so:
                return
            now = {*device.marks, signal} if is_so else (
                {*device.marks} - {signal})
            self._reported[address] = dataclasses.replace(
                device, marks=tuple(sorted(now)))
            self._generation += 1
        self.save()

    # What regions carry

    def _region(self, address: str, index: int) -> model.Region:
        device = self._reported.get(address)
        region = device.find_region(index) if device else None
        if region:
            return self._with_content(address, region)
        raise exception.DeviceUnavailable(
            f'{address} region{index} cannot be programmed, because it is not '
            f'on this host any more: build the server on another.')

    def begin(self, address: str, index: int, origin: str | None) -> None:
        """Note durably that what the region carries is not known.

        Call it before the hardware is touched. Where what the region has or
        what it gets is a project's, that is the origin of what it carries
        until another programming has come to its end. Until programmed() or
        programming_failed() what scans say of the card is discarded.

        :param origin: of the image; None: Glance does not say whose it is.
        :raises IllegalTransition: the region is being programmed already.
        :raises DeviceUnavailable: the region is not on this host.
        :raises AcceleratorsUnavailable: the store cannot be written; nothing
            has changed.
        """
        key = (address, index)
        with self._writing:
            with self._lock:
                before = self._region(address, index)
                if key in self._programming:
                    raise exception.IllegalTransition(
                        f'{address} region{index} cannot be programmed while '
                        f'it is being programmed.')
            unknown = model.Loaded(
                None, None, None, None, before.origin_with(origin))
            self._store.set_loaded(address, index, unknown)
            with self._lock:
                self._programming.add(key)
                self._know(key, unknown)
        self.save()

    def programmed(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        """Note durably what was programmed and read back.

        :raises IllegalTransition: the region is not being programmed.
        :raises AcceleratorsUnavailable: the store cannot be written; the
            region ends as unknown.
        """
        with self._writing:
            self._ends((address, index))
            # a store that fails leaves the region unknown
            self._store.set_loaded(address, index, loaded)
            with self._lock:
                self._know((address, index), loaded)
        self.save()

    def ended(self, address: str, index: int, report: bool) -> None:
        """See Inventory.programming_failed()."""
        origin = self._ends((address, index))
        if report:
            self.forget(address, index, origin)

    def _ends(self, key: Key) -> str | None:
        """Return the origin of what the region carries until more is known.
        """
        with self._lock:
            if key not in self._programming:
                raise exception.IllegalTransition(
                    f'The programming of {key[0]} region{key[1]} cannot end, '
                    f'because none had begun.')
            self._programming.discard(key)
            self._since[key[0]] = next(self._clock)
            return self._store.loaded()[key].origin

    @contextlib.contextmanager
    def returning(self, address: str, index: int) -> Iterator[None]:
        """While a region is cleaned after a server.

        What the operator put there is programmed again or stays, and providers
        show it all the while: a server that asks for it is sent there, and
        waits. Content of another origin is not shown. It is not written down;
        after a crash the region is shown as it is.
        """
        key = (address, index)
        device = self.snapshot().get(address)
        mine = {r.index: r for r in device.regions} if device else {}
        if index not in mine or mine[index].origin != model.OPERATOR:
            yield
            return
        with self._lock:
            self._returning[key] = mine[index]
            self._generation += 1
        try:
            yield
        finally:
            with self._lock:
                del self._returning[key]
                self._generation += 1

    def all_returning(self) -> dict[Key, model.Region]:
        with self._lock:
            return dict(self._returning)

    def set_loaded(self, address: str, index: int,
                   loaded: model.Loaded) -> None:
        """Note durably what a region turned out to carry without programming,
        as an image under another name.

        :raises IllegalTransition: the region is being programmed.
        """
        key = (address, index)
        with self._writing:
            with self._lock:
                if key in self._programming:
                    raise exception.IllegalTransition(
                        f'The content of {address} region{index} cannot be '
                        f'noted while it is being programmed.')
            self._store.set_loaded(address, index, loaded)
            with self._lock:
                self._know(key, loaded)
                self._since[address] = next(self._clock)
        self.save()

    def name_function(self, function: str, region_type: str | None,
                      name: str | None) -> set[Key]:
        """Note in memory which name a function has in regions of a type: those
        that carry it from the operator, and of which no name is known from
        their programming.

        :param name: None: it has none.
        :returns: (address, index) of the regions that have another name now.
        """
        with self._lock:
            before = self._function_names()
            if name:
                self._names[function, region_type] = name
            else:
                self._names.pop((function, region_type), None)
            changed = dict(before.items() ^ self._function_names().items())
            self._generation += bool(changed)
            return set(changed)

    def _function_names(self) -> dict[Key, str | None]:
        return {(address, region.index):
                self._with_content(address, region).function_name
                for address, device in self._reported.items()
                for region in device.regions}

    def forget(self, address: str, index: int, origin: str | None) -> None:
        """Drop what is known of a region, because a guest may have changed it.

        The next scan says what it carries; call scan(addresses=[address])
        once the guest has returned the card.

        :param origin: durably noted as that of what the region carries: the
            project of the guest's server, or None where it is not known.
            model.OPERATOR: it is as if nothing had ever been programmed.
        :raises IllegalTransition: it is being programmed.
        """
        self.set_loaded(
            address, index, model.Loaded(None, None, None, '', origin))

    def note_open(self, device: model.Device) -> bool:
        """Note durably that servers could reprogram regions of a device: what
        these carry is of their projects from now on.

        :param device: as its driver has just found it.
        :returns: whether that is new.
        :raises AcceleratorsUnavailable: the store cannot be used.
        :raises IllegalTransition: a region is being programmed.
        """
        new = False
        claims = [c for c in self._store.claims()
                  if c.device_address == device.address]
        for region in device.regions:
            owners = {c.project_id for c in claims
                      if c.region_index == region.index}
            if not owners or not region.guest_can_reprogram:
                continue
            origin = owners.pop() if len(owners) == 1 else model.SOME_PROJECT
            as_read = model.Loaded(None, None, None, '', origin)
            if self._store.loaded().get(
                    (device.address, region.index)) != as_read:
                self.forget(device.address, region.index, origin)
                new = True
        return new

    def _know(self, key: Key, loaded: model.Loaded) -> None:
        # for drivers that cannot read it: what they said before counts
        device = self._reported.get(key[0])
        if device is not None:
            self._reported[key[0]] = device.with_region(
                key[1], function_uuid=loaded.function_uuid)
        self._generation += 1

    # The store

    def save(self) -> None:
        """Write what drivers said, where that has changed; an error is
        logged, and the next call tries again."""
        with self._writing:
            with self._lock:
                reported = dict(self._reported)
            if reported == self._saved:
                return
            try:
                self._store.set_devices(reported)
            except exception.AcceleratorError as error:
                self._once.say(('store',), LOG.error, 'What the drivers '
                               'found is not written down: %s', error)
                return
            self._saved = reported
            self._once.forget('store')


def clause(error: BaseException) -> str:
    """Return an error as a clause of a longer sentence."""
    return str(error).rstrip('.') or repr(error)


def _with_earlier_traits(device, before):
    """Return the device, which knows what was shown at its address before.

    Placement still has that, and who asks for a product or a type of region
    that is not there any more would get the device.
    """
    earlier = {*before.earlier_traits, *naming.identity_traits(before)
               } - naming.identity_traits(device)
    return dataclasses.replace(device, earlier_traits=tuple(sorted(earlier)))


def _is_a_projects(origin: str | None) -> bool:
    return origin not in (model.OPERATOR, None)


def _not_the_operators(origin: str | None) -> str | None:
    """Of a content about which nothing else is known any more."""
    return origin if origin != model.OPERATOR else None
