# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Limit the time of calls into the kernel, which may never return.

Under eventlet (nova-compute of Nova 31 to 33) threads are green ones. All of
them share one thread of the operating system, which a system call blocks.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import functools
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import typing

from oslo_context import context as oslo_context

from nova_accel import exception
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import text

LOG = logging.getLogger(__name__)
#: seconds to wait for one of our threads in eventlet's pool
_POOL_SECONDS = 10
#: seconds after which background work is logged as waiting
_LATE = 600
#: bytes that a program may print
_MOST_OUTPUT = 4096
#: number of characters at the end of its output that an error contains
_LONGEST = 300


def wait_until(condition: Callable[[], object], seconds: float,
               pause: float = 0.1) -> bool:
    """Wait until a condition is true, and return whether it is in time.

    :param pause: seconds between two calls of the condition.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


class _Pool:
    """A limit for eventlet's pool of threads: nova_accel uses at most half of
    it. Calls of libvirt run in the other half, which hanging cards cannot
    block.

    Only green threads call this class. No lock is needed, because none of them
    yields between reading and changing the number of used threads.
    """

    def __init__(self):
        self._used = 0

    def execute(self, tpool, function, args):
        """Run a function in a thread of the pool, and return the result.

        :param tpool: the module eventlet.tpool.
        :raises DeviceTimeout: all threads that nova_accel may use hang.
        """
        most = max(1, getattr(tpool, '_nthreads', 20) // 2)
        if not wait_until(lambda: self._used < most, _POOL_SECONDS, 0.01):
            raise exception.DeviceTimeout(
                f'{most} calls into the kernel hang, which is as many as '
                f'nova-compute makes at a time: read the kernel '
                f'log, and reset the cards that hang.')
        self._used += 1
        try:
            return tpool.execute(function, *args)
        finally:
            self._used -= 1


_POOL = _Pool()


def blocking(function):
    """Decorate a function that may block for long. Under eventlet the function
    then runs in a thread of the operating system, because it would block all
    green threads. The function must not wait for a green thread.

    :raises DeviceTimeout: under eventlet, too many such calls hang.
    """
    @functools.wraps(function)
    def call(*args):
        # not imported, because Nova forbids eventlet under native threads
        patcher = sys.modules.get('eventlet.patcher')
        if patcher and patcher.is_monkey_patched('thread'):
            from eventlet import tpool
            return _POOL.execute(tpool, function, args)
        return function(*args)
    return call


class _Worker(threading.Thread):
    """A thread that runs one function at a time, and is used again."""

    def __init__(self):
        super().__init__(daemon=True)
        #: released when there is a function to run
        self._given = threading.Semaphore(0)
        self._job: typing.Any = None

    def give(self, job):
        self._job = job
        self.name = job[0]
        self._given.release()

    def run(self):
        while True:
            self._given.acquire()
            _, future, function, args = self._job
            tell = self._call(function, args, future)
            # the next function must neither see it nor keep it alive
            self._job = future = function = args = None
            with contextlib.suppress(AttributeError):
                del oslo_context._request_store.context
            self.name = IDLE
            ends = len(_IDLE) >= _MOST_IDLE
            if not ends:
                # first: the caller that gets the result may start the next call
                _IDLE.append(self)
            tell()
            tell = None
            if ends:
                return

    @staticmethod
    def _call(function, args, future):
        try:
            return functools.partial(future.set_result, function(*args))
        except BaseException as error:
            return functools.partial(future.set_exception, error)


#: name of idle threads
IDLE = 'accel-idle'
#: idle workers, the last one first; append and pop are atomic
_IDLE: list[_Worker] = []
#: as many as the cards of a host, which are all scanned at the same time if
#: each takes long
_MOST_IDLE = 128
# threads do not exist in a forked child
os.register_at_fork(after_in_child=_IDLE.clear)


def start(function, *args) -> concurrent.futures.Future:
    """Run a function in a thread that does not keep the process alive.

    Idle threads are used again, because a thread that begins or ends can
    receive a signal instead of the main thread; see host.signals. A
    concurrent.futures.ThreadPoolExecutor is unsuitable, because hanging calls
    would exhaust its threads, and the end of the process would wait for them.

    :raises RuntimeError: the process cannot create more threads.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()
    try:
        worker = _IDLE.pop()
    except IndexError:
        worker = _Worker()
        worker.start()
    worker.give((f'accel-{function.__name__}', future, function, args))
    return future


class Background:
    """A task in the background, never running twice at the same time."""

    def __init__(self, function: Callable[[], object], failure: str):
        """:param function: the task. An error is logged once, until the task
            succeeds again.
        :param failure: the beginning of the logged sentence.
        """
        self._function = function
        self._failure = failure
        self._once = logging.Once()
        self._lock = locks.Lock('background')
        self._runs = self._again = self._ended = False
        #: time.monotonic() of the last request
        self._asked_at = float('-inf')
        #: time.monotonic() of the last begin
        self._began_at = 0.0

    def start(self) -> None:
        """Run the function now. If it is running, run it again afterwards."""
        with self._lock:
            self._asked_at = time.monotonic()
            if self._ended:
                return
            self._again = True
            runs, self._runs = self._runs, True
            if not runs:
                self._began_at = self._asked_at
            late = self._asked_at - self._began_at >= _LATE
        if runs:
            if late:
                self._fails(exception.DeviceTimeout(
                    f'this began {_LATE // 60} minutes ago or earlier, and '
                    f'waits for a device that is cleaned, or for libvirt, '
                    f'Placement or a card that does not answer'))
            return
        try:
            start(self._run)
        except RuntimeError as error:
            # the process cannot start another thread
            with self._lock:
                self._runs = False
            self._fails(error)

    def start_if_due(self, seconds: float) -> None:
        """Run the function if its last run was requested at least this many
        seconds ago, or never."""
        if time.monotonic() - self._asked_at >= seconds:
            self.start()

    def postpone(self) -> None:
        """Delay start_if_due(), because the work has been done now."""
        self._asked_at = time.monotonic()

    def end(self) -> None:
        """End the task. It cannot be started again."""
        with self._lock:
            self._ended, self._again = True, False

    @property
    def runs(self) -> bool:
        with self._lock:
            return self._runs

    def _run(self):
        while True:
            with self._lock:
                self._runs, self._again = self._again, False
                if not self._runs:
                    return
                self._began_at = time.monotonic()
            self.run()

    def run(self) -> None:
        """Call the function in the calling thread, and log its errors."""
        try:
            self._function()
            self._once.forget('failure')
        except Exception as error:
            self._fails(error)

    def _fails(self, error):
        # the log has the stack of unexpected errors
        self._once.log(('failure',), functools.partial(
            LOG.warning, exc_info=exception.without_sentence(error)),
            '%s (%s); it is tried again', self._failure, error)


def wait(future, seconds: float, what: str):
    """Return the result of a call that was started with start().

    :param what: the operation, as the beginning of the error.
    :raises DeviceTimeout: the call did not end in time. It continues.
    """
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        if future.done():
            raise
        raise exception.DeviceTimeout(
            f'{what} did not end within {seconds:.0f} s: check the card, read '
            f'the log of nova-compute, and repeat the operation.') from None


class ProgramFailed(Exception):
    """A program of the operator or of a vendor failed. The message is a clause
    without its subject, which is the name of the program."""


def run(command: Sequence[str], seconds: float) -> str:
    """Run a program, and return its output without white space around it.

    The program runs in a directory without Python modules. If it takes too
    long or prints too much, it is killed with all processes that it started.

    :raises ProgramFailed: the program failed, or was killed.
    """
    end = time.monotonic() + seconds
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, cwd='/', start_new_session=True)
    except OSError as error:
        raise ProgramFailed(str(error.strerror or error)) from error
    pipes: list[typing.Any] = [process.stdout, process.stderr]
    output = {pipe.fileno(): b'' for pipe in pipes}
    try:
        with selectors.DefaultSelector() as selector:
            for pipe in output:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and time.monotonic() < end:
                for key, _ in selector.select(end - time.monotonic()):
                    part = os.read(key.fd, _MOST_OUTPUT)
                    output[key.fd] += part
                    if not part:
                        selector.unregister(key.fd)
                    if len(output[key.fd]) > _MOST_OUTPUT:
                        raise ProgramFailed(
                            f'prints more than {_MOST_OUTPUT} bytes')
            is_over = not selector.get_map()
        if not is_over or not _has_ended(process, end - time.monotonic()):
            raise ProgramFailed(f'does not end in {seconds:.0f} s')
    finally:
        for pipe in pipes:
            pipe.close()
        if process.returncode is None:
            # it is not waited for yet: its number is still that of its group
            os.killpg(process.pid, signal.SIGKILL)
            _has_ended(process, 1)
    said, errors = (part.decode(errors='replace').strip()
                    for part in output.values())
    if process.returncode:
        why = text.one_line((errors or said)[-_LONGEST:].removesuffix('.'))
        raise ProgramFailed(f'ended with {process.returncode} ({why})')
    return said


def _has_ended(process, seconds):
    """Wait for a process, and return whether it ended in time."""
    return wait_until(lambda: process.poll() is not None, seconds, 0.01)
