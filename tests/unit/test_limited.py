# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What runs in the background does not run twice at the same time."""

import os
import queue
import threading
import time

from oslo_context import context as oslo_context
import testtools

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

    def test_one_at_a_time(self):
        calls, goes_on = queue.Queue(), threading.Semaphore(0)
        ended = queue.Queue()

        def work(number):
            calls.put(number)
            goes_on.acquire(timeout=120)
            ended.put(threading.current_thread())
            if number == 1:
                raise ValueError('nobody hears of it')
        background = limited.Background(work)
        self.assertTrue(background.start(1))
        self.assertEqual(1, calls.get(timeout=120))
        self.assertFalse(background.start(2))
        goes_on.release()
        thread = ended.get(timeout=120)
        end = time.monotonic() + 120
        while thread.name != limited.IDLE and time.monotonic() < end:
            time.sleep(0.01)
        self.assertTrue(background.start(3))
        self.assertEqual(3, calls.get(timeout=120))
        goes_on.release()
        self.assertTrue(calls.empty())

    def test_if_due(self):
        calls = queue.Queue()
        background = limited.Background(lambda: calls.put(1))
        self.assertTrue(background.start_if_due(3600))
        calls.get(timeout=120)
        self.assertFalse(background.start_if_due(3600))
        end = time.monotonic() + 120
        while not background.start_if_due(0) and time.monotonic() < end:
            time.sleep(0.01)
        calls.get(timeout=120)


class FollowerTest(testtools.TestCase):

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

    def idle(self, follower):
        end = time.monotonic() + 60
        while follower.runs:
            self.assertTrue(time.monotonic() < end)
            time.sleep(0.01)

    def test_once_more_where_it_is_asked_for_meanwhile(self):
        follower = limited.Follower(self.work, 'This fails')
        follower.start()
        self.began.get(timeout=60)
        for _ in range(5):
            follower.start()
        self.goes_on.release()
        self.began.get(timeout=60)
        self.goes_on.release()
        self.idle(follower)
        self.assertEqual(2, self.calls)

    def test_error_is_told_once(self):
        self.error = ValueError('no')
        follower = limited.Follower(self.work, 'This fails')
        with self.assertLogs(limited.LOG.logger, 'WARNING') as logged:
            for error in ('no', 'no', None, 'no'):
                self.error = error and ValueError(error)
                self.goes_on.release()
                follower.start()
                self.idle(follower)
        self.assertEqual(['This fails (no); it is tried again'] * 2,
                         [record.getMessage() for record in logged.records])
