# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Move claims to the new addresses of their cards.

A boot may number the buses differently, for example after a card was added.
Also, people move cards to other slots. inventory.identity finds the card of a
claim. The claims of all moved cards are written in one transaction, because
one card may have the former address of another. Until a claim has moved, its
server cannot start, and both addresses are withheld ("misplaced").

For example, a new card is added, and the next boot numbers the GPU of server A
0000:65:00.0 instead of 0000:3b:00.0. Before A starts, its claim gets the new
address and the new name of the handle. A claim stays at its old address if

* a running guest has that address, and therefore has opened a card there;
* the driver of the card is not enabled; or
* its new handle belongs to another claim that stays, which must end first.

Names of providers contain addresses: attach.reshape moves the allocations to
the providers that show the cards now. inventory.adoption has already moved the
other facts about the card.
"""

import collections
from collections.abc import Mapping
import dataclasses

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)

#: uuid of a claim -> the claim with the present address of its card
_New = dict[str, model.Claim]


class Following:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud):
        self._inventory = inventory
        self._holdings = holdings
        self._cloud = cloud
        self._once = logging.Once()

    def run(self) -> list[model.Claim]:
        """Move the claims of cards to the present addresses of the cards.

        Costs nothing while every card is at the address in its claims. Logs
        the claims that stay, and stores their reasons in Inventory.staying.

        :returns: the claims that have moved, with their new addresses.
        """
        moved = self._inventory.table.moved()
        if not moved:
            self._inventory.staying = {}
            return []
        with self._inventory.claiming:
            stays: dict[str, str] = {}
            before = {c.uuid: c for c in self._holdings.with_waiting()}
            new = self._new(before, stays)
            done = self._holdings.follow(new)
        self._inventory.staying = stays
        for claim in done:
            was = before[claim.uuid].handle.address
            LOG.warning(
                'The card that was at %s is at %s now, and the claim of '
                'server %s on %s is on %s now',
                before[claim.uuid].device_address, claim.device_address,
                claim.holder, was, claim.handle.address)
        self._log_staying(before, stays)
        return done

    def _new(self, claims: Mapping[str, model.Claim],
             stays: dict[str, str]) -> _New:
        """Return the claims that can move.

        :param claims: all claims, by uuid.
        :param stays: dict to which uuid -> reason is added for other claims.
        """
        new, why = {}, {}
        guests = self._guests()
        for uuid, address in self._inventory.table.moved().items():
            if uuid in claims:
                new[uuid], why[uuid] = self._moved(claims[uuid], address)
                why[uuid] = why[uuid] or guests(claims[uuid])
        for uuid in [u for u, reason in why.items() if reason]:
            self._stay(uuid, why[uuid], claims, new, stays)
        self._check_free(claims, new, stays)
        return new

    def _guests(self):
        """Return a function that takes a claim and returns why the claim must
        stay at its old address. The function returns a clause if a running
        guest has the claimed handle, or if libvirt does not list the guests.
        Otherwise it returns ''."""
        try:
            running = self._cloud.running()
        except Exception as error:
            reason = f'libvirt does not list the running guests ({error})'
            return lambda claim: reason
        return lambda claim: (
            f'a running guest has {claim.handle.address}'
            if claim.handle.address in running.get(claim.instance_uuid, ())
            else '')

    def _moved(self, claim: model.Claim, address: str,
               ) -> tuple[model.Claim, str]:
        """Return a claim with the present address of its card, and ''. If the
        driver cannot name the handle at this address, return the reason
        instead of ''."""
        device = self._inventory.devices[address]
        now = dataclasses.replace(
            claim, device_address=address, ports=device.ports)
        try:
            return dataclasses.replace(
                now, handle=self._inventory.driver_of(device).moved(
                    claim.handle, claim.device_address, address)), ''
        except exception.DeviceUnavailable as error:
            return now, str(error).rstrip('.')

    @staticmethod
    def _stay(uuid, why, claims, new, stays):
        """Keep a claim at its old address, with all other claims of its card.
        """
        card = claims[uuid].device_address, new[uuid].device_address
        for other in [u for u, claim in new.items()
                      if (claims[u].device_address, claim.device_address)
                      == card] if uuid in new else ():
            del new[other]
            stays[other] = why

    def _check_free(self, claims, new, stays):
        """Keep claims at their old address if another claim has the handle to
        which they would move."""
        while True:
            holders = collections.defaultdict(list)
            for uuid, claim in {**claims, **new}.items():
                holders[claim.handle].append(uuid)
            taken = [(uuid, other) for uuid, claim in new.items()
                     for other in holders[claim.handle] if other != uuid]
            if not taken:
                return
            for uuid, other in taken:
                if uuid in new:
                    self._stay(uuid, _why_taken(claims[other]), claims, new,
                               stays)

    def _log_staying(self, claims, stays):
        self._once.only('stays', stays)
        for uuid, why in stays.items():
            self._once.log(
                ('stays', uuid), LOG.error,
                'The card that server %s has as %s is at another address now, '
                'and its claim cannot follow: %s', claims[uuid].holder,
                claims[uuid].handle.address, why)


def _why_taken(claim: model.Claim) -> str:
    """Return a clause for the operator: why the handle of this claim is not
    free for another claim, and how to end this claim."""
    handle = claim.handle.address
    return (f'{handle} waits for the operator: give the command nova-accel '
            f'release {handle}' if claim.waits else
            f'server {claim.holder} has a claim on {handle}, whose card is '
            f'not found: insert it again, or shelve or delete that server')
