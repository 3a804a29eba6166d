# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel handovers, as an operator starts it."""

import json
import os

from nova_accel.cmd import output
from tests.unit import commands
from tests.unit.handovers import A, B, handover, server

S1, S2, S3 = map(server, range(1, 4))


class HandoversTest(commands.StoreCommandTestCase):

    COMMAND = 'handovers'

    def fill(self):
        self.open_store()
        self.all = [handover(1), handover(2, device=B, handle='0000:81:00.2'),
                    handover(3, result='Failed.', method='none')]
        for one in self.all:
            self.store.add_handover(one)

    def test_json(self):
        self.fill()
        result = self.start('-f', 'json')
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        found = json.loads(result.stdout)
        self.assertEqual([S1, S2, S3], [h['Server'] for h in found])
        self.assertEqual({
            'Time': '2026-11-22T02:17:01+00:00', 'Device': A, 'Handle': A,
            'Serial': '02:00:00:00:00:01', 'Server': S1, 'Origin': None,
            'Method': 'reset flr', 'Before': None, 'After': None,
            'Result': 'clean', 'Since': None, 'Ports': None, 'Shown': None,
            **dict.fromkeys(('Version', 'Previous', 'Place', 'Salt', 'Key',
                             'Signature'))}, found[0])

    def test_serial_number_that_moves_the_cursor(self):
        self.open_store().add_handover(handover(1, serial='\x1b[2J\u202e7'))
        self.assertIn(r'\x1b[2J\u202e7', self.call().stdout)

    def test_since(self):
        self.fill()
        for since, expected in (('2026-11-22T02:17:02', [S2, S3]),
                                ('2026-11-22T03:17:03+01:00', [S3]),
                                ('2026-11-21', [S1, S2, S3])):
            result = self.call('-f', 'json', '--since', since)
            self.assertEqual(expected, [
                h['Server'] for h in json.loads(result.stdout)])
        self.assertRaises(SystemExit, self.call, '--since', 'Monday')

    def test_table(self):
        self.fill()
        result = self.call()
        self.assertEqual(0, result.returncode)
        for text in ('Time', A, B, 'reset flr', 'clean', 'Failed.'):
            self.assertIn(text, result.stdout)

    def test_functions_and_errors(self):
        """A table breaks between words, and breaks no id."""
        self.open_store()
        error = 'it had to be programmed, and the card failed (EIO: CRC error)'
        self.store.add_handover(handover(
            1, before='6d8bfe68423348798b35308fa443d59d', result=error))
        row, = self.rows()
        self.assertEqual(('6d8bfe68-4233-4879-8b35-308fa443d59d', None, error),
                         (row['Before'], row['After'], row['Result']))
        shown = self.call().stdout
        self.assertIn('| before 6d8bfe68-4233-4879-8b35-308fa443d59d |', shown)
        self.assertIn('| it had to be programmed, and ', shown)
        self.assertLessEqual(max(map(len, shown.splitlines())), 100)

    def test_selection(self):
        self.fill()
        for arguments, servers in (
                (('--device', A), [S1, S3]),
                (('--device', '0000:81:00.2'), [S2]),
                (('--server', S3), [S3])):
            self.assertEqual(
                servers, [h['Server'] for h in self.rows(*arguments)])

    def test_nothing(self):
        self.open_store()
        nothing = f'No hand-over matches: {output.NAMES}.\n'
        for arguments, said in (
                ((), 'No hand-over is recorded.\n'),
                (('--device', '0000:99:00.0'), nothing),
                (('--server', server(9)), nothing)):
            result = self.call(*arguments)
            self.assertEqual((said, 4 if arguments else 0),
                             (result.stdout, result.returncode))

    def test_store_that_nobody_has_open(self):
        self.fill()
        self.store._db.close()
        self.assertEqual(3, len(self.rows()))
        copy = os.path.join(self.directory, 'a copy?')
        os.rename(self.path, copy)
        self.assertEqual(3, len(self.rows('--store', copy)))
        # and nothing has changed
        self.assertFalse(os.path.exists(self.path))

    def test_stores_that_cannot_be_read(self):
        def refused(advice):
            result = self.call()
            self.assertEqual(1, result.returncode)
            self.assertIn(self.path, result.stderr)
            self.assertIn(advice, result.stderr)
        refused('--store')
        self.assertFalse(os.path.exists(self.path))
        with open(self.path, 'w') as file:
            file.write('not a database, ' * 100)
        refused('restore a backup')
        self.assertNotIn('Traceback', self.call().stderr)
