# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Ask Placement, libvirt and Nova about claims, for attach.judgement."""

from collections.abc import Collection
import dataclasses

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import judgement
from nova_accel.attach import plugs as server_plugs
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import model


class Snapshots:
    """Takes snapshots; see take()."""

    def __init__(self, cloud: novas.Cloud,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 plugs: server_plugs.Plugs):
        self._cloud = cloud
        self._inventory = inventory
        self._holdings = holdings
        self._plugs = plugs

    def take(self, before: Collection[model.Claim],
             ) -> tuple[judgement.Snapshot, Exception | None]:
        """Ask about claims, in the order of attach.judgement.

        :returns: the answers, and the error if Placement does not answer.
        """
        cloud, inventory = self._cloud, self._inventory
        is_plugging = self._plugs.is_under_way
        shown_by = {c.uuid: inventory.shown.provider_of(c) for c in before}
        consumers, failure = None, None
        try:
            consumers = cloud.consumers_of({
                *(c.provider_uuid for c in before),
                *filter(None, shown_by.values())})
        except exception.PlacementUnavailable as error:
            failure = error
        snapshot = judgement.Snapshot(
            before, shown_by, consumers, guests=cloud.guest_devices(),
            running=cloud.running(), after=self._holdings.all(),
            plugging={c.instance_uuid for c in before
                      if is_plugging(c.instance_uuid)})
        moves = snapshot.moves_to_ask()
        if moves:
            snapshot = dataclasses.replace(snapshot, moves=cloud.moves(moves))
        servers = snapshot.servers_to_ask()
        if servers:
            snapshot = dataclasses.replace(snapshot, entries={
                server.uuid: _entry(server)
                for server in cloud.servers(servers)})
        old = snapshot.open_to_ask()
        if old:
            snapshot = dataclasses.replace(
                snapshot, open_moves=frozenset(cloud.open_moves(old)))
        return snapshot, failure


def _entry(server: novas.Instance) -> judgement.Entry:
    try:
        asks = bool(server.accelerators.requests)
    except exception.InvalidRequest:
        # the request is for accelerators, though it cannot be read
        asks = True
    return judgement.Entry(server.task_state is None, asks)
