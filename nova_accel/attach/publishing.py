# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Show changed providers in Placement at once, before the periodic report.

For example, a region was programmed for a server. Until Placement shows its new
function, nova-scheduler sends servers that need the old one to this region. If
Placement does not accept a change now, the next report repeats it.
"""

from collections.abc import Collection, Iterable, Mapping
import time

from nova_accel.attach import cloud as novas
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel.inventory import tree as provider_tree
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

LOG = logging.getLogger(__name__)
#: seconds within which a server is built after nova-scheduler has chosen the
#: host, including waits for other builds
_BUILD_SECONDS = 600


class Publisher:

    def __init__(self, inventory: host_inventory.Inventory,
                 cloud: novas.Cloud):
        self._inventory = inventory
        self._cloud = cloud
        self._began = time.monotonic()
        #: provider uuid -> time.monotonic() of its last change
        self._changed: dict[str, float] = {}
        #: standard traits that Placement has
        self._known: set[str] = set()
        self._once = logging.Once()
        self.background = limited.Background(
            self._make_known,
            f'Flavors cannot forbid or require {naming.SUSPECT}')
        #: reports providers that a look has found changed
        self.changes = limited.Background(
            lambda: self.show(inventory.shown.unplaced()),
            'Placement is not informed before the next report')

    def _make_known(self) -> None:
        """Create the trait SUSPECT in Placement. Flavors may forbid this
        trait, and Placement refuses any request that names an unknown trait
        (400, "No such trait")."""
        self._cloud.make_trait(naming.SUSPECT)
        self.background.end()

    def show(self, provider_uuids: Iterable[str]) -> None:
        """Report providers now. The periodic report retries failures."""
        for provider_uuid in sorted(set(provider_uuids)):
            self._changed[provider_uuid] = time.monotonic()
            try:
                with self._cloud.reporting():
                    self._inventory.shown.publish(
                        provider_uuid, self.placement())
            except KeyError:
                LOG.debug('Provider %s is not reported any more',
                          provider_uuid)
            except Exception as error:
                LOG.warning('Provider %s is not shown before the next report: '
                            '%s', provider_uuid, error)

    def was_free(self, provider_uuid: str) -> bool:
        """Return whether a provider is free and has not changed for
        _BUILD_SECONDS. If so, it was also free when nova-scheduler chose this
        host for a server that is being built."""
        changed = self._changed.get(provider_uuid, self._began)
        return (time.monotonic() - changed > _BUILD_SECONDS
                and not self._in_use(provider_uuid))

    def placement(self) -> provider_tree.Placement:
        """Return the interface to Placement for use in Cloud.reporting()."""
        return provider_tree.Placement(
            self._in_use, self._named, self._cloud.configured_classes(),
            refused=self._refused, write=self._cloud.show)

    def placement_at_start(self, allocations: Mapping[str, Mapping],
                           ) -> provider_tree.Placement:
        """Return the interface to Placement for a report in which Nova writes
        the tree together with allocations.

        :param allocations: the allocations that Nova is about to write.
        """
        def used(uuid):
            return sum(
                amount for given in allocations.values() for name, amount
                in given['allocations'].get(uuid, {}).get(
                    'resources', {}).items()
                if naming.is_accelerator_class(name))
        return provider_tree.Placement(
            lambda uuid: any(uuid in given['allocations']
                             for given in allocations.values()),
            self._named, self._cloud.configured_classes(), used, self._refused)

    def show_devices(self, claims: Collection[model.Claim]) -> None:
        self.show({c.provider_uuid for c in claims} | set(filter(None, map(
            self._inventory.shown.provider_of, claims))))

    def _in_use(self, provider_uuid: str) -> bool:
        """Return whether a provider has, or may have, allocations."""
        try:
            return bool(self._cloud.consumers(provider_uuid))
        except exception.PlacementUnavailable:
            return True

    def _refused(self, traits: Collection[str]) -> set[str]:
        """Return the standard traits that the os-traits of Placement lacks. If
        Nova reported such a trait, Placement would refuse the whole report."""
        new = {trait for trait in traits if not naming.is_custom(trait)
               and trait not in self._known}
        if not new:
            return new
        try:
            unknown = self._cloud.unknown_traits(new)
        except exception.PlacementUnavailable:
            # Nova's report needs Placement as well
            return set()
        self._known |= new - unknown
        for trait in unknown:
            self._once.log(
                ('unknown', trait), LOG.warning,
                'Placement does not have the trait %s, and providers are '
                'reported without it: upgrade os-traits there, and restart '
                'nova-compute', trait)
        return unknown

    def _named(self, name: str) -> set[str]:
        return self._cloud.find_providers(name=name)
