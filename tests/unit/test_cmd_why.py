# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel why: its exit status and its advice, on answers of services that
are made up. What real services answer is in tests/functional/test_why.py.
"""

import dataclasses
import itertools
import os
import types

import ddt
import fixtures
import requests_mock

from nova_accel.cmd import why
from nova_accel import conf
from nova_accel import exception
from nova_accel import naming
from nova_accel.planning import reasons
from nova_accel.scheduler import slow
from tests.unit import commands
from tests.unit import configured
from tests.unit.host import FUNCTION, plain

NOVA, PLACEMENT = 'http://nova.example/v2.1', 'http://placement.example'
FLAVOR = {'id': '7', 'name': 'gpu', 'vcpus': 1, 'ram': 1, 'disk': 0,
          'OS-FLV-EXT-DATA:ephemeral': 0, 'swap': '',
          'extra_specs': {'resources1:CUSTOM_ACCELERATOR_GPU': '1'}}


class OrderTest(commands.CommandTestCase):

    def test_cheapest_host_first(self):
        costs = {'none': None, 'dear': 110.5, 'best': 0.0}
        found = why.Answer.rows(types.SimpleNamespace(
            _trees=costs, others=list,
            of_host=lambda name: why.Host(costs[name], [(name,)])))
        self.assertEqual((2, [('best',), ('dear',), ('none',)]), found)


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
                ({'text': '<html>'}, 'no response came')):
            with self.subTest(text):
                self.mock.get(f'{PLACEMENT}/resource_providers', **answer)
                self.assertSays('Placement was asked for /resource_providers, '
                                'and ')
                self.assertSays(text)

    def test_nova_does_not_answer(self):
        self.log_in()
        self.mock.get(f'{NOVA}/flavors/7', status_code=401)
        self.assertSays('Nova was asked for /flavors/7')

    def test_no_host(self):
        self.log_in()
        self.mock.get(f'{PLACEMENT}/resource_providers',
                      json={'resource_providers': []})
        try:
            done = commands.run('why', '--config-file', self.config, '7',
                                '-f', 'value', why=why.Why)
        finally:
            conf.CONF.reset()
        self.assertEqual((1, ''), (done.returncode, done.stdout))
        self.assertIn('No hosts can take a server', done.stderr)


FPGA = 'CUSTOM_ACCELERATOR_FPGA'
UP = {'status': 'enabled', 'state': 'up', 'service': {}}


class Cloud:
    """One host with one region of an FPGA; answers as cmd.cloud.Cloud does."""

    def __init__(self, candidates=('region',)):
        self.node = UP
        self.root = reasons.Provider('root', 'compute1', 'root', {
            name: _item(64) for name in ('VCPU', 'MEMORY_MB', 'DISK_GB')})
        self.region = reasons.Provider(
            'region', 'compute1_accel_0000:5e:00.0_region0', 'root',
            {FPGA: _item(1)}, frozenset({naming.PROGRAMMABLE}), parent='root')
        self.candidates = candidates

    def hosts(self, names):
        return [([self.root, self.region], self.node)], []

    def get(self, service, url, **kwargs):
        return {
            'provider_summaries': {p: {
                'root_provider_uuid': p if p == 'other' else 'root',
                'traits': [], 'resources': {
                    FPGA: {'capacity': 1, 'used': 0}}}
                for p in self.candidates},
            'allocation_requests': [
                {'allocations': {p: {'resources': {FPGA: 1}}},
                 'mappings': {'1': [p]}} for p in self.candidates]}

    def images(self):
        return None


def _item(total):
    return {'total': total, 'reserved': 0, 'allocation_ratio': 1.0,
            'min_unit': 1, 'max_unit': total, 'step_size': 1}


class Wanted:

    wanted_traits = {'A'}
    choices = [types.SimpleNamespace(function_name=None)]

    def __init__(self, chosen_by_owner):
        self.chosen_by_owner = chosen_by_owner


@ddt.ddt
class AnswerTest(configured.TestCase):

    def answer(self, cloud, **specs):
        flavor = {**FLAVOR, 'extra_specs': {
            f'resources1:{FPGA}': '1', **{
                f'accel1:{key}': value for key, value in specs.items()}}}
        return why.Answer(cloud, why.Question.of(flavor, {}), 'compute1', 'p')

    def host(self, cloud=None, **specs):
        """:returns: whether the host can take it, and what the rows say."""
        found = self.answer(cloud or Cloud(), **specs).of_host('root')
        return found.cost is not None, [row[-1] for row in found.rows]

    def test_free(self):
        self.assertEqual((True, ['free']), self.host())

    @ddt.data((None, 'Nova has no compute node for it'),
              ({**UP, 'status': 'disabled'}, 'its nova-compute is disabled'),
              ({**UP, 'status': 'disabled',
                'service': {'disabled_reason': 'a fan'}}, "('a fan')"),
              ({**UP, 'state': 'down'}, 'its nova-compute is down'))
    @ddt.unpack
    def test_service(self, node, said):
        cloud = Cloud()
        cloud.node = node
        fits, rows = self.host(cloud)
        self.assertFalse(fits)
        self.assertIn(said, rows[0])

    def find(self, found):
        """:param found: what Glance has, an image or an error."""
        def find_first(wanted, find):
            if isinstance(found, Exception):
                raise found
            return wanted.choices[0], None, found
        for name, value in (('glance.find_first', find_first),
                            ('hints.not_counted', lambda *args: ''),
                            ('hints.header', lambda *args: None)):
            self.useFixture(fixtures.MonkeyPatch(
                f'nova_accel.cmd.why.{name}', value))

    def image(self, **more):
        return types.SimpleNamespace(id='i', entry={
            'visibility': 'public', 'accel:function_id': FUNCTION, **more})

    def test_near(self):
        """A host in no domain of a required level, and a level that no host
        reports."""
        question = why.Question.of({**FLAVOR, 'extra_specs': {
            f'resources1:{FPGA}': '1',
            'accel:near': 'rail=preferred,rack=required'}}, {})
        cloud = Cloud()
        for traits, said in (
                (set(), ['accel:near requires a rack, and the host does not '
                         'report exactly one ([accel] near)', 'free']),
                ({'CUSTOM_NEAR_RACK_A'}, ['free'])):
            cloud.root = dataclasses.replace(
                cloud.root, traits=frozenset(traits))
            answer = why.Answer(cloud, question, 'compute1', 'p')
            found = answer.of_host('root')
            levels = ['requires the level rack'] * (not traits)
            for clause, row in itertools.zip_longest(
                    ['prefers the level rail', *levels], answer.others()):
                self.assertIn(f'accel:near {clause}, and no suitable host '
                              f'reports a domain of it: set [accel] near',
                              row[-1])
            self.assertEqual((said[1:] == [], said), (
                found.cost is not None, [row[-1] for row in found.rows]))

    def test_no_image(self):
        """Nova would send the server there, and the build would fail."""
        self.find(exception.BitstreamError('No image fits.'))
        self.assertEqual((False, ['No image fits.']),
                         self.host(function_id=FUNCTION))

    def test_not_among_the_candidates_of_placement(self):
        self.useFixture(fixtures.MonkeyPatch('nova_accel.cmd.why._LIMIT', 1))
        fits, rows = self.host(Cloud(candidates=['other']))
        self.assertFalse(fits)
        self.assertIn('it is not among the first 1 candidates', rows[0])

    def test_slow_placement(self):
        """The options that make Placement fast are named."""
        def rows(groups):
            flavor = {**FLAVOR, 'extra_specs': {
                f'resources{n}:{FPGA}': '1' for n in range(groups)}}
            return why.Answer(Cloud(), why.Question.of(flavor, {}),
                              'compute1', 'p').others()
        self.assertEqual([], rows(4))
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.scheduler.slow.SECONDS', 0))
        self.assertEqual([], rows(1))
        (_, _, _, _, _, said), = rows(4)
        self.assertIn(slow.OPTIONS, said)

    def test_what_the_owner_chose_is_programmed(self):
        """Also where the region carries the function of the same id."""
        region = types.SimpleNamespace(traits={'A', naming.PROGRAMMABLE})
        self.find(self.image())
        answer = self.answer(Cloud())
        for chosen, said in ((False, 'free, carries the function'),
                             (True, 'free, is programmed with ')):
            text, fits = answer._of_function(Wanted(chosen), region)
            self.assertTrue(fits)
            self.assertTrue(text.startswith(said), text)

    def test_name_of_an_image_of_a_project(self):
        """It names nothing that the operator's cards carry."""
        region = types.SimpleNamespace(
            traits={naming.function_trait(plain(FUNCTION))})
        choice = types.SimpleNamespace(function_name='crypto')
        for visibility, is_named in (('public', True), ('private', False)):
            self.assertIs(is_named, why.Answer._is_named(
                choice, self.image(visibility=visibility, owner='eve'),
                region))
