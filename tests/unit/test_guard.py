# Licensed under the Apache License, Version 2.0. See LICENSE.
"""No error of ours ends the scheduling of a server, nor its request.

Each function of scheduler/ and api/ fails in turn, for a flavor without
accelerators and for one with them.
"""

import contextlib
import functools
import inspect
import types
import unittest
from unittest import mock

from nova import exception as nova_exception
from nova import objects
from nova.scheduler import manager
from nova.scheduler import utils
from nova import weights as nova_weights
import oslo_messaging as messaging

from nova_accel import naming
from nova_accel import request
from nova_accel.api import expansion
from nova_accel.scheduler import candidates
from nova_accel.scheduler import fault
from nova_accel.scheduler import filters
from nova_accel.scheduler import missing
from nova_accel.scheduler import ranking
from nova_accel.scheduler import scheduling
from nova_accel.scheduler import seam
from nova_accel.scheduler import weights

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
PLAIN = {'hw:cpu_sockets': '1'}
ONE = {f'resources1:{FPGA}': '1',
       'accel1:function_id': 'd8424dc4a4a3c413f89e433683f9040b'}
TWO = {**ONE, f'resources2:{FPGA}': '1', 'accel:numa_affinity': 'required'}
#: what Nova calls, and what they call to go on after an error
DOORS = {'filter_all', 'weigh_objects', 'weight_multiplier', '__init__',
         'install', 'install_reason', 'give_up'}
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
        raise Injected(name)
    item = inspect.getattr_static(owner, name)
    fake = fail
    if isinstance(item, staticmethod):
        fake = staticmethod(fail)
    elif isinstance(item, (property, functools.cached_property)):
        fake = property(fail)
    with mock.patch.object(owner, name, fake):
        yield


class SchedulerTest(unittest.TestCase):
    """Whole schedulings, as Nova's scheduler runs them."""

    MODULES = (scheduling, ranking, filters, weights, candidates, fault,
               missing, request)

    def setUp(self):
        objects.register_all()
        query = types.SimpleNamespace(
            to_querystring=lambda: f'resources=VCPU:1&resources1={FPGA}:1')
        for patch in (
                mock.patch.object(utils, 'resources_from_request_spec',
                                  lambda *args: query),
                mock.patch.object(filters, 'SCHEDULINGS',
                                  scheduling.Schedulings(self.get)),
                mock.patch.object(manager, 'SchedulerManager', self.Manager)):
            patch.start()
            self.addCleanup(patch.stop)
        seam.install(lambda *args: filters.SCHEDULINGS.begin(*args))
        seam.install_reason(lambda *args: fault.reason(
            self.get, filters.SCHEDULINGS, *args),
            lambda spec: filters.SCHEDULINGS.end(spec))
        self.addCleanup(delattr, self.Manager._get_all_host_states, seam._MARK)

    class Manager:
        host_manager = None

        def _get_all_host_states(self, context, spec_obj, provider_summaries):
            return 'hosts'

        def select_destinations(self, context, spec_obj, instance_uuids):
            raise nova_exception.NoValidHost(reason='')

    @staticmethod
    def get(url, version):
        return types.SimpleNamespace(
            status_code=200, text='', json=lambda: {
                'allocation_requests': [], 'provider_summaries': {}})

    @staticmethod
    def hosts():
        """Two hosts with a device on each of two nodes, and one that runs
        Nova's own driver."""
        return [types.SimpleNamespace(
            uuid=name, host=name, nodename=name, num_instances=0, limits={},
            numa_topology=None,
            stats={naming.STATISTIC: '1'} if name != 'c' else {},
            allocation_candidates=[{
                'allocations': {f'{name}{n}': {'resources': {FPGA: 1}}
                                for n in pair},
                'mappings': {'1': [f'{name}{pair[0]}'],
                             '2': [f'{name}{pair[1]}']}}
                for pair in ('01', '00', '11')]) for name in 'abc']

    def schedule(self, specs):
        """Schedule two servers of one request.

        :returns: names of the hosts that were left to each, and their scores.
        """
        spec = objects.RequestSpec(
            flavor=objects.Flavor(name='the flavor', extra_specs=specs),
            num_instances=2, numa_topology=None, scheduler_hints={},
            instance_uuid='00000000-0000-4000-8000-000000000001')
        nova = self.Manager()
        self.assertEqual('hosts', nova._get_all_host_states(None, spec, {
            f'{host}{n}': {'resources': {FPGA: {'capacity': 2, 'used': 0}},
                           'traits': [f'CUSTOM_ACCELERATOR_NUMA_{n}'],
                           'root_provider_uuid': host}
            for host in 'abc' for n in '01'}))
        hosts = self.hosts()
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
                            # 4 devices are free on each that has ours
                            for _, scores in found:
                                self.assertIn(scores, (
                                    [0.0] * 3, [998.0, 998.0, 1000.0]))
                        if traces:
                            reached.add(f'{owner.__name__}.{name}')
        # a test that reaches nothing says nothing
        for name in ('_requests', '_rank_of_several', '_sort', '_weigh_object',
                     'ranks', 'of', 'begin', 'refusal', 'reason'):
            self.assertIn(name, {n.rpartition('.')[2] for n in reached})


class ApiTest(unittest.TestCase):
    """What nova-api asks of us for each server."""

    def setUp(self):
        objects.register_all()

    @staticmethod
    def flavor(specs):
        return objects.Flavor(name='the flavor', extra_specs=specs)

    def test_each_function_fails(self):
        snapshot = {'id': 'the image', 'properties': {
            request.SNAPSHOT_PROPERTY: '1'}}
        doors = ('expand_flavor', '_refuse_snapshot', '_is_plain', 'install',
                 '_create', '_resize', '_lookup', '_build_options',
                 '_live_migrate', '_has_accelerators')
        for module in (expansion, expansion.profiles, request):
            for owner, name in list(functions(module)):
                if name in doors:
                    continue
                with self.subTest(f'{owner.__name__}.{name}'), failing(
                        owner, name):
                    plain = self.flavor(PLAIN)
                    self.assertIs(plain, expansion.expand_flavor(plain))
                    expansion._refuse_snapshot(plain, snapshot)
                    self.assertFalse(expansion._has_accelerators(plain))
                    mine = self.flavor(ONE)
                    # in words, or as if nothing had failed
                    with contextlib.suppress(nova_exception.InvalidRequest):
                        expansion.expand_flavor(mine)
                    self.assertRaises(
                        nova_exception.InvalidRequest,
                        expansion._refuse_snapshot, mine, snapshot)
                    self.assertTrue(expansion._has_accelerators(mine))
