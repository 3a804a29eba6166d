# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is asked of Placement where it has cut its answer off, and what of its
answers is added. With a real Placement: tests/functional,
test_scheduler_placement.
"""

import collections
import types
from unittest import mock
from urllib import parse

from nova import objects
import testtools

from nova_accel import demand
from nova_accel import naming
from nova_accel.scheduler import candidates as placement
from nova_accel.scheduler import scheduling
from nova_accel.scheduler import unseen
from tests.unit.answers import not_placements, response

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
WANTED = 'd8424dc4a4a3c413f89e433683f9040b'
OTHER = 'f7df405cbd7acf7222f144b0b93acd18'
QUESTION = 'limit=2&resources=VCPU%3A1&resources1=CUSTOM_ACCELERATOR_FPGA%3A1'


class UnseenTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()
        unseen.CONF.set_override('max_placement_results', 2, 'scheduler')
        self.addCleanup(unseen.CONF.clear_override, 'max_placement_results',
                        'scheduler')
        zones = mock.patch.object(placement, 'ZONES', placement.Zones())
        zones.start()
        self.addCleanup(zones.stop)
        self.asked = []
        self.carrying = {'r9': 'h9'}
        #: hosts of which Placement has no candidate, with all groups there
        self.without = set()
        #: and none at all
        self.full = set()

    @staticmethod
    def summary(root, function=None):
        return {'root_provider_uuid': root, 'traits': [
            naming.function_trait(function)] if function else [],
            'resources': {FPGA: {'capacity': 1, 'used': 0}}}

    @staticmethod
    def candidate(root, region):
        return {'allocations': {root: {'resources': {'VCPU': 1}},
                                region: {'resources': {FPGA: 1}}},
                'mappings': {'': [root], '1': [region]}}

    def get(self, url, version):
        path, _, query = url.partition('?')
        asked = parse.parse_qs(query)
        self.asked.append((path, asked))
        if 'member_of' in asked and path == '/resource_providers':
            return response(resource_providers=[
                {'uuid': host} for host in self.zone])
        if path == '/resource_providers':
            return response(resource_providers=[
                {'uuid': region, 'root_provider_uuid': root}
                for region, root in self.carrying.items()])
        [root] = asked['in_tree1']
        if root in self.full or 'in_tree' in asked and root in self.without:
            return response(allocation_requests=[], provider_summaries={})
        region = {h: r for r, h in self.carrying.items()}[root]
        return response(
            allocation_requests=[self.candidate(root, region)],
            provider_summaries={region: self.summary(root, WANTED),
                                root: {'root_provider_uuid': root,
                                       'traits': [], 'resources': {}}})

    def add(self, *functions, get=None, question=QUESTION, **specs):
        """The regions of the candidates, of regions with these functions."""
        spec = objects.RequestSpec(flavor=objects.Flavor(extra_specs={
            f'resources1:{FPGA}': '1', 'accel1:function_id': WANTED, **specs}))
        summaries = {f'r{number}': self.summary(f'h{number}', function)
                     for number, function in enumerate(functions)}
        candidates = collections.defaultdict(list)
        for region, summary in summaries.items():
            made = self.candidate(summary['root_provider_uuid'], region)
            for provider in made['allocations']:
                candidates[provider].append(made)
        found = scheduling.Scheduling(spec, summaries, demand.Demand(), None)
        with mock.patch('nova.scheduler.utils.resources_from_request_spec',
                        lambda *args: types.SimpleNamespace(
                            to_querystring=lambda: question)):
            unseen.add(get or self.get, found,
                       types.SimpleNamespace(host_manager=None), None, spec,
                       candidates, summaries)
        self.listed = candidates
        self.assertLessEqual(
            {p for p in candidates if p.startswith('r')}, set(summaries))
        return sorted(p for p in candidates if p.startswith('r'))

    def test_added(self):
        self.assertEqual(['r0', 'r1', 'r9'], self.add(OTHER, None))
        (path, first), (_, second) = self.asked
        trait = f'in:{naming.function_trait(WANTED)}'
        self.assertEqual('/resource_providers', path)
        self.assertEqual({'resources': [f'{FPGA}:1'], 'required': [trait]},
                         first)
        self.assertEqual(
            {'resources': ['VCPU:1'], 'resources1': [f'{FPGA}:1'],
             'required1': [trait], 'in_tree': ['h9'], 'in_tree1': ['h9'],
             'limit': ['16']}, second)

    def test_nothing_is_asked(self):
        """Below the limit, of what is there, and of one host."""
        self.assertEqual(['r0'], self.add(OTHER))
        self.assertEqual(['r0', 'r1'], self.add(OTHER, WANTED))
        self.assertEqual(['r0', 'r1'], self.add(
            OTHER, None, question=f'{QUESTION}&in_tree=h1'))
        self.assertEqual([], self.asked)

    def test_what_else_the_group_demands(self):
        self.add(OTHER, None, **{'trait1:CUSTOM_FPGA_INTEL': 'required',
                                 'trait1:CUSTOM_OLD': 'forbidden'})
        self.assertEqual('CUSTOM_FPGA_INTEL,!CUSTOM_OLD',
                         self.asked[0][1]['required'][1])

    def test_few_of_many_hosts(self):
        self.carrying = {f'r{n}': f'h{n}' for n in range(10, 40)}
        self.assertEqual(2 + 3, len(self.add(OTHER, None)))
        self.assertEqual(1 + 3, len(self.asked))

    def test_hosts_that_are_full(self):
        """They do not count as hosts whose candidates are added."""
        self.carrying = {f'r{n}': f'h{n}' for n in range(10, 16)}
        self.full = {'h10', 'h11', 'h12'}
        with mock.patch.object(unseen, '_sample', lambda all_, number: all_):
            self.assertEqual(['r0', 'r1', 'r13', 'r14', 'r15'],
                             self.add(OTHER, None))

    def test_candidate_that_is_there(self):
        """Its region was programmed after Placement's first answer."""
        self.carrying = {'r1': 'h1'}
        self.assertEqual(['r0', 'r1'], self.add(OTHER, None))
        self.assertEqual(1, len(self.listed['h1']))

    def test_forced_host(self):
        """Nova claims the first candidate of it."""
        summaries = {'r0': self.summary('h0', OTHER),
                     'r1': self.summary('h0', WANTED)}
        there = [self.candidate('h0', region) for region in summaries]
        for hosts, expected in (None, there), (['h0'], there[::-1]):
            spec = objects.RequestSpec(
                force_hosts=hosts, flavor=objects.Flavor(extra_specs={
                    f'resources1:{FPGA}': '1', 'accel1:function_id': WANTED}))
            candidates = {'h0': [*there]}
            unseen.order_forced(scheduling.Scheduling(
                spec, summaries, demand.Demand(), None), spec, candidates)
            self.assertEqual(expected, candidates['h0'])

    def test_zone(self):
        """Of many hosts only those of the server's zone are asked."""
        self.carrying = {f'r{n}': f'h{n}' for n in range(10, 40)}
        question = f'{QUESTION}&member_of=zone'
        self.zone = ['h20', 'h30', 'host-without']
        self.assertEqual(['r0', 'r1', 'r20', 'r30'],
                         self.add(OTHER, None, question=question))
        _, (path, asked), *hosts = self.asked
        self.assertEqual(
            ('/resource_providers', {'resources': ['MEMORY_MB:1'],
                                     'member_of': ['zone']}), (path, asked))
        self.assertEqual(2, len(hosts))
        # Placement lists the hosts of a zone for one request in a minute
        self.asked.clear()
        self.add(OTHER, None, question=question)
        self.assertEqual([False, True, True], [
            'in_tree' in asked for _, asked in self.asked])
        with mock.patch.object(placement.Zones, 'SECONDS', -1):
            self.add(OTHER, None, question=question)
        self.assertEqual(1, sum('MEMORY_MB:1' in asked.get('resources', ())
                                for _, asked in self.asked))
        # few are asked at once
        self.asked.clear()
        self.carrying = {'r20': 'h20'}
        self.add(OTHER, None, question=question)
        self.assertEqual(2, len(self.asked))

    def test_shared_storage(self):
        self.without = {'h9'}
        self.assertEqual(['r0', 'r1', 'r9'], self.add(OTHER, None))
        self.assertNotIn('in_tree', self.asked[-1][1])

    def test_placement_does_not_answer(self):
        for answer in (None, False, types.SimpleNamespace(status_code=500),
                       *not_placements()):
            with self.assertRaises(ConnectionError):
                self.add(OTHER, None, get=lambda url, version: answer)


class DomainsTest(testtools.TestCase):
    """Racks of three hosts, of each of which the cut answer has one."""

    GPU = 'CUSTOM_ACCELERATOR_GPU'
    RACKS = 'abcdefghijklmnopqrstuvwxyz'

    def setUp(self):
        super().setUp()
        objects.register_all()
        unseen.CONF.set_override('max_placement_results', 26, 'scheduler')
        self.addCleanup(unseen.CONF.clear_override, 'max_placement_results',
                        'scheduler')
        patch = mock.patch.object(
            unseen.utils, 'resources_from_request_spec',
            lambda *args: types.SimpleNamespace(
                to_querystring=lambda: f'limit=26&resources=VCPU%3A1&'
                                       f'resources1={self.GPU}%3A8'))
        patch.start()
        self.addCleanup(patch.stop)
        self.asked = []
        #: hosts on which nothing is free
        self.full = set()

    def part(self, hosts):
        """Candidates and summaries of hosts."""
        found = [{'allocations': {host: {'resources': {'VCPU': 1}},
                                  f'{host}-gpus': {'resources': {self.GPU: 8}}},
                  'mappings': {'': [host], '1': [f'{host}-gpus']}}
                 for host in hosts]
        summaries = {}
        for host in hosts:
            summaries[host] = {
                'root_provider_uuid': host, 'resources': {
                    'VCPU': {'capacity': 8, 'used': 0}},
                'traits': [f'CUSTOM_NEAR_RACK_{host[0].upper()}']}
            summaries[f'{host}-gpus'] = {
                'root_provider_uuid': host, 'traits': [], 'resources': {
                    self.GPU: {'capacity': 8, 'used': 0}}}
        return found, summaries

    def get(self, url, version):
        asked = parse.parse_qs(url.partition('?')[2])
        self.assertEqual(['1000'], asked['limit'])
        self.assertEqual([f'VCPU:1,{self.GPU}:8'], asked['resources'])
        domains, = asked['required']
        racks = [trait[-1].lower()
                 for trait in domains.removeprefix('in:').split(',')]
        self.asked.append(''.join(racks))
        found, summaries = self.part([
            host for rack in racks for n in range(3)
            if (host := f'{rack}{n}') not in self.full])
        return response(allocation_requests=found,
                        provider_summaries=summaries)

    def add(self, near='rack=required', servers=3, members=(), retries=0,
            also=()):
        """The hosts of candidates.

        :param also: hosts in the cut answer, beside one of each rack.
        """
        self.asked.clear()
        expected = scheduling.Expected(servers, tuple(
            {'rack': f'CUSTOM_NEAR_RACK_{one.upper()}'} for one in members),
            retries=retries)
        found, summaries = self.part([*also, *(
            f'{rack}1' for rack in self.RACKS if f'{rack}1' not in self.full)])
        spec = objects.RequestSpec(flavor=objects.Flavor(extra_specs={
            f'resources1:{self.GPU}': '8', **(
                {'accel:near': near} if near else {})}))
        begun = scheduling.Scheduling(
            spec, summaries, demand.Demand(), get=None, expected=expected)
        candidates = collections.defaultdict(list)
        for one in found:
            for provider in one['allocations']:
                candidates[provider].append(one)
        unseen.add(self.get, begun, types.SimpleNamespace(
            host_manager=None), None, spec, candidates, summaries)
        self.assertEqual({domain[-1].lower() for domain in begun.whole},
                         set(''.join(self.asked)))
        self.begun = begun
        for provider, listed in candidates.items():
            self.assertEqual(1, len(listed), provider)
            self.assertIn(provider, summaries)
            self.assertEqual({'', '1'}, listed[0]['mappings'].keys())
        return {provider for provider in candidates
                if not provider.endswith('gpus')}

    def test_first_servers(self):
        found = self.add()
        asked, = self.asked
        self.assertEqual(6, len({*asked}))
        self.assertEqual(26 + 2 * 6, len(found))
        # Nova gets these domains only
        self.assertEqual({f'{rack}{n}' for rack in asked for n in range(3)},
                         self.begun.part.keys())

    def test_no_room(self):
        """Other domains are asked for until one has room, if required."""
        self.add(servers=4)
        self.assertEqual([6, 18, 2], list(map(len, self.asked)))
        self.assertEqual({*self.RACKS}, set(''.join(self.asked)))
        self.assertIsNone(self.begun.part)
        for servers, is_enough in (4, True), (18, True), (19, False):
            self.add('rack=preferred', servers=servers)
            self.assertEqual([6], list(map(len, self.asked)))
            self.assertEqual(is_enough, self.begun.part is not None)

    def test_best_domains(self):
        """Those that are known to have room, the fullest first."""
        # each of a and b has two hosts in the answer, and c has three
        also = ['a0', 'b0', 'c0', 'c2']
        with mock.patch.object(unseen, '_DOMAINS', (2, 2)):
            for servers, asked in ((2, 'ab'), (3, 'c')):
                self.add(servers=servers, also=also)
                self.assertIn(asked, self.asked[0])
        with mock.patch.object(unseen, '_DOMAINS', (1,)):
            self.assertEqual({'a', 'b'}, {
                self.add(servers=2, also=also) and self.asked[0]
                for _ in range(40)})
            # other requests were faster: any with room
            self.assertEqual({'a', 'b', 'c'}, {
                self.add(servers=2, also=also, retries=1) and self.asked[0]
                for _ in range(60)})

    def test_domains_were_not_enough(self):
        self.add('rack=preferred', retries=1)
        self.assertEqual([], self.asked)
        self.assertIsNone(self.begun.part)

    def test_members(self):
        found = self.add('rack=preferred', 1, members='q')
        self.assertIn('q', self.asked[0])
        self.assertTrue({'q0', 'q2'} <= found)

    def test_not_asked(self):
        for near in '', 'rail=required':
            self.add(near)
            self.assertEqual([], self.asked)
        unseen.CONF.set_override('max_placement_results', 27, 'scheduler')
        self.add()
        self.assertEqual([], self.asked)


class MergedTest(testtools.TestCase):
    """A question with one group less. With a real Placement:
    tests/functional, test_near."""

    @staticmethod
    def merged(question):
        return placement.merged(parse.parse_qsl(question))

    def test_question(self):
        found = self.merged(
            'resources=VCPU:1,MEMORY_MB:64&resources1=CUSTOM_GPU:2&required=A,'
            '!B&required=in:C,D&required1=E,!F&member_of=zone&root_required=!G')
        self.assertEqual(
            'resources=VCPU:1,MEMORY_MB:64,CUSTOM_GPU:2&required=A&'
            'required=in:C,D&required=E&member_of=zone&root_required=!G',
            parse.urlencode(found.query, safe=':,!'))
        self.assertEqual({'': ['A,!B', 'in:C,D'], '1': ['E,!F']},
                         found.required)

    def test_not_possible(self):
        for question in (
                'resources=VCPU:1', 'resources1=CUSTOM_GPU:2',
                'resources=VCPU:1&resources1=CUSTOM_GPU:2&resources2=FPGA:1',
                'resources=VCPU:1&resources1=CUSTOM_GPU:2,CUSTOM_MEMORY:1',
                'resources=VCPU:1,CUSTOM_GPU:1&resources1=CUSTOM_GPU:2',
                'resources=VCPU:1&resources1=CUSTOM_GPU:2&member_of1=zone',
                'resources=VCPU:1&resources1=CUSTOM_GPU:2&same_subtree=1'):
            self.assertIsNone(self.merged(question), question)

    def test_answer(self):
        """A trait of the device does not count for the host, and the other
        way round."""
        question = 'resources=VCPU:1&resources1=CUSTOM_GPU:2&required=A,!B&' \
                   'required=in:C,D&required1=E,!F'
        for host, device, is_kept in (
                ('AC', 'E', True), ('ADF', 'EB', True), ('C', 'AE', False),
                ('AE', 'C', False), ('ACE', '', False), ('ABC', 'E', False),
                ('AC', 'EF', False), ('A', 'E', False)):
            answer = {
                'allocation_requests': [{
                    'allocations': {
                        'h': {'resources': {'VCPU': 1}},
                        'd': {'resources': {'CUSTOM_GPU': 2}}},
                    'mappings': {'': ['h', 'd']}}],
                'provider_summaries': {
                    'h': {'traits': [*host]}, 'd': {'traits': [*device]}}}
            self.merged(question).split(answer)
            self.assertEqual(
                [{'': ['h'], '1': ['d']}] * is_kept,
                [one['mappings'] for one in answer['allocation_requests']],
                (host, device))
