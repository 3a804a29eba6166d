# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Claim free handles for a server.

The handles are chosen from memory without a lock, because asking the kernel
whether a process of the host has them open may take long. Then, under the lock
"choice", the handles are claimed if they are still offered. Otherwise other
handles are chosen, again without the lock. For example, two builds choose the
same VF: the second build finds the VF HELD under the lock, releases the lock,
and chooses another VF.
"""

from collections.abc import Iterator
import contextlib
import dataclasses

from oslo_utils import uuidutils

from nova_accel.attach import choice as device_choice
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import readiness as device_readiness
from nova_accel.attach import regions as free_regions
from nova_accel.attach import releases as server_releases
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request
from nova_accel.store import claim_store


@dataclasses.dataclass(eq=False)
class Claiming:
    _store: claim_store.ClaimStore
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _readiness: device_readiness.Readiness
    _choice: device_choice.Choice
    _regions: free_regions.Regions
    _releases: server_releases.Releases

    def claim(self, server: request.Server, steps: plan.Plan,
              consumer: str, taken: list[model.Claim]) -> list[
                  tuple[request.AcceleratorRequest, list[model.Claim]]]:
        """Claim free handles of the allocated providers, all or none.

        Waits for regions that are being cleaned after another server, because
        that takes less time than a build on another host.

        :param consumer: uuid of the server, or of its migration, to which the
            devices are allocated.
        :param taken: a list to which the claims are appended.
        :returns: each request with its claims.
        :raises AcceleratorError: nothing was claimed except the claims in
            taken.
        """
        takes = steps.take
        if not takes:
            return []
        self._await_clean({take.provider_uuid for take in takes})
        # a device may have been disabled just now, and its pool have others
        self._store.refresh()
        kept = [claim for keep in steps.keep for claim in keep.claims]
        with self._chosen_unused(server, takes, kept) as chosen:
            todo = []
            for take in takes:
                offered = [chosen[take.provider_uuid].pop(0)
                           for _ in range(take.wanted.amount)]
                todo.append((take.wanted, self._new_claims(
                    server, take, offered, consumer)))
            claims = [claim for _, new in todo for claim in new]
            self._holdings.claim(claims)
            taken += claims
        # an operator's programming may have begun before the claim
        self._regions.gate.wait(claims)
        return todo

    @contextlib.contextmanager
    def _chosen_unused(self, server, takes, kept,
                       ) -> Iterator[device_choice.Chosen]:
        """Choose handles that no process of the host has open, and hold the
        lock "choice" inside the context.

        Between the question and the lock, another build may claim one of the
        handles. Then choose again without the lock.
        """
        asked: set[model.AttachHandle] = set()
        while True:
            chosen = self._choice.choose(server, takes, kept)
            new = [offer for found in chosen.values() for offer in found
                   if offer.handle not in asked]
            self._inventory.ask_users(new)
            asked.update(offer.handle for offer in new)
            with self._inventory.claiming:
                if self._choice.is_current(chosen):
                    yield chosen
                    return

    def _await_clean(self, provider_uuids):
        """Clean regions that other servers have released, or wait until a
        cleaning that has begun ends."""
        left = [claim for claim in self._holdings.being_released()
                if claim.provider_uuid in provider_uuids
                and claim.region_index is not None and not claim.error]
        if left:
            self._releases.clean(left, patient=True)

    def _new_claims(self, server, take, offered, consumer):
        wanted = take.wanted
        for offer in offered:
            self._check_keys(wanted, offer.device)
        created_type = self._readiness.type_for(wanted, offered[0].device)
        shown = self._inventory.shown.providers()
        index = shown[take.provider_uuid].region_index
        return [model.Claim(
            uuid=uuidutils.generate_uuid(), instance_uuid=server.uuid,
            consumer_uuid=consumer, project_id=server.project_id,
            flavor=server.flavor, product=offer.device.product,
            **self._inventory.identity_for_claim(offer.device.address),
            provider_uuid=take.provider_uuid,
            resource_class=wanted.resource_class, group=wanted.group,
            device_address=offer.device.address,
            region_index=index,
            handle=offer.handle, created_type=created_type,
            driver_request=device_readiness.for_driver(wanted),
            operators_bitstream=None if index is None
            else offer.device.region(index).operators_bitstream)
            for offer in offered]

    def _check_keys(self, wanted, device):
        known = self._inventory.driver_of(device).KEYS
        for name in sorted(set(wanted.driver_keys) - known):
            raise exception.InvalidRequest(
                f'The driver {device.driver} of {device.address} does not '
                f'support the extra spec accel{wanted.group}:driver_{name}, '
                f'and supports {", ".join(sorted(known)) or "none"}: '
                f'correct it, or remove it from the flavor or profile.')
