# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Costs of candidates, on provider summaries as Placement writes them."""

import copy
import gc
import heapq
import itertools
import random
import threading
import types

from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel import demand as demands
from nova_accel import naming
from nova_accel.scheduler import cost as costs
from nova_accel.scheduler import facts
from nova_accel.scheduler import scheduling as schedulings
from tests.bench import whole

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
GPU = 'CUSTOM_ACCELERATOR_GPU'
WANTED = 'd8424dc4a4a3c413f89e433683f9040b'
OTHER = 'f7df405cbd7acf7222f144b0b93acd18'
THIRD = '5b3a1c7e92d44f608e1bc07d64a2f935'


class Flavor(types.SimpleNamespace):

    def __contains__(self, name):
        # as nova.objects: whether it is set
        return hasattr(self, name)


class Spec:
    """Has what is read of a RequestSpec."""

    def __init__(self, **specs):
        self.flavor = Flavor(extra_specs={
            k.replace('__', ':'): v for k, v in specs.items()})

    def __contains__(self, name):
        return hasattr(self, name)


def region(function=None, programmable=True, used=0, capacity=1, root='root'):
    """A provider summary."""
    traits = {'CUSTOM_FPGA_INTEL'}
    if function:
        spelled = naming.function_trait(function)
        traits |= {spelled, spelled.replace('FPGA_', 'FPGA_INTEL_'),
                   spelled.replace('FUNCTION_', 'FUNCTION_INTEL_')}
    if programmable:
        traits.add(naming.PROGRAMMABLE)
    return {'traits': sorted(traits), 'parent_provider_uuid': root,
            'root_provider_uuid': root,
            'resources': {FPGA: {'capacity': capacity, 'used': used}}}


def with_trait(trait):
    made = region(OTHER)
    made['traits'].append(trait)
    return made


def refuse(url, version):
    raise AssertionError(f'Placement was asked for {url}')


def candidate(*regions, **groups):
    """regions for _ACCEL0, _ACCEL1 ..."""
    groups = groups or {f'_ACCEL{n}': rp for n, rp in enumerate(regions)}
    allocations = {'root': {'resources': {'VCPU': 1}}}
    for rp in groups.values():
        given = allocations.setdefault(rp, {'resources': {FPGA: 0}})
        given['resources'][FPGA] += 1
    return {'allocations': allocations,
            'mappings': {'': ['root'],
                         **{g: [rp] for g, rp in groups.items()}}}


ONE = {f'resources_ACCEL0__{FPGA}': '1', 'accel_ACCEL0__function_id': WANTED}
TWO = {**ONE, f'resources_ACCEL1__{FPGA}': '1',
       'accel_ACCEL1__function_id': OTHER}


class Base(testtools.TestCase):

    def setUp(self):
        super().setUp()
        config = config_fixture.Config(conf.CONF)
        config.setUp()
        self.addCleanup(config.cleanUp)
        self.demand = demands.Demand()

    def look(self, regions, get=refuse, **specs):
        return schedulings.Scheduling(Spec(**specs), regions, self.demand, get)

    def ask(self, function, times=1):
        for _ in range(times):
            self.demand.add([naming.function_trait(function)])

    def order(self, scheduling, *candidates):
        candidates = list(candidates)
        candidates.sort(key=scheduling.cost)
        return candidates

    def assertBestFirst(self, scheduling, *expected):
        self.assertEqual(list(expected), self.order(scheduling, *expected))
        self.assertEqual(list(expected),
                         self.order(scheduling, *reversed(expected)))

    def assertUnusable(self, scheduling, *candidates):
        """More than ten programmings speak against it."""
        self.assertLess(max(self.scores(scheduling, *candidates)), -5000)

    def scores(self, scheduling, *candidates):
        """What each host weighs whose first candidate this is."""
        return [0.0 - cost for cost in map(scheduling.cost, candidates)]


def at(node=None, root=None, **more):
    """A region that shows where it is."""
    made = region(**more)
    made['traits'] += [
        f'CUSTOM_ACCELERATOR_{kind}_{name}' for kind, name
        in (('NUMA', node), ('PCIE_ROOT_0000', root)) if name is not None]
    return made


class PlacesTest(Base):

    SPECS = {f'resources_ACCEL{n}__{FPGA}': '1' for n in range(2)}

    def placed(self, **specs):
        return self.look({
            'a1': at(0, '3A'), 'a2': at(0, '3A'), 'a3': at(0, '5D'),
            'b1': at(1, '9A'), 'any': at(), 'pool': at(0)},
            **self.SPECS, **specs)

    def test_order(self):
        for specs in {}, {'accel__numa_affinity': 'required'}, {
                'accel__same': 'numa'}:
            self.assertBestFirst(self.placed(**specs), *(
                candidate(*pair) for pair in (
                    ('a1', 'a2'), ('a1', 'a3'), ('a1', 'b1'))))
        # what its host will choose may be as close
        self.assertEqual(
            [(1, 1), (1, 1), (0, 0), (2, 2)], [
                tuple(map(len, self.placed().facts.places(candidate(*pair))))
                for pair in (('a1', 'any'), ('a1', 'pool'), ('any', 'any'),
                             ('a1', 'b1'))])

    def test_hosts_whose_devices_are_close_score_more(self):
        pairs = [candidate(*pair) for pair in (
            ('a1', 'a2'), ('a1', 'a3'), ('a1', 'b1'))]
        functions = {f'accel_ACCEL{n}__function_id': WANTED for n in range(2)}
        for specs in {}, functions:
            with self.subTest(specs):
                near, roots, nodes = self.scores(self.placed(**specs), *pairs)
                self.assertTrue(near > roots > nodes, (near, roots, nodes))
        # at the default multiplier half of one of Nova's weights
        multiplier = conf.CONF.accel.weight_multiplier
        self.assertTrue(0.3 < (near - nodes) * multiplier < 1)
        # a pool of a whole host may find what is close
        self.assertEqual(self.scores(self.placed(), candidate('any', 'any')),
                         self.scores(self.placed(), pairs[0]))
        # one group has nothing to be close to
        self.assertEqual(1, len(set(self.scores(
            self.look({'a': at(0), 'b': at(1)}, **{f'resources1__{FPGA}': '1'}),
            candidate(**{'1': 'a'}), candidate(**{'1': 'b'})))))

    def test_closeness_never_outweighs_a_programming(self):
        last = {f'accel_ACCEL{n}__function_id': ','.join(
            [8 * f'{n}abc', *(8 * f'{n}{i}ef' for i in range(5)), function])
            for n, function in enumerate((WANTED, OTHER))}
        for specs in TWO, {**TWO, **last}:
            with self.subTest(specs):
                scheduling = self.look({
                    'far': at(0, '3A', function=WANTED),
                    'apart': at(1, '9A', function=OTHER),
                    'near': at(0, '3A'), 'empty': at(0, '3A')}, **specs)
                pairs = candidate('far', 'apart'), candidate('far', 'near')
                self.assertBestFirst(scheduling, *pairs)
                loaded, programmed = self.scores(scheduling, *pairs)
                self.assertGreater(loaded, programmed)

    def test_server_that_does_not_care(self):
        scheduling = self.placed(accel__numa_affinity='none')
        both = [candidate('a1', 'b1'), candidate('a1', 'a2')]
        self.assertEqual(both, self.order(scheduling, *both))
        # and one of one group: its host chooses
        self.assertFalse(self.look(
            {'a1': at(0)}, **ONE, accel__same='numa').compares_places)

    def test_a_function_that_is_there_comes_first(self):
        scheduling = self.look({
            'a': at(0, function=WANTED), 'b': at(1, function=OTHER),
            'c': at(0), 'd': at(0)}, **TWO)
        self.assertBestFirst(
            scheduling, candidate('a', 'b'), candidate('a', 'c'))

    def test_may_satisfy(self):
        for specs, *expected in (
                ({'accel__same': 'pcie_root'}, 1, 0, 0, 1, 1),
                ({'accel__same': 'numa'}, 1, 1, 0, 1, 1),
                ({'accel__numa_affinity': 'required'}, 1, 1, 0, 1, 1),
                ({'accel__numa_affinity': 'required', 'hw__numa_nodes': '2'},
                 1, 1, 1, 1, 1),
                ({}, 1, 1, 1, 1, 1)):
            with self.subTest(specs):
                scheduling = self.placed(**specs)
                self.assertEqual(list(map(bool, expected)), [
                    scheduling.may_satisfy(candidate(*pair))
                    for pair in (('a1', 'a2'), ('a1', 'a3'), ('a1', 'b1'),
                                 ('a1', 'any'), ('pool', 'any'))])


class RankingTest(Base):

    def test_order(self):
        scheduling = self.look({
            'has': region(WANTED), 'used': region(WANTED, programmable=False),
            'empty': region(), 'common': region(OTHER),
            'common2': region(OTHER), 'scarce': region(THIRD),
            'stuck': region(programmable=False)}, **ONE)
        self.assertBestFirst(scheduling, *map(candidate, (
            'empty', 'common', 'scarce', 'stuck')))
        for other in ('empty', 'common', 'scarce', 'stuck'):
            self.assertBestFirst(
                scheduling, candidate('has'), candidate(other))
        # a function that is there needs no programming
        self.assertEqual(
            [candidate('used'), candidate('empty')],
            self.order(scheduling, candidate('empty'), candidate('used')))

    def test_region_that_is_being_cleaned(self):
        """A build waits for it: longer than for one that is clean, not as
        long as for a programming."""
        regions = {'has': region(WANTED), 'soon': region(WANTED),
                   'empty': region(), 'o': region(OTHER),
                   'other': region(OTHER), 'used': region(OTHER, False, 1, 2)}
        for name in 'soon', 'other':
            regions[name]['traits'].append(naming.CLEANING)
        self.assertBestFirst(self.look(regions, **ONE), *map(candidate, (
            'has', 'soon', 'empty', 'o', 'other', 'used')))

    def test_demand_for_each_idle_copy(self):
        regions = {'empty': region(), 'o1': region(OTHER),
                   'o2': region(OTHER), 't': region(THIRD)}
        for others, thirds, expected in (
                # by the square of the copies 4, 1; 0.5, 2; of no demand those
                # of which there are more
                (16, 1, ('t', 'o1')), (2, 2, ('o1', 't')),
                (0, 0, ('o1', 't'))):
            with self.subTest(others=others, thirds=thirds):
                self.demand = demands.Demand()
                self.ask(OTHER, others)
                self.ask(THIRD, thirds)
                self.assertBestFirst(self.look(regions, **ONE), *map(
                    candidate, ('empty', *expected)))

    def test_copies_in_use_do_not_count(self):
        self.ask(OTHER, 3)
        self.ask(THIRD, 2)
        # of OTHER, two copies more that no server can get
        scheduling = self.look({
            'o': region(OTHER), 'busy': region(OTHER, used=1),
            'fenced': region(OTHER, capacity=0), 't': region(THIRD)}, **ONE)
        self.assertBestFirst(scheduling, candidate('t'), candidate('o'))

    def test_names_and_images_count_with_the_function(self):
        named = region(OTHER)
        named['traits'] += [naming.function_name_trait('nlb'),
                            naming.bitstream_trait(THIRD)]
        scheduling = self.look({'n': named, 't': region(THIRD)}, **ONE)
        self.ask(THIRD, 2)
        self.ask(OTHER)
        self.demand.add([naming.function_name_trait('nlb')])
        self.demand.add([naming.bitstream_trait(THIRD)])
        self.assertBestFirst(scheduling, candidate('t'), candidate('n'))

    def test_region_in_use_is_not_programmed(self):
        scheduling = self.look({
            'used': region(capacity=2, used=1), 'o': region(OTHER),
            'has': region(WANTED, capacity=2, used=1)}, **ONE)
        self.assertBestFirst(
            scheduling, candidate('has'), candidate('o'), candidate('used'))
        self.assertUnusable(scheduling, candidate('used'))

    def test_region_that_the_answer_lacks(self):
        scheduling = self.look({
            'has': region(WANTED), 'stuck': region(OTHER, False)}, **ONE)
        self.assertBestFirst(scheduling, candidate('has'),
                             candidate('unknown'), candidate('stuck'))

    def test_without_an_answer_all_are_the_same(self):
        scheduling = self.look({}, **TWO)
        both = [candidate('a', 'b'), candidate('c', 'd')]
        self.assertEqual(both, self.order(scheduling, *both))
        one, two = self.scores(scheduling, *both)
        self.assertEqual(one, two)

    def test_most_groups(self):
        scheduling = self.look({
            'w': region(WANTED), 'o': region(OTHER), 'x': region(THIRD),
            'y': region(THIRD), 'stuck': region(THIRD, False)}, **TWO)
        self.assertBestFirst(
            scheduling, candidate('w', 'o'), candidate('w', 'x'),
            candidate('x', 'y'), candidate('w', 'stuck'))

    def test_groups_are_tied_by_mappings(self):
        scheduling = self.look({'w': region(WANTED), 'o': region(OTHER)}, **TWO)
        right = candidate(_ACCEL0='w', _ACCEL1='o')
        swapped = candidate(_ACCEL0='o', _ACCEL1='w')
        self.assertEqual([right, swapped],
                         self.order(scheduling, swapped, right))

    def test_unnumbered_group(self):
        scheduling = self.look(
            {'w': region(WANTED), 'e': region()},
            **{f'resources__{FPGA}': '1', 'accel__function_id': WANTED})

        def unnumbered(rp):
            made = candidate(rp)
            made['mappings'] = {'': ['root', rp]}
            return made
        self.assertBestFirst(scheduling, unnumbered('w'), unnumbered('e'))

    def test_by_name_and_bitstream(self):
        name = naming.function_name_trait('nlb')
        image = naming.bitstream_trait(WANTED)
        for key, value, trait in (('function_name', 'nlb', name),
                                  ('bitstream_id', WANTED, image)):
            scheduling = self.look(
                {'has': with_trait(trait), 'not': region(OTHER)},
                **{f'resources1__{FPGA}': '1', f'accel1__{key}': value})
            self.assertEqual(
                [self.as_group_1('has'), self.as_group_1('not')],
                self.order(scheduling, *map(self.as_group_1, ('not', 'has'))))

    @staticmethod
    def as_group_1(rp):
        return candidate(**{'1': rp})

    def test_any_of_several_functions(self):
        scheduling = self.look(
            {'second': region(OTHER), 'empty': region(),
             'third': region(THIRD)},
            **{f'resources1__{FPGA}': '1',
               'accel1__function_id': f'{WANTED},{OTHER}'})
        self.assertBestFirst(scheduling, *map(
            self.as_group_1, ('second', 'empty', 'third')))
        scheduling.count('server')
        traits = [naming.function_trait(f) for f in (WANTED, OTHER, THIRD)]
        self.assertEqual([1, 1, 0], [
            round(n) for n in self.demand.counts(traits).values()])

    def test_the_first_of_several_functions_that_is_loaded(self):
        second_soon = with_trait(naming.CLEANING)
        scheduling = self.look(
            {'first': region(WANTED), 'second': region(OTHER),
             'soon': second_soon, 'third': region(THIRD), 'empty': region()},
            **{f'resources1__{FPGA}': '1',
               'accel1__function_id': f'{WANTED},{OTHER},{THIRD}'})
        expected = [*map(self.as_group_1, (
            'first', 'second', 'soon', 'third', 'empty'))]
        self.assertBestFirst(scheduling, *expected)
        # and so of several hosts, each by a clear step
        scores = self.scores(scheduling, *expected)
        del scores[2]
        self.assertEqual(0.0, scores[0])
        for better, worse in itertools.pairwise(scores):
            self.assertGreater(better, worse + 0.03)

    def test_a_later_function_costs_less_than_a_programming(self):
        scheduling = self.look(
            {'last': region(THIRD), 'empty': region(), 'other': region(OTHER)},
            **{**TWO, 'accel_ACCEL0__function_id':
               f'{WANTED},{"a" * 32},{"b" * 32},{THIRD}'})
        pairs = candidate('last', 'other'), candidate('empty', 'other')
        self.assertBestFirst(scheduling, *pairs)
        loaded, programmed = self.scores(scheduling, *pairs)
        self.assertGreater(loaded, programmed + 0.05)

    def test_order_of_groups_makes_no_difference(self):
        """Else of requests at the same time all want the same candidate."""
        groups = {}
        for group in '012':
            groups[f'resources_ACCEL{group}__{FPGA}'] = '1'
            groups[f'accel_ACCEL{group}__function_id'] = f'{WANTED},{OTHER}'
        regions = {'a': region(WANTED), 'b': region(OTHER), 'c': region(OTHER)}
        for name in 'ac':
            regions[name]['traits'].append(naming.CLEANING)
        scheduling = self.look(regions, **groups)
        self.assertEqual(1, len(set(self.scores(scheduling, *(
            candidate(*names) for names in itertools.permutations('abc'))))))

    def test_stable(self):
        scheduling = self.look(
            {'a': region(WANTED), 'b': region(WANTED)}, **ONE)
        for pair in (['a', 'b'], ['b', 'a']):
            pair = list(map(candidate, pair))
            self.assertEqual(pair, self.order(scheduling, *pair))

    def test_taken_is_last(self):
        scheduling = self.look({'w': region(WANTED), 's': region(OTHER, False),
                                'two': region(WANTED, capacity=2)}, **ONE)
        for name in ('w', 'two'):
            scheduling.take(candidate(name))
        self.assertBestFirst(scheduling, candidate('two'), candidate('s'),
                             candidate('w'))
        self.assertUnusable(scheduling, candidate('s'), candidate('w'))
        scheduling.take(candidate('two'))
        self.assertBestFirst(scheduling, candidate('s'), candidate('two'))

    def test_servers_of_one_request_share_what_the_first_programs(self):
        scheduling = self.look({'a': region(capacity=2), 'b': region()}, **ONE)
        scheduling.take(candidate('a'))
        self.assertBestFirst(scheduling, candidate('a'), candidate('b'))

    def test_what_the_first_overwrites_is_not_there_for_the_next(self):
        scheduling = self.look({
            'a': region(OTHER, capacity=2), 'b': region(OTHER),
            'c': region(OTHER), 'd': region(WANTED)}, **TWO)
        scheduling.take(candidate('a', 'b'))
        self.assertBestFirst(
            scheduling, candidate('d', 'c'), candidate('d', 'a'))
        self.assertUnusable(scheduling, candidate('d', 'a'))

    def test_copies_are_counted_again_when_one_is_taken(self):
        self.ask(OTHER, 3)
        self.ask(THIRD, 2)
        scheduling = self.look({
            'o1': region(OTHER), 'o2': region(OTHER), 't': region(THIRD)},
            **ONE)
        self.assertBestFirst(scheduling, candidate('o1'), candidate('t'))
        scheduling.take(candidate('o2'))
        self.assertBestFirst(scheduling, candidate('t'), candidate('o1'))

    def test_without_function_what_is_missed_least(self):
        self.ask(OTHER, 5)
        self.ask(THIRD)
        scheduling = self.look(
            {'empty': region(root='a'), 'third': region(THIRD, root='b'),
             'other': region(OTHER, root='c')},
            **{f'resources_ACCEL0__{FPGA}': '1'})
        found = [candidate(name) for name in ('empty', 'third', 'other')]
        self.assertBestFirst(scheduling, *found)
        scores = self.scores(scheduling, *found)
        self.assertEqual(sorted(scores, reverse=True), scores)
        self.assertEqual(3, len(set(scores)))

    def test_cleaning_counts_between_hosts(self):
        for specs in ONE, {f'resources_ACCEL0__{FPGA}': '1'}:
            cleaned = region(WANTED)
            cleaned['traits'].append(naming.CLEANING)
            ready, soon, other = self.scores(
                self.look({'a': region(WANTED), 'b': cleaned, 'c': region()},
                          **specs), *map(candidate, 'abc'))
            self.assertGreater(ready, soon)
            if specs is ONE:
                self.assertGreater(soon, other)

    def test_suspect_comes_after_all_others(self):
        """On a host and between hosts, with a function and without."""
        suspect = region(WANTED)
        suspect['traits'].append(naming.SUSPECT)
        cleaned = region()
        cleaned['traits'].append(naming.CLEANING)
        regions = {'s': suspect, 'carries': region(WANTED), 'o': region(OTHER),
                   'cleaned': cleaned}
        for specs in ONE, {f'resources_ACCEL0__{FPGA}': '1'}:
            scheduling = self.look(regions, **specs)
            others = [candidate(name) for name in regions if name != 's']
            for other in others:
                self.assertBestFirst(scheduling, other, candidate('s'))
            *scores, last = self.scores(scheduling, *others, candidate('s'))
            self.assertGreater(min(scores), last + 1000)
            # it can be had all the same
            self.assertGreater(last, -costs.UNUSABLE)

    def test_flavor_without_accelerators(self):
        plain, unloaded = Spec(hw__cpu_policy='dedicated'), Spec()
        del unloaded.flavor.extra_specs
        for spec in (plain, unloaded):
            self.assertEqual([], schedulings.Scheduling(
                spec, {'a': region()}, self.demand, refuse).requests)

    def test_malformed_flavor_fails_no_scheduling(self):
        with self.assertLogs(schedulings.LOG.logger, 'WARNING'):
            scheduling = self.look(
                {}, **{**ONE, 'accel_ACCEL0__function_id': 'nlb'})
        self.assertEqual([], scheduling.requests)

    def test_answer_of_nova_is_not_changed(self):
        regions = {'w': region(WANTED), 'o': region(OTHER)}
        before = copy.deepcopy(regions)
        scheduling = self.look(regions, Placement({}), **ONE)
        self.order(scheduling, candidate('w'), candidate('o'))
        scheduling.take(candidate('w'))
        scheduling.refresh('root')
        self.assertEqual(before, regions)

    def test_score_is_absolute(self):
        scheduling = self.look({
            'has': region(WANTED), 'empty': region(), 'scarce': region(THIRD),
            'stuck': region(THIRD, False)}, **ONE)
        has, empty, scarce, stuck = self.scores(scheduling, *map(candidate, (
            'has', 'empty', 'scarce', 'stuck')))
        self.assertEqual(0.0, has)
        self.assertTrue(0 > empty > scarce > stuck)
        # at the default multiplier more than Nova's RAM, CPU, disk and
        # hypervisor weighers together
        multiplier = conf.CONF.accel.weight_multiplier
        self.assertGreater((has - empty) * multiplier, 4)
        self.assertGreater((scarce - stuck) * multiplier, 4)


class Placement:
    """GET of /allocation_candidates for one tree, from its summaries."""

    def __init__(self, summaries):
        self.summaries = summaries
        self.urls = []

    def __call__(self, url, version):
        self.urls.append(url)
        body = {'provider_summaries': self.summaries}
        return types.SimpleNamespace(status_code=200, json=lambda: body)


class Silent(Placement):

    def __call__(self, url, version):
        self.urls.append(url)
        if isinstance(self.summaries, Exception):
            raise self.summaries
        return self.summaries


class NoJson(types.SimpleNamespace):
    status_code = 200

    def json(self):
        raise ValueError('Expecting value')


class RefreshTest(Base):
    """What another request took, which Nova's answer cannot tell."""

    REGIONS = {'w': region(WANTED, root='one'), 'o': region(OTHER, root='one'),
               'x': region(WANTED, root='two')}

    def test_one_of_two(self):
        get = Placement({'w': region(WANTED, used=1, root='one'),
                         'o': region(OTHER, root='one')})
        scheduling = self.look(self.REGIONS, get, **ONE)
        scheduling.refresh('one')
        self.assertEqual([
            f'/allocation_candidates?in_tree=one&resources={FPGA}:1&limit=1'],
            get.urls)
        self.assertBestFirst(scheduling, candidate('x'), candidate('o'),
                             candidate('w'))

    def test_costs_from_before_do_not_count(self):
        scheduling = self.look(self.REGIONS, Placement({}), **ONE)
        before = scheduling.cost(candidate('w'))
        scheduling.refresh('one')
        self.assertGreater(scheduling.cost(candidate('w')), before)

    def test_all(self):
        scheduling = self.look(self.REGIONS, Placement({}), **ONE)
        scheduling.refresh('one')
        self.assertEqual([True, True, False], [
            scheduling.facts.is_taken(candidate(name))
            for name in ('w', 'o', 'x')])

    def test_own_claims_are_among_it(self):
        two = {'w': region(WANTED, capacity=2, root='one')}
        scheduling = self.look(two, Placement(
            {'w': region(WANTED, capacity=2, used=1, root='one')}), **ONE)
        scheduling.take(candidate('w'))
        scheduling.refresh('one')
        self.assertFalse(scheduling.facts.is_taken(candidate('w')))

    def test_no_answer_changes_nothing(self):
        for answer in (ConnectionError('refused'), None, False,
                       types.SimpleNamespace(status_code=200, json=dict),
                       types.SimpleNamespace(status_code=200, json=lambda: {
                           'provider_summaries': [5]}),
                       NoJson()):
            with self.subTest(answer):
                scheduling = self.look(self.REGIONS, Silent(answer), **ONE)
                scheduling.take(candidate('w'))
                with self.assertLogs(facts.LOG.logger, 'WARNING'):
                    scheduling.refresh('one')
                self.assertBestFirst(scheduling, candidate('x'),
                                     candidate('o'), candidate('w'))


class PackingTest(Base):
    """Servers that want devices of which all are alike."""

    ONE = {f'resources1__{GPU}': '1'}

    @staticmethod
    def pool(free, root, *traits, capacity=8):
        return {'traits': list(traits), 'root_provider_uuid': root,
                'resources': {GPU: {'capacity': capacity,
                                    'used': capacity - free}}}

    @staticmethod
    def taking(provider):
        return {'allocations': {provider: {'resources': {GPU: 1}}},
                'mappings': {'1': [provider]}}

    def found(self, pools, *names, **specs):
        return self.scores(self.look(pools, **self.ONE, **specs),
                           *map(self.taking, names))

    def test_fullest_host(self):
        pools = {'a': self.pool(8, 'a'), 'b': self.pool(2, 'b'),
                 'c': self.pool(1, 'c')}
        empty, some, full = self.found(pools, *'abc')
        # each by more than RAM, CPU, disk and I/O together
        step = 4 / conf.CONF.accel.weight_multiplier
        self.assertGreater(full - some, step)
        self.assertGreater(some - empty, step)
        spread = self.found(pools, *'abc', accel__packing='spread')
        self.assertGreater(spread[0] - spread[1], step)
        conf.CONF.set_override('packing', 'spread', 'accel')
        self.assertEqual(spread, self.found(pools, *'abc'))
        self.assertEqual([empty, some, full], self.found(
            pools, *'abc', accel__packing='stack'))

    def test_fullest_node(self):
        pools = {'n0': self.pool(1, 'a', capacity=4),
                 'n1': self.pool(3, 'a', capacity=4),
                 'm0': self.pool(0, 'b', capacity=4),
                 'm1': self.pool(4, 'b', capacity=4)}
        for packing, *expected in ('stack', 'n0', 'n1'), ('spread', 'n1', 'n0'):
            self.assertBestFirst(
                self.look(pools, **self.ONE, accel__packing=packing),
                *map(self.taking, expected))
        # of hosts that are as full, the one whose node stays whole
        full, whole = self.found(pools, 'n0', 'm1')
        self.assertGreater(full, whole)

    def test_devices_that_the_flavor_prefers(self):
        """More than all that follows; none of them is asked for."""
        pools = {'full': self.pool(1, 'a', 'CUSTOM_A40'),
                 'near': self.pool(8, 'b', 'CUSTOM_L40S',
                                   'CUSTOM_ACCELERATOR_NUMA_0'),
                 'other': self.pool(1, 'c', 'CUSTOM_T4'),
                 'cleaned': self.pool(100, 'd', 'CUSTOM_L40S',
                                      naming.CLEANING, capacity=100)}
        order = 'near', 'cleaned', 'full', 'other'
        scheduling = self.look(pools, **self.ONE,
                               accel1__prefer='CUSTOM_L40S,CUSTOM_A40')
        self.assertBestFirst(scheduling, *map(self.taking, order))
        scores = self.scores(scheduling, *map(self.taking, order))
        self.assertEqual(sorted(scores, reverse=True), scores)
        self.assertGreater(scores[1] - scores[2], 4)
        self.assertGreater(scores[2] - scores[3], 4)
        # each group has its own
        two = {**self.ONE, f'resources2__{GPU}': '1'}
        both = [{'allocations': {}, 'mappings': {'1': [one], '2': [other]}}
                for one, other in (('near', 'full'), ('full', 'near'))]
        for prefer, expected in (
                ({'accel1__prefer': 'CUSTOM_L40S'}, both),
                ({'accel2__prefer': 'CUSTOM_L40S'}, both[::-1])):
            self.assertBestFirst(self.look(pools, **two, **prefer), *expected)

    def test_loaded_function_counts_more_than_a_preference(self):
        """And the preference more than what is lost."""
        self.ask(OTHER, 100)
        regions = {'loaded': region(WANTED), 'liked': region(OTHER),
                   'empty': region()}
        regions['liked']['traits'].append('CUSTOM_D5005')
        names = 'loaded', 'liked', 'empty'
        asked = {'accel_ACCEL0__prefer': 'CUSTOM_D5005'}
        scheduling = self.look(regions, **ONE, **asked)
        self.assertBestFirst(scheduling, *map(candidate, names))
        scores = self.scores(scheduling, *map(candidate, names))
        self.assertEqual(sorted(scores, reverse=True), scores)

    def test_product_that_others_ask_less_for(self):
        pools = {'a': self.pool(1, 'h', 'CUSTOM_A'),
                 'b': self.pool(8, 'h', 'CUSTOM_B')}
        named = demands.Demand()
        asked = schedulings.Scheduling(
            Spec(**self.ONE, trait1__CUSTOM_A='required'), pools,
            self.demand, refuse, named)
        asked.count('server')
        any_of_them = schedulings.Scheduling(
            Spec(**self.ONE), pools, self.demand, refuse, named)
        self.assertBestFirst(any_of_them, *map(self.taking, 'ba'))

    def test_servers_that_name_a_product_find_it(self):
        """Others leave it to them, once it was asked for."""
        self.assertGreater(self.refused(named=None), 20)
        self.assertLess(self.refused(named=demands.Demand()), 10)

    def refused(self, named):
        """How many of the servers that name one of two products are refused.

        Of 800 servers a quarter names it; 6 of 8 GPUs are in use on average.
        """
        chance, now, running, refused = random.Random(3), 0.0, [], 0
        free = {f'{product}{host}': 8 for product in 'AB' for host in range(4)}
        for number in range(800):
            now += chance.expovariate(.75 * 8 * len(free))
            while running and running[0][0] <= now:
                free[heapq.heappop(running)[1]] += 1
            specs = {**self.ONE, **({'trait1__CUSTOM_A': 'required'}
                                    if number % 4 == 0 else {})}
            scheduling = schedulings.Scheduling(
                Spec(**specs), {host: self.pool(
                    left, host, f'CUSTOM_{host[0]}')
                    for host, left in free.items()},
                self.demand, refuse, named)
            if named:
                scheduling.count('server')
            fit = [host for host, left in free.items() if left and (
                number % 4 or host[0] == 'A')]
            if fit:
                host = min(fit, key=lambda host: (
                    scheduling.cost(self.taking(host)), chance.random()))
                free[host] -= 1
                heapq.heappush(running, (now + chance.expovariate(1), host))
            refused += not fit
        return refused

    def test_tenants_soft_group_counts_more(self):
        spec = Spec(**self.ONE)
        spec.instance_group = types.SimpleNamespace(
            policy='soft-anti-affinity')
        pools = {'a': self.pool(8, 'a'), 'b': self.pool(2, 'b')}
        scheduling = schedulings.Scheduling(spec, pools, self.demand, refuse)
        self.assertEqual(1, len(set(self.scores(
            scheduling, *map(self.taking, 'ab')))))

    def test_servers_of_one_request_fill_one_host(self):
        scheduling = self.look({'a': self.pool(4, 'a'), 'b': self.pool(5, 'b')},
                               **self.ONE)
        for _ in range(4):
            full, other = self.scores(scheduling, *map(self.taking, 'ab'))
            self.assertGreater(full, other)
            scheduling.take(self.taking('a'))
        self.assertUnusable(scheduling, self.taking('a'))

    def test_whole_hosts_stay_whole(self):
        """Of servers of eight as many as with best fit are refused, by a
        trace in which Nova's own weights spread."""
        trace = whole.stretched(whole.chosen(7, 400), 8 * whole.WHOLE, .8)
        for nodes in whole.NODES:
            with self.subTest(nodes=nodes):
                best, ours, nova = (
                    whole.play(rule, trace, 8, nodes)['refused']
                    for rule in (whole.best_fit, whole.cheapest, whole.nova))
                self.assertLessEqual(ours, best)
                self.assertGreater(nova, best + 10)

    def test_servers_without_accelerators(self):
        self.assertEqual(0.0, costs.without_accelerators(0))
        scheduling = self.look({
            'a': self.pool(8, 'A'), 'a2': self.pool(1, 'A'),
            'A': {'traits': [], 'root_provider_uuid': 'A', 'resources': {
                'VCPU': {'capacity': 9, 'used': 1}}},
            'b': self.pool(2, 'B')})
        self.assertEqual({'A': 9, 'B': 2}, scheduling.facts.free_of_hosts())


class SchedulingsTest(testtools.TestCase):

    def test_end(self):
        begun = schedulings.Schedulings(refuse)
        spec = Spec(**ONE)
        # as Nova's: the garbage collector alone finds it
        spec.itself = spec
        begun.begin(spec, {})
        begun.end(spec)
        begun.end(spec)
        self.assertEqual(0, len(begun._begun))

    def test_a_request_has_its_own(self):
        begun = schedulings.Schedulings(refuse)
        one, two = Spec(**ONE), Spec(**TWO)
        first, second = begun.begin(one, {}), begun.begin(two, {})
        self.assertIs(first, begun.of(one))
        self.assertIs(second, begun.of(two))

    def test_a_second_scheduling_of_a_request(self):
        begun = schedulings.Schedulings(refuse)
        spec = Spec(**ONE)
        self.assertIsNot(begun.begin(spec, {}), begun.begin(spec, {}))

    def test_without_answer(self):
        begun = schedulings.Schedulings(refuse)
        spec = Spec(**ONE)
        self.assertEqual(1, len(begun.of(spec).requests))
        self.assertIs(begun.of(spec), begun.of(spec))
        self.assertEqual(1, len(begun.begin(spec, None).requests))

    def test_they_go_with_the_request(self):
        begun = schedulings.Schedulings(refuse)
        spec = Spec(**ONE)
        begun.begin(spec, {})
        del spec
        gc.collect()
        self.assertEqual(0, len(begun._begun))

    def test_a_server_counts_once(self):
        begun = schedulings.Schedulings(refuse)
        scheduling = begun.begin(Spec(**TWO), {})
        for server in ('s1', 's1', 's2', 's1'):
            scheduling.count(server)
        traits = [naming.function_trait(f) for f in (WANTED, OTHER, THIRD)]
        counts = begun._demand.counts(traits)
        self.assertEqual([2, 2, 0], [round(counts[t]) for t in traits])


class DemandTest(testtools.TestCase):

    def test_half(self):
        demand = demands.Demand()
        demand.add(['A'])
        for _ in range(demand.HALF_LIFE):
            demand.add(['B'])
        counts = demand.counts(['A', 'B', 'C'])
        self.assertAlmostEqual(0.5, counts['A'])
        self.assertGreater(counts['B'], demand.HALF_LIFE / 2)
        self.assertEqual(0.0, counts['C'])

    def test_of_any_number(self):
        demand = demands.Demand()
        demand.HALF_LIFE = 1
        for number in range(5000):
            demand.add(['A', 'B'] if number % 2 else ['A'])
        counts = demand.counts(['A', 'B'])
        self.assertAlmostEqual(2, counts['A'])
        self.assertAlmostEqual(4 / 3, counts['B'])

    def test_memory_is_bounded(self):
        demand = demands.Demand()
        demand.LIMIT = 100
        demand.HALF_LIFE = 10 ** 9
        for number in range(1000):
            demand.add(['often', f'T{number}'])
        self.assertLessEqual(len(demand._sums), 100)
        self.assertGreater(demand.counts(['often'])['often'], 800)

    def test_threads(self):
        demand = demands.Demand()
        demand.HALF_LIFE = 10 ** 9
        demand.LIMIT = 50

        def ask(name):
            for number in range(500):
                demand.add(['all', f'{name}{number}'])
                demand.counts(['all'])
        threads = [threading.Thread(target=ask, args=[n]) for n in 'ABCD']
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertAlmostEqual(2000, demand.counts(['all'])['all'], 2)
