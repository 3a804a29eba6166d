# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Processes of tests in a fresh clone have as much to do as each other."""

import pathlib

import fixtures
from stestr.repository import file
from stestr import scheduler
import testtools

from tests import times

LONG = 'tests.functional.test_a.ATest.test_{}'


class TimesTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        (self.root / 'tests').mkdir()
        self.path = self.root / 'tests/times.txt'

    def write(self, *seconds):
        self.path.write_text(''.join(
            f'{each} {LONG.format(n)}\n' for n, each in enumerate(seconds)))

    def parts(self, number):
        """Which tests each of two processes gets."""
        return sorted(sorted(int(test[-1]) for test in part)
                      for part in scheduler.partition_tests(
                          [LONG.format(n) for n in range(number)], 2,
                          file.RepositoryFactory().open(str(
                              self.root / times.KEPT / 'functional')), None))

    def test_fresh_clone(self):
        self.write(9.0, 3.0, 3.5, 3.0)
        times.tell('functional', self.root)
        self.assertEqual([[0], [1, 2, 3]], self.parts(4))

    def test_what_stestr_saw_itself(self):
        self.write(9.0, 3.0, 3.5, 3.0)
        times.tell('functional', self.root)
        self.write(1.0, 9.0, 1.0, 1.0)
        times.tell('functional', self.root)
        self.assertEqual([[0], [1, 2, 3]], self.parts(4))

    def test_record(self):
        self.write(9.04, 0.9, 1.0)
        times.tell('functional', self.root)
        times.record(self.root)
        self.assertEqual(f'9.0 {LONG.format(0)}\n1.0 {LONG.format(2)}\n',
                         self.path.read_text())

    def test_tests_of_the_file(self):
        """Each is of a module that is there."""
        for line in (times.ROOT / 'tests/times.txt').read_text().splitlines():
            module = line.split()[1].rsplit('.', 2)[0]
            self.assertTrue(
                (times.ROOT / f'{module.replace(".", "/")}.py').exists(),
                f'{module}: run python -m tests.times --record after the tests')
