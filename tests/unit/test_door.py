# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The door by which nova-compute finds its driver, and for which Nova it is.

tests/layouts start nova-compute through it.
"""

import configparser
import importlib.metadata
import logging
import os
import pathlib
import re
import sys

import fixtures
from nova import virt
import os_vif
import testtools

from nova_accel.cmd import check_nova
from nova_accel import versions
from nova_accel.virt import door

ROOT = pathlib.Path(__file__).parents[2]


class DoorTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.__path__', [os.path.dirname(virt.__file__)]))

    def test_it_is_the_last_place_and_has_one_name(self):
        before = list(virt.__path__)
        door.open_door()
        door.open_door()
        *others, directory = virt.__path__
        self.assertEqual(before, others)
        self.assertEqual({'__init__.py', 'accel'},
                         set(os.listdir(directory)) - {'__pycache__'})

    def test_plugin_of_os_vif(self):
        """It is one of os-vif's, and says that it has no VIF."""
        self.useFixture(fixtures.MonkeyPatch('os_vif._EXT_MANAGER', None))
        os_vif.initialize()
        loaded = door.Plugin.load('nova_accel')
        self.assertEqual([], loaded.describe().vif_info)
        self.assertIn(os.path.dirname(door.__file__), virt.__path__)

    def test_it_never_raises(self):
        """Else nova-compute would not start, also without our driver."""
        said = self.useFixture(fixtures.FakeLogger(level=logging.ERROR))
        self.useFixture(fixtures.MonkeyPatch('nova.virt.__path__', ('odd',)))
        self.assertIsInstance(door.Plugin.load('nova_accel'), door.Plugin)
        self.assertIn('install', said.output)
        self.assertNotIn('Traceback', said.output)


class VersionsTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        setup = configparser.ConfigParser()
        setup.read(ROOT / 'setup.cfg')
        self.requirements = setup['options']['install_requires'].split()
        self.of_tests = setup['options.extras_require']['test'].split()

    def test_pip_is_told_the_same(self):
        self.assertIn(
            f'nova>={versions.OLDEST},<{versions.NEWEST + 1}',
            self.requirements)

    def test_lower_bounds(self):
        """They are the libraries with which ``make floor`` has."""
        floor = dict(line.lower().replace('_', '-').split('==') for line in (
            ROOT / 'constraints-nova31.txt').read_text().split())
        bounds = dict(line.lower().split('>=') for line in self.requirements
                      if '>=' in line and not line.startswith('nova'))
        self.assertIn('os-vif', bounds)
        for name, bound in bounds.items():
            self.assertTrue(
                f'{floor[name]}.'.startswith(f'{bound}.'),
                f'{name} is {floor[name]} there, and setup.cfg has {bound}')

    def test_libraries_of_each_release(self):
        """``make floor`` has those of each release but the newest, which are
        in constraints.txt; none is older than setup.cfg promises."""
        bounds = dict(line.lower().split('>=') for line in self.requirements
                      if '>=' in line and not line.startswith('nova'))
        for release in range(versions.OLDEST, versions.NEWEST):
            path = ROOT / f'constraints-nova{release}.txt'
            found = dict(line.lower().replace('_', '-').split('==')
                         for line in path.read_text().split())
            self.assertNotIn('nova', found)
            for name, bound in bounds.items():
                self.assertGreaterEqual(
                    [int(n) for n in found[name].split('.')],
                    [int(n) for n in bound.split('.')],
                    f'{name} in {path.name}')

    def test_libraries_of_tests(self):
        """``make`` installs what such a file names, and resolves nothing."""
        for path in (ROOT / 'constraints.txt',
                     *ROOT.glob('constraints-nova*.txt')):
            named = path.read_text().lower().replace('_', '-')
            for line in self.of_tests:
                self.assertIn(f"\n{re.match('[a-z0-9-]+', line.lower())[0]}==",
                              named, path.name)

    def test_sentences(self):
        found = importlib.metadata.version('nova')
        self.assertEqual(('', ''), (versions.too_old(), versions.too_new()))
        with fixtures.MonkeyPatch('nova_accel.versions.OLDEST', 999):
            self.assertRegex(
                versions.too_old(), fr'Nova 999 to \d+, and this is Nova '
                f'{re.escape(found)}: upgrade Nova, .*[.]$')
        with fixtures.MonkeyPatch('nova_accel.versions.NEWEST', 30):
            self.assertIn(f'this is Nova {found}: install',
                          versions.too_new())

    def test_driver_beside_another_nova(self):
        """It is not imported beside a Nova that is too old, and says so."""
        path = os.path.join(os.path.dirname(door.__file__), 'accel',
                            '__init__.py')
        code = compile(pathlib.Path(path).read_text(), path, 'exec')
        with fixtures.MonkeyPatch('nova_accel.versions.OLDEST', 999):
            error = self.assertRaises(ImportError, exec, code, {})
        self.assertIn('works with Nova 999', str(error))
        said = self.useFixture(fixtures.FakeLogger(level=logging.WARNING))
        with fixtures.MonkeyPatch('nova_accel.versions.NEWEST', 30):
            exec(code, {'__name__': 'nova.virt.accel'})
        self.assertIn('works with Nova 31 to 30', said.output)


class PythonOfTest(testtools.TestCase):

    def test_first_line(self):
        path = self.useFixture(fixtures.TempDir()).join('nova-compute')
        for first, python in (
                ('#!/usr/bin/python3', '/usr/bin/python3'),
                ('#! /usr/bin/python3 -s', '/usr/bin/python3'),
                # of pip, where a path is long
                ('#!/bin/sh', sys.executable), ('', sys.executable),
                ('\udcff', sys.executable)):
            with open(path, 'w', errors='surrogateescape') as file:
                file.write(f'{first}\n')
            self.assertEqual(python, check_nova.python_of(path))
        self.assertEqual(sys.executable, check_nova.python_of('/nonexistent'))
