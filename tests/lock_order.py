# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which lock a thread takes while it holds which other ones."""

import threading

import fixtures

from nova_accel import locks


class LockOrder(fixtures.Fixture):
    """Follows every lock of nova_accel, and fails on one taken too late."""

    def _setUp(self):
        #: (name of a lock that is held, name of one that is taken)
        self.edges: set[tuple[str, str]] = set()
        self.inversions: list[str] = []
        self._held = threading.local()
        acquire, release = locks.Lock.acquire, locks.Lock.release

        def traced_acquire(lock, *args, **kwargs):
            self._takes(lock)
            taken = acquire(lock, *args, **kwargs)
            if taken:
                self._of_thread().append(lock)
            return taken

        def traced_release(lock):
            self._leaves(lock)
            release(lock)
        for name, method in (('acquire', traced_acquire),
                             ('release', traced_release)):
            self.useFixture(fixtures.MonkeyPatch(
                f'nova_accel.locks.Lock.{name}', method))
        self.addCleanup(self._check)

    def _takes(self, lock):
        held = self._of_thread()
        # one that it has already it cannot wait for
        for before in held if lock not in held else ():
            self.edges.add((before.name, lock.name))
            if before.place >= lock.place:
                self.inversions.append(
                    f'{threading.current_thread().name} took "{lock.name}" '
                    f'and held "{before.name}"')

    def _leaves(self, lock):
        held = self._of_thread()
        # before the fixture came, or by another thread
        if lock in held:
            held.remove(lock)

    def _of_thread(self):
        return self._held.__dict__.setdefault('locks', [])

    def _check(self):
        if self.inversions:
            raise AssertionError(
                'Locks were taken in another order than '
                'nova_accel.locks.ORDER has: '
                + '; '.join(sorted(set(self.inversions))))
