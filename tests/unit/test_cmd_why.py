# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel why, where it cannot look: one sentence, and exit status 2.

What it finds is in tests/functional/test_why.py.
"""

import os
import types

import fixtures
import requests_mock

from nova_accel.cmd import why
from nova_accel import conf
from tests.unit import commands

NOVA, PLACEMENT = 'http://nova.example/v2.1', 'http://placement.example'
FLAVOR = {'id': '7', 'name': 'gpu', 'vcpus': 1, 'ram': 1, 'disk': 0,
          'OS-FLV-EXT-DATA:ephemeral': 0, 'swap': '',
          'extra_specs': {'resources1:CUSTOM_ACCELERATOR_GPU': '1'}}


class OrderTest(commands.CommandTestCase):

    def test_cheapest_host_first(self):
        costs = {'none': None, 'dear': 110.5, 'best': 0.0}
        rows = why.Why(None, None)._answer(types.SimpleNamespace(
            hosts=costs, others=list,
            of_host=lambda name: why.Host(costs[name], [(name,)])))
        self.assertEqual([('best',), ('dear',), ('none',)], rows)


class CannotLookTest(commands.CommandTestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.EnvironmentVariable(
            'OS_CLIENT_CONFIG_FILE',
            os.path.join(self.directory, 'clouds.yaml')))
        self.mock = requests_mock.Mocker()
        self.mock.start()
        self.addCleanup(self.mock.stop)
        self.mock.get(f'{NOVA}/flavors/7', json={'flavor': FLAVOR})

    def log_in(self):
        for name, value in {
                'AUTH_TYPE': 'admin_token', 'TOKEN': 'secret',
                'ENDPOINT': 'http://unused.example',
                'PLACEMENT_ENDPOINT_OVERRIDE': PLACEMENT,
                'COMPUTE_ENDPOINT_OVERRIDE': NOVA}.items():
            self.useFixture(fixtures.EnvironmentVariable(f'OS_{name}', value))

    def assertSays(self, text, *arguments):
        try:
            done = commands.run('why', '--config-file', self.config,
                                *(arguments or ('7',)), why=why.Why)
        finally:
            conf.CONF.reset()
        self.assertEqual((2, ''), (done.returncode, done.stdout))
        self.assertIn(text, done.stderr.splitlines()[-1])
        self.assertNotIn('Traceback', done.stderr)
        self.assertNotIn('secret', done.stderr)

    def test_no_credentials(self):
        self.assertSays('Credentials were read from the environment (OS_*) and '
                        'clouds.yaml, and they cannot be used')

    def test_no_such_entry(self):
        self.assertSays('Cloud nope was not found', '--os-cloud', 'nope', '7')

    def test_placement_does_not_answer(self):
        self.log_in()
        for answer, text in (
                ({'exc': ConnectionRefusedError('refused')}, 'refused'),
                ({'status_code': 503}, '503'),
                ({'status_code': 403}, '403'),
                ({'text': '<html>'}, 'no answer came')):
            with self.subTest(text):
                self.mock.get(f'{PLACEMENT}/resource_providers', **answer)
                self.assertSays('Placement was asked for /resource_providers, '
                                'and ')
                self.assertSays(text)

    def test_nova_does_not_answer(self):
        self.log_in()
        self.mock.get(f'{NOVA}/flavors/7', status_code=401)
        self.assertSays('Nova was asked for /flavors/7')
