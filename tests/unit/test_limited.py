# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What runs in the background does not run twice at the same time."""

import os
import queue
import signal
import threading
import time

import ddt
import fixtures
from oslo_context import context as oslo_context
import testtools

from nova_accel import exception
from nova_accel.host import limited


class StartTest(testtools.TestCase):

    def idle(self):
        """Wait until no work is left, as of the test before."""
        end = time.monotonic() + 60
        while any(thread.name.startswith('accel-')
                  and thread.name != limited.IDLE
                  for thread in threading.enumerate()):
            self.assertTrue(time.monotonic() < end)
            time.sleep(0.01)

    def test_result_and_error(self):
        self.assertEqual(3, limited.start(max, 1, 3).result(60))
        self.assertIsInstance(
            limited.start(max, 1, 'a').exception(60), TypeError)

    def test_thread_is_used_again(self):
        threads = {limited.start(threading.get_ident).result(60)}
        for _ in range(100):
            threads.add(limited.start(threading.get_ident).result(60))
        self.assertEqual(1, len(threads))

    def test_hung_calls_keep_their_threads(self):
        """And take none from the others."""
        self.idle()
        goes_on = threading.Event()
        self.addCleanup(goes_on.set)
        hung = [limited.start(goes_on.wait, 60)
                for _ in range(limited._MOST_IDLE + 20)]
        self.assertEqual('runs', limited.start(str, 'runs').result(60))
        goes_on.set()
        self.assertEqual([True] * len(hung), [f.result(60) for f in hung])
        self.idle()
        self.assertTrue(sum(thread.name == limited.IDLE for thread
                            in threading.enumerate()) <= limited._MOST_IDLE)

    def test_request_is_forgotten(self):
        """What one thread did for a user does not show in the log of what it
        does for another."""
        def work():
            before = oslo_context.get_current()
            oslo_context.RequestContext().update_store()
            return threading.get_ident(), before
        first = limited.start(work).result(60)
        self.idle()
        self.assertEqual((first[0], None), limited.start(work).result(60))

    def test_after_a_fork(self):
        limited.start(str).result(60)
        self.idle()
        child = os.fork()
        if not child:
            os._exit(limited.start(int, '7').result(60))
        self.assertEqual(7, os.waitstatus_to_exitcode(
            os.waitpid(child, 0)[1]))


class BackgroundTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.began, self.calls = queue.Queue(), 0
        self.goes_on = threading.Semaphore(0)
        self.error = None

    def work(self):
        self.began.put(1)
        self.goes_on.acquire(timeout=60)
        self.calls += 1
        if self.error:
            raise self.error

    def idle(self, background):
        end = time.monotonic() + 60
        while background.runs:
            self.assertTrue(time.monotonic() < end)
            time.sleep(0.01)

    def test_once_more_where_it_is_asked_for_meanwhile(self):
        background = limited.Background(self.work, 'This fails')
        background.start()
        self.began.get(timeout=60)
        for _ in range(5):
            background.start()
        self.goes_on.release()
        self.began.get(timeout=60)
        self.goes_on.release()
        self.idle(background)
        self.assertEqual(2, self.calls)

    def test_error_is_told_once(self):
        self.error = ValueError('no')
        background = limited.Background(self.work, 'This fails')
        with self.assertLogs(limited.LOG.logger, 'WARNING') as logged:
            for error in ('no', 'no', None, 'no'):
                self.error = error and ValueError(error)
                self.goes_on.release()
                background.start()
                self.idle(background)
        self.assertEqual(['This fails (no); it is tried again'] * 2,
                         [record.getMessage() for record in logged.records])

    def test_what_does_not_end_is_told_once(self):
        self.useFixture(fixtures.MockPatchObject(limited, '_LATE', 0))
        background = limited.Background(self.work, 'This fails')
        background.start()
        self.began.get(timeout=60)
        with self.assertLogs(limited.LOG.logger, 'WARNING') as logged:
            background.start()
            background.start()
        record, = logged.records
        self.assertRegex(record.getMessage(),
                         r'^This fails \(this began .* does not answer\); it')
        self.goes_on.release(2)
        self.idle(background)

    def test_if_due(self):
        self.goes_on.release(9)
        background = limited.Background(self.work, 'This fails')
        for seconds, calls in ((3600, 1), (3600, 1), (0, 2)):
            background.start_if_due(seconds)
            self.idle(background)
            self.assertEqual(calls, self.calls)
        background.postpone()
        background.start_if_due(3600)
        self.idle(background)
        self.assertEqual(2, self.calls)

    def test_ended(self):
        """Not begun again, also where that was asked for while it ran."""
        background = limited.Background(
            lambda: (self.work(), background.end()), 'This fails')
        background.start()
        self.began.get(timeout=60)
        background.start()
        self.goes_on.release(2)
        self.idle(background)
        background.start()
        self.assertFalse(background.runs)
        self.assertEqual(1, self.calls)

    def test_stack_of_what_is_unexpected(self):
        with self.assertLogs(limited.LOG.logger, 'WARNING') as logged:
            for error in (ValueError('no'),
                          exception.DeviceUnavailable('It is not there.')):
                self.error = error
                self.goes_on.release()
                limited.Background(self.work, 'This fails').run()
        self.assertEqual([True, False], [
            bool(record.exc_info) for record in logged.records])


@ddt.ddt
class RunTest(testtools.TestCase):
    """Programs of operators and vendors, whatever they do."""

    def fails(self, script, seconds=60):
        began = time.monotonic()
        error = self.assertRaises(
            limited.ProgramFailed, limited.run, ['sh', '-c', script], seconds)
        self.assertLess(time.monotonic() - began, 30)
        return str(error)

    def test_output(self):
        self.assertEqual('a  \ufffd', limited.run(
            ['printf', r'\n a  \377 \n'], 60))

    @ddt.data('cat /dev/zero', 'cat /dev/zero >&2', 'yes & yes')
    def test_without_end(self, script):
        self.assertEqual('prints more than 4096 bytes', self.fails(script))

    @ddt.data('exec sleep 60', 'exec >&- 2>&-; exec sleep 60',
              'setsid sleep 5 & exit', 'trap "" TERM INT HUP; sleep 60; :')
    def test_too_long(self, script):
        self.assertEqual('does not end in 0 s', self.fails(script, 0.2))

    def test_what_it_has_started_ends_too(self):
        directory = self.useFixture(fixtures.TempDir()).path
        self.fails(f'sleep 60 & echo $! > {directory}/pid; wait', 0.5)
        with open(f'{directory}/pid', encoding='ascii') as file:
            pid = int(file.read())
        end = time.monotonic() + 30
        while time.monotonic() < end and os.path.exists(f'/proc/{pid}'):
            with open(f'/proc/{pid}/stat', encoding='ascii') as file:
                if ') Z ' in file.read():
                    # the parent of orphans of this machine does not wait
                    return
            time.sleep(0.01)
        self.assertRaises(ProcessLookupError, os.kill, pid, signal.SIGCONT)

    def test_error(self):
        self.assertEqual(
            r'ended with 3 (\x1b[2J' + '0' * 295 + ')', self.fails(
                'printf "%0999d\033[2J%0295d." 0 0 >&2; exit 3'))
        self.assertEqual('ended with 1 (no)', self.fails('echo no; exit 1'))
        self.assertEqual('ended with -9 ()', self.fails('kill -9 $$'))

    def test_cannot_be_run(self):
        error = self.assertRaises(
            limited.ProgramFailed, limited.run, ['/nowhere'], 1)
        self.assertEqual('No such file or directory', str(error))
