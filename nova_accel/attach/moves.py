# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep the devices of a server that moves until the move ends.

A resize or a migration sets the claims of its server aside: their consumer
becomes the migration. The claims return to the server if Nova reverts the
move, and are released if Nova confirms the move.
"""

import dataclasses

from nova_accel.attach import carrying as guest_claims
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import releases as server_releases
from nova_accel.attach import reshape as allocation_moves
from nova_accel import locks
from nova_accel import model
from nova_accel import request


@dataclasses.dataclass(eq=False)
class Moves:
    _cloud: novas.Cloud
    _holdings: server_holdings.Holdings
    _reshape: allocation_moves.Reshape
    _servers: locks.Locks
    _releases: server_releases.Releases
    _carrying: guest_claims.Carrying

    def set_aside(self, server_uuid: str, migration_uuid: str) -> None:
        """Keep the devices of a server that moves away until the move ends,
        and release the devices from before an earlier move."""
        self._releases.begin_postponed(server_uuid)
        self._releases.release_all(server_uuid, model.Role.OLD)
        self._holdings.set_aside(server_uuid, migration_uuid)
        self._carrying.update(server_uuid)

    def revert(self, server_uuid: str, migration_uuid: str) -> None:
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

    def confirm(self, server_uuid: str, migration_uuid: str) -> None:
        """Release the devices that a server had before it moved."""
        self._releases.clean(self._releases.begin_locked(
            server_uuid, lambda: self._holdings.of_migration(
                server_uuid, migration_uuid)))
        self._carrying.update(server_uuid)

    def end_earlier(self, context, server: request.Server) -> None:
        """Transfer the claims of an ended move to the server, if Placement has
        allocated their devices to the server.

        The claims are still those of the move if the store could not be
        written when the move failed, when Nova reverted it, or when a live
        migration to this host succeeded.
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
