# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The use of devices, in notifications, in the file of metrics, and as others
read it."""

import grp
import importlib
import os
import re
import stat
import uuid

import fixtures
from prometheus_client import parser

from nova_accel.notify import metrics
from nova_accel.notify import notices
from nova_accel.store import values
from tests.host import base
from tests.host import ceilometer
from tests.host import health
from tests.host.health import CARD, HALF, ONE, TWO
from tests.unit import clock
from tests.unit.host import A, FUNCTION

GROUP = grp.getgrgid(os.getegid()).gr_name
RATING = os.path.join(ceilometer.ETC, 'cloudkitty/metrics.yml')


class UseTestCase(health.HealthTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.clock = clock.Clock(self)
        self.file = os.path.join(self.directory, 'nova_accel.prom')
        self.start(ONE, TWO, metrics_file=self.file, metrics_group=GROUP)
        self.quiet()

    def quiet(self):
        """What follows a look is done, and no other look begins."""
        for part in self.host.parts.after_look:
            self.wait_for(lambda: not part.runs)

    def count(self):
        self.host.usage.run()

    def events(self):
        return [(event.rpartition('.')[2], payload['seconds'])
                for event, payload
                in self.host.cloud.read().get('notices', [])
                if event.startswith('accel.claim.')]

    def payloads(self):
        return [payload for event, payload
                in self.host.cloud.read().get('notices', [])
                if event.startswith('accel.claim.')]

    def samples(self, name='claim_seconds_total'):
        self.host.metrics.write(self.file)
        with open(self.file, encoding='utf-8') as file:
            found = {family.name: family for family
                     in parser.text_string_to_metric_families(file.read())}
        family = found[f'nova_accel_{name.removesuffix("_total")}']
        return family.type, [(s.labels, s.value) for s in family.samples]

    def seconds(self):
        return sum(value for _, value in self.samples()[1])


class NotificationsTest(UseTestCase):

    def test_life(self):
        server = self.boot()
        self.clock.go(59)
        self.count()
        for _ in range(121):
            self.clock.go(60)
            self.count()
        self.host.delete(server)
        self.clock.go(600)
        self.count()
        self.count()
        self.assertEqual([('begin', 59), ('exists', 3659), ('exists', 7259),
                          ('end', 7319)], self.events())

    def test_payload(self):
        server = self.host.cloud.add_server({f'resources1:{CARD}': '1'},
                                            project='p')
        self.host.cloud.set_server(server, flavor='f1')
        self.host.cloud.allocate(
            server, self.host.allocation(ONE, CARD))
        self.host.spawn(server)
        self.clock.go(1.5)
        self.count()
        payload, = self.payloads()
        uuid.UUID(payload.pop('claim'))
        self.assertEqual({
            'server': server, 'project': 'p', 'flavor': 'f1', 'type': 'CARD',
            'product': self.host.inventory.devices[ONE].product,
            'device': ONE, 'part': '', 'memory': 0,
            'since': '2026-11-22T00:00:00.000000+00:00',
            'until': '2026-11-22T00:00:01.500000+00:00', 'seconds': 1.5},
            payload)

    def test_short_one(self):
        """Between two looks: both events come, with its seconds."""
        server = self.boot()
        self.clock.go(3)
        self.host.delete(server)
        self.clock.go(3)
        self.count()
        self.assertEqual([('begin', 3), ('end', 3)], self.events())

    def test_restart(self):
        """Nothing is sent twice, and the time between is counted."""
        server = self.boot()
        self.clock.go(60)
        self.count()
        self.restart()
        self.quiet()
        self.clock.go(7)
        self.count()
        self.host.delete(server)
        self.count()
        self.assertEqual([('begin', 60), ('end', 67)], self.events())

    def test_evacuated(self):
        """The other host counts from there on; the time in which this one was
        away does not count."""
        server = self.boot()
        self.clock.go(60)
        self.count()
        self.host.end()
        self.host.cloud.set_server(server, is_here=False)
        self.clock.go(3600)
        self.restart()
        self.quiet()
        self.clock.go(60)
        self.count()
        self.host.delete(server)
        self.count()
        self.assertEqual([('begin', 60), ('end', 60)], self.events())
        self.assertEqual(60, self.seconds())

    def test_resize_here(self):
        server = self.boot()
        self.clock.go(100)
        migration = self.host.resize_here(
            server, self.host.allocation(TWO, CARD))
        self.clock.go(1000)
        self.host.confirm(server, migration, here=True)
        self.clock.go(10)
        self.count()
        self.assertEqual(1110, sum(
            use.seconds for use in self.host.store.uses()))

    def test_lost_store(self):
        """The guest says since when; the sum goes on."""
        self.boot()
        self.clock.go(60)
        self.count()
        self.assertEqual(60, self.seconds())
        self.host.end()
        for name in os.listdir(self.directory):
            if name.startswith('accel_claims'):
                os.unlink(os.path.join(self.directory, name))
        self.clock.go(40)
        self.restart()
        self.quiet()
        self.clock.go(5)
        self.count()
        use, = self.host.store.uses()
        self.assertEqual(105, use.seconds)
        self.assertEqual([('begin', 60)], self.events())
        self.assertEqual(65, self.seconds())

    def test_nova_does_not_answer_at_the_start(self):
        self.boot()
        self.clock.go(60)
        self.count()
        answer = type(self.host.cloud).servers
        asked = []

        def fails(cloud, uuids):
            asked.append(uuids)
            raise ConnectionError('no database')
        self.useFixture(fixtures.MonkeyPatch(
            'tests.host.cloud.Cloud.servers', fails))
        self.restart()
        self.quiet()
        self.assertTrue(asked)
        self.assertIn('did not run is not counted yet', self.log.output)
        type(self.host.cloud).servers = answer
        self.clock.go(6)
        self.count()
        self.assertEqual(66, self.host.store.uses()[0].seconds)

    def test_bus_does_not_answer(self):
        """The seconds are counted; events come later, each once."""
        notify = self.host.cloud.notify
        one, two = self.boot(), self.boot(address=TWO)

        def refuse(event, payload):
            if payload['server'] == two:
                raise ConnectionError('no bus')
            notify(event, payload)
        self.host.cloud.notify = refuse
        self.clock.go(10)
        self.assertRaises(ConnectionError, self.count)
        self.host.delete(one)
        self.clock.go(10)
        self.host.cloud.notify = notify
        self.count()
        self.assertEqual(['begin', 'end', 'begin'],
                         [event for event, _ in self.events()])
        self.assertEqual(30, self.seconds())

    def test_part(self):
        """What the region carries."""
        self.host.end()
        self.config.config(group='accel', pci_devices=[])
        self.start_host({'address': A})
        self.host.upload(FUNCTION)
        self.host.boot(base.asks(FUNCTION), self.host.allocation())
        self.count()
        self.assertEqual([('FPGA', FUNCTION)],
                         [(p['type'], p['part']) for p in self.payloads()])

    def test_due(self):
        use = values.Use(1, 'c', 's', '', '', '', '', '', '', '',
                         '', 'now', 10.0)
        self.assertEqual(['begin'], [*notices.due(use)])


class CounterTest(UseTestCase):

    def test_file(self):
        self.boot()
        self.clock.go(30)
        self.count()
        self.assertEqual(('counter', [({
            'project': 'demo', 'type': 'CARD',
            'product': self.host.inventory.devices[ONE].product}, 30)]),
            self.samples())
        found = os.stat(self.file)
        self.assertEqual((0o640, os.getegid()),
                         (stat.S_IMODE(found.st_mode), found.st_gid))

    def test_whole_file(self):
        """prometheus_client reads each metric, with its type."""
        self.boot()
        self.count()
        self.samples()
        with open(self.file, encoding='utf-8') as file:
            found = {f.name: f.type for f
                     in parser.text_string_to_metric_families(file.read())}
        self.assertLessEqual({
            f'nova_accel_{name.removesuffix("_total")}': kind
            for name, (kind, _) in metrics.METRICS.items()
            if name not in ('device_finding', 'holds', 'cache_bytes')
            }.items(), found.items())

    def test_without_a_group(self):
        """Every user reads it, and no project is in it."""
        self.config.config(group='accel', metrics_group=None)
        self.boot()
        self.count()
        self.host.metrics.write(self.file)
        with open(self.file, encoding='utf-8') as file:
            found = file.read()
        self.assertNotIn('project', found)
        self.assertNotIn('demo', found)
        self.assertEqual(0o644, stat.S_IMODE(os.stat(self.file).st_mode))

    def test_unknown_group(self):
        """No file with projects is written."""
        before = os.stat(self.file).st_ino
        self.config.config(group='accel', metrics_group='not-on-this-host')
        self.host.metrics.background.start()
        self.quiet()
        self.assertEqual(before, os.stat(self.file).st_ino)
        self.assertIn("this host has no such group", self.log.output)

    def test_names_are_never_in_it(self):
        """IDs only: no server, and none of its names."""
        server = self.boot()
        self.count()
        self.samples()
        with open(self.file, encoding='utf-8') as file:
            self.assertNotIn(server, file.read())

    def test_states(self):
        self.boot()
        self.turn(TWO, **HALF)
        self.quiet()
        kind, found = self.samples('devices')
        self.assertEqual('gauge', kind)
        self.assertEqual({
            ('demo', 'delivered', ''): 1, ('demo', 'healthy', ''): 1,
            ('demo', 'held', ''): 1, ('', 'delivered', ''): 1,
            ('', 'withheld', 'unhealthy'): 1},
            {(labels['project'], labels['state'], labels['kind']): value
             for labels, value in found})
        self.turn(TWO)
        self.quiet()
        self.assertIn(('', 'idle'), [
            (labels['project'], labels['state'])
            for labels, _ in self.samples('devices')[1]])

    def test_restart(self):
        """increase() is the bill: the counter never goes back."""
        self.boot()
        found = []
        for _ in range(3):
            self.clock.go(60)
            self.count()
            found.append(self.seconds())
            self.restart()
            self.quiet()
            found.append(self.seconds())
        self.assertEqual([60, 60, 120, 120, 180, 180], found)

    def test_file_of_another(self):
        """What another user puts there does not become a bill."""
        self.host.usage.run()
        labels = 'project="demo",type="CARD",product="x"'
        line = f'nova_accel_claim_seconds_total{{{labels}}} 99\n'
        for content, found in (
                (line, 99), (line.replace('99', 'NaN'), None),
                (line.replace('99', '-1'), None), (line + '\xff', 99),
                (line.replace('project', 'p'), None), ('', None)):
            with open(self.file, 'w') as file:
                file.write(content)
            self.assertEqual({} if found is None else {
                ('demo', 'CARD', 'x'): found}, metrics.published(self.file))
        with open(self.file, 'w') as file:
            file.write(line)
        with fixtures.MonkeyPatch('os.geteuid', lambda: os.getuid() + 1):
            self.assertEqual({}, metrics.published(self.file))
        os.unlink(self.file)
        self.assertEqual({}, metrics.published(self.file))
        os.mkfifo(self.file)
        self.assertEqual({}, metrics.published(self.file))
        os.unlink(self.file)
        os.symlink('/etc/hostname', self.file)
        self.assertEqual({}, metrics.published(self.file))


class OthersTest(UseTestCase):
    """What is shipped for Ceilometer, Gnocchi and CloudKitty."""

    def message(self):
        self.boot()
        self.clock.go(90)
        self.count()
        payload, = self.payloads()
        return {
            'event_type': 'accel.claim.exists',
            'publisher_id': 'compute.compute1',
            'payload': {'host': 'compute1', **payload}, 'ctxt': {},
            'metadata': {'message_id': 'one', 'timestamp':
                         '2026-11-22T02:17:43+00:00'}}

    def test_meter(self):
        meter = ceilometer.read(ceilometer.METERS)['metric'][1]
        named = {*re.findall(r'payload\.([a-z_]+)', str(meter))}
        self.assertLessEqual(named, self.message()['payload'].keys())
        for event in 'begin', 'exists', 'end':
            self.assertTrue(re.match(meter['event_type'],
                                     f'accel.claim.{event}'))
        self.assertEqual(('cumulative', 's'), (meter['type'], meter['unit']))

    def test_ceilometer_takes_it(self):
        message = self.message()
        (sample,), _ = ceilometer.by_ceilometer(self, message)
        self.assertEqual(
            ('accelerator.usage', 90, message['payload']['claim']),
            tuple(sample[key] for key in ('name', 'volume', 'resource_id')))
        self.assertTrue(sample['is_in_gnocchi'])

    def test_rating(self):
        """CloudKitty's own loader, its query and its unit."""
        try:
            base_ = importlib.import_module(
                'cloudkitty.collector.prometheus_base')
        except ImportError as error:
            self.skipTest(f'CloudKitty is not installed ({error}): pip install '
                          f'--no-deps -r constraints-cloudkitty.txt')
        collector = importlib.import_module('cloudkitty.collector')
        collector.CONF.set_override('scope_key', 'project', 'collect')
        self.addCleanup(collector.CONF.clear_override, 'scope_key', 'collect')

        class Collector(base_.PrometheusCollectorBase):

            def __init__(self):
                self.conf = self.check_configuration(
                    ceilometer.read(RATING))
        known = Collector()
        name, = known.conf
        start = base_.tzutils.dt_from_iso('2026-11-22T02:00:00+00:00')
        end = base_.tzutils.dt_from_iso('2026-11-22T03:00:00+00:00')
        query = known.build_query(
            known.conf, name, start, end, 'project', 'p',
            known.conf[name]['groupby'], known.conf[name]['metadata'])
        self.assertEqual(
            'sum(rate(nova_accel_claim_seconds_total{project="p"}[3600s])) '
            'by (product, type, project)', query)
        _, groupby, hours = known._format_data(
            name, 'project', 'p', start, end, {
                'metric': {'product': 'H200', 'type': 'GPU'},
                'value': [0, '1.5']})
        self.assertEqual((1.5, 'H200', 'hour'), (
            float(hours), groupby['product'], known.conf[name]['unit']))
