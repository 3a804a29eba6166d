# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Each test has a time limit, and ends before the next one begins.

The packages of tests call apply(); each test is one of testtools.

* At the limit the main thread gets an error, wherever it waits, and the test
  fails with the stacks of all threads. Its cleanups run.
* Where that does not end the test within LAST seconds, the process ends, with
  the stacks on standard error; and so it does where the next test has not begun
  then, or the process has not ended: what classes set up and take down has no
  limit of its own, and Python waits for threads at the end.
* A test fails that leaves a process, or a thread at work; where several tests
  share a cloud, which has threads of its own, one of nova_accel.
"""

import contextlib
import faulthandler
import gc
import itertools
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import traceback

import testtools
from testtools import content
from testtools import runtest

#: seconds for a test with its set-up and cleanups, on a loaded machine
LIMIT = 300
#: seconds for what a test does after that
LAST = 120
#: seconds in which threads end that have nothing more to do
ENDS = 20
#: seconds in which comes true what a test waits for
COMES = 120
#: threads of nova_accel that live as long as their process
SERVICE = 'accel-idle', 'accel-signals'
#: those that live until a nova-compute ends
LISTENERS = 'accel-_listen', 'accel-listen', 'accel-_poll'
#: ids of processes that go on after a test
PROCESSES: set[int] = set()


class TestTimeout(BaseException):
    """A test did not end within its limit. Nothing that a test calls takes it
    for an error of its own."""


class Waits:
    """A test that waits for what other threads do."""

    def wait_for(self, condition):
        ends = time.monotonic() + COMES
        while not condition():
            self.assertLess(time.monotonic(), ends)
            time.sleep(0.01)


def apply(shared: bool = False) -> None:
    """Make testtools run every test of this process so.

    :param shared: tests share a cloud, whose threads live as long as it.
    """
    testtools.TestCase.run_tests_with = Limited
    # the packages of tests import each other
    Limited.shared |= shared


def stacks() -> str:
    """Return the stacks of all threads, green ones included."""
    with tempfile.TemporaryFile('w+') as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        found = [file.read()]
    if green_thread():
        import greenlet
        found += ['Green thread:\n' + ''.join(
            traceback.format_stack(one.gr_frame)) for one in gc.get_objects()
            if isinstance(one, greenlet.greenlet) and one.gr_frame]
    return '\n'.join(found)


class Limited(runtest.RunTest):
    """Run a test within LIMIT seconds, or the attribute LIMIT of its class."""

    shared = False

    def _run_core(self):
        faulthandler.cancel_dump_traceback_later()
        limit = getattr(self.case, 'LIMIT', LIMIT)
        # signals go to the main thread; under eventlet its object is another
        if limit is None or threading.get_native_id() != os.getpid():
            return super()._run_core()
        self.case.addCleanup(_check_over, self.case, at_work(self.shared),
                             self.shared)
        current = green_thread()

        error = TestTimeout(
            f'The test did not end within {limit} s; see what its threads do')
        later = None

        def end():
            signal.setitimer(signal.ITIMER_REAL, 0)
            current.throw(error)

        def interrupt(number, frame):
            nonlocal later
            if not later:
                self.case.addDetail('stacks', content.text_content(stacks()))
            running = green_thread()
            if current is running:
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise error
            from eventlet import hubs
            hub = hubs.get_hub()
            if hub.greenlet is running:
                signal.setitimer(signal.ITIMER_REAL, 0)
                # it hands it to the main green thread, and begins again
                raise error
            if not later:
                # as soon as the green thread that runs waits
                later = hub.schedule_call_global(0, end)
            else:
                # it does not, for a second; it stays in this line
                later.cancel()
                end()
        before = signal.signal(signal.SIGALRM, interrupt)
        _end_in(limit + LAST)
        # another thread may take one signal, but not one each second; and
        # interrupt() may need two
        signal.setitimer(signal.ITIMER_REAL, limit, 1)
        try:
            return super()._run_core()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            _end_in(LIMIT + LAST)

    def _run_user(self, function, *args, **kwargs):
        def run():
            try:
                return function(*args, **kwargs)
            except TestTimeout as error:
                raise AssertionError(str(error)) from error
        return super()._run_user(run)


def _end_in(seconds) -> None:
    """End the process then, unless that is called off."""
    # sys.stderr may be a text in memory, as in the demo
    faulthandler.dump_traceback_later(
        seconds, exit=True, file=sys.__stderr__)


def green_thread():
    """Return the green thread that runs, None under native threads."""
    patcher = sys.modules.get('eventlet.patcher')
    if not (patcher and patcher.is_monkey_patched('thread')):
        return None
    import greenlet
    return greenlet.getcurrent()


def at_work(accel: bool = True) -> set[threading.Thread]:
    """Return the threads that run something which ends.

    :param accel: of nova_accel only, and not those of a nova-compute that
        goes on.
    """
    known = (*SERVICE, *LISTENERS) if accel else SERVICE
    return {thread for thread in threading.enumerate()
            if thread.name not in known
            and (thread.name.startswith('accel-') or not accel)}


def processes() -> dict[int, str]:
    """Return the names of the processes that this one has started and that have
    not ended, but for PROCESSES; none where the kernel does not tell."""
    found = {}
    for task in pathlib.Path('/proc/self/task').iterdir():
        # a thread or process may end meanwhile
        with contextlib.suppress(OSError):
            for child in (task / 'children').read_text().split():
                name, state = pathlib.Path(f'/proc/{child}/stat').read_text(
                    ).partition('(')[2].rsplit(')', 1)
                if state.split()[0] != 'Z' and int(child) not in PROCESSES:
                    found[int(child)] = name
    return found


def _check_over(case, threads, accel):
    """Fail where threads work after a test, or processes run.

    :param threads: those of before the test.
    """
    end = time.monotonic() + ENDS
    for pause in itertools.chain((0, 0.01, 0.05), itertools.repeat(0.2)):
        time.sleep(pause)
        run = processes()
        left = sorted(thread.name for thread in at_work(accel) - threads) + [
            f'{name} (process {id_})' for id_, name in run.items()]
        if not left:
            return
        if pause == 0.05:
            # a file that nothing refers to any more, and a thread reads from
            gc.collect()
        if time.monotonic() > end:
            # of this test, and not of the next one
            PROCESSES.update(run)
            case.addDetail('stacks', content.text_content(stacks()))
            raise AssertionError(
                f'After the test these threads and processes are at work: '
                f'{", ".join(left)}. Let the test wait for what it began, or '
                f'take the fault away that it set')
