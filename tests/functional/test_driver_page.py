# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The package of docs/source/drivers.rst, as its reader makes it."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import fixtures

from nova_accel.cmd import main
from nova_accel.host import pci
from tests import acme
from tests.functional import base

CARD, OTHER = '0000:3b:00.0', '0000:5e:00.0'


class DriverPageTest(base.AcceleratorTestBase):

    # it ends before the package does
    FRESH_CLOUD = True

    HOSTS = {'compute1': {'others': []}}

    def build(self):
        directory = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        self.source = directory / 'source'
        shutil.copytree(acme.SOURCE, self.source)
        installed = str(directory / 'installed')
        self.run_python('-m', 'pip', 'install', '-q', '--no-deps',
                        '--no-build-isolation', '--disable-pip-version-check',
                        '--target', installed, str(self.source))
        self.useFixture(acme.OnPath(installed))
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
        self.assertEqual({CARD, OTHER}, set(found))
        # the second example, as nova-accel shows it
        region, = json.loads(self.run_python(
            '-m', main.__name__, 'discover', '--driver', 'acme_fpga',
            '--simulated-host', 'host.yaml', '--long', '-f', 'json',
        ))['0000:af:00.0']['regions']
        self.assertEqual(1, len(region['handles']))
        specs = {'resources1:CUSTOM_ACCELERATOR_AI': '1',
                 'trait1:CUSTOM_ACME_FIRMWARE_12': 'required',
                 'accel1:driver_power_limit': '100'}
        server = self.boot(specs)
        self.assertEqual([CARD], self.hostdevs(server))
        self._delete_server(server)
        self.assertEqual([], self.claims())
        kernel = self.kernel('compute1')
        for name, value in ('power_limit', '250'), ('scrubs', '1'):
            self.assertEqual(value, kernel.read(
                pci.path(CARD, f'acme/{name}')))
        # the vendor's operation fails, and no other server gets the card
        kernel.set_fault(CARD, scrub='EIO')
        server = self.boot(specs)
        self._delete_server(server)
        claim, = self.claims()
        self.assertIn('to be scrubbed after its server', claim.error)
