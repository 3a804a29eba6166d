# Licensed under the Apache License, Version 2.0. See LICENSE.
import collections
import datetime
from html import parser
import json
import os
import pathlib
import re
from unittest import mock

import fixtures
import testtools

from nova_accel.cmd import fits
from nova_accel.cmd import page
from nova_accel.cmd import page_html
from nova_accel.cmd import tree
from nova_accel.health import signals
from nova_accel.health import watch
from nova_accel.inventory import conditions
from nova_accel.inventory import offers
from nova_accel import naming
from nova_accel.notify import metrics as host_metrics
from tests import pages_in_browser
from tests.unit import commands
from tests.unit import inventory_host

NOW = datetime.datetime(2026, 11, 24, 7, 0, tzinfo=datetime.timezone.utc)
H100 = frozenset(('CUSTOM_GPU_NVIDIA', 'CUSTOM_GPU_NVIDIA_H100'))
PAC = frozenset(('CUSTOM_FPGA_INTEL', 'CUSTOM_FPGA_INTEL_PAC_ARRIA10'))


def pool(host='a', **fields):
    return tree.Provider(**{
        'host': host, 'uuid': f'{host}-pool', 'name': f'{host}_accel_pool',
        'parent': host, 'depth': 1, 'total': 8, 'traits': H100,
        'resource_class': 'CUSTOM_ACCELERATOR_GPU', **fields})


def region(host='a', **fields):
    return tree.Provider(**{
        'host': host, 'uuid': f'{host}-region', 'name': f'{host}_accel_r',
        'parent': host, 'depth': 1, 'total': 1, 'traits': PAC,
        'resource_class': 'CUSTOM_ACCELERATOR_FPGA', **fields})


class Cells(parser.HTMLParser):
    """State and text of each cell, without the key above them."""

    def __init__(self, text):
        super().__init__()
        self.found, self.inside, self.tags = [], '', []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        if tag == 'span' and 'title' in given:
            self.inside = given['class'].split()[-1]
            self.found.append((self.inside, ''))

    def handle_endtag(self, tag):
        if tag == 'span':
            self.inside = ''

    def handle_data(self, data):
        if self.inside:
            state, text = self.found[-1]
            self.found[-1] = state, text + data


def draw(found, **more):
    return page_html.draw(page_html.Facts(found, NOW, **more))


def cells(*providers, **more):
    found = collections.defaultdict(list)
    for provider in providers:
        found[provider.host].append(provider)
    return [(state, ' '.join(text.split()))
            for state, text in Cells(draw(found, **more)).found]


class DrawTest(testtools.TestCase):

    def test_each_server_and_what_is_left(self):
        self.assertEqual(
            [('used', 'train × 3'), ('used', '2'), ('free', '3 free'),
             ('fenced', 'unavailable')],
            cells(pool(held={'1': 3, '2': 1}, reserved=1),
                  servers={'1': 'train'}))

    def test_server_without_a_name(self):
        self.assertEqual([('used', '1'), ('free', '7 free')],
                         cells(pool(held={'1': 1}), servers={'1': ''}))

    def test_function(self):
        self.assertEqual(
            [('used', '1 crypto'), ('free', 'free zip')],
            cells(region(held={'1': 1}), region('b'),
                  functions={'a-region': 'crypto', 'b-region': 'zip'}))

    def test_several_of_a_product(self):
        """Each with its own part of the name."""
        self.assertEqual(
            [('free', 'free r'), ('used', '1 s')],
            cells(region(), region(name='a_accel_s', held={'1': 1})))

    def test_fenced(self):
        fenced = PAC | {naming.FENCED}
        self.assertEqual(
            [('fenced', 'unavailable'), ('used', '1')],
            cells(region(traits=fenced, reserved=1),
                  region('b', traits=fenced, reserved=1, held={'1': 1})))

    def test_suspect(self):
        """What is free of it; a server that has it has it."""
        self.assertEqual(
            [('used', '1'), ('suspect', '6 degraded'),
             ('fenced', 'unavailable')],
            cells(pool(traits=H100 | {naming.SUSPECT}, held={'1': 1},
                       reserved=1)))

    def test_reserved_while_in_use(self):
        """A host may reserve all of a provider that servers hold."""
        self.assertEqual(
            [('used', '1 × 8')], cells(pool(held={'1': 8}, reserved=8)))

    def test_texts_of_users_are_text(self):
        drawn = draw({'a': [region(held={'1': 1})]},
                     servers={'1': '<script>x</script>\u2066'},
                     fits=[('<script>', 1, '<script>')])
        self.assertNotIn('script', Cells(drawn).tags)
        self.assertIn('&lt;script&gt;x', drawn)
        self.assertNotIn('\u2066', drawn)

    def test_sums(self):
        drawn = draw({'a': [pool(held={'1': 3}, reserved=1)],
                      'b': [pool('b', traits=H100 | {naming.SUSPECT})]})
        self.assertIn('<td>GPU NVIDIA H100<td class="n">3<td class="n">4'
                      '<td class="n">8<td class="n">1', drawn)

    def test_needs_attention(self):
        """First of all, with the reasons; else a word that says so."""
        drawn = draw(
            {'a': [pool(held={'1': 3}, reserved=1)], 'b': [pool('b')],
             'c': [pool('c', traits=H100 | {naming.SUSPECT})]},
            findings=[('a_accel_pool', 'disabled'), ('d_accel_x', 'failed'),
                      ('a_accel_pool', 'suspect: x')])
        self.assertEqual(
            ['<td><a href="#h0">a_accel_pool</a><td>1 unavailable'
             '<td>disabled<br>suspect: x',
             '<td><a href="#h2">c_accel_pool</a><td>8 degraded<td>',
             '<td>d_accel_x<td><td>failed'],
            re.findall('<tr>(.*)</tr>', drawn)[1:4])
        self.assertLess(drawn.index('<h2>Needs attention'),
                        drawn.index('<h2>Legend'))
        self.assertIn('<h2>Needs attention</h2>\n<p>Nothing.</p>',
                      draw({'b': [pool('b')]}))

    def test_stale(self):
        drawn = draw({}, every=60)
        self.assertIn('<meta http-equiv="refresh" content="60">', drawn)
        self.assertIn('stale after 2026-11-24 07:02 UTC', drawn)

    def test_less_than_is_allocated(self):
        for traits in H100, H100 | {naming.FENCED}, H100 | {naming.SUSPECT}:
            self.assertEqual([('used', '1 × 9')], cells(
                pool(held={'1': 9}, traits=traits, reserved=8)))

    def test_no_hosts(self):
        self.assertEqual([], Cells(draw({})).found)

    def test_tiles(self):
        """Of more hosts than fit a screen, each leads to its row."""
        hosts = {f'h{n}': [pool(f'h{n}')] for n in range(9)}
        hosts['h1'][0].held['1'] = 8
        hosts['h2'][0].reserved = 1
        hosts['h3'] = []
        drawn = draw(hosts)
        self.assertIn('<a href="#h1" title="h1: 8 in use" aria-label="h1" '
                      'style="--x:0;--s:0;--u:100"></a>', drawn)
        # one of eight is seen as if they were two
        self.assertIn('title="h2: 7 free, 1 unavailable" aria-label="h2" '
                      'style="--x:20;--s:20;--u:20"></a>', drawn)
        self.assertEqual({f'id="h{n}"' for n in range(9)},
                         set(re.findall('id="h.+?"', drawn)))
        del hosts['h3']
        self.assertNotIn('<div class="map">', draw(hosts))

    def test_domains(self):
        """Of each level, also of few hosts; one is in no rack."""
        drawn = draw({name: [pool(name, held={'1': held})] for name, held in (
            ('a', 8), ('b', 0), ('c', 3))}, domains={
                'a': {'rail': 'RAIL_1', 'rack': 'RACK_<1>'},
                'b': {'rail': 'RAIL_1'}, 'c': {'rack': 'RACK_<1>'},
                'gone': {'row': 'ROW_1'}})
        self.assertEqual([
            ('Hosts by rack', [
                ('RACK_&lt;1&gt;: 2 hosts, 11 in use, 5 free', ['#h0', '#h2']),
                ('without: 1 host, 8 free', ['#h1'])]),
            ('Hosts by rail', [
                ('RAIL_1: 2 hosts, 8 in use, 8 free', ['#h0', '#h1']),
                ('without: 1 host, 3 in use, 5 free', ['#h2'])]),
        ], [(heading, [
            (said, re.findall('href="(.*?)"', tiles)) for said, tiles
            in re.findall('<p class="list">(.*?)</p>(.*?)</div>', text, re.S)])
            for heading, text in re.findall(
                '<h2>(Hosts by .*?)</h2>(.*?)(?=<h2>)', drawn, re.S)])

    def test_what_fits(self):
        self.assertIn('<tr><td>gpu8<td>2<td>8 for each</tr>', draw(
            {}, fits=[('gpu8', 2, '8 for each')]))
        self.assertNotIn('What fits', draw({}))

    def test_handovers(self):
        """Thirty days, the last one is the last that has any."""
        drawn = draw({}, handovers=[
            ('2026-09-01', True), ('2026-11-01', False),
            *[('2026-11-02', False)] * 3, ('2026-11-02', True)])
        days = re.findall('title="(.*?)"><i class="fenced" style="height:(.*?)'
                          '%"></i><i class="used" style="height:(.*?)%"',
                          drawn)
        self.assertEqual(30, len(days))
        self.assertEqual(('2026-10-04: 0 clean, 0 failed', '0.0', '0.0'),
                         days[0])
        self.assertEqual([
            ('2026-11-01: 1 clean, 0 failed', '0.0', '25.0'),
            ('2026-11-02: 3 clean, 1 failed', '25.0', '75.0')], days[-2:])
        self.assertNotIn('Hand-overs', draw({}))

    def test_in_a_browser(self):
        """It fits screens, and is dark in the dark."""
        browser = pages_in_browser.find()
        if not browser:
            self.skipTest('no browser is installed: see bindep.txt')
        folder = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        hosts = {name: [pool(name, held={'1': 3}), region(
            name, held={'2': 1})] for name in (
                f'compute{n}.dc1.a-name-that-is-long.example' for n
                in range(12))}
        (folder / 'page.html').write_text(draw(
            hosts, servers={'1': 'a-server-with-a-long-name' * 3},
            fits=[('gpu8', 2, f'8 CUSTOM_ACCELERATOR_{"GPU_" * 9}')],
            handovers=[('2026-11-02', True)], domains={
                name: {'rack': f'CUSTOM_NEAR_RACK_{"LONG_" * 20}'}
                for name in hosts}))
        for dark in False, True:
            self.assertEqual([], pages_in_browser.look(
                folder, ['page.html'], browser, dark))


class FileTest(commands.CommandTestCase):

    def setUp(self):
        super().setUp()
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.useFixture(fixtures.MockPatchObject(page.Page, 'cloud'))
        self.useFixture(fixtures.MockPatchObject(
            tree, 'providers', return_value={'a': [pool()]}))
        self.useFixture(fixtures.MockPatchObject(
            tree, 'server_names', return_value={}))

    def test_written(self):
        path = os.path.join(self.directory, 'page.html')
        done = commands.run('page', path, page=page.Page)
        self.assertEqual((0, f'{path}: 1 host.\n'),
                         (done.returncode, done.stdout))
        with open(path) as file:
            self.assertEqual([('free', '8 free ')], Cells(file.read()).found)
        self.assertEqual(['page.html'], os.listdir(self.directory))

    def test_records_and_what_fits(self):
        record = os.path.join(self.directory, 'a.json')
        with open(record, 'w') as file:
            json.dump([{
                'Time': '2026-11-02T10:00:00+00:00', 'Device': 'd',
                'Serial': '', 'Handle': 'd', 'Server': 's', 'Since': '',
                'Result': result} for result in ('clean', 'EIO')], file)
        path = os.path.join(self.directory, 'page.html')
        with mock.patch.object(fits, 'rows', return_value=[
                ('gpu8', fits.ALL, 2, 'room')]):
            done = commands.run('page', path, '--fits', '--journal', record,
                                page=page.Page)
        self.assertEqual((0, ''), (done.returncode, done.stderr))
        with open(path) as file:
            text = file.read()
        self.assertIn('<td>gpu8<td>2<td>room', text)
        self.assertIn('2026-11-02: 1 clean, 1 failed', text)

    def test_metrics(self):
        """As nova-compute writes them, with what devices tell of themselves."""
        metrics = os.path.join(self.directory, 'a.prom')
        device = inventory_host.fpga('0000:02:00.0')
        finding = watch.Finding(
            'card_failed', 'a "b" <c>\n\\n\rd', 1, signals.State.SUSPECT, False)
        with open(metrics, 'w') as file:
            file.write(host_metrics.text(host_metrics.Facts(
                {device.address: device},
                {device.address: conditions.Condition(
                    signals.State.SUSPECT, 'x', signals.State.OK,
                    (finding,))},
                {(device.address, None): 'a_accel_x'},
                offers.Offers({}, (), ()), {})))
        path = os.path.join(self.directory, 'page.html')
        done = commands.run('page', path, '--metrics', metrics,
                            page=page.Page)
        self.assertEqual((0, ''), (done.returncode, done.stderr))
        with open(path, newline='') as file:
            self.assertIn(
                '<tr><td>a_accel_x<td><td>suspect: card_failed, a &quot;b'
                r'&quot; &lt;c&gt;\n\n\rd (observed only)</tr>', file.read())
        done = commands.run('page', path, '--metrics', f'{metrics}.none',
                            page=page.Page)
        self.assertEqual(1, done.returncode)
        self.assertIn('cannot be read', done.stderr)

    def test_holds(self):
        """Why a device is withheld, and who lifts that; of an unknown kind,
        as of a later release, its name."""
        metrics = os.path.join(self.directory, 'a.prom')
        with open(metrics, 'w') as file:
            for kind in 'disabled', 'odd':
                file.write(f'nova_accel_holds{{device="d",region="",provider='
                           f'"a_accel_pool",kind="{kind}"}} 1\n')
        path = os.path.join(self.directory, 'page.html')
        commands.run('page', path, '--metrics', metrics, page=page.Page)
        with open(path) as file:
            self.assertIn('<td>disabled; lifted by nova-accel enable<br>odd',
                          file.read())

    def test_projects(self):
        """Of all hosts together; what none holds is idle or withheld."""
        names = []
        for host in 'a', 'b':
            names += ['--metrics', os.path.join(self.directory, f'{host}.prom')]
            with open(names[-1], 'w') as file:
                for project, state, kind, number in (
                        ('p', 'delivered', '', 4), ('p', 'held', '', 4),
                        ('p', 'healthy', '', 3), ('', 'delivered', '', 3),
                        ('', 'healthy', '', 3), ('', 'idle', '', 1),
                        ('', 'withheld', 'disabled', 1),
                        ('', 'withheld', 'cleaning', 1), ('', 'idle', '', 'x')):
                    file.write(
                        f'nova_accel_devices{{project="{project}",type="GPU",'
                        f'product="H<200>",state="{state}",kind="{kind}"}} '
                        f'{number}\n')
        path = os.path.join(self.directory, 'page.html')
        done = commands.run('page', path, *names, page=page.Page)
        self.assertEqual((0, ''), (done.returncode, done.stderr))
        with open(path) as file:
            text = file.read()
        self.assertIn('<td>(none)<td>GPU H&lt;200&gt;<td>6<td>6<td>0<td>2<td>'
                      '2 cleaning, 2 disabled</tr>', text)
        self.assertIn('<td>p<td>GPU H&lt;200&gt;<td>8<td>6<td>8<td>0<td></tr>',
                      text)

    def test_hold_of_a_device_without_a_provider(self):
        """Its address and its host say which it is."""
        metrics = os.path.join(self.directory, 'a.prom')
        with open(metrics, 'w') as file:
            file.write('nova_accel_holds{device="0000:02:00.0",region="",'
                       'provider="",kind="odd"} 1\n')
        path = os.path.join(self.directory, 'page.html')
        commands.run('page', path, '--metrics', metrics, page=page.Page)
        with open(path) as file:
            self.assertIn('<td>0000:02:00.0 in a.prom<td><td>odd', file.read())

    def test_record_of_something_else(self):
        path = os.path.join(self.directory, 'page.html')
        done = commands.run('page', path, '--journal', __file__,
                            page=page.Page)
        self.assertEqual(1, done.returncode)
        self.assertIn('which is not what nova-accel handovers -f json writes',
                      done.stderr)
        self.assertEqual([], os.listdir(self.directory))

    def test_record_with_another_time(self):
        record = os.path.join(self.directory, 'a.json')
        with open(record, 'w') as file:
            json.dump([{
                'Time': time, 'Device': 'd', 'Serial': '',
                'Handle': 'd', 'Server': 's', 'Since': '',
                'Result': 'clean'} for time in ('yesterday', '0001-01-01')],
                file)
        done = commands.run('page', os.path.join(self.directory, 'page.html'),
                            '--journal', record, page=page.Page)
        self.assertEqual(0, done.returncode)
        self.assertIn("where 'yesterday', '0001-01-01' is not the time of a "
                      'hand-over: 2 of them are left out.', done.stderr)

    def test_cannot_be_written(self):
        path = os.path.join(self.directory, 'none', 'page.html')
        done = commands.run('page', path, page=page.Page)
        self.assertEqual(
            (1, f'The page cannot be written to {path}: No such file or '
                f'directory: name another file.\n'),
            (done.returncode, done.stderr))

    def test_old_page_stays(self):
        """A file that is shown meanwhile is never half written."""
        path = os.path.join(self.directory, 'page.html')
        with open(path, 'w') as file:
            file.write('old')
        with mock.patch('os.replace', side_effect=OSError(28, 'No space')):
            done = commands.run('page', path, page=page.Page)
        self.assertEqual(1, done.returncode)
        with open(path) as file:
            self.assertEqual('old', file.read())
        self.assertEqual(['page.html'], os.listdir(self.directory))
