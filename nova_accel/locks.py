# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Named locks with one global order and a time limit.

A thread that holds a lock takes only locks that come later in ORDER. Hence
threads cannot deadlock. A thread that waits longer than the limit gets an error
that names the thread that holds the lock.
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

#: Every lock of nova_accel, and the lock of Nova that it runs under or takes.
#: docs/source/contributor/architecture.rst has the same list.
ORDER = (
    'looking',     # inventory.looks: a look or a glance
    'runtime',     # attach.runtime: which servers are worked on
    'server',      # service: Host.servers, one for each server
    'region',      # attach.handles: a region is cleaned, one for each
    'settling',    # attach.settling: one round at a time
    'guests',      # attach.carrying: claims are written into guests
    'choice',      # inventory: handles are chosen and claimed
    'orders',      # admin.orders: orders are read and answered
    'opening',     # attach.loading: the bitstream cache is opened
    'download',    # bitstream.cache: one for each content
    'room',        # bitstream.cache: downloads under way
    'cache',       # bitstream.cache: leases and removal
    'begin',       # attach.loading: a programming begins or is given up
    'attempts',    # attach.programming: bitstreams of projects are counted
    'ordered',     # attach.regions: regions programmed without a server
    'reporting',   # Nova's resource tracker: COMPUTE_RESOURCE_SEMAPHORE
    'background',  # host.limited: one piece of work at a time
    'scan',        # inventory.scan_state
    'inventory',   # inventory: the input of providers
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

#: seconds to wait for a lock whose holder uses only memory and the claim store
LIMIT = 60


class Lock:
    """A lock with a place in ORDER and a time limit."""

    def __init__(self, name: str, what: str = '',
                 seconds: Callable[[], float] = lambda: LIMIT,
                 error: type[exception.AcceleratorError]
                 = exception.LockTimeout,
                 reentrant: bool = False):
        """:param name: one of ORDER.
        :param what: the objects that the lock protects, a plural noun with
            which the error begins.
        :param seconds: returns the time limit.
        :param error: class of the error when the limit has passed.
        :param reentrant: whether the holding thread may take the lock again.
        """
        self.name = name
        self.place = ORDER.index(name)
        self._what = what or f'The objects of the lock "{name}"'
        self._seconds = seconds
        self._error = error
        self._lock: typing.Any = (
            threading.RLock() if reentrant else threading.Lock())
        #: the thread that holds the lock, or held it last
        self._holder: threading.Thread | None = None

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock.

        :param blocking: if False, return False at once if the lock is held.
        :returns: whether the lock was taken.
        :raises LockTimeout: the limit passed. __init__() may set another
            error.
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
        # threading.Condition calls this method of a reentrant lock
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
    """Return the present stack frame of a thread, or None if not found."""
    frame = sys._current_frames().get(thread.ident or 0)
    greenlet = sys.modules.get('greenlet')
    if frame or not greenlet:
        return frame
    # under eventlet the ident of a thread is the id of its greenlet
    # (eventlet.green.thread.get_ident, eventlet 0.33 to 0.40)
    return next((one.gr_frame for one in gc.get_objects()
                 if isinstance(one, greenlet.greenlet)
                 and id(one) == thread.ident), None)


def condition(name: str) -> threading.Condition:
    """Return a condition with a lock of ORDER. The lock is reentrant, because
    a signal handler may need it in the main thread, which may hold it."""
    lock: typing.Any = Lock(name, reentrant=True)
    return threading.Condition(lock)


class Locks:
    """A family of locks with one name, one lock for each key."""

    def __init__(self, name: str, what: str,
                 seconds: Callable[[], float]):
        """:param what: the protected objects as for Lock, with ``{}`` for the
            key.
        :param seconds: see Lock.
        """
        self._make = lambda key: Lock(name, what.format(key), seconds)
        # protects _locks; no other lock is taken under it
        self._guard = threading.Lock()
        #: key -> [lock, number of threads that hold it or wait for it]
        self._locks: dict[Hashable, list] = {}

    @contextlib.contextmanager
    def held(self, key: Hashable) -> Iterator[None]:
        """Hold the lock of a key inside the context.

        :raises LockTimeout: the limit passed.
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
        """Wait until no thread holds the lock of a key. Do not take the lock.

        :raises LockTimeout: the limit passed.
        """
        with self.held(key):
            pass
