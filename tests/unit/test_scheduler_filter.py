# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which requests the filter counts, and what it drops, with objects of Nova.

What it orders is in tests/functional/test_scheduler_placement.py.
"""

import collections
import copy
import types
from unittest import mock

from nova import objects
from nova import weights as nova_weights
import testtools

from nova_accel import conf
from nova_accel import log as logging
from nova_accel import naming
from nova_accel.scheduler import cost
from nova_accel.scheduler import facts
from nova_accel.scheduler import filters
from nova_accel.scheduler import missing
from nova_accel.scheduler import scheduling
from nova_accel.scheduler import weights

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
WANTED = 'd8424dc4a4a3c413f89e433683f9040b'


class FilterTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()
        self.schedulings = scheduling.Schedulings(get=None)
        patch = mock.patch.object(filters, 'SCHEDULINGS', self.schedulings)
        patch.start()
        self.addCleanup(patch.stop)
        self.chance = mock.patch.object(filters, '_chance', lambda: 0.0)
        self.chance.start()
        self.addCleanup(self.chance.stop)

    @staticmethod
    def spec(attempts=None, **specs):
        specs = specs or {f'resources1:{FPGA}': '1',
                          'accel1:function_id': WANTED}
        made = objects.RequestSpec(
            flavor=objects.Flavor(extra_specs=specs), num_instances=1,
            instance_uuid='00000000-0000-4000-8000-000000000001')
        if attempts is not None:
            made.retry = objects.SchedulerRetries(
                num_attempts=attempts, hosts=objects.ComputeNodeList())
        return made


class CopiedTest(FilterTestCase):
    """Nova copies the candidates of each host, with copy.deepcopy."""

    def test_copy_is_another_list(self):
        one, two = {'mappings': {'': ['host']}}, {'mappings': {'': ['host']}}
        candidates = collections.defaultdict(list, host=[one, two])
        for specs in ({}, {'hw:cpu_policy': 'shared'}):
            filters._look(None, None, self.spec(**specs), candidates, {})
        copied = copy.deepcopy(candidates['host'])
        self.assertIs(list, type(copied))
        self.assertEqual([one, two], copied)
        # a filter drops one
        del copied[0]
        self.assertEqual([one, two], candidates['host'])


class PlacesTest(FilterTestCase):
    """A flavor that demands that all devices are near each other."""

    SPECS = {f'resources1:{FPGA}': '1', f'resources2:{FPGA}': '1'}

    @staticmethod
    def summary(node):
        return {'resources': {FPGA: {'capacity': 4, 'used': 0}},
                'traits': [] if node == '-'
                else [f'CUSTOM_ACCELERATOR_NUMA_{node}']}

    @staticmethod
    def host(name, pairs):
        """:param pairs: nodes of the two devices of each candidate."""
        return types.SimpleNamespace(
            uuid=name, host=name, num_instances=0,
            stats={naming.STATISTIC: '1'}, allocation_candidates=[{
                'allocations': {f'{name}{n}': {'resources': {
                    FPGA: pair.count(n)}} for n in pair},
                'mappings': {str(number): [f'{name}{n}'] for number, n
                             in enumerate(pair, 1)}} for pair in pairs])

    def drop(self, candidates, **specs):
        """Host -> nodes of its two devices, for each of its candidates.

        :returns: the same of what is left, and what the log says.
        """
        spec = self.spec(**self.SPECS, **specs)
        self.scheduling = self.schedulings.begin(spec, {
            f'{host}{n}': self.summary(n)
            for host in candidates for n in '-01'})
        hosts = [self.host(*item) for item in candidates.items()]
        with self.assertLogs('nova_accel', 'INFO') as log:
            filters.LOG.info('begin')
            left = filters.AcceleratorFilter().filter_all(hosts, spec)
        return {host.uuid: [''.join(
            provider[-1] for mapped in candidate['mappings'].values()
            for provider in mapped) for candidate
            in host.allocation_candidates] for host in left}, log.output[1:]

    def test_drop(self):
        found = {'a': ['01', '11', '10', '00', '0-'], 'b': ['01', '10'],
                 'c': []}
        for specs, expected in (
                ({}, {**found, 'a': ['11', '00', '0-', '01', '10']}),
                ({'accel:numa_affinity': 'none'}, found),
                ({'accel:numa_affinity': 'required'},
                 {'a': ['11', '00', '0-'], 'c': []}),
                ({'accel:numa_affinity': 'required', 'hw:numa_nodes': '2'},
                 {**found, 'a': ['11', '00', '0-', '01', '10']}),
                ({'accel:same': 'numa'},
                 {'a': ['11', '00', '0-'], 'c': []})):
            with self.subTest(specs):
                self.assertEqual((expected, []), self.drop(found, **specs))
                self.assertIsNone(self.scheduling.refused)

    @staticmethod
    def weigh(hosts, spec):
        return weights.AcceleratorWeigher().weigh_objects(
            [nova_weights.WeighedObject(host, 0) for host in hosts], spec)

    def test_hosts_are_weighed(self):
        spec = self.spec(**self.SPECS)
        self.schedulings.begin(spec, {
            f'{host}{n}': self.summary(n) for host in 'abc' for n in '01'})
        hosts = [self.host('a', ['01']), self.host('b', ['11'])]
        apart, close = self.weigh(hosts, spec)
        self.assertTrue(close > apart, (close, apart))

    def test_server_without_accelerators(self):
        """It goes where no accelerator is free."""
        spec = self.spec(**{'hw:mem_page_size': 'large'})
        tree = {f'{host}{n}': {**self.summary('0'), 'root_provider_uuid': host}
                for host in 'ab' for n in range(2)}
        tree['b0']['resources'] = {FPGA: {'capacity': 4, 'used': 4}}
        self.schedulings.begin(spec, tree)
        hosts = [self.host('a', ['01']), self.host('b', ['01']),
                 self.host('c', ['01'])]
        hosts[2].stats = {}
        free, some, none = self.weigh(hosts, spec)
        self.assertTrue(none > some > free, (free, some, none))
        # no host of ours: nothing is looked at
        self.assertEqual([0.0], self.weigh(hosts[2:], spec))
        conf.CONF.set_override('packing', 'spread', 'accel')
        self.addCleanup(conf.CONF.clear_override, 'packing', 'accel')
        self.schedulings.begin(spec, tree)
        self.assertEqual([0.0] * 3, self.weigh(hosts, spec))

    def test_multiplier(self):
        weigher, host = weights.AcceleratorWeigher(), self.host('a', ['01'])
        for metadata, expected in (
                ({}, conf.CONF.accel.weight_multiplier),
                ({'accel_weight_multiplier': '-10'}, -10)):
            host.aggregates = [types.SimpleNamespace(metadata=metadata)]
            self.assertEqual(expected, weigher.weight_multiplier(host))

    def test_said_when_nothing_is_left(self):
        left, (line,) = self.drop({'a': ['01'], 'b': ['10', '01']},
                                  **{'accel:same': 'numa'})
        self.assertEqual({}, left)
        self.assertIs(scheduling.Refusal.PLACES, self.scheduling.refused)
        for text in ('needs all accelerators on one NUMA node, and no host',
                     'a offers them on CUSTOM_ACCELERATOR_NUMA_0, '
                     'CUSTOM_ACCELERATOR_NUMA_1; b offers'):
            self.assertIn(text, line)

    def test_host_that_was_dropped_was_not_tried(self):
        """Of several servers the second one asks Placement for nothing."""
        spec = self.spec(**self.SPECS, **{'accel:same': 'numa'})
        spec.num_instances = 2
        self.schedulings.begin(spec, {
            f'{host}{n}': self.summary(n) for host in 'ab' for n in '01'})
        hosts = [self.host('a', ['01']), self.host('b', ['00'])]
        kept = filters.AcceleratorFilter().filter_all(hosts, spec)
        self.assertEqual(['b'], [host.uuid for host in kept])
        hosts[1].num_instances = 1
        with self.assertNoLogs('nova_accel', 'WARNING'):
            kept = filters.AcceleratorFilter().filter_all(hosts, spec)
        self.assertEqual(['b'], [host.uuid for host in kept])


class GuestTest(FilterTestCase):
    """Devices and guest are to be on the same node."""

    @staticmethod
    def topology(*free):
        """A host with two processors on each node, so many not pinned."""
        return objects.NUMATopology(cells=[objects.NUMACell(
            id=node, cpuset=set(), pcpuset={2 * node, 2 * node + 1},
            memory=1024, cpu_usage=0, memory_usage=0, mempages=[],
            siblings=[{2 * node}, {2 * node + 1}],
            pinned_cpus=set([2 * node, 2 * node + 1][count:]))
            for node, count in enumerate(free)])

    @staticmethod
    def guest(cells=1):
        return objects.InstanceNUMATopology(cells=[
            objects.InstanceNUMACell(
                id=number, cpuset=set(), pcpuset={2 * number, 2 * number + 1},
                memory=256, cpu_policy='dedicated')
            for number in range(cells)])

    def left(self, topology, guest, affinity='required'):
        """The nodes of the candidates of a host that are left; None where the
        host is not."""
        spec = self.spec(**{f'resources1:{FPGA}': '1',
                            'accel:numa_affinity': affinity})
        spec.numa_topology = guest
        before = guest and guest.obj_to_primitive()
        self.scheduling = self.schedulings.begin(
            spec, {str(n): PlacesTest.summary(n) for n in '01-'})
        host = types.SimpleNamespace(
            uuid='root', host='a', num_instances=0, limits={},
            numa_topology=topology, stats={naming.STATISTIC: '1'},
            allocation_candidates=[{
                'allocations': {node: {'resources': {FPGA: 1}}},
                'mappings': {'1': [node]}} for node in '01-'])
        hosts = filters.AcceleratorFilter().filter_all([host], spec)
        self.assertEqual(before, guest and guest.obj_to_primitive())
        return [c['mappings']['1'][0] for c in host.allocation_candidates
                ] if hosts else None

    def test_node_without_room_for_the_guest(self):
        for free, expected in (((2, 2), '01-'), ((0, 2), '1-'),
                               ((2, 1), '0-'), ((1, 1), '-')):
            self.assertEqual([*expected], self.left(
                self.topology(*free), self.guest()), free)

    def test_what_is_not_looked_at(self):
        full = self.topology(0, 2)
        for arguments in ((full, None), (None, self.guest()),
                          (full, self.guest(), 'preferred'),
                          (full, self.guest(2))):
            self.assertEqual([*'01-'], self.left(*arguments))

    def test_said_when_nothing_is_left(self):
        with mock.patch.object(facts.Facts, 'places', return_value=(
                {'CUSTOM_ACCELERATOR_NUMA_0'}, set())):
            with self.assertLogs('nova_accel', 'INFO') as log:
                self.assertIsNone(
                    self.left(self.topology(0, 2), self.guest()))
        self.assertIs(scheduling.Refusal.GUEST, self.scheduling.refused)
        self.assertIn('where its guest fits', log.output[0])
        self.assertIn('this server fits', missing.refusal(self.scheduling))


class NearTest(FilterTestCase):
    """Two racks: of a no server fits on a2, b is empty. Each host has four
    GPUs."""

    GPU = 'CUSTOM_ACCELERATOR_GPU'

    def begin(self, near, expected=scheduling.Expected(), group=None,
              **used):
        spec = self.spec(**{f'resources1:{self.GPU}': '2',
                            'accel:near': near})
        spec.instance_group = group
        self.schedulings.expect(spec, expected)
        hosts = {f'{rack}{n}': used.get(f'{rack}{n}', 0)
                 for rack in 'ab' for n in range(3)}
        summaries = {}
        for name, taken in hosts.items():
            summaries[name] = {
                'traits': [f'CUSTOM_NEAR_RACK_{name[0].upper()}'],
                'resources': {'VCPU': {'capacity': 8, 'used': 0}}}
            summaries[f'{name}-gpus'] = {
                'root_provider_uuid': name, 'traits': [], 'resources': {
                    self.GPU: {'capacity': 4, 'used': taken}}}
        self.scheduling = self.schedulings.begin(spec, summaries)
        return spec, [types.SimpleNamespace(
            uuid=name, host=name, num_instances=0, instances={},
            stats={naming.STATISTIC: '1'}, allocation_candidates=[{
                'allocations': {name: {'resources': {'VCPU': 1}},
                                f'{name}-gpus': {'resources': {self.GPU: 2}}},
                'mappings': {'': [name], '1': [f'{name}-gpus']}}])
            for name, taken in hosts.items() if taken <= 2]

    @staticmethod
    def filter(spec, hosts):
        return ' '.join(host.uuid for host in
                        filters.AcceleratorFilter().filter_all(hosts, spec))

    def test_required(self):
        """Decided once for all servers of a request."""
        spec, hosts = self.begin('rack=required', scheduling.Expected(3),
                                 a2=3, a1=2)
        self.assertEqual('a0 a1', self.filter(spec, hosts))
        # other requests take the rest: it stays with the rack
        self.assertEqual('a1', self.filter(spec, hosts[1:]))
        self.assertEqual('', self.filter(spec, hosts[2:]))
        spec, hosts = self.begin('rack=required', scheduling.Expected(4),
                                 a2=3, a1=2)
        self.assertEqual('b0 b1 b2', self.filter(spec, hosts))

    def test_refused(self):
        for said, expected, group in (
                ('the largest free part of a rack has 6 of 7',
                 scheduling.Expected(7), None),
                ('could not be read', scheduling.Expected(1, None), None),
                ('the largest free part of a rack has 3 of 4',
                 scheduling.Expected(4), objects.InstanceGroup(
                     policy='anti-affinity', rules={}, members=['x'])),
                ('the largest free part of a rack has 0 of 3',
                 scheduling.Expected(3), objects.InstanceGroup(
                     policy='affinity', rules={}, members=['x']))):
            spec, hosts = self.begin('rack=required', expected, group, a2=3)
            with self.assertLogs(filters.LOG.logger, 'INFO') as log:
                self.assertEqual('', self.filter(spec, hosts))
            self.assertIn(said, log.output[0])
            self.assertIn(said, missing.refusal(self.scheduling))

    def test_preferred_if_members_could_not_be_read(self):
        spec, hosts = self.begin('rack=preferred',
                                 scheduling.Expected(1, None))
        self.assertEqual('a0 a1 a2 b0 b1 b2', self.filter(spec, hosts))

    def test_level_that_no_host_reports(self):
        with mock.patch.object(scheduling, '_ONCE', logging.Once()):
            for near, verb, left in (
                    ('rail=preferred', 'prefers', 6),
                    ('rail=required', 'requires', 0)):
                for logged in True, False:
                    spec, hosts = self.begin(near)
                    with self.assertLogs('nova_accel', 'INFO') as log:
                        filters.LOG.info('the only line if not logged')
                        self.assertEqual(left, len(self.filter(
                            spec, hosts).split()))
                    clause = (f'accel:near {verb} the level rail, and no '
                              f'suitable host reports a domain of it')
                    self.assertEqual(logged, any(
                        f'{clause}: set [accel] near' in line
                        for line in log.output), log.output)
            self.assertIn(clause, missing.refusal(self.scheduling))

    def test_no_candidate_in_the_domain(self):
        """Placement has none in that of the first member."""
        spec, _ = self.begin('rack=required')
        for only, summaries, said in (
                ({'rack': 'CUSTOM_NEAR_RACK_A'}, {}, 'Accelerators: the free '
                 'part of rack CUSTOM_NEAR_RACK_A of the first member has 0 '
                 'of 2: '),
                # another filter refuses them
                ({'rack': 'CUSTOM_NEAR_RACK_A'}, {'a0': {
                    'traits': [], 'resources': {}}}, ''),
                ({}, {}, '')):
            self.schedulings.expect(spec, scheduling.Expected(2, only=only))
            found = missing.refusal(self.schedulings.begin(spec, summaries))
            self.assertEqual(said, found[:len(said)] if said else found)

    def test_named_host(self):
        """An operator decides."""
        spec, hosts = self.begin(
            'rack=required', scheduling.Expected(1, (
                {'rack': 'CUSTOM_NEAR_RACK_A'},
                {'rack': 'CUSTOM_NEAR_RACK_B'})))
        self.assertEqual('', self.filter(spec, hosts[:1]))
        spec.requested_destination = objects.Destination(host='a0')
        self.assertEqual('a0', self.filter(spec, hosts[:1]))

    def test_again(self):
        """Other requests were faster: another domain, until none has room."""
        group = objects.InstanceGroup(policy='soft-anti-affinity', rules={},
                                      members=['x'])
        spec, hosts = self.begin('rack=required', scheduling.Expected(
            3, hosts=('a9',)), group, a2=3, a1=2)
        self.assertFalse(self.schedulings.retry(spec))
        self.filter(spec, hosts)
        group.hosts = ['a9', 'a0']
        hosts[0].instances.update({spec.instance_uuid: None, 'x': None})
        found = set()
        for lost in range(1, 4):
            self.assertTrue(self.schedulings.retry(spec))
            self.assertEqual(['a9'], group.hosts)
            self.assertEqual({'x': None}, hosts[0].instances)
            # Nova found no host before it began
            self.assertFalse(self.schedulings.retry(spec))
            summaries = dict(self.scheduling.facts._summaries)
            self.scheduling = self.schedulings.begin(spec, summaries)
            self.assertEqual(lost, self.scheduling.expected.retries)
            found.add(self.filter(spec, hosts))
        self.assertTrue(found <= {'a0 a1', 'b0 b1 b2'}, found)
        self.assertFalse(self.schedulings.retry(spec))
        for near, servers in (('rack=required', 9), ('rack=preferred', 2)):
            spec, hosts = self.begin(near, scheduling.Expected(servers))
            self.filter(spec, hosts)
            self.assertFalse(self.schedulings.retry(spec))
        # it moves
        spec, hosts = self.begin('rack=required', group=group)
        hosts[0].instances[spec.instance_uuid] = None
        self.filter(spec, hosts)
        self.assertTrue(self.schedulings.retry(spec))
        self.assertIn(spec.instance_uuid, hosts[0].instances)

    def test_part(self):
        """Nova has the hosts of some domains only: it gets all of them if
        these do not suffice, and nothing was decided."""
        for near, servers in ('rack=required', 5), ('rack=preferred', 5):
            spec, hosts = self.begin(near, scheduling.Expected(servers), a0=2,
                                     b0=2)
            self.assertFalse(self.schedulings.widen(spec))
            for dropped, enough in (0, True), (1, False), (3, False):
                self.scheduling.part, self.scheduling.near = {}, None
                with self.assertNoLogs('nova_accel', 'INFO'):
                    self.assertEqual(enough, bool(self.filter(
                        spec, hosts[dropped:3])))
                self.assertEqual(not enough, self.schedulings.widen(spec))
            # once
            self.assertFalse(self.schedulings.widen(spec))
            self.assertTrue(self.filter(spec, hosts))

    def test_level_outside_the_part(self):
        """A host that Nova does not get reports a level."""
        spec, hosts = self.begin('rail=preferred,rack=preferred')
        summaries = self.scheduling.facts._summaries
        summaries['b0']['traits'].append('CUSTOM_NEAR_RAIL_1')
        self.scheduling.part = {}
        with self.assertNoLogs('nova_accel', 'WARNING'):
            self.assertTrue(self.filter(spec, hosts[:3]))

    def test_whole_domains_first(self):
        """All hosts of b are known; they count if they suffice."""
        for servers in 3, 6, 7:
            spec, hosts = self.begin(
                'rack=preferred', scheduling.Expected(servers), a2=2)
            self.scheduling.whole.add('CUSTOM_NEAR_RACK_B')
            self.filter(spec, hosts)
            order = self.scheduling.near.order
            self.assertEqual(servers > 6, 'a0' in order)

    def test_again_without_the_part(self):
        """Hosts of preferred domains were taken: once more with all."""
        spec, hosts = self.begin('rack=preferred', scheduling.Expected(2))
        self.scheduling.part = {}
        self.filter(spec, hosts)
        self.assertFalse(self.schedulings.widen(spec))
        self.assertTrue(self.schedulings.retry(spec))
        self.filter(spec, hosts)
        self.assertFalse(self.schedulings.retry(spec))

    def test_apart(self):
        group = objects.InstanceGroup(
            policy='anti-affinity', rules={'max_server_per_host': '2'},
            members=['x'])
        spec, hosts = self.begin('rack=required', scheduling.Expected(6),
                                 group)
        self.assertEqual(3, len(self.filter(spec, hosts).split()))
        spec, hosts = self.begin('rack=required', scheduling.Expected(6),
                                 group, b0=2)
        hosts[0].instances = {'x': None}
        self.assertEqual('', self.filter(spec, hosts))

    def weigh(self, *args, **used):
        spec, hosts = self.begin(*args, **used)
        self.assertEqual(len(hosts), len(self.filter(spec, hosts).split()))
        scores = weights.AcceleratorWeigher().weigh_objects(
            [nova_weights.WeighedObject(host, 0) for host in hosts], spec)
        return {host.uuid: score for host, score in zip(hosts, scores)}

    def test_weights(self):
        """A domain counts more than how full a host is, and less than that
        another server was faster."""
        scores = self.weigh('rack=preferred', scheduling.Expected(4), a2=3,
                            a1=2)
        self.assertEqual({'b0', 'b1', 'b2'}, {
            host for host, score in scores.items() if score > -1000})
        # the emptiest rack, then the rest
        scores = self.weigh('rack=preferred', scheduling.Expected(7), a1=2)
        self.assertTrue(max(scores['a0'], scores['a1'], scores['a2'])
                        < min(scores['b0'], scores['b1'], scores['b2']))
        self.assertTrue(min(scores.values()) > -cost.SUSPECT)
        scores = self.weigh('rack=preferred', scheduling.Expected(
            1, ({'rack': 'CUSTOM_NEAR_RACK_B'},)), a1=2)
        self.assertEqual({'b0', 'b1', 'b2'}, {
            host for host, score in scores.items() if score > -1000})

    def test_regions_that_cannot_be_programmed(self):
        spec = self.spec(**{f'resources1:{FPGA}': '1', 'accel:near': (
            'rack=required'), 'accel1:function_id': WANTED})
        self.schedulings.expect(spec, scheduling.Expected(2))
        self.schedulings.begin(spec, {
            'a': {'traits': ['CUSTOM_NEAR_RACK_A'], 'resources': {}},
            **{f'a{n}': {'root_provider_uuid': 'a', 'traits': traits,
                         'resources': {FPGA: {'capacity': 1, 'used': 0}}}
               for n, traits in enumerate(([naming.PROGRAMMABLE], []))}})
        host = types.SimpleNamespace(
            uuid='a', host='a', num_instances=0, instances={},
            stats={naming.STATISTIC: '1'}, allocation_candidates=[{
                'allocations': {f'a{n}': {'resources': {FPGA: 1}}},
                'mappings': {'1': [f'a{n}']}} for n in range(2)])
        self.assertEqual('', self.filter(spec, [host]))


class ShuffleTest(FilterTestCase):
    """Requests at the same time, with the same answer of Placement."""

    def test_any_of_the_best(self):
        self.chance.stop()
        carried = {'traits': [naming.function_trait(WANTED)]}
        regions = {f'r{n}': {'resources': {FPGA: {'capacity': 1, 'used': 0}},
                             'traits': [], **(carried if n < 4 else {})}
                   for n in range(6)}
        taken = set()
        for _ in range(200):
            spec = self.spec()
            self.schedulings.begin(spec, regions)
            host = types.SimpleNamespace(
                uuid='root', host='a', num_instances=0,
                stats={naming.STATISTIC: '1'}, allocation_candidates=[{
                    'allocations': {name: {'resources': {FPGA: 1}}},
                    'mappings': {'1': [name]}} for name in regions])
            filters.AcceleratorFilter().filter_all([host], spec)
            taken.add(host.allocation_candidates[0]['mappings']['1'][0])
        # all of those that carry it, but for once in 10 ** 24
        self.assertEqual({'r0', 'r1', 'r2', 'r3'}, taken)


class DriverTest(FilterTestCase):
    """Placement has our providers of hosts that run another driver."""

    def setUp(self):
        super().setUp()
        filters._ONCE.only('driver', ())
        self.addCleanup(conf.CONF.clear_override, 'resource_classes', 'accel')

    def filter(self, stats, class_=FPGA, traits=('OWNER_CYBORG',)):
        """:returns: how many candidates each host keeps, by its name."""
        spec = self.spec(**{f'resources1:{class_}': '1'})
        self.scheduling = self.schedulings.begin(spec, {name: {
            'resources': {class_: {'capacity': 1, 'used': 0}},
            'traits': list(traits)} for name in stats})
        hosts = [types.SimpleNamespace(
            uuid=name, host=name, nodename=f'{name}.example',
            num_instances=0, stats=values, allocation_candidates=[{
                'allocations': {name: {'resources': {class_: 1}}},
                'mappings': {'1': [name]}}]) for name, values in stats.items()]
        return {host.host: len(host.allocation_candidates) for host
                in filters.AcceleratorFilter().filter_all(hosts, spec)}

    def test_refused_and_said_once(self):
        with self.assertLogs('nova_accel', 'WARNING') as log:
            for _ in range(2):
                self.assertEqual({'b': 1}, self.filter(
                    {'a': {'num_instances': '3'}, 'b': {'nova_accel': '1'}}))
                self.assertIsNone(self.scheduling.refused)
        line, = log.output
        self.assertIn('Host a gets no servers', line)
        self.assertIn('nova-accel providers purge a.example', line)

    def test_said_again_after_it_was_well(self):
        for stats, lines in (({}, 1), ({'nova_accel': '1'}, 0), (None, 1)):
            with self.assertLogs('nova_accel', 'WARNING') as log:
                filters.LOG.warning('begin')
                self.filter({'a': stats})
            self.assertEqual(lines, len(log.output) - 1, stats)
            self.assertIs(scheduling.Refusal.DRIVER if lines else None,
                          self.scheduling.refused)

    def test_vgpus_of_nova_itself(self):
        conf.CONF.set_override('resource_classes', 'standard', 'accel')
        self.assertEqual({'a': 1}, self.filter({'a': {}}, 'VGPU', ()))
        self.assertEqual({}, self.filter({'a': {}}, 'VGPU'))


class CountTest(FilterTestCase):

    def filter(self, spec, count=1):
        for _ in range(count):
            filters.AcceleratorFilter().filter_all([types.SimpleNamespace(
                uuid='root', num_instances=0, stats={},
                allocation_candidates=[])], spec)

    @property
    def counted(self):
        trait = naming.function_trait(WANTED)
        return round(self.schedulings._demand.counts([trait])[trait])

    def test_each_request_once(self):
        self.filter(self.spec(), 2)
        self.filter(self.spec(attempts=1))
        self.assertEqual(2, self.counted)

    def test_each_server_of_a_request(self):
        spec = self.spec()
        self.filter(spec)
        spec.instance_uuid = '00000000-0000-4000-8000-000000000002'
        self.filter(spec, 2)
        self.assertEqual(2, self.counted)

    def test_not_a_retry(self):
        self.filter(self.spec(attempts=2))
        none = self.spec()
        none.retry = None
        self.filter(none)
        self.assertEqual(1, self.counted)

    def test_not_what_no_function_was_asked_of(self):
        self.filter(self.spec(**{f'resources1:{FPGA}': '1'}))
        self.filter(self.spec(**{'hw:cpu_policy': 'shared'}))
        self.assertEqual({}, self.schedulings._demand._sums)
