# Licensed under the Apache License, Version 2.0. See LICENSE.
"""No error of nova_accel ends the scheduling of a server, nor its request.

Each function of scheduler/ and api/ fails in turn, for a flavor without
accelerators and for one with them.
"""

import collections
import contextlib
import copy
import functools
import inspect
import types
from unittest import mock

from nova import exception as nova_exception
from nova import objects
from nova.scheduler import manager
from nova.scheduler import utils
from nova import weights as nova_weights
import oslo_messaging as messaging
import testtools

from nova_accel import naming
from nova_accel import near
from nova_accel import request
from nova_accel.api import expansion
from nova_accel.scheduler import candidates
from nova_accel.scheduler import cost
from nova_accel.scheduler import facts
from nova_accel.scheduler import fault
from nova_accel.scheduler import filters
from nova_accel.scheduler import missing
from nova_accel.scheduler import peers
from nova_accel.scheduler import scheduling
from nova_accel.scheduler import seam
from nova_accel.scheduler import unseen
from nova_accel.scheduler import weights
from tests.unit import nova_api

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
PLAIN = {'hw:cpu_sockets': '1'}
ONE = {f'resources1:{FPGA}': '1',
       'accel1:function_id': 'd8424dc4a4a3c413f89e433683f9040b'}
TWO = {**ONE, f'resources2:{FPGA}': '1', 'accel:numa_affinity': 'required',
       'accel:near': 'rack=preferred'}
#: what Nova calls, and what they call to go on after an error
DOORS = {'filter_all', 'weigh_objects', 'weight_multiplier', '__init__',
         'install', 'install_reason', 'give_up', '__deepcopy__'}
#: run whatever has failed before, so that each run of them is logged
ALWAYS = {'begin', 'of', '_order', '_weigh'}


class Injected(Exception):
    """Any error that our code does not expect."""


def functions(module):
    """Yield (owner, name) of each function and method of a module."""
    for name, value in vars(module).items():
        if getattr(value, '__module__', None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield module, name
        elif inspect.isclass(value):
            for method, item in vars(value).items():
                if isinstance(item, (types.FunctionType, staticmethod,
                                     property, functools.cached_property)):
                    yield value, method


@contextlib.contextmanager
def failing(owner, name):
    def fail(*args, **kwargs):
        raise Injected(f'Injected into {name}')
    item = inspect.getattr_static(owner, name)
    fake = fail
    if isinstance(item, staticmethod):
        fake = staticmethod(fail)
    elif isinstance(item, (property, functools.cached_property)):
        fake = property(fail)
    with mock.patch.object(owner, name, fake):
        yield


class SchedulerTest(testtools.TestCase):
    """Whole schedulings, as Nova's scheduler runs them."""

    MODULES = (scheduling, facts, cost, filters, weights, candidates, fault,
               missing, unseen, peers, near, request)

    def setUp(self):
        super().setUp()
        objects.register_all()
        query = types.SimpleNamespace(
            to_querystring=lambda: f'resources=VCPU:1&resources1={FPGA}:1')
        for patch in (
                mock.patch.object(utils, 'resources_from_request_spec',
                                  lambda *args: query),
                mock.patch.object(filters, 'SCHEDULINGS',
                                  scheduling.Schedulings(self.get)),
                mock.patch.object(filters, '_get', self.get),
                mock.patch.object(manager, 'SchedulerManager',
                                  type('Manager', (self.Manager,), {}))):
            patch.start()
            self.addCleanup(patch.stop)
        # Placement has cut off its answer, in which no function is
        unseen.CONF.set_override('max_placement_results', 2, 'scheduler')
        self.addCleanup(unseen.CONF.clear_override, 'max_placement_results',
                        'scheduler')
        seam.install_answer(lambda *args: filters._look(*args),
                            lambda spec: filters.SCHEDULINGS.widen(spec))
        seam.install_reason(lambda *args: fault.reason(
            self.get, filters.SCHEDULINGS, *args),
            lambda spec: filters.SCHEDULINGS.end(spec),
            lambda *args: peers.expect(filters.SCHEDULINGS, *args),
            lambda spec: filters.SCHEDULINGS.retry(spec))

    class Manager:
        host_manager = None

        def _get_all_host_states(self, context, spec_obj, provider_summaries):
            return [types.SimpleNamespace(
                uuid=name, host=name, nodename=name, num_instances=0,
                limits={}, numa_topology=None,
                stats={naming.STATISTIC: '1'} if name != 'c' else {})
                for name in 'abc']

        def _select_destinations(
                self, context, spec_obj, instance_uuids, alloc_reqs_by_rp_uuid,
                provider_summaries, *args):
            # as _schedule() of Nova
            hosts = self._get_all_host_states(
                context, spec_obj, provider_summaries)
            for host in hosts:
                host.allocation_candidates = copy.deepcopy(
                    alloc_reqs_by_rp_uuid[host.uuid])
            return hosts

        def select_destinations(self, context, spec_obj, instance_uuids):
            raise nova_exception.NoValidHost(reason='')

    @staticmethod
    def get(url, version):
        return types.SimpleNamespace(
            status_code=200, text='', json=lambda: {
                'allocation_requests': [], 'provider_summaries': {},
                'resource_providers': [
                    {'uuid': 'a0', 'root_provider_uuid': 'a'}]})

    @staticmethod
    def answer():
        """Two hosts with a device on each of two nodes, and one that runs
        Nova's own driver: candidates by provider, and summaries."""
        found = collections.defaultdict(list)
        for name in 'abc':
            for pair in '01', '00', '11':
                candidate = {
                    'allocations': {f'{name}{n}': {'resources': {FPGA: 1}}
                                    for n in pair},
                    'mappings': {'1': [f'{name}{pair[0]}'],
                                 '2': [f'{name}{pair[1]}']}}
                for provider in (name, *candidate['allocations']):
                    found[provider].append(candidate)
        return found, {
            f'{host}{n}': {'resources': {FPGA: {'capacity': 2, 'used': 0}},
                           'traits': [f'CUSTOM_ACCELERATOR_NUMA_{n}'],
                           'root_provider_uuid': host}
            for host in 'abc' for n in '01'}

    def schedule(self, specs):
        """Schedule two servers of one request.

        :returns: names of the hosts that were left to each, and their scores.
        """
        spec = objects.RequestSpec(
            flavor=objects.Flavor(name='the flavor', extra_specs=specs),
            num_instances=2, numa_topology=None, scheduler_hints={},
            instance_uuid='00000000-0000-4000-8000-000000000001')
        nova = manager.SchedulerManager()
        hosts = nova._select_destinations(
            None, spec, ['a server'], *self.answer())
        for _ in range(2):
            left = filters.AcceleratorFilter().filter_all(hosts, spec)
            scores = weights.AcceleratorWeigher().weigh_objects(
                [nova_weights.WeighedObject(host, 0) for host in left], spec)
            yield [host.uuid for host in left], scores
            # Nova claims the first candidate of a host
            self.assertTrue(all(h.allocation_candidates for h in left))
            left[0].num_instances += 1
        with self.assertRaises(messaging.ExpectedException) as caught:
            nova.select_destinations(None, spec_obj=spec,
                                     instance_uuids=['a server'])
        self.assertIsInstance(caught.exception.exc_info[1],
                              nova_exception.NoValidHost)

    def test_each_function_fails(self):
        reached = set()
        for module in self.MODULES:
            for owner, name in list(functions(module)):
                if name in DOORS:
                    continue
                for specs in (PLAIN, ONE, TWO):
                    with self.subTest(f'{owner.__name__}.{name}', specs=specs):
                        with failing(owner, name), self.assertLogs(
                                'nova_accel', 'INFO') as log:
                            filters.LOG.info('begin')
                            found = list(self.schedule(specs))
                        for left, scores in found:
                            # without the driver that gives devices only where
                            # the facts were lost
                            self.assertIn(left, (['a', 'b'], ['a', 'b', 'c']))
                            self.assertEqual(len(left), len(scores))
                        traces = [line for line in log.output
                                  if 'Injected' in line]
                        if name not in ALWAYS:
                            self.assertLessEqual(
                                len([line for line in traces
                                     if 'is scheduled without' in line]), 1)
                        if specs is PLAIN:
                            self.assertEqual(['a', 'b', 'c'], found[0][0])
                            # 4 are free on each with devices
                            for _, scores in found:
                                self.assertIn(scores, (
                                    [0.0] * 3, [-2.0, -2.0, 0.0]))
                        if traces:
                            reached.add(f'{owner.__name__}.{name}')
        # a test that reaches nothing says nothing
        for name in ('_requests', '_of_several', '_of_kind', '_sort',
                     '_weigh_object', 'cost', 'kinds', 'of', 'begin',
                     'refusal', 'reason', 'add', '_carrying', '_of_host',
                     'order_forced', 'expect', 'choose', '_blocks', 'servers',
                     '_near', 'retry'):
            self.assertIn(name, {n.rpartition('.')[2] for n in reached})


class ApiTest(testtools.TestCase):
    """What nova-api asks of us for each server, as it does."""

    #: which catch what fails below them
    DOORS = ('expand_flavor', '_refuse_snapshot', '_check_rebuild',
             '_refuse_confidential',
             '_check_limit', 'is_plain', 'install', '_create', '_resize',
             '_lookup', '_build_options', '_live_migrate', '_rebuild',
             '_checks', '_unshelve', '_snapshot_volume_backed',
             '_has_accelerators', '_check_live_migration')

    def setUp(self):
        super().setUp()
        self.nova = self.useFixture(nova_api.NovaApi({
            'plain': PLAIN,
            'with': {**ONE, 'accel1:runtime_programming': 'true'}}))

    def ask(self, name):
        """Every request about a server of a flavor; what they return."""
        api, flavor = self.nova.api, self.nova.flavor(name)
        server = self.nova.server(name)
        image = {'id': nova_api.IMAGE, 'properties': {
            'accel:bitstream_id': nova_api.IMAGE}}
        snapshot = {'id': nova_api.IMAGE, 'properties': {
            request.SNAPSHOT_PROPERTY: '1'}}
        for call, *args in (
                (api.create, flavor), (api.resize, server, name),
                (api._validate_and_build_base_options, flavor, image),
                (api._validate_and_build_base_options, flavor, snapshot),
                (api.live_migrate, server),
                (api.snapshot_volume_backed, server, 'name'),
                (api.rebuild, server, image), (api.rebuild, server, snapshot),
                (api.unshelve, server)):
            try:
                answer = call(None, *args)
            except nova_exception.NovaException as refusal:
                answer = refusal
            yield call.__name__, answer

    def test_each_function_fails(self):
        usual = dict(self.ask('with'))
        reached = set()
        for module in (expansion, expansion.profiles, request):
            for owner, name in list(functions(module)):
                if name in self.DOORS:
                    continue
                with self.subTest(f'{owner.__name__}.{name}'), failing(
                        owner, name), self.assertLogs(
                            'nova_accel', 'INFO') as log:
                    expansion.LOG.info('begin')
                    for call, answer in self.ask('plain'):
                        self.assertNotIsInstance(
                            answer, Exception, f'{call}: {answer}')
                    # in words, or as if nothing had failed
                    answers = dict(self.ask('with'))
                    self.assertEqual(usual.keys(), answers.keys())
                    for refused in ('live_migrate', 'rebuild',
                                    '_validate_and_build_base_options'):
                        self.assertIsInstance(
                            answers[refused], nova_exception.NovaException)
                    if name in ('expand', 'parse'):
                        for refused in 'create', 'resize':
                            self.assertIsInstance(
                                answers[refused], nova_exception.NovaException)
                    if any('Injected' in line for line in log.output):
                        reached.add(name)
        # a test that reaches nothing says nothing
        self.assertLessEqual({'parse', '_groups', 'with_image_overrides',
                              'wanted', 'expand'}, reached)
