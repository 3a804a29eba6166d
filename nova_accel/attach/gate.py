# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Keep builds away from regions that are programmed without a server.

Such a programming was ordered by the operator, or clears the memory that the
regions of a card share. The programming closes the gate before it reads the
claims. A build writes its claim before it waits at the gate. Hence at least
one of the two detects the other.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
import contextlib

from nova_accel import conf
from nova_accel import exception
from nova_accel import locks
from nova_accel import model

CONF = conf.CONF

#: device address and region index, as Claim.part
Part = tuple[str, int | None]


class Gate:
    """Lets builds wait while the regions of their claims are programmed."""

    def __init__(self) -> None:
        #: region -> number of programmings that keep it closed
        self._closed: collections.Counter[Part] = collections.Counter()
        #: guards _closed
        self._changed = locks.condition('ordered')

    @contextlib.contextmanager
    def closing(self, regions: Iterable[Part]) -> Iterator[Callable[[], None]]:
        """Yield a function that closes the gate for regions.

        The worker of the card calls the function when the programming begins.
        The gate opens when the context ends; a later call does nothing.
        """
        regions = list(regions)
        closed: list[Part] = []
        ended = False

        def close():
            with self._changed:
                if not ended:
                    closed.extend(regions)
                    self._closed.update(regions)
        try:
            yield close
        finally:
            with self._changed:
                ended = True
                self._closed.subtract(closed)
                self._changed.notify_all()

    def wait(self, claims: Iterable[model.Claim]) -> None:
        """Wait until the gate is open for the regions of claims.

        :raises DeviceUnavailable: the gate stays closed for longer than
            [accel] programming_timeout.
        """
        regions = {claim.part for claim in claims}
        with self._changed:
            if not self._changed.wait_for(
                    lambda: not any(self._closed[r] for r in regions),
                    CONF.accel.programming_timeout + 1):
                raise exception.DeviceUnavailable(
                    f'{min(regions)[0]} was allocated, and is still being '
                    f'programmed for the operator: the build is retried on '
                    f'another host.')
