# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Attach devices to running guests that lack them.

A guest lacks a device if nova-compute was killed between detaching and
attaching it, or if the guest released it after the wait had ended. Failed
attempts are repeated after 2 minutes, then after 4, and so on up to an hour.
"""

from collections.abc import Collection, Iterable
import time

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import judgement
from nova_accel.attach import readiness as device_readiness
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)
#: seconds until the first retry of a device that could not be attached, and
#: the maximum
PAUSE, LONGEST_PAUSE = 120, 3600


class Reattachment:
    """Attaches devices to running guests again."""

    def __init__(self, cloud: novas.Cloud,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 readiness: device_readiness.Readiness):
        self._cloud = cloud
        self._inventory = inventory
        self._holdings = holdings
        self._readiness = readiness
        #: server -> (time.monotonic() of the next try, seconds until the one
        #: after it). Initially all servers, because the last nova-compute may
        #: have ended between detaching and attaching
        self._pauses: dict[str, tuple[float, float]] = {
            c.instance_uuid: (float('-inf'), PAUSE)
            for c in self._holdings.all()}

    def forget_pauses(self, snapshot: judgement.Snapshot,
                      out: Collection[str]) -> None:
        """Forget the pauses between attempts for guests that have all their
        devices, and for guests that do not run. A start attaches all devices.

        :param out: uuids of servers whose guests run without a device.
        """
        busy = {uuid for uuid in snapshot.running
                if any(map(snapshot.lacks, snapshot.of(uuid)))}
        self._pauses = {uuid: pause for uuid, pause in self._pauses.items()
                        if uuid in busy.union(out)}

    def reattach(self, server_uuid: str, claims: Iterable[model.Claim],
                 lasts: bool) -> set[str]:
        """Attach to a running guest the devices that it lost.

        Devices that were detached deliberately (state UNKNOWN) stay detached
        until nova-compute restarts, or until the owner reboots the server
        hard. The metadata of the server show the owner such devices.

        :param lasts: see Cloud.attach().
        :returns: uuids of the claims whose devices are not attached yet.
        """
        now = time.monotonic()
        due, pause = self._pauses.get(server_uuid, (now, PAUSE))
        if server_uuid not in self._pauses:
            claims = [c for c in claims if c.state is model.ClaimState.BOUND]
        # an absent card is attached when it returns, without a pause
        claims = [c for c in claims
                  if self._inventory.present(c.device_address)]
        out = {claim.uuid for claim in claims}
        if not claims or due > now:
            return out
        LOG.warning('Server %s runs without its accelerators: they are '
                    'attached again', server_uuid)
        # set first: a call that hangs must not begin again each minute
        self._pauses[server_uuid] = (
            now + pause, min(2 * pause, LONGEST_PAUSE))
        for server in self._cloud.servers([server_uuid]):
            # a region or device that cannot be attached does not affect the
            # others
            for mine in server_holdings.by_region(claims).values():
                try:
                    self._readiness.restore(
                        self._cloud.admin_context(), server.accelerators, mine)
                    self._cloud.attach(
                        server_uuid, [c.handle for c in mine], lasts)
                    out -= {claim.uuid for claim in mine}
                except Exception as error:
                    self._holdings.doubt(mine, str(error))
                    LOG.error('Server %s runs without accelerators (virsh '
                              'dumpxml %s), which could not be attached to '
                              'its guest; that is tried again in %d minutes: '
                              '%s',
                              server_uuid, server_uuid, pause // 60, error)
        if not out:
            self._pauses.pop(server_uuid, None)
        return out
