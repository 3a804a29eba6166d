# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The package of docs/source/drivers.rst, installed without pip."""

import configparser
import os
import pathlib
import shutil
import sys

import fixtures
from stevedore import _cache

SOURCE = pathlib.Path(__file__).parent.parent / 'docs/source/acme'
NAME = 'acme_accel'


class OnPath(fixtures.Fixture):
    """A directory where the package is installed is read by this process and
    by those that it starts."""

    def __init__(self, path):
        self.path = path

    def _setUp(self):
        self.useFixture(fixtures.EnvironmentVariable(
            'PYTHONPATH', os.pathsep.join(
                [self.path, str(SOURCE.parents[2])])))
        self.useFixture(fixtures.MonkeyPatch(
            'sys.path', [self.path, *sys.path]))
        # which entry points there are is looked up once in a process
        self.useFixture(fixtures.MonkeyPatch(
            'stevedore._cache._c', _cache.Cache()))
        self.useFixture(fixtures.MonkeyPatch(
            'stevedore.extension.ExtensionManager.ENTRY_POINT_CACHE', {}))
        for name in ('driver', 'privileged', 'simulated'):
            self.addCleanup(sys.modules.pop, f'{NAME}.{name}', None)
        self.addCleanup(sys.modules.pop, NAME, None)


class Installed(fixtures.Fixture):
    """The package is installed while a test runs."""

    def _setUp(self):
        self.path = self.useFixture(fixtures.TempDir()).path
        shutil.copytree(SOURCE / NAME, os.path.join(self.path, NAME))
        parser = configparser.ConfigParser()
        parser.read(SOURCE / 'setup.cfg')
        info = os.path.join(self.path, f'{NAME}-1.0.dist-info')
        os.mkdir(info)
        with open(os.path.join(info, 'METADATA'), 'w') as file:
            file.write(f'Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n')
        with open(os.path.join(info, 'entry_points.txt'), 'w') as file:
            for group, points in parser['options.entry_points'].items():
                file.write(f'[{group}]\n{points}\n')
        self.useFixture(OnPath(self.path))

    def change(self, module, old, new):
        """Change the package before it is imported."""
        path = pathlib.Path(self.path, NAME, f'{module}.py')
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
