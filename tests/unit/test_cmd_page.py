# Licensed under the Apache License, Version 2.0. See LICENSE.
import collections
import datetime
from html import parser
import os
from unittest import mock

import fixtures
import testtools

from nova_accel.cmd import page
from nova_accel.cmd import tree
from nova_accel import naming
from tests.unit import commands

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


def cells(*providers, servers=None, functions=None):
    found = collections.defaultdict(list)
    for provider in providers:
        found[provider.host].append(provider)
    drawn = page.draw(found, servers or {}, functions or {}, NOW)
    return [(state, text.strip()) for state, text in Cells(drawn).found]


class PageTest(testtools.TestCase):

    def test_each_accelerator_is_a_cell(self):
        self.assertEqual(
            [('used', 'train')] * 3 + [('free', '')] * 4 + [('fenced', '')],
            cells(pool(held={'1': 3}, reserved=1), servers={'1': 'train'}))

    def test_function(self):
        self.assertEqual(
            [('used', '1 crypto'), ('free', 'zip')],
            cells(region(held={'1': 1}), region('b'),
                  functions={'a-region': 'crypto', 'b-region': 'zip'}))

    def test_fenced(self):
        fenced = PAC | {naming.FENCED}
        self.assertEqual(
            [('fenced', ''), ('used', '1')],
            cells(region(traits=fenced, reserved=1),
                  region('b', traits=fenced, reserved=1, held={'1': 1})))

    def test_suspect(self):
        """What is free of it; a server that has it has it."""
        self.assertEqual(
            [('used', '1')] + [('suspect', '')] * 6 + [('fenced', '')],
            cells(pool(traits=H100 | {naming.SUSPECT}, held={'1': 1},
                       reserved=1)))

    def test_reserved_while_in_use(self):
        """A host may reserve all of a provider that servers hold."""
        self.assertEqual(
            [('used', '1')] * 8, cells(pool(held={'1': 8}, reserved=8)))

    def test_names_of_users_are_text(self):
        drawn = page.draw(
            {'a': [region(held={'1': 1})]}, {'1': '<script>x</script>'}, {},
            NOW)
        self.assertNotIn('script', Cells(drawn).tags)
        self.assertIn('&lt;script&gt;', drawn)

    def test_sums(self):
        drawn = page.draw({'a': [pool(held={'1': 3}, reserved=1)],
                           'b': [pool('b')]}, {}, {}, NOW)
        self.assertIn('<td>GPU NVIDIA H100<td class="n">3<td class="n">12'
                      '<td class="n">1', drawn)

    def test_no_hosts(self):
        self.assertEqual([], Cells(page.draw({}, {}, {}, NOW)).found)


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
            self.assertEqual(8, len(Cells(file.read()).found))
        self.assertEqual(['page.html'], os.listdir(self.directory))

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
