# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find claims that nobody stands behind any more, and release them; give
running guests back what they lost.

A server can go without this host hearing of it: deleted while the host was
down, or before it was built. Its claim is released when there is certain proof
that the device is free: no guest of it on this host, and no consumer in
Placement that it could be.

A guest can go on without its device: nova-compute was killed between its loss
and its return, or the guest, asked for it, let go of it after nobody waited
any longer.
"""

from collections.abc import Callable
import time

from oslo_log import log as logging

from nova_accel import conf
from nova_accel.host import limited
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class Reconciler:

    def __init__(self, accelerators, guests: Callable, running: Callable,
                 consumers: Callable, reattach: Callable, context: Callable):
        """
        :param guests: gives the uuids of the guests that libvirt has.
        :param running: of those that run.
        :param consumers: gives the uuids that have allocations from a
            provider uuid; raises when Placement does not say.
        :param reattach: (instance uuid) gives a running guest the devices
            that it lost.
        :param context: makes an admin context.
        """
        self._accelerators = accelerators
        self._guests = guests
        self._running_guests = running
        self._reattach = reattach
        self._consumers = consumers
        self._context = context
        self._ran_at = None
        self._background = limited.Background(self._logged_run)

    def run_if_due(self) -> None:
        """Compare in the background, at start and then periodically."""
        first, now = self._ran_at is None, time.monotonic()
        if (first or now - self._ran_at >= CONF.accel.discovery_interval) and (
                self._background.start(first)):
            self._ran_at = now

    def _logged_run(self, first):
        try:
            self.run(first)
        except Exception as error:
            LOG.warning('Claims could not be compared with libvirt and '
                        'Placement, and stay as they are: %s', error)

    def run(self, first: bool = False) -> int:
        """Compare now; asks Placement only for claims without a guest.

        :param first: nova-compute has just started, so that what it was at
            when it ended may be half done.
        :returns: how many accelerators were released.
        """
        self._accelerators.inventory.recover()
        released = self._accelerators.release_again(self._context())
        claims = self._accelerators.store.claims()
        if not claims:
            return released
        self._reattach_all(claims, first)
        guests = {model.Role.CURRENT: set(self._guests()),
                  # the old self of a server that moved stays defined
                  model.Role.OLD: set(self._running_guests())}
        current = {(c.instance_uuid, c.provider_uuid) for c in claims
                   if c.role is model.Role.CURRENT}
        consumers = {}
        stale = set()
        for claim in claims:
            if (claim.state is model.ClaimState.DELETING
                    or claim.instance_uuid in guests[claim.role]
                    or self._accelerators.is_plugging(claim.instance_uuid)):
                continue
            if claim.provider_uuid not in consumers:
                consumers[claim.provider_uuid] = self._consumers(
                    claim.provider_uuid)
            owners = {claim.consumer_uuid}
            if (claim.instance_uuid, claim.provider_uuid) not in current:
                # of a move that is reverted or failed Placement hears first
                owners.add(claim.instance_uuid)
            if not owners & consumers[claim.provider_uuid]:
                stale.add((claim.instance_uuid, claim.role))
        for instance_uuid, role in stale:
            LOG.warning('Server %s has no guest here and no allocation: its '
                        'accelerators are released', instance_uuid)
            released += self._accelerators.unplug(
                self._context(), instance_uuid, role)
        return released

    def _reattach_all(self, claims, first):
        held = {c.instance_uuid for c in claims
                if c.role is model.Role.CURRENT}
        if not first:
            # of those that were left without their function the owner knows
            held -= {c.instance_uuid for c in claims
                     if c.state is not model.ClaimState.BOUND}
        for uuid in held & set(self._running_guests()):
            try:
                self._reattach(uuid)
            except Exception as error:
                LOG.error('Server %s runs and may be without its '
                          'accelerators (virsh dumpxml %s): %s',
                          uuid, uuid, error)
