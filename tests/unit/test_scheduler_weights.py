# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which host Nova's scheduler takes, with Nova's weighers at their defaults.

Their weights are stretched and added as Nova does it (nova.weights). What
Placement answers is in tests/functional/test_scheduler_placement.py.
"""

import itertools
import random
import types
from unittest import mock

from hypothesis import assume
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from nova import objects
from nova.scheduler import host_manager
from nova.scheduler import weights as nova_weights
from nova import weights as weighed
import testtools

from nova_accel import conf
from nova_accel import naming
from nova_accel.scheduler import filters
from nova_accel.scheduler import scheduling
from nova_accel.scheduler import weights

FPGA, GPU = 'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_ACCELERATOR_GPU'
WANTED = 'd8424dc4a4a3c413f89e433683f9040b'
OTHER = 'f7df405cbd7acf7222f144b0b93acd18'
THIRD = '5b3a1c7e92d44f608e1bc07d64a2f935'
LIKED = 'CUSTOM_L40S', 'CUSTOM_A40'
GROUPS = {'1': {f'resources1:{GPU}': '2'},
          '2': {f'resources2:{FPGA}': '1', 'accel2:function_id': WANTED},
          '3': {f'resources3:{FPGA}': '1', 'accel3:function_id': OTHER}}


class Host:
    """A host with a pool of eight GPUs, and regions."""

    def __init__(self, name, chance, contents):
        self.name = name
        self.free = chance.randrange(2, 9)
        #: functions of free regions
        self.contents = contents
        state = self.state = host_manager.HostState(name, name, 'cell')
        state.uuid = name
        state.stats = {naming.STATISTIC: '1'}
        # what Nova's weighers read
        state.free_ram_mb = chance.randrange(65536)
        state.free_disk_mb = chance.randrange(10 ** 6)
        state.vcpus_total, state.vcpus_used = 128, chance.randrange(128)
        state.num_io_ops = chance.randrange(9)
        state.hypervisor_version = chance.choice((8000000, 9000000))
        state.cpu_allocation_ratio = 1.0

    def summaries(self):
        for number, content in enumerate(self.contents):
            yield f'{self.name}/{number}', self._summary(FPGA, 1, 1, [
                naming.PROGRAMMABLE,
                *([naming.function_trait(content)] if content else [])])
        yield f'{self.name}/gpus', self._summary(GPU, 8, self.free, [])

    def _summary(self, name, capacity, free, traits):
        return {'root_provider_uuid': self.name, 'traits': traits,
                'resources': {name: {'capacity': capacity,
                                     'used': capacity - free}}}

    def candidates(self, groups):
        wishes = [group for group in groups if group != '1']
        for regions in itertools.permutations(
                range(len(self.contents)), len(wishes)):
            given = {'1': (f'{self.name}/gpus', {GPU: 2})} if (
                '1' in groups) else {}
            given.update({group: (f'{self.name}/{region}', {FPGA: 1})
                          for group, region in zip(wishes, regions)})
            yield {'allocations': {provider: {'resources': resources}
                                   for provider, resources in given.values()},
                   'mappings': {group: [provider] for group, (provider, _)
                                in given.items()}}

    def programmings(self, groups):
        return sum(GROUPS[group][f'accel{group}:function_id']
                   not in self.contents for group in groups if group != '1')


class Base(testtools.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()
        self.schedulings = scheduling.Schedulings(get=None)
        patch = mock.patch.object(filters, 'SCHEDULINGS', self.schedulings)
        patch.start()
        self.addCleanup(patch.stop)

    @staticmethod
    def spec(extra_specs, **more):
        return objects.RequestSpec(
            flavor=objects.Flavor(extra_specs=extra_specs), num_instances=1,
            image=None, requested_destination=None, pci_requests=None,
            instance_uuid='00000000-0000-4000-8000-000000000001',
            **{'instance_group': None, **more})


class NovasWeighersTest(Base):

    def setUp(self):
        super().setUp()
        self.novas = [weigher() for weigher in nova_weights.all_weighers()]
        self.ours = weights.AcceleratorWeigher()
        self.chance = random.Random(0)

    def cloud(self):
        return [Host(f'host{number}', self.chance, self.chance.choices(
            (None, WANTED, OTHER), k=3)) for number in range(6)]

    def taken(self, hosts, groups, weighers, multipliers=()):
        """The host that Nova takes.

        :param multipliers: by host, of its aggregate.
        """
        specs = {'group_policy': 'none'}
        for name in groups:
            specs.update(GROUPS[name])
        spec = self.spec(specs)
        summaries = dict(one for host in hosts for one in host.summaries())
        self.schedulings.begin(spec, summaries)
        for host in hosts:
            host.state.allocation_candidates = [*host.candidates(groups)]
            self.chance.shuffle(host.state.allocation_candidates)
            host.state.aggregates = [types.SimpleNamespace(metadata={
                'accel_weight_multiplier': multipliers[host.name]}
                if host.name in multipliers else {})]
        found = filters.AcceleratorFilter().filter_all(
            [host.state for host in hosts], spec)
        best = nova_weights.HostWeightHandler().get_weighed_objects(
            weighers, found, spec)[0].obj
        return next(host for host in hosts if host.state is best)

    def assertTakesBest(self, groups, cost):
        """Of random clouds; and Nova alone would take another one in some."""
        others = 0
        for number in range(150):
            hosts = self.cloud()
            best = min(map(cost, hosts))
            got = self.taken(hosts, groups, [*self.novas, self.ours])
            self.assertEqual(best, cost(got), number)
            others += cost(self.taken(hosts, groups, self.novas)) > best
        self.assertGreater(others, 25)

    def test_devices(self):
        self.assertTakesBest('1', lambda host: host.free)

    def test_functions_and_devices(self):
        """The functions that are loaded, then the host that is fullest."""
        for groups in '12', '123':
            self.assertTakesBest(groups, lambda host: (
                host.programmings(groups), host.free))

    def test_functions_and_devices_that_are_spread(self):
        conf.CONF.set_override('packing', 'spread', 'accel')
        self.addCleanup(conf.CONF.clear_override, 'packing', 'accel')
        self.assertTakesBest('12', lambda host: (
            host.programmings('12'), -host.free))

    def test_function(self):
        self.assertTakesBest('2', lambda host: host.programmings('2'))

    def test_without_accelerators(self):
        self.assertTakesBest('', lambda host: host.free)

    def test_multiplier_of_an_aggregate(self):
        """It does not draw servers to hosts that are worse."""
        hosts = self.cloud()[:2]
        for groups, full, drawn in itertools.product(
                ('', '1', '12'), hosts, hosts):
            for host in hosts:
                host.contents, host.free = [WANTED], 2 if host is full else 8
            with self.subTest(groups, full=full.name, drawn=drawn.name):
                self.assertIs(full, self.taken(
                    hosts, groups, [self.ours],
                    multipliers={drawn.name: '20'}))


@st.composite
def requests(draw):
    """Extra specs of one to three groups, with functions and without."""
    specs = {'group_policy': 'none'}
    for group in range(1, draw(st.integers(1, 3)) + 1):
        functions = draw(st.lists(
            st.sampled_from((WANTED, OTHER, THIRD)), max_size=3, unique=True))
        name = FPGA if functions else draw(st.sampled_from((FPGA, GPU)))
        specs[f'resources{group}:{name}'] = '1'
        if functions:
            specs[f'accel{group}:function_id'] = ','.join(functions)
        specs[f'accel{group}:prefer'] = ','.join(draw(st.permutations(LIKED)))
    specs['accel:packing'] = draw(st.sampled_from(('stack', 'spread')))
    specs['accel:numa_affinity'] = draw(
        st.sampled_from(('preferred', 'required', 'none')))
    return specs


@st.composite
def providers(draw):
    """The summary of a region, or of a pool, of one of two hosts."""
    capacity = draw(st.integers(1, 8))
    content = draw(st.sampled_from((None, WANTED, OTHER, THIRD)))
    place = draw(st.sampled_from((None, ('0', '3A'), ('0', '5D'), ('1', '9A'))))
    traits = draw(st.sets(st.sampled_from((
        naming.PROGRAMMABLE, naming.SUSPECT, naming.CLEANING, *LIKED))))
    if content:
        traits.add(naming.function_trait(content))
    if place:
        traits |= {f'CUSTOM_ACCELERATOR_NUMA_{place[0]}',
                   f'CUSTOM_ACCELERATOR_PCIE_ROOT_0000_{place[1]}'}
    return {'root_provider_uuid': draw(st.sampled_from('ab')),
            'traits': sorted(traits), 'resources': {
                draw(st.sampled_from((FPGA, GPU))): {
                    'capacity': capacity,
                    'used': draw(st.integers(0, capacity))}}}


class OneMoreCandidateTest(Base):
    """A host with one candidate more, in whatever cloud, with what others
    asked for and what an earlier server of the request took."""

    def weigh(self, spec, *candidates):
        """Return the weights of hosts; None for those that are dropped.

        :param candidates: of each host.
        """
        hosts = {}
        for name, listed in enumerate(candidates):
            host = hosts[str(name)] = host_manager.HostState(
                str(name), str(name), 'cell')
            host.uuid, host.stats = str(name), {naming.STATISTIC: '1'}
            host.aggregates = []
            host.allocation_candidates = [*listed]
        left = filters.AcceleratorFilter().filter_all(hosts.values(), spec)
        cost_of = self.schedulings.of(spec).cost
        found = dict.fromkeys(hosts)
        for host, weight in zip(left, weights.AcceleratorWeigher(
                ).weigh_objects([weighed.WeighedObject(host, 0.0)
                                 for host in left], spec)):
            costs = [*map(cost_of, host.allocation_candidates)]
            self.assertEqual(sorted(costs), costs)
            self.assertEqual(-costs[0], weight)
            found[host.uuid] = weight
        return found.values()

    @settings(max_examples=50)
    @given(requests(), st.lists(providers(), min_size=2, max_size=6),
           st.lists(requests(), max_size=3), st.booleans(), st.data())
    def test_weighs_no_less(self, specs, there, asked, is_soft, data):
        summaries = {f'p{number}': one for number, one in enumerate(there)}
        for number, other in enumerate(asked):
            self.schedulings.begin(self.spec(other), {}).count(str(number))
        mapped = {name.removeprefix('resources').partition(':')[0]: [
            provider for provider, found in summaries.items()
            if name.partition(':')[2] in found['resources']]
            for name in specs if name.startswith('resources')}
        every = [self.candidate(specs, dict(zip(mapped, one)))
                 for one in itertools.product(*mapped.values())]
        assume(len(every) > 1)
        found = data.draw(st.lists(
            st.sampled_from(every), min_size=2, max_size=5))
        taken = data.draw(st.lists(st.sampled_from(every), max_size=1))
        spec = self.spec(specs, instance_group=objects.InstanceGroup(
            policy='soft-affinity') if is_soft else None)
        begun = self.schedulings.begin(spec, summaries)
        for candidate in taken:
            begun.take(candidate)
        less, more = self.weigh(spec, found[1:], found)
        if less is not None:
            self.assertGreaterEqual(more, less)

    @staticmethod
    def candidate(specs, mapped):
        allocations = {}
        for group, provider in mapped.items():
            [name] = (key.partition(':')[2] for key in specs
                      if key.startswith(f'resources{group}:'))
            given = allocations.setdefault(provider, {'resources': {name: 0}})
            given['resources'][name] += 1
        return {'allocations': allocations,
                'mappings': {group: [one] for group, one in mapped.items()}}
