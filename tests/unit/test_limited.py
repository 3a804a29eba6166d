# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What runs in the background does not run twice at the same time."""

import queue
import threading

import testtools

from nova_accel.host import limited


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
        ended.get(timeout=120).join(120)
        self.assertTrue(background.start(3))
        self.assertEqual(3, calls.get(timeout=120))
        goes_on.release()
        self.assertTrue(calls.empty())
