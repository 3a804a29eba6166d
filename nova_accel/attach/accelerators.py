# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Claim and prepare devices for servers, and keep them during moves.

The os-acc specification has three calls, all inside nova-compute. Two are
here, and attach.guests has the third, unplug.

plug    Give a server its allocated devices: plan, release surplus claims,
        claim, program, prepare, bind, publish. If a step fails, undo the
        earlier ones.
resume  Restore the devices of a server before it starts again. If that fails,
        raise an error that keeps the guest down.

A resize or a migration sets the claims of its server aside: their consumer
becomes the migration. The claims return to the server if Nova reverts the
move, and are released if Nova confirms the move.
"""

import dataclasses

import os_resource_classes

from nova_accel.attach import carrying as guest_claims
from nova_accel.attach import choice as device_choice
from nova_accel.attach import cloud as novas
from nova_accel.attach import following as claim_following
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import publishing
from nova_accel.attach import readiness as device_readiness
from nova_accel.attach import releases as server_releases
from nova_accel.attach import reshape as allocation_moves
from nova_accel.attach import settling as device_settling
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel.inventory import offers
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel import request

LOG = logging.getLogger(__name__)
#: resource classes that Nova's own libvirt driver reports as well
_NOVAS = (os_resource_classes.VGPU,)
_Got = tuple[request.AcceleratorRequest, offers.Offer]


@dataclasses.dataclass(eq=False)
class Accelerators:
    """Gives devices to servers of this host, restores them, and keeps them
    until a move ends."""

    _cloud: novas.Cloud
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _publisher: publishing.Publisher
    _readiness: device_readiness.Readiness
    _settling: device_settling.Settling
    _reshape: allocation_moves.Reshape
    _choice: device_choice.Choice
    _servers: locks.Locks
    _releases: server_releases.Releases
    _carrying: guest_claims.Carrying
    _following: claim_following.Following

    # Plug

    def plug(self, context, server: request.Server,
             allocations: plan.Allocations | None,
             claimed: list[model.Claim] | None = None,
             migration: str | None = None) -> list[model.Claim]:
        """Claim and prepare the devices that are allocated to a server.

        Idempotent: allocated devices that the server holds stay unchanged.
        After an error the server holds what it held before.

        :param allocations: ``{provider uuid: {'resources': {class: n}}}``.
        :param claimed: a list to which the new claims are appended.
        :param migration: uuid of the live migration that brings the server to
            this host. All claims are then new, and belong to the migration.
        :returns: all claims of the server, or of the migration.
        :raises AcceleratorError: a subclass that names the reason.
        """
        requests = server.wanted
        if allocations is None:
            found = (f'Server {server.uuid} must get its accelerators, and '
                     f'Placement did not return its allocations')
            raise exception.PlacementUnavailable(
                f'{found}: check that it answers nova-compute.', found=found)
        self._releases.begin_postponed(server.uuid)
        with self._servers.held(server.uuid):
            held = [] if migration else self._reshape.located(
                self._holdings.of(server.uuid), allocations)
            steps = plan.to_plug(server.uuid, requests, allocations,
                                 self._ours(allocations, held), held)
            if steps.surplus:
                LOG.warning('Server %s holds devices that are not allocated '
                            'to it; they are released', server.uuid)
                self._holdings.releasing(steps.surplus)
        if steps.surplus:
            self._releases.clean(steps.surplus)
        return self._carry_out(context, server, steps, claimed, migration)

    def _ours(self, allocations, held):
        ours = self._inventory.shown.allocated(
            allocations, unused={c.part for c in held})
        # a provider that does not show its devices is known from the claims
        # only; after a boot of the host that is each one, until Nova reports
        # the node
        known = {allocation.provider_uuid for allocation in ours}
        named = {claim.provider_uuid for claim in held} - known
        return ours + [
            request.Allocation(
                uuid, naming.accelerators(allocation['resources']),
                frozenset())
            for uuid, allocation in allocations.items() if uuid in named]

    def _carry_out(self, context, server, steps, claimed=None,
                   migration=None):
        """Carry out a plan: claim, program, prepare, bind and publish."""
        taken = [] if claimed is None else claimed
        try:
            todo = self._choice.claim(
                server, steps, migration or server.uuid, taken)
            for keep in steps.keep:
                self._readiness.prepare_held(context, server, keep)
            self._readiness.prepare_new(context, server, todo)
        except Exception:
            if taken:
                self._releases.clean(self._releases.begin(server.uuid, taken))
                taken.clear()
            raise
        claims = (self._holdings.of_migration(server.uuid, migration)
                  if migration else self._holdings.of(server.uuid))
        self._readiness.rescan_siblings(claims)
        self._publisher.show(self._still_open(claims))
        return claims

    def _still_open(self, claims):
        """Yield the claimed providers that may still have free inventory.

        Placement must show their changes at once, because nova-scheduler may
        choose these providers again. Full providers are reported periodically.
        """
        for part, mine in server_holdings.by_region(claims).items():
            shown = self._inventory.table.reports.reported(part[0])
            region = shown.find_region(part[1]) if shown else None
            if mine[0].created_type or region and (
                    len(region.handles) > len(mine)):
                yield mine[0].provider_uuid

    def can_have(self, server: request.Server,
                 allocations: plan.Allocations, moving: bool = False) -> bool:
        """Return whether plug() would find the devices that the flavor demands.

        Reads only memory and the store, because Nova calls this under the lock
        that each build needs. Claims nothing. Handles that are being cleaned
        count as free, because plug() waits for them.

        :param server: server.numa_nodes are the host nodes that the guest may
            use.
        :param allocations: see plug().
        :param moving: True if the server moves, perhaps within this host. The
            present claims of the server are then ignored, because the move
            sets them aside.
        """
        try:
            self.would_get(server, allocations, moving)
        except exception.AcceleratorError:
            return False
        return True

    def would_get(self, server: request.Server, allocations: plan.Allocations,
                  moving: bool) -> list[_Got]:
        """Return the handles that plug() would take. For parameters see
        can_have().

        :raises AcceleratorError: plug() would fail.
        """
        held = [] if moving else self._reshape.located(
            self._holdings.of(server.uuid), allocations)
        steps = plan.to_plug(server.uuid, server.wanted, allocations,
                             self._ours(allocations, held), held)
        chosen = self._choice.choose(
            server, steps.take,
            [claim for keep in steps.keep for claim in keep.claims],
            [*steps.surplus, *self._holdings.being_released()])
        return [(take.wanted, chosen[take.provider_uuid].pop(0))
                for take in steps.take for _ in range(take.wanted.amount)]

    # Resume

    def resume(self, context, server: request.Server,
               requests: plan.Requests | None = None,
               claimed: list[model.Claim] | None = None) -> None:
        """Restore the devices of a server before it starts again.

        Releases no device, and queries Placement only if a claim is missing
        or unfinished.

        :param requests: at a rebuild, the requests of the flavor and the new
            image. None stands for server.requests.
        :param claimed: a list to which the new claims are appended.
        :raises AcceleratorError: the guest must not start.
        """
        requests = server.requests if requests is None else requests
        self._releases.begin_postponed(server.uuid)
        self._settling.store_age.compare_with_guests()
        self._following.run()
        if not self._holdings.of(server.uuid):
            self._settling.settle_now()
        self.end_earlier(context, server)
        held = self._holdings.of(server.uuid)
        self._readiness.rescan(held)
        steps = plan.Plan(keep=tuple(
            plan.Keep(wanted, tuple(claims)) for wanted, claims
            in server_holdings.by_request(requests, held)))
        if not plan.is_complete(server.requests, held):
            try:
                steps = self._as_allocated(context, server, held)
            except exception.AcceleratorError:
                # if no claim was lost, an allocation without a claim is for a
                # vGPU of Nova, which finds it by the earlier guest
                if self._settling.in_doubt() or not plan.is_complete(
                        server.requests, held, except_for=_NOVAS):
                    raise
        self._carry_out(context, server, steps, claimed)

    def _as_allocated(self, context, server, held):
        """Plan the start of a server of which claims are missing or
        unfinished. The plan follows the server's allocations in Placement.

        :raises AcceleratorError: the guest must not start.
        """
        allocations = self._cloud.allocations(context, server.uuid)
        held = self._reshape.located(held, allocations)
        ours = self._ours(allocations, held)
        self._settling.check_settled(server.uuid, allocations, held)
        return plan.to_start(
            server.uuid, server.wanted, allocations, ours, held)

    def restore(self, context, server: request.Server) -> None:
        """Restore the devices of a server whose guest keeps running.

        :raises AcceleratorError: a device is not restored.
        """
        self._releases.begin_postponed(server.uuid)
        self._readiness.restore(context, server, self._holdings.of(server.uuid))

    # Moves

    def set_aside(self, server_uuid: str, migration_uuid: str) -> None:
        """Keep the devices of a server that moves away until the move ends,
        and release the devices from before an earlier move."""
        self._releases.begin_postponed(server_uuid)
        self._releases.release_all(server_uuid, model.Role.OLD)
        self._holdings.set_aside(server_uuid, migration_uuid)
        self._carrying.update(server_uuid)

    def revert_move(self, server_uuid: str, migration_uuid: str) -> None:
        """Release the present devices of a server, and restore its devices
        from before the move.

        :raises AcceleratorsUnavailable: the store cannot be written; nothing
            has changed.
        """
        with self._servers.held(server_uuid):
            back = self._holdings.of_migration(server_uuid, migration_uuid)
            # without claims of the move, it was reverted before
            ended = self._holdings.revert(server_uuid, back) if back else []
            self._carrying.update(server_uuid)
        self._releases.clean(ended, wait=False)

    def confirm_move(self, server_uuid: str, migration_uuid: str) -> None:
        """Release the devices that a server had before it moved."""
        self._releases.clean(self._releases.begin_locked(
            server_uuid, lambda: self._holdings.of_migration(
                server_uuid, migration_uuid)))
        self._carrying.update(server_uuid)

    def end_earlier(self, context, server: request.Server) -> None:
        """Transfer the claims of an ended move to the server, if Placement has
        allocated their devices to the server.

        The claims still belong to the move if the store could not be written
        when the move failed, when Nova reverted it, or when a live migration
        to this host succeeded.
        """
        old = self._holdings.of(server.uuid, model.Role.OLD)
        if not old:
            return
        allocations = self._cloud.allocations(context, server.uuid)
        located = self._reshape.located(old, allocations)
        providers = {claim.provider_uuid for claim in located}
        moves = {claim.consumer_uuid for claim in old}
        if providers - set(allocations) or any(
                # in a pool the server may have its new devices, too
                providers & set(self._cloud.allocations(context, consumer))
                for consumer in moves):
            return
        back = plan.to_come_back(
            allocations, located, self._reshape.located(
                self._holdings.of(server.uuid), allocations),
            lambda: any(map(self._cloud.is_reverted, moves)))
        if back:
            uuids = {claim.uuid for claim in back}
            self._releases.clean(
                self._holdings.revert(server.uuid, [
                    claim for claim in old if claim.uuid in uuids]),
                wait=False)
