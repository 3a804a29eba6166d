# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Limit the damage of bitstreams that owners of servers choose.

A bitstream that failed is not tried on another host, and a project must wait
after several failed attempts. An attempt counts while it is under way, and
after a failure for another FAILURE_SECONDS. The attempt is stored before the
card is touched, so the count survives a restart.
"""

from collections.abc import Iterator
import contextlib

from nova_accel.attach import loading
from nova_accel import exception
from nova_accel import locks
from nova_accel.store import claim_store

#: how many bitstreams of a project may be in progress or have failed on the
#: cards of this host within FAILURE_SECONDS
MOST, FAILURE_SECONDS = 3, 600
_MINUTES = FAILURE_SECONDS // 60


class Attempts:

    def __init__(self, store: claim_store.ClaimStore):
        self._store = store
        #: numbers of the attempts of this process that have not ended
        self._under_way: set[int] = set()
        #: guards _under_way, and the time between a count and the next attempt
        self._changed = locks.condition('attempts')

    @contextlib.contextmanager
    def counted(self, project_id: str, image: str,
                seconds: float) -> Iterator[loading.Step]:
        """Count an attempt of a project to program an image.

        :param image: name of the image, for errors.
        :param seconds: maximum wait for attempts that are under way.
        :yields: the step in which to program the image.
        :raises AcceleratorError: the attempt is refused, or the programming
            failed. The error forbids a retry on another host.
        """
        step = loading.Step()
        number = self._begin(project_id, image, seconds)
        failed = False
        try:
            yield step
        except BaseException as error:
            failed = step.has_begun
            if failed and isinstance(error, exception.AcceleratorError):
                error.elsewhere = False
            raise
        finally:
            self._end(project_id, number, failed)

    def _begin(self, project_id, image, seconds):
        with self._changed:
            if not self._changed.wait_for(
                    lambda: self._may_begin(project_id, image), seconds):
                raise _refused(
                    f'{image} is not programmed, because {MOST} bitstreams of '
                    f'the project are being programmed on this host: '
                    f'try it later.')
            number = self._store.begin_attempt(project_id, FAILURE_SECONDS)
            self._under_way.add(number)
            return number

    def _may_begin(self, project_id, image):
        """Return whether a project may begin an attempt now. It may not while
        the sum of its running and recently failed attempts is at the limit.

        :raises DeviceUnavailable: the failed attempts alone reach the limit.
        """
        counted = self._store.attempts(project_id, FAILURE_SECONDS)
        failed = counted - self._under_way
        if len(failed) >= MOST:
            raise _refused(
                f'{image} is not programmed, because {len(failed)} bitstreams '
                f'of the project failed on cards of this host in the last '
                f'{_MINUTES} minutes: test yours, and try it {_MINUTES} '
                f'minutes later.')
        return len(counted) < MOST

    def _end(self, project_id, number, failed):
        with self._changed:
            self._under_way.discard(number)
            # an attempt whose end cannot be written stays, and counts as a
            # failure
            with contextlib.suppress(exception.AcceleratorsUnavailable):
                self._store.end_attempt(number, project_id, failed)
            self._changed.notify_all()


def _refused(text: str) -> exception.DeviceUnavailable:
    error = exception.DeviceUnavailable(text)
    error.elsewhere = False
    return error
