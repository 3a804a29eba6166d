# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Plugs that run in the background while Nova builds a guest."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import typing

from nova_accel.attach import accelerators as server_accelerators
from nova_accel.attach import choice as device_choice
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import releases as server_releases
from nova_accel.attach import servers as server_locks
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request

LOG = logging.getLogger(__name__)
#: seconds in which the devices of a server are ready or an error has come:
#: longer than the limits of all its parts, of which Placement's may be missing
#: ([placement] timeout)
_PLUG_SECONDS = 3600

Allocations = Callable[[], plan.Allocations]


@dataclasses.dataclass
class _Plugging:
    """A plug() that has begun, until the operation that needs it ends."""

    future: typing.Any = None
    #: what it has claimed so far
    claimed: list[model.Claim] = dataclasses.field(default_factory=list)

    def wait(self, server_uuid: str) -> None:
        """Wait for its end.

        :raises DeviceTimeout: after _PLUG_SECONDS; it goes on.
        """
        limited.wait(self.future, _PLUG_SECONDS,
                     f'Preparing accelerators for server {server_uuid}')


class Plugs:

    def __init__(self, cloud: novas.Cloud,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 servers: server_locks.Servers,
                 accelerators: server_accelerators.Accelerators,
                 choice: device_choice.Choice,
                 releases: server_releases.Releases):
        self._cloud = cloud
        self._inventory = inventory
        self._holdings = holdings
        self._servers = servers
        self._accelerators = accelerators
        self._choice = choice
        self._releases = releases
        self._plugging: dict[str, _Plugging] = {}

    def start(self, context, server: request.Server,
              allocations: Allocations, rebuilt: bool = False) -> None:
        """Begin plug() in the background, once for any number of calls.

        Costs nothing for a server without accelerators.

        :param allocations: gives what Placement has allocated to the server;
            called in the background.
        :param rebuilt: the server had its devices here before, and keeps
            them: resume() in place of plug().
        """
        if server.uuid in self._plugging or not server.requests:
            return
        accelerators, plugging = self._accelerators, _Plugging()
        self._servers.wait_until_idle(server.uuid)

        def plug():
            context.update_store()
            if rebuilt:
                accelerators.resume(
                    context, server, server.wanted, plugging.claimed)
            else:
                accelerators.plug(
                    context, server, allocations(), plugging.claimed)
        plugging.future = limited.start(plug)
        self._plugging[server.uuid] = plugging

    def is_under_way(self, server_uuid: str) -> bool:
        """Return whether a plug of the server has begun, and is needed."""
        return server_uuid in self._plugging

    @contextlib.contextmanager
    def plugged(self, context, server: request.Server,
                allocations: Allocations, rebuilt: bool = False,
                ) -> Iterator[None]:
        """Plug the devices of a guest while Nova builds it.

        If the build fails, the server loses the devices that it got for this
        guest, unless the guest runs: another server must not get its devices.
        """
        self.start(context, server, allocations, rebuilt)
        try:
            yield
            self._started(server.uuid)
        except Exception as error:
            self._release_failed(context, server.uuid, error)
            raise
        finally:
            self._plugging.pop(server.uuid, None)

    def _started(self, server_uuid):
        plugging = self._plugging.get(server_uuid)
        claimed = plugging.claimed if plugging else []
        for claim in claimed:
            self._inventory.health.mark(
                claim.device_address, signals.START, False)
        self._choice.note_started(claim.handle for claim in claimed)

    def abandon(self, context, server_uuid: str) -> None:
        """Release the devices of a build that failed before its guest existed.
        """
        try:
            self._release_failed(context, server_uuid, None)
        finally:
            self._plugging.pop(server_uuid, None)

    def _release_failed(self, context, server_uuid, error):
        plugging = self._plugging.get(server_uuid)
        if plugging is None:
            return
        with contextlib.suppress(Exception):
            # its failure was told where it was joined
            plugging.wait(server_uuid)
        claimed = self._holdings.now(plugging.claimed)
        # QEMU and libvirt name the device that they cannot give to a guest
        named = ([] if isinstance(error, exception.AcceleratorError)
                 else [claim for claim in claimed
                       if claim.handle.address in str(error)])
        for claim in named:
            self._inventory.health.mark(claim.device_address, signals.START)
        if claimed and self._runs_with(server_uuid, claimed):
            LOG.error('Server %s failed after its guest had started (%s); it '
                      'keeps its accelerators until the guest is gone',
                      server_uuid, error)
            return
        if error:
            # also those that could not be prepared, and are released already
            self._choice.note_failed(
                claim.handle for claim in named or plugging.claimed)
        if claimed:
            self._releases.clean(
                context, self._releases.begin(server_uuid, claimed))

    def _runs_with(self, server_uuid, claims):
        try:
            there = self._cloud.running().get(server_uuid, frozenset())
        except Exception as error:
            LOG.warning('It is not known whether the guest of server %s runs '
                        '(%s); it keeps its accelerators', server_uuid, error)
            return True
        return bool(there & {c.handle.address for c in claims})

    def end(self, server_uuid: str) -> None:
        """Wait for a plug of a server that needs it no more."""
        with contextlib.suppress(Exception):
            self.wait(server_uuid)
        self._plugging.pop(server_uuid, None)

    def wait(self, server_uuid: str) -> bool:
        """Wait for the plug of a server.

        :returns: False where none is under way.
        :raises AcceleratorError: it failed.
        """
        plugging = self._plugging.get(server_uuid)
        if plugging is not None:
            plugging.wait(server_uuid)
        return plugging is not None

    def close(self) -> None:
        """Let running plugs finish."""
        self._plugging.clear()
