# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel claims, as an operator starts it."""

import argparse
import dataclasses
import datetime
import json
import os
import sqlite3
import uuid

from nova_accel.cmd import output
from nova_accel.cmd import store as store_arguments
from nova_accel import model
from tests.unit import commands
from tests.unit.claims import (
    claim, DEVICE, DISABLED, handle)

ADDRESS = DEVICE.address
IMAGE = str(uuid.uuid4())
FUNCTION = uuid.uuid4()


def server(number: int) -> str:
    """UUID of a server."""
    return f'00000000-0000-4000-8000-{number:012}'


S1, S2, S3 = map(server, range(1, 4))


def loaded(function=FUNCTION.hex, image=IMAGE, name=None,
           origin=model.OPERATOR):
    return model.Loaded(function, image, name, '', origin)


class ClaimsTest(commands.StoreCommandTestCase):

    COMMAND = 'claims'

    def shown(self, *arguments):
        """(server, region, state, function, image, origin) of each row."""
        return [tuple('' if row[name] is None else row[name] for name in (
                    'Server', 'Region', 'State', 'Function', 'Image',
                    'Origin'))
                for row in self.rows(*arguments)]

    def test_json(self):
        store = self.open_store()
        store.add([claim(S1, project_id='p', state=model.ClaimState.BOUND)])
        store.set_loaded(ADDRESS, 0, loaded(name='nlb'))
        result = self.start('-f', 'json')
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        row, = json.loads(result.stdout)
        since = datetime.datetime.fromisoformat(row.pop('Since'))
        self.assertLess(
            datetime.datetime.now(datetime.UTC) - since,
            datetime.timedelta(hours=1))
        self.assertEqual({
            'Device': ADDRESS, 'Region': 0, 'Handle': ADDRESS,
            'Server': S1, 'Group': '1', 'State': 'Bound',
            'Function': 'nlb', 'Image': IMAGE, 'Origin': 'operator',
            'Error': None}, row)

    def test_origin(self):
        """Of all that was programmed, also where nobody has the region."""
        store = self.open_store()
        store.add([
            claim(S1, handle(1), region_index=1),
            claim(S2, handle(2), region_index=2,
                  state=model.ClaimState.BOUND)])
        for index, content in ((2, loaded(origin='a project')),
                               (3, loaded(None, None, origin=None)),
                               (4, model.Loaded(*[None] * 5)), (5, loaded()),
                               (6, model.Loaded(*[None] * 4, 'a project'))):
            store.set_loaded(ADDRESS, index, content)
        self.assertEqual([
            ('', 3, 'free', '', '', 'unknown'),
            ('', 4, 'free', 'unknown', '', 'unknown'),
            ('', 5, 'free', str(FUNCTION), IMAGE, 'operator'),
            ('', 6, 'free', 'unknown', '', 'a project'),
            # as its driver reads it
            (S1, 1, 'Initial', '', '', 'operator'),
            (S2, 2, 'Bound', str(FUNCTION), IMAGE, 'a project'),
        ], sorted(self.shown()))

    def test_devices_without_regions(self):
        self.open_store().add([
            claim(S1, handle(1), region_index=None, consumer_uuid='migration',
                  state=model.ClaimState.BOUND),
            claim(None, handle(2), instance_uuid='', region_index=None,
                  error='It is dirty.', state=model.ClaimState.DELETING)])
        self.assertEqual([
            ('', '', 'Deleting', '', '', ''),
            (S1, '', 'Bound, old', '', '', '')], sorted(self.shown()))
        self.assertIn('It is dirty.', self.call().stdout)

    def test_waiting(self):
        """A handle that waits has a row of no server, and its region has no
        other one."""
        store = self.open_store()
        ended = claim(S1, state=model.ClaimState.DELETING)
        store.add([ended, claim(S2, handle(1), region_index=1)])
        store.set_loaded(ADDRESS, 0, loaded())
        store.await_operator(ended)
        row, = (row for row in self.rows('--device', ADDRESS)
                if row['Region'] == 0)
        self.assertEqual((ADDRESS, None, 'Waiting', str(FUNCTION)), tuple(
            row[n] for n in ('Handle', 'Server', 'State', 'Function')))
        self.assertIn('nova-accel release', row['Error'])
        self.assertTrue(row['Since'])
        self.assertNotIn('unknown', self.call().stdout)
        self.assertEqual([S2], [
            row['Server'] for row in self.rows('--server', S2)])
        self.assertEqual([], self.rows('--server', S1))

    def test_narrow(self):
        """Narrower than its columns can be, as a small terminal."""
        self.open_store().add([claim(S1)])
        for width in '1', '10', '40':
            result = self.call('--max-width', width)
            self.assertEqual((0, ''), (result.returncode, result.stderr))
            self.assertIn(S1[:4], result.stdout)

    def test_selection(self):
        store = self.open_store()
        store.add([claim(S1, handle(1), device_address='0000:af:00.0'),
                   claim(S2, handle(2))])
        store.set_loaded(ADDRESS, 7, loaded())
        for arguments, servers in (
                ((), ['', S1, S2]),
                (('--device', ADDRESS), ['', S2]),
                (('--device', ADDRESS.removeprefix('0000:')),
                 ['', S2]),
                (('--device', '0000:af:00.1'), [S1]),
                (('--server', S2), [S2])):
            self.assertEqual(servers, sorted(
                row[0] for row in self.shown(*arguments)))

    def test_name_of_a_server(self):
        error = self.assertRaises(
            argparse.ArgumentTypeError, store_arguments.server, 'web1')
        self.assertIn("'web1' is not a UUID: openstack server show web1 -c id",
                      str(error))
        self.assertRaises(SystemExit, self.call, '--server', 'web1')

    def test_nothing(self):
        self.open_store()
        nothing = f'No claim matches: {output.NAMES}.\n'
        for arguments, said in (
                (('--server', server(9)), nothing),
                (('--device', ADDRESS), nothing),
                ((), 'No server holds a device, and nothing waits for you, is '
                     'programmed or disabled.\n')):
            result = self.call(*arguments)
            self.assertEqual((said, 4 if arguments else 0),
                             (result.stdout, result.returncode))
            self.assertEqual([], self.rows(*arguments))

    def test_table(self):
        """It fits 100 columns, and no id or address is broken."""
        store = self.open_store()
        error = 'the card failed, and it has to be programmed again ' * 3
        store.add([claim(S1, region_index=0, state=model.ClaimState.BOUND),
                   claim(S2, handle(1), region_index=1, error=error)])
        store.set_loaded(ADDRESS, 0, loaded())
        shown = self.call().stdout
        for text in (S1, S2, str(FUNCTION), IMAGE, ADDRESS,
                     handle(1).address, 'region 1', 'group 1'):
            self.assertIn(f' {text} ', shown)
        lines = shown.splitlines()
        self.assertEqual({100}, {*map(len, lines)})
        # an empty line between the rows, and none at the end
        self.assertEqual(1, sum(not line.strip('| ') for line in lines))
        # the columns of programs are there by name
        self.assertEqual(2, self.call(
            '-c', 'server', '-c', 'Image').stdout.count('00000000-0000-'))

    def test_disabled(self):
        """Where the device is now, or was when it is not on this host."""
        store = self.open_store()
        store.add([claim(S1)])
        for serial, there, shown in (
                ('', {ADDRESS: ''}, ADDRESS),
                ('S1', {'0000:01:00.0': 'S1'}, '0000:01:00.0'),
                ('S2', {}, ADDRESS), ('S2', {ADDRESS: 'S3'}, ADDRESS)):
            store.set_devices({
                address: dataclasses.replace(
                    DEVICE, address=address, serial=found)
                for address, found in there.items()})
            store.enable(store.disabled())
            store.disable(dataclasses.replace(DISABLED, serial=serial))
            row, = (row for row in self.rows() if row['State'] == 'disabled')
            self.assertEqual(
                (shown, None, DISABLED.since, 'it is hot'),
                tuple(row[n] for n in ('Device', 'Server', 'Since', 'Error')))
        self.assertEqual([(S1, 'Initial')], [
            (row['Server'], row['State'])
            for row in self.rows('--server', S1)])
        self.assertEqual([], self.rows('--device', '0000:01:00.0'))

    def test_stores_that_cannot_be_read(self):
        """Each error has the real path, and its own advice only."""
        self.open_store()
        with sqlite3.connect(self.path) as db:
            db.execute('PRAGMA user_version = 99')
        db.close()
        for said in 'install the release that wrote it', 'restore a backup':
            result = self.call()
            self.assertEqual(1, result.returncode)
            self.assertIn(f'The claim store {self.path} ', result.stderr)
            self.assertIn(said, result.stderr)
            for word in ':memory:', 'user of nova-compute', '--store':
                self.assertNotIn(word, result.stderr)
            for name in os.listdir(self.directory):
                if name.startswith('accel_claims'):
                    os.remove(os.path.join(self.directory, name))
            with open(self.path, 'w') as file:
                file.write('no database at all, but long enough' * 100)

    def test_no_store(self):
        result = self.call()
        self.assertEqual(1, result.returncode)
        self.assertIn(self.path, result.stderr)
        self.assertIn('nova-compute creates it at its first start',
                      result.stderr)
        self.assertFalse(os.path.exists(self.path))
