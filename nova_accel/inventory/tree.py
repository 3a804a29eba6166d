# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Our providers in Nova's provider tree, which Nova reports to Placement.

What is ours is told by the names of the providers, and by nothing that is
remembered. What we reserved is told by the store: the operator's value is
written there before all of an inventory is reserved, and it is dropped when a
later pass sees it restored. So a kill between any two writes heals.

==============================  ============================================
a provider under our names      what is done
==============================  ============================================
of a device that is there       made, and kept as the device is
of one that is gone             fenced; removed in a later pass when nothing
                                is allocated from it
ours without a device           the same
of somebody else                the same, with an ERROR in the log; ours of
                                that name is not made meanwhile
of somebody else, outside of    left alone, with an ERROR in the log; ours of
Nova's tree of this host        that name is not made meanwhile
==============================  ============================================

A device that is gone leaves its pool at once. A new pool takes over what the
operator had reserved of the providers that its devices had before, and the
traits that he had set on all of them.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses

from nova_accel import exception
from nova_accel.inventory import providers
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store

LOG = logging.getLogger(__name__)

InUse = Callable[[str], bool]
Named = Callable[[str], set[str]]


@dataclasses.dataclass(frozen=True)
class _Shown:
    """A provider as Nova's tree has it now; not to be changed."""

    uuid: str
    name: str
    inventory: Mapping[str, Mapping]
    traits: frozenset[str] | set[str]


@dataclasses.dataclass
class _Pass:
    """What one pass is going to do, before it does it."""

    #: (name, parent, uuid) of those to be made, parents first
    made: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    #: whether Placement is asked for names; not again once it did not answer
    asks: bool = True
    #: (uuid, inventory)
    inventories: list[tuple[str, dict]] = dataclasses.field(
        default_factory=list)
    #: (uuid, traits)
    traits: list[tuple[str, set]] = dataclasses.field(default_factory=list)
    #: uuids, children first
    removed: list[str] = dataclasses.field(default_factory=list)
    #: (uuid, resource class, what the operator had reserved)
    keep: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    #: (uuid, resource class)
    done: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    #: handles that the operator has given back
    returned: list[model.Waiting] = dataclasses.field(default_factory=list)
    #: handles that Placement shows as reserved
    shown: list[model.Waiting] = dataclasses.field(default_factory=list)
    #: (uuid of a pool, what the store gets of it)
    pools: list[tuple[str, model.Reserved | None]] = dataclasses.field(
        default_factory=list)


class Tree:
    """Not thread-safe by itself: Nova calls under its resource tracker's
    lock."""

    def __init__(self, store: claim_store.ClaimStore):
        self._store = store
        #: provider uuid -> resource class -> what the operator had reserved
        self._kept: dict[str, dict[str, int]] = {}
        #: uuid of a pool -> what is reserved of it
        self._pools: dict[str, model.Reserved] = {}
        self._kept_is_read = False
        #: provider uuid -> traits on it that others set, as of the last pass
        self.foreign_traits: dict[str, frozenset[str]] = {}
        #: provider uuid -> (Provider, its inventory, its traits) for which
        #: there was nothing to do
        self._settled: dict[str, tuple] = {}
        #: provider uuid -> the inventory that was written with less reserved
        #: than was meant, and what was meant
        self._meant: dict[str, tuple[Mapping, Mapping]] = {}
        #: providers of somebody else that the log has named
        self._named: set[str] = set()

    def update(self, tree, node: str,
               wanted: Mapping[str, providers.Provider],
               gone: Iterable[str], in_use: InUse,
               used: Callable[[str], int] = lambda uuid: 0,
               named: Named = lambda name: set(),
               ) -> tuple[list[str], set[str]]:
        """Make the tree show what is wanted; touch nothing else.

        :param tree: nova.compute.provider_tree.ProviderTree.
        :param node: name of the root provider.
        :param wanted: our providers by uuid, parents before children.
        :param gone: addresses of devices that may leave the tree.
        :param in_use: whether anything is allocated from a provider uuid.
        :param used: how much of a provider the same request to Placement
            allocates.
        :param named: uuids of the providers of a name in all of Placement;
            asked only before a provider is made. It may raise
            PlacementUnavailable.
        :returns: those of gone of which nothing is left in the tree; the
            uuids of providers that were there and were changed.
        :raises AcceleratorsUnavailable: the store cannot be used; the tree is
            as it was.
        """
        self._read_kept()
        everything = _walk(tree)
        there = _walk(tree, node)
        plan = _Pass()
        foreign = self._foreign(everything, wanted)
        self._plan_ours(plan, everything, foreign, wanted, in_use, named)
        left = self._plan_stale(plan, tree, node, there, foreign, wanted,
                                set(gone), in_use)
        self._leave_room(plan, there, wanted, used)
        self._forget_unknown(plan, everything, wanted)
        # what is reserved by us is known before it is reserved
        for uuid, name, value in plan.keep:
            self._keep(uuid, name, value)
        self._change_waiting(plan.returned, plan.shown, plan.pools)
        self._apply(plan, tree)
        for uuid, name in plan.done:
            self._drop(uuid, name)
        changed = {uuid for uuid, _ in (*plan.inventories, *plan.traits)}
        return ([address for address in gone if address not in left],
                changed & everything.keys())

    @staticmethod
    def _apply(plan: _Pass, tree) -> None:
        for name, parent, uuid in plan.made:
            tree.new_child(name, parent, uuid=uuid)
        for uuid, inventory in plan.inventories:
            tree.update_inventory(uuid, inventory)
        for uuid, traits in plan.traits:
            tree.update_traits(uuid, traits)
        for uuid in plan.removed:
            if tree.exists(uuid):
                tree.remove(uuid)

    # What is wanted

    def _foreign(self, everything: Mapping[str, _Shown],
                 wanted: Mapping[str, providers.Provider],
                 ) -> dict[str, _Shown]:
        """Providers of somebody else under names that we want, by name."""
        if wanted.keys() <= everything.keys():
            return {}
        names = {p.name for p in wanted.values()
                 if p.uuid not in everything}
        return {s.name: s for s in everything.values() if s.name in names}

    def _plan_ours(self, plan, everything, foreign, wanted, in_use,
                   named) -> None:
        made = set()
        for uuid, provider in wanted.items():
            shown = everything.get(uuid)
            if shown is None:
                if provider.name in foreign or not (
                        provider.region_index is None
                        or provider.parent in everything
                        or provider.parent in made) or self._is_taken(
                            plan, provider, named):
                    continue
                made.add(uuid)
                plan.made.append((provider.name, provider.parent, uuid))
                shown = _Shown(uuid, provider.name, {}, frozenset())
                if provider.pool:
                    shown = self._take_over(provider, shown, everything)
            settled = self._settled.get(uuid)
            if (settled and settled[0] is provider
                    and settled[1] == shown.inventory
                    and settled[2] == shown.traits):
                continue
            self._plan_one(plan, provider, shown, in_use)

    def _is_taken(self, plan, provider, named) -> bool:
        """Whether a provider outside of Nova's tree has the name. Placement
        would refuse a second one, and Nova's whole report would fail."""
        if not plan.asks:
            return False
        try:
            others = named(provider.name) - {provider.uuid}
        except exception.PlacementUnavailable as error:
            # Nova's report needs Placement as well, and tells if it fails
            LOG.debug('Provider %s is made without a look for others of its '
                      'name: %s', provider.name, error)
            plan.asks = False
            return False
        for uuid in others - self._named:
            self._named.add(uuid)
            LOG.error(
                'Provider %s was to be made for %s, and Placement has one of '
                'this name (%s) that nova_accel did not make, outside of the '
                'tree of this host: delete it, or rename it with "openstack '
                'resource provider set --name", as the device is not reported '
                'until then', provider.name, ', '.join(provider.addresses),
                uuid)
        return bool(others)

    def _leave_room(self, plan, there, wanted, used) -> None:
        """Placement refuses a request that reserves what it allocates: leave
        room for the allocations; the next pass reserves it again."""
        planned = dict(plan.inventories)
        for uuid in {*there, *planned}:
            amount = used(uuid)
            inventory = planned.get(uuid) or there[uuid].inventory
            room = {name: {**item, 'reserved': max(0, item['total'] - amount)}
                    for name, item in inventory.items()
                    if naming.is_accelerator_class(name)
                    and item.get('reserved', 0) > item['total'] - amount}
            if not amount or not room:
                continue
            plan.inventories = [
                item for item in plan.inventories if item[0] != uuid]
            plan.inventories.append((uuid, {**inventory, **room}))
            self._meant[uuid] = {**inventory, **room}, inventory
            provider = wanted.get(uuid)
            if provider and provider.pool:
                for name, item in room.items():
                    meant = inventory[name]['reserved']
                    noted = dict([(uuid, self._pools.get(uuid)),
                                  *plan.pools])[uuid] or model.Reserved(
                                      meant, meant, meant)
                    plan.pools.append((uuid, dataclasses.replace(
                        noted, least=min(noted.least, item['reserved']))))

    def _as_meant(self, uuid: str, inventory: Mapping) -> Mapping:
        """An inventory of Placement, with what we would have reserved."""
        written, meant = self._meant.get(uuid, (None, inventory))
        return meant if inventory == written else inventory

    def _take_over(self, provider, shown, everything) -> _Shown:
        """A new pool, with what the operator has said of the providers that
        its devices had."""
        names = {naming.device_provider_name(provider.parent, address): address
                 for address in provider.addresses}
        before = [s for s in everything.values() if s.name in names]
        if not before:
            return shown
        operators = 0
        for old in before if provider.uuid not in self._pools else ():
            kept = self._kept_of(old.uuid)
            for name, item in old.inventory.items():
                if name in provider.inventory:
                    fenced = (naming.FENCED in old.traits
                              and item.get('reserved') == item['total'])
                    operators += kept.get(
                        name, 0 if fenced else item.get('reserved', 0))
        if operators:
            self._pools[provider.uuid] = model.Reserved(
                operators, operators, operators)
            LOG.warning(
                'The operator had reserved %d of the devices that share the '
                'provider %s now. As many are reserved of it, but any of the '
                'devices: name those that no server is to get in [accel] '
                'exclude_devices', operators, provider.name)
        foreign = [frozenset(provider.merged_traits(s.traits))
                   - provider.traits for s in before]
        everywhere = frozenset.intersection(*foreign)
        lost = frozenset.union(*foreign) - everywhere
        if lost:
            LOG.warning(
                'The traits %s, which others than nova_accel had set on the '
                'providers of some of the devices that share the provider %s '
                'now, are not set on it: set them there if they are true of '
                'all', ', '.join(sorted(lost)), provider.name)
        return dataclasses.replace(shown, traits=everywhere)

    def _plan_one(self, plan, provider, shown, in_use) -> None:
        noted = self._pools.get(provider.uuid)
        merged = provider.merged_inventory(
            self._as_meant(provider.uuid, shown.inventory),
            self._kept_of(provider.uuid),
            naming.FENCED in shown.traits, in_use, noted)
        traits = provider.merged_traits(shown.traits)
        self.foreign_traits[provider.uuid] = traits - provider.traits
        changed = bool(merged.keep or merged.done or merged.returned)
        if provider.pool and merged.reserved != noted:
            plan.pools.append((provider.uuid, merged.reserved))
            changed = True
        plan.returned += provider.waiting[:merged.returned]
        # Nova's copy of Placement may be older than what we wrote there at
        # once, but not older than what an earlier pass found in it
        plan.shown += [dataclasses.replace(w, provider_uuid=provider.uuid)
                       for w in provider.waiting
                       if merged.shown and not w.shown]
        if merged.inventory != shown.inventory:
            plan.inventories.append((provider.uuid, merged.inventory))
            changed = True
        if traits != shown.traits:
            plan.traits.append((provider.uuid, set(traits)))
            changed = True
        self._note(plan, provider.uuid, merged)
        # an inventory of a class that it has not any more may go at any time
        if changed or merged.inventory.keys() != provider.inventory.keys():
            self._settled.pop(provider.uuid, None)
        else:
            self._settled[provider.uuid] = (
                provider, merged.inventory, frozenset(traits))

    @staticmethod
    def _note(plan, uuid, merged) -> None:
        plan.keep += [(uuid, name, n) for name, n in merged.keep.items()]
        plan.done += [(uuid, name) for name in merged.done]

    # What is not wanted any more

    def _plan_stale(self, plan, tree, node, there, foreign, wanted, gone,
                    in_use) -> set[str]:
        """Fence what has no device, and remove it in a later pass: removing a
        provider with allocations fails, and Nova's whole report with it.

        :returns: addresses of which something is left.
        """
        stale = {s.uuid: s for s in foreign.values()}
        for uuid, shown in there.items():
            provider = wanted.get(uuid)
            if (provider is None and naming.part_of_provider(
                    node, shown.name)) or (
                    provider is not None and not provider.pool
                    and provider.addresses[0] in gone):
                stale[uuid] = shown
        left = set()
        # regions before their device
        for shown in sorted(stale.values(), key=lambda s: s.name,
                            reverse=True):
            part = naming.part_of_provider(node, shown.name) or shown.name
            self._name_foreign(shown, node, there, wanted)
            if (naming.FENCED in shown.traits and part not in left
                    and not any(in_use(u) for u in
                                tree.get_provider_uuids(shown.uuid))):
                plan.removed.append(shown.uuid)
                self._settled.pop(shown.uuid, None)
                self.foreign_traits.pop(shown.uuid, None)
                continue
            left.add(part)
            if shown.uuid not in wanted:
                self._plan_fence(plan, shown, naming.is_pool(part))
        return left

    def _plan_fence(self, plan, shown, is_pool) -> None:
        if is_pool:
            self._plan_pool_is_fenced(plan, shown)
        merged = providers.fenced_inventory(
            self._as_meant(shown.uuid, shown.inventory),
            self._kept_of(shown.uuid),
            naming.FENCED in shown.traits)
        if merged.inventory != shown.inventory:
            plan.inventories.append((shown.uuid, merged.inventory))
        if naming.FENCED not in shown.traits:
            plan.traits.append((shown.uuid, {*shown.traits, naming.FENCED}))
        self._note(plan, shown.uuid, merged)

    def _plan_pool_is_fenced(self, plan, shown) -> None:
        """All of it will be reserved, by us."""
        for item in shown.inventory.values():
            there, total = item.get('reserved', 0), item['total']
            noted = self._pools.get(
                shown.uuid, model.Reserved(there, there, there))
            now = dataclasses.replace(noted, most=max(noted.most, total))
            if now != self._pools.get(shown.uuid):
                plan.pools.append((shown.uuid, now))

    def _name_foreign(self, shown, node, there, wanted) -> None:
        """Say once that a provider under our names is not ours."""
        root = next((s.uuid for s in there.values() if s.name == node), None)
        if (shown.uuid in wanted or shown.uuid in self._named
                or root is None or shown.uuid == naming.provider_uuid(
                    root, node, shown.name)):
            return
        self._named.add(shown.uuid)
        LOG.error(
            'Provider %s (%s) has a name that nova_accel gives, and was made '
            'by somebody else; it is fenced, and removed once nothing is '
            'allocated from it. Look at it with "openstack resource provider '
            'show --allocations %s"', shown.name, shown.uuid, shown.uuid)

    # What the operator had reserved

    def _read_kept(self) -> None:
        if self._kept_is_read:
            return
        kept: dict[str, dict[str, int]] = {}
        for (uuid, name), value in self._store.reserved().items():
            kept.setdefault(uuid, {})[name] = value
        self._pools = dict(self._store.pools())
        self._kept, self._kept_is_read = kept, True

    def _kept_of(self, uuid: str) -> Mapping[str, int]:
        return self._kept.get(uuid, {})

    def _keep(self, uuid: str, name: str, value: int) -> None:
        self._store.set_reserved(uuid, name, value)
        self._kept.setdefault(uuid, {})[name] = value

    def _drop(self, uuid: str, name: str) -> None:
        try:
            self._store.drop_reserved(uuid, name)
        except exception.AcceleratorError as error:
            # the next pass tries again
            LOG.warning('%s', error)
            self._settled.pop(uuid, None)
            return
        values = self._kept.get(uuid, {})
        values.pop(name, None)
        if not values:
            self._kept.pop(uuid, None)

    def _change_waiting(self, returned, shown=(), pools=()) -> None:
        """Write down what the operator has given back, and what he can; and
        of pools what is reserved, at once: his word is heard once."""
        if not returned and not shown and not pools:
            return
        self._store.change_waiting(remove=returned, shown=shown, pools=pools)
        for uuid, reserved in pools:
            if reserved:
                self._pools[uuid] = reserved
            else:
                self._pools.pop(uuid, None)
        for waiting in returned:
            LOG.info('The operator has given back %s of %s',
                     waiting.handle.address, waiting.device_address)

    def _forget_unknown(self, plan, everything, wanted) -> None:
        """Of providers that are gone."""
        plan.done += [(uuid, name) for uuid, values in self._kept.items()
                      if uuid not in everything and uuid not in wanted
                      for name in values]
        plan.pools += [(uuid, None) for uuid in self._pools
                       if uuid not in everything and uuid not in wanted]

    # Beside Nova's report

    def to_publish(self, provider: providers.Provider,
                   inventory: Mapping[str, Mapping], traits: Iterable[str],
                   in_use: InUse) -> tuple[dict[str, dict] | None, set[str]]:
        """See Inventory.to_publish()."""
        self._read_kept()
        present = set(traits)
        noted = self._pools.get(provider.uuid)
        merged = provider.merged_inventory(
            self._as_meant(provider.uuid, inventory),
            self._kept_of(provider.uuid),
            naming.FENCED in present, in_use, noted, reporting=False)
        for name, value in merged.keep.items():
            self._keep(provider.uuid, name, value)
        self._change_waiting(
            provider.waiting[:merged.returned],
            pools=[(provider.uuid, merged.reserved)]
            if provider.pool and merged.reserved != noted else ())
        return (None if merged.inventory == inventory else merged.inventory,
                set(provider.merged_traits(present)))


def reported(tree, node: str) -> set[str]:
    """See Inventory.reported()."""
    names = {shown.name for shown in _walk(tree, node).values()}
    return set(filter(None, (
        naming.part_of_provider(node, name) for name in names)))


def _walk(tree, node: str | None = None) -> dict[str, _Shown]:
    """The providers of the tree, or of the part below node, by uuid.

    In one walk and without copies, where the tree is as Nova 31 to 34 has it:
    asking it for one provider after the other is quadratic.
    """
    try:
        found: dict[str, _Shown] = {}
        with tree.lock:
            todo = [root for root in tree.roots_by_uuid.values()
                    if node in (None, root.name)]
            if not todo:
                raise AttributeError(node)
            while todo:
                provider = todo.pop()
                found[provider.uuid] = _Shown(
                    provider.uuid, provider.name, provider.inventory,
                    provider.traits)
                todo.extend(provider.children.values())
        return found
    except AttributeError:
        found = {}
        for uuid in (tree.get_provider_uuids(node) if node
                     else tree.get_provider_uuids()):
            data = tree.data(uuid)
            found[uuid] = _Shown(uuid, data.name, data.inventory, data.traits)
        return found
