# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Send the use of devices through Nova's notifier, after each look
(inventory.looks).

Each use of store.uses has the events accel.claim.begin, accel.claim.exists
every hour, and accel.claim.end. Each event contains the total seconds of the
use so far. Hence sums stay correct if an event is lost, or sent twice because
nova-compute was killed.
"""

from collections.abc import Iterator

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel import inventory as host_inventory
from nova_accel.store import claim_store
from nova_accel.store import values

#: seconds of a use after which accel.claim.exists is sent again
EXISTS_SECONDS = 3600


class Usage:

    def __init__(self, cloud: novas.Cloud, store: claim_store.ClaimStore,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings):
        self._cloud = cloud
        self._store = store
        self._inventory = inventory
        self._holdings = holdings
        self._is_resumed = False

    def resume(self) -> None:
        """Count the time in which nova-compute did not run, for servers that
        are still on this host.

        If a server was evacuated or deleted meanwhile, its use ends at the
        last count. Called at the start before claims are released.
        """
        claims = [claim for claim in self._holdings.all() if claim.is_use]
        uuids = {claim.instance_uuid for claim in claims}
        here = {server.uuid for server in (
            self._cloud.servers(uuids) if uuids else ())}
        self._store.count_uses(frozenset(
            claim.uuid for claim in claims
            if claim.instance_uuid not in here))
        self._is_resumed = True

    def count(self) -> list[values.Use]:
        """Add the seconds since the last count to all uses, and return the
        uses from ClaimStore.count_uses()."""
        if not self._is_resumed:
            self.resume()
        return self._store.count_uses()

    def run(self) -> None:
        """Count the use, and send the events that are due."""
        sent: list[tuple[values.Use, str]] = []
        try:
            for use in self.count():
                for event in due(use):
                    self._cloud.notify(
                        f'accel.claim.{event}', self._payload(use))
                    sent.append((use, event))
        finally:
            self._store.note_reported(sent)

    def _payload(self, use: values.Use) -> dict[str, object]:
        device = self._inventory.devices.get(use.device)
        return {
            'claim': use.claim, 'server': use.server, 'project': use.project,
            'flavor': use.flavor, 'type': use.type, 'product': use.product,
            'device': use.device, 'part': use.part,
            # the name of a type does not show its memory
            'memory': next((kind.memory for kind in (
                device.creatable if device else ()) if kind.name == use.part),
                0),
            'since': use.since, 'until': use.until,
            'seconds': round(use.seconds, 3)}


def due(use: values.Use) -> Iterator[str]:
    """Yield the events of a use that must be sent now."""
    if not use.sent:
        yield 'begin'
    if not use.counted:
        yield 'end'
    elif use.seconds - use.reported >= EXISTS_SECONDS:
        yield 'exists'
