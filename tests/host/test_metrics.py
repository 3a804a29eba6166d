# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the operator's monitoring reads: metrics, alerts, notifications.

Where Debian's packages prometheus and prometheus-node-exporter are installed,
their programs read what nova_accel writes.
"""

import contextlib
import errno
import json
import os
import re
import socket
import stat
import subprocess
import threading
import time
from unittest import mock
from urllib import request as http

import ddt
import fixtures
import testtools
import yaml

from nova_accel import files
from nova_accel.health import signals
from nova_accel.inventory import conditions
from nova_accel.inventory import offers
from nova_accel.notify import metrics
from nova_accel.notify import notices
from nova_accel.store import values
from tests.host import base
from tests.host import ceilometer
from tests.host import health
from tests.host.health import HALF, ONE, TWO, WORN
from tests.unit.host import A, OTHER
from tests.unit.inventory_host import fpga

RULES = os.path.join(ceilometer.ETC, 'prometheus/nova_accel.rules.yaml')
DASHBOARD = os.path.join(ceilometer.ETC, 'grafana/nova_accel.json')
PAGES = [os.path.join(
    os.path.dirname(__file__), f'../../docs/source/operate/{name}.rst')
    for name in ('health', 'usage')]
#: seconds in which real programs have read a file that has just been written
SECONDS = 60


def promtool(test, *arguments, **more):
    ceilometer.needs(test, 'promtool')
    done = subprocess.run(['promtool', *arguments], capture_output=True,
                          text=True, timeout=60, **more)
    test.assertEqual((0, ''), (done.returncode, done.stderr), done.stdout)


class MetricsTestCase(health.HealthTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.file = os.path.join(self.directory, 'nova_accel.prom')
        self.start(ONE, TWO, metrics_file=self.file)

    def written(self):
        # nothing else writes now
        self.settled(self.host.metrics)
        self.host.metrics.write(self.file)
        with open(self.file) as file:
            return file.read()

    def settled(self, part):
        """What each look begins is done."""
        ends = time.monotonic() + base.PATIENCE
        while part.background.runs:
            self.assertLess(time.monotonic(), ends)
            time.sleep(0.01)

    def value(self, name, **labels):
        """The only sample of a name with these labels."""
        found = [
            line for line in self.written().splitlines()
            if line.startswith(f'nova_accel_{name}{{') and all(
                f'{key}="{value}"' in line for key, value in labels.items())]
        self.assertEqual(1, len(found), found)
        return int(found[0].rpartition(' ')[2])


@ddt.ddt
class FileTest(MetricsTestCase):

    def test_states(self):
        self.turn(**HALF)
        for device, state, value in (
                (ONE, 'quarantined', 1), (ONE, 'ok', 0), (TWO, 'ok', 1)):
            self.assertEqual(value, self.value(
                'device_state', device=device, state=state))
        self.assertEqual(1, self.value(
            'device_finding', device=ONE, signal='link_width_half',
            mode='act', about='of 16'))
        self.assertNotIn('device_finding{device="%s' % TWO, self.written())

    def test_use(self):
        """The label provider is the name in Placement."""
        provider = f'host_accel_{ONE}'
        self.assertEqual(0, self.value('claims', device=ONE))
        server = self.boot()
        names = {p.name for p in self.host.inventory.shown.providers().values()}
        name, = [n for n in names if n.endswith(ONE)]
        self.assertEqual(1, self.value('claims', provider=name), provider)
        self.host.delete(server)
        self.assertEqual(0, self.value('claims', device=ONE))
        self.assertEqual(1, self.value('handovers_total', result='clean'))
        self.assertEqual(0, self.value('handovers_total', result='failed'))

    def test_not_cleaned(self):
        server = self.boot()
        self.written()
        self.host.kernel.set_fault(ONE, reset='EIO')
        self.host.delete(server)
        self.assertEqual(1, self.value('unreleased_claims', device=ONE))
        self.assertEqual(0, self.value('claims', device=ONE))
        self.assertEqual(1, self.value('handovers_total', result='failed'))

    def test_disabled(self):
        self.host.disable(ONE)
        self.assertEqual([1, 0], [self.value('device_disabled', device=d)
                                  for d in (ONE, TWO)])
        self.assertEqual(1, self.value('holds', device=ONE, kind='disabled'))
        self.assertNotIn('kind="gone"', self.written())
        self.host.enable()
        self.assertNotIn('kind="disabled"', self.written())
        # nova-compute's own word is not the operator's
        self.turn(**health.OF_LINK)
        self.assertEqual(0, self.value('device_disabled', device=ONE))

    def test_written_after_each_look(self):
        """And readable for node_exporter, in one step."""
        self.addCleanup(os.umask, os.umask(0o077))
        self.look()
        # a further look may be writing the next one
        self.wait_for(lambda: ['nova_accel.prom'] == [
            name for name in os.listdir(self.directory) if 'prom' in name])
        self.assertEqual(0o644, stat.S_IMODE(os.stat(self.file).st_mode))

    def test_cannot_be_written(self):
        """One line, and nothing else fails."""
        self.config.config(
            group='accel', metrics_file=f'{self.directory}/none/x.prom')
        for _ in range(3):
            self.turn(**HALF)
            self.settled(self.host.metrics)
        self.assertEqual(1, self.log.output.count(
            '[accel] metrics_file cannot be written'))
        self.assertEqual('quarantined', self.states()[ONE])

    @ddt.data('open', 'replace')
    def test_file_system_is_full_or_read_only(self, call):
        """The file of before stays, and the next one is written again."""
        before, calls = self.written(), getattr(os, call)
        for number in errno.ENOSPC, errno.EROFS:
            def fails(path, *args, number=number):
                if 'nova_accel.prom' in str(path):
                    raise OSError(number, os.strerror(number), path)
                return calls(path, *args)
            with mock.patch.object(os, call, fails):
                self.turn(**HALF)
                self.settled(self.host.metrics)
            self.assertIn(os.strerror(number), self.log.output)
            with open(self.file) as file:
                self.assertEqual(before, file.read())
            self.assertEqual(['nova_accel.prom'], [
                name for name in os.listdir(self.directory) if 'prom' in name])
        self.assertNotEqual(before, self.written())

    def test_off_writes_nothing(self):
        self.written()
        self.config.config(group='accel', metrics_file=None)
        before = os.stat(self.file).st_ino
        self.look()
        self.settled(self.host.metrics)
        self.assertEqual(before, os.stat(self.file).st_ino)


class ProgrammingTest(base.HostTestCase):
    """What is counted of programmings, and of the cache."""

    def test_programmings(self):
        path = os.path.join(self.directory, 'nova_accel.prom')
        self.config.config(group='accel', discovery_interval=3600)
        self.start_host({'address': A, 'programming_seconds': 0.2})

        def found():
            self.host.metrics.write(path)
            with open(path) as file:
                return {name: float(value) for name, value in (
                    line.rsplit(' ', 1) for line in file
                    if '_programm' in line or '_cache' in line)
                    if not name.startswith('#')}
        self.assertEqual({
            'nova_accel_programmings_total{result="programmed"}': 0,
            'nova_accel_programmings_total{result="failed"}': 0,
            'nova_accel_programming_seconds_total{}': 0,
            'nova_accel_programming_wait_seconds_total{}': 0}, found())
        image = base.asks(bitstream_id=self.host.upload(OTHER))
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.host.boot_that_fails(image, self.host.allocation(A))
        self.host.boot(image, self.host.allocation(A))
        after = found()
        self.assertEqual([1, 1], [
            after[f'nova_accel_programmings_total{{result="{result}"}}']
            for result in ('programmed', 'failed')])
        self.assertGreaterEqual(
            after['nova_accel_programming_seconds_total{}'], 0.2)
        self.assertGreater(after['nova_accel_cache_bytes{}'], 100)


class TextTest(testtools.TestCase):

    def text(self, **more):
        device = fpga(ONE, serial='a"b\\c\nd', regions=2)
        return metrics.text(metrics.Facts(
            {ONE: device}, {ONE: conditions.Condition(
                signals.State.OK, '', signals.State.OK)},
            {(ONE, 0): 'p0', (ONE, 1): 'p1'},
            offers.Offers({}, (), ()), {}, **more))

    def test_texts_of_devices(self):
        """A serial number is what a card tells."""
        self.assertIn(r'serial="a\"b\\c\nd"', self.text())

    def test_promtool_reads_it(self):
        promtool(self, 'check', 'metrics', input=self.text())

    def test_results(self):
        """Each result of a hand-over is a word of its own."""
        for result in (*values.ENDS, 'failed'):
            self.assertIn(f'result="{result}"', self.text())


class NoticesTestCase(MetricsTestCase):

    def notices(self):
        self.host.notices.run()
        return [(event, payload) for event, payload
                in self.host.cloud.read().get('notices', [])
                if event == notices.EVENT]


class NoticesTest(NoticesTestCase):

    def test_payload(self):
        server = self.boot()
        # its guest has it: what it says is not known any more
        self.look()
        self.settled(self.host.notices)
        self.turn(**WORN)
        self.settled(self.host.notices)
        (event, payload), = self.notices()
        self.assertEqual('accel.device.state', event)
        self.assertEqual({
            'device': ONE, 'serial': '', 'type': 'CARD', 'vendor': 'INTEL',
            'product': payload['product'], 'driver': 'pci',
            'providers': payload['providers'], 'state': 'suspect',
            'old_state': 'unknown', 'signals': ['link_width'],
            'reason': 'its PCIe link has 8 lanes of 16',
            'servers': [server]}, payload)
        self.assertTrue(payload['providers'][0].endswith(ONE))
        # nothing more while nothing changes
        self.look()
        self.settled(self.host.notices)
        self.assertEqual(1, len(self.notices()))
        self.turn()
        self.settled(self.host.notices)
        self.assertEqual(('unknown', 'suspect'), tuple(
            self.notices()[1][1][key] for key in ('state', 'old_state')))

    def test_server_comes_and_goes(self):
        """Between ok and unknown nothing is sent."""
        server = self.boot()
        self.look()
        self.host.delete(server)
        self.look()
        self.settled(self.host.notices)
        self.assertEqual([], self.notices())

    def test_bus_does_not_answer(self):
        notify, tried = self.host.cloud.notify, []

        def refuse(*args):
            tried.append(args)
            raise ConnectionError('no bus')
        self.host.cloud.notify = refuse
        for _ in range(3):
            self.turn(**HALF)
            self.settled(self.host.notices)
        self.assertEqual(1, self.log.output.count(
            'Notifications about devices are not sent'))
        self.assertGreater(len(tried), 1)
        self.host.cloud.notify = notify
        self.assertEqual(['quarantined'], [
            payload['state'] for _, payload in self.notices()])


class DoNotAnswerTest(NoticesTestCase):
    """A message bus and a directory that do not answer cost a thread each, and
    nothing waits for it."""

    def goes_on(self):
        """Looks, builds, reports and deletes, beside what hangs."""
        for address in ONE, TWO:
            server = self.boot(address=address)
            self.turn(address, **WORN)
            self.assertEqual('suspect', self.states()[address])
            self.host.report()
            self.turn(address)
            self.host.delete(server)
        for _ in range(5):
            self.look()
        ends = time.monotonic() + base.PATIENCE
        while self.followers() != 1:
            self.assertLess(time.monotonic(), ends, self.followers())
            time.sleep(0.02)

    def followers(self):
        """How many threads are at work for what follows a look."""
        return sum(thread.name == 'accel-_run'
                   for thread in threading.enumerate())

    def test_message_bus(self):
        self.settled(self.host.notices)
        answers, asked = threading.Event(), threading.Event()
        self.addCleanup(answers.set)
        notify = self.host.cloud.notify

        def hang(*args):
            asked.set()
            answers.wait()
            notify(*args)
        self.host.cloud.notify = hang
        self.turn(**HALF)
        self.assertTrue(asked.wait(base.PATIENCE))
        self.turn()
        self.goes_on()
        self.assertTrue(self.host.notices.background.runs)
        self.settled(self.host.metrics)
        self.assertIn('"suspect"', self.written())
        answers.set()
        self.settled(self.host.notices)
        self.assertEqual('quarantined', self.notices()[0][1]['state'])

    def test_directory(self):
        """A server of files is gone for a while: who opens a pipe to write
        waits for a reader, also in a thread of the operating system."""
        self.settled(self.host.metrics)
        pipe = os.path.join(self.directory, 'pipe')
        os.mkfifo(pipe)

        def returns():
            if os.path.exists(pipe):
                reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
                self.addCleanup(os.close, reader)
                os.unlink(pipe)
        self.addCleanup(returns)
        create = files.create

        def waits(*args):
            if os.path.exists(pipe):
                os.close(os.open(pipe, os.O_WRONLY))
            create(*args)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.files.create', waits))
        self.look()
        ends = time.monotonic() + base.PATIENCE
        while not self.host.metrics.background.runs:
            self.assertLess(time.monotonic(), ends)
        self.goes_on()
        self.settled(self.host.notices)
        self.assertTrue(self.host.metrics.background.runs)
        self.assertIn('suspect', [
            payload['state'] for _, payload in self.notices()])
        returns()
        self.settled(self.host.metrics)
        self.assertIn('nova_accel_device_info', self.written())


class CeilometerTest(NoticesTestCase):
    """The definitions that are shipped, on a notification as it is sent."""

    def setUp(self):
        super().setUp()
        self.server = self.boot()
        self.turn(**WORN)
        self.settled(self.host.notices)
        (event, payload), = self.notices()
        self.message = {
            'event_type': event, 'publisher_id': 'compute.compute1',
            # what virt.cloud adds
            'payload': {'host': 'compute1', **payload}, 'ctxt': {},
            'metadata': {'message_id': 'one', 'timestamp':
                         '2026-11-22T02:17:43+00:00'}}

    def test_paths(self):
        """Each is of a field that the notification has."""
        meter, *_ = ceilometer.read(ceilometer.METERS)['metric']
        event, *_ = ceilometer.read(ceilometer.EVENTS)
        for texts in str(meter), str(event):
            named = {*re.findall(r'payload\.([a-z_]+)', texts)}
            self.assertLessEqual(named, self.message['payload'].keys())
            self.assertGreater(len(named), 5)

    def test_resource_of_gnocchi(self):
        """It is of the meter; the page creates the same attributes."""
        for meter, resource, page in zip(
                ceilometer.read(ceilometer.METERS)['metric'],
                ceilometer.read(ceilometer.RESOURCES), PAGES, strict=True):
            self.assertEqual([meter['name']], list(resource['metrics']))
            self.assertEqual(
                {name: f'resource_metadata.{name}'
                 for name in resource['attributes']}, resource['attributes'])
            self.assertLessEqual(
                resource['attributes'].keys(), meter['metadata'].keys())
            with open(page, encoding='utf-8') as file:
                kind, created = re.search(
                    r'resource-type create (\S+) (.*?)\n\n', file.read(),
                    re.DOTALL).groups()
            self.assertEqual(resource['resource_type'], kind)
            self.assertEqual(list(resource['attributes']), re.findall(
                '-a ([a-z]+):string:false:', created))

    def test_ceilometer_takes_them(self):
        """By its own loaders, in the Python that it is installed in."""
        (sample,), event = ceilometer.by_ceilometer(self, self.message)
        self.assertEqual(
            ('accelerator.device.state.changes', 1, f'compute1_{ONE}'),
            tuple(sample[key] for key in ('name', 'volume', 'resource_id')))
        self.assertEqual(('suspect', 'ok', 'CARD'), tuple(
            sample['metadata'][key] for key in (
                'state', 'old_state', 'type')))
        self.assertTrue(sample['is_in_gnocchi'])
        self.assertEqual(
            # without those that are empty
            {'host': 'compute1', 'device': ONE, 'type': 'CARD',
             'state': 'suspect'}, sample['attributes'])
        self.assertEqual(
            (ONE, 'compute1', 'suspect', self.server, 'link_width'),
            tuple(event[key] for key in (
                'resource_id', 'host', 'state', 'server', 'signal')))


class RulesTest(testtools.TestCase):

    def test_promtool_takes_them(self):
        promtool(self, 'check', 'rules', RULES)

    def test_names(self):
        """Rules and dashboard name only metrics that are there."""
        for path in RULES, DASHBOARD:
            with open(path) as file:
                named = {*re.findall('nova_accel_([a-z_]+)[{ )]',
                                     file.read())}
            self.assertLessEqual(named, metrics.METRICS.keys(), path)
            self.assertGreater(len(named), 2)

    def test_expressions_of_the_dashboard(self):
        with open(DASHBOARD) as file:
            panels = json.load(file)['panels']
        rules = [{'record': f'x:{panel["id"]}', 'expr': target['expr'].replace(
            '$instance', '.*')} for panel in panels
            for target in panel['targets']]
        self.assertEqual(8, len(rules))
        path = os.path.join(self.useFixture(base.fixtures.TempDir()).path,
                            'rules.yaml')
        with open(path, 'w') as file:
            yaml.safe_dump({'groups': [{'name': 'x', 'rules': rules}]}, file)
        promtool(self, 'check', 'rules', path)


class PrometheusTest(MetricsTestCase):
    """The real programs, from the fault of a card to the alert."""

    def port(self):
        with socket.socket() as found:
            found.bind(('127.0.0.1', 0))
            return found.getsockname()[1]

    def program(self, *command):
        log = open(os.path.join(
            self.directory, os.path.basename(command[0])), 'wb')
        self.addCleanup(log.close)
        process = subprocess.Popen(command, stdout=log, stderr=log)
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.terminate)

    def ask(self, url):
        with contextlib.suppress(OSError):
            with http.urlopen(url, timeout=10) as answer:
                return json.load(answer)['data']
        return None

    def test_alert(self):
        ceilometer.needs(self, 'prometheus', 'prometheus-node-exporter')
        ports = exporter, prometheus = self.port(), self.port()
        files = os.path.join(self.directory, 'textfiles')
        os.mkdir(files)
        self.config.config(group='accel', metrics_file=os.path.join(
            files, 'nova_accel.prom'))
        with open(RULES) as file:
            rules = yaml.safe_load(file)
        for rule in rules['groups'][0]['rules']:
            rule['for'] = '0s'
        config = {
            'global': {'scrape_interval': '1s', 'evaluation_interval': '1s'},
            'rule_files': [os.path.join(self.directory, 'rules.yaml')],
            'scrape_configs': [{'job_name': 'node', 'static_configs': [
                {'targets': [f'127.0.0.1:{exporter}']}]}]}
        for name, found in ('rules', rules), ('prometheus', config):
            with open(os.path.join(
                    self.directory, f'{name}.yaml'), 'w') as file:
                yaml.safe_dump(found, file)
        self.look()
        self.program(
            'prometheus-node-exporter', '--collector.disable-defaults',
            '--collector.textfile', f'--collector.textfile.directory={files}',
            f'--web.listen-address=127.0.0.1:{ports[0]}')
        self.program(
            'prometheus', f'--web.listen-address=127.0.0.1:{prometheus}',
            f'--config.file={self.directory}/prometheus.yaml',
            f'--storage.tsdb.path={self.directory}/tsdb')
        api = f'http://127.0.0.1:{prometheus}/api/v1'

        def firing():
            return {(a['labels']['alertname'], a['labels'].get('device'))
                    for a in (self.ask(f'{api}/alerts') or {}).get('alerts', ())
                    if a['state'] == 'firing'}

        def wait(condition, what):
            ends = time.monotonic() + SECONDS
            while not condition():
                self.assertLess(time.monotonic(), ends, (what, firing()))
                time.sleep(0.2)
        wait(lambda: len((self.ask(
            f'{api}/query?query=nova_accel_device_info') or {}).get(
                'result', ())) == 2, 'two devices')
        self.assertEqual(set(), firing())
        self.turn(**HALF)
        wait(lambda: firing() == {('AcceleratorQuarantined', ONE)}, 'fires')
        # the operator knows
        self.host.disable(ONE)
        self.look()
        wait(lambda: firing() == set(), 'is silent')
        with self.host.inventory.health.drilled(TWO):
            self.look(**{ONE: {}})
            wait(lambda: ('AcceleratorDrill', TWO) in firing(), 'drill')
        self.look()
        wait(lambda: firing() == set(), 'is silent again')
