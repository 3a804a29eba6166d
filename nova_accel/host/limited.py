# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A time limit for calls into the kernel, which may never return.

Under eventlet (nova-compute of Nova 31 to 33) threads are green ones: all of
them are one thread of the operating system, which a system call stops whole.
"""

import concurrent.futures
import functools
import sys
import threading

from nova_accel import exception


def blocking(function):
    """Decorate what a green thread must not call by itself.

    Under eventlet it runs in a thread of the operating system; what it calls
    must not wait for a green thread.
    """
    @functools.wraps(function)
    def call(*args):
        # not imported: under native threads Nova forbids it
        patcher = sys.modules.get('eventlet.patcher')
        if patcher and patcher.is_monkey_patched('thread'):
            from eventlet import tpool
            return tpool.execute(function, *args)
        return function(*args)
    return call


def start(function, *args) -> concurrent.futures.Future:
    """Run function in a thread of its own that does not keep the process.

    Not a pool: a call that hangs would take a worker from the others, and a
    process that ends would wait for it.
    """
    future = concurrent.futures.Future()

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
        self._lock = threading.Lock()

    def start(self, *args) -> bool:
        """Call function with args; False where an earlier call still runs."""
        with self._lock:
            if self._future and not self._future.done():
                return False
            self._future = start(self._function, *args)
            return True


def wait(future, seconds: float, what: str):
    """The result of a started call.

    :param what: who does what, for the error: 'the driver dfl looks for ...'
    :raises DeviceTimeout: after seconds; the call goes on.
    """
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        if future.done():
            raise
        raise exception.DeviceTimeout(
            f'{what} did not end within {seconds:.0f} s: look at the card and '
            f'the kernel log, and reset the card.') from None
