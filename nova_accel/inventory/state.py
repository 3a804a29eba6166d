# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is kept of the devices: one owner, one lock.

Its parts: fences (inventory.fences), what regions carry (inventory.contents),
and which card is at an address (inventory.adoption). All are one object
(inventory.devices).
"""

import itertools

from nova_accel import exception
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store

LOG = logging.getLogger(__name__)


class State:

    def __init__(self, store: claim_store.ClaimStore):
        """:raises AcceleratorsUnavailable: the store cannot be read."""
        self._store = store
        # guards all that follows, and what the parts have
        self._lock = locks.Lock('devices')
        # held while the store is written, always taken before _lock
        self._writing = locks.Lock('changes', reentrant=True)
        self._reported: dict[str, model.Device] = dict(store.devices())
        self._saved = dict(self._reported)
        self._once = logging.Once()
        self._clock = itertools.count(1)
        #: address -> ticket of the newest look or change that counts
        self._since: dict[str, int] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        """Another number whenever snapshot() would have changed."""
        with self._lock:
            return self._generation

    def reported(self, address: str) -> model.Device | None:
        """Return what the driver said last, for the driver's next look."""
        with self._lock:
            return self._reported.get(address)

    def _is_present(self, address):
        device = self._reported.get(address)
        return (device is not None
                and device.health is not model.Health.GONE)

    def ticket(self) -> int:
        """Return what a scan of the hardware must have before it begins."""
        with self._lock:
            return next(self._clock)

    def invalidate(self, address: str) -> None:
        """Discard results of scans of this card that began before now."""
        with self._lock:
            self._since[address] = next(self._clock)

    def save(self) -> None:
        """Write what drivers said, where that has changed; an error is
        logged, and the next call tries again."""
        with self._writing:
            with self._lock:
                reported = dict(self._reported)
            if reported == self._saved:
                return
            try:
                self._store.set_devices(reported)
            except exception.AcceleratorError as error:
                self._once.say(('store',), LOG.error, 'What the drivers '
                               'found is not written down: %s', error)
                return
            self._saved = reported
            self._once.forget('store')
