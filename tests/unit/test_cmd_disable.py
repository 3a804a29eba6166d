# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel disable, drain and enable, as an operator starts them."""

import contextlib
import dataclasses
import json
import os
import sqlite3
import subprocess
import sys
import textwrap

import fixtures

from nova_accel.cmd import claims
from nova_accel.cmd import disable
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import schema
from nova_accel.store import values
from tests.unit import commands
from tests.unit.claims import claim, DEVICE, handle

A, B, C = DEVICE.address, '0000:81:00.0', '0000:82:00.0'


class DisableTestCase(commands.StoreCommandTestCase):

    COMMANDS = {'disable': disable.Disable, 'drain': disable.Drain,
                'undrain': disable.Undrain, 'enable': disable.Enable}

    def nova_compute(self):
        """It has found three devices, and runs."""
        store = self.open_store()
        self.see(store, {A: 'S1', B: '', C: 'S3'})
        return store

    def see(self, store, serials):
        store.set_devices({
            address: dataclasses.replace(
                DEVICE, address=address, serial=serial, regions=(
                    dataclasses.replace(
                        DEVICE.regions[0],
                        handles=(dataclasses.replace(
                            handle(0), address=f'{address[:-1]}1'),)),))
            for address, serial in serials.items()})

    def say(self, *arguments, status=0):
        self.COMMAND, *arguments = arguments
        result = self.call(*arguments)
        self.assertEqual(status, result.returncode, result.stderr)
        return result.stdout or result.stderr

    def test_reports_of_owners_end(self):
        """Those of the device, wherever it was then, disabled or not."""
        store = self.nova_compute()
        for device, serial in ((A, 'S1'), (C, 'S1'), (B, ''), (C, 'S3')):
            store.add_owner_report(values.OwnerReport(
                0, '2026-11-22T02:17:43+00:00', device, serial, '', '', 'x',
                'memory', ''))
        self.assertIn(f'The reports of owners about {A} are ended',
                      self.say('enable', A))
        self.assertEqual([True, True, False, False], [
            bool(row.ended) for row in store.owner_reports()])
        self.assertNotIn('reports', self.say('enable', A))

    def refused(self, *arguments):
        error = self.say(*arguments, status=1).strip()
        # one sentence
        self.assertRegex(error, r'[^.]\.\Z')
        self.assertNotIn('Traceback', error)
        return error

    def words(self):
        return [(w.device_address, w.serial, w.reason)
                for w in claim_store.ClaimStore(self.path).disabled()]


class DisableTest(DisableTestCase):

    def test_nova_compute_hears(self):
        store = self.nova_compute()
        said = self.say('disable', A, '--reason', 'it is hot')
        self.assertIn(f'{A} is disabled', said)
        self.assertTrue(store.refresh())
        word, = store.disabled()
        self.assertEqual((A, 'S1', 'it is hot'),
                         (word.device_address, word.serial, word.reason))
        self.assertRegex(word.since, r'^20\d\d-\d\d-\d\dT.*\+00:00$')
        self.assertIn(f'{A} is enabled', self.say('enable', A))
        self.assertTrue(store.refresh())
        self.assertEqual((), store.disabled())

    def test_installed(self):
        """As its own process, by the name of the class."""
        self.nova_compute()
        program = textwrap.dedent('''
            import sys
            from nova_accel.cmd import disable, main
            app = main.NovaAccel()
            app.command_manager.add_command('drain', disable.Drain)
            sys.exit(app.run(sys.argv[1:]))
        ''')
        result = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', program, 'drain',
             '--config-file', self.config, B], capture_output=True, text=True,
            timeout=600)
        self.assertEqual((0, f'{B} is disabled, and no server has it\n'),
                         (result.returncode, result.stderr))
        self.assertEqual([(B, '', '')], self.words())

    def test_entry_points(self):
        with open('setup.cfg') as file:
            text = file.read()
        for name in ('disable', 'drain', 'enable'):
            self.assertRegex(text, f'\n    {name} = nova_accel.cmd.disable:'
                                   f'{name.title()}\n')

    def test_names_of_devices(self):
        self.nova_compute()
        for name, word in (
                ('S3', (C, 'S3', '')), (f'compute1_accel_{A}', (A, 'S1', '')),
                (f'compute1.example.org_accel_{B}', (B, '', ''))):
            self.say('disable', name)
            self.assertEqual([word], self.words())
            self.say('enable', name)
            self.assertEqual([], self.words())

    def test_names_that_are_none(self):
        self.nova_compute()
        for name, text in (
                ('0000:5e:00.7', f'name one of {A}, {B}, {C}.'),
                ('', f'name one of {A}'),
                (f'compute1_accel_{A}_region0', f'name {A}.'),
                (f'{A[:-1]}1', f'part of the device {A}'),
                ('compute1_accel_pool_GPU_X_1234abcd', 'is a pool')):
            for command in 'disable', 'drain', 'enable':
                self.assertIn(text, self.refused(command, name))
        self.assertEqual([], self.words())

    def test_a_serial_number_of_two(self):
        self.see(self.open_store(), {A: 'S', B: 'S', C: ''})
        self.assertIn(f'name one of them by its address, {A}, {B}.',
                      self.refused('disable', 'S'))
        self.say('disable', A)
        # it tells nothing when they move
        self.assertEqual([(A, '', '')], self.words())

    def test_again(self):
        """Each reason replaces the one before; when it began stays."""
        self.nova_compute()
        self.say('disable', A, '--reason', 'one')
        first, = claim_store.ClaimStore(self.path).disabled()
        claim_store.ClaimStore(self.path).disable(
            dataclasses.replace(first, since='then'), [first])
        self.say('drain', A)
        self.assertEqual([(A, 'S1', 'one')], self.words())
        self.say('disable', A, '--reason', 'two')
        word, = claim_store.ClaimStore(self.path).disabled()
        self.assertEqual(('two', 'then'), (word.reason, word.since))
        # as lspci prints it
        self.say('enable', A.removeprefix('0000:'))
        self.assertIn('was not disabled', self.say('enable', A))

    def test_while_an_order_is_carried_out(self):
        """enable waits for nothing, and names the command that works on the
        device; orders about other devices do not matter."""
        store = self.nova_compute()
        self.say('disable', A)
        self.say('disable', B)
        for verb, argument in (('clean', A), ('program', f'{A}_region0 nlb0'),
                               ('drill', f'{A} 120')):
            number = store.give_order(verb, argument)
            store.begin_order(number)
            self.assertIn(
                f'nova-accel {verb} {argument.partition(" ")[0]}: wait',
                self.refused('enable', A))
            self.say('enable', B)
            self.say('disable', B)
            store.answer_order(number, values.OrderState.DONE, 'done')
        number = store.give_order('clean', A)
        self.assertIn('is enabled', self.say('enable', A))

    def test_device_that_has_moved(self):
        store = self.nova_compute()
        self.say('disable', A, '--reason', 'one')
        self.see(store, {A: 'S3', C: 'S1'})
        self.assertIn('was not disabled', self.say('enable', A))
        self.say('disable', C, '--reason', 'two')
        self.assertEqual([(C, 'S1', 'two')], self.words())
        self.say('enable', C)
        self.assertEqual([], self.words())

    def test_device_that_was_taken_out(self):
        store = self.nova_compute()
        for name in 'S1', A:
            self.see(store, {A: 'S1', C: 'S3'})
            self.say('disable', A)
            self.see(store, {C: 'S3'})
            self.assertIn(f'{name} is enabled', self.say('enable', name))
            self.assertEqual([], self.words())

    def test_reasons(self):
        self.nova_compute()
        for text in 'two\nlines', 'x' * 201, '\x1b[31mred':
            self.assertIn('--reason', self.refused(
                'disable', A, '--reason', text))
        self.assertEqual([], self.words())
        self.say('disable', A, '--reason', "Grüße; DROP TABLE 'claims'")
        self.assertEqual("Grüße; DROP TABLE 'claims'", self.words()[0][2])


class DrainTest(DisableTestCase):

    def test_left(self):
        store = self.nova_compute()
        there = [
            claim('s1', serial='S1'),
            claim('s2', handle(2), consumer_uuid='migration',
                  state=model.ClaimState.BOUND),
            claim('s3', handle(3), state=model.ClaimState.DELETING,
                  error='It is dirty.'),
            # of the card that was there before
            claim('s4', handle(4), serial='S9'),
            claim('s5', handle(5), device_address=C)]
        store.add(there)
        shown = json.loads(self.say(
            'drain', A, '-f', 'json', status=disable.LEFT))
        self.assertEqual(
            [('s1', 'Initial', None), ('s2', 'Bound, old', None),
             ('s3', 'Deleting', 'It is dirty.')],
            sorted((row['Server'], row['State'], row['Error'])
                   for row in shown))
        self.assertEqual({A}, {row['Device'] for row in shown})
        self.assertEqual([(A, 'S1', '')], self.words())
        store.remove(there[:3])
        self.assertEqual([], json.loads(self.say('drain', A, '-f', 'json')))
        self.assertEqual(f'{A} is disabled, and no server has it\n',
                         self.call(A).stderr)

    def test_unknown_column(self):
        """It is refused before the device is disabled."""
        self.nova_compute()
        self.COMMAND = 'drain'
        self.assertRaises(SystemExit, self.call, A, '-c', 'Nix')
        self.assertEqual([], self.words())

    def test_usage(self):
        """Is neither 0 nor what says that servers are left."""
        self.COMMAND = 'drain'
        try:
            status = self.call().returncode
        except SystemExit as error:
            status = error.code
        self.assertEqual(2, status)


class PlannedTest(DisableTestCase):

    LATER = '2126-12-01T06:00'

    def planned(self):
        return [(row.device_address, row.reason, row.at)
                for row in self.nova_compute().planned()]

    def test_planned(self):
        """It is not disabled; the table has the servers that are informed."""
        store = self.nova_compute()
        store.add([claim('s1', serial='S1')])
        self.COMMAND = 'drain'
        result = self.call(A, '--at', '2126-12-01T06:00+01:00', '--because',
                           'new firmware', '-f', 'json')
        self.assertEqual(0, result.returncode)
        self.assertEqual(['s1'], [
            row['Server'] for row in json.loads(result.stdout)])
        self.assertEqual(
            f'{A} is drained at 2126-12-01T05:00:00+00:00; nova-compute '
            f'informs the owners of these servers within a minute\n',
            result.stderr)
        self.assertEqual([], self.words())
        self.assertEqual([(A, 'new firmware', '2126-12-01T05:00:00+00:00')],
                         self.planned())

    def test_another_time(self):
        self.nova_compute()
        for day in '01', '02':
            self.say('drain', A, '--at', f'2126-12-{day}', '--because', day)
        self.assertEqual([(A, '02', '2126-12-02T00:00:00+00:00')],
                         self.planned())

    def test_undrain(self):
        self.nova_compute()
        self.say('drain', 'S1', '--at', self.LATER, '--because', 'x')
        self.assertIn(f'{A} is not drained', self.say('undrain', A))
        self.assertEqual([], self.planned())
        self.assertEqual(
            f'No drain of {A} is planned: see nova-accel claims; nova-accel '
            f'enable ends one whose time has come.',
            self.refused('undrain', A))

    def test_refused(self):
        self.nova_compute()
        for arguments, why in (
                (('--at', '2020-01-01T06:00', '--because', 'x'),
                 '--at 2020-01-01T06:00:00+00:00 is in the past'),
                (('--at', self.LATER), 'needs a reason that owners may read'),
                (('--at', self.LATER, '--because', 'x', '--reason', 'y'),
                 'needs a reason that owners may read'),
                (('--because', 'x'), '--because is for planned work'),
                (('--at', self.LATER, '--because', 'x' * 201),
                 '--because must be one line'),
                (('--at', self.LATER, '--because', 'x\ny'),
                 '--because must be one line')):
            self.assertIn(why, self.refused('drain', A, *arguments))
        self.say('disable', A)
        self.assertIn('it is disabled already', self.refused(
            'drain', A, '--at', self.LATER, '--because', 'x'))
        self.assertEqual([], self.planned())

    def test_no_time(self):
        """Of another zone, or no time at all: the arguments are wrong."""
        self.COMMAND = 'drain'
        for value in ('tomorrow', '2126-12-01T06:00 Europe/Berlin',
                      '2126-12-01T06:00+25:00', '2126-13-01', '',
                      '9999-12-31T23:00-12:00', '0001-01-01T00:00+12:00'):
            error = self.assertRaises(
                SystemExit, self.call, A, '--at', value, '--because', 'x')
            self.assertEqual(2, error.code)

    def test_shown(self):
        """By nova-accel claims, with the time."""
        self.nova_compute()
        self.say('drain', A, '--at', self.LATER, '--because', 'firmware')
        self.COMMANDS = {'claims': claims.Claims}
        row, = json.loads(self.say('claims', '-f', 'json'))
        self.assertEqual(
            (A, 'planned', '2126-12-01T06:00:00+00:00', 'firmware'),
            tuple(row[name] for name in ('Device', 'State', 'Since', 'Error')))


class StoresTest(DisableTestCase):

    def test_no_store(self):
        error = self.refused('disable', A)
        self.assertIn(self.path, error)
        self.assertIn('nova-compute creates it at its first start', error)
        self.assertFalse(os.path.exists(self.path))

    def test_other_releases(self):
        """nova-compute of that release may be running."""
        self.nova_compute()
        for version in 8, schema.VERSION + 1:
            with sqlite3.connect(self.path) as db:
                db.execute(f'PRAGMA user_version = {version}')
            db.close()
            self.assertIn(f'has version {version}',
                          self.refused('disable', A))

    def test_no_permission(self):
        """Not the user of nova-compute, who alone may write it."""
        if os.geteuid():
            self.skipTest('only root can become another user')
        self.nova_compute()
        other = os.path.join(self.directory, 'other.sqlite')
        with (contextlib.closing(sqlite3.connect(self.path)) as source,
              contextlib.closing(sqlite3.connect(other)) as copy):
            source.backup(copy)
        os.chmod(self.directory, 0o755)
        path = disable.store.path_of

        def as_another_user(parsed_args):
            found = path(parsed_args)
            os.seteuid(65534)
            self.addCleanup(os.seteuid, 0)
            return found
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.store.path_of', as_another_user))
        for name in other, self.path:
            # the second has a log (WAL), so that SQLite opens it
            error = self.refused('disable', '--store', name, A)
            os.seteuid(0)
            self.assertRegex(
                error, r'cannot be written \(.*\): run the command as the user '
                       r'of nova-compute')

    def test_store_of_a_later_release(self):
        self.nova_compute()
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            db.execute('PRAGMA user_version = 99')
        self.assertIn('install the release that wrote it',
                      self.refused('disable', A))

    def test_configuration_of_another_user(self):
        if os.geteuid():
            self.skipTest('only root can become another user')
        os.chmod(self.directory, 0o755)
        os.chmod(self.config, 0o600)
        self.addCleanup(os.seteuid, 0)
        # once the command is loaded: this user may not read where that lies,
        # as below /root
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.main.NovaAccel.prepare_to_run_command',
            lambda app, command: os.seteuid(65534)))
        self.assertIn('run the command as the user of Nova',
                      self.refused('disable', A))
