# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What commands read of the providers of hosts, from Placement itself."""

import logging
import re
import threading
from unittest import mock

import fixtures
from keystoneauth1 import adapter as ks_adapter
from keystoneauth1 import fixture as keystone
import requests
import requests_mock
from requests_mock.contrib import fixture as mocker
import testtools

from nova_accel.cmd import cloud
from nova_accel.cmd import providers
from nova_accel import exception
from tests.unit import answers
from tests.unit import commands
from tests.unit import placement

GPU = 'CUSTOM_ACCELERATOR_GPU'
OWNER = 'OWNER_CYBORG'
SERVER = '5e5e5e5e-1111-4222-8333-444444444444'
CARD = 'compute1_accel_0000:3b:00.0'


class ProvidersTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        # of Placement
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)
        self.services = self.useFixture(placement.Services())
        # a name that comes before that of the node itself
        self.other = self.services.provider('compute2')
        self.root = self.services.provider('compute1', inventory={'VCPU': 8})
        self.services.provider('a', self.other)
        self.card = self.services.provider(
            CARD, self.root, {GPU: 2}, {OWNER, 'CUSTOM_RACK_7'})
        self.cloud = cloud.Cloud()


class RefusalTest(ProvidersTestCase):

    def test_class_that_nothing_has(self):
        """What Placement says of the request, without the request itself."""
        error = self.assertRaises(
            exception.InvalidRequest, self.cloud.get, 'placement',
            '/allocation_candidates?resources=CUSTOM_ACCELERATOR_NPU:1',
            what='allocation candidates')
        self.assertEqual(
            'Placement was asked for allocation candidates, and it refused '
            '(Invalid resource class in resources parameter: No such resource '
            'class CUSTOM_ACCELERATOR_NPU): correct the request.', str(error))


class KeystoneTest(testtools.TestCase):
    """Keystone refuses, or is not there; the operator reads one line."""

    URL = 'http://keystone.example:5000/v3'

    def setUp(self):
        super().setUp()
        for name, value in (
                ('AUTH_URL', self.URL), ('USERNAME', 'admin'),
                ('PASSWORD', 'secret'), ('PROJECT_NAME', 'admin'),
                ('USER_DOMAIN_NAME', 'd'), ('PROJECT_DOMAIN_NAME', 'd'),
                ('CLIENT_CONFIG_FILE', '/nonexistent')):
            self.useFixture(fixtures.EnvironmentVariable(f'OS_{name}', value))
        self.http = self.useFixture(mocker.Fixture())
        self.http.get(self.URL, json={
            'version': keystone.V3Discovery(self.URL)})

    def line(self, *words):
        result = commands.run('tree')
        self.assertEqual((1, ''), (result.returncode, result.stdout))
        line, = result.stderr.splitlines()
        for word in words:
            self.assertIn(word, line)
        return line

    def test_wrong_password(self):
        self.http.post(f'{self.URL}/auth/tokens', status_code=401)
        self.assertNotIn('administrator', self.line(
            'Keystone rejects the credentials',
            'correct OS_USERNAME and OS_PASSWORD, or clouds.yaml.'))

    def test_unreachable(self):
        for path in ('/auth/tokens', ''):
            self.http.register_uri(
                requests_mock.ANY, f'{self.URL}{path}',
                exc=requests.exceptions.ConnectionError(
                    "HTTPConnectionPool(host='keystone.example')"))
            self.assertNotIn('HTTPConnectionPool', self.line(
                f'Keystone at {self.URL}', ' cannot be reached: correct '
                'OS_AUTH_URL'))

    def test_no_keystone(self):
        """Something else answers there."""
        self.http.get(requests_mock.ANY, status_code=404)
        self.useFixture(fixtures.EnvironmentVariable(
            'OS_AUTH_URL', 'http://keystone.example'))
        self.line('Keystone cannot be reached: correct OS_AUTH_URL')

    def test_answers_in_html(self):
        """A proxy in front of it answers 200, at once or with the token."""
        for content in '<html>', '{}', '[]', '5', '{"token": 5}', 'null':
            self.http.post(f'{self.URL}/auth/tokens', text=content,
                           headers={'X-Subject-Token': 'x'})
            self.line('Placement was asked for')
        for content in '<html>', '{}', '[]', '5', 'null':
            self.http.get(self.URL, text=content)
            self.line('Placement was asked for')


class AnswerTest(ProvidersTestCase):

    def test_answer_without_what_was_asked_for(self):
        self.services.answer('/flavors/gpu', {'of': 'a proxy'})
        error = self.assertRaises(exception.ServiceUnavailable,
                                  self.cloud.flavor, 'gpu')
        self.assertIn("no response came ('flavor' is missing or malformed)",
                      str(error))

    def test_flavor_without_extra_specs(self):
        self.services.answer('/flavors/gpu', {'flavor': {
            'name': 'gpu', 'ram': 1, 'vcpus': 1, 'disk': 1, 'swap': '',
            'OS-FLV-EXT-DATA:ephemeral': 0}})
        error = self.assertRaises(exception.ConfigurationError,
                                  self.cloud.flavor, 'gpu')
        self.assertIn('those of an administrator', str(error))


class NotTheirsTest(ProvidersTestCase):
    """An answer of 200 that is not of the service is handled as a 503."""

    #: what a path has -> a part of its answer
    PARTS = {'allocation_candidates': 'provider_summaries',
             '/flavors/gpu': 'flavor', **{part: part for part in (
                 'inventories', 'allocations', 'traits', 'resource_providers',
                 'hypervisors', 'flavors', 'servers')}}
    COMMANDS = (
        ('tree', 'compute1'), ('tree', '--evacuation-list'), ('why', 'gpu'),
        ('fits',), ('defrag', '--for', 'gpu'), ('page', 'PATH'),
        ('providers', 'purge', 'compute1'))

    def setUp(self):
        super().setUp()
        self.path = f'{self.useFixture(fixtures.TempDir()).path}/page.html'
        flavor = {'id': 'gpu', 'name': 'gpu', 'ram': 1, 'vcpus': 1, 'disk': 1,
                  'swap': '', 'OS-FLV-EXT-DATA:ephemeral': 0,
                  'extra_specs': {f'resources1:{GPU}': '1'}}
        for path, answer in (
                ('/flavors/detail', {'flavors': [flavor]}),
                ('/flavors/gpu', {'flavor': flavor}),
                ('/os-hypervisors/detail', {'hypervisors': [{
                    'id': self.root, 'hypervisor_hostname': 'compute1',
                    'state': 'up', 'status': 'enabled',
                    'service': {'host': 'compute1'}}]}),
                ('/servers', {'servers': [placement.SERVER]})):
            self.services.answer(path, answer)
        self.services.allocate(SERVER, self.card, **{GPU: 1})

    def run_with(self, command, path='', content=b''):
        """Run a command for which a path has another content.

        :returns: (subprocess.CompletedProcess, paths that it asked for).
        """
        request, paths = ks_adapter.Adapter.request, []

        def answer(adapter, url, *args, **kwargs):
            paths.append(url)
            if url != path:
                return request(adapter, url, *args, **kwargs)
            found = requests.Response()
            found.status_code, found._content = 200, content
            return found
        with mock.patch.object(ks_adapter.Adapter, 'request', answer):
            return commands.run(*(word.replace('PATH', self.path)
                                  for word in command)), paths

    def test_each_path_of_each_command(self):
        for command in self.COMMANDS:
            # of several providers one
            for path in {re.sub('-.*/', '/', path): path for path in
                         self.run_with(command)[1]}.values():
                part = next(self.PARTS[word] for word in self.PARTS
                            if word in path)
                for content in (b'<html>', b'5', b'{"%s": [5]}',
                                b'{"%s": {"x": 5}}', answers.DEEP):
                    content = content.replace(b'%s', part.encode())
                    with self.subTest(command=command, path=path,
                                      content=content):
                        self.check(self.run_with(command, path, content)[0])

    def check(self, done):
        self.assertRegex(done.stderr, r'\n?\S[^\n]{20,}[.]\n$|^$')
        self.assertNotIn('Traceback', done.stderr)
        if done.returncode:
            self.assertIn('no response came', done.stderr)


class TreesTest(ProvidersTestCase):

    def names(self, *args, **kwargs):
        return [[p.name for p in tree]
                for tree in self.cloud.trees(*args, **kwargs)]

    def test_all(self):
        self.assertEqual([['compute1', CARD], ['compute2', 'a']],
                         self.names())
        self.assertEqual(1, len(self.services.asked))
        (root, card), _ = self.cloud.trees()
        self.assertEqual(
            (self.card, self.root, self.root, None),
            (card.uuid, card.root, card.parent, root.parent))

    def test_by_name(self):
        self.assertEqual([['compute2', 'a']], self.names(['compute2']))
        self.assertEqual(2, len(self.services.asked))
        self.assertEqual([['compute1', CARD], ['compute2', 'a']],
                         self.names(['compute2', 'compute1', 'compute2']))

    def test_nested(self):
        self.assertEqual([['compute1', CARD]], self.names([CARD], nested=True))
        self.assertEqual([['compute1', CARD]],
                         self.names([CARD, 'compute1'], nested=True))

    def test_unknown(self):
        for name, nested in (('compute9', False), ('compute9', True),
                             (CARD, False)):
            error = self.assertRaises(exception.NotThere, self.cloud.trees,
                                      ['compute1', name], nested)
            self.assertEqual(
                f'Placement was asked for the compute node {name!r}, and has '
                f'none with this name: give the name that openstack '
                f'hypervisor list shows.', str(error))

    def test_errors(self):
        for body, expected in ((None, exception.ConfigurationError),
                               ({'of': 'a proxy'},
                                exception.ServiceUnavailable)):
            self.services.answer('/resource_providers', body)
            error = self.assertRaises(expected, self.cloud.trees)
            self.assertIn('Placement was asked for /resource_providers, and',
                          str(error))


class ReadTest(ProvidersTestCase):

    def listed(self):
        return [p for tree in self.cloud.trees() for p in tree]

    def test_content(self):
        self.services.allocate(SERVER, self.card, **{GPU: 1})
        read = {p.name: p for p in self.cloud.read(self.listed())}
        card = read[CARD]
        self.assertEqual(
            (2, {OWNER, 'CUSTOM_RACK_7'}, {SERVER: {GPU: 1}}, self.root),
            (card.inventories[GPU]['total'], card.traits, card.allocations,
             card.parent))
        self.assertEqual(({}, frozenset(), {}), (
            read['a'].inventories, read['a'].traits, read['a'].allocations))
        self.assertEqual(['compute1', CARD, 'compute2', 'a'], [*read])

    def test_parts(self):
        """No request for what is not wanted."""
        card = self.listed()[1]
        self.services.asked.clear()
        read, = self.cloud.read([card], ['traits'])
        self.assertEqual(({}, {OWNER, 'CUSTOM_RACK_7'}),
                         (read.inventories, read.traits))
        self.assertEqual(
            [('placement', f'/resource_providers/{self.card}/traits')],
            self.services.asked)

    def test_without_inventory(self):
        """It can have no allocations, and half of the providers are so."""
        self.services.asked.clear()
        card, bare = self.cloud.read(
            p for p in self.listed() if p.name in ('a', CARD))
        asked = [path for _, path in self.services.asked]
        for provider, expected in ((card, True), (bare, False)):
            self.assertEqual(expected, (
                f'/resource_providers/{provider.uuid}/allocations' in asked))

    def test_removed_meanwhile(self):
        card = self.listed()[1]
        for part in cloud.PARTS:
            self.services.answer(
                f'/resource_providers/{self.card}/{part}', 404)
            self.assertEqual([card], self.cloud.read([card]))

    def test_errors(self):
        path = f'/resource_providers/{self.card}/allocations'
        for body, expected in ((None, exception.ConfigurationError),
                               ({'of': 'a proxy'},
                                exception.ServiceUnavailable)):
            self.services.answer(path, body)
            error = self.assertRaises(expected, self.cloud.read,
                                      self.listed())
            self.assertIn(f'Placement was asked for {path}, and', str(error))

    def test_several_at_a_time(self):
        """Each waits for the other."""
        both = threading.Barrier(2)
        answer = self.services._answer

        def waits(name, environ, *args):
            if environ['PATH_INFO'].endswith('/traits'):
                both.wait(600)
            return answer(name, environ, *args)
        self.services._answer = waits
        self.assertEqual(2, len(self.cloud.read(
            self.listed()[:2], ['traits'])))


class PurgeTest(ProvidersTestCase):

    def test_what_would_be_removed(self):
        """Providers by name and by the owner's trait, children first."""
        self.services.provider(f'{CARD}_region0', self.card, traits={OWNER})
        self.services.provider('compute1_accel_mine', self.root)
        self.services.provider('compute1_numa0', self.root, traits={OWNER})
        self.assertEqual([f'{CARD}_region0', CARD], [
            p.name for p in providers.purge(self.cloud, 'compute1', True)])
        self.assertEqual([], providers.purge(self.cloud, 'compute2', True))

    def test_in_use(self):
        self.services.allocate(SERVER, self.card, **{GPU: 1})
        error = self.assertRaises(
            exception.DeviceUnavailable, providers.purge, self.cloud,
            'compute1', True)
        self.assertIn(f'({SERVER} from {CARD})', str(error))

    def test_provider_of_another_one(self):
        """It would remove the rest of the host with it."""
        self.assertRaises(exception.NotThere, providers.purge, self.cloud,
                          CARD, True)
