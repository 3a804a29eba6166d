# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Compute resource providers from devices and claims. Pure: no I/O, no state.
"""

import collections
from collections.abc import Callable, Collection, Iterable, Mapping
import dataclasses
import functools
import typing

from nova_accel import exception
from nova_accel.inventory import holds
from nova_accel.inventory import ledger
from nova_accel.inventory import offers
from nova_accel import model
from nova_accel import naming
from nova_accel.store import values

#: maximum length of a provider's name (Placement's database)
_LONGEST = 200


@dataclasses.dataclass(frozen=True)
class Merged:
    """The contents that a provider must have in Placement and the ledger."""

    #: by resource class, as Placement has it
    inventory: dict[str, dict]
    traits: frozenset[str]
    #: by resource class; None: the ledger needs no row
    rows: dict[str, values.Reserved | None]
    #: handles that the operator has released
    returned: tuple[model.Claim, ...] = ()

    def is_in(self, there: 'Shown', rows: Mapping[str, values.Reserved],
              ) -> bool:
        """Return whether a provider and its rows of the ledger have these
        contents already."""
        return (self.inventory == there.inventory
                and self.traits == there.traits and not any(
                    rows.get(name) != row for name, row in self.rows.items()))


@dataclasses.dataclass(frozen=True)
class Shown:
    """A provider as it is in Placement, or in Nova's copy. Read-only."""

    uuid: str
    name: str
    inventory: Mapping[str, Mapping]
    traits: frozenset[str] | set[str]

    def found(self, name: str) -> ledger.Found | None:
        """Return the inventory of a resource class, if the provider has it."""
        item = self.inventory.get(name)
        return None if item is None else ledger.Found(
            item.get('reserved', 0), item['total'],
            naming.FENCED in self.traits)


@dataclasses.dataclass(frozen=True)
class Provider:
    """A resource provider of nova_accel, with the devices that it represents.
    """

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
    #: traits of the present state
    traits: frozenset[str]
    #: whether no server may get anything of it: reserved = total
    fenced: bool = False
    #: traits of earlier states that are removed from Placement
    retired_traits: frozenset[str] = frozenset()
    #: claims of its handles, the oldest first, if all wait for the operator
    waiting: tuple[model.Claim, ...] = ()
    #: whether several equal devices share it
    pool: bool = False
    #: smallest amount that can be allocated: for a set, all its devices
    step: int = 1

    def merged_traits(self, present: Iterable[str]) -> frozenset[str]:
        """Return the traits that the provider must have: its own, and the
        present traits that other programs have set."""
        return self.traits | {
            t for t in set(present) - self.traits - self.retired_traits
            if not naming.is_volatile(t)}

    def merged(self, there: Shown, rows: Mapping[str, values.Reserved],
               in_use: Callable[[str], bool], used: int = 0,
               configured: Collection[str] = ()) -> Merged:
        """Return the contents to write: merged_traits(), and the inventory of
        this provider, with the operator's reserved and allocation_ratio.

        Resource classes of other programs stay unchanged.

        :param there: the provider as it is now.
        :param rows: rows of the ledger, by resource class.
        :param in_use: returns whether a provider uuid has allocations.
        :param used: the amount of this provider that is allocated in the
            request to Placement that also writes the contents.
        :param configured: classes that Nova adds to the provider
            (provider.yaml).
        """
        inventory: dict[str, dict] = {}
        found: dict[str, values.Reserved | None] = {}
        returned: tuple[model.Claim, ...] = ()
        for name, total in self.inventory.items():
            row, item = rows.get(name), there.inventory.get(name, {})
            full = self.fenced
            if naming.is_memory_class(name):
                # a waiting handle reserves only itself, not the memory beside
                # it
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
        return Merged(inventory, self.merged_traits(there.traits), found,
                      returned)

    @property
    def _only_waits(self) -> bool:
        return bool(self.waiting) and naming.FENCED not in self.traits


def _room(name, total, used):
    """Return the maximum ``reserved`` that leaves ``used`` of the total for an
    allocation, or None for no maximum."""
    return (max(0, total - used) if used and naming.is_accelerator_class(name)
            else None)


def fenced(there: Shown, rows: Mapping[str, values.Reserved], used: int = 0,
           configured: Collection[str] = ()) -> Merged:
    """Return the contents to write for a provider without a device: its
    present inventory, all of it reserved, and the trait FENCED. See
    Provider.merged() for the parameters."""
    inventory = {name: dict(item) for name, item in there.inventory.items()}
    found: dict[str, values.Reserved | None] = {}
    _fence(there, [name for name in inventory if name not in configured],
           rows, used, inventory, found)
    return Merged(inventory, frozenset(there.traits) | {naming.FENCED}, found)


def _fence(there, names, rows, used, inventory, found) -> None:
    for name in names:
        total = there.inventory[name]['total']
        value, found[name] = ledger.balance(
            rows.get(name), there.found(name), total, True,
            _room(name, total, used))
        inventory[name] = {**there.inventory[name], 'reserved': value}


#: device address -> the inputs of its providers, and the providers
Known = dict[str, tuple[tuple, tuple[Provider, ...]]]


def providers(devices: Iterable[model.Device], offered: offers.Offers,
              node: str, root_uuid: str,
              report: Callable[[str, str], None] | None = None,
              pool_of: Callable[[model.Device], str | None]
              = lambda device: None,
              sets: Mapping[str, int] | None = None,
              returning: Mapping[tuple[str, int], model.Region] | None = None,
              earlier: Mapping[str, Collection[str]] | None = None,
              known: Known | None = None) -> dict[str, Provider]:
    """Return the providers of a node by uuid, parents before children.

    :param offered: the handles of these devices.
    :param root_uuid: uuid of the provider of the node itself.
    :param report: called with the address of a device that cannot be shown,
        and the reason.
    :param pool_of: returns the name of the pool of a device, or None for a
        device with providers of its own.
    :param sets: pool name -> number of devices, for pools that are sets.
    :param returning: regions that are being cleaned, by device address and
        region index, with their future content.
    :param earlier: device address -> traits that the device had earlier.
    :param known: the cache of the last call, which this call updates. A device
        with unchanged inputs keeps its providers.
    """
    use = _Use(offered, returning or {}, earlier or {},
               {} if known is None else known)
    result = {}
    pools: dict[str, list[model.Device]] = {}
    for device in devices:
        try:
            pool = pool_of(device)
            # a device with wrong values must not affect the others of its pool
            if pool:
                _check(_member(pool, device, node, use))
            else:
                alone = _of_device(device, node, root_uuid, use)
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
    """Check the names and numbers that a driver reports.

    Placement refuses Nova's report of the whole host if one of them is wrong.

    :raises ValueError: a name or number is wrong.
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
    return (f'the driver {device.driver} reports values that cannot be shown '
            f'({type(error).__name__}: {error}); correct the driver.')


def by_part(shown: Mapping[str, Provider],
            ) -> dict[tuple[str, int | None], str]:
    """Return (device address, region index) -> the uuid of the provider that
    shows this part.

    :param shown: providers by uuid.
    """
    return {(address, provider.region_index): uuid
            for uuid, provider in shown.items()
            for address in provider.addresses}


class _Use:
    """The inputs that all providers share."""

    def __init__(self, offered: offers.Offers,
                 returning: Mapping[tuple[str, int], model.Region],
                 earlier: Mapping[str, Collection[str]], known: Known):
        self.offered = offered
        self.known = known
        self.options = naming.options()
        self.earlier = earlier
        self.returning = returning
        # reading an option takes as long as the rest of a device
        self.resource_class = functools.cache(naming.resource_class)
        #: provider uuid -> handles that servers have from it
        self.given: dict[str, list[offers.Offer]] = (
            collections.defaultdict(list))
        for offer in offered.all():
            if offer.claim and offer.counts:
                self.given[offer.claim.provider_uuid].append(offer)

    def is_suspect(self, address: str) -> bool:
        return any(hold.kind is holds.Kind.SUSPECT
                   for hold in self.offered.holds_of((address, None)))


class _Amount(typing.NamedTuple):
    """The inventory of a provider, and whether all of it is reserved."""

    total: int
    #: whether all of it is reserved
    fenced: bool
    #: its handles, if all wait for the operator
    waiting: tuple[model.Claim, ...]
    #: whether it has the trait FENCED
    marked: bool


def _amount(use: _Use, counting: Collection[offers.Offer],
            found: Collection[offers.Offer], is_withheld: bool,
            may_have: bool = False, whole: int = 0) -> _Amount:
    """Return the total of a provider's inventory, and whether it is reserved.

    If no handle is fit, the total includes all handles, and all are reserved,
    because an inventory must not disappear while it is allocated.

    :param counting: the handles that the total includes if one of them is fit.
    :param found: all handles of the provider.
    :param is_withheld: whether all devices, or the region, of the provider are
        withheld.
    :param may_have: whether handles may be created on demand.
    :param whole: number of devices in the set, or 0.
    """
    fenced = is_withheld or bool(found or may_have) and not any(
        offer.is_fit for offer in counting) or len(counting) < whole
    waiting = use.offered.all_wait(found)
    everything = {offer.handle for offer in (*found, *counting)}
    return _Amount(
        max(len(everything), whole) if fenced else len(counting), fenced,
        waiting, fenced and (is_withheld or not waiting))


def _member(name, device, node, use) -> Provider:
    """Return a pool that has only this device, to check what its driver
    reports."""
    return Provider(
        uuid='', name=name, parent=node, addresses=(device.address,),
        region_index=None, inventory={use.resource_class(device.type): max(
            len(frozenset(device.handles)), 1)},
        traits=frozenset(naming.device_traits(device)
                         | naming.place_traits(device)),
        retired_traits=frozenset(device.state_traits))


def _pool(name, members, node, root_uuid, use, of_set=None) -> Provider:
    """Return the provider of a pool.

    ``total`` counts the free handles, and the handles that servers were
    allocated from this provider, even if the device is in another pool now.
    Handles allocated from another provider do not count (attach.reshape).

    :param of_set: number of devices if the pool is a set, otherwise None.
    """
    uuid = naming.provider_uuid(root_uuid, node, name)
    found = [offer for device in members
             for offer in use.offered.of((device.address, None))
             if offer.is_shown]
    free = [offer for offer in found if offer.state is offers.State.FREE]
    here = {device.address for device in members}
    given = use.given[uuid]
    amount = _amount(
        use, [*free, *given], found, all(
            use.offered.withheld_by((address, None)) for address in here),
        whole=of_set or 0)
    device = members[0]
    traits = naming.device_traits(device) | set.intersection(
        *map(naming.place_traits, members))
    if of_set:
        traits = {naming.SET}.union(set.intersection(
            *(naming.device_traits(d) | naming.place_traits(d)
              for d in members)))
    # the host chooses suspect devices last (attach.choice)
    suspects = [offer.has(holds.Kind.SUSPECT) for offer in free]
    if suspects and (any(suspects) if of_set else all(suspects)):
        traits.add(naming.SUSPECT)
    return Provider(
        uuid=uuid, name=name, parent=node,
        addresses=tuple(sorted(d.address for d in members)),
        region_index=None,
        inventory={use.resource_class(device.type): amount.total}
        if amount.total else {},
        traits=frozenset(traits | _mark(amount)),
        fenced=amount.fenced, retired_traits=frozenset(
            t for d in members for t in d.state_traits) - traits,
        waiting=amount.waiting, pool=True, step=of_set or 1)


def _mark(amount: _Amount) -> set[str]:
    return {naming.FENCED} if amount.marked else set()


def _of_device(device, node, root_uuid, use) -> tuple[Provider, ...]:
    """Return the providers of one device.

    :raises Exception: the device cannot be shown.
    """
    made_of = device, node, root_uuid, use.options, use.earlier.get(
        device.address), [
            (use.offered.of(part), use.offered.holds_of(part),
             use.returning.get(part)) for part, _ in offers.parts(device)]
    before = use.known.get(device.address)
    if before and before[0] == made_of:
        return before[1]
    made = tuple(_providers_of(device, node, root_uuid, use))
    for provider in made:
        _check(provider)
    use.known[device.address] = made_of, made
    return made


def _providers_of(device, node, root_uuid, use):
    name = naming.device_provider_name(node, device.address)
    uuid = naming.provider_uuid(root_uuid, node, name)
    resource_class = use.resource_class(device.type)
    part = device.address, None
    device_ok = not use.offered.withheld_by(part)
    inventory = {}
    memory = {naming.memory_class(kind): mib // max(len(device.regions), 1)
              for kind, mib in device.memory}
    if not device.regions:
        inventory.update(memory)
    # a driver reports only the vGPUs that could be created now
    found = [offer for offer in use.offered.of(part)
             if offer.is_shown or offer.counts and offer.claim.created_type]
    amount = _amount(use, [offer for offer in found if offer.counts], found,
                     not device_ok, bool(device.creatable))
    if found:
        inventory[resource_class] = amount.total
    place = naming.place_traits(device)
    if use.is_suspect(device.address):
        place.add(naming.SUSPECT)
    traits = naming.device_traits(device) | place
    # the product of an unhealthy device may be unknown
    earlier = frozenset(use.earlier.get(device.address, ())
                        if device_ok else ())
    yield Provider(
        uuid=uuid, name=name, parent=node, addresses=(device.address,),
        region_index=None, inventory=inventory,
        traits=frozenset(traits | _mark(amount)),
        fenced=amount.fenced, waiting=amount.waiting,
        retired_traits=earlier | frozenset(device.state_traits) - traits)
    for region in device.regions:
        key = (device.address, region.index)
        found = use.offered.of(key)
        is_used = any(offer.is_used for offer in found)
        is_cleaned = not is_used and any(
            hold.kind is holds.Kind.CLEANING
            for hold in use.offered.holds_of(key))
        traits = place | naming.region_traits(
            # with its future content
            device, use.returning.get(key, region) if is_cleaned else region)
        if region.programmable and not is_used:
            traits.add(naming.PROGRAMMABLE)
        if is_cleaned:
            traits.add(naming.CLEANING)
        name = naming.region_provider_name(node, device.address, region.index)
        region_uuid = naming.provider_uuid(root_uuid, node, name)
        shown = [offer for offer in found if offer.is_shown]
        amount = _amount(use, [offer for offer in shown if offer.counts],
                         shown, bool(use.offered.withheld_by(key)))
        yield Provider(
            uuid=region_uuid, name=name, parent=uuid,
            addresses=(device.address,), region_index=region.index,
            inventory={resource_class: amount.total, **memory}
            if region.handles else {},
            traits=frozenset(traits | _mark(amount)), fenced=amount.fenced,
            waiting=amount.waiting, retired_traits=earlier)
