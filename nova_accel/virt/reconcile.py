# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find claims that nobody stands behind any more, and release them.

A server can go without this host hearing of it: deleted while the host was
down, or before it was built. Its claim is released when there is certain proof
that the device is free: no guest of it on this host, and no consumer in
Placement that it could be.
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

    def __init__(self, accelerators, guests: Callable, consumers: Callable,
                 context: Callable):
        """
        :param guests: gives the uuids of the guests that libvirt has.
        :param consumers: gives the uuids that have allocations from a
            provider uuid; raises when Placement does not say.
        :param context: makes an admin context.
        """
        self._accelerators = accelerators
        self._guests = guests
        self._consumers = consumers
        self._context = context
        self._ran_at = None
        self._running = None

    def run_if_due(self) -> None:
        """Compare in the background, at start and then periodically."""
        if self._running and not self._running.done() or (
                self._ran_at is not None and time.monotonic() - self._ran_at
                < CONF.accel.discovery_interval):
            return
        self._ran_at = time.monotonic()
        self._running = limited.start(self._logged_run)

    def _logged_run(self):
        try:
            self.run()
        except Exception as error:
            LOG.warning('Claims could not be compared with libvirt and '
                        'Placement, and stay as they are: %s', error)

    def run(self) -> int:
        """Compare now; asks Placement only for claims without a guest.

        :returns: how many accelerators were released.
        """
        store = self._accelerators.store
        claims = store.claims()
        if not claims:
            return 0
        guests = set(self._guests())
        consumers = {}
        released = 0
        stale = set()
        for claim in claims:
            if claim.instance_uuid in guests or (
                    self._accelerators.is_plugging(claim.instance_uuid)):
                continue
            if claim.provider_uuid not in consumers:
                consumers[claim.provider_uuid] = self._consumers(
                    claim.provider_uuid)
            theirs = consumers[claim.provider_uuid]
            # after a resize the consumer is the migration, not the server
            free = (not theirs if claim.role is model.Role.OLD
                    else claim.instance_uuid not in theirs)
            if free:
                stale.add((claim.instance_uuid, claim.role))
        for instance_uuid, role in stale:
            LOG.warning('Server %s has no guest here and no allocation: its '
                        'accelerators are released', instance_uuid)
            released += self._accelerators.unplug(
                self._context(), instance_uuid, role)
        return released
