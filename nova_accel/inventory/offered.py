# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Cache the offers of a host (inventory.offers)."""

from collections.abc import Collection, Iterable

from nova_accel.drivers import rules
from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store

LOG = logging.getLogger(__name__)


class Offered:
    """The cached offers of this host, for any thread."""

    def __init__(self, table: devices.DeviceTable,
                 store: claim_store.ClaimStore):
        self._table = table
        self._store = store
        #: UUIDs of claims without an allocation in Placement, which could
        #: allocate their devices to others: now() withholds them
        self.unallocated: frozenset[str] = frozenset()
        # guards what follows
        self._lock = locks.Lock('inventory')
        #: the inputs of the last result, and the result
        self._made: tuple[tuple | None, offers.Offers] = (
            None, offers.Offers({}, (), ()))
        self._once = logging.Once()

    def now(self, ends: Collection[str] = (),
            moved: Iterable[model.Claim] = ()) -> offers.Offers:
        """Return all handles of the host, and why servers cannot get some of
        them.

        :param ends: UUIDs of claims that end soon, and are ignored.
        :param moved: changed claims that are not stored yet. They replace the
            stored claims with the same UUIDs.
        """
        moving = {claim.uuid: claim for claim in moved}
        if ends or moving:
            return self._offers([
                moving.get(claim.uuid, claim)
                for claim in self._store.all_claims()
                if claim.uuid not in ends])
        # read first, so a later change causes another computation
        made_of = (self._store.generation, self._table.generation,
                   self.unallocated)
        with self._lock:
            if self._made[0] == made_of:
                return self._made[1]
        offered = self._offers(self._store.all_claims())
        self._log_rivals(offered)
        with self._lock:
            self._made = made_of, offered
        return offered

    def _offers(self, claims: Collection[model.Claim]) -> offers.Offers:
        devices = self._table.snapshot()
        return offers.offers(devices, claims, (
            *self._table.all_holds(),
            *offers.of_claims(devices, claims, self.unallocated),
            *offers.of_unclean(devices.values(), self._store.unclean())),
            rules.sets())

    def _log_rivals(self, offered: offers.Offers) -> None:
        found = {hold.handle: hold.reason for hold in offered.all_holds()
                 if hold.kind is holds.Kind.IOMMU_GROUP}
        found |= {
            offer.handle: f'{offers.named([offer])} is in one IOMMU group '
                          f'with {offers.named(others)}, and only one of '
                          f'these servers can run at a time'
            for offer, others in self.rivals(offered)}
        for handle, why in found.items():
            self._once.log(('group', handle), LOG.warning, '%s', why)
        self._once.only('group', found)

    def rivals(self, offered: offers.Offers | None = None):
        """Return the result of offers.rivals() for the devices of this host:
        handles that share an IOMMU group with handles of other servers."""
        return offers.rivals(offered or self.now(), self._table.snapshot(),
                             rules.sets())
