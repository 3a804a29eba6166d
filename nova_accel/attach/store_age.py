# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Detect a lost or outdated claim store when nova-compute starts.

The store is outdated if it was lost or moved away, or if an older copy was
restored. Guests carry the claims of their servers (attach.carrying), even if
they do not run. Claims in guests that the store has not seen (store.claims)
are restored exactly, before any claim is used. Then every device is withheld
until attach.settling finds that no server has it.

If guests are lost as well, Placement still has allocations without a claim:
all devices of that resource class are withheld. Damaged metadata, and metadata
of another compute host, are not used. A device without a claim is withheld if
a guest with such metadata has it.

For example, the disk of a host is restored from yesterday's backup. Server A
was created today and has a GPU. The store lacks its claim, but the guest's
metadata have it: the claim is restored, and every GPU without a claim is
cleaned before it is offered.
"""

import collections
from collections.abc import Collection, Iterable, Mapping
import dataclasses

from nova_accel.attach import carrying as guest_claims
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel.inventory import tree as provider_tree
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store
from nova_accel.store import values

LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Allocated:
    """Allocations of Placement to servers of this host."""

    #: (server uuid, resource class) -> amount, including its moves
    amounts: Mapping[tuple[str, str], int]
    #: resource class -> servers with fewer claims than allocated devices
    short: Mapping[str, Collection[str]]
    #: keys of amounts whose claims have ended: Nova deletes these later
    ended: Collection[tuple[str, str]]

    def confirms(self, claim: model.Claim) -> bool:
        """Return whether the server of a claim has an allocation of the
        resource class of the claim."""
        return (claim.instance_uuid, claim.resource_class) in self.amounts


class StoreAge:

    def __init__(self, store: claim_store.ClaimStore,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 carrying: guest_claims.Carrying, cloud: novas.Cloud):
        self._store = store
        self._inventory = inventory
        self._holdings = holdings
        self._carrying = carrying
        self._cloud = cloud
        self._once = logging.Once()
        #: whether claims were compared with guests; and with Placement
        self._guests_compared = self._compared = False
        #: server -> why the claims that its guest carries are not used
        self.refused: Mapping[str, str] = {}
        #: uuids of the providers that Placement had before the first report
        self._shown_before: Collection[str] = ()

    def begin(self) -> bool:
        """Try compare_with_guests().

        :returns: False if libvirt does not answer, which is logged.
        """
        try:
            self.compare_with_guests()
            self._once.forget('why')
            return True
        except Exception as error:
            self._log_unknown(str(error) or repr(error))
            return False

    def compare_with_guests(self) -> None:
        """Restore claims that guests carry and the store has not seen.

        Only the first successful call after a start does so, before any claim
        is used. While the store has no compute node, for example before Nova's
        first report, a call does nothing.

        :raises Exception: libvirt does not answer.
        """
        node = self._store.lineage().node
        if node and not self._guests_compared:
            self._restore(node)
            self._guests_compared = True

    def before_report(self, tree, node: str) -> bool:
        """Detect before Nova's first report whether the store is outdated.

        Called under the lock of Nova's resource tracker.

        :param tree: nova.compute.provider_tree.ProviderTree, as Placement has
            it.
        :returns: whether devices may be reported. Otherwise the reason is
            logged.
        """
        if self._compared:
            return True
        try:
            root_uuid = tree.data(node).uuid
            shown = provider_tree.accelerators(tree, node)
            self._shown_before = shown.keys()
            if values.EVERYTHING in self._store.unsettled():
                self._begin(root_uuid, set(shown.values()))
            else:
                self._store.set_node(root_uuid)
                self.compare_with_guests()
                if shown or self._holdings.all():
                    self._compare_with_placement(node, root_uuid)
            self._compared = True
        except Exception as error:
            self._log_unknown(str(error) or repr(error))
        return self._compared

    def _begin(self, root_uuid, shown):
        # providers of devices that are absent now; present ones are added below
        todo = {part for part in shown if not naming.is_pool(part)}
        if not shown and not self._in_guests():
            LOG.info('The claim store is new, and so is this host: its '
                     'accelerators are offered as they are')
        else:
            LOG.warning(
                'The claim store is new, and this host is not: guests and '
                'Placement show which server has which device, and all other '
                'devices are cleaned before they are offered again')
            todo |= set(self._inventory.devices)
        self._store.set_node(root_uuid)
        self._holdings.settle(
            done=[values.EVERYTHING],
            todo=[values.Unsettled(address) for address in todo])
        # each round retries, and every device is withheld meanwhile
        self.begin()

    def _in_guests(self) -> bool:
        ours = {function for device in self._inventory.devices.values()
                for function in (*device.functions(), *(
                    h.address for h in device.handles))}
        return any(ours & there
                   for there in self._cloud.guest_devices().values())

    def _restore(self, node):
        """Store the claims that guests carry and the store has not seen, and
        withhold all devices. Without such claims, withhold only devices
        without a claim that are in guests with unusable metadata."""
        newer, self.refused = self._carrying.read(node)
        handles = collections.Counter(
            c.handle for there in newer.values() for c in there.claims)
        claims = [c for there in newer.values() for c in there.claims
                  if handles[c.handle] == 1]
        uuids, taken = {c.uuid for c in claims}, {c.handle for c in claims}
        gone = [c for offer in self._inventory.table.offered().all()
                for c in [offer.claim] if c and (
                    c.uuid in uuids or c.handle in taken
                    or any(_is_in_other_slot(c, now) for now in claims)
                    or c.instance_uuid in newer and (
                        c.state is not model.ClaimState.DELETING))]
        todo = set(self._inventory.devices if newer
                   else self._devices_of_refused())
        if not (todo or claims):
            return
        if newer:
            LOG.warning(
                'The claim store is older than the claims that the guests of '
                'servers %s carry, which are restored; all other devices are '
                'cleaned before they are offered again',
                ', '.join(sorted(newer)))
        self._holdings.restore(
            claims, gone, self._withhold(todo),
            [(there.run, there.changes) for there in newer.values()])
        for claim in claims:
            LOG.warning('Server %s has %s of %s', claim.instance_uuid,
                        claim.handle.address, claim.device_address)

    def _devices_of_refused(self):
        """Yield the addresses of the devices without a claim in guests with
        unusable metadata."""
        if not self.refused:
            return
        guests = self._cloud.guest_devices()
        claimed = {c.handle.address for c in self._holdings.all()}
        there = {address for server in self.refused
                 for address in guests.get(server, ())} - claimed
        for address, device in self._inventory.devices.items():
            if any(h.address in there for h in device.all_handles):
                yield address

    def _compare_with_placement(self, node, root_uuid):
        given = self.allocated(self._inventory.shown.providers_of(
            node, root_uuid), only_known=True)
        self._store.forget_ended(given.ended)
        short = given.short
        todo = [device.address for device in self._inventory.devices.values()
                if naming.resource_class(device.type) in short]
        if todo:
            LOG.warning(
                'Placement has allocated accelerators to %s for which this '
                'host has no claims, for example because an older copy of the '
                'claim store was restored: all other devices of these classes '
                'are withheld until both agree', ', '.join(sorted(
                    {server for some in short.values() for server in some})))
            self._holdings.settle(todo=self._withhold(todo))

    def allocated(self, providers: Iterable[str], only_known: bool = False,
                  ) -> Allocated:
        """Read the allocations of servers on this host, and compare them with
        the claims.

        :param providers: uuids of providers to query, in addition to those of
            claims and those in Placement before the first report.
        :param only_known: whether to ignore missing claims of servers that may
            be arriving. Only moves, and servers of this host without a task,
            count then.
        :raises PlacementUnavailable: Placement does not answer.
        """
        cloud, claims = self._cloud, self._holdings.all()
        amounts: collections.Counter = collections.Counter()
        for consumers in cloud.consumers_of({
                *providers, *self._shown_before,
                *(c.provider_uuid for c in claims)}).values():
            for consumer, resources in consumers.items():
                amounts.update({
                    (consumer, name): amount for name, amount
                    in naming.accelerators(resources).items()})
        claimed = collections.Counter(
            (c.instance_uuid, c.resource_class) for c in claims)
        moves = cloud.moves({key[0] for key, amount in amounts.items()
                             if amount > claimed[key]})
        by_server: collections.Counter = collections.Counter()
        for (consumer, name), amount in amounts.items():
            by_server[moves.get(consumer, consumer), name] += amount
        # lost vGPUs are created again: a free one has no data of its server
        created = {naming.resource_class(device.type) for device
                   in self._inventory.devices.values() if device.creatable}
        over = {key for key, amount in by_server.items()
                if amount > claimed[key] and key[1] not in created}
        # Nova deletes the allocation of an ended claim later, or keeps it, for
        # example after a failed resize
        ended = self._store.ended()
        short = over.difference(ended)
        # a server that never ran has no data, and may still be built
        counts = {
            server.uuid: server.launched
            and not (only_known and server.task_state)
            for server in (cloud.servers({owner for owner, _ in short})
                           if short else ())}
        found: dict[str, set[str]] = collections.defaultdict(set)
        for owner, name in short:
            if counts.get(owner, owner in moves.values() or not only_known):
                found[name].add(owner)
        return Allocated(by_server, found, over.intersection(ended))

    def _withhold(self, addresses):
        """Return rows that withhold the devices at these addresses. Forget the
        content of their regions, because a server could have changed it."""
        rows = self._store.unsettled()
        found = [device for address in addresses
                 for device in [self._inventory.devices[address]]
                 if not any(row.means(device) for row in rows)]
        for device in found:
            for region in device.regions:
                self._inventory.contents.forget(
                    device.address, region.index, None)
        return [values.Unsettled(device.address) for device in found]

    def _log_unknown(self, why):
        self._once.log(
            ('why',), LOG.error, 'Accelerators may have data of servers, and '
            'are withheld: %s', why)


def _is_in_other_slot(claim: model.Claim, now: model.Claim) -> bool:
    """Return whether two claims are on the same handle of one card, although
    the card was in different slots.

    :param claim: the claim with the former slot of the card.
    :param now: the claim with the present slot.
    """
    return (claim.card.identifies(now.card)
            and claim.handle.type is now.handle.type is model.HandleType.PCI
            and pci.moved(claim.handle.address, claim.device_address,
                          now.device_address) == now.handle.address)
