# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What an owner may write about his devices, and what happens."""

import datetime

import ddt
import fixtures
import yaml

from nova_accel.attach import owner_reports
from nova_accel.health import signals
from nova_accel import naming
from nova_accel.notify import notices
from nova_accel.store import journal
from nova_accel import text
from tests.host import ceilometer
from tests.host import health
from tests.host.health import HealthTestCase, ONE, THREE, TWO

CATEGORIES = ', '.join(owner_reports.CATEGORIES)


class ReportsTestCase(HealthTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start(ONE, TWO, THREE)
        self.server = self.boot()

    def metadata(self, server=None):
        return self.host.cloud.read()['servers'][server or self.server][
            'metadata']

    def write(self, key, value, server=None):
        with self.host.cloud.state() as state:
            state['servers'][server or self.server]['metadata'][key] = value

    def report(self, value='memory: Xid 63', key='accel:report1',
               server=None):
        """What the owner reads after the next pass."""
        self.write(key, value, server)
        self.host.runtime.run()
        return self.metadata(server).get('accel:report_status')

    def findings(self, address=ONE):
        self.host.inventory.looks.glance()
        return [(f.signal, f.about) for f in
                self.host.inventory.health.conditions()[address].findings]

    def days_pass(self, days):
        now = text.now
        self.useFixture(fixtures.MockPatchObject(
            text, 'now', lambda back=0, to='seconds': now(back - days, to)))


@ddt.ddt
class TableTest(ReportsTestCase):
    """A row for each thing that an owner may write."""

    @ddt.data(*owner_reports.CATEGORIES)
    def test_category(self, category):
        said = self.report(f'{category}: it is so')
        row, = self.host.store.owner_reports()
        self.assertEqual(f'accel:report1: received {row.time}.', said)
        self.assertEqual((ONE, self.server, category, 'it is so', ''), (
            row.device, row.server, row.category, row.words, row.ended))
        self.assertNotIn('accel:report1', self.metadata())
        self.assertEqual([('owner_report', category)], self.findings())

    @ddt.data(
        ('accel:report1', 'memory'), ('accel:report1', ' Memory :'),
        ('accel:report', 'memory:'))
    @ddt.unpack
    def test_also_received(self, key, value):
        self.assertIn(': received ', self.report(value, key))
        self.assertEqual([('memory', '')], [
            (row.category, row.words)
            for row in self.host.store.owner_reports()])

    @ddt.data(
        ('accel:report1', 'gpu is bad', (
            "'gpu is bad' is not a category: write " + CATEGORIES)),
        ('accel:report1', '', "'' is not a category: write " + CATEGORIES),
        ('accel:report2', 'memory: x', 'it is for no group of accelerators '
         'of the server: write accel:report1'),
        ('accel:report_ACCEL0', 'memory: x', 'it is for no group of '
         'accelerators of the server: write accel:report1'),
        ('accel:reports', 'memory: x', 'it is for no group of accelerators '
         'of the server: write accel:report1'))
    @ddt.unpack
    def test_refused(self, key, value, why):
        said = self.report(value, key)
        self.assertEqual(f'{key}: refused: {why}.', said)
        self.assertEqual([], self.host.store.owner_reports())
        self.assertNotIn(key, self.metadata())
        self.assertEqual([], self.findings())

    @ddt.data('markup', 'line', 'direction', 'long')
    def test_words_are_data(self, name):
        words = {'markup': '<b onload=x>\x1b[2J\x1b]0;x\x07',
                 'line': 'a\nnova-compute: b',
                 'direction': '\u202egnp.exe',
                 'long': '%s{0}' + 'x' * 600}[name]
        self.report(f'other: {words}')
        row, = self.host.store.owner_reports()
        self.assertEqual(text.one_line(words)[:200], row.words)
        self.assertTrue(row.words.isprintable())
        self.assertTrue(self.log.output.replace('\n', '').isprintable())
        self.assertEqual([('owner_report', 'other')], self.findings())
        # a finding has no words of his: pages and metrics have findings
        self.assertEqual('the owner of a server has reported it (other)',
                         self.host.inventory.health.conditions()[ONE].reason)

    def test_status_is_short(self):
        for number in range(30):
            self.write(f'accel:report{number + 2}', 'memory')
        self.assertLessEqual(len(self.report()), 255)
        self.assertNotIn('accel:report7', self.metadata())

    def test_his_own_status_means_nothing(self):
        self.write('accel:report_status', 'received')
        self.host.runtime.run()
        self.assertEqual([], self.host.store.owner_reports())


class ReportTest(ReportsTestCase):

    def test_once_a_day(self):
        first = self.report()
        time = self.host.store.owner_reports()[0].time
        after = datetime.datetime.fromisoformat(time) + datetime.timedelta(1)
        # a pass that was killed before it removed the key
        self.assertEqual(first, self.report())
        self.assertEqual(
            f'accel:report1: refused: each device can be reported once a day, '
            f'and was at {time}: report it again after {after}.',
            self.report('hang: now this'))
        self.days_pass(1.01)
        self.assertIn('received', self.report('hang: now this'))
        self.assertEqual(2, len(self.host.store.owner_reports()))

    def test_everything_every_minute(self):
        """The cost that the page states: of each report an answer and a
        removed key, whether it is taken or not."""
        self.report()
        written = []
        write = self.host.cloud.set_metadata

        def count(server, key, value):
            written.append(key)
            write(server, key, value)
        self.useFixture(fixtures.MockPatchObject(
            self.host.cloud, 'set_metadata', count))
        generation = self.host.inventory.table.reports.generation
        for minute in range(5):
            for category in owner_reports.CATEGORIES:
                self.report(f'{category}: {minute}')
        self.assertEqual(
            ['accel:report_status', 'accel:report1'] * 50, written)
        self.assertEqual(1, len(self.host.store.owner_reports()))
        self.assertEqual(generation,
                         self.host.inventory.table.reports.generation)
        written.clear()
        for _ in range(5):
            self.host.runtime.run()
        self.assertEqual([], written)

    def test_at_most_suspect(self):
        """Others get the device last; its owner reads nothing of it."""
        self.report()
        self.assertEqual([('owner_report', 'memory')], self.findings())
        self.assertEqual('suspect', self.states()[ONE])
        traits, amounts = self.shown()
        self.assertIn(naming.SUSPECT, traits)
        self.assertEqual((0, 1), amounts)
        self.host.owners.run()
        self.assertNotIn(naming.health_key('1'), self.metadata())
        self.host.reboot(self.server)

    def test_ends_with_the_hand_over(self):
        self.report()
        self.assertTrue(self.findings())
        self.restart()
        self.look()
        self.assertEqual([('owner_report', 'memory')], self.findings())
        self.host.delete(self.server)
        self.assertEqual([], self.findings())
        other = self.boot()
        self.assertEqual([], self.findings())
        self.assertIn('received', self.report(server=other))

    def test_same_server_gets_it_again(self):
        """As after shelving: the device was cleaned and tested meanwhile."""
        self.report()
        self.host.delete(self.server)
        self.days_pass(.1)
        self.host.boot({f'resources1:{health.CARD}': '1'},
                       self.host.allocation(ONE, health.CARD),
                       uuid_=self.server)
        self.assertEqual([], self.findings())
        self.assertIn('refused', self.report('hang'))
        self.days_pass(1)
        self.assertIn('received', self.report('hang'))
        self.assertEqual([('owner_report', 'hang')], self.findings())

    def test_operator_ends_it(self):
        """His server can report it again a day later only."""
        self.report()
        command = self.host.command()
        command.end_owner_reports(
            [row.number for row in command.owner_reports()])
        self.assertEqual([], self.findings())
        self.assertIn('refused', self.report('hang'))

    def test_own_devices_only(self):
        """Two devices of the group, and none of another server."""
        server = self.host.boot(
            {f'resources1:{health.CARD}': '1',
             f'resources2:{health.CARD}': '1', 'group_policy': 'none'},
            {**self.host.allocation(TWO, health.CARD),
             **self.host.allocation(THREE, health.CARD)})
        self.assertIn('no group', self.report(key='accel:report',
                                              server=server))
        self.report(server=server)
        self.report('hang', 'accel:report2', server=server)
        self.assertEqual(
            {TWO, THREE}, {r.device for r in self.host.store.owner_reports()})
        self.assertEqual([], self.findings(ONE))

    def test_while_nova_works_on_it(self):
        self.host.cloud.set_server(self.server, task_state='rebooting')
        self.assertIsNone(self.report())
        self.host.cloud.set_server(self.server, task_state=None)
        self.host.runtime.run()
        self.assertIn('received', self.metadata()['accel:report_status'])

    def test_notification(self):
        self.report('memory: Xid 63')
        self.host.notices.run()
        self.host.notices.run()
        (_, payload), = [
            found for found in self.host.cloud.read()['notices']
            if found[0] == notices.REPORT]
        self.assertEqual(
            (ONE, self.server, 'memory', 'Xid 63', 'CARD'),
            tuple(payload[name] for name in (
                'device', 'server', 'category', 'words', 'type')))
        with open(ceilometer.EVENTS) as file:
            shipped, = [event for event in yaml.safe_load(file)
                        if event['event_type'] == notices.REPORT]
        # what virt.cloud adds
        self.assertLessEqual(
            {trait['fields'] for trait in shipped['traits'].values()},
            {f'payload.{name}' for name in (*payload, 'host')})

    def test_store_fails(self):
        """It is taken later, and other servers are served."""
        self.read_only(True)
        self.assertIsNone(self.report())
        self.assertIn('accel:report1', self.metadata())
        self.read_only(False)
        self.host.runtime.run()
        self.assertIn('received', self.metadata()['accel:report_status'])

    def test_oldest_are_dropped(self):
        """But none of a server that is there, by whatever others report."""
        self.useFixture(fixtures.MockPatchObject(journal, 'MOST_REPORTS', 3))
        self.report('hang: of another')
        for number in range(5):
            server = self.boot(address=TWO)
            self.report(f'hang: {number}', server=server)
            self.host.delete(server)
        self.assertEqual(['of another', '2', '3', '4'], [
            row.words for row in self.host.store.owner_reports()])
        self.assertEqual([('owner_report', 'hang')], self.findings())

    def test_clock_is_set_back(self):
        """A report of the future counts for no day."""
        self.days_pass(400)
        self.report()
        self.days_pass(-400)
        self.assertIn('received', self.report('hang: now'))
        self.assertIn('refused', self.report('hang: again'))

    def test_off(self):
        """It is received, without a finding."""
        self.config.config(group='accel', health=[f'{signals.REPORTED}=off'])
        self.assertIn('received', self.report())
        self.assertEqual([], self.findings())
