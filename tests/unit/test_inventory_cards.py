# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One card, one worker, one time limit."""

import threading
import time

import testtools

from nova_accel import exception
from nova_accel.inventory import cards
from tests import limits


class CardsTest(limits.Waits, testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.told = []
        self.cards = cards.Cards(
            hangs=lambda key, why: self.told.append(('hangs', key)),
            ended=lambda key: self.told.append(('ended', key)))
        self.event = threading.Event()
        self.addCleanup(self.event.set)

    def call(self, key='a', function=lambda: 'done', seconds=30, **more):
        return self.cards.call(key, f'Working on {key}', function,
                               seconds=seconds, **more)

    def hang(self, key='a', seconds=0.05, **more):
        return self.assertRaises(exception.DeviceTimeout, self.call, key,
                                 self.event.wait, seconds, **more)

    def in_background(self, function, *args, **more):
        results = []

        def run():
            try:
                results.append(function(*args, **more))
            except Exception as error:
                results.append(error)
        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join, 120)
        # before that, as cleanups are called in reverse order
        self.addCleanup(self.event.set)
        return thread, results

    @staticmethod
    def threads():
        return len(limits.at_work())

    def test_result_and_error(self):
        self.assertEqual('done', self.call())
        self.assertRaises(ZeroDivisionError, self.call,
                          function=lambda: 1 / 0)
        self.assertEqual([], self.told)
        self.assertFalse(self.cards.is_busy('a'))

    def test_limit(self):
        error = self.hang()
        self.assertIn('Working on a did not end within 0.05 s', str(error))
        self.assertIn('Working on a', self.cards.hanging('a'))
        self.assertEqual([('hangs', 'a')], self.told)
        self.assertEqual('done', self.call('b'))
        self.assertEqual('', self.cards.hanging('b'))

    def test_one_thread_for_ever(self):
        self.hang()
        threads = self.threads()
        for _ in range(20):
            began = time.monotonic()
            error = self.hang(seconds=30)
            self.assertTrue(time.monotonic() - began < 5)
            self.assertIn('cannot begin: Working on a did not', str(error))
        self.assertEqual(threads, self.threads())

    def test_ended_after_all(self):
        late = []
        self.hang(late=lambda: late.append(self.cards.is_busy('a')))
        self.event.set()
        self.wait_for(lambda: late)
        # both are told of a card that can be used again
        self.assertEqual([False], late)
        self.assertEqual([('hangs', 'a'), ('ended', 'a')], self.told)
        self.assertEqual('done', self.call())

    def test_error_after_all(self):
        late = []

        def fail():
            self.event.wait()
            raise ValueError('too late')
        self.assertRaises(exception.DeviceTimeout, self.call, 'a', fail, 0.05,
                          late=lambda: late.append(True))
        self.event.set()
        self.wait_for(lambda: ('ended', 'a') in self.told)
        self.assertEqual([], late)

    def test_one_at_a_time(self):
        order = []

        def work(number):
            order.append(number)
            time.sleep(0.01)
            order.append(number)
        threads = [self.in_background(self.call, 'a', lambda n=n: work(n))[0]
                   for n in range(5)]
        for thread in threads:
            thread.join(30)
        self.assertEqual(order[::2], order[1::2])

    def test_who_waits_fails_with_the_call_before(self):
        """At once when that passes its limit, not after his own."""
        first, failed = self.in_background(self.call, 'a', self.event.wait, 1)
        self.wait_for(lambda: self.cards.is_busy('a'))
        began = time.monotonic()
        error = self.hang(seconds=60)
        self.assertTrue(time.monotonic() - began < 30)
        self.assertIn('cannot begin', str(error))
        first.join(30)
        self.assertIsInstance(failed[0], exception.DeviceTimeout)
        self.assertEqual([('hangs', 'a')], self.told)

    def test_who_waits_longer_than_his_limit(self):
        """The call before goes on, which is no sign of a card that hangs."""
        self.in_background(self.call, 'a', self.event.wait, 60)
        self.wait_for(lambda: self.cards.is_busy('a'))
        error = self.assertRaises(exception.DeviceBusy, self.call,
                                  seconds=0.05)
        self.assertIn('still in progress: Working on a', str(error))
        self.assertEqual(('', []), (self.cards.hanging('a'), self.told))

    def test_batch_under_one_limit(self):
        batch = self.cards.batch(0.5)
        for key in 'abc':
            batch.add(key, f'Working on {key}', self.event.wait, about=key)
        for key in 'def':
            batch.add(key, f'Working on {key}', str, key, about=key)
        began = time.monotonic()
        order = [call.about for call in batch]
        self.assertTrue(time.monotonic() - began < 5)
        # those that are done do not wait for those that hang
        self.assertEqual(('def', 'abc'), (''.join(sorted(order[:3])),
                                          ''.join(sorted(order[3:]))))

    def test_batch_that_grows(self):
        batch = self.cards.batch(30)
        batch.add('a', 'Working', lambda: 3)
        results = []
        for call in batch:
            results.append(call.outcome())
            if results[-1]:
                batch.add('a', 'Working', lambda n=results[-1]: n - 1)
        self.assertEqual([3, 2, 1, 0], results)

    def test_large_batch_with_many_that_hang(self):
        batch = self.cards.batch(60)
        for number in range(80):
            batch.add(f'hangs{number}', 'Working', self.event.wait)
        for number in range(400):
            batch.add(str(number), 'Working', int, number, about=number)
        done = []
        for call in batch:
            done.append(call.about)
            if len(done) == 400:
                self.event.set()
        self.assertEqual(480, len(done))
        self.assertEqual([], self.told)
