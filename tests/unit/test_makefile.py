# Licensed under the Apache License, Version 2.0. See LICENSE.
"""With which Python make sets up, and runs, the tests."""

import os
import pathlib
import subprocess

import fixtures
import testtools

ROOT = pathlib.Path(__file__).parents[2]


class PythonTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.bin = pathlib.Path(self.useFixture(fixtures.TempDir()).path)

    def program(self, name, script):
        path = self.bin / name
        path.write_text(f'#!/bin/sh\n{script}\n')
        path.chmod(0o755)
        return path

    def would(self, *arguments, **variables):
        """The commands that make would run."""
        return subprocess.run(
            ['make', '-n', *arguments], cwd=ROOT, text=True, check=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={
                'PATH': f'{self.bin}:{os.environ["PATH"]}', **variables},
        ).stdout

    def set_up(self, **variables):
        venv = self.bin / 'venv'
        return self.would(f'VENV={venv}', f'{venv}/stamp', **variables)

    def test_build_of_the_distribution(self):
        build = self.program('python3.99', 'exit 0')
        self.program('python3', f'echo {build}')
        self.assertIn(f'{build} -m venv ', self.set_up())
        self.program('python3.99', 'exit 1')
        self.assertIn('|| python3 -m venv ', self.set_up())
        build.unlink()
        self.assertIn('|| python3 -m venv ', self.set_up())

    def test_that_of_the_environment(self):
        self.assertIn('|| chosen -m venv ', self.set_up(PYTHON='chosen'))

    def test_tests_have_that_of_their_packages(self):
        """stestr takes PYTHON of the environment, where make puts what its
        command line has."""
        for tier in 'unit', 'functional-part':
            self.assertIn('PYTHON=.venv/bin/python .venv/bin/stestr',
                          self.would(tier, 'PYTHON=/usr/bin/python3.11'))
