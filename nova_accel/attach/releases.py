# Licensed under the Apache License, Version 2.0. See LICENSE.
"""End claims: mark them as DELETING, clean their handles, and free them.

If the store cannot be written when a server loses a claim, the next operation
of the server or the next comparison repeats the write.
"""

from collections.abc import Callable, Iterable
import contextlib
import dataclasses

from nova_accel.attach import handles as attach_handles
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel import conf
from nova_accel import exception
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Releases:
    _holdings: server_holdings.Holdings
    _handles: attach_handles.Handles
    _publisher: publishing.Publisher
    _servers: locks.Locks

    def __post_init__(self) -> None:
        #: server -> claims that it has lost, not yet written
        self._postponed: dict[str, set[model.Claim]] = {}

    def begin_locked(self, server_uuid: str,
                     claims: Callable[[], list[model.Claim]],
                     ) -> list[model.Claim]:
        """Begin a release as begin() does, but under the lock of the server.

        If another operation holds the lock for too long, the release is
        postponed.

        :param claims: function that returns the claims; called under the lock.
        """
        try:
            with self._servers.held(server_uuid):
                return self.begin(server_uuid, claims())
        except exception.LockTimeout as error:
            return self._postpone(server_uuid, claims(), error)

    def begin(self, server_uuid: str, claims: list[model.Claim],
              ) -> list[model.Claim]:
        """Write that a server has lost claims (Holdings.releasing()).

        If the store cannot be written, the release is postponed to the next
        operation of the server or the next comparison.

        :returns: the claims to clean().
        """
        try:
            return self._holdings.releasing(claims)
        except exception.AcceleratorsUnavailable as error:
            return self._postpone(server_uuid, claims, error)

    def _postpone(self, server_uuid, claims, error):
        LOG.error('The release of the accelerators of server %s is '
                  'postponed: %s', server_uuid, error)
        self._postponed.setdefault(server_uuid, set()).update(claims)
        return []

    def begin_postponed(self, server_uuid: str) -> None:
        """Begin the postponed releases of a server, before the server gets
        devices or moves.

        :raises AcceleratorsUnavailable: the store still cannot be written.
        """
        postponed = self._postponed.get(server_uuid)
        if not postponed:
            return
        with self._servers.held(server_uuid):
            # another thread may have added a claim meanwhile
            claims = frozenset(postponed)
            ended = self._holdings.releasing(claims)
            postponed -= claims
        self.clean(ended, wait=False)

    def release_all(self, server_uuid: str, role: model.Role,
                    wait: bool = True) -> int:
        """Release all devices of a server.

        :param wait: see clean().
        :returns: how many accelerators the server lost.
        """
        if not self._holdings.of(server_uuid, role):
            return 0
        claims = self.begin_locked(
            server_uuid, lambda: self._holdings.of(server_uuid, role))
        self.clean(claims, wait)
        return len(claims)

    def release(self, claims: Iterable[model.Claim]) -> int:
        """Release the given claims, after the caller has judged that they must
        end.

        Waits for the end of cleaning, as clean() with patient=True.

        :returns: how many accelerators the server lost.
        """
        claims = self._holdings.releasing(claims)
        self.clean(claims, patient=True)
        return len(claims)

    def release_to_the_end(self, claims: Iterable[model.Claim]) -> None:
        """Release the given claims, as release() does, and wait until they end.

        :raises DeviceUnavailable: a device is not clean yet. Its cleaning is
            retried.
        """
        claims = list(claims)
        self.release(claims)
        for claim in self._holdings.now(claims):
            raise exception.DeviceUnavailable(
                f'{claim.handle.address} belongs to no server, and cannot be '
                f'offered ({claim.error or "it is being cleaned"}): it is '
                f'tried again each minute.')

    def clean(self, claims: Iterable[model.Claim], wait: bool = True,
              patient: bool = False) -> None:
        """Clean the devices of claims that are DELETING, which ends them.

        :param wait: whether to wait for the end, at most [accel]
            device_timeout. Longer cleanings continue.
        :param patient: whether to wait longer for FPGA regions, at most
            [accel] programming_timeout.
        """
        claims = self._holdings.now(claims)
        self._handles.release(
            # an error at the end of the wait has to be written
            claims, CONF.accel.device_timeout + 1 if wait else 0,
            CONF.accel.programming_timeout + 1 if patient else 0)
        # a handle that is not clean yet must not be offered
        self._publisher.show_devices(self._holdings.now(claims))

    def retry(self, may_end: Callable[[model.Claim], bool]
              = lambda claim: True) -> int:
        """Retry failed cleanings.

        :param may_end: function that returns whether a claim may end now.
        :returns: how many accelerators are free now.
        """
        for server_uuid in list(self._postponed):
            with contextlib.suppress(exception.AcceleratorsUnavailable,
                                     exception.LockTimeout):
                self.begin_postponed(server_uuid)
        left = [claim for claim in self._holdings.being_released()
                if may_end(claim) and self._handles.is_due(claim)]
        if left:
            self.clean(left, patient=True)
        return len(left) - len(self._holdings.now(left))
