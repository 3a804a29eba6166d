# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Call drivers in one worker per card, with a time limit.

Every call of a driver that may block in the kernel goes through Cards. A key
names an object at which calls can hang: the address of a device,
AttachHandle.key of a handle that is not the device itself, or 'driver:<name>'
for calls about no single card.

A key is in one of three states::

idle ----call----> running ----limit passed----> hanging
      ^                   |                             |
      +------ended--------+---------------ended---------+

While a key hangs, no further call for it begins. Hence a card costs at most
one thread.
"""

from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
import dataclasses
import functools
import time
from typing import Any

from nova_accel.drivers import contract
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import locks
from nova_accel import log as logging

LOG = logging.getLogger(__name__)

#: how many calls of a batch may run at the same time; calls that run for
#: longer than _SLOW_SECONDS are not counted, because they may hang
_SIDE_BY_SIDE = 32
_SLOW_SECONDS = 0.5
#: seconds that one device of a sweep may take
_PATIENCE = 2


@dataclasses.dataclass(eq=False)
class _Call:
    """A call that runs, or will run."""

    key: str
    what: str
    function: Callable
    seconds: float
    #: time.monotonic() after which its caller stops waiting
    deadline: float
    late: Callable[[], None] | None = None
    #: whether the limit counts from the start of the call
    patient: bool = False
    #: the caller's own mark of a call in a batch
    about: Any = None
    began: float | None = None
    ended: bool = False
    #: why the callers stopped waiting; '' while they wait
    hangs: str = ''
    result: Any = None
    error: Exception | None = None

    def outcome(self):
        if self.error is not None:
            raise self.error
        return self.result


class Cards:

    def __init__(self, hangs: Callable[[str, str], None]
                 = lambda key, why: None,
                 ended: Callable[[str], None] = lambda key: None):
        """:param hangs: called with the key and the reason when a call hangs.
        :param ended: called with the key when a call that hung has ended.
        """
        self._tell_hangs = hangs
        self._tell_ended = ended
        # guards the fields below and those of every call
        self._changed = locks.condition('cards')
        self._running: dict[str, _Call] = {}
        self._closed = False

    def close(self) -> None:
        """Let every caller return at once, and refuse new calls, because the
        process ends.

        Running calls may continue in the kernel after the end of the process.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def call(self, key: str, what: str, function: Callable, *args,
             seconds: float, late: Callable[[], None] | None = None,
             patient: bool = False):
        """Call function(*args) in a thread, one call at a time for each key.

        :param what: the operation, for errors: 'Programming 0000:3b:00.0'.
        :param seconds: the time limit for waiting and running together.
        :param late: called if the call succeeds after the time limit.
        :param patient: True to count only the running time. Waiting ends
            anyway, because each earlier call for the key has its own time
            limit.
        :returns: the result of function.
        :raises DeviceTimeout: the time limit has passed, or an earlier call
            for the key hangs. A call that has begun continues, and until it
            ends no other call for the key begins.
        """
        batch = self.batch(seconds)
        batch.add(key, what, function, *args, late=late, patient=patient)
        call, = batch
        return call.outcome()

    def batch(self, seconds: float) -> 'Batch':
        """Return a batch of parallel calls for many keys, with one common
        deadline.

        :param seconds: from now until the caller stops waiting.
        """
        return Batch(self, seconds)

    def hanging(self, key: str) -> str:
        """Return why new calls for the key fail at once, or '' if no call for
        the key hangs."""
        with self._changed:
            running = self._running.get(key)
            return running.hangs if running else ''

    def is_busy(self, key: str) -> bool:
        """Return whether a call for the key runs or hangs."""
        with self._changed:
            return key in self._running

    # For batches, under the lock

    def _start(self, call: _Call) -> None:
        call.began = time.monotonic()
        if call.patient:
            call.deadline = call.began + call.seconds
        self._running[call.key] = call
        try:
            limited.start(self._run, call)
        except RuntimeError as error:
            # the process has no thread left
            del self._running[call.key]
            self._fail(call, f'{call.what} could not begin ({error}).')

    def _run(self, call: _Call) -> None:
        try:
            call.result = call.function()
        except BaseException as error:
            call.error = contract.usual(error, call.what)
        with self._changed:
            hung = call.hangs
            call.ended = True
            del self._running[call.key]
            self._changed.notify_all()
        if not hung:
            return
        LOG.warning('%s has ended after all%s', call.what,
                    f': {call.error}' if call.error else '')
        for tell in (functools.partial(self._tell_ended, call.key),
                     call.late if call.error is None else None):
            try:
                if tell:
                    tell()
            except Exception:
                LOG.exception('%s ended late, and work after it failed',
                              call.what)

    def _give_up(self, call: _Call) -> str:
        """Mark a call as hanging, because its limit has passed. Return the
        reason, which the caller reports after it has released the lock."""
        call.hangs = (
            f'{call.what} did not end within {call.seconds:g} s: see what '
            f'keeps the device open, and the kernel log; else reset the card')
        self._changed.notify_all()
        return call.hangs

    @staticmethod
    def _fail(call: _Call, text: str,
              kind: type[Exception] = exception.DeviceTimeout) -> None:
        call.error = kind(text)
        call.ended = True


class Batch:
    """A batch of calls for several keys. Iterating yields each call as it ends.

    Calls may be added during the iteration. Calls for the same key run one
    after the other.
    """

    def __init__(self, cards: Cards, seconds: float):
        self._cards = cards
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._waiting: list[_Call] = []

    def add(self, key: str, what: str, function: Callable, *args,
            about: Any = None, late: Callable[[], None] | None = None,
            patient: bool = False) -> None:
        """Add a call, with the parameters of Cards.call().

        :param about: any value, by which the caller recognizes the call when
            the iteration yields it (_Call.about).
        """
        self._waiting.append(_Call(
            key, what, functools.partial(function, *args), self._seconds,
            self._deadline, late=late, patient=patient, about=about))

    def __iter__(self) -> Iterator[_Call]:
        """Yield each call once it has ended or its limit has passed. outcome()
        of the call returns its result or raises its error."""
        while self._waiting:
            done, hung = self._next()
            for key, why in hung:
                LOG.error('%s', why)
                self._cards._tell_hangs(key, why)
            for call in done:
                yield call

    def _next(self) -> tuple[list[_Call], list[tuple[str, str]]]:
        """Wait until a call of this batch has ended, or any call for a key of
        this batch begins to hang.

        :returns: the calls of this batch that have ended or hang, and a pair
            (key, reason) for each key of which a call begins to hang now.
        """
        changed = self._cards._changed
        with changed:
            while True:
                hung: list[tuple[str, str]] = []
                if self._cards._closed:
                    self._leave()
                self._start_those_that_can()
                now = time.monotonic()
                for call in self._waiting:
                    self._check(call, now, hung)
                done = [c for c in self._waiting if c.ended or c.hangs]
                if done or hung:
                    self._waiting = [c for c in self._waiting
                                     if not (c.ended or c.hangs)]
                    return [self._seen(c) for c in done], hung
                changed.wait(self._until(now))

    def _leave(self) -> None:
        for call in self._waiting:
            if call.ended:
                continue
            text = (f'{call.what} was abandoned, because nova-compute stops: '
                    f'repeat the operation once it runs again')
            if call.began is None:
                self._cards._fail(call, f'{text}.')
            else:
                call.hangs = text

    @staticmethod
    def _seen(call: _Call) -> _Call:
        """Return a call as the iteration yields it: if its time limit has
        passed, its error is DeviceTimeout, even if the call has ended since.
        """
        if call.hangs:
            return dataclasses.replace(
                call, error=exception.DeviceTimeout(f'{call.hangs}.'))
        return call

    def _start_those_that_can(self) -> None:
        running = self._cards._running
        slow = time.monotonic() - _SLOW_SECONDS
        left = _SIDE_BY_SIDE - sum(
            c.began is not None and c.began > slow for c in self._waiting)
        for call in self._waiting:
            if left <= 0:
                return
            if (call.began is None and not call.ended
                    and call.key not in running):
                self._cards._start(call)
                left -= 1

    def _check(self, call: _Call, now: float, hung) -> None:
        if call.ended:
            return
        before = (call if call.began is not None
                  else self._cards._running.get(call.key))
        if before and not before.hangs and now >= before.deadline:
            # the caller of an earlier call may not have read its result yet
            hung.append((before.key, self._cards._give_up(before)))
        if before is call:
            return
        if before and before.hangs:
            self._cards._fail(call, f'{call.what} cannot begin: '
                                    f'{before.hangs}.')
        elif now >= call.deadline and not (call.patient and before):
            self._cards._fail(
                call, f'{call.what} could not begin within '
                f"{call.seconds:g} s"
                + (f', because this is still in progress: {before.what}'
                   if before else '') + '.', exception.DeviceBusy)

    def _until(self, now: float) -> float:
        """Return the seconds after which _next() must check the calls again.
        """
        times = []
        for call in self._waiting:
            before = self._cards._running.get(call.key)
            if call.began is not None or not (call.patient and before):
                times.append(call.deadline)
            if call.began is not None:
                if call.began + _SLOW_SECONDS > now:
                    times.append(call.began + _SLOW_SECONDS)
            elif before:
                times.append(before.deadline)
        return max(0.001, min(times) - now)


class Sweep:
    """Read a few attributes of many devices in one thread, even if devices
    hang. One sweep runs at a time.

    A worker for each device would take several times as long as the reading.
    Here one thread reads one device after the other. If a device hangs, a
    second thread continues with the next device, and the first thread ends
    when its call returns. Until then, sweeps omit the device. For example, if
    one of 512 devices hangs, the sweep ends two seconds later with the
    readings of 511.
    """

    def __init__(self) -> None:
        #: keys at which a thread hangs; each call of set is atomic
        self._hanging: set[str] = set()

    def run(self, function: Callable[[Any], Any],
            items: Iterable[tuple[str, Any]],
            ) -> tuple[dict[str, Any], list[str]]:
        """Call a function for each item.

        :param items: pairs of a key and the argument of the function.
        :param function: must not raise errors.
        :returns: a dict from each key to the result, and a list of the keys
            whose calls hang now.
        """
        left = iter([item for item in items if item[0] not in self._hanging])
        found: dict[str, Any] = {}
        hang: list[str] = []
        while True:
            #: the key that the thread reads now
            at = ['']
            future = limited.start(self._read, function, left, at, found)
            key = self._hangs_at(future, at)
            if not key:
                return dict(found), hang
            hang.append(key)

    def _hangs_at(self, future, at) -> str:
        """Wait until a thread ends or hangs. Return the key of the call that
        hangs, or '' if the thread has ended.

        :param at: list with the key that the thread reads now, or ''.
        """
        while True:
            before = at[0]
            try:
                future.result(_PATIENCE)
                return ''
            except concurrent.futures.TimeoutError:
                if not before or at[0] != before:
                    continue
            self._hanging.add(before)
            if at[0] == before:
                return before
            # the call has returned meanwhile
            self._hanging.discard(before)

    def _read(self, function, left, at, found) -> None:
        for key, item in left:
            at[0] = key
            found[key] = function(item)
            # in this order: see _hangs_at()
            at[0] = ''
            self._hanging.discard(key)
