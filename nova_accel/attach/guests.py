# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices of guests that are built, start, run and end.

The driver calls these methods in the order of a guest's life. plug() runs in
the background while Nova builds a guest. unplug() is the third call of os-acc.
It releases the claims of a server, and each claim ends when its device is
clean.
"""

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
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request

LOG = logging.getLogger(__name__)
#: maximum seconds until the devices of a server are ready: longer than the sum
#: of the limits of all steps, of which requests to Placement may have none
#: ([placement] timeout)
_PLUG_SECONDS = 3600

Allocations = Callable[[], plan.Allocations]


@dataclasses.dataclass
class _Plugging:
    """A plug() in the background, kept until the build of its guest ends."""

    future: typing.Any = None
    #: its claims up to now
    claimed: list[model.Claim] = dataclasses.field(default_factory=list)

    def wait(self, server_uuid: str) -> None:
        """Wait until the plug ends. If it failed, raise its error.

        :raises DeviceTimeout: after _PLUG_SECONDS; the plug continues.
        """
        limited.wait(self.future, _PLUG_SECONDS,
                     f'Preparing accelerators for server {server_uuid}')


@dataclasses.dataclass(eq=False)
class Guests:
    _cloud: novas.Cloud
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _servers: locks.Locks
    _accelerators: server_accelerators.Accelerators
    _choice: device_choice.Choice
    _releases: server_releases.Releases

    def __post_init__(self) -> None:
        self._plugging: dict[str, _Plugging] = {}

    def start_plug(self, context, server: request.Server,
                   allocations: Allocations, rebuilt: bool = False) -> None:
        """Begin plug() in the background, unless it has begun already.

        Does nothing for a server without accelerators.

        :param allocations: function that returns the allocations of the
            server; called in the background.
        :param rebuilt: True if the server keeps its devices on this host.
            resume() is then called instead of plug().
        """
        if server.uuid in self._plugging or not server.requests:
            return
        accelerators, plugging = self._accelerators, _Plugging()
        self._servers.wait(server.uuid)

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
        """Return whether a plug for the server has begun, and the build of its
        guest has not ended."""
        return server_uuid in self._plugging

    @contextlib.contextmanager
    def plugged(self, context, server: request.Server,
                allocations: Allocations, rebuilt: bool = False,
                ) -> Iterator[None]:
        """Return a context in which Nova builds a guest with its devices.

        If the build fails, release the devices that the server got for this
        guest. If a running guest has one of these devices, keep all of them.
        """
        self.start_plug(context, server, allocations, rebuilt)
        try:
            yield
            self._started(server.uuid)
        except Exception as error:
            self._release_failed(server.uuid, error)
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

    def abandon(self, server_uuid: str) -> None:
        """Release the devices of a build that failed before its guest existed.
        """
        try:
            self._release_failed(server_uuid, None)
        finally:
            self._plugging.pop(server_uuid, None)

    def _release_failed(self, server_uuid, error):
        plugging = self._plugging.get(server_uuid)
        if plugging is None:
            return
        with contextlib.suppress(Exception):
            # its failure was reported to the call that waited for it
            plugging.wait(server_uuid)
        claimed = self._holdings.now(plugging.claimed)
        # QEMU and libvirt name the device that they cannot attach to a guest
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
            # including handles that could not be prepared and are released
            # already
            self._choice.note_failed(
                claim.handle for claim in named or plugging.claimed)
        if claimed:
            self._releases.clean(self._releases.begin(server_uuid, claimed))

    def _runs_with(self, server_uuid, claims):
        try:
            there = self._cloud.running().get(server_uuid, frozenset())
        except Exception as error:
            LOG.warning('It is not known whether the guest of server %s runs '
                        '(%s); it keeps its accelerators', server_uuid, error)
            return True
        return bool(there & {c.handle.address for c in claims})

    def handles_to_start(self, context, server: request.Server,
                         ) -> list[model.AttachHandle]:
        """Return the prepared handles for a guest that is about to start.

        Wait for the plug of the server if it has begun. Otherwise the server
        had its devices before, and resume() restores them.

        :raises AcceleratorError: the guest must not start.
        """
        if not server.requests:
            return []
        plugging = self._plugging.get(server.uuid)
        if plugging:
            plugging.wait(server.uuid)
        else:
            self._servers.wait(server.uuid)
            self._accelerators.resume(context, server)
        return self.handles(server.uuid)

    def handles(self, server_uuid: str) -> list[model.AttachHandle]:
        """Return the handles of a server, in a stable order."""
        return [claim.handle for claim in self._holdings.of(server_uuid)]

    def holds(self, server_uuid: str) -> bool:
        """Return whether a server has claims here, or a plug for it has begun.
        """
        return (self.is_under_way(server_uuid)
                or self._holdings.any_of(server_uuid))

    def reattach(self, server_uuid: str, when: str) -> None:
        """Attach the ready devices of a server to its running guest.

        Raises nothing: attach.reconcile retries failures.

        :param when: the event that made this necessary, as the beginning of a
            log line.
        """
        try:
            with self._servers.held(server_uuid):
                handles = [claim.handle for claim
                           in self._holdings.of(server_uuid)
                           if claim.state is model.ClaimState.BOUND]
                if handles:
                    self._cloud.attach(server_uuid, handles)
        except Exception as error:
            LOG.error('%s, and the accelerators of server %s could not be '
                      'attached to it; that is tried again: %s', when,
                      server_uuid, error)

    def unplug(self, server_uuid: str,
               role: model.Role = model.Role.CURRENT,
               wait: bool = True) -> int:
        """Release the devices of a server after its guest has ended.

        :param wait: whether to wait for clean devices, at most [accel]
            device_timeout. Cleaning that takes longer continues.
        :returns: how many accelerators the server lost.
        """
        plugging = self._plugging.get(server_uuid)
        if plugging and role is model.Role.CURRENT:
            with contextlib.suppress(Exception):
                plugging.wait(server_uuid)
            self._plugging.pop(server_uuid, None)
        return self._releases.release_all(server_uuid, role, wait)

    def close(self) -> None:
        """Forget the plugs in the background, because nova-compute ends."""
        self._plugging.clear()
