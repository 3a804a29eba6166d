# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A time limit for calls into the kernel, which may never return.

Under eventlet (nova-compute of Nova 31 to 33) threads are green ones: all of
them are one thread of the operating system, which a system call stops whole.
"""

import concurrent.futures
import functools
import sys
import threading
import time

from nova_accel import exception
from nova_accel import locks

#: seconds to wait for one of our threads of eventlet's pool
_POOL_SECONDS = 10


class _Pool:
    """Our part of eventlet's pool of threads, in which libvirt's calls run as
    well: half of it, so that cards that hang cannot stop those.

    Only green threads come here, and none gives way between a look at the
    number and its change.
    """

    def __init__(self):
        self._used = 0

    def execute(self, tpool, function, args):
        """:raises DeviceTimeout: all of ours hang."""
        most = max(1, getattr(tpool, '_nthreads', 20) // 2)
        end = time.monotonic() + _POOL_SECONDS
        while self._used >= most:
            if time.monotonic() > end:
                raise exception.DeviceTimeout(
                    f'{most} calls into the kernel hang, which is as many as '
                    f'nova-compute makes at a time: look at the cards and the '
                    f'kernel log, and reset those that hang.')
            time.sleep(0.01)
        self._used += 1
        try:
            return tpool.execute(function, *args)
        finally:
            self._used -= 1


_POOL = _Pool()


def blocking(function):
    """Decorate what a green thread must not call by itself.

    Under eventlet it runs in a thread of the operating system; what it calls
    must not wait for a green thread.

    :raises DeviceTimeout: under eventlet, too many such calls hang.
    """
    @functools.wraps(function)
    def call(*args):
        # not imported: under native threads Nova forbids it
        patcher = sys.modules.get('eventlet.patcher')
        if patcher and patcher.is_monkey_patched('thread'):
            from eventlet import tpool
            return _POOL.execute(tpool, function, args)
        return function(*args)
    return call


def start(function, *args) -> concurrent.futures.Future:
    """Run function in a thread of its own that does not keep the process.

    Not a pool: a call that hangs would take a worker from the others, and a
    process that ends would wait for it.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
    threading.Thread(target=run, daemon=True,
                     name=f'accel-{function.__name__}').start()
    return future


class Background:
    """One piece of work in the background, never twice at the same time."""

    def __init__(self, function):
        """:param function: raises nothing: nobody hears of it."""
        self._function = function
        self._future = None
        self._lock = locks.Lock('background')

    def start(self, *args) -> bool:
        """Call function with args; False where an earlier call still runs."""
        with self._lock:
            if self._future and not self._future.done():
                return False
            self._future = start(self._function, *args)
            return True


def wait(future, seconds: float, what: str):
    """Return the result of a started call.

    :param what: the beginning of the error: who does what.
    :raises DeviceTimeout: after seconds; the call goes on.
    """
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        if future.done():
            raise
        raise exception.DeviceTimeout(
            f'{what} did not end within {seconds:.0f} s: look at the card and '
            f'the log of nova-compute, and repeat the operation.') from None
