# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices and claims -> resource providers. Pure: no I/O, no state."""

import collections
from collections.abc import Callable, Collection, Iterable, Mapping
import dataclasses
import functools
import operator

from nova_accel import exception
from nova_accel.inventory import ledger
from nova_accel import model
from nova_accel import naming

#: characters of the name of a provider (Placement's database)
_LONGEST = 200


@dataclasses.dataclass(frozen=True)
class Merged:
    """What a provider has to have in Placement, and in the ledger."""

    #: by resource class, as Placement has it
    inventory: dict[str, dict]
    #: by resource class; None: the ledger needs no row
    rows: dict[str, model.Reserved | None]
    #: of the handles that the operator has released
    returned: tuple[model.Claim, ...] = ()


@dataclasses.dataclass(frozen=True)
class Shown:
    """A provider as Placement, or Nova's copy of it, has it now; not to be
    changed."""

    uuid: str
    name: str
    inventory: Mapping[str, Mapping]
    traits: frozenset[str] | set[str]

    def found(self, name: str) -> ledger.Found | None:
        """Return the inventory of a resource class, None where it has none."""
        item = self.inventory.get(name)
        return None if item is None else ledger.Found(
            item.get('reserved', 0), item['total'],
            naming.FENCED in self.traits)


@dataclasses.dataclass(frozen=True)
class Provider:
    """One resource provider of nova_accel and what stands behind it."""

    uuid: str
    name: str
    #: name of the node, or uuid of the device's provider
    parent: str
    #: of its device, or of the devices of a pool
    addresses: tuple[str, ...]
    #: None for the provider of whole devices
    region_index: int | None
    #: resource class -> total
    inventory: Mapping[str, int]
    #: what we say of it now
    traits: frozenset[str]
    #: no server may get anything of it: reserved = total
    fenced: bool = False
    #: traits of nova_accel, of a state that it is not in now
    retired_traits: frozenset[str] = frozenset()
    #: of its handles, the oldest first, if all of them wait for the operator
    waiting: tuple[model.Claim, ...] = ()
    #: whether devices that are alike share it
    pool: bool = False
    #: of a pool: as many are allocated at a time, or a multiple. Of a set all
    step: int = 1

    def merged_traits(self, present: Iterable[str]) -> frozenset[str]:
        """Return its own now, and of those present the ones that others set."""
        return self.traits | {
            t for t in set(present) - self.traits - self.retired_traits
            if not naming.is_volatile(t)}

    def merged(self, there: Shown, rows: Mapping[str, model.Reserved],
               in_use: Callable[[str], bool], used: int = 0,
               configured: Collection[str] = ()) -> Merged:
        """Return its inventory, with reserved and allocation_ratio of others.

        Classes of others stay as they are.

        :param rows: of the ledger, by resource class.
        :param in_use: whether anything is allocated from a provider uuid.
        :param used: how much of it the same request to Placement allocates.
        :param configured: classes that Nova adds to it (provider.yaml).
        """
        inventory: dict[str, dict] = {}
        found: dict[str, model.Reserved | None] = {}
        returned: tuple[model.Claim, ...] = ()
        for name, total in self.inventory.items():
            row, item = rows.get(name), there.inventory.get(name, {})
            full = self.fenced
            if naming.is_memory_class(name):
                # a handle that waits does not reserve memory beside itself
                full = full and not self._only_waits
            else:
                returned = self.waiting[:ledger.released(
                    row, there.found(name))]
                if returned and self._only_waits:
                    total, full = len(returned), False
                # Placement refuses allocations beyond it
                total = max(total, used)
            value, found[name] = ledger.balance(
                row, there.found(name), total, full, _room(name, total, used))
            inventory[name] = {
                **item, 'total': total, 'reserved': value,
                'min_unit': self.step, 'max_unit': total,
                'step_size': self.step,
                'allocation_ratio': item.get('allocation_ratio', 1.0)}
        left = there.inventory.keys() - inventory.keys()
        ours = {name for name in left
                if naming.is_our_class(name) and name not in configured}
        # Placement refuses to drop an inventory with allocations, and Nova's
        # whole report would fail with it
        if ours and in_use(self.uuid):
            _fence(there, ours, rows, used, inventory, found)
        inventory |= {name: dict(there.inventory[name])
                      for name in left - ours}
        found |= {name: None for name in rows if name not in found
                  and name not in there.inventory}
        return Merged(inventory, found, returned)

    @property
    def _only_waits(self) -> bool:
        return bool(self.waiting) and naming.FENCED not in self.traits


def _room(name, total, used):
    """Return how much Placement lets us reserve, None for no limit."""
    return (max(0, total - used) if used and naming.is_accelerator_class(name)
            else None)


def fenced(there: Shown, rows: Mapping[str, model.Reserved], used: int = 0,
           configured: Collection[str] = ()) -> Merged:
    """Return what is there, all of it reserved; for a provider without a
    device. Parameters as those of Provider.merged()."""
    inventory = {name: dict(item) for name, item in there.inventory.items()}
    found: dict[str, model.Reserved | None] = {}
    _fence(there, [name for name in inventory if name not in configured],
           rows, used, inventory, found)
    return Merged(inventory, found)


def _fence(there, names, rows, used, inventory, found) -> None:
    for name in names:
        total = there.inventory[name]['total']
        value, found[name] = ledger.balance(
            rows.get(name), there.found(name), total, True,
            _room(name, total, used))
        inventory[name] = {**there.inventory[name], 'reserved': value}


def providers(devices: Iterable[model.Device],
              claims: Iterable[model.Claim], node: str, root_uuid: str,
              lost: Collection[str] = (),
              report: Callable[[str, str], None] | None = None,
              pool_of: Callable[[model.Device], str | None]
              = lambda device: None,
              sets: Mapping[str, int] | None = None,
              returning: Mapping[tuple[str, int], model.Region] | None = None,
              suspects: Collection[str] = (),
              earlier: Mapping[str, Collection[str]] | None = None,
              ) -> dict[str, Provider]:
    """Return the providers of a node by uuid, parents before children.

    :param devices: with their computed health.
    :param claims: all of the host; those that wait for the operator the
        oldest first.
    :param root_uuid: of the node's own provider.
    :param lost: UUIDs of the claims of servers to which Placement has
        allocated nothing of theirs.
    :param report: told the address of a device that cannot be shown, and why.
    :param pool_of: the name of the pool that a device shares with others; None
        for one with providers of its own.
    :param sets: of pools that are given as a whole, how many devices they
        have.
    :param returning: regions that are being cleaned, by device address and
        region index, as they are going to be.
    :param suspects: addresses of devices that servers get last.
    :param earlier: device address -> traits that it had earlier.
    """
    use = _Use(claims, lost, returning or {}, suspects, earlier or {})
    result = {}
    pools: dict[str, list[model.Device]] = {}
    for device in devices:
        try:
            pool = pool_of(device)
            # what cannot be shown of it must not cost the others of its pool
            alone = ([_member(pool, device, node, use)] if pool
                     else list(_providers_of(device, node, root_uuid, use)))
            for provider in alone:
                _check(provider)
        except Exception as error:
            if report:
                report(device.address, _why(device, error))
            continue
        if pool:
            pools.setdefault(pool, []).append(device)
        else:
            result.update({provider.uuid: provider for provider in alone})
    for name, members in pools.items():
        provider = _pool(name, members, node, root_uuid, use,
                         (sets or {}).get(name))
        result[provider.uuid] = provider
    return result


def _check(provider: Provider) -> None:
    """Check what a driver reports, of another package as a rule: Placement
    would refuse it, and with it Nova's report of the whole host.

    :raises ValueError: a name or a number is wrong.
    """
    if len(provider.name) > _LONGEST:
        raise ValueError(f'the name {provider.name!r} has more than {_LONGEST} '
                         f'characters')
    for known, names in ((naming.is_class, provider.inventory),
                         (naming.is_trait, provider.traits)):
        for name in names:
            if not known(name):
                raise ValueError(
                    f'{name!r} is not a name for Placement, which takes '
                    f'CUSTOM_ and letters of A to Z, digits and _, or a '
                    f'standard name')
    for name, total in provider.inventory.items():
        if type(total) is not int or not 0 < total < 1 << 31:
            raise ValueError(f'{total!r} is not a number of {name}')


def _why(device: model.Device, error: Exception) -> str:
    if isinstance(error, exception.InvalidName):
        return str(error)
    return (f'the driver {device.driver} reports of it what cannot be shown '
            f'({type(error).__name__}: {error}); correct the driver.')


def by_part(shown: Mapping[str, Provider],
            ) -> dict[tuple[str, int | None], str]:
    """Return the provider that shows a device or a region: (device address,
    region index) -> provider uuid.

    :param shown: providers by uuid.
    """
    return {(address, provider.region_index): uuid
            for uuid, provider in shown.items()
            for address in provider.addresses}


class _Use:
    """What claims say of what is used."""

    def __init__(self, claims: Iterable[model.Claim],
                 lost: Collection[str],
                 returning: Mapping[tuple[str, int], model.Region],
                 suspects: Collection[str],
                 earlier: Mapping[str, Collection[str]]):
        self.suspects = suspects
        self.earlier = earlier
        self._returning = returning
        #: (device address, region index) -> handles that wait for the operator
        self._waits: dict[tuple[str, int | None], set] = (
            collections.defaultdict(set))
        #: handle -> its number, the oldest has the least; its claim
        self._waiting: dict[
            model.AttachHandle, tuple[int, model.Claim]] = {}
        # reading an option takes as long as all else about a device
        self.resource_class = functools.cache(naming.resource_class)
        #: the same keys -> handles that servers have, or that could not be
        #: cleaned after one
        self.held: dict[tuple[str, int | None], set] = (
            collections.defaultdict(set))
        #: the same keys, of regions that servers have just lost
        self._cleaned: set[tuple[str, int | None]] = set()
        #: device address -> handles that were made on demand; a driver tells
        #: only what could be made now
        self.made: dict[str, set] = collections.defaultdict(set)
        #: handles that are free in Placement and not yet in truth
        self.reserved: set[model.AttachHandle] = set()
        #: provider uuid -> handles that servers have from it
        self.given: dict[str, set] = collections.defaultdict(set)
        #: the same by handle
        self.giver: dict[model.AttachHandle, str] = {}
        for number, claim in enumerate(claims):
            key = claim.part
            if claim.state is model.ClaimState.WAITING:
                self._waits[key].add(claim.handle)
                self._waiting[claim.handle] = number, claim
                self.reserved.add(claim.handle)
                continue
            ends = claim.state is model.ClaimState.DELETING
            # who gets a region waits until it is clean
            waits = (ends and claim.region_index is not None
                     and not claim.error)
            if waits:
                self._cleaned.add(key)
            else:
                self.held[key].add(claim.handle)
            if claim.uuid in lost or ends and not waits:
                self.reserved.add(claim.handle)
                continue
            self.given[claim.provider_uuid].add(claim.handle)
            self.giver[claim.handle] = claim.provider_uuid
            if claim.created_type:
                self.made[claim.device_address].add(claim.handle)

    def is_held_otherwise(self, part: model.Region | model.Device,
                          address: str, index: int | None) -> bool:
        """See model.is_held_otherwise()."""
        key = address, index
        return model.is_held_otherwise(part, address, (
            *self.held.get(key, ()), *self._waits.get(key, ())))

    def region(self, address: str, region: model.Region) -> model.Region:
        """Return a region as it is shown: one that is being cleaned as what it
        is going to be."""
        if self.is_cleaned(address, region.index):
            return self._returning.get((address, region.index), region)
        return region

    def is_cleaned(self, address: str, index: int) -> bool:
        """Return whether a region is being cleaned after its last server."""
        key = (address, index)
        return key in self._cleaned and key not in self.held

    def waiting(self, handles: Collection[model.AttachHandle],
                ) -> tuple[model.Claim, ...]:
        """Return the claims that wait for the operator, the oldest first, if
        all handles of a provider do."""
        found = [self._waiting[h] for h in handles if h in self._waiting]
        if len(found) < len(handles):
            return ()
        return tuple(w for _, w in sorted(found, key=operator.itemgetter(0)))


def _member(name, device, node, use) -> Provider:
    """Return what of a device its pool shows, to be checked alone."""
    use.is_held_otherwise(device, device.address, None)
    return Provider(
        uuid='', name=name, parent=node, addresses=(device.address,),
        region_index=None, inventory={use.resource_class(device.type): max(
            len(frozenset(device.handles)), 1)},
        traits=frozenset(naming.device_traits(device)
                         | naming.place_traits(device)),
        retired_traits=frozenset(device.state_traits))


def _pool(name, members, node, root_uuid, use, of_set=None) -> Provider:
    """Return the provider of devices that are alike.

    ``total`` counts the handles that are free and fit, and those that servers
    have from here, also where the device is in another pool by now. Not
    counted: a handle of a device that is not OK, that waits for the operator,
    is being cleaned, is held without an allocation or from another provider
    (attach.reshape), or is of a PF whose VF a server has, and the other way
    round. If nothing is fit, ``total`` counts all, and all is reserved.

    A set is allocated as a whole: nothing of it is fit while a device of it is
    missing.

    :param of_set: number of its devices; None for what is not a set.
    """
    uuid = naming.provider_uuid(root_uuid, node, name)
    owners = {handle: device for device in members
              for handle in device.handles}
    given = use.given[uuid]
    held_otherwise = {d.address for d in members
                      if use.is_held_otherwise(d, d.address, None)}
    free = [handle for handle, device in owners.items()
            if handle not in given and device.health is model.Health.OK
            and device.address not in held_otherwise
            and handle not in use.reserved
            and use.giver.get(handle, uuid) == uuid]
    waiting = use.waiting(owners)
    all_sick = all(d.health is not model.Health.OK for d in members)
    fenced = all_sick or (
        bool(owners) and not free and not any(
            owners[handle].health is model.Health.OK
            for handle in given & owners.keys()))
    whole = max(len(owners.keys() | given), of_set or 0)
    total = len(given) + len(free)
    if fenced or of_set and total < whole:
        fenced, total = True, whole
    device = members[0]
    traits = naming.device_traits(device) | set.intersection(
        *map(naming.place_traits, members))
    if of_set:
        traits = {naming.SET}.union(set.intersection(
            *(naming.device_traits(d) | naming.place_traits(d)
              for d in members)))
    # the host gives the others first
    suspects = [bool(owners[handle].address in use.suspects) for handle in free]
    if suspects and (any(suspects) if of_set else all(suspects)):
        traits.add(naming.SUSPECT)
    return Provider(
        uuid=uuid, name=name, parent=node,
        addresses=tuple(sorted(d.address for d in members)),
        region_index=None,
        inventory={use.resource_class(device.type): total} if total else {},
        traits=frozenset(traits | ({naming.FENCED} if fenced and (
            all_sick or not waiting) else set())),
        fenced=fenced, retired_traits=frozenset(
            t for d in members for t in d.state_traits) - traits,
        waiting=waiting, pool=True, step=of_set or 1)


def _providers_of(device, node, root_uuid, use):
    name = naming.device_provider_name(node, device.address)
    uuid = naming.provider_uuid(root_uuid, node, name)
    resource_class = naming.resource_class(device.type)
    device_ok = device.health is model.Health.OK
    inventory = {}
    memory = {naming.memory_class(kind): mib // max(len(device.regions), 1)
              for kind, mib in device.memory}
    if not device.regions:
        inventory.update(memory)
    handles = {*device.handles, *use.made.get(device.address, ())}
    left = (set() if use.is_held_otherwise(device, device.address, None)
            else handles - use.reserved)
    waiting = use.waiting(handles)
    # With no handle left, keep the inventory and reserve all of it: an
    # inventory that is dropped while it is allocated could not come back
    fenced = not device_ok or not left and bool(handles or device.creatable)
    if handles:
        inventory[resource_class] = len(left or handles)
    place = naming.place_traits(device)
    if device.address in use.suspects:
        place.add(naming.SUSPECT)
    traits = naming.device_traits(device) | place
    # of one that is not well, it may be unknown what it is
    earlier = frozenset(use.earlier.get(device.address, ())
                        if device_ok else ())
    yield Provider(
        uuid=uuid, name=name, parent=node, addresses=(device.address,),
        region_index=None, inventory=inventory,
        traits=frozenset(traits | ({naming.FENCED} if fenced and not (
            device_ok and waiting) else set())),
        fenced=fenced, waiting=waiting,
        retired_traits=earlier | frozenset(device.state_traits) - traits)
    for region in device.regions:
        traits = naming.region_traits(
            device, use.region(device.address, region)) | place
        key = (device.address, region.index)
        if region.programmable and key not in use.held:
            traits.add(naming.PROGRAMMABLE)
        if use.is_cleaned(*key):
            traits.add(naming.CLEANING)
        name = naming.region_provider_name(node, device.address, region.index)
        region_uuid = naming.provider_uuid(root_uuid, node, name)
        left = (set() if use.is_held_otherwise(region, *key) else
                {*region.handles} - use.reserved)
        waiting = use.waiting(region.handles)
        is_sick = not device_ok or region.health is not model.Health.OK
        fenced = is_sick or not left and bool(region.handles)
        if fenced and (is_sick or not waiting):
            traits.add(naming.FENCED)
        yield Provider(
            uuid=region_uuid, name=name, parent=uuid,
            addresses=(device.address,), region_index=region.index,
            inventory={resource_class: len(left or region.handles), **memory}
            if region.handles else {},
            traits=frozenset(traits), fenced=fenced, waiting=waiting,
            retired_traits=earlier)
