# Licensed under the Apache License, Version 2.0. See LICENSE.

import dataclasses
import itertools
import time
import uuid

from hypothesis import given
from hypothesis import strategies as st
import testtools

from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel import request

FUNCTION = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
OTHER = 'f7df405c-bd7a-cf72-22f1-44b0b93acd18'
THIRD = '5b3a1c7e-92d4-4f60-8e1b-c07d64a2f935'
SPELLED = 'D8424DC4_A4A3_C413_F89E_433683F9040B'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'


class CarriedTest(testtools.TestCase):
    """Which region has what a request asks for."""

    IMAGE = '0e1c3a52-7d64-4a0b-9f1e-000000000401'
    OPENCL = '18b79ffa2ee54aa096ef4230dafacb5f'
    EVERY = [request.AcceleratorRequest('1', FPGA, 1, **asked) for asked in (
        {}, {'function_id': model.uuid_hex(FUNCTION)},
        {'function_name': 'nlb'}, {'bitstream_id': IMAGE})]

    @classmethod
    def carried(cls, origin=model.OPERATOR, function=FUNCTION,
                image=IMAGE, name='nlb', wanted=None):
        region = model.Region(
            0, None, model.uuid_hex(function), bitstream_id=image,
            function_name=name, origin=origin)
        return [r.carried_by(region) for r in wanted or cls.EVERY]

    def test_origin(self):
        self.assertEqual([True] * 4, self.carried())
        for origin in ('a project', None, ''):
            self.assertEqual([True] + [False] * 3, self.carried(origin))

    def test_other_content(self):
        self.assertEqual([True, True, False, False],
                         self.carried(image=None, name=None))
        self.assertEqual([True, False, True, True],
                         self.carried(function=self.IMAGE))

    def test_function_that_does_not_identify(self):
        wanted = [request.AcceleratorRequest('1', FPGA, 1,
                                             function_id=self.OPENCL),
                  *self.EVERY[2:]]
        self.assertEqual([False, True, True], self.carried(
            function=self.OPENCL, wanted=wanted))

    def test_who_chose(self):
        free = {f'resources1:{FPGA}': '1', 'accel1:bitstream_id': self.IMAGE,
                'accel1:runtime_programming': 'true'}
        other = self.IMAGE.replace('401', '402')
        for wish, chosen in (({}, False), (
                {'accel1:bitstream_id': self.IMAGE}, False),
                ({'accel1:bitstream_id': other}, True)):
            server = request.Server('s', 'p', free, wish)
            self.assertEqual([chosen], [
                r.chosen_by_owner for r in server.wanted])
            self.assertEqual([False], [
                r.chosen_by_owner for r in server.requests])


class ParseTest(testtools.TestCase):

    def refused(self, words, **specs):
        specs = {k.replace('__', ':'): v for k, v in specs.items()}
        with self.assertRaisesRegex(exception.AcceleratorError, words) as got:
            request.parse(specs)
        # one sentence, and no other host could help
        self.assertFalse(got.exception.elsewhere)
        self.assertRegex(str(got.exception), r'\.\Z')

    def test_flavor_without_accelerators(self):
        self.assertEqual([], request.parse({
            'hw:cpu_policy': 'dedicated', 'resources:VGPU': '1',
            'resources1:CUSTOM_X': '1', 'trait:HW_CPU_X86_VMX': 'required',
            'accelerate:foo': 'x', 'group_policy': 'none', 'plain': '1'}))

    def test_vgpus_of_nova_stay_what_they_are(self):
        specs = {'resources:VGPU': '1', 'resources:PGPU': '1'}
        self.assertEqual(specs, request.modernize(specs))

    def test_groups_are_sorted(self):
        got = request.parse({
            f'resources_B:{FPGA}': '2', f'resources1:{FPGA}': '1',
            'resources:CUSTOM_ACCELERATOR_GPU': '1',
            'trait_B:CUSTOM_FPGA_INTEL': 'required',
            'trait_B:CUSTOM_OLD': 'forbidden',
            'accel_B:function_id': FUNCTION.upper()})
        self.assertEqual(['', '1', '_B'], [r.group for r in got])
        self.assertEqual(request.AcceleratorRequest(
            '_B', FPGA, 2, frozenset(['CUSTOM_FPGA_INTEL']),
            frozenset(['CUSTOM_OLD']), FUNCTION.replace('-', '')), got[2])
        self.assertEqual([naming.function_trait(FUNCTION)],
                         got[2].wanted_traits)
        self.assertEqual([], got[0].wanted_traits)

    def test_amounts(self):
        for bad in ('0', '-1', 'one', '', '1.5', None):
            self.refused(f'resources1:{FPGA}=', **{f'resources1__{FPGA}': bad})
        self.refused('MEMORY_DDR=-1', **{
            f'resources__{FPGA}': '1',
            f'resources__{naming.memory_class("DDR")}': '-1'})

    def test_unknown_key(self):
        self.refused('same, packing, .*, near.', **{
            f'resources1__{FPGA}': '1', 'accel__nearby': 'rack'})
        self.refused('accel1:funtion_id is unknown: the keys are', **{
            f'resources1__{FPGA}': '1', 'accel1__funtion_id': FUNCTION})

    def test_prefer(self):
        gpu = {'resources1__CUSTOM_ACCELERATOR_GPU': '1'}
        [got] = request.parse({
            'resources1:CUSTOM_ACCELERATOR_GPU': '1',
            'accel1:prefer': 'CUSTOM_A, CUSTOM_B'})
        self.assertEqual(('CUSTOM_A', 'CUSTOM_B'), got.prefer)
        self.assertEqual('CUSTOM_B', got.preferred({'CUSTOM_B', 'CUSTOM_C'}))
        self.assertIsNone(got.preferred({'CUSTOM_C'}))
        for bad, text in (('', "accel1:prefer has '', which is not a trait"),
                          ('a b', "accel1:prefer has 'a b', which is no"),
                          ('CUSTOM_A,', "has '', which is not a trait"),
                          ('CUSTOM_A,CUSTOM_A', 'has CUSTOM_A twice')):
            self.refused(text, **gpu, accel1__prefer=bad)
        for value in 'required', 'forbidden':
            self.refused(
                f'accel1:prefer has CUSTOM_A, and trait1:CUSTOM_A={value}: '
                f'keep one of them', **gpu, accel1__prefer='CUSTOM_B,CUSTOM_A',
                trait1__CUSTOM_A=value)

    def test_unknown_group(self):
        self.refused('accel-1:function_id has no group', **{
            f'resources1__{FPGA}': '1', 'accel-1__function_id': FUNCTION})

    def test_live_migration(self):
        for value, expected in ((None, (False, False)),
                                ('detach', (True, False)),
                                ('transparent', (False, True))):
            specs = {f'resources1:{FPGA}': '1', **(
                {'accel:live_migration': value} if value else {})}
            server = request.Server('s', 'p', specs)
            self.assertEqual(expected, (server.detaches, server.takes_along))
            self.assertEqual(1, len(request.parse(specs)))
        for specs, said in (
                ({f'resources1:{FPGA}': '1', 'accel:live_migration': 'yes'},
                 'accel:live_migration=yes is unknown: write one of '),
                ({f'resources1:{FPGA}': '1', 'accel:max_downtime': '0.5'},
                 'accel:max_downtime=0.5 is unknown: write a whole number '
                 'from 1 to 2000'),
                ({f'resources1:{FPGA}': '1', 'accel:live_migration': 'detach',
                  'accel:max_downtime': '5'},
                 'add accel:live_migration=transparent, or remove it'),
                ({f'resources1:{FPGA}': '1', 'accel:max_downtime': '5'},
                 'accel:max_downtime is for guests that migrate with the '),
                ({'accel:live_migration': 'detach'},
                 'accel:live_migration has no accelerator to go with')):
            with self.assertRaisesRegex(exception.InvalidRequest, said):
                request.parse(specs)

    def test_affinity(self):
        one, two = (request.Affinity(nodes=n, with_guest=True)
                    for n in (1, 2))
        for specs, expected, said in (
                ({}, request.Affinity(), 'on any NUMA nodes'),
                ({'accel:numa_affinity': 'preferred'}, request.Affinity(),
                 'on any NUMA nodes'),
                ({'accel:numa_affinity': 'none'},
                 request.Affinity(close=False), 'on any NUMA nodes'),
                ({'accel:numa_affinity': 'required'}, one, 'on one NUMA node'),
                ({'accel:numa_affinity': 'required', 'hw:numa_nodes': '2'},
                 two, 'on 2 NUMA nodes'),
                ({'accel:numa_affinity': 'required', 'hw:numa_nodes': 'x'},
                 one, 'on one NUMA node'),
                ({'accel:same': 'numa'}, request.Affinity(nodes=1),
                 'on one NUMA node'),
                # the narrower one counts
                ({'accel:same': 'numa', 'accel:numa_affinity': 'required',
                  'hw:numa_nodes': '2'}, one, 'on one NUMA node'),
                ({'accel:same': 'pcie_root'},
                 request.Affinity(nodes=1, one_root=True),
                 'below one PCI root complex')):
            with self.subTest(specs):
                specs = {f'resources1:{FPGA}': '1', **specs}
                server = request.Server('s', 'p', specs)
                self.assertEqual((expected, said), (
                    server.affinity, str(server.affinity)))
                self.assertEqual(
                    expected not in (request.Affinity(),
                                     request.Affinity(close=False)),
                    server.affinity.is_strict)
                self.assertEqual(['1'], [r.group for r in server.requests])

    def test_affinity_malformed(self):
        one = {f'resources1__{FPGA}': '1'}
        self.refused('accel:numa_affinity=yes is unknown: write one of '
                     'required, preferred, none',
                     **one, accel__numa_affinity='yes')
        self.refused('accel:same=socket is unknown: write one of numa, pcie',
                     **one, accel__same='socket')
        self.refused('accel1:same is unknown: .* without group .* same',
                     **one, accel1__same='numa')
        for same in 'numa', 'pcie_root':
            self.refused(f'accel:same={same} and accel:numa_affinity=none '
                         f'exclude each other: keep one',
                         **one, accel__same=same, accel__numa_affinity='none')
        self.refused('accel:same has no accelerator to go with',
                     accel__same='numa')
        # of which the accelerators are not written yet
        self.assertEqual([], request.parse({
            'accel:same': 'numa', request.PROFILE_KEY: 'nlb'}))

    def test_two_wishes_for_one_accelerator(self):
        self.refused('accel1:bitstream_id and accel1:function_id', **{
            f'resources1__{FPGA}': '1', 'accel1__function_id': FUNCTION,
            'accel1__bitstream_id': FUNCTION})

    def test_one_wish_for_two_classes(self):
        self.refused('could mean any of', **{
            f'resources1__{FPGA}': '1',
            'resources1__CUSTOM_ACCELERATOR_GPU': '1',
            'accel1__function_id': FUNCTION})

    def test_wish_without_accelerator(self):
        self.refused('accel1:function_id has no accelerator', **{
            f'resources__{FPGA}': '1', 'accel1__function_id': FUNCTION})

    def test_no_uuid(self):
        for bad in ('nlb', '', FUNCTION[:-1], FUNCTION[:-1] + 'g', '../x'):
            self.refused('is not a UUID', **{
                f'resources__{FPGA}': '1', 'accel__function_id': bad})
            self.refused('is not a UUID', **{
                f'resources__{FPGA}': '1', 'accel__bitstream_id': bad})

    def test_function_name(self):
        for bad in ('', '  ', 'a/b', 'n' * 230, 'é'):
            self.refused('name', **{
                f'resources__{FPGA}': '1', 'accel__function_name': bad})

    def test_names_that_placement_refuses(self):
        self.refused('trait:custom_intel has a name', **{
            f'resources__{FPGA}': '1', 'trait__custom_intel': 'required'})
        self.refused('resources:CUSTOM_ACCELERATOR_A-B has a name', **{
            'resources__CUSTOM_ACCELERATOR_A-B': '1'})
        self.refused('up to 255', **{
            f'resources__{FPGA}': '1', f'trait__{"T" * 256}': 'required'})

    def test_trait_neither_required_nor_forbidden(self):
        # Nova would leave it out with a warning that no user sees
        self.refused('trait:CUSTOM_A=requird is neither', **{
            f'resources__{FPGA}': '1', 'trait__CUSTOM_A': 'requird'})

    def test_early_spellings(self):
        for old, wanted in (
                ({f'function:CUSTOM_FPGA_FUNCTION_INTEL_{SPELLED}':
                  'required'}, {'function_id': FUNCTION.replace('-', '')}),
                ({f'function:CUSTOM_FPGA_INTEL_FUNCTION_{SPELLED}':
                  'required'}, {'function_id': FUNCTION.replace('-', '')}),
                ({'function_name:nlb 0': 'required'},
                 {'function_name': 'nlb 0'}),
                ({f'bitstream:{FUNCTION}': 'required'},
                 {'bitstream_id': FUNCTION})):
            specs = {f'resources:{FPGA}': '1', **old}
            self.assertEqual(
                [request.AcceleratorRequest('', FPGA, 1, **wanted)],
                request.parse(specs))
            # what is modern already stays
            modern = request.modernize(specs)
            self.assertEqual(modern, request.modernize(modern))

    def test_early_spellings_of_a_numbered_group(self):
        for old, wanted in (
                (f'others1:function:CUSTOM_FPGA_FUNCTION_INTEL_{SPELLED}',
                 {'function_id': FUNCTION.replace('-', '')}),
                (f'others1: function:CUSTOM_FPGA_FUNCTION_INTEL_{SPELLED}',
                 {'function_id': FUNCTION.replace('-', '')}),
                ('others1:function_name:nlb 0', {'function_name': 'nlb 0'}),
                (f'others1:bitstream:{FUNCTION}',
                 {'bitstream_id': FUNCTION})):
            self.assertEqual(
                [request.AcceleratorRequest('1', FPGA, 1, **wanted)],
                request.parse({f'resources1:{FPGA}': '1', old: 'required'}))
        self.refused('is neither a function nor a bitstream', **{
            f'resources1__{FPGA}': '1', 'others1__speed': 'high'})

    def test_early_spellings_malformed(self):
        for key in ('function__CUSTOM_FPGA_FUNCTION_INTEL', 'function__nlb',
                    f'function__CUSTOM_FPGA_REGION_INTEL_{SPELLED}'):
            self.refused('names no function',
                         **{f'resources__{FPGA}': '1', key: 'required'})
        self.refused('can only be required', **{
            f'resources__{FPGA}': '1', 'function_name__nlb': 'forbidden'})
        self.refused('ask for accel:function_id twice', **{
            f'resources__{FPGA}': '1', 'accel__function_id': FUNCTION[::-1],
            f'function__CUSTOM_FPGA_FUNCTION_{SPELLED}': 'required'})

    @given(st.dictionaries(
        st.builds(
            '{}{}:{}'.format,
            st.sampled_from(['resources', 'trait', 'accel', 'function',
                             'function_name', 'bitstream', 'hw']),
            st.sampled_from(['', '1', '_A', '-', 'x']),
            st.one_of(st.sampled_from([
                FPGA, 'VGPU', 'CUSTOM_FPGA_INTEL', 'function_id',
                'function_name', 'bitstream_id', 'device_profile', 'same',
                'numa_affinity', FUNCTION]),
                st.text(max_size=5))),
        st.one_of(st.sampled_from(['1', '0', 'required', FUNCTION]),
                  st.text(max_size=5)), max_size=6))
    def test_any_flavor_is_understood_or_refused(self, specs):
        try:
            requests = request.parse(specs)
        except exception.AcceleratorError as error:
            self.assertFalse(error.elsewhere)
        else:
            self.assertTrue(all(r.amount > 0 for r in requests))
            self.assertEqual(sorted(r.group for r in requests),
                             [r.group for r in requests])


TRAITS = [naming.function_trait(f'{n:032x}') for n in range(3)]
CLASSES = ['CUSTOM_ACCELERATOR_A', 'CUSTOM_ACCELERATOR_B']


@st.composite
def requests_and_allocations(draw):
    """Requests, and an allocation that was made for them."""
    requests, given = [], {}
    for number in range(draw(st.integers(1, 4))):
        provider = draw(st.sampled_from(['p1', 'p2', 'p3']))
        traits = given.setdefault(provider, (
            draw(st.frozensets(st.sampled_from(TRAITS))), {}))[0]
        wanted = request.AcceleratorRequest(
            f'_{number}', draw(st.sampled_from(CLASSES)),
            draw(st.integers(1, 2)),
            draw(st.frozensets(st.sampled_from(sorted(traits))))
            if traits else frozenset(),
            function_id=draw(st.sampled_from(
                [None, *(naming.function_of(t) for t in TRAITS)])))
        requests.append(wanted)
        amounts = given[provider][1]
        amounts[wanted.resource_class] = (
            amounts.get(wanted.resource_class, 0) + wanted.amount)
    return requests, [request.Allocation(uuid, amounts, traits)
                      for uuid, (traits, amounts) in given.items()]


def wanted(group, amount=1, name=FPGA, **more):
    return request.AcceleratorRequest(group, name, amount, **more)


def allocation(uuid, amount=1, traits=()):
    return request.Allocation(uuid, {FPGA: amount}, frozenset(traits))


class AlternativesTest(testtools.TestCase):

    def parse(self, **accel):
        return request.parse({
            'resources1:CUSTOM_ACCELERATOR_FPGA': '1',
            **{f'accel1:{k}': v for k, v in accel.items()}})[0]

    def test_in_order(self):
        wanted = self.parse(
            function_id=f'{THIRD}, {FUNCTION.upper()},{OTHER}',
            runtime_programming='true')
        plain = [uuid.UUID(f).hex for f in (THIRD, FUNCTION, OTHER)]
        self.assertEqual(plain, [c.function_id for c in wanted.choices])
        self.assertEqual([naming.function_trait(f) for f in plain],
                         wanted.wanted_traits)
        for choice in wanted.choices:
            self.assertEqual(('1', True, [choice]), (
                choice.group, choice.runtime_programming, choice.choices))
        self.assertEqual(wanted.choices[1], wanted.only(plain[1]))
        self.assertEqual(wanted, wanted.only(uuid.UUID(int=1).hex))

    def test_names(self):
        wanted = self.parse(function_name='nlb 0,nlb-1')
        self.assertEqual(['nlb 0', 'nlb-1'],
                         [c.function_name for c in wanted.choices])

    def test_one_is_no_list(self):
        wanted = self.parse(function_id=FUNCTION)
        self.assertEqual(((), [wanted]),
                         (wanted.alternatives, wanted.choices))

    def test_carried(self):
        wanted = self.parse(function_id=f'{THIRD},{FUNCTION}')
        for function, carried in ((THIRD, True), (FUNCTION, True),
                                  (OTHER, False), (None, False)):
            for origin in (model.OPERATOR, 'project', None):
                region = model.Region(
                    0, None, function and uuid.UUID(function).hex,
                    origin=origin)
                self.assertEqual(carried and origin == model.OPERATOR,
                                 wanted.carried_by(region))

    def test_malformed_member(self):
        for key, value, said in (
                ('function_id', f'{FUNCTION},nlb',
                 'accel1:function_id=nlb is not a UUID: give the UUID of the '
                 'function.'),
                ('function_id', f'{FUNCTION},', 'is not a UUID'),
                ('function_id', f'{FUNCTION},{FUNCTION}', 'twice'),
                ('function_name', 'nlb,', 'has an empty name'),
                ('function_name', 'nlb,a/b', 'a/b'),
                ('bitstream_id', f'{FUNCTION},{OTHER}', 'is not a UUID')):
            with self.subTest(value):
                with self.assertRaises(exception.AcceleratorError) as caught:
                    self.parse(**{key: value})
                self.assertIn(said, str(caught.exception))

    def test_match_takes_what_has_any(self):
        wanted = self.parse(function_id=f'{THIRD},{FUNCTION}')
        loaded, other = (request.Allocation(
            name, {'CUSTOM_ACCELERATOR_FPGA': 1},
            frozenset([naming.function_trait(function)]))
            for name, function in (('b', FUNCTION), ('a', OTHER)))
        self.assertEqual([(wanted, loaded)], request.match(
            [wanted], [other, loaded]))


class MatchTest(testtools.TestCase):

    @given(requests_and_allocations(), st.randoms())
    def test_complete_and_deterministic(self, case, random):
        requests, allocations = case
        got = request.match(requests, allocations)
        # each request once, and all that was allocated
        self.assertEqual(requests, [r for r, _ in got])
        for allocation in allocations:
            for name in CLASSES:
                self.assertEqual(
                    allocation.resources.get(name, 0),
                    sum(r.amount for r, a in got
                        if a is allocation and r.resource_class == name))
        for wanted, allocation in got:
            self.assertLessEqual(wanted.required, allocation.traits)
        # Placement promises no order
        random.shuffle(allocations)
        self.assertEqual(got, request.match(requests, allocations))

    @given(requests_and_allocations())
    def test_programs_least(self, case):
        requests, allocations = case

        def programmed(way):
            return sum(r.programs and a.traits.isdisjoint(r.wanted_traits)
                       for r, a in way)

        def fits(way):
            left = {a.provider_uuid: dict(a.resources) for a in allocations}
            for wanted, allocation in way:
                amounts = left[allocation.provider_uuid]
                amounts[wanted.resource_class] = amounts.get(
                    wanted.resource_class, 0) - wanted.amount
            return all(wanted.required <= allocation.traits
                       for wanted, allocation in way) and not any(
                n for amounts in left.values() for n in amounts.values())
        least = min(
            programmed(way) for way in (
                list(zip(requests, choice)) for choice in
                itertools.product(allocations, repeat=len(requests)))
            if fits(way))
        self.assertEqual(
            least, programmed(request.match(requests, allocations)))

    def test_lost_trait_is_for_another_host(self):
        wanted = request.AcceleratorRequest(
            '_A', FPGA, 1, required=frozenset(['CUSTOM_PROGRAMMABLE']))
        with self.assertRaisesRegex(exception.DeviceUnavailable,
                                    'scheduled again') as got:
            request.match([wanted], [allocation('p')])
        self.assertTrue(got.exception.elsewhere)

    def test_allocation_without_devices(self):
        wanted = request.AcceleratorRequest('_A', FPGA, 1)
        with self.assertRaisesRegex(exception.DeviceUnavailable,
                                    'no accelerator'):
            request.match([wanted], [])
        self.assertEqual([], request.match([], []))

    def test_traits_of_the_unnumbered_group_may_be_elsewhere(self):
        wanted = request.AcceleratorRequest(
            '', FPGA, 1, required=frozenset(['COMPUTE_NODE']))
        given = request.Allocation('p', {FPGA: 1}, frozenset())
        self.assertEqual([(wanted, given)], request.match([wanted], [given]))

    def test_groups_and_providers_without_a_difference(self):
        requests = [wanted(str(n)) for n in range(3)]
        allocations = [allocation(uuid) for uuid in ('b', 'c', 'a')]
        self.assertEqual(
            ['a', 'b', 'c'], self.chosen(requests, allocations))

    def test_the_function_decides_before_the_order(self):
        requests = [wanted('1', function_id=naming.function_of(TRAITS[0])),
                    wanted('2')]
        self.assertEqual(['b', 'a'], self.chosen(requests, [
            allocation('a'), allocation('b', traits=TRAITS[:1])]))

    def test_one_provider_serves_groups_of_different_amounts(self):
        requests = [wanted('1', 1), wanted('2', 2), wanted('3', 2)]
        self.assertEqual(['b', 'a', 'b'], self.chosen(requests, [
            allocation('a', 2), allocation('b', 3)]))

    def test_all_classes_of_a_numbered_group_come_from_one_provider(self):
        requests = [wanted('1', name=CLASSES[0]), wanted('1', name=CLASSES[1]),
                    wanted('2', name=CLASSES[0])]
        allocations = [
            request.Allocation('a', {CLASSES[0]: 1}, frozenset()),
            request.Allocation('b', dict.fromkeys(CLASSES, 1), frozenset())]
        self.assertEqual(['b', 'b', 'a'], self.chosen(requests, allocations))
        # those of the unnumbered group need not
        unnumbered = [wanted('', name=name) for name in CLASSES]
        self.assertEqual(['a', 'b'], self.chosen(unnumbered, [
            request.Allocation('a', {CLASSES[0]: 1}, frozenset()),
            request.Allocation('b', {CLASSES[1]: 1}, frozenset())]))

    def test_memory_decides(self):
        memory = {naming.memory_class('DDR'): 4096}
        requests = [wanted('1', memory=memory), wanted('2')]
        self.assertEqual(['b', 'a'], self.chosen(requests, [
            allocation('a'), dataclasses.replace(
                allocation('b'), memory=memory)]))

    def test_forbidden_traits(self):
        requests = [wanted('1', forbidden=frozenset(TRAITS[:1])), wanted('2')]
        self.assertEqual(['b', 'a'], self.chosen(requests, [
            allocation('a', traits=TRAITS[:1]), allocation('b')]))

    def test_a_surplus_is_left_over_and_named(self):
        requests = [wanted('1', function_id=naming.function_of(TRAITS[0]))]
        with self.assertLogs('nova_accel.request', 'WARNING') as logs:
            self.assertEqual(['b'], self.chosen(requests, [
                allocation('a'), allocation('b', 2, TRAITS[:1]),
                request.Allocation('c', {CLASSES[0]: 4}, frozenset())]))
        line, = logs.output
        for part in (f"{{'{FPGA}': 1}} of provider a",
                     f"{{'{FPGA}': 1}} of provider b",
                     f"{{'{CLASSES[0]}': 4}} of provider c"):
            self.assertIn(part, line)

    def test_an_allocation_without_requests_is_a_surplus(self):
        with self.assertLogs('nova_accel.request', 'WARNING'):
            self.assertEqual([], request.match([], [allocation('a')]))

    def test_sixteen_groups(self):
        functions = [naming.function_trait(f'{n:032x}') for n in range(16)]
        allocations = [allocation(f'{15 - n:x}', traits=[functions[n]])
                       for n in range(16)]
        began = time.thread_time()
        alike = [wanted(f'_{n:x}') for n in range(16)]
        self.assertEqual([f'{n:x}' for n in range(16)],
                         self.chosen(alike, allocations))
        different = [wanted(f'_{n:x}', function_id=naming.function_of(trait))
                     for n, trait in enumerate(functions)]
        self.assertEqual([f'{15 - n:x}' for n in range(16)],
                         self.chosen(different, allocations))
        self.assertLess(time.thread_time() - began, 0.5)

    @staticmethod
    def chosen(requests, allocations, **more):
        got = request.match(requests, allocations, **more)
        assert [r for r, _ in got] == requests
        return [a.provider_uuid for _, a in got]
