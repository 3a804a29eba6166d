# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Restore missing allocations for the devices that servers hold.

Nova removes the allocation when a rebuild or an unshelve fails, although the
server stays or its guest runs. An operator may also remove the allocation.
Placement would then allocate the devices to other servers. Hence nova-compute
allocates the devices to the server again. Until that succeeds the devices are
withheld, and the provider shows no free inventory for them.

For example, an unshelve fails after the claim, and the allocation is gone. The
next comparison finds the claim without an allocation and the server at rest.
nova-compute allocates the device to the server again. If Placement refuses,
the device is withheld ("unallocated"), and each later comparison tries again.
"""

from collections.abc import Collection, Iterable, Iterator
import contextlib

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)


class Reallocation:
    """Allocates devices to the servers that hold them, or withholds the
    devices."""

    def __init__(self, cloud: novas.Cloud,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 publisher: publishing.Publisher):
        self._cloud = cloud
        self._inventory = inventory
        self._holdings = holdings
        self._publisher = publisher
        self._once = logging.Once()

    def withhold(self, claims: Iterable[model.Claim]) -> None:
        """Withhold the devices of claims that have no allocation.

        :param claims: all such claims. Devices of other claims are no longer
            withheld for this reason.
        """
        claims, inventory = list(claims), self._inventory
        before = inventory.offers.unallocated
        inventory.offers.unallocated = frozenset(c.uuid for c in claims)
        changed = before ^ inventory.offers.unallocated
        if changed:
            self._publisher.show_devices(
                [c for c in self._holdings.all() if c.uuid in changed])
        self._once.only('unallocated', {c.instance_uuid for c in claims})
        for server_uuid in {c.instance_uuid for c in claims}:
            self._once.log(
                ('unallocated', server_uuid), LOG.warning,
                'Server %s holds accelerators that Placement has not allocated '
                'to it, for example after a failed unshelve; no other server '
                'gets them. Confirm or revert its resize, '
                'shelve and unshelve it, or delete it.', server_uuid)

    def reallocate(self, server_uuid: str, claims: Collection[model.Claim],
                   ) -> list[model.Claim]:
        """Restore the allocations of a server for the devices that it holds on
        this host, including devices from before a move.

        :returns: the claims that stay without an allocation.
        """
        left = []
        for consumer in sorted({c.consumer_uuid for c in claims}):
            mine = [c for c in claims if c.consumer_uuid == consumer]
            server = self._owner_at_rest(mine[0])
            if server is None:
                left += mine
                continue
            try:
                wanted = {(c.provider_uuid, c.resource_class) for c in mine}
                held = [c for c in self._holdings.of(server_uuid, mine[0].role)
                        if c.consumer_uuid == consumer
                        and (c.provider_uuid, c.resource_class) in wanted]
                with self._offered(mine):
                    self._cloud.reallocate(
                        server_uuid, consumer,
                        self._resources(server.accelerators, held))
            except exception.PlacementUnavailable as error:
                self._once.log(('unallocated', server_uuid, 'why'),
                               LOG.warning, '%s', error)
                left += mine
                continue
            LOG.warning('Server %s holds accelerators that Placement had not '
                        'allocated to %s: they are allocated again',
                        server_uuid, 'it' if consumer == server_uuid
                        else f'its migration {consumer}')
        return left

    def _owner_at_rest(self, claim):
        """Return Nova's entry of the server of a claim if the server is at
        rest. Return None if Nova may end or move the claim now."""
        if claim.role is model.Role.OLD:
            server = self._cloud.open_moves([claim.consumer_uuid]).get(
                claim.consumer_uuid)
            # during a task, the move may fail, and Nova removes its allocation
            return server if server and not server.task_state else None
        if self._holdings.of(claim.instance_uuid, model.Role.OLD):
            # until the move ends, either set of devices may be released
            return None
        return next((server for server
                     in self._cloud.servers([claim.instance_uuid])
                     if not server.task_state), None)

    @contextlib.contextmanager
    def _offered(self, claims: Collection[model.Claim]) -> Iterator[None]:
        """Offer the devices of claims while the context allocates them again,
        because Placement does not allocate withheld devices.

        After an error the devices are withheld again.
        """
        inventory = self._inventory
        uuids = {c.uuid for c in claims} & inventory.offers.unallocated

        def show(unallocated):
            if uuids:
                inventory.offers.unallocated = unallocated
                self._publisher.show_devices(claims)
        show(inventory.offers.unallocated - uuids)
        try:
            yield
        except Exception:
            show(inventory.offers.unallocated | uuids)
            raise

    @staticmethod
    def _resources(server, claims):
        found: dict[str, dict[str, int]] = {}
        memory = {wanted.group: wanted.memory for wanted in server.requests}
        for group in {c.group for c in claims}:
            mine = [c for c in claims if c.group == group]
            for claim in mine:
                amounts = found.setdefault(claim.provider_uuid, {})
                amounts[claim.resource_class] = amounts.get(
                    claim.resource_class, 0) + 1
            for name, mib in memory.get(group, {}).items():
                amounts = found[mine[0].provider_uuid]
                amounts[name] = amounts.get(name, 0) + mib
        return found
