# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What .ci/run says of parts that pass, fail, or pass the second time."""

import contextlib
import io
import os
import pathlib

import fixtures
import testtools

from tests import ci

STESTR = """#!/bin/sh
printf 'tests.unit.test_a.A.test_one\\ntests.unit.test_a.A.test_two\\n' \
    | head -n $(cat failing)
"""
# a part that fails the first time, and what is made of its options
MAKEFILE = """
parts: ; @echo $(shell cat names)
host: ; @printf '%s\\n' '======' ' - Passed: 7' ' - Failed: 0'
unit:
\t@echo Failed $(shell cat failing) tests - output below:
\t@echo test_one says why
\t@printf '%s\\n' ' - Passed: 5' ' - Failed: $(shell cat failing)'
\t@test '$(STESTR)' = '--failing --serial'
broken: ; @echo ' - Passed: 3'; echo ' - Failed: 2'; exit 2
docs: ; @echo built
slow: ; @sleep 60
one: ; @touch began1; until test -e began2; do sleep 0.1; done
two: ; @touch began2; until test -e began1; do sleep 0.1; done
.venv/stamp: ; @test ! -e unreachable
NOVA ?= 34.0.0
.venv31/stamp: ; @echo no network; exit 1
"""

FAILED = """
Failed 2 tests - output below:
==============================

tests.host.test_a.A.test_one
----------------------------

Captured traceback:
~~~~~~~~~~~~~~~~~~~
    Traceback (most recent call last):
  File "test_a.py", line 147, in test_one
    self.assertEqual(3, 2)
testtools.matchers._impl.MismatchError: 3 != 2

    During handling of the above exception, another exception occurred:

    Traceback (most recent call last):
  File "test_a.py", line 148, in test_one
    return function(*args, **kwargs)
    AssertionError: 3 != 2: no

Captured pythonlogging:
~~~~~~~~~~~~~~~~~~~~~~~
    2026-11-28 INFO [nova] Traceback (most recent call last):
ValueError: as expected
2026-11-28 ERROR [nova] Instance failed to spawn

tests.host.test_a.B.test_two
----------------------------

Captured traceback:
~~~~~~~~~~~~~~~~~~~
tests.limits.TestTimeout: late

 - Passed: 0
 - Failed: 2
"""


class RunTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        self.write('Makefile', MAKEFILE)
        self.write('failing', '1')
        self.write('tox.ini', 'nova31: nova==31.3.1\nnova34: nova==34.0.0\n')
        self.write('.venv/bin/stestr', STESTR)
        os.chmod(self.root / '.venv/bin/stestr', 0o755)
        self.run_ = ci.Run(self.root)
        self.said = io.StringIO()
        self.useFixture(fixtures.EnvironmentVariable('MAKEFLAGS', ''))

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def do(self, method, *args, **kwargs):
        with contextlib.redirect_stdout(self.said):
            getattr(self.run_, method)(*args, **kwargs)

    def assertEnds(self, last, failed, *lines):
        summary = self.run_.summary()
        self.assertEqual(last, summary.splitlines()[-1])
        self.assertEqual(failed, self.run_.has_failed())
        for line in lines:
            self.assertIn(line, summary)

    def test_passes(self):
        self.do('part', 'host')
        self.do('step', 'docs', 'make', 'docs', limit=1)
        self.assertEnds('8 passed, 0 failed', False,
                        's: host: 7 passed, 0 failed',
                        's: docs: 1 passed, 0 failed')
        self.assertNotIn('built', self.said.getvalue())

    def test_why_a_test_failed(self):
        """The summary, which is at the end, has the reason of each test."""
        self.write('said', FAILED)
        self.do('step', 'host', 'sh', '-c', 'cat said; exit 1', limit=1)
        self.assertEnds(
            '0 passed, 2 failed', True,
            'host: tests.host.test_a.A.test_one: AssertionError: 3 != 2: no',
            'host: 2026-11-28 ERROR [nova] Instance failed to spawn',
            'host: tests.host.test_a.B.test_two: tests.limits.TestTimeout: '
            'late')
        self.do('step', 'docs', 'sh', '-c', 'echo WARNING: no label; exit 2',
                limit=1)
        self.assertEnds('0 passed, 3 failed', True,
                        'docs: WARNING: no label')

    def test_two_parts_at_a_time(self):
        self.write('names', 'host one two')
        self.do('parts')
        self.assertEnds('10 passed, 0 failed', False,
                        's: one: 1 passed', 's: two: 1 passed')

    def test_parts_without_packages(self):
        self.write('unreachable', '')
        self.do('parts')
        self.assertEnds('0 passed, 1 failed', True,
                        's: packages: 0 passed, 1 failed')

    def test_parts_that_fail(self):
        self.write('names', 'broken host unit')
        self.do('parts')
        said = self.said.getvalue()
        self.assertIn('[make unit]\nIt ended with 2. What it said:\nFailed 1 '
                      'tests - output below:\ntest_one says why\n', said)
        self.assertEnds('17 passed, 2 failed', True,
                        's: broken: 3 passed, 2 failed',
                        's: host: 7 passed, 0 failed',
                        's: unit: 6 passed, 0 failed')

    def test_passes_the_second_time(self):
        self.do('part', 'unit')
        self.assertIn('test_one says why', self.said.getvalue())
        self.assertEnds('6 passed, 0 failed', False,
                        'unsteady: tests.unit.test_a.A.test_one failed')

    def test_several_pass_the_second_time(self):
        self.write('failing', '2')
        self.do('part', 'unit')
        self.assertEnds('7 passed, 2 failed', True,
                        'FAILED: 2 tests passed only the second time')

    def test_fails(self):
        self.do('part', 'broken')
        self.do('other_nova')
        self.do('lab')
        self.do('tempest')
        self.assertEnds('3 passed, 2 failed', True,
                        's: broken: 3 passed, 2 failed',
                        'not run: Nova 31.3.1: something has failed before',
                        'not run: lab: something has failed before',
                        'not run: tempest-part: something has failed before')

    def test_takes_too_long(self):
        self.do('step', 'slow', 'make', 'slow', limit=0.1)
        self.assertIn('It ended with 124', self.said.getvalue())
        self.assertEnds('0 passed, 1 failed', True)

    def test_no_packages(self):
        self.do('other_nova')
        self.assertIn('no network', self.said.getvalue())
        self.assertEnds('0 passed, 0 failed', False,
                        'not run: Nova 31.3.1: its packages could not')

    def test_no_time(self):
        self.run_._began -= 60 * ci.LAB + 60
        self.do('other_nova')
        self.do('lab')
        self.assertEnds('0 passed, 0 failed', False,
                        'not run: lab: 39 minutes were over')

    def test_no_time_for_tempest(self):
        self.run_._began -= 60 * ci.TEMPEST + 60
        self.do('tempest')
        self.assertEnds('0 passed, 0 failed', False,
                        'not run: tempest-part: 63 minutes were over, and it '
                        'takes up to 18')

    def test_trials(self):
        step = ci.Step('lab', 0, 1, (
            'base.Boot\n    proven in 2 s\n\noutcome  seconds  what\n'
            'proven         2  A server boots.\n'
            'skipped        0  B.\nnot run        0  C.\n'))
        self.assertEqual((1, 0), (step.passed, step.failed))
        self.assertIn('1 trials not begun, 1 skipped', str(step))

    def test_novas_own_tests(self):
        step = ci.Step('nova-tests-part', 1, 1, (
            'unit: 30 passed, 0 failed, 1 skipped, 0 excluded\n'
            'functional-card: 3 passed, 1 failed, 0 skipped, 0 excluded\n'))
        self.assertEqual((33, 1), (step.passed, step.failed))
        self.assertIn('33 passed, 1 failed, 1 skipped', str(step))

    def test_skipped(self):
        step = ci.Step('host', 0, 1, (
            ' - Passed: 0\n - Skipped: 900\n - Failed: 0\n'))
        self.assertIn('host: 0 passed, 0 failed, 900 skipped', str(step))

    def test_testtools(self):
        """Its own runner, as of the layouts."""
        step = ci.Step('layouts', 0, 1, 'Ran 3 tests in 1.234s\nOK\n')
        self.assertEqual((3, 0), (step.passed, step.failed))
        step = ci.Step('layouts', 1, 1, (
            'Ran 3 tests in 1.234s\nFAILED (failures=2)\n'))
        self.assertEqual((1, 2), (step.passed, step.failed))

    def test_releases(self):
        """tox.ini and the Makefile say which."""
        self.assertEqual(['31', '32', '33'], [
            release.partition('.')[0] for release in ci.other_releases()])
