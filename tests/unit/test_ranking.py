# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The ranking on candidates as Placement writes them.

Placement is a table of traits here, behind the protocol that it has: what it
answers is in tests/functional/test_scheduler_placement.py.
"""

import json
import types
import unittest
from urllib import parse

from hypothesis import given
from hypothesis import strategies as st
from oslo_config import fixture as config_fixture

from nova_accel import conf
from nova_accel import naming
from nova_accel.scheduler import placement_cache
from nova_accel.scheduler import ranking

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
WANTED = 'd8424dc4a4a3c413f89e433683f9040b'
OTHER = 'f7df405cbd7acf7222f144b0b93acd18'
THIRD = '5b3a1c7e92d44f608e1bc07d64a2f935'


class Answer:

    def __init__(self, body, status=200):
        self.status_code = status
        self.text = body if isinstance(body, str) else json.dumps(body)

    def __bool__(self):
        # as requests.Response
        return self.status_code < 400

    def json(self):
        return json.loads(self.text)


class Table:
    """GET of Placement from a table of provider -> traits."""

    def __init__(self, traits):
        self.traits = traits
        self.urls = []
        self.broken = None

    def __call__(self, url, version):
        self.urls.append(url)
        if isinstance(self.broken, Exception):
            raise self.broken
        if self.broken:
            return self.broken[0]
        split = parse.urlsplit(url)
        query = dict(parse.parse_qsl(split.query))
        if split.path == '/traits':
            prefix = query['name'].removeprefix('startswith:')
            return Answer({'traits': sorted(
                {t for traits in self.traits.values() for t in traits
                 if t.startswith(prefix)})})
        found = [rp for rp, traits in self.traits.items()
                 if query['required'] in traits]
        if not found and query['required'] != naming.PROGRAMMABLE:
            return Answer({'errors': [{'detail': 'No such trait(s)'}]}, 400)
        return Answer({'resource_providers': [{'uuid': rp} for rp in found]})


class Flavor(types.SimpleNamespace):

    def __contains__(self, name):
        # as nova.objects: whether it is set
        return hasattr(self, name)


class Spec:
    """Has what is read of a RequestSpec."""

    def __init__(self, **specs):
        self.flavor = Flavor(extra_specs={
            k.replace('__', ':'): v for k, v in specs.items()})


def region(function=None, programmable=True):
    traits = {'CUSTOM_FPGA_INTEL'}
    if function:
        spelled = naming.function_trait(function)
        traits |= {spelled, spelled.replace('FPGA_', 'FPGA_INTEL_'),
                   spelled.replace('FUNCTION_', 'FUNCTION_INTEL_')}
    if programmable:
        traits.add(naming.PROGRAMMABLE)
    return traits


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


class RankingTest(unittest.TestCase):

    def setUp(self):
        config = config_fixture.Config(conf.CONF)
        config.setUp()
        self.addCleanup(config.cleanUp)
        self.config = config
        self.set(function_cache_seconds=0)

    def set(self, **options):
        self.config.config(group='accel', **options)

    def look(self, regions, **specs):
        self.table = Table(regions)
        self.cache = placement_cache.PlacementCache(self.table)
        return self.cache.snapshot(Spec(**specs))

    def order(self, snapshot, *candidates):
        return [c for _, c in ranking.ranked(
            snapshot.requests, candidates, snapshot)]

    def assertBestFirst(self, snapshot, *expected):
        self.assertEqual(list(expected), self.order(snapshot, *expected))
        self.assertEqual(list(expected),
                         self.order(snapshot, *reversed(expected)))

    def scores(self, snapshot, *candidates):
        return [ranking.score(snapshot.requests, ranking.ranked(
            snapshot.requests, [c], snapshot)[0][0]) for c in candidates]

    def test_order(self):
        snapshot = self.look({
            'has': region(WANTED), 'used': region(WANTED, programmable=False),
            'empty': region(), 'common': region(OTHER),
            'common2': region(OTHER), 'scarce': region(THIRD),
            'stuck': region(programmable=False)}, **ONE)
        self.assertBestFirst(snapshot, *map(candidate, (
            'empty', 'common', 'scarce', 'stuck')))
        for other in ('empty', 'common', 'scarce', 'stuck'):
            self.assertBestFirst(snapshot, candidate('has'), candidate(other))
        # a function that is there needs no programming
        self.assertEqual(
            [candidate('used'), candidate('empty')],
            self.order(snapshot, candidate('empty'), candidate('used')))

    def test_most_groups(self):
        snapshot = self.look({
            'w': region(WANTED), 'o': region(OTHER), 'x': region(THIRD),
            'y': region(THIRD), 'stuck': region(THIRD, False)}, **TWO)
        self.assertBestFirst(
            snapshot, candidate('w', 'o'), candidate('w', 'x'),
            candidate('x', 'y'), candidate('w', 'stuck'))

    def test_groups_are_tied_by_mappings(self):
        snapshot = self.look({'w': region(WANTED), 'o': region(OTHER)}, **TWO)
        right = candidate(_ACCEL0='w', _ACCEL1='o')
        swapped = candidate(_ACCEL0='o', _ACCEL1='w')
        self.assertEqual([right, swapped], self.order(snapshot, swapped, right))

    def test_unnumbered_group(self):
        snapshot = self.look(
            {'w': region(WANTED), 'e': region(), 'root': set()},
            **{f'resources__{FPGA}': '1', 'accel__function_id': WANTED})

        def unnumbered(rp):
            made = candidate(rp)
            made['mappings'] = {'': ['root', rp]}
            return made
        self.assertBestFirst(snapshot, unnumbered('w'), unnumbered('e'))

    def test_by_name_and_bitstream(self):
        name = naming.function_name_trait('nlb')
        image = naming.bitstream_trait(WANTED)
        for key, value, trait in (('function_name', 'nlb', name),
                                  ('bitstream_id', WANTED, image)):
            snapshot = self.look(
                {'has': region(OTHER) | {trait}, 'not': region(OTHER)},
                **{f'resources1__{FPGA}': '1', f'accel1__{key}': value})
            self.assertEqual(
                [self.as_group_1('has'), self.as_group_1('not')],
                self.order(snapshot, *map(self.as_group_1, ('not', 'has'))))

    @staticmethod
    def as_group_1(rp):
        return candidate(**{'1': rp})

    def test_stable(self):
        snapshot = self.look({'a': region(WANTED), 'b': region(WANTED)}, **ONE)
        for pair in (['a', 'b'], ['b', 'a']):
            pair = list(map(candidate, pair))
            self.assertEqual(pair, self.order(snapshot, *pair))

    def test_taken_is_last(self):
        snapshot = self.look({'w': region(WANTED), 's': region(OTHER, False)},
                             **ONE)
        snapshot.full = {('w', FPGA, 1)}
        self.assertBestFirst(snapshot, candidate('s'), candidate('w'))
        self.assertEqual([0.0, 0.0],
                         self.scores(snapshot, candidate('s'), candidate('w')))

    def test_without_wish_all_are_the_same(self):
        snapshot = self.look({'a': region(OTHER), 'b': region()},
                             **{f'resources_ACCEL0__{FPGA}': '1'})
        both = [candidate('a'), candidate('b')]
        self.assertEqual(both, self.order(snapshot, *both))
        self.assertEqual([0.0, 0.0], self.scores(snapshot, *both))
        self.assertEqual([], self.table.urls)

    def test_score_is_absolute(self):
        snapshot = self.look({
            'has': region(WANTED), 'empty': region(), 'scarce': region(THIRD),
            'stuck': region(THIRD, False)}, **ONE)
        has, empty, scarce, stuck = self.scores(snapshot, *map(candidate, (
            'has', 'empty', 'scarce', 'stuck')))
        self.assertEqual((1.0, 0.0), (has, stuck))
        self.assertTrue(1 > empty > scarce > 0)
        # at the default multiplier more than Nova's RAM, CPU, disk and
        # hypervisor weighers together
        multiplier = conf.CONF.accel.weight_multiplier
        self.assertGreater((has - empty) * multiplier, 4)
        self.assertGreater((scarce - stuck) * multiplier, 4)

    @given(st.lists(st.tuples(
        st.sampled_from([None, WANTED, OTHER, THIRD]), st.booleans(),
        st.booleans()), min_size=2, max_size=6), st.data())
    def test_score_agrees_with_order(self, drawn, data):
        snapshot = self.look({f'r{n}': region(f, p)
                              for n, (f, p, _) in enumerate(drawn)}, **TWO)
        snapshot.full = {(f'r{n}', FPGA, 1)
                         for n, (_, _, full) in enumerate(drawn) if full}
        names = st.sampled_from([f'r{n}' for n in range(len(drawn))])
        candidates = [candidate(data.draw(names), data.draw(names))
                      for _ in range(4)]
        # the loss is compared where the best has to be programmed only
        ranks = sorted(
            (ranking.ranked(snapshot.requests, [c], snapshot)[0][0]
             for c in candidates))
        scores = [ranking.score(snapshot.requests, r) for r in ranks]
        self.assertEqual(sorted(scores, reverse=True), scores)
        self.assertTrue(all(0 <= s <= 1 for s in scores))
        usable = [(r, s) for r, s in zip(ranks, scores)
                  if not r.taken and not r.stuck]
        for (one, more), (two, less) in zip(usable, usable[1:]):
            self.assertEqual(one == two, more == less)


class RequestsTest(unittest.TestCase):
    """What Placement is asked, and when not."""

    def setUp(self):
        config = config_fixture.Config(conf.CONF)
        config.setUp()
        self.addCleanup(config.cleanUp)
        self.config = config
        self.set(function_cache_seconds=0)
        self.regions = {'has': region(WANTED), 'other': region(OTHER),
                        'third': region(THIRD)}
        self.table = Table(self.regions)
        self.cache = placement_cache.PlacementCache(self.table)

    def set(self, **options):
        self.config.config(group='accel', **options)

    def schedule(self, *candidates, spec=None):
        snapshot = self.cache.snapshot(spec or Spec(**ONE))
        return [ranking.ranked(snapshot.requests, [c], snapshot)
                for c in candidates]

    def test_function_that_is_there_costs_one_request(self):
        self.schedule(*[candidate('has')] * 50)
        self.assertEqual(
            ['/resource_providers?required='
             + naming.function_trait(WANTED)], self.table.urls)

    def test_each_is_asked_once_in_a_scheduling(self):
        spec = Spec(**ONE)
        for _ in range(3):
            self.schedule(*[candidate('other'), candidate('third')] * 50,
                          spec=spec)
        self.assertEqual(len(set(self.table.urls)), len(self.table.urls))
        # wanted, programmable, the list of functions, two more functions
        self.assertEqual(5, len(self.table.urls))

    def test_functions_loaded_meanwhile(self):
        self.schedule(candidate('other'))
        asked = len(self.table.urls)
        self.set(function_cache_seconds=3600)
        self.schedule(candidate('other'))
        self.assertEqual(2 * asked, len(self.table.urls))
        self.schedule(candidate('other'))
        self.assertEqual(2 * asked, len(self.table.urls))

    def test_nobody_knows_the_trait(self):
        del self.regions['has']
        (rank, _), = self.schedule(candidate('other'))[0]
        self.assertEqual((1, 0), (rank.programmings, rank.stuck))

    def test_no_answer_is_no_preference_and_one_warning(self):
        for broken in (ConnectionError('refused'), [None], [False],
                       [Answer({}, 503)], [Answer({}, 401)],
                       [Answer('<html>')], [Answer({})], [Answer([])]):
            with self.subTest(broken):
                table = Table(self.regions)
                self.cache = placement_cache.PlacementCache(table)
                table.broken = broken
                with self.assertLogs(placement_cache.LOG.logger,
                                     'WARNING') as logs:
                    for _ in range(3):
                        ranks = self.schedule(candidate('has'),
                                              candidate('other'))
                        self.assertEqual(ranks[0][0][0], ranks[1][0][0])
                self.assertEqual(1, len(logs.records))
                # one attempt for each scheduling
                self.assertEqual(3, len(table.urls))
                table.broken = None
                ranks = self.schedule(candidate('has'), candidate('other'))
                self.assertLess(ranks[0][0][0], ranks[1][0][0])
                table.broken = broken
                with self.assertLogs(placement_cache.LOG.logger, 'WARNING'):
                    self.schedule(candidate('has'))

    def test_flavor_without_accelerators_asks_nothing(self):
        plain, unloaded = Spec(hw__cpu_policy='dedicated'), Spec()
        del unloaded.flavor.extra_specs
        for spec in (plain, unloaded):
            self.assertEqual([], self.cache.snapshot(spec).requests)
        self.assertEqual([], self.table.urls)

    def test_malformed_flavor_fails_no_scheduling(self):
        with self.assertLogs(placement_cache.LOG.logger, 'WARNING'):
            snapshot = self.cache.snapshot(
                Spec(**{**ONE, 'accel_ACCEL0__function_id': 'nlb'}))
        self.assertEqual([], snapshot.requests)

    def test_snapshots_are_forgotten(self):
        spec = Spec(**ONE)
        self.schedule(candidate('has'), spec=spec)
        self.assertEqual(1, len(self.cache._snapshots))
        del spec
        self.assertEqual(0, len(self.cache._snapshots))
