# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nobody forges a line of our log."""

import logging
import os
import re
import types

import fixtures
import testtools

import nova_accel
from nova_accel import log
from nova_accel.virt import expanders

FORGED = 'pc\n2026-01-01 00:00:00.0 1 INFO nova_accel Device 0 is clean'


class LogTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.output = self.useFixture(fixtures.FakeLogger(
            level=logging.DEBUG))
        self.log = log.getLogger('nova_accel.tests')

    def assertLines(self, *lines):
        self.assertEqual([*lines], self.output.output.splitlines())

    def test_values(self):
        self.log.warning('%s, %r and %d of %s', FORGED, FORGED, 3,
                         ValueError('a\rb'))
        self.log.info('%(image)s', {'image': ['\x1b[2J', FORGED]})
        shown = FORGED.replace('\n', '\\n')
        self.assertLines(
            f"{shown}, '{shown}' and 3 of a\\rb",
            f"['\\x1b[2J', '{shown}']")

    def test_lines_of_ours(self):
        self.log.error('It stands here:%s', log.Lines('\n  a\n  b'))
        self.assertLines('It stands here:', '  a', '  b')

    def test_nothing_is_made_of_what_is_not_written(self):
        class Text:
            def __str__(self):
                raise AssertionError('It is made')
        self.useFixture(fixtures.FakeLogger(level=logging.INFO))
        self.log.debug('%s', Text())
        self.assertLines()

    def test_once(self):
        once = log.Once()
        for text in ('hot', 'hot', 'cold', 'hot'):
            once.log(('card', 1), self.log.warning, 'It is %s', text)
        once.log(('card', 2), self.log.warning, 'It is %s', 'hot')
        self.assertLines('It is hot', 'It is cold', 'It is hot', 'It is hot')
        self.assertTrue(once.has(('card', 1)))
        once.only('card', {2})
        once.only('guest', ())
        self.assertEqual([False, True],
                         [once.has(('card', number)) for number in (1, 2)])
        once.forget('card', 2)
        self.assertFalse(once.has(('card', 2)))

    def test_machine_type_of_an_image(self):
        """hw_machine_type: Nova passes on what its owner wrote."""
        guest = types.SimpleNamespace(
            uuid='a server', os_mach_type=FORGED, devices=[],
            cpu=types.SimpleNamespace(numa=True),
            numatune=types.SimpleNamespace(memnodes=[1]))
        self.assertEqual({}, expanders.add(guest, {'0000:3b:00.0': 0}))
        line, = self.output.output.splitlines()
        self.assertIn('machine type pc\\n2026', line)

    def test_each_module(self):
        """None has a logger of its own, but for the door, which is loaded
        without us."""
        top = os.path.dirname(nova_accel.__file__)
        found = set()
        for directory, _, names in os.walk(top):
            for name in names:
                path = os.path.join(directory, name)
                if name.endswith('.py'):
                    with open(path, encoding='utf-8') as file:
                        if re.search('^(from|import) oslo_log', file.read(),
                                     re.M):
                            found.add(os.path.relpath(path, top))
        self.assertEqual({'log.py'}, found, 'Import nova_accel.log there.')
