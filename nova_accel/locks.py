# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Locks with a name, a place in one order, and a time limit.

A thread that holds a lock takes only locks that come later in ORDER. Hence no
two threads wait for each other. A thread that waits for longer than the limit
gets an error with the name of the thread that holds the lock.
"""

from collections.abc import Callable, Hashable, Iterator
import contextlib
import gc
import sys
import threading
import traceback
import types
import typing

from nova_accel import exception
from nova_accel import log as logging

LOG = logging.getLogger(__name__)

#: Every lock of nova_accel, and Nova's own under which it calls us or which
#: we take. docs/source/contributor/architecture.rst has the same list.
ORDER = (
    'looking',     # inventory.looks: a look or a glance
    'runtime',     # attach.runtime: servers that are worked on
    'server',      # service: Host.servers, one for each server
    'region',      # attach.handles: a region is cleaned, one for each
    'settling',    # attach.settling: one round at a time
    'guests',      # attach.carrying: claims are written into guests
    'choice',      # inventory: handles are chosen and claimed
    'orders',      # admin.orders: what the operator says is read and shown
    'opening',     # attach.loading: the bitstream cache is opened
    'download',    # bitstream.cache: one for each content
    'room',        # bitstream.cache: downloads under way
    'cache',       # bitstream.cache: leases and removal
    'begin',       # attach.loading: a programming begins or is given up
    'attempts',    # attach.programming: bitstreams of projects are counted
    'ordered',     # attach.gate: regions that are programmed for no server
    'reporting',   # Nova's resource tracker: COMPUTE_RESOURCE_SEMAPHORE
    'background',  # host.limited: one piece of work at a time
    'scan',        # inventory.scan_state
    'inventory',   # inventory: what providers are made of
    'cards',       # inventory.cards: calls of drivers
    'fabric',      # drivers.fabric: a partition is changed
    'health',      # inventory.conditions: what devices report of their health
    'changes',     # inventory.devices: the store is written
    'devices',     # inventory.devices: memory
    'holdings',    # attach.holdings
    'store',       # store.claims: one transaction at a time
    'demand',      # demand
    'scheduling',  # scheduler.scheduling, in nova-scheduler
)

#: seconds to wait for a lock under which nothing but memory, or the claim
#: store, is read and written
LIMIT = 60


class Lock:
    """A lock that is not waited for without end."""

    def __init__(self, name: str, what: str = '',
                 seconds: Callable[[], float] = lambda: LIMIT,
                 error: type[exception.AcceleratorError]
                 = exception.LockTimeout,
                 reentrant: bool = False):
        """
        :param name: one of ORDER.
        :param what: what it protects, for the error: the beginning of a
            sentence, in the plural.
        :param seconds: returns the limit.
        :param error: raised at the limit.
        :param reentrant: whether a thread that holds it may take it again.
        """
        self.name = name
        self.place = ORDER.index(name)
        self._what = what or f'What the lock "{name}" protects'
        self._seconds = seconds
        self._error = error
        self._lock: typing.Any = (
            threading.RLock() if reentrant else threading.Lock())
        #: the thread that holds it, or held it last
        self._holder: threading.Thread | None = None

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock.

        :param blocking: False: return False at once if it is held.
        :raises LockTimeout: it was held all the time, unless another error
            was given.
        """
        if not self._lock.acquire(blocking=False):
            if not blocking:
                return False
            seconds = self._seconds()
            if not self._lock.acquire(timeout=seconds):
                self._give_up(seconds)
        self._holder = threading.current_thread()
        return True

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _is_owned(self):
        # for threading.Condition, of one that is reentrant
        return self._lock._is_owned()

    def _give_up(self, seconds):
        holder = self._holder
        name = holder.name if holder else 'unknown'
        frame = holder and _frame(holder)
        LOG.error('The lock "%s" was waited for %g s. The thread %s holds it%s',
                  self.name, seconds, name, logging.Lines(
                      ':\n' + ''.join(traceback.format_stack(frame))
                      if frame else '.'))
        found = (f'{self._what} were waited for {seconds:g} s, and another '
                 f'operation still works on them')
        raise self._error(
            f'{found}, in the thread {name}: see in the log of nova-compute '
            f'what it does, and repeat the operation when that has ended.',
            found=found)


def _frame(thread: threading.Thread) -> types.FrameType | None:
    """Return where a thread is, None if that is unknown."""
    frame = sys._current_frames().get(thread.ident or 0)
    greenlet = sys.modules.get('greenlet')
    if frame or not greenlet:
        return frame
    # under eventlet a thread's ident is the id of its greenlet
    # (eventlet.green.thread.get_ident, eventlet 0.33 to 0.40)
    return next((one.gr_frame for one in gc.get_objects()
                 if isinstance(one, greenlet.greenlet)
                 and id(one) == thread.ident), None)


def condition(name: str) -> threading.Condition:
    """Return a condition whose lock has a name, and is reentrant: the handler
    of a signal interrupts the main thread wherever it is."""
    lock: typing.Any = Lock(name, reentrant=True)
    return threading.Condition(lock)


class Locks:
    """Locks of one name, one for each key."""

    def __init__(self, name: str, what: str,
                 seconds: Callable[[], float]):
        """
        :param what: as for Lock, with ``{}`` for the key.
        :param seconds: as for Lock.
        """
        self._make = lambda key: Lock(name, what.format(key), seconds)
        # protects the table; nothing is called under it
        self._guard = threading.Lock()
        #: key -> [lock, number of threads that hold it or wait for it]
        self._locks: dict[Hashable, list] = {}

    @contextlib.contextmanager
    def held(self, key: Hashable) -> Iterator[None]:
        """Hold the lock of a key.

        :raises LockTimeout: another thread held it all the time.
        """
        with self._guard:
            entry = self._locks.setdefault(key, [self._make(key), 0])
            entry[1] += 1
        try:
            with entry[0]:
                yield
        finally:
            with self._guard:
                entry[1] -= 1
                if not entry[1]:
                    del self._locks[key]

    def wait(self, key: Hashable) -> None:
        """Wait until no thread holds the lock of a key.

        :raises LockTimeout: that takes too long.
        """
        with self.held(key):
            pass
