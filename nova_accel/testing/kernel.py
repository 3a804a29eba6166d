# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A simulated kernel in which a driver can fail, hang or be killed anywhere.
"""

import contextlib
import errno
import json

from nova_accel import sim
from nova_accel.sim import tree as sysfs

#: number of polls after which an operation counts as hanging
_PATIENCE = 25


class Killed(BaseException):
    """nova-compute was killed."""


class Hung(BaseException):
    """A read or an operation does not end."""


def _written(host, state) -> str:
    """Return the state of a host without the parts that a mere read changes.
    """
    return json.dumps({**state, 'cards': {
        address: {key: value for key, value in mine.items()
                  if key not in host.cards[address].READ}
        for address, mine in state['cards'].items()}})


class Kernel(sim.SimulatedKernel):
    """A simulated kernel that counts the changes that a driver makes, and
    interrupts the driver on demand.

    A change is an operation that changes the state of a card or of the kernel.
    A read or an operation that would hang raises Hung.
    """

    def __init__(self, path: str):
        self._counts = self._is_dead = False
        self._kill_after = self._fail_at = 0
        self._polls = 0
        #: changes since watch()
        self.steps = 0
        #: places below /sys that were read
        self.reads: set[str] = set()
        #: place below /sys -> text or errno to return there
        self.spoiled: dict[str, str | int] = {}
        super().__init__(path)

    @contextlib.contextmanager
    def watch(self, kill_after: int = 0, fail_at: int = 0):
        """Count the changes inside the context, beginning with 1.

        :param kill_after: number of the change after which Killed is raised,
            and again at each later use of the kernel.
        :param fail_at: number of the change that fails with EIO.
        """
        self.steps = self._polls = 0
        self._counts = True
        self._kill_after, self._fail_at = kill_after, fail_at
        try:
            yield self
        finally:
            self._counts = self._is_dead = False

    def change(self) -> None:
        """Count a change outside this kernel, for example of the store.

        :raises OSError: this change must fail.
        :raises Killed: this change was the last permitted one.
        """
        self._begin()
        self._end()

    def _begin(self):
        if self._counts:
            self.steps += 1
            if self.steps == self._fail_at:
                raise sysfs.error(errno.EIO, 'the simulated device')

    def _end(self):
        if self._counts and self.steps == self._kill_after:
            self._is_dead = True
            raise Killed(f'after change {self.steps}')

    @contextlib.contextmanager
    def _update(self):
        self._check()
        changed = False
        with super()._update() as (host, state):
            before = _written(host, state) if self._counts else ''
            yield host, state
            changed = self._counts and _written(host, state) != before
            if changed:
                self._polls = 0
                self._begin()
            elif self._counts:
                self._polls += 1
                if self._polls > _PATIENCE:
                    raise Hung('an operation does not end')
        if changed:
            self._end()

    def _look(self):
        self._check()
        return super()._look()

    def _check(self):
        if self._is_dead:
            raise Killed('before')

    def _wait_while_it_hangs(self, place):
        if self._hangs(place):
            raise Hung(f'it reads /sys/{place.strip("/")}')

    def _attribute(self, path):
        place = sysfs.find(self._tree(), path)[1]
        self.reads.add(place)
        found = self.spoiled.get(place)
        if found is None:
            return super()._attribute(path)
        if isinstance(found, int):
            raise sysfs.error(found, path)
        return found
