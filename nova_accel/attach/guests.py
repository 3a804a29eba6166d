# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices of guests that start, run and end.

The driver calls these methods in the order of a guest's life. unplug() is the
third call of os-acc: the claims of a server are released, and each ends when
its device is clean.
"""

from nova_accel.attach import accelerators as server_accelerators
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plugs as server_plugs
from nova_accel.attach import releases as server_releases
from nova_accel.attach import servers as server_locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request

LOG = logging.getLogger(__name__)


class Guests:

    def __init__(self, cloud: novas.Cloud, holdings: server_holdings.Holdings,
                 servers: server_locks.Servers,
                 accelerators: server_accelerators.Accelerators,
                 plugs: server_plugs.Plugs,
                 releases: server_releases.Releases):
        self._cloud = cloud
        self._holdings = holdings
        self._servers = servers
        self._accelerators = accelerators
        self._plugs = plugs
        self._releases = releases

    def handles_to_start(self, context, server: request.Server,
                         ) -> list[model.AttachHandle]:
        """Return the handles for a guest that is about to start, prepared.

        Waits for the plug of a server, if one has begun. Other servers had
        their devices before: resume() restores them.

        :raises AcceleratorError: the guest must not start.
        """
        if not server.requests:
            return []
        if not self._plugs.wait(server.uuid):
            self._servers.wait_until_idle(server.uuid)
            self._accelerators.resume(context, server)
        return self.handles(server.uuid)

    def handles(self, server_uuid: str) -> list[model.AttachHandle]:
        """Return the handles of a server, in a stable order."""
        return [claim.handle for claim in self._holdings.of(server_uuid)]

    def holds(self, server_uuid: str) -> bool:
        """Return whether a server has claims here, or a plug of it runs."""
        return (self._plugs.is_under_way(server_uuid)
                or self._holdings.any_of(server_uuid))

    def reattach(self, server_uuid: str, when: str) -> None:
        """Attach to a running guest the devices of its server that are ready.

        Raises nothing: attach.reconcile tries again what fails.

        :param when: what has happened, the beginning of a sentence.
        """
        try:
            with self._servers.exclusive(server_uuid):
                handles = [claim.handle for claim
                           in self._holdings.of(server_uuid)
                           if claim.state is model.ClaimState.BOUND]
                if handles:
                    self._cloud.attach(server_uuid, handles)
        except Exception as error:
            LOG.error('%s, and the accelerators of server %s could not be '
                      'attached to it; that is tried again: %s', when,
                      server_uuid, error)

    def unplug(self, context, server_uuid: str,
               role: model.Role = model.Role.CURRENT,
               wait: bool = True) -> int:
        """Release the devices of a server after its guest has ended.

        :param wait: for the devices to be clean, at most [accel]
            device_timeout. Cleaning that takes longer continues.
        :returns: how many accelerators the server lost.
        """
        if role is model.Role.CURRENT:
            self._plugs.end(server_uuid)
        return self._releases.release_all(context, server_uuid, role, wait)
