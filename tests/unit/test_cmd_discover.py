# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel discover, as an operator starts it."""

import json
import os
import pathlib

import fixtures

from nova_accel.drivers import dfl
from tests.unit import commands
from tests.unit.host import A, B, FUNCTION, plain, SimulatedHost


class Discover(commands.CommandTestCase):

    COMMAND = 'discover'

    def setUp(self):
        super().setUp()
        self.host = self.useFixture(SimulatedHost(
            {'address': A, 'functions': [FUNCTION]},
            {'address': B, 'ports': 2, 'vfs': 2}))
        self.configure(simulated_host=self.host.path, enabled_drivers='dfl')

    def test_json(self):
        result = self.start('-f', 'json')
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        found = dfl.DflDriver(self.host.kernel).discover()
        self.assertEqual({a: d.as_dict() for a, d in found.items()},
                         json.loads(result.stdout))

    def test_table(self):
        result = self.call()
        self.assertEqual(0, result.returncode)
        for text in (f'compute1_accel_{A} ', f'compute1_accel_{A}_region0 ',
                     f'compute1_accel_{B}_region1 ',
                     'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_PROGRAMMABLE',
                     'CUSTOM_FPGA_INTEL_PAC_ARRIA10',
                     'CUSTOM_FPGA_FUNCTION_11111111_2222_4333_8444'):
            self.assertIn(text, result.stdout)

    def test_card_that_no_guest_gets(self):
        """What is to be done is in the table, and is said once."""
        result = self.call('-f', 'csv', '-c', 'Provider', '-c', 'Reserved',
                           '-c', 'Health')
        line, = [line for line in result.stdout.splitlines()
                 if f'{A}_region0' in line]
        self.assertIn(',1,"quarantined, it has no VFs', line)
        self.assertIn(f'[accel] virtual_functions = {A}=', line)
        self.assertEqual('', result.stderr)

    def test_nothing_is_written(self):
        """As root looks at the host that nova-compute will simulate."""
        for name in (f'{self.host.path}.state', f'{self.host.path}.state.lock'):
            os.unlink(name)
        before = sorted(os.listdir(self.host.directory))
        self.assertEqual([A, B], sorted(json.loads(
            self.call('-f', 'json').stdout)))
        self.assertEqual(before, sorted(os.listdir(self.host.directory)))

    def test_values(self):
        self.host.kernel.set_fault(A, dead=True)
        result = self.call('-f', 'value', '-c', 'Provider', '-c', 'Total',
                           '-c', 'Reserved')
        self.assertEqual([f'compute1_accel_{A}',
                          f'compute1_accel_{B}',
                          f'compute1_accel_{B}_region0 1 0',
                          f'compute1_accel_{B}_region1 1 0'],
                         [line.strip() for line in
                          result.stdout.splitlines()])

    def test_options_override_the_configuration(self):
        self.configure(simulated_host='/nonexistent', enabled_drivers='none')
        result = self.call('-f', 'json', '--driver', 'dfl',
                           '--simulated-host', self.host.path)
        self.assertEqual([A, B], sorted(json.loads(result.stdout)))
        self.assertEqual(0, result.returncode)

    def test_directory_of_hosts(self):
        os.rename(self.host.path,
                  os.path.join(self.host.directory, 'compute1.yaml'))
        self.configure(simulated_host=self.host.directory,
                       enabled_drivers='dfl')
        self.assertEqual([A, B], sorted(json.loads(
            self.call('-f', 'json').stdout)))

    def test_failing_driver_costs_only_itself(self):
        result = self.call('-f', 'json', '--driver', 'absent',
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
            result = self.call()
            self.assertEqual(1, result.returncode)
            self.assertIn(said, result.stderr)
        os.unlink(self.config)
        result = self.call()
        self.assertEqual(1, result.returncode)
        self.assertIn('--config-file', result.stderr)

    def test_function_is_shown_after_programming(self):
        driver = dfl.DflDriver(self.host.kernel)
        device = driver.discover()[B]
        driver.program(device, device.region(1), driver.read_bitstream(
            self.host.gbs(FUNCTION), 'image 1'))
        found = json.loads(self.call('-f', 'json').stdout)
        self.assertEqual(plain(FUNCTION),
                         found[B]['regions'][1]['function-uuid'])
