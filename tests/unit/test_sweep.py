# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Many devices are read in one thread, of which some hang."""

import threading

import fixtures
import testtools

from nova_accel.inventory import cards
from tests import limits


class SweepTest(limits.Waits, testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MockPatchObject(cards, '_PATIENCE', 0.2))
        self.sweep = cards.Sweep()
        self.goes_on = threading.Event()
        self.addCleanup(self.goes_on.set)
        self.asked = []

    def read(self, item):
        self.asked.append(item)
        if item in ('c', 'f'):
            self.goes_on.wait(60)
        return item.upper()

    def run_sweep(self, keys='abcdefg'):
        self.asked = []
        return self.sweep.run(self.read, [(key, key) for key in keys])

    def test_none_hangs(self):
        self.assertEqual(({'a': 'A', 'b': 'B'}, []), self.run_sweep('ab'))
        self.assertEqual(({}, []), self.run_sweep(''))

    def test_two_hang(self):
        found, hang = self.run_sweep()
        self.assertEqual('ABDEG', ''.join(sorted(found.values())))
        self.assertEqual(['c', 'f'], hang)
        # they are left out while they do, and cost no further thread
        found, hang = self.run_sweep()
        self.assertEqual('ABDEG', ''.join(sorted(found.values())))
        self.assertEqual([], hang)
        self.assertEqual([*'abdeg'], self.asked)
        self.goes_on.set()
        self.wait_for(lambda: not limits.at_work())
        self.assertEqual('ABCDEFG', ''.join(self.run_sweep()[0].values()))

    def test_slow_ones(self):
        """The limit is of one device, not of all of them."""
        def read(item):
            self.goes_on.wait(0.1)
            return item
        self.assertEqual(
            ({key: key for key in 'abcde'}, []),
            self.sweep.run(read, [(key, key) for key in 'abcde']))
