# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The package of docs/source/drivers.rst, as its reader makes it."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import fixtures
from stevedore import _cache

from nova_accel.cmd import main
from tests.functional import base

ACME = pathlib.Path(__file__).parent.parent.parent / 'docs/source/acme'


class DriverPageTest(base.AcceleratorTestBase):

    # it ends before the package does
    FRESH_CLOUD = True

    HOSTS = {'compute1': {'others': []}}

    def build(self):
        directory = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        self.source = directory / 'source'
        shutil.copytree(ACME, self.source)
        installed = str(directory / 'installed')
        self.run_python('-m', 'pip', 'install', '-q', '--no-deps',
                        '--no-build-isolation', '--disable-pip-version-check',
                        '--target', installed, str(self.source))
        self.useFixture(fixtures.EnvironmentVariable(
            'PYTHONPATH', os.pathsep.join([installed, str(ACME.parents[2])])))
        self.useFixture(fixtures.MonkeyPatch(
            'sys.path', [installed, *sys.path]))
        # which drivers there are is looked up once in a process
        self.useFixture(fixtures.MonkeyPatch(
            'stevedore._cache._c', _cache.Cache()))
        self.useFixture(fixtures.MonkeyPatch(
            'stevedore.extension.ExtensionManager.ENTRY_POINT_CACHE', {}))
        self.addCleanup(sys.modules.pop, 'acme_accel.driver', None)
        self.addCleanup(sys.modules.pop, 'acme_accel', None)
        super().build()

    def run_python(self, *args):
        done = subprocess.run([sys.executable, *args], cwd=self.source,
                              capture_output=True, text=True)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_drivers=['acme'], group='accel')
        shutil.copy(self.source / 'host.yaml',
                    os.path.join(self.hosts, f'{hostname}.yaml'))
        return super().start_compute(hostname, *args, **kwargs)

    def test_its_tests_and_a_server(self):
        self.run_python('test_driver.py')
        found = json.loads(self.run_python(
            '-m', main.__name__, 'discover', '--driver', 'acme',
            '--simulated-host', 'host.yaml', '--long', '-f', 'json'))
        self.assertEqual({'0000:3b:00.0', '0000:5e:00.0'}, set(found))
        specs = {'resources1:CUSTOM_ACCELERATOR_AI': '1',
                 'trait1:CUSTOM_ACME_FIRMWARE_7': 'required'}
        servers = [self.boot(specs), self.boot(specs)]
        self.assertEqual(
            [['0000:5e:00.1'], ['0000:5e:00.2']],
            sorted(self.hostdevs(server) for server in servers))
        for server in servers:
            self._delete_server(server)
        self.assertEqual([], self.claims())
