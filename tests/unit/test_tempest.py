# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What make tempest decides without a cloud."""

import pathlib
from unittest import mock

import ddt
import fixtures
from lxml import etree
from stestr.repository import file
import testtools
from testtools import content

from tests import outcomes
from tests.lab import processes
from tests.nova import suites as lists
from tests.tempest import cyborg, domains, hosts, leftovers, suites, verdict

GUEST = '''<domain><name>one</name><devices>
<disk/>
<hostdev mode="subsystem" type="pci" managed="yes"><source>
<address domain="0x0000" bus="0x1a" slot="0x00" function="0x4"/>
</source></hostdev>
<hostdev mode="subsystem" type="mdev"><source>
<address uuid="f7df405c-bd7a-cf72-22f1-44b0b93acd18"/></source>
<address type="pci" slot="0x05"/></hostdev>
</devices></domain>'''


class DomainsTest(testtools.TestCase):

    def test_hidden_and_shown(self):
        hidden = domains.hide(GUEST)
        root = etree.fromstring(hidden)
        self.assertEqual(['disk'], [e.tag for e in root.find('devices')])
        shown = etree.fromstring(domains.show(hidden))
        there = shown.findall('./devices/hostdev')
        self.assertEqual(
            ['0000:1a:00.4', 'f7df405c-bd7a-cf72-22f1-44b0b93acd18'],
            list(map(domains.key_of, there)))
        # as libvirt completes them
        self.assertEqual(['0x1e', '0x05'], [
            hostdev.find('./address').get('slot') for hostdev in there])
        self.assertEqual([], shown.findall('./metadata/*'))

    def test_hidden_again(self):
        """Nova defines again what it has read."""
        shown = domains.show(domains.hide(GUEST))
        self.assertEqual(2, len(etree.fromstring(domains.show(
            domains.hide(shown))).findall('.//hostdev')))

    def test_without_devices(self):
        self.assertEqual('<domain/>', domains.hide('<domain/>'))
        self.assertEqual('<domain/>', domains.show('<domain/>'))


def result(status, text='Traceback\n  File\nKeyError: 3\n'):
    return {'status': status, 'details': {
        'traceback-1': content.text_content(text)} if status == 'fail' else {}}


@ddt.ddt
class VerdictTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        path = pathlib.Path(self.useFixture(fixtures.TempDir()).path, 'list')
        path.write_text('# a comment\nlive,compute a.test_two$ Nova does so.\n')
        self.useFixture(fixtures.MockPatchObject(suites, 'PERMITTED', path))

    @ddt.data(
        ({'a.test_one': 'success', 'a.test_two': 'fail'}, []),
        ({'a.test_one': 'skip', 'a.test_two': 'fail'},
         ['test_one runs no test']),
        ({'a.test_one': 'fail', 'a.test_two': 'fail'},
         ['a.test_one failed (fail): KeyError: 3']),
        ({'a.test_one': 'inprogress', 'a.test_two': 'fail'},
         ['a.test_one failed (inprogress): ?']),
        ({'a.test_one': 'success', 'a.test_two': 'success'},
         ['a.test_two passes, and permitted.txt has it']),
        ({'a.test_one': 'success', 'a.test_two': 'skip'}, []),
        ({'a.test_one': 'success'},
         ['a.test_two$ of permitted.txt finds no test']),
        ({'a.test_two': 'fail'}, ['test_one runs no test']))
    @ddt.unpack
    def test_whole(self, ended, found):
        self.assertEqual(found, self._faults(ended, ['test_one']))

    def test_part(self):
        """What the part has not is not missed."""
        self.assertEqual([], self._faults(
            {'a.test_one': 'success'}, ['test_one'], whole=False))

    def test_of_another_suite(self):
        self.assertEqual(
            ['a.test_two failed (fail): KeyError: 3'], self._faults(
                {'a.test_two': 'fail'}, ['test_two'], suite='vgpu'))

    @staticmethod
    def _faults(ended, wanted, whole=True, suite='live'):
        return verdict.faults(suite, {test: result(status) for test, status
                                      in ended.items()}, wanted, whole)


class OutcomesTest(testtools.TestCase):

    def test_no_run(self):
        """stestr could not import the tests."""
        directory = self.useFixture(fixtures.TempDir()).path
        file.RepositoryFactory().initialise(directory)
        self.assertEqual({}, outcomes.of_last_run(directory))


class ListsTest(testtools.TestCase):

    def test_each_suite_has_a_part(self):
        for name, suite in suites.SUITES.items():
            self.assertNotEqual(suite.in_lab,
                                bool(lists.part(name, suites.PART)))
            # a suite that is unknown raises
            lists.exclusions(name, suites.PERMITTED, suites.SUITES)
            self.assertLessEqual(set(suite.flavors), suites.FLAVORS.keys())

    def test_boot_sector(self):
        self.assertEqual((512, b'\x55\xaa'), (
            len(suites.boot_sector()), suites.boot_sector()[510:]))


class LeftoversTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        top = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        for name in ('LOG', 'PIDS'):
            self.useFixture(fixtures.MockPatchObject(
                processes, name, top / name))
            (top / name).mkdir()
        self.log = processes.LOG / 'nova-compute-a.log'
        self.log.write_text('x ERROR nova_accel.attach before\n')
        (processes.PIDS / 'nova-compute-a').touch()
        self.sizes = iter(())
        self.useFixture(fixtures.MockPatchObject(
            leftovers, 'size', lambda name: next(self.sizes)))

    def _since(self, *sizes):
        self.sizes = iter([dict(zip(leftovers.GROWTH, s, strict=True))
                           if s else {} for s in sizes])
        marks = leftovers.Marks()
        self.log.open('a').write(
            'x ERROR nova_accel.attach it does not answer\n'
            'x ERROR nova.compute.manager   File "/nova_accel/a.py", line 3\n'
            'x WARNING nova_accel.attach of a card\n'
            'x ERROR nova.compute.manager of Nova\n')
        return marks.since()[0]

    def test_errors(self):
        found = self._since((200, 40, 20), (210, 90, 22))
        self.assertEqual(2, len(found))
        self.assertIn('it does not answer', found[0])
        self.assertIn('File "/nova_accel/a.py"', found[1])

    def test_growth(self):
        found = self._since((200, 40, 20), (210, 400, 22))
        self.assertEqual('nova-compute-a has 400 threads, and had 40',
                         found[0])

    def test_process_ended(self):
        self.assertEqual('nova-compute-a does not run',
                         self._since((200, 40, 20), None)[0])


class CyborgTest(testtools.TestCase):
    """Accelerator requests are claims."""

    def _ask(self, query, *claims):
        with mock.patch.object(hosts, 'claims', side_effect=(claims, ())):
            return cyborg.answer('GET', '/accelerator_requests', query,
                                 b'')[1]['arqs']

    def test_requests(self):
        pci = {'Server': 'one', 'Handle': '0000:1a:00.4', 'State': 'Bound'}
        claims = (pci, {**pci, 'Server': None}, {**pci, 'Handle': None},
                  {**pci, 'Server': 'two', 'State': 'Provisioning'})
        found, other = self._ask({}, *claims)
        self.assertEqual(
            ('one', 'PCI', {'domain': '0000', 'bus': '1a', 'device': '00',
                            'function': '4'}),
            (found['instance_uuid'], found['attach_handle_type'],
             found['attach_handle_info']))
        self.assertEqual('two', other['instance_uuid'])
        self.assertEqual([found], self._ask({'instance': ['one']}, *claims))
        self.assertEqual([], self._ask(
            {'instance': ['two'], 'bind_state': ['resolved']}, *claims))

    def test_unknown(self):
        self.assertEqual('404 Not Found', cyborg.answer(
            'DELETE', '/accelerator_requests', {}, b'')[0])
