# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Prepare devices for their server: program, prepare and bind them.

BOUND is stored last: after a crash, a claim in another state is made ready
again. For example, a server starts after its host lost the power. Its FPGA
region is programmed with the function of the claim, its vGPU is created again,
and its GPU is bound to vfio-pci.
"""

from collections.abc import Iterable, Sequence
import dataclasses

from nova_accel.attach import cleaning
from nova_accel.attach import driver_calls
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import preparation as handle_preparation
from nova_accel.attach import programming as region_programming
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request


@dataclasses.dataclass(eq=False)
class Readiness:
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _preparation: handle_preparation.Preparation
    _programming: region_programming.Programming
    _regions: cleaning.Regions

    def prepare_new(self, context, server: request.Server, claimed: Iterable[
            tuple[request.AcceleratorRequest, Sequence[model.Claim]]],
            ) -> None:
        """Prepare devices that a server has just got.

        :param claimed: each request with its claims.
        :raises AcceleratorError: a device is not ready.
        """
        claimed = list(claimed)
        for wanted, claims in claimed:
            if not wanted.programs:
                self._regions.clean_before(claims)
            self._programming.provision(
                context, server.project_id, wanted, claims, scheduled=True)
        for wanted, claims in claimed:
            self._preparation.prepare(claims, fresh=True)
            self.bind(claims, wanted.chosen_by_owner)

    def prepare_held(self, context, server: request.Server,
                     keep: plan.Keep) -> None:
        """Prepare the devices that a server already had. Their content stays
        unless the image of the server names another bitstream.

        :raises AcceleratorError: a device is not ready; the server keeps it.
        """
        claims = keep.claims
        with self._holdings.kept_on_error(claims):
            if keep.wanted in server.requests and any(
                    c.restore_function or c.restore_bitstream
                    for c in claims):
                self._programming.restore(
                    context, server.project_id, claims,
                    {keep.wanted.group: keep.wanted})
            else:
                if keep.wanted in server.wanted:
                    self._holdings.ask(
                        claims, driver_calls.for_driver(keep.wanted))
                self._programming.provision(
                    context, server.project_id, keep.wanted, claims)
            self._preparation.prepare(claims, fresh=False)
            if any(c.state is not model.ClaimState.BOUND or c.error
                   for c in self._holdings.now(claims)):
                self.bind(claims, keep.wanted.chosen_by_owner)

    def restore(self, context, server: request.Server,
                claims: Sequence[model.Claim]) -> None:
        """Restore devices that are in no running guest.

        :raises AcceleratorError: a device is not restored.
        """
        self.rescan(claims)
        self._programming.restore(
            context, server.project_id, claims,
            {r.group: r for r in server.requests})
        self._preparation.prepare(claims, fresh=False)
        self._holdings.bound_as_before(
            [c for c in self._holdings.now(claims)
             if c.state is not model.ClaimState.BOUND or c.error])

    def bind(self, claims: Iterable[model.Claim], by_owner: bool) -> None:
        """Store that the devices of claims are ready, and store the present
        content of their regions.

        :param by_owner: see Holdings.bound().
        """
        for mine in server_holdings.by_region(claims).values():
            self._holdings.bound(
                mine, self._inventory.find_held(mine[0])[1], by_owner)

    def rescan(self, claims: Iterable[model.Claim]) -> None:
        """Scan the cards of claims that a guest could have changed. A guest
        can change a card if it could reprogram a region or had the whole card.
        """
        claims, again = list(claims), set()
        self._inventory.scanner.scan_confined(
            {claim.device_address for claim in claims})
        for claim in claims:
            address, index = claim.device_address, claim.region_index
            if index is not None and self._inventory.guest_can_reprogram(
                    address, index):
                # only the guest knows what it loaded
                self._inventory.contents.forget(
                    address, index, claim.project_id)
                again.add(address)
        if again:
            self._inventory.scanner.scan(addresses=again)
        self._rescan_missing(claims)
        self.rescan_cards(claims)

    def _rescan_missing(self, claims):
        """Scan the cards of claimed handles that the last scan did not find.
        For example, the claim store was new, and a guest had the handle."""
        devices = self._inventory.devices
        missing = {
            claim.device_address for claim in claims
            if claim.created_type is None
            and (device := devices.get(claim.device_address))
            and claim.handle not in device.all_handles}
        if missing:
            self._inventory.scanner.scan(addresses=missing)

    def rescan_cards(self, claims: Iterable[model.Claim]) -> None:
        """Scan cards that a guest had as a whole."""
        whole = {claim.device_address for claim in claims
                 if claim.handle.address == claim.device_address}
        if whole:
            self._inventory.scanner.scan(addresses=whole)

    def rescan_siblings(self, claims: Iterable[model.Claim]) -> None:
        """Scan the devices on which vGPUs of claims were created or removed.
        This changes which other vGPUs the devices can create."""
        created = {c.device_address for c in claims if c.created_type}
        if created:
            self._inventory.scanner.scan(addresses=created)
