# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Write nova_accel's providers into the tree that Nova reports to Placement.

Providers of nova_accel are recognized by their names only, without stored
state. The ledger has the amounts that nova_accel reserves.

==============================  ============================================
Provider with such a name       Action
==============================  ============================================
of a present device             create, and keep up to date
of an absent device             fence it, and remove it in a later pass if it
                                has no allocations
nova_accel's, without a device  fence and remove it as above; log the providers
                                in its place, and the operator's values that
                                those providers lack
of another program              fence and remove it as above; log an ERROR, and
                                create no provider of the name meanwhile
of another program, outside of  do not change it; log an ERROR, and create no
Nova's tree of this host        provider of the name meanwhile
==============================  ============================================

Nova's copy of a provider may lack changes that others made in Placement during
the last five minutes ([compute] resource_provider_association_refresh). Hence
the copy only triggers an update. The update itself is computed from a fresh
read, and Placement accepts it only if nothing else was written meanwhile. Nova
itself writes new providers, and all providers if allocations move at its
start, from a copy that it has just read.

An absent device leaves its pool at once.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
import dataclasses
import typing

from nova_accel import exception
from nova_accel.inventory import ledger
from nova_accel.inventory import providers
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store
from nova_accel.store import values

LOG = logging.getLogger(__name__)

#: (inventory, traits) -> (inventory, or None if it stays; traits)
Change = Callable[[Mapping[str, Mapping], set[str]],
                  tuple[dict[str, dict] | None, set[str]]]
#: changes a provider in Placement now; calls the last argument if Placement
#: refuses the inventory
Write = Callable[[str, Change, Callable[[], None]], None]
_Shown = providers.Shown
#: a provider as it is -> its required contents
Merge = Callable[[_Shown], providers.Merged]
_Rows = dict[ledger.Key, values.Reserved | None]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Functions that read and change Placement."""

    #: whether anything is allocated from a provider uuid; called only before
    #: something is removed
    in_use: Callable[[str], bool]
    #: uuids of the providers with a name, of all hosts; called only before a
    #: provider is created. May raise PlacementUnavailable
    named: Callable[[str], set[str]] = lambda name: set()
    #: the classes that Nova's configuration adds to providers, by provider
    #: UUID or name
    configured: Mapping[str, set[str]] = dataclasses.field(
        default_factory=dict)
    #: the amount of a provider that Nova allocates in the request that writes
    #: the tree: Placement would refuse to reserve it now, the next pass can
    used: Callable[[str], int] = lambda uuid: 0
    #: traits -> those that Placement would refuse
    refused: Callable[[Collection[str]], Collection[str]] = lambda traits: ()
    #: changes an existing provider now; None: Nova writes the whole tree,
    #: which it has just read
    write: Write | None = None

    def added(self, uuid: str, name: str) -> set[str]:
        """Return the classes that Nova's configuration adds to a provider."""
        return (self.configured.get(uuid, set())
                | self.configured.get(name, set()))


@dataclasses.dataclass
class _Pass:
    """The planned changes of one pass."""

    #: the tree of update()
    tree: typing.Any
    placement: Placement
    #: (name, parent, uuid) of providers to create, parents first
    made: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    #: whether to ask Placement for names; False after it did not answer
    asks: bool = True
    #: (uuid, inventory)
    inventories: list[tuple[str, dict]] = dataclasses.field(
        default_factory=list)
    #: (uuid, traits)
    traits: list[tuple[str, set]] = dataclasses.field(default_factory=list)
    #: uuids, children first
    removed: list[str] = dataclasses.field(default_factory=list)
    #: of the ledger
    rows: _Rows = dataclasses.field(default_factory=dict)
    #: handles that the operator has released
    returned: tuple[model.Claim, ...] = ()
    #: providers that exist in Placement and change
    changed: list[providers.Provider] = dataclasses.field(
        default_factory=list)

    @property
    def has_changes(self) -> bool:
        return bool(self.made or self.inventories or self.traits
                    or self.removed or self.rows or self.changed)

    def add(self, shown: _Shown, merged: providers.Merged) -> None:
        """Plan that Nova writes the inventory and traits that a provider must
        have, if they differ from the present ones."""
        uuid = shown.uuid
        self.rows |= _keyed(uuid, merged.rows)
        self.returned += merged.returned
        if merged.inventory != shown.inventory:
            self.inventories.append((uuid, merged.inventory))
        if merged.traits != shown.traits:
            self.traits.append((uuid, set(merged.traits)))


class Tree:
    """The providers in Nova's tree. Not thread-safe: Nova holds the lock of
    its resource tracker when it calls."""

    def __init__(self, store: claim_store.ClaimStore):
        self._store = store
        self._ledger = ledger.Ledger(store)
        #: provider uuid -> its traits of other programs at the last pass
        self.foreign_traits: dict[str, frozenset[str]] = {}
        #: provider uuid -> (Provider, its inventory, its traits) that needed
        #: no change
        self._unchanged: dict[str, tuple] = {}
        #: edition and wanted of the last update() that changed nothing
        self._settled: tuple[object, object] = None, None
        self._once = logging.Once()

    def update(self, tree, node: str,
               wanted: Mapping[str, providers.Provider],
               gone: Collection[str], placement: Placement,
               edition: object = None) -> list[str]:
        """Write the wanted providers into the tree; change nothing else.

        :param tree: nova.compute.provider_tree.ProviderTree.
        :param node: name of the root provider.
        :param wanted: nova_accel's providers by uuid, parents before children.
        :param gone: addresses of devices whose providers may be removed.
        :param edition: an object that is the same as in the last call while
            the tree below the node is unchanged; None if unknown.
        :returns: the addresses in gone that have no provider any more.
        :raises AcceleratorsUnavailable: the store cannot be used; the tree is
            unchanged.
        """
        now = edition, wanted
        if edition and not gone and placement.write and all(
                one is other for one, other in zip(now, self._settled)):
            return []
        self._settled = None, None
        there, is_changed = self._without_novas(
            tree, node, placement)
        everything = {**_walk(tree, others_than=node), **there}
        plan = _Pass(tree, placement)
        foreign = self._foreign(everything, wanted)
        leaving = set(gone)
        stale, left = self._plan_stale(plan, node, there, foreign, wanted,
                                       leaving)
        for shown in stale:
            self._report_replaced(shown, node, everything, wanted)
            self._fence(plan, shown)
        self._plan_ours(plan, everything, foreign, wanted, leaving)
        self._forget_unknown(plan, everything, wanted)
        # the ledger is written before Placement
        self._note(plan.rows, plan.returned)
        self._apply(plan)
        for provider in plan.changed:
            self._write_in_pass(plan, provider.uuid, provider.name,
                                self._merge(provider, plan.placement))
        if not (is_changed or gone or stale or plan.has_changes) and (
                wanted.keys() <= self._unchanged.keys()):
            self._settled = now
        return [address for address in gone if address not in left]

    @staticmethod
    def _without_novas(tree, node, placement) -> tuple[dict, bool]:
        """Remove from the tree the classes and traits that Nova adds after
        this update. Nova raises ValueError if it finds them in the tree
        (ResourceTracker._merge_provider_configs, Nova 31 to 34).

        :returns: the providers below the node, and whether one was changed.
        """
        is_changed = False
        there = _walk(tree, node)
        for uuid, shown in there.items() if placement.configured else ():
            novas = (placement.added(uuid, shown.name)
                     & shown.inventory.keys())
            if novas and naming.part_of_provider(node, shown.name):
                there[uuid] = dataclasses.replace(
                    shown, inventory=_without(shown.inventory, novas))
                tree.update_inventory(uuid, dict(there[uuid].inventory))
                is_changed = True
        return there, is_changed

    @staticmethod
    def _apply(plan: _Pass) -> None:
        tree = plan.tree
        for name, parent, uuid in plan.made:
            tree.new_child(name, parent, uuid=uuid)
        for uuid, inventory in plan.inventories:
            tree.update_inventory(uuid, inventory)
        for uuid, traits in plan.traits:
            tree.update_traits(uuid, traits)
        for uuid in plan.removed:
            if tree.exists(uuid):
                tree.remove(uuid)

    def _note(self, rows: _Rows, returned: Iterable[model.Claim]) -> None:
        uuids = {waiting.uuid for waiting in returned}
        back = [c for c in self._store.all_claims() if c.uuid in uuids]
        self._ledger.write(rows, back)
        for waiting in back:
            LOG.info('The operator has released %s of %s',
                     waiting.handle.address, waiting.device_address)

    def _rows(self, uuid: str, plan: _Pass) -> dict[str, values.Reserved]:
        """Return the rows of a provider after this pass, by resource class."""
        rows = {**self._ledger.of(uuid)}
        for (of, name), row in plan.rows.items():
            if of == uuid and row:
                rows[name] = row
            elif of == uuid:
                rows.pop(name, None)
        return rows

    # Wanted providers

    def _foreign(self, everything: Mapping[str, _Shown],
                 wanted: Mapping[str, providers.Provider],
                 ) -> dict[str, _Shown]:
        """Return name -> provider of another program that has the name of a
        wanted provider."""
        if wanted.keys() <= everything.keys():
            return {}
        names = {p.name for p in wanted.values()
                 if p.uuid not in everything}
        return {s.name: s for s in everything.values() if s.name in names}

    def _plan_ours(self, plan, everything, foreign, wanted, gone) -> None:
        made = set()
        removed = frozenset(plan.removed)
        for uuid, provider in wanted.items():
            if uuid in removed:
                continue
            shown = everything.get(uuid)
            is_there = shown is not None
            if shown is None:
                self._unchanged.pop(uuid, None)
                if provider.name in foreign or _leaves(
                        provider, gone) or not (
                        provider.region_index is None
                        or provider.parent in everything
                        or provider.parent in made
                        ) or self._is_taken(plan, provider):
                    continue
                made.add(uuid)
                plan.made.append((provider.name, provider.parent, uuid))
                shown = _Shown(uuid, provider.name, {}, frozenset())
                self._say_reserved(provider)
            unchanged = self._unchanged.get(uuid)
            if (unchanged and unchanged[0] is provider
                    and unchanged[1] == shown.inventory
                    and unchanged[2] == shown.traits
                    and not plan.placement.used(uuid)):
                continue
            known = self._rows(uuid, plan)
            merged = self._merge(provider, plan.placement, known)(shown)
            self.foreign_traits[uuid] = merged.traits - provider.traits
            self._unchanged.pop(uuid, None)
            if merged.is_in(shown, known):
                # an inventory of a class that it no longer has may be removed
                # at any time
                if merged.inventory.keys() == provider.inventory.keys():
                    self._unchanged[uuid] = (
                        provider, merged.inventory, merged.traits)
                continue
            if is_there and plan.placement.write:
                plan.changed.append(provider)
                continue
            plan.add(shown, merged)

    def _merge(self, provider, placement, rows=None) -> Merge:
        """Return a function that computes the required contents of a provider.

        :param rows: rows of the ledger, or None to read them at each call.
        """
        def merge(shown: _Shown) -> providers.Merged:
            merged = provider.merged(
                shown, self._ledger.of(provider.uuid) if rows is None
                else rows, placement.in_use, placement.used(provider.uuid),
                placement.added(provider.uuid, provider.name))
            return dataclasses.replace(
                merged, traits=merged.traits.difference(
                    placement.refused(merged.traits - shown.traits)))
        return merge

    def _say_reserved(self, provider) -> None:
        for name, row in self._ledger.of(provider.uuid).items():
            if row.operators and name in provider.inventory:
                LOG.warning(
                    'Provider %s is created again, with the amount that the '
                    'operator had reserved: %d', provider.name, row.operators)

    def _is_taken(self, plan, provider) -> bool:
        """Return whether a provider outside of Nova's tree has the name. A
        second provider of this name would make Placement refuse Nova's whole
        report."""
        if not plan.asks:
            return False
        try:
            others = plan.placement.named(provider.name) - {provider.uuid}
        except exception.PlacementUnavailable as error:
            # Nova's report needs Placement as well, and logs the failure
            LOG.debug('Provider %s is created without a search for others of '
                      'its name: %s', provider.name, error)
            plan.asks = False
            return False
        for uuid in others:
            self._once.log(
                ('foreign', uuid), LOG.error,
                'Provider %s cannot be created for %s, because Placement has '
                'one of this name (%s) outside of the tree of this host: '
                'delete it, or rename it with "openstack resource provider set '
                '--name"; the device is not reported until then',
                provider.name, ', '.join(provider.addresses), uuid)
        return bool(others)

    # Providers that are no longer wanted

    def _plan_stale(self, plan, node, there, foreign, wanted, gone,
                    ) -> tuple[list[_Shown], set[str]]:
        """Plan to fence providers without a device, and to remove providers
        that an earlier pass has fenced and that have no allocations.

        Nova's whole report fails if it removes a provider with allocations.

        :returns: providers to fence, and addresses that still have providers.
        """
        stale = {s.uuid: s for s in foreign.values()}
        for uuid, shown in there.items():
            provider = wanted.get(uuid)
            if (provider is None and naming.part_of_provider(
                    node, shown.name)) or (
                    provider is not None and _leaves(provider, gone)):
                stale[uuid] = shown
        left, fenced = set(), []
        # regions before their device
        for shown in sorted(stale.values(), key=lambda s: s.name,
                            reverse=True):
            part = naming.part_of_provider(node, shown.name) or shown.name
            self._name_foreign(shown, node, there, wanted)
            if (naming.FENCED in shown.traits and part not in left
                    and not any(plan.placement.in_use(u) for u in
                                plan.tree.get_provider_uuids(shown.uuid))):
                plan.removed.append(shown.uuid)
                self._unchanged.pop(shown.uuid, None)
                self.foreign_traits.pop(shown.uuid, None)
                continue
            left.add(part)
            if shown.uuid not in wanted:
                fenced.append(shown)
        return fenced, left

    def _fence(self, plan, shown) -> None:
        uuid = shown.uuid

        def merge(now):
            return providers.fenced(
                now, self._ledger.of(uuid), plan.placement.used(uuid),
                plan.placement.added(uuid, shown.name))
        merged = merge(shown)
        if merged.is_in(shown, self._ledger.of(uuid)):
            return
        if plan.placement.write:
            self._write_in_pass(plan, uuid, shown.name, merge)
        else:
            plan.add(shown, merged)

    def _report_replaced(self, shown, node, everything, wanted) -> None:
        """Log once the values that the operator set on a provider, and that
        the providers that replace it lack."""
        part = naming.part_of_provider(node, shown.name)
        if part is None or shown.name != naming.device_provider_name(
                node, part):
            return
        now = [p for p in wanted.values() if p.region_index is None and (
            part in p.addresses or naming.is_pool(part)
            and p.inventory.keys() & shown.inventory.keys())]
        rows = self._ledger.of(shown.uuid)
        left = [f'{name}:reserved={count}' for name in sorted(shown.inventory)
                if (count := ledger.operators(rows.get(name),
                                              shown.found(name)))]
        there = [p.traits.union(everything[p.uuid].traits
                                if p.uuid in everything else ()) for p in now]
        left += sorted(t for t in shown.traits if not naming.is_volatile(t)
                       and any(t not in traits for traits in there))
        if now and left:
            self._once.log(
                ('replaced', shown.uuid), LOG.warning,
                'Provider %s is replaced by %s, which does not have the values '
                'set on it (%s): set them again if they still apply',
                shown.name, ', '.join(p.name for p in now), ', '.join(left))

    def _name_foreign(self, shown, node, there, wanted) -> None:
        root = next((s.uuid for s in there.values() if s.name == node), None)
        if (shown.uuid in wanted or self._once.has(('foreign', shown.uuid))
                or root is None or shown.uuid == naming.provider_uuid(
                    root, node, shown.name)):
            return
        self._once.log(
            ('foreign', shown.uuid), LOG.error,
            'Provider %s (%s) has a name of nova_accel, and was created by '
            'another program; it is fenced, and removed once nothing is '
            'allocated from it. See "openstack resource provider '
            'show --allocations %s"', shown.name, shown.uuid, shown.uuid)

    def _forget_unknown(self, plan, everything, wanted) -> None:
        """Remove the rows of unknown providers from the ledger. Rows with an
        amount that the operator reserved stay, because cards can return."""
        plan.rows |= {
            key: None for key, row
            in {**self._ledger.all(), **plan.rows}.items()
            if key[0] not in everything and key[0] not in wanted
            and not (row and row.operators)}

    # Without Nova's report

    def publish(self, provider: providers.Provider,
                placement: Placement) -> None:
        """Write a provider to Placement now.

        :raises AcceleratorsUnavailable: the store cannot be used.
        """
        self._write(provider.uuid, placement.write, self._merge(
            provider, placement))

    def _write_in_pass(self, plan, uuid, name, merge):
        """Change a provider in Placement and in the tree; see _write()."""
        try:
            result = self._write(uuid, plan.placement.write, merge)
        except exception.AcceleratorsUnavailable:
            raise
        except Exception as error:
            LOG.warning('Provider %s is not changed before the next report: '
                        '%s', name, error)
            return None
        if result:
            inventory, traits = result
            nova_adds = plan.placement.added(uuid, name)
            plan.tree.update_inventory(uuid, _without(inventory, nova_adds))
            plan.tree.update_traits(uuid, set(traits))
        return result

    def _write(self, uuid, write, merge):
        """Change a provider in Placement, and its rows in the ledger.

        :param write: Placement.write.
        :param merge: computes the contents to write, from the present ones.
        :returns: the inventory and traits afterwards, or None if the provider
            does not exist.
        """
        before = dict(self._ledger.of(uuid))
        result: tuple[dict, frozenset[str]] | None = None

        def refused():
            # the change noted in the ledger was not made
            self._note({(uuid, name): before.get(name) for name
                        in {*before, *self._ledger.of(uuid)}}, ())

        def change(inventory, traits):
            nonlocal result
            merged = merge(_Shown(uuid, '', inventory, traits))
            self._note(_keyed(uuid, merged.rows), merged.returned)
            result = merged.inventory, merged.traits
            return (None if merged.inventory == inventory
                    else merged.inventory), set(merged.traits)
        write(uuid, change, refused)
        if result is None:
            return None
        self._unchanged.pop(uuid, None)
        self._settled = None, None
        try:
            # Placement has the value: other values are the operator's from now
            # on
            now = _Shown(uuid, '', *result)
            self._note({(uuid, name): ledger.confirmed(row, found)
                        for name, row in self._ledger.of(uuid).items()
                        if (found := now.found(name))}, ())
        except exception.AcceleratorError as error:
            # the next pass finds the value and confirms it
            LOG.warning('%s', error)
        return result


def _keyed(uuid: str, rows: Mapping[str, values.Reserved | None]) -> _Rows:
    return {(uuid, name): row for name, row in rows.items()}


def _without(inventory: Mapping[str, Mapping], names) -> dict[str, dict]:
    return {name: dict(item) for name, item in inventory.items()
            if name not in names}


def _leaves(provider, gone) -> bool:
    return not provider.pool and provider.addresses[0] in gone


def accelerators(tree, node: str) -> dict[str, str]:
    """Return nova_accel's providers of a provider tree, recognized by name.

    :returns: provider uuid -> address of a device, or name of a pool
        (naming.is_pool()).
    """
    return {uuid: part for uuid, shown in _walk(tree, node).items()
            if (part := naming.part_of_provider(node, shown.name))}


def _walk(tree, node: str | None = None, others_than: str | None = None,
          ) -> dict[str, _Shown]:
    """Return providers by uuid: the providers below node, or below all roots
    except others_than.

    Walks once and without copies through the tree of Nova 31 to 34, because
    the lookups of the tree are quadratic for many providers.
    """
    try:
        found: dict[str, _Shown] = {}
        with tree.lock:
            todo = [root for root in tree.roots_by_uuid.values()
                    if (root.name == node if node
                        else root.name != others_than)]
            if node and not todo:
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
