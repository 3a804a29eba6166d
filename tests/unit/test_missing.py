# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the owner of a server reads whose accelerators no host has."""

import itertools
import typing
from urllib import parse

import testtools

from nova_accel import naming
from nova_accel import request
from nova_accel.scheduler import candidates
from nova_accel.scheduler import missing
from nova_accel.scheduler import scheduling
from nova_accel.scheduler.missing import Answer

FPGA, GPU = 'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_ACCELERATOR_GPU'
DDR = 'CUSTOM_ACCELERATOR_MEMORY_DDR'
FUNCTION = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
L40S, H100 = 'CUSTOM_GPU_NVIDIA_L40S', 'CUSTOM_GPU_NVIDIA_H100'
LATER = 'try again later, or choose another flavor.'


class Device(typing.NamedTuple):
    """A provider: what is free of it, and its traits."""

    free: dict
    traits: frozenset = frozenset()


class Placement:
    """Hosts with devices; each is a list of them."""

    def __init__(self, *hosts, known=()):
        self.hosts = hosts
        self.known = {*known, *(
            name for host in hosts for device in host
            for name in (*device.free, *device.traits))}

    def ask(self, groups):
        for group in groups.values():
            if not {*group.resources, *group.required,
                    *group.forbidden} <= self.known:
                return Answer.UNKNOWN
        return (Answer.FREE if any(self._has(host, groups.values())
                                   for host in self.hosts) else Answer.NONE)

    @staticmethod
    def _has(host, groups):
        for devices in itertools.product(range(len(host)), repeat=len(groups)):
            free = [dict(device.free) for device in host]
            for number, group in zip(devices, groups):
                for name, amount in group.resources.items():
                    free[number][name] = free[number].get(name, 0) - amount
                if (not group.required <= host[number].traits
                        or group.forbidden & host[number].traits):
                    break
            else:
                if all(amount >= 0 for left in free
                       for amount in left.values()):
                    return True
        return False


def gpu(free, *traits):
    return Device({GPU: free}, frozenset(traits))


def fpga(free, *traits, memory=0):
    return Device({FPGA: free, DDR: memory}, frozenset(traits))


def specs(**values):
    """Extra specs; a1 is resources1, t1 is trait1."""
    return {f'{"resources" if key[0] == "a" else "trait"}{key[1:]}:{name}':
            str(value) if key[0] == 'a' else value
            for key, pairs in values.items() for name, value in pairs.items()}


class MissingTest(testtools.TestCase):

    maxDiff = None

    def told(self, extra_specs, placement, servers=1):
        found = missing.reason(missing.of_accelerators(
            request.groups(extra_specs)), servers, placement.ask)
        if found:
            self.assertLessEqual(len(f'No valid host was found. {found}'), 255)
            self.assertTrue(found.startswith('Accelerators: '), found)
        return found.removeprefix('Accelerators: ')

    def test_table(self):
        nlb = naming.function_trait(FUNCTION)
        named = naming.function_name_trait('nlb')
        no = 'no host for this server '
        for extra_specs, placement, expected in (
                # all are taken
                (specs(a1={FPGA: 1}), Placement([fpga(0)], [fpga(0)]),
                 f'{no}has a free FPGA: {LATER}'),
                (specs(a={FPGA: 1}), Placement([fpga(0)]),
                 f'{no}has a free FPGA: {LATER}'),
                # also those without the function
                (specs(a1={FPGA: 1}, t1={nlb: 'required'}),
                 Placement([fpga(0, nlb)], [fpga(0)]),
                 f'{no}has a free FPGA: {LATER}'),
                # the function
                (specs(a1={FPGA: 1}, t1={nlb: 'required'}),
                 Placement([fpga(0, nlb), fpga(1)]),
                 f'{no}has a free FPGA with the function {FUNCTION}, others '
                 f'are free: {LATER}'),
                (specs(a1={FPGA: 1}, t1={nlb: 'required'}),
                 Placement([fpga(1)]),
                 f'{no}offers any FPGA with the function {FUNCTION}, others '
                 f'are free: choose another flavor.'),
                (specs(a1={FPGA: 1}, t1={named: 'required'}),
                 Placement([fpga(1)], known=[named]),
                 f'{no}has a free FPGA with the function NLB, others are '
                 f'free: {LATER}'),
                (specs(a1={FPGA: 1}, t1={naming.PROGRAMMABLE: 'required'}),
                 Placement([fpga(1)], known=[naming.PROGRAMMABLE]),
                 f'{no}has a free FPGA with a region that may be programmed, '
                 f'others are free: {LATER}'),
                (specs(a1={FPGA: 1}, t1={
                    naming.bitstream_trait(FUNCTION): 'required'}),
                 Placement([fpga(1)]),
                 f'{no}offers any FPGA with the bitstream {FUNCTION}, others '
                 f'are free: choose another flavor.'),
                # the product
                (specs(a1={GPU: 2}, t1={L40S: 'required'}),
                 Placement([gpu(2, H100)], known=[L40S]),
                 f'{no}has 2 GPU free with {L40S}, others are free: {LATER}'),
                (specs(a1={GPU: 1}, t1={H100: 'forbidden'}),
                 Placement([gpu(1, H100)]),
                 f'{no}has a free GPU without {H100}, others are free: '
                 f'{LATER}'),
                # the amount
                (specs(a1={GPU: 8}), Placement([gpu(7)], [gpu(7)]),
                 f'{no}has 8 GPU free, fewer are free: {LATER}'),
                (specs(a1={GPU: 8}), Placement([gpu(0)]),
                 f'{no}has a free GPU: {LATER}'),
                # the memory
                (specs(a1={FPGA: 1, DDR: 8192}),
                 Placement([fpga(1, memory=4096)]),
                 f'{no}has a free FPGA with 8192 MiB of MEMORY_DDR, some with '
                 f'less are free: {LATER}'),
                # each of them is free alone
                (specs(a1={GPU: 2}, t1={L40S: 'required'}),
                 Placement([gpu(1, H100)], known=[L40S]),
                 f'{no}has 2 GPU free with {L40S}, others are free: {LATER}'),
                # the class
                (specs(a1={GPU: 1}), Placement([fpga(1)]),
                 f'{no}offers any GPU: choose another flavor.'),
                (specs(a1={GPU: 2}, t1={L40S: 'required'}),
                 Placement([fpga(1)]),
                 f'{no}offers any GPU: choose another flavor.'),
                # the class is known, the trait is not, and all are taken
                (specs(a1={GPU: 1}, t1={L40S: 'required'}),
                 Placement([gpu(0)]), f'{no}has a free GPU: {LATER}'),
                # several groups
                (specs(a1={GPU: 1}, a2={FPGA: 1}),
                 Placement([gpu(1), fpga(0)], [fpga(0)]),
                 f'{no}has a free FPGA (group 2): {LATER}'),
                (specs(a_X={GPU: 1}, t_X={L40S: 'required'}, a2={FPGA: 1}),
                 Placement([gpu(1), fpga(1)]),
                 f'{no}offers any GPU with {L40S} (group _X), others are free: '
                 f'choose another flavor.'),
                (specs(a1={GPU: 1}, a2={FPGA: 1}),
                 Placement([gpu(1), fpga(0)], [fpga(1)]),
                 f'each of the 2 groups of the flavor can be had, and no host '
                 f'for this server has all of them together: {LATER}'),
                (specs(a1={GPU: 1}, a2={GPU: 1}, a3={GPU: 1}),
                 Placement([gpu(2)], [gpu(1)]),
                 f'each of the 3 groups of the flavor can be had, and no host '
                 f'for this server has all of them together: {LATER}'),
                # the rest
                (specs(a1={GPU: 1}, a2={FPGA: 1}),
                 Placement([gpu(1), fpga(1)]),
                 f'a host has them free, but it is out of service, or lacks '
                 f'something else that the server asks for (processors, '
                 f'memory, disk, zone, networks): {LATER}'),
                # no host at all: it is not the accelerators
                (specs(a1={GPU: 1}), Placement(known=[GPU]), '')):
            with self.subTest(extra_specs=extra_specs, hosts=placement.hosts):
                self.assertEqual(expected, self.told(extra_specs, placement))

    def test_several_servers(self):
        self.assertEqual(
            'a host has those of one server free, and not all 3 servers of '
            'the request find a host: request fewer at a time.',
            self.told(specs(a1={GPU: 1}), Placement([gpu(2)]), servers=3))

    def test_no_more_than_nova_shows(self):
        traits = {f'CUSTOM_{"X" * 200}{n}': 'required' for n in range(9)}
        told = self.told(
            specs(a1={GPU: 1}, t1=traits, a2={GPU: 1}), Placement([gpu(1)]))
        self.assertIn('offers any GPU with ... (group 1), others are free',
                      told)
        traits = dict.fromkeys((f'CUSTOM_TRAIT_{n}' for n in range(99)),
                               'required')
        told = self.told(specs(a1={GPU: 1}, t1=traits), Placement([gpu(1)]))
        self.assertIn('with CUSTOM_TRAIT_0, CUSTOM_TRAIT_1, ', told)
        self.assertTrue(told.endswith(
            ' ..., others are free: choose another flavor.'), told)

    def test_names_that_leave_no_room(self):
        """Nova cuts the sentence off; it is one, all the same."""
        name = f'CUSTOM_ACCELERATOR_{"X" * 200}'
        self.assertIn(f'offers any {"X" * 200} with ..., others are free: ',
                      missing.reason(
                          request.groups(specs(a1={name: 1},
                                               t1={L40S: 'required'})), 1,
                          Placement([Device({name: 1})]).ask))

    def test_group_without_accelerators_is_not_asked_for(self):
        self.assertEqual({}, missing.of_accelerators(request.groups(
            {'resources:VCPU': '2', 'resources1:CUSTOM_OTHER': '1',
             f'resources2:{GPU}': '0', 'trait:HW_CPU_X86_VMX': 'required'})))
        found = missing.of_accelerators(request.groups(
            {'resources:VCPU': '2', f'resources:{FPGA}': '1',
             f'resources:{DDR}': '64', f'resources1:{GPU}': '1',
             'resources1:CUSTOM_OTHER': '1'}))
        self.assertEqual(
            {'': {FPGA: 1, DDR: 64}, '1': {GPU: 1, 'CUSTOM_OTHER': 1}},
            {suffix: group.resources for suffix, group in found.items()})


class RefusalTest(testtools.TestCase):

    def test_words(self):
        class Spec(dict):
            class flavor(dict):
                extra_specs = {f'resources1:{FPGA}': '1',
                               f'resources2:{FPGA}': '1',
                               'accel:same': 'pcie_root'}
            flavor = flavor(extra_specs=None)
        begun = scheduling.Scheduling(Spec(), {}, None, None)
        self.assertEqual('', missing.refusal(begun))
        begun.refused = scheduling.Refusal.PLACES
        self.assertEqual(
            f'Accelerators: no host for this server has all of them free '
            f'below one PCI root complex: {LATER}', missing.refusal(begun))
        begun.refused = scheduling.Refusal.DRIVER
        self.assertEqual(
            f'Accelerators: the hosts that have them for this server do not '
            f'give any out now: {LATER}', missing.refusal(begun))


class QuestionTest(testtools.TestCase):
    """Placement's part of a question of Nova's."""

    #: as Nova 34 writes it, with a port that has bandwidth
    QUERY = parse.urlencode([
        ('group_policy', 'isolate'), ('in_tree', 'uuid0'), ('limit', '1000'),
        ('member_of', 'in:uuid1,uuid2'), ('member_of', '!in:uuid3'),
        ('required', 'COMPUTE_NET_VIF_MODEL_VIRTIO,!HW_CPU_HYPERTHREADING'),
        ('required1', L40S), ('required2', 'CUSTOM_PHYSNET_1'),
        ('resources', 'DISK_GB:20,MEMORY_MB:2048,VCPU:2'),
        ('resources1', f'{GPU}:1'),
        ('resources2', 'NET_BW_EGR_KILOBIT_PER_SEC:1000'),
        ('root_required', '!COMPUTE_STATUS_DISABLED')])

    def asked(self, groups):
        path, _, query = candidates.url_of_part(
            self.QUERY, groups).partition('?')
        self.assertEqual('/allocation_candidates', path)
        return sorted(parse.parse_qsl(query))

    #: which hosts the server may go to
    HOSTS = [('in_tree', 'uuid0'), ('limit', '1'), ('member_of', '!in:uuid3'),
             ('member_of', 'in:uuid1,uuid2'),
             ('required', 'COMPUTE_NET_VIF_MODEL_VIRTIO,'
                          '!HW_CPU_HYPERTHREADING'),
             ('root_required', '!COMPUTE_STATUS_DISABLED')]

    def test_host_alone(self):
        path, _, query = candidates.url_of_hosts(self.QUERY).partition('?')
        self.assertEqual('/resource_providers', path)
        self.assertEqual(
            [('in_tree', 'uuid0'), ('member_of', '!in:uuid3'),
             ('member_of', 'in:uuid1,uuid2'),
             ('required', 'COMPUTE_NET_VIF_MODEL_VIRTIO,'
                          '!HW_CPU_HYPERTHREADING,!COMPUTE_STATUS_DISABLED'),
             ('resources', 'MEMORY_MB:1')], sorted(parse.parse_qsl(query)))
        self.assertEqual('/resource_providers?resources=MEMORY_MB:1',
                         candidates.url_of_hosts('resources=VCPU:1'))

    def test_numbered_groups(self):
        self.assertEqual(
            sorted([*self.HOSTS, ('resources', 'MEMORY_MB:1'),
                    ('group_policy', 'isolate'),
                    ('resources1', f'{GPU}:1'), ('required1', f'{L40S},!A'),
                    ('resources3', f'{GPU}:2')]),
            self.asked({
                '1': request.Group({GPU: 1}, frozenset([L40S]),
                                   frozenset('A')),
                '3': request.Group({GPU: 2})}))

    def test_one_host(self):
        path, _, query = candidates.url_of_part(
            'resources=VCPU:1', {'1': request.Group({GPU: 1})},
            'uuid4').partition('?')
        self.assertEqual(
            [('in_tree', 'uuid4'), ('in_tree1', 'uuid4'), ('limit', '1'),
             ('resources', 'MEMORY_MB:1'), ('resources1', f'{GPU}:1')],
            sorted(parse.parse_qsl(query)))

    def test_providers(self):
        """Of the unnumbered group each class may come from another one, and
        so may the traits."""
        group = request.Group({GPU: 2, FPGA: 1, DDR: 0}, frozenset([L40S]),
                              frozenset('A'))
        self.assertEqual(
            f'/resource_providers?resources={FPGA}:1,{GPU}:2'
            f'&required={L40S},!A', candidates.url_of_providers('1', group))
        self.assertEqual(f'/resource_providers?resources={FPGA}:1',
                         candidates.url_of_providers('', group))

    def test_unnumbered_group(self):
        self.assertEqual(
            sorted([*self.HOSTS, ('resources', f'{FPGA}:1,MEMORY_MB:1')]),
            self.asked({'': request.Group({FPGA: 1}, frozenset([L40S]))}))
