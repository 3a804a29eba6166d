# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Show the devices of this host in Nova's report to Placement."""

from nova_accel.attach import cloud as novas
from nova_accel.attach import publishing
from nova_accel.attach import reshape as allocation_moves
from nova_accel.attach import store_age as age
from nova_accel import inventory as host_inventory


class Reporting:

    def __init__(self, cloud: novas.Cloud,
                 inventory: host_inventory.Inventory,
                 publisher: publishing.Publisher,
                 store_age: age.StoreAge,
                 reshape: allocation_moves.Reshape):
        self._cloud = cloud
        self._inventory = inventory
        self._publisher = publisher
        self._store_age = store_age
        self._reshape = reshape

    def report(self, tree, node: str, allocations: dict | None = None,
               starting: bool = False, edition: object = None) -> bool:
        """Write nova_accel's providers into Nova's provider tree. Called under
        the lock of Nova's resource tracker.

        :param tree: nova.compute.provider_tree.ProviderTree of the host.
        :param node: name of its root.
        :param allocations: those of the host, which Nova writes together with
            the tree; changed in place. None: they stay as they are.
        :param starting: whether Nova would do that.
        :param edition: of the tree; see inventory.tree.Tree.update().
        :returns: False, with nothing changed, where that is needed: the
            caller then calls again with the allocations.
        """
        if not self._store_age.before_report(tree, node):
            return True
        if allocations is not None:
            moved = self._reshape.move(
                allocations, self._inventory.shown.providers_of(
                    node, tree.data(node).uuid))
            self._inventory.shown.update_tree(
                tree, node, self._publisher.placement_at_start(allocations),
                moved)
            return True
        if self._reshape.is_needed(node, tree.data(node).uuid) and starting:
            return False
        # Nova's copy of a provider is older than the last server that was
        # scheduled to it, and Placement would refuse its report
        self._inventory.shown.update_tree(
            tree, node, self._publisher.placement(self._cloud.admin_context()),
            edition=edition)
        return True
