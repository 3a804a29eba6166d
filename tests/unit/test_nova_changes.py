# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What docs/source/contributor/nova-changes.rst asks of Nova, on Nova 34."""

import os
import pathlib
import shutil
import subprocess
import sys

import fixtures
import nova
import testtools

from nova_accel.virt import door

ROOT = pathlib.Path(__file__).parents[2]
PATCH = ROOT / 'tests/nova/nova_virt.patch'
#: directories in which the patch changes a file, parents first
CHANGED = '', 'virt', 'tests', 'tests/unit', 'tests/unit/virt'


class NovaVirtTest(testtools.TestCase):
    """nova.virt can be extended by separate packages."""

    def setUp(self):
        super().setUp()
        if not shutil.which('git'):
            self.skipTest('git is not installed, which applies the patch')
        directory = self.useFixture(fixtures.TempDir()).path
        self.patched = pathlib.Path(directory, 'patched')
        self.separate = pathlib.Path(directory, 'separate')
        theirs = pathlib.Path(nova.__file__).parent
        for place in CHANGED:
            here = self.patched / 'nova' / place
            here.mkdir(parents=True)
            for entry in (theirs / place).iterdir():
                if entry.name == '__init__.py':
                    shutil.copy(entry, here)
                elif str(entry.relative_to(theirs)) not in CHANGED:
                    (here / entry.name).symlink_to(entry)
        subprocess.run(['git', 'apply', PATCH], cwd=self.patched, check=True)
        # in place of the door
        (self.separate / 'nova/virt').mkdir(parents=True)
        (self.separate / 'nova/virt/accel').symlink_to(
            pathlib.Path(door.__file__).parent / 'accel')

    def run_python(self, *arguments, first=''):
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True,
            cwd=self.separate, env={
                **os.environ, 'PYTHONDONTWRITEBYTECODE': '1',
                'PYTHONSAFEPATH': '1', 'PYTHONPATH': os.pathsep.join(
                    filter(None, (str(first), *sys.path,
                                  str(self.separate))))})

    def test_its_own_test(self):
        done = self.run_python(
            '-m', 'unittest', 'nova.tests.unit.virt.test_separate_package',
            first=self.patched)
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertIn('Ran 1 test', done.stderr)

    def test_without_the_door(self):
        """The compute driver is found where no os-vif plug-in was loaded."""
        script = ('import importlib.util as util;'
                  'print(util.find_spec("nova.virt.accel").origin)')
        self.assertIn(str(self.separate), self.run_python(
            '-c', script, first=self.patched).stdout)
        # what the patch is for
        self.assertIn("'NoneType' object has no attribute 'origin'",
                      self.run_python('-c', script).stderr)
