# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel history, as an operator starts it."""

import json
import os
import uuid

from nova_accel.cmd import handovers
from nova_accel import model
from nova_accel.store import values
from tests.unit import commands
from tests.unit.claims import claim, handle
from tests.unit.handovers import A, B, handover

ONE, TWO, THREE = (str(uuid.UUID(int=n)) for n in (1, 2, 3))
SERIAL = '02:00:00:00:00:01'


class HistoryTest(commands.StoreCommandTestCase):

    COMMAND = 'history'
    COMMANDS = {'history': handovers.History}

    def setUp(self):
        super().setUp()
        self.open_store()

    def fill(self, *records):
        for record in records:
            self.store.add_handover(record)

    def shown(self, *arguments):
        return [(row['Host'], row['From'], row['Until'], row['Server'])
                for row in self.rows(*arguments)]

    def time(self, number):
        return f'2026-11-22T02:17:{number:02}+00:00'

    def test_device(self):
        self.fill(handover(1, server=ONE), handover(2, server=TWO),
                  handover(3, server=ONE, device=B, handle=B, serial=''))
        expected = [('compute1', None, self.time(1), ONE),
                    ('compute1', self.time(1), self.time(2), TWO)]
        self.assertEqual(expected, self.shown(A))
        self.assertEqual(expected, self.shown(SERIAL))
        # what of it a server had
        self.assertEqual([], self.shown('0000:99:00.0'))
        result = self.call('web1')
        self.assertEqual(4, result.returncode)
        self.assertIn('Nothing is recorded of web1: give the address of a ',
                      result.stdout)

    def test_card_that_was_at_another_address(self):
        self.fill(handover(1, server=ONE, serial='', ports='p'),
                  handover(2, server=TWO, serial='', ports='q'),
                  handover(3, server=THREE, device=B, handle=B))
        self.store.set_devices({B: model.Device(
            B, 'FPGA', 'INTEL', 'P', '8086', '09c4', 'dfl', ports='p')})
        self.assertEqual([ONE, THREE], [row[3] for row in self.shown(B)])

    def test_server(self):
        self.fill(handover(1, server=ONE), handover(2, server=TWO),
                  handover(3, server=ONE, device=B, handle=B))
        self.assertEqual([
            ('compute1', None, self.time(1), ONE),
            ('compute1', None, self.time(3), ONE)], self.shown(ONE))

    def test_failed_release_does_not_end_it(self):
        """No other server had it before it was clean."""
        self.fill(handover(1, server=ONE),
                  handover(2, server=TWO, result='Failed.'),
                  handover(3, server=THREE))
        self.assertEqual(
            [None, self.time(1), self.time(1)],
            [begin for _, begin, _, _ in self.shown(A)])

    def test_report_of_an_owner(self):
        """Between the hand-overs, for its device and its server."""
        self.fill(handover(1, server=ONE), handover(3, server=TWO))
        self.store.add_owner_report(values.OwnerReport(
            0, self.time(2), A, SERIAL, '', '', TWO, 'memory', '<b>'))
        expected = [ONE, TWO, TWO]
        self.assertEqual(expected, [row[3] for row in self.shown(A)])
        self.assertEqual(expected, [row[3] for row in self.shown(SERIAL)])
        self.assertEqual(
            ['reported by the owner: memory: <b>', 'clean'],
            [row['Result'] for row in self.rows(TWO)])

    def test_since(self):
        """From is when the server got it, where that is known."""
        self.fill(handover(1, server=ONE),
                  handover(5, server=TWO, since=self.time(3)))
        self.assertEqual([('compute1', None, self.time(1), ONE),
                          ('compute1', self.time(3), self.time(5), TWO)],
                         self.shown(A))
        # no server had it between the two
        self.assertEqual([], self.shown(A, '--at', self.time(2)))
        self.assertEqual(1, len(self.shown(A, '--at', self.time(4))))

    def test_now(self):
        """The servers that have it, from the claims."""
        first = claim(ONE, handle(0), state=model.ClaimState.BOUND)
        self.store.add([first])
        row, = self.rows(ONE)
        self.assertEqual(
            (ONE, None, None, first.device_address, handle(0).address),
            tuple(row[name] for name in (
                'Server', 'Until', 'Result', 'Device', 'Handle')))
        self.assertRegex(row['From'], '^20[0-9-]+T')
        # also at a time after it began
        self.assertEqual(1, len(self.rows(ONE, '--at', '2999-01-01')))
        self.assertEqual([], self.rows(ONE, '--at', '2001-01-01'))

    def test_at(self):
        self.fill(handover(1, server=ONE), handover(5, server=TWO),
                  handover(9, server=THREE))
        for when, expected in ((3, TWO), (7, THREE), (1, ONE)):
            self.assertIn(expected, [
                server for *_, server in self.shown(
                    A, '--at', f'2026-11-22T02:17:{when:02}')])
        self.assertEqual([], self.shown(A, '--at', '2026-11-23'))
        # in the zone of the operator
        self.assertEqual([TWO], [server for *_, server in self.shown(
            A, '--at', '2026-11-22T03:17:03+01:00')])

    def test_files_of_several_hosts(self):
        """A card that was moved, by its serial number; as exported."""
        paths = []
        for host, record in (('compute2', handover(2, server=TWO, device=B)),
                             ('compute1', handover(1, server=ONE))):
            self.path = os.path.join(
                self.directory, 'accel_claims_compute1.sqlite')
            self.open_store()
            self.store._db.execute('DELETE FROM handovers')
            self.fill(record)
            self.COMMAND = 'handovers'
            paths.append(os.path.join(self.directory, f'{host}.json'))
            with open(paths[-1], 'w') as file:
                file.write(self.call('-f', 'json').stdout)
        self.COMMAND = 'history'
        os.unlink(self.path)
        records = [item for path in paths for item in ('--journal', path)]
        self.assertEqual([('compute1', None, self.time(1), ONE),
                          ('compute2', None, self.time(2), TWO)],
                         self.shown(SERIAL, *records))
        # an address is that of another card on another host
        self.assertEqual(['compute2'],
                         [host for host, *_ in self.shown(B, *records)])

    def test_files_that_are_not_a_record(self):
        path = os.path.join(self.directory, 'x.json')
        for content in (None, 'no json', '[1]', '{}x', '[{"Time": "x"}]', '7',
                        json.dumps([dict.fromkeys(values.Handover.
                                                  __dataclass_fields__, 1)])):
            if content is not None:
                with open(path, 'w') as file:
                    file.write(content)
            result = self.call(A, '--journal', path)
            self.assertEqual((1, ''), (result.returncode, result.stdout))
            self.assertRegex(result.stderr, (
                r'\A--journal names [^ ]*x.json, which is not what nova-accel '
                r'handovers -f json writes \(.*\): name such a file.\n\Z'))
