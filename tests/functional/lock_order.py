# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which lock a thread takes while it holds which other ones, in real Nova."""

import contextlib

import fixtures
from nova.compute import resource_tracker
from oslo_concurrency import lockutils

from nova_accel import locks
from tests import lock_order


class LockOrder(lock_order.LockOrder):
    """That of tests/host, and Nova's own lock, "reporting", too."""

    def _setUp(self):
        super()._setUp()
        lock = lockutils.lock
        reporting = locks.Lock('reporting')

        @contextlib.contextmanager
        def traced(name, *args, **kwargs):
            if name != resource_tracker.COMPUTE_RESOURCE_SEMAPHORE:
                with lock(name, *args, **kwargs) as taken:
                    yield taken
                return
            self._takes(reporting)
            with lock(name, *args, **kwargs) as taken:
                self._of_thread().append(reporting)
                try:
                    yield taken
                finally:
                    self._leaves(reporting)
        self.useFixture(fixtures.MonkeyPatch(
            'oslo_concurrency.lockutils.lock', traced))
