# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the providers that nova_accel shows in Placement for a host."""

from collections.abc import Iterable, Mapping
import dataclasses

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.host import vfio
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel.inventory import providers
from nova_accel.inventory import tree as provider_tree
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: for providers_of() if the uuid of the node's own provider is unknown
ANY_ROOT = '00000000-0000-0000-0000-000000000000'

Provider = providers.Provider


class Shown:
    """The providers of one compute host.

    All methods except update_tree() may be called from any thread.
    """

    def __init__(self, drivers: Mapping[str, base.AcceleratorDriver],
                 table: devices.DeviceTable, store: claim_store.ClaimStore,
                 device_rules: rules.DeviceRules):
        """:raises AcceleratorsUnavailable: the store cannot be read."""
        self._table = table
        self._store = store
        self._rules = device_rules
        self._tree = provider_tree.Tree(store)
        self._listing = Listing(store)
        self._pooled = frozenset(
            name for name, driver in drivers.items() if driver.POOLED)
        self._known: providers.Known = {}
        #: results of vfio.versions() that libvirt and QEMU of this host
        #: support
        self.migrating = {vfio.VERSIONS, vfio.IOMMUFD_VERSIONS}
        # guards what follows
        self._lock = locks.Lock('inventory')
        #: name and uuid of the node in the last report to Nova
        self._root: tuple[str, str] | None = None
        #: the inputs of the last providers -> the providers
        self._made: tuple[tuple | None, dict[str, Provider]] = None, {}
        #: from the same inputs: device address and region index -> provider
        #: uuid
        self._parts: dict[tuple[str, int | None], str] = {}
        self._once = logging.Once()
        #: uuid -> the provider that update_tree() or publish() gave to
        #: Placement last
        self._placed: dict[str, Provider] = {}

    @property
    def root(self) -> tuple[str, str] | None:
        """Return the name and uuid of the compute node in Nova's last report.
        """
        with self._lock:
            return self._root

    def providers(self) -> dict[str, Provider]:
        """Return nova_accel's providers by uuid, parents before children, for
        the compute node of Nova's last report, or {} before the first
        update_tree()."""
        root = self.root
        return self.providers_of(*root) if root else {}

    def provider_of(self, claim: model.Claim) -> str | None:
        """Return the uuid of the provider that shows the device of a claim
        now.

        The allocation may be from another provider, claim.provider_uuid, until
        it is moved (attach.reshape).

        :returns: None if no provider shows the device, and before the first
            update_tree().
        """
        return self.by_part().get(claim.part)

    def by_part(self) -> Mapping[tuple[str, int | None], str]:
        """Return (device address, region index) -> the uuid of the provider
        that shows this part, or {} before the first update_tree()."""
        self.providers()
        with self._lock:
            return self._parts

    def providers_of(self, node: str, root_uuid: str,
                     moved: Iterable[model.Claim] = (),
                     ) -> dict[str, Provider]:
        """Return providers() for any node, as nova-accel discover prints them.

        :param moved: changed claims that are not stored yet. They replace the
            stored claims with the same UUIDs.
        """
        moved = tuple(moved)
        offered = self._table.offered(moved=moved)
        if moved:
            return self._make(offered, node, root_uuid)
        with self._lock:
            if self._made[0] == (offered, node, root_uuid):
                return self._made[1]
            before = self._made[1]
        made = self._make(offered, node, root_uuid)
        # unchanged providers are the same objects, which makes comparing the
        # tree cheap
        made = {uuid: new if (old := before.get(uuid)) is new or old != new
                else old for uuid, new in made.items()}
        with self._lock:
            self._made = (offered, node, root_uuid), made
            self._parts = providers.by_part(made)
        return made

    def unreported(self, node: str) -> dict[str, str]:
        """Return the devices without a provider: address -> why."""
        found: dict[str, str] = {}
        self._make(self._table.offered(), node, ANY_ROOT, found.__setitem__)
        return found

    def _make(self, offered, node, root_uuid, report=None):
        members = {naming.set_provider_name(node, found): found
                   for found in rules.sets()}
        sets_of = {address: name for name, found in members.items()
                   for address in found}
        return providers.providers(
            map(self._as_it_migrates, self._table.snapshot().values()),
            offered, node, root_uuid,
            report or self._unnamable,
            lambda device: (sets_of.get(device.address)
                            or self._pool_of(node, device)),
            {name: len(found) for name, found in members.items()},
            self._table.contents.all_returning(),
            self._table.earlier_traits(), self._known)

    def _as_it_migrates(self, device: model.Device) -> model.Device:
        by = device.migrates_by
        return dataclasses.replace(device, migrates_by='') if (
            by and vfio.versions(by) not in self.migrating) else device

    def _pool_of(self, node: str, device: model.Device) -> str | None:
        """Return the name of the pool of a device that is in no set, or None
        if the device has providers of its own."""
        if (device.driver not in self._pooled or device.regions
                or device.creatable or device.memory
                or CONF.accel.pools == 'none'):
            return None
        return naming.pool_provider_name(
            node, device, device.numa_node
            if CONF.accel.pools == 'numa_node' else None)

    def _unnamable(self, address: str, why: str) -> None:
        self._once.log(('device', address), LOG.error,
                       'Device %s is not reported: %s', address, why)

    def update_tree(self, tree, node: str, placement: provider_tree.Placement,
                    moved: Iterable[model.Claim] = (),
                    edition: object = None) -> None:
        """Write nova_accel's devices into Nova's provider tree; change nothing
        else.

        An error of the store is logged once and leaves the tree unchanged.

        :param tree: nova.compute.provider_tree.ProviderTree of the host.
        :param moved: changed claims whose allocations move to other providers
            in the same request to Placement.
        :param edition: a state of the tree; see
            inventory.tree.Tree.update().
        :raises Exception: any error, but only if moved is given: the
            allocations must not move if the tree is unchanged.
        """
        moved = list(moved)
        try:
            root_uuid = tree.data(node).uuid
            with self._lock:
                self._root = node, root_uuid
            wanted = self.providers_of(node, root_uuid, moved)
            gone = self._table.reports.gone()
            if gone:
                gone -= {c.device_address for c in self._store.claims()}
            for address in self._tree.update(
                    tree, node, wanted, gone, placement, edition):
                device = self._table.reports.reported(address)
                if device and not self._rules.hides_others_of(device):
                    self._table.remove(address)
            self._listing.write(self._table.offered().all_holds())
            with self._lock:
                self._placed = dict(wanted)
        except exception.AcceleratorError as error:
            if moved:
                raise
            self._once.log(('tree',), LOG.error, 'The providers of '
                           'accelerators stay as they are: %s', error)
        except Exception:
            if moved:
                raise
            LOG.exception('The providers of accelerators stay as they are')
        else:
            self._once.forget('tree')

    def publish(self, provider_uuid: str,
                placement: provider_tree.Placement) -> None:
        """Write a provider to Placement now, without waiting for Nova's report.

        :raises KeyError: nova_accel has no such provider.
        :raises AcceleratorsUnavailable: the store cannot be used.
        """
        provider = self.providers()[provider_uuid]
        with self._lock:
            self._placed[provider_uuid] = provider
        self._tree.publish(provider, placement)

    def unplaced(self) -> list[str]:
        """Return the uuids of providers that have changed since update_tree()
        or publish() wrote them."""
        now = self.providers()
        with self._lock:
            return [uuid for uuid, provider in now.items()
                    if self._placed.get(uuid, provider) is not provider]

    def allocated(self, allocations: Mapping[str, Mapping] | None,
                  unused: Iterable[tuple[str, int | None]] = (),
                  ) -> list[request.Allocation]:
        """Return a server's allocations from nova_accel's providers.

        :param allocations: ``{provider uuid: {'resources': {class: n}}}``.
        :param unused: pairs (address, region index) of regions that count as
            programmable, because only this server has claims on them.
        """
        found = []
        unused = set(unused)
        own = self.providers()
        for uuid, allocation in (allocations or {}).items():
            provider = own.get(uuid)
            if provider is None:
                continue
            resources = naming.accelerators(allocation['resources'])
            if not resources:
                continue
            traits = provider.traits | self._tree.foreign_traits.get(
                uuid, frozenset())
            if (provider.addresses[0], provider.region_index) in unused:
                traits |= {naming.PROGRAMMABLE}
            memory = {name: mib
                      for name, mib in allocation['resources'].items()
                      if naming.is_memory_class(name)}
            found.append(
                request.Allocation(uuid, resources, traits, memory))
        return found


class Listing:
    """List the present holds in the claim store, for commands.

    Some holds are known only to the running nova-compute, for example devices
    in guests without a claim. Each report to Placement writes all of them. The
    commands nova-accel discover and claims read them there (listed()). When
    nova-compute starts, it reads the start times of the holds there.

    Not thread-safe: Nova's resource tracker holds its own lock when it calls.
    """

    def __init__(self, store: claim_store.ClaimStore):
        """:raises AcceleratorsUnavailable: the store cannot be read."""
        self._store = store
        self._written = store.withheld()
        self._once = logging.Once()

    def write(self, found: Iterable[holds.Hold]) -> None:
        """Write the holds that apply now.

        A hold without a start time gets the time of the first call that writes
        it. An error is logged once, and the next call retries.
        """
        before = {_key(row): row.since for row in self._written}
        now = text.now()
        rows = frozenset(
            row._replace(since=row.since or before.get(_key(row), now))
            for row in map(_row, found))
        if rows == self._written:
            return
        try:
            self._store.set_withheld(rows)
        except exception.AcceleratorsUnavailable as error:
            self._once.log(('store',), LOG.error, 'nova-accel discover does '
                           'not show all that is withheld now: %s', error)
            return
        self._written = rows
        self._once.forget('store')


def listed(store: claim_store.ClaimStore) -> list[holds.Hold]:
    """Return the holds that nova-compute wrote last.

    :raises AcceleratorsUnavailable: the store cannot be read.
    """
    by_name = {kind.value: kind for kind in holds.Kind}
    return [holds.Hold(
        by_name[row.kind], row.device, row.reason, row.region,
        model.AttachHandle(
            model.HandleType(row.handle_type), row.handle_address)
        if row.handle_address else None, row.since)
        for row in sorted(store.withheld(), key=str) if row.kind in by_name]


def _row(hold: holds.Hold) -> values.Withheld:
    handle = hold.handle
    return values.Withheld(
        hold.device, hold.region, handle.type.value if handle else '',
        handle.address if handle else '', hold.kind.value, hold.reason,
        hold.since)


def _key(row: values.Withheld):
    return row._replace(reason='', since='')
