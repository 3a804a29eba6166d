# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices and claims -> resource providers. Pure: no I/O, no state."""

import collections
from collections.abc import Callable, Collection, Iterable, Mapping
import dataclasses

from nova_accel import exception
from nova_accel import model
from nova_accel import naming

#: characters of the name of a provider (Placement's database)
_LONGEST = 200


@dataclasses.dataclass(frozen=True)
class Merged:
    """What an inventory is to be in Placement, and what to note for it."""

    #: by resource class, as Placement has it
    inventory: dict[str, dict]
    #: resource class -> what the operator had reserved; to be written down
    #: before we reserve all of it
    keep: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: resource classes of which that is not needed any more
    done: frozenset[str] = frozenset()
    #: how many of Provider.waiting the operator has given back
    returned: int = 0
    #: whether all that wait are reserved in Placement
    shown: bool = False
    #: of a pool: what is reserved of it; the store gets it before Placement.
    #: None: all that is reserved is the operator's, and the store needs no row
    reserved: model.Reserved | None = None


@dataclasses.dataclass(frozen=True)
class Provider:
    """One resource provider of ours and what stands behind it."""

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
    #: nothing of it may be given to anybody: reserved = total
    fenced: bool = False
    #: ours, of a state that it is not in now
    retired_traits: frozenset[str] = frozenset()
    #: handles that wait for the operator, the oldest first: as many are
    #: reserved
    waiting: tuple[model.Waiting, ...] = ()
    #: whether devices that are alike share it
    pool: bool = False
    #: of a pool: how many of its handles are neither fit for a server nor
    #: allocated to one from this provider
    unfit: int = 0
    #: of a pool: as many are allocated at a time, or a multiple. Of a set all
    step: int = 1

    def merged_traits(self, present: Iterable[str]) -> frozenset[str]:
        """Ours now, and of those present the ones that others set."""
        return self.traits | {
            t for t in set(present) - self.traits - self.retired_traits
            if not naming.is_volatile(t)}

    def merged_inventory(self, there: Mapping[str, Mapping],
                         kept: Mapping[str, int], marked: bool,
                         in_use: Callable[[str], bool],
                         noted: model.Reserved | None = None,
                         reporting: bool = True) -> Merged:
        """Ours, with the reserved and allocation_ratio that others set.

        :param there: the inventory that the provider has now.
        :param kept: what was noted in Merged.keep, by resource class.
        :param marked: whether it has the trait FENCED now; counts only for
            what release 0.1 left, which noted nothing.
        :param in_use: whether anything is allocated from a provider uuid.
        :param noted: of a pool: what was noted in Merged.reserved.
        :param reporting: whether this is for Nova's report. Beside it, a
            report that is under way may still write what it began with.
        """
        if self.pool:
            return self._merged_pool(there, marked, in_use, noted, reporting)
        inventory: dict[str, dict] = {}
        keep: dict[str, int] = {}
        done: set[str] = set()
        returned, shown = 0, False
        for name, total in self.inventory.items():
            item = there.get(name, {})
            waiting = () if naming.is_memory_class(name) else self.waiting
            if waiting and not self.fenced:
                reserved, returned, shown = _reserved_for_operator(
                    name, item, total, kept, marked, waiting, keep)
            else:
                reserved = _reserved(name, item, total, self.fenced, kept,
                                     marked, keep, done, waiting)
            inventory[name] = {
                **item, 'total': total, 'reserved': min(reserved, total),
                'min_unit': 1, 'max_unit': total, 'step_size': 1,
                'allocation_ratio': item.get('allocation_ratio', 1.0)}
        for name, item in there.items():
            if name in inventory:
                continue
            # Placement refuses to drop an inventory with allocations, and
            # Nova's whole report would fail with it
            if in_use(self.uuid):
                _reserved(name, item, item['total'], True, kept, marked, keep,
                          done)
                inventory[name] = {**item, 'reserved': item['total']}
        # of classes that are not there any more, and need no value back
        done |= {name for name in kept
                 if name not in inventory and name not in there}
        return Merged(inventory, keep, frozenset(done), returned, shown)

    def _merged_pool(self, there, marked, in_use, noted, reporting) -> Merged:
        inventory: dict[str, dict] = {}
        merged = _Counts(noted.operators if noted else 0, 0, 0, False, noted)
        for name, total in self.inventory.items():
            item = there.get(name, {})
            if noted is None and marked and (
                    item.get('reserved') == item.get('total')):
                # by us, and the store was lost
                noted = model.Reserved(0, 0, item.get('total', 0))
            merged = _counts(item, total, self.unfit, self.waiting, noted,
                             reporting)
            inventory[name] = {
                **item, 'total': total, 'reserved': merged.value,
                'min_unit': self.step, 'max_unit': total,
                'step_size': self.step,
                'allocation_ratio': item.get('allocation_ratio', 1.0)}
        for name, item in there.items():
            if name not in inventory and in_use(self.uuid):
                inventory[name] = {**item, 'reserved': item['total']}
        return Merged(inventory, returned=merged.returned, shown=merged.shown,
                      reserved=merged.noted)


@dataclasses.dataclass(frozen=True)
class _Counts:
    """What a pool reserves."""

    operators: int
    #: for Placement
    value: int
    returned: int
    shown: bool
    noted: model.Reserved | None


def _counts(item: Mapping, total: int, unfit: int,
            waiting: tuple[model.Waiting, ...],
            noted: model.Reserved | None, reporting: bool) -> _Counts:
    """The operator's own value, one for each handle that is not fit, and one
    for each that waits for him.

    ``reserved`` in Placement is compared with what we wrote there, or may have
    written before we were killed: below it he gives back what waits, the
    oldest first, then what he had reserved; above it he reserves more.
    """
    there = item.get('reserved', 0)
    operators, returned = (noted.operators, 0) if noted else (there, 0)
    if noted and item:
        lowered = max(0, noted.least - there)
        returned = min(sum(w.shown for w in waiting), lowered)
        operators = max(0, operators - (lowered - returned)) + max(
            0, there - noted.most)
    left = len(waiting) - returned
    value = min(operators + unfit + left, total)
    seen = reporting and bool(item) and there == value
    least = most = value
    if item and not seen:
        least, most = min(there, value), max(there, value)
        if noted:
            least, most = min(least, noted.least), max(most, noted.most)
    if seen and not (unfit or waiting) and there == operators:
        # all of it is the operator's
        noted = None
    elif unfit or waiting or noted:
        noted = model.Reserved(operators, least, most)
    return _Counts(operators, value, returned,
                   bool(noted) and seen and not returned, noted)


def fenced_inventory(there: Mapping[str, Mapping], kept: Mapping[str, int],
                     marked: bool) -> Merged:
    """What is there, all of it reserved; for a provider without a device."""
    keep: dict[str, int] = {}
    inventory = {}
    for name, item in there.items():
        _reserved(name, item, item['total'], True, kept, marked, keep, set())
        inventory[name] = {**item, 'reserved': item['total']}
    return Merged(inventory, keep)


def _reserved(name: str, item: Mapping, total: int, fenced: bool,
              kept: Mapping[str, int], marked: bool,
              keep: dict[str, int], done: set[str],
              waiting: tuple[model.Waiting, ...] = ()) -> int:
    """What is to be reserved of one class.

    The operator's value is what is there, unless it is our own: then it is
    what was kept of before.
    """
    there = item.get('reserved', 0)
    full = bool(item) and there == item.get('total')
    if name in kept:
        # another value than ours and the operator's of then is his new one
        ours = full or not item or (
            kept[name] + sum(w.shown for w in waiting) <= there
            <= kept[name] + len(waiting))
        theirs = kept[name] if ours else there
    else:
        theirs = 0 if full and marked else there
    if fenced:
        if kept.get(name) != theirs:
            keep[name] = theirs
        return total
    # the mark goes first, as without the value kept it would count
    if name in kept and not marked and there == min(theirs, total):
        done.add(name)
    return theirs


def _reserved_for_operator(
        name: str, item: Mapping, total: int, kept: Mapping[str, int],
        marked: bool, waiting: tuple[model.Waiting, ...],
        keep: dict[str, int]) -> tuple[int, int, bool]:
    """What is to be reserved of a class of which handles wait.

    The operator's own value and one for each that waits. Less than was seen
    there is the operator's word: as many are his to give again. An inventory
    that is not there at all is not his word.

    :returns: what is to be reserved, how many are given back, whether all
        that wait are reserved there.
    """
    there = item.get('reserved', 0)
    theirs, returned = kept.get(name, there), 0
    if name in kept and item and not marked:
        seen = min(theirs + sum(w.shown for w in waiting),
                   item.get('total', total))
        most = min(theirs + len(waiting), total)
        returned = min(sum(w.shown for w in waiting), max(0, seen - there))
        theirs = min(theirs, there) + max(0, there - most)
    if kept.get(name) != theirs:
        keep[name] = theirs
    reserved = min(theirs + len(waiting) - returned, total)
    return reserved, returned, (
        name in kept and not marked and not returned and there == reserved)


def providers(devices: Iterable[model.Device],
              claims: Iterable[model.Claim], node: str, root_uuid: str,
              held_back: Collection[model.AttachHandle] = (),
              report: Callable[[str, str], None] | None = None,
              waiting: Iterable[model.Waiting] = (),
              pool_of: Callable[[model.Device], str | None]
              = lambda device: None,
              sets: Mapping[str, int] | None = None,
              returning: Mapping[tuple[str, int], model.Region] | None = None,
              ) -> dict[str, Provider]:
    """The providers of a node by uuid, parents before children.

    :param devices: with their computed health.
    :param claims: all of the host.
    :param root_uuid: of the node's own provider.
    :param held_back: handles of servers to which Placement has allocated
        nothing of theirs.
    :param report: told the address of a device that cannot be shown, and why.
    :param waiting: handles that wait for the operator, the oldest first.
    :param pool_of: the name of the pool that a device shares with others; None
        for one with providers of its own.
    :param sets: of pools that are given as a whole, how many devices they
        have.
    :param returning: regions that are being cleaned, by device address and
        region index, as they are going to be.
    """
    use = _Use(claims, held_back, waiting, returning or {})
    result = {}
    pools: dict[str, list[model.Device]] = {}
    for device in devices:
        try:
            pool = pool_of(device)
            # what cannot be shown of it must not cost the others of its pool
            alone = ([_pool(pool, [device], node, root_uuid, use)] if pool
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
    """The provider that shows a device or a region: (device address, region
    index) -> provider uuid.

    :param shown: providers by uuid.
    """
    return {(address, provider.region_index): uuid
            for uuid, provider in shown.items()
            for address in provider.addresses}


class _Use:
    """What claims say of what is used."""

    def __init__(self, claims: Iterable[model.Claim],
                 held_back: Collection[model.AttachHandle],
                 waiting: Iterable[model.Waiting],
                 returning: Mapping[tuple[str, int], model.Region]):
        self._returning = returning
        self._waiting = tuple(waiting)
        #: (device address, region index) -> handles that servers have, or
        #: that could not be cleaned after one
        self.held: dict[tuple[str, int | None], set] = (
            collections.defaultdict(set))
        #: the same keys, of regions that servers have just lost
        self._lost: set[tuple[str, int | None]] = set()
        #: device address -> handles that were made on demand; a driver tells
        #: only what could be made now
        self.made: dict[str, set] = collections.defaultdict(set)
        #: handles that are free in Placement and not yet in truth
        self.held_up: set[model.AttachHandle] = set()
        #: provider uuid -> handles that servers have from it
        self.given: dict[str, set] = collections.defaultdict(set)
        for claim in claims:
            key = claim.device_address, claim.region_index
            ends = claim.state is model.ClaimState.DELETING
            # who gets a region waits until it is clean
            waits = (ends and claim.region_index is not None
                     and not claim.error)
            if waits:
                self._lost.add(key)
            else:
                self.held[key].add(claim.handle)
            if (claim.handle in held_back
                    or ends and not waits):
                self.held_up.add(claim.handle)
                continue
            self.given[claim.provider_uuid].add(claim.handle)
            if claim.created_type:
                self.made[claim.device_address].add(claim.handle)

    def is_held_otherwise(self, part: model.Region | model.Device,
                          address: str, index: int | None) -> bool:
        """See model.is_held_otherwise()."""
        key = address, index
        return model.is_held_otherwise(part, address, (
            *self.held.get(key, ()), *(
                w.handle for w in self._waiting
                if (w.device_address, w.region_index) == key)))

    def region(self, address: str, region: model.Region) -> model.Region:
        """A region as it is shown: one that is being cleaned as what it is
        going to be."""
        if self.is_cleaned(address, region.index):
            return self._returning.get((address, region.index), region)
        return region

    def is_cleaned(self, address: str, index: int) -> bool:
        """Whether a region is being cleaned after its last server."""
        key = (address, index)
        return key in self._lost and key not in self.held

    def waiting(self, provider_uuid: str, address: str, index: int | None,
                handles: Collection[model.AttachHandle],
                ) -> tuple[model.Waiting, ...]:
        """Those of a device or of its region that wait for the operator."""
        return _of_provider(provider_uuid, (
            w for w in self._waiting if w.handle in handles
            and (w.device_address, w.region_index) == (address, index)), '')

    def waiting_in_pool(self, provider_uuid: str,
                        free: Mapping[model.AttachHandle, str],
                        ) -> tuple[model.Waiting, ...]:
        """The same of a pool.

        :param free: handle -> address of its device.
        """
        return _of_provider(provider_uuid, (
            w for w in self._waiting
            if free.get(w.handle) == w.device_address))


def _of_provider(provider_uuid, waiting, *others):
    """What was shown of another provider is not shown of this one.

    :param others: values of Waiting.provider_uuid that mean this one, too.
    """
    return tuple(
        w if w.provider_uuid in (provider_uuid, *others)
        else dataclasses.replace(w, shown=False) for w in waiting)


def _pool(name, members, node, root_uuid, use, of_set=None) -> Provider:
    """The provider of devices that are alike.

    =============================  ======= ========================
    a handle                       total   reserved
    =============================  ======= ========================
    free, of a sound device        1       0
    waits for the operator         1       1, until he lowers it
    free, of a device not OK       1       1
    being cleaned, or held by a    1       1
    server without an allocation
    of a PF whose VF a server      1       1
    has, and the other way round
    a server has it from here      1       0: it is allocated
    a server has it from another   1       1
    provider (attach.relocation)
    a device of a set is missing,  1       1
    or does not say what it has
    =============================  ======= ========================

    What a server has from here counts also when its device is in another pool
    by now.

    A set is allocated as a whole, so that it is given to no server while
    anything of it is reserved.

    :param of_set: number of its devices, None where it is no set.
    """
    uuid = naming.provider_uuid(root_uuid, node, name)
    owners = {handle: device for device in members
              for handle in device.handles}
    given = use.given[uuid]
    elsewhere = {handle for other, handles in use.given.items()
                 if other != uuid for handle in handles}
    not_given = {handle: device for handle, device in owners.items()
                 if handle not in given}
    held_otherwise = {d.address for d in members
                      if use.is_held_otherwise(d, d.address, None)}
    free = {handle: device.address for handle, device in not_given.items()
            if device.health is model.Health.OK
            and device.address not in held_otherwise
            and handle not in use.held_up and handle not in elsewhere}
    waiting = use.waiting_in_pool(uuid, free)
    fenced = all(d.health is not model.Health.OK for d in members) or (
        bool(owners) and not free and not any(
            owners[handle].health is model.Health.OK
            for handle in given & owners.keys()))
    there = len(owners.keys() | given)
    total = max(there, of_set or 0)
    device = members[0]
    traits = naming.device_traits(device) | set.intersection(
        *map(naming.place_traits, members))
    if of_set:
        traits = {naming.SET}.union(set.intersection(
            *(naming.device_traits(d) | naming.place_traits(d)
              for d in members)))
    return Provider(
        uuid=uuid, name=name, parent=node,
        addresses=tuple(sorted(d.address for d in members)),
        region_index=None,
        inventory={naming.resource_class(device.type): total} if total else {},
        traits=frozenset(traits | ({naming.FENCED} if fenced else set())),
        fenced=fenced, retired_traits=frozenset(
            t for d in members for t in d.state_traits) - traits,
        waiting=waiting, pool=True, step=of_set or 1,
        unfit=len(not_given) - len(free) + total - there)


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
            else handles - use.held_up)
    # With no handle left, keep the inventory and reserve all of it: an
    # inventory that is dropped while it is allocated could not come back
    fenced = not device_ok or not left and bool(handles or device.creatable)
    if handles:
        inventory[resource_class] = len(left or handles)
    place = naming.place_traits(device)
    traits = naming.device_traits(device) | place
    # of one that is not well, it may be unknown what it is
    earlier = frozenset(device.earlier_traits if device_ok else ())
    yield Provider(
        uuid=uuid, name=name, parent=node, addresses=(device.address,),
        region_index=None, inventory=inventory,
        traits=frozenset(traits | ({naming.FENCED} if fenced else set())),
        fenced=fenced, waiting=use.waiting(uuid, device.address, None, left),
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
        left = ([] if use.is_held_otherwise(region, *key) else
                [h for h in region.handles if h not in use.held_up])
        fenced = (not device_ok or region.health is not model.Health.OK
                  or not left and bool(region.handles))
        if fenced:
            traits.add(naming.FENCED)
        yield Provider(
            uuid=region_uuid, name=name, parent=uuid,
            addresses=(device.address,), region_index=region.index,
            inventory={resource_class: len(left or region.handles), **memory}
            if region.handles else {},
            traits=frozenset(traits), fenced=fenced,
            waiting=use.waiting(
                region_uuid, device.address, region.index, left),
            retired_traits=earlier)
