# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel release: the operator releases a claim or a handle."""

import dataclasses

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel.attach import reconcile
from nova_accel.attach import releases as server_releases
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel.inventory import holds
from nova_accel import locks
from nova_accel import model
from nova_accel import text


@dataclasses.dataclass(eq=False)
class Release:
    """Carries out the order "release" of the operator."""

    _cloud: novas.Cloud
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _publisher: publishing.Publisher
    _servers: locks.Locks
    _releases: server_releases.Releases
    _reconciler: reconcile.Reconciler

    def release(self, name: str) -> str:
        """Release an abandoned claim, which has no guest, allocation or
        server, or a handle that waits for the operator.

        :param name: address of the handle, or UUID of the claim.
        :returns: the evidence, and what was done.
        :raises DeviceUnavailable: no claim has this name, something needs the
            claim, or cleaning failed.
        """
        found = [c for c in self._holdings.all()
                 if name in (c.uuid, c.handle.address)]
        waiting = [offer.claim for offer in self._inventory.offers.now().all()
                   if offer.claim and offer.has(holds.Kind.WAITING)
                   and name in (offer.claim.uuid, offer.handle.address)]
        if waiting:
            return self._release_waiting(waiting)
        if not found:
            raise exception.DeviceUnavailable(
                f'No claim on this host is called {text.printable(name)}: '
                f'name a handle that nova-accel claims shows.')
        with self._servers.held(found[0].instance_uuid):
            proof = [line for claim in self._holdings.now(found)
                     for line in self._proof(claim)]
            self._releases.release_to_the_end(found)
        return '\n'.join(proof + [
            f'{c.handle.address} is clean and free.' for c in found])

    def _release_waiting(self, waiting):
        """Offer handles again that waited for the operator."""
        self._holdings.returned(waiting)
        self._publisher.show_devices(waiting)
        return '\n'.join(
            f'{c.handle.address} waited for you, and is free.'
            for c in waiting)

    def _proof(self, claim):
        """Return sentences with the evidence that a claim is abandoned.

        :raises DeviceUnavailable: something needs the claim.
        """
        address, server = claim.handle.address, claim.holder
        if claim.state is model.ClaimState.DELETING:
            return [f'Server {server} has released {address} before.']

        def refuse(what, then):
            raise exception.DeviceUnavailable(
                f'The claim of server {server} on {address} cannot be '
                f'released, because {what}: {then}.')
        for guest, devices in sorted(self._cloud.guest_devices().items()):
            if address in devices and (guest, claim.role) != (
                    # until a resize is confirmed, the old guest is defined
                    claim.instance_uuid, model.Role.OLD):
                refuse(f'the guest of server {guest} has the device',
                       'delete or shelve the server')
        snapshot, failure = self._reconciler.ask([claim])
        if failure:
            raise failure
        if snapshot.has_guest(claim):
            refuse('libvirt has the guest of the server',
                   'delete or shelve the server')
        if snapshot.plugging:
            refuse('the server is being built', 'wait for that')
        if snapshot.is_allocated(claim):
            refuse('Placement has it allocated',
                   f'delete or shelve the server; where it does not exist, '
                   f'openstack resource provider allocation delete '
                   f'{claim.consumer_uuid}')
        if snapshot.open_moves:
            refuse('Nova may revert the resize of the server',
                   'confirm or revert it')
        if claim.role is model.Role.CURRENT and self._cloud.servers(
                [claim.instance_uuid]):
            refuse('Nova has the server on this host', 'delete or shelve it')
        return [f'No guest in libvirt has {address}, and none is of server '
                f'{server}.',
                f'Placement has allocated nothing of it to {server}.',
                *([f'Nova has no server {server} on this host.']
                  if claim.role is model.Role.CURRENT else ())]
