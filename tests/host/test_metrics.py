# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the operator's monitoring reads: metrics, alerts, notifications.

Where Debian's packages prometheus and prometheus-node-exporter are installed,
their programs read what nova_accel writes.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import time
from urllib import request as http

import testtools
import yaml

from nova_accel.attach import metrics
from nova_accel.inventory import conditions
from nova_accel.health import signals
from nova_accel import model
from tests.host import base
from tests.host import test_health
from tests.host.test_health import HALF, ONE, TWO, WORN
from tests.unit.inventory_host import fpga

ETC = os.path.join(os.path.dirname(__file__), '../../etc/nova_accel')
RULES = os.path.join(ETC, 'prometheus/nova_accel.rules.yaml')
DASHBOARD = os.path.join(ETC, 'grafana/nova_accel.json')
#: seconds in which real programs have read a file that has just been written
SECONDS = 60


def needs(test, *programs):
    for program in programs:
        if not shutil.which(program):
            test.skipTest(f'{program} is not installed: see bindep.txt')


def promtool(test, *arguments, **more):
    needs(test, 'promtool')
    done = subprocess.run(['promtool', *arguments], capture_output=True,
                          text=True, timeout=60, **more)
    test.assertEqual((0, ''), (done.returncode, done.stderr), done.stdout)


class MetricsTestCase(test_health.HealthTestCase):

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
        while part.follower.runs:
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
        names = {p.name for p in self.host.inventory.providers().values()}
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
        self.host.enable()
        # nova-compute's own word is not the operator's
        self.turn(**test_health.OF_LINK)
        self.assertEqual(0, self.value('device_disabled', device=ONE))

    def wait(self, condition):
        ends = time.monotonic() + base.PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), ends)
            time.sleep(0.02)

    def test_written_after_each_look(self):
        """And readable for node_exporter, in one step."""
        self.addCleanup(os.umask, os.umask(0o077))
        self.look()
        self.wait(lambda: os.path.exists(self.file))
        self.assertEqual(0o644, stat.S_IMODE(os.stat(self.file).st_mode))
        self.assertEqual(['nova_accel.prom'], [
            name for name in os.listdir(self.directory) if 'prom' in name])

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

    def test_off_writes_nothing(self):
        self.written()
        self.config.config(group='accel', metrics_file=None)
        before = os.stat(self.file).st_ino
        self.look()
        self.settled(self.host.metrics)
        self.assertEqual(before, os.stat(self.file).st_ino)


class TextTest(testtools.TestCase):

    def text(self, **more):
        device = fpga(ONE, serial='a"b\\c\nd', regions=2)
        return metrics.text(metrics.Facts(
            {ONE: device}, {ONE: conditions.Condition(
                signals.State.OK, '', signals.State.OK)},
            {(ONE, 0): 'p0', (ONE, 1): 'p1'}, [], {}, **more))

    def test_texts_of_devices(self):
        """A serial number is what a card tells."""
        self.assertIn(r'serial="a\"b\\c\nd"', self.text())

    def test_promtool_reads_it(self):
        promtool(self, 'check', 'metrics', input=self.text())

    def test_results(self):
        """Each result of a hand-over is a word of its own."""
        for result in (*model.ENDS, 'failed'):
            self.assertIn(f'result="{result}"', self.text())


class NoticesTest(MetricsTestCase):

    def notices(self):
        self.host.notices.run()
        return self.host.cloud.read().get('notices', [])

    def test_payload(self):
        server = self.boot()
        self.turn(**WORN)
        self.settled(self.host.notices)
        (event, payload), = self.notices()
        self.assertEqual('accel.device.state', event)
        self.assertEqual({
            'device': ONE, 'serial': '', 'type': 'CARD', 'vendor': 'INTEL',
            'product': payload['product'], 'driver': 'pci',
            'providers': payload['providers'], 'state': 'suspect',
            'old_state': 'ok', 'signals': ['link_width'],
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
        self.assertEqual(7, len(rules))
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
        needs(self, 'prometheus', 'prometheus-node-exporter')
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
