# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel discover, as an operator starts it."""

import contextlib
import io
import json
import logging
import os
import pathlib
import subprocess
import sys

import fixtures
import testtools

from nova_accel.cmd import main
from nova_accel import conf
from nova_accel.drivers import dfl
from tests.unit.host import A, B, FUNCTION, plain, SimulatedHost


class Discover(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.host = self.useFixture(SimulatedHost(
            {'address': A, 'functions': [FUNCTION]},
            {'address': B, 'ports': 2, 'vfs': 2}))
        self.config = os.path.join(self.host.directory, 'nova.conf')
        self.configure(simulated_host=self.host.path, enabled_drivers='dfl')

    def configure(self, **accel):
        with open(self.config, 'w') as file:
            file.write('[DEFAULT]\nhost = compute1\n[accel]\n')
            for name, value in accel.items():
                file.write(f'{name} = {value}\n')

    def start(self, *arguments):
        """The command as an operator starts it."""
        return subprocess.run(
            [sys.executable, '-W', 'ignore', '-m', 'nova_accel.cmd.main',
             'discover', '--config-file', self.config, *arguments],
            capture_output=True, text=True, timeout=600)

    def discover(self, *arguments):
        """The same in this process, which is a second quicker."""
        log = logging.getLogger()
        handlers, level = log.handlers[:], log.level
        with (contextlib.redirect_stdout(io.StringIO()) as stdout,
              contextlib.redirect_stderr(io.StringIO()) as stderr):
            try:
                status = main.main(
                    ['discover', '--config-file', self.config, *arguments])
            finally:
                log.handlers[:], log.level = handlers, level
                conf.CONF.reset()
        return subprocess.CompletedProcess(
            arguments, status, stdout.getvalue(), stderr.getvalue())

    def test_json(self):
        result = self.start('-f', 'json')
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        found = dfl.DflDriver(self.host.kernel).discover()
        self.assertEqual({a: d.as_dict() for a, d in found.items()},
                         json.loads(result.stdout))

    def test_table(self):
        result = self.discover()
        self.assertEqual(0, result.returncode)
        for text in (f'compute1_accel_{A} ', f'compute1_accel_{A}_region0 ',
                     f'compute1_accel_{B}_region1 ',
                     'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_PROGRAMMABLE',
                     'CUSTOM_FPGA_INTEL_PAC_ARRIA10',
                     'CUSTOM_FPGA_FUNCTION_11111111_2222_4333_8444'):
            self.assertIn(text, result.stdout)

    def test_card_that_no_guest_gets(self):
        """What is to be done is in the table, and is said once."""
        result = self.discover('-f', 'csv', '-c', 'Provider', '-c', 'Reserved',
                               '-c', 'Health')
        line, = [line for line in result.stdout.splitlines()
                 if f'{A}_region0' in line]
        self.assertIn(',1,"quarantined, it has no VFs', line)
        self.assertIn(f'[accel] virtual_functions = {A}=', line)
        self.assertEqual('', result.stderr)

    def test_values(self):
        self.host.kernel.set_fault(A, dead=True)
        result = self.discover('-f', 'value', '-c', 'Provider', '-c', 'Total',
                               '-c', 'Reserved')
        self.assertEqual([f'compute1_accel_{A}',
                          f'compute1_accel_{B}',
                          f'compute1_accel_{B}_region0 1 0',
                          f'compute1_accel_{B}_region1 1 0'],
                         [line.strip() for line in
                          result.stdout.splitlines()])

    def test_options_override_the_configuration(self):
        self.configure(simulated_host='/nonexistent', enabled_drivers='none')
        result = self.discover('-f', 'json', '--driver', 'dfl',
                               '--simulated-host', self.host.path)
        self.assertEqual([A, B], sorted(json.loads(result.stdout)))
        self.assertEqual(0, result.returncode)

    def test_directory_of_hosts(self):
        os.rename(self.host.path,
                  os.path.join(self.host.directory, 'compute1.yaml'))
        self.configure(simulated_host=self.host.directory,
                       enabled_drivers='dfl')
        self.assertEqual([A, B], sorted(json.loads(
            self.discover('-f', 'json').stdout)))

    def test_failing_driver_costs_only_itself(self):
        result = self.discover('-f', 'json', '--driver', 'absent',
                               '--driver', 'dfl')
        self.assertEqual(1, result.returncode)
        self.assertEqual([A, B], sorted(json.loads(result.stdout)))
        line, = result.stderr.splitlines()
        self.assertIn("'absent'", line)
        self.assertIn('installed are dfl', line)

    def test_driver_that_is_installed_twice(self):
        twin = pathlib.Path(self.host.directory, 'twin-1.dist-info')
        twin.mkdir()
        (twin / 'METADATA').write_text('Name: twin\nVersion: 1\n')
        (twin / 'entry_points.txt').write_text(
            '[nova_accel.drivers]\ndfl = twin.dfl:Driver\n')
        (twin.parent / 'twin').mkdir()
        (twin.parent / 'twin/dfl.py').write_text('Driver = id\n')
        self.useFixture(fixtures.EnvironmentVariable(
            'PYTHONPATH', self.host.directory))
        result = self.start()
        self.assertEqual(1, result.returncode)
        line, = result.stderr.splitlines()
        self.assertIn("The driver 'dfl'", line)
        for place in ('twin.dfl:Driver', 'nova_accel.drivers.dfl:DflDriver'):
            self.assertIn(place, line)

    def test_configurations_that_cannot_be(self):
        for accel, said in (
                ({}, 'No driver is enabled'),
                ({'enabled_drivers': 'dfl', 'simulated_host': '/nope'},
                 '/nope cannot be read')):
            self.configure(**accel)
            result = self.discover()
            self.assertEqual(1, result.returncode)
            self.assertIn(said, result.stderr)
        os.unlink(self.config)
        result = self.discover()
        self.assertEqual(1, result.returncode)
        self.assertIn('--config-file', result.stderr)

    def test_function_is_shown_after_programming(self):
        driver = dfl.DflDriver(self.host.kernel)
        device = driver.discover()[B]
        driver.program(device, device.region(1), driver.read_bitstream(
            self.host.gbs(FUNCTION), 'image 1'))
        found = json.loads(self.discover('-f', 'json').stdout)
        self.assertEqual(plain(FUNCTION),
                         found[B]['regions'][1]['function-uuid'])
