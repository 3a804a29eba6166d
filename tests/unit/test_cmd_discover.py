# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel discover, as an operator starts it."""

import csv
import dataclasses
import io
import json
import os
import pathlib
import sys
import uuid

import ddt
import fixtures
from oslo_config import fixture as config_fixture
from testtools import matchers

from nova_accel import conf
from nova_accel.drivers import dfl
from nova_accel import model
from nova_accel.store import values
from tests import acme
from tests.unit import commands
from tests.unit.host import A, B, FIRST, FUNCTION, plain, SimulatedHost
from tests.unit.claims import claim, DISABLED, handle


class Discover(commands.StoreCommandTestCase):

    COMMAND = 'discover'

    def setUp(self):
        super().setUp()
        self.host = self.useFixture(SimulatedHost(
            {'address': A, 'functions': [FUNCTION]},
            {'address': B, 'ports': 2, 'vfs': 2}))
        self.configure(simulated_host=self.host.path, enabled_drivers='dfl')
        # a host that nova-compute has settled
        self.open_store().settle(done=[values.EVERYTHING])

    def test_short(self):
        result = self.start('-f', 'json')
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        rows = json.loads(result.stdout)
        self.assertEqual([A, f'{A}_region0', B, f'{B}_region0',
                          f'{B}_region1'], [row['Device'] for row in rows])
        self.assertEqual(
            {'Device': B, 'What': 'FPGA INTEL PAC_ARRIA10', 'Function': None,
             'Total': None, 'Used': None, 'Held by': None,
             'Health': 'ok'}, rows[2])
        self.assertEqual(
            {'Device': f'{A}_region0', 'What': None, 'Function': FUNCTION,
             'Total': 1, 'Used': 0, 'Held by': [], 'Health': 'unusable'},
            rows[1])

    def held(self, *arguments):
        """Device -> (function, used, held by)."""
        return {row['Device']: (row['Function'], row['Used'], row['Held by'])
                for row in self.rows(*arguments)}

    def test_what_is_programmed_and_held(self):
        self.store.set_loaded(B, 1, model.Loaded(
            plain(FIRST), None, 'nlb\x1b[2J', '', 'a project'))
        self.store.add([
            claim('s1', handle(1), device_address=B, region_index=0,
                  state=model.ClaimState.BOUND),
            claim('s2', handle(2), device_address=B, region_index=1,
                  state=model.ClaimState.DELETING, consumer_uuid='migration',
                  error='It is dirty.')])
        # an option in place of the configuration does not lose the store
        for arguments in ((), ('--driver', 'dfl')):
            found = self.held(*arguments)
            self.assertEqual((str(uuid.UUID(FIRST)), 1, ['s1']),
                             found[f'{B}_region0'])
            self.assertEqual(('nlb?[2J', 1, ['s2 (Deleting, old)']),
                             found[f'{B}_region1'])
        self.assertIn('It is dirty.', {
            row['Device']: row['Health'] for row in self.rows()
        }[f'{B}_region1'])

    def test_store_that_cannot_be_read(self):
        """Nobody is said to have nothing."""
        result = self.call('-f', 'json', '--store', '/nonexistent')
        self.assertEqual(0, result.returncode)
        self.assertEqual([None] * 5, [
            row['Used'] for row in json.loads(result.stdout)])
        line, = result.stderr.splitlines()
        self.assertIn('which servers hold devices is not known', line)
        # that of this host says nothing of another one
        self.assertEqual([None] * 5, [used for _, used, _ in self.held(
            '--simulated-host', self.host.path).values()])

    def test_before_the_first_start(self):
        self.configure(simulated_host=self.host.path, enabled_drivers='dfl')
        with open(self.config, 'a') as file:
            file.write('[DEFAULT]\nhost = compute7\n')
        result = self.call('-f', 'json')
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        self.assertEqual([None] * 5, [
            row['Used'] for row in json.loads(result.stdout)])

    def test_vanished_card(self):
        devices = dfl.DflDriver(self.host.kernel).discover()
        self.store.set_devices({
            **devices, 'gpu': dataclasses.replace(
                devices[B], address='gpu', driver='gpu')})
        self.store.add([claim('s1', handle(1), device_address=B,
                              region_index=0, state=model.ClaimState.BOUND)])
        self.host.kernel.set_fault(B, vanish=True)
        gone = self.rows()[-1]
        self.assertEqual(
            (B, 'FPGA INTEL PAC_ARRIA10', 1, ['s1'],
             'gone: its driver does not find it any more'),
            tuple(gone[n] for n in ('Device', 'What', 'Used', 'Held by',
                                    'Health')))

    def test_card_that_a_guest_has(self):
        """It is as nova-compute saw it before; one that no server holds is not
        known, and may be a guest's all the same."""
        self.configure(simulated_host=self.host.path, enabled_drivers='dfl',
                       whole_cards=A)
        self.useFixture(config_fixture.Config(conf.CONF)).config(
            group='accel', whole_cards=[A])
        self.store.set_devices(dfl.DflDriver(self.host.kernel).discover())
        self.host.kernel.guest_takes(A)
        unknown, = (row for row in self.rows() if row['Device'] == A)
        self.assertEqual(
            'unusable: it is bound to vfio-pci, and its regions were '
            'never seen: if no guest has it, bind it to dfl-pci',
            unknown['Health'])
        self.store.add([claim('s1', model.AttachHandle(
            model.HandleType.PCI, A), device_address=A, region_index=0,
            state=model.ClaimState.BOUND)])
        card, region = (row for row in self.rows()
                        if row['Device'].startswith(A))
        self.assertEqual('ok', card['Health'])
        self.assertEqual((FUNCTION, 1, ['s1'], 'ok'), tuple(
            region[n] for n in ('Function', 'Used', 'Held by', 'Health')))

    def test_fits_a_screen(self):
        """A vGPU card is a line; reasons are wrapped."""
        host = self.useFixture(SimulatedHost(
            {'address': A}, vgpus=[{
                'address': '0000:41:00.0', 'framework': 'mdev', 'units': 48,
                'types': [{'id': 'nvidia-557', 'name': 'NVIDIA A40-1Q',
                           'units': 1}]}]))
        self.configure(simulated_host=host.path, enabled_drivers='dfl,vgpu')
        lines = self.call().stdout.splitlines()
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertEqual(1, len([s for s in lines if 'VGPU' in s]))
        self.assertLess(len(lines), 16)
        self.assertIn('| 0 of 48 |', '\n'.join(lines))

    def test_no_driver(self):
        """What each would find, and the lines that offer it; a rule for the
        GPU does not hide the FPGA."""
        gpu = '0000:3b:00.0'
        host = self.useFixture(SimulatedHost(
            {'address': B, 'vfs': 1}, gpus=[{
                'address': gpu, 'device': '26b9'}]))
        self.configure(simulated_host=host.path)
        result = self.call('-f', 'json')
        self.assertEqual(0, result.returncode)
        self.assertEqual(
            'No driver is enabled. To offer these devices, write into '
            'nova.conf:\n[accel]\nenabled_drivers = dfl,gpu\n'
            'include_devices = vendor=10de product=26b9\n', result.stderr)
        before = {row['Device']: row['Health'] for row in json.loads(
            result.stdout)}
        self.assertIn('add address=', before[gpu])
        with open(self.config, 'a') as file:
            file.writelines(result.stderr.splitlines(True)[2:])
        after = {row['Device']: row['Health'] for row in self.rows()}
        self.assertEqual({**before, gpu: 'ok'}, after)

    def test_no_device(self):
        host = self.useFixture(SimulatedHost())
        self.configure(simulated_host=host.path, enabled_drivers='dfl')
        self.assertEqual(
            'No device is found by the drivers dfl: enable the driver of your '
            'card, or pci with a rule of [accel] pci_devices.\n',
            self.call().stdout)
        for more in (), ('--long',), ('--long', '-f', 'json'):
            self.assertEqual(4, self.call(
                '--driver', 'dfl', *more).returncode)
        self.assertEqual([], self.rows())

    def test_json(self):
        result = self.start('--long', '-f', 'json')
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        found = dfl.DflDriver(self.host.kernel).discover()
        shown = json.loads(result.stdout)
        self.assertEqual({A: ['unusable'], B: []}, {
            address: [hold['kind'] for hold in device.pop('holds')]
            for address, device in shown.items()})
        self.assertEqual({a: d.as_dict() for a, d in found.items()}, shown)

    def test_table(self):
        result = self.call('--long')
        self.assertEqual(0, result.returncode)
        for text in (f'compute1_accel_{A} ', f'compute1_accel_{A}_region0 ',
                     f'compute1_accel_{B}_region1 ',
                     'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_PROGRAMMABLE',
                     'CUSTOM_FPGA_INTEL_PAC_ARRIA10',
                     'CUSTOM_FPGA_FUNCTION_11111111_2222_4333_8444'):
            self.assertIn(text, result.stdout)

    def test_card_that_no_guest_gets(self):
        """What is to be done is in the table, and is said once."""
        result = self.call('--long', '-f', 'csv', '-c', 'Provider',
                           '-c', 'Reserved', '-c', 'Health')
        line, = [line for line in result.stdout.splitlines()
                 if f'{A}_region0' in line]
        self.assertIn(',1,"unusable: it has no VFs', line)
        self.assertIn(f'[accel] virtual_functions = {A}=', line)
        self.assertEqual('', result.stderr)

    def test_disabled(self):
        """What the operator has said, with his reason; nothing is written."""
        store = self.open_store()
        found = dfl.DflDriver(self.host.kernel).discover()
        store.set_devices({B: dataclasses.replace(found[B], serial='S1')})
        # by its serial number, as it had another address then
        store.disable(dataclasses.replace(DISABLED, serial='S1'))
        before = os.stat(store.path).st_mtime_ns
        self.assertEqual(
            [('1', 'disabled since 2026-11-22T02:17:43+00:00: the operator '
                   'has disabled it (it is hot)')] * 2,
            [(row['Reserved'], row['Health'])
             for row in csv.DictReader(io.StringIO(
                 self.call('--long', '-f', 'csv').stdout))
             if f'{B}_region' in row['Provider']])
        device = json.loads(
            self.call('--long', '-f', 'json').stdout)[B]
        hold, = device['holds']
        self.assertEqual(
            ('disabled', 'the operator has disabled it (it is hot)',
             '2026-11-22T02:17:43+00:00', 'nova-accel enable'),
            tuple(hold[name] for name in (
                'kind', 'reason', 'since', 'lifted-by')))
        self.assertEqual(before, os.stat(store.path).st_mtime_ns)

    def test_nothing_is_written(self):
        """As root looks at the host that nova-compute will simulate."""
        for name in (f'{self.host.path}.state', f'{self.host.path}.state.lock'):
            os.unlink(name)
        before = sorted(os.listdir(self.host.directory))
        self.assertEqual([A, B], sorted(json.loads(
            self.call('--long', '-f', 'json').stdout)))
        self.assertEqual(before, sorted(os.listdir(self.host.directory)))

    def test_values(self):
        self.host.kernel.set_fault(A, dead=True)
        result = self.call('--long', '-f', 'value', '-c', 'Provider',
                           '-c', 'Total', '-c', 'Reserved')
        self.assertEqual([f'compute1_accel_{A}',
                          f'compute1_accel_{B}',
                          f'compute1_accel_{B}_region0 1 0',
                          f'compute1_accel_{B}_region1 1 0'],
                         [line.strip() for line in
                          result.stdout.splitlines()])

    def test_options_override_the_configuration(self):
        self.configure(simulated_host='/nonexistent', enabled_drivers='none')
        result = self.call('--long', '-f', 'json', '--driver', 'dfl',
                           '--simulated-host', self.host.path)
        self.assertEqual([A, B], sorted(json.loads(result.stdout)))
        self.assertEqual(0, result.returncode)

    def test_directory_of_hosts(self):
        os.rename(self.host.path,
                  os.path.join(self.host.directory, 'compute1.yaml'))
        self.configure(simulated_host=self.host.directory,
                       enabled_drivers='dfl')
        self.assertEqual([A, B], sorted(json.loads(
            self.call('--long', '-f', 'json').stdout)))

    def test_failing_driver_costs_only_itself(self):
        result = self.call('--long', '-f', 'json', '--driver', 'absent',
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
        self.configure(enabled_drivers='dfl', simulated_host='/nope')
        result = self.call()
        self.assertEqual(1, result.returncode)
        self.assertIn('/nope cannot be read', result.stderr)
        os.unlink(self.config)
        for self.config in self.config, self.directory:
            result = self.call()
            self.assertEqual(1, result.returncode)
            self.assertIn('--config-file', result.stderr)

    def test_function_is_shown_after_programming(self):
        driver = dfl.DflDriver(self.host.kernel)
        device = driver.discover()[B]
        driver.program(device, device.region(1), driver.read_bitstream(
            self.host.gbs(FUNCTION), 'image 1'))
        found = json.loads(
            self.call('--long', '-f', 'json').stdout)
        self.assertEqual(plain(FUNCTION),
                         found[B]['regions'][1]['function-uuid'])


@ddt.ddt
class AuthorTest(commands.StoreCommandTestCase):
    """What the author of a driver of another package reads."""

    COMMAND = 'discover'

    def setUp(self):
        super().setUp()
        self.package = self.useFixture(acme.Installed())
        self.host = self.useFixture(SimulatedHost(acmes=[{'address': A}]))
        self.configure(simulated_host=self.host.path, enabled_drivers='acme')

    def health(self, *arguments):
        result = self.call('-f', 'csv', *arguments)
        row, = csv.DictReader(io.StringIO(result.stdout))
        return row['Health'], result.stderr

    def debug(self):
        return self.main('--debug', 'discover', '--config-file', self.config)

    def fail_with_key_error(self):
        self.package.change('driver', '        firmware = self.kernel.read(',
                            """        {}['power']
        firmware = self.kernel.read(""")

    def test_exception(self):
        self.fail_with_key_error()
        result = self.call('-f', 'json')
        self.assertIn(f"{A}: its scan failed: KeyError: 'power'",
                      result.stderr)
        self.assertNotIn('Traceback', result.stderr)

    def test_exception_with_debug(self):
        self.fail_with_key_error()
        errors = self.debug().stderr
        self.assertIn('Traceback', errors)
        self.assertIn("{}['power']", errors)

    def test_value(self):
        self.package.change('driver', "re.fullmatch('[0-9]+', firmware)",
                            "int('many')")
        self.assertIn("sysfs cannot be read (ValueError: invalid literal",
                      self.health()[0])

    def test_driver_that_cannot_be_imported(self):
        self.package.change('driver', 'import re\n', 'import re\n{}[0]\n')
        self.assertNotIn('Traceback', self.call().stderr)
        for name in 'driver', 'privileged', 'simulated':
            sys.modules.pop(f'{acme.NAME}.{name}', None)
        errors = self.debug().stderr
        self.assertIn('Traceback', errors)
        self.assertIn('acme_accel/driver.py', errors)

    @ddt.data(('CUSTOM_ACME_FIRMWARE_{firmware}', 'firmware-{firmware}'),
              ("type='AI'", "type='AI' * 200"))
    @ddt.unpack
    def test_name_that_placement_refuses(self, old, new):
        """It is not ok, in all forms of the command."""
        self.package.change('driver', old, new)
        health, _ = self.health()
        self.assertThat(health, matchers.StartsWith('not reported: '))
        self.assertEqual(health, self.health('--long')[0])
        self.assertNotIn('{', health)
