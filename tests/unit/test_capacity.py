# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How many servers fit, against all ways to place them, and in Placement."""

import functools
import itertools
import random
import time

import testtools

from nova_accel import naming
from nova_accel.planning import capacity
from nova_accel.planning import reasons
from nova_accel import request

GPU, FPGA = 'CUSTOM_ACCELERATOR_GPU', 'CUSTOM_ACCELERATOR_FPGA'
DDR = 'CUSTOM_ACCELERATOR_MEMORY_DDR'
L40S, A40 = 'CUSTOM_GPU_NVIDIA_L40S', 'CUSTOM_GPU_NVIDIA_A40'
FUNCTION = 'd8424dc4a4a3c413f89e433683f9040b'
CARRIED = naming.function_trait(FUNCTION)


def provider(uuid, traits=(), used=None, parent='host', **inventory):
    """:param inventory: class -> total, or (total, step size)."""
    def item(given):
        total, step = given if isinstance(given, tuple) else (given, 1)
        return {'total': total, 'reserved': 0, 'allocation_ratio': 1.0,
                'min_unit': step, 'max_unit': total, 'step_size': step}
    return reasons.Provider(
        uuid, uuid, 'host', {name: item(given)
                             for name, given in inventory.items()},
        frozenset(traits), {'server': used} if used else {}, parent)


def root(vcpus=64, memory=65536, **more):
    return provider('host', VCPU=vcpus, MEMORY_MB=memory, parent=None, **more)


def node(number):
    return f'CUSTOM_ACCELERATOR_NUMA_{number}'


def below(number):
    return f'CUSTOM_ACCELERATOR_PCIE_ROOT_{number}'


def wanted(vcpus=1, memory=1, **specs):
    """A flavor: gpu1='1' is resources1:CUSTOM_ACCELERATOR_GPU, t1 a trait."""
    spelled = {}
    for key, value in specs.items():
        kind, group = key.rstrip('0123456789'), key.lstrip(
            'abcdefghijklmnopqrstuvwxyz_')
        spelled.update({
            'gpu': lambda: {f'resources{group}:{GPU}': value},
            'fpga': lambda: {f'resources{group}:{FPGA}': value},
            'ddr': lambda: {f'resources{group}:{DDR}': value},
            't': lambda: {f'trait{group}:{value}': 'required'},
            'not': lambda: {f'trait{group}:{value}': 'forbidden'},
            'function': lambda: {f'accel{group}:function_id': value},
            'numa': lambda: {request.AFFINITY_KEY: value},
            'same': lambda: {request.SAME_KEY: value},
            'nodes': lambda: {'hw:numa_nodes': value},
            'policy': lambda: {'group_policy': value}}[kind]())
    groups = request.groups(spelled)
    plain = groups.get('', request.Group({}))
    groups[''] = request.Group(
        {'VCPU': vcpus, 'MEMORY_MB': memory, **plain.resources},
        plain.required, plain.forbidden)
    return capacity.Wanted(groups, request.parse(spelled),
                           spelled.get('group_policy'),
                           request.affinity(spelled))


class Brute:
    """All ways to place servers one after the other."""

    def __init__(self, flavor, providers):
        self.flavor, self.providers = flavor, providers

    def most(self):
        @functools.cache
        def most(free):
            return max((1 + most(after) for after in self.after(free)),
                       default=0)
        return most(tuple(
            tuple(sorted((name, p.free(name)) for name in p.inventories))
            for p in self.providers))

    def after(self, free):
        """What may be free after one server more."""
        needs = reasons.needs(self.flavor.groups)
        found = set()
        for given in itertools.product(range(len(self.providers)),
                                       repeat=len(needs)):
            left = [dict(has) for has in free]
            if self.may(needs, given, [dict(has) for has in free], left):
                found.add(tuple(tuple(sorted(has.items())) for has in left))
        return found

    def may(self, needs, given, free, left):
        plain = self.flavor.groups['']
        functions = {r.group: set(r.wanted_traits)
                     for r in self.flavor.requests if r.programs}
        serving = set()
        for need, number in zip(needs, given):
            one = self.providers[number]
            forbidden = need.forbidden if need.group else plain.forbidden
            if need.required - one.traits or forbidden & one.traits:
                return False
            for name, amount in need.resources.items():
                if (name not in left[number]
                        or amount % one.inventories[name]['step_size']
                        or amount > one.inventories[name]['max_unit']):
                    return False
                left[number][name] -= amount
                if left[number][name] < 0:
                    return False
                if name == FPGA and need.group in functions and not (
                        functions[need.group] & one.traits) and (
                            naming.PROGRAMMABLE not in one.traits
                            or free[number][name]
                            < one.inventories[name]['total']):
                    return False
            if not need.group:
                serving.add(number)
        if plain.required.difference(*(
                self.providers[n].traits for n in serving)):
            return False
        numbered = [n for need, n in zip(needs, given) if need.group]
        if self.flavor.policy == 'isolate' and (
                len(set(numbered)) < len(numbered)):
            return False
        if len(self.flavor.requests) > 1:
            shown = [naming.place_of(self.providers[n].traits)
                     for need, n in zip(needs, given)
                     if naming.accelerators(need.resources)]
            nodes = {node for node, _ in shown if node}
            roots = {one for _, one in shown if one}
            affinity = self.flavor.affinity
            if (affinity.nodes is not None and len(nodes) > affinity.nodes
                    or affinity.one_root and len(roots) > 1):
                return False
        return True


def random_host(chance):
    providers = [root(chance.randint(1, 9), chance.randint(1, 9))]
    for number in range(chance.randint(1, 4)):
        traits = chance.sample([L40S, A40], chance.randint(0, 1))
        at = chance.choice([None, 0, 1])
        if at is not None:
            traits.append(node(at))
            if chance.random() < .5:
                traits.append(below(2 * at + chance.randint(0, 1)))
        if chance.random() < .4:
            traits += chance.choice([[CARRIED], [naming.PROGRAMMABLE], []])
            inventory = {FPGA: 1}
            if chance.random() < .5:
                inventory[DDR] = chance.randint(1, 3)
        else:
            total = chance.randint(1, 4)
            step = chance.choice([1, 1, 1, 2]) if total % 2 == 0 else 1
            inventory = {GPU: (total, step)}
        used = {name: 1 for name, given in inventory.items()
                if chance.random() < .2
                and (given if isinstance(given, int) else given[1]) == 1}
        providers.append(provider(f'p{number}', traits, used, **inventory))
    return providers


def random_flavor(chance):
    specs = {}
    for group in chance.sample(['1', '2', '3', ''], chance.randint(1, 3)):
        if chance.random() < .35:
            specs[f'fpga{group}'] = '1'
            if chance.random() < .5:
                specs[f'function{group}'] = FUNCTION
            if chance.random() < .3:
                specs[f'ddr{group}'] = str(chance.randint(1, 2))
        else:
            specs[f'gpu{group}'] = str(chance.choice([1, 1, 2, 3]))
        if chance.random() < .25:
            specs[f't{group}'] = chance.choice([L40S, A40])
        elif chance.random() < .15:
            specs[f'not{group}'] = L40S
    if chance.random() < .3:
        specs['numa'] = 'required'
        if chance.random() < .2:
            specs['nodes'] = '2'
    elif chance.random() < .2:
        specs['same'] = chance.choice(['numa', 'pcie_root'])
    if chance.random() < .3:
        specs['policy'] = 'isolate'
    return wanted(chance.randint(1, 2), chance.randint(1, 2), **specs)


def compare(test, seeds):
    """How many clouds fit any server."""
    some = 0
    for seed in seeds:
        chance = random.Random(seed)
        providers, flavor = random_host(chance), random_flavor(chance)
        host = capacity.Host(providers)
        most = Brute(flavor, providers).most()
        counted = capacity.count(flavor, host, host.free)
        test.assertEqual(most, counted, f'seed {seed}')
        placed = capacity.place(flavor, host, host.free)
        test.assertEqual(bool(most), placed is not None, f'seed {seed}')
        if placed is not None:
            test.assertGreater(most, capacity.count(flavor, host, placed),
                               f'seed {seed}')
        text = capacity.limit(flavor, host, host.free).text
        test.assertTrue(text, f'seed {seed}')
        some += bool(most)
    return some


class CountTest(testtools.TestCase):

    def test_random(self):
        """tests.bench.capacity does this with more of them."""
        self.assertGreater(compare(self, range(120)), 20)

    def count(self, providers, flavor):
        host = capacity.Host(providers)
        return (capacity.count(flavor, host, host.free),
                capacity.limit(flavor, host, host.free).text)

    def test_table(self):
        pools = [provider('n0', [node(0)], **{GPU: 4}),
                 provider('n1', [node(1)], {GPU: 1}, **{GPU: 4})]
        regions = [
            provider('r0', [CARRIED], **{FPGA: 1}),
            provider('r1', [naming.PROGRAMMABLE], **{FPGA: 1}),
            provider('r2', ['CUSTOM_FPGA_INTEL'], **{FPGA: 1})]
        for name, providers, flavor, expected in (
                ('of a pool', [root(), *pools], wanted(gpu1='2'),
                 (3, f'2 {GPU} for each, 7 free of 8')),
                ('processors', [root(vcpus=5), *pools],
                 wanted(vcpus=2, gpu1='1'),
                 (2, '2 VCPU for each, 5 free of 5')),
                ('memory', [root(memory=4095), *pools],
                 wanted(memory=2048, gpu1='1'),
                 (1, '2048 MEMORY_MB for each, 4095 free of 4095')),
                ('two groups', [root(), *pools], wanted(gpu1='1', gpu2='3'),
                 (1, f'3 {GPU} for each, 7 free of 8')),
                ('another provider for each', [root(), *pools],
                 wanted(gpu1='1', gpu2='1', gpu3='1', policy='isolate'),
                 (0, 'another provider for each group '
                     '(group_policy=isolate)')),
                ('on one node', [root(), *pools],
                 wanted(gpu1='2', gpu2='1', numa='required'),
                 (2, f'2 {GPU} for each, 7 free of 8')),
                ('on one node, not on two', [root(), *pools],
                 wanted(gpu1='4', gpu2='2', numa='required'),
                 (0, 'all accelerators on one NUMA node')),
                ('a trait', [root(), *pools], wanted(gpu1='1', t1=L40S),
                 (0, f'1 {GPU} with {L40S} for each, others are free')),
                ('a function', [root(), *regions],
                 wanted(fpga1='1', function1=FUNCTION),
                 (2, f'1 {FPGA} for each, 3 free of 3')),
                ('a region of several, one of which is in use', [
                    root(), provider('r', [naming.PROGRAMMABLE], {FPGA: 1},
                                     **{FPGA: 4})],
                 wanted(fpga1='1', function1=FUNCTION),
                 (0, f'1 {FPGA} with the function for each, others are free')),
                ('more used than there is', [
                    root(), provider('p', used={GPU: 3}, **{GPU: 2})],
                 wanted(gpu1='1'), (0, f'1 {GPU} for each, 0 free of 2')),
                ('a set', [root(), provider('s', **{GPU: (4, 4)})],
                 wanted(gpu1='2'), (0, f'2 {GPU} for each, 4 free of 4')),
                ('no such thing', [root()], wanted(gpu1='1'),
                 (0, f'no {GPU}')),
                ('a trait that the host lacks', [root(), *pools],
                 wanted(gpu1='1', t='CUSTOM_GOLD'),
                 (0, 'no provider has the trait CUSTOM_GOLD'))):
            with self.subTest(name):
                self.assertEqual(expected, self.count(providers, flavor))

    def test_disk_that_hosts_share(self):
        flavor = wanted(gpu1='1')
        plain = flavor.groups['']
        shared = capacity.Wanted({**flavor.groups, '': request.Group(
            {**plain.resources, 'DISK_GB': 20})}, flavor.requests)
        self.assertEqual(4, self.count(
            [root(), provider('p', **{GPU: 4})], shared)[0])

    def test_large_hosts(self):
        """A second for what hosts are made of."""
        start = time.process_time()
        vfs = [provider(f'pool{n}', [node(n % 2)], **{GPU: 64})
               for n in range(4)]
        regions = [provider(f'r{n}', [naming.PROGRAMMABLE, node(n % 2),
                                      below(n)], **{FPGA: 1})
                   for n in range(64)]
        eight = {f'gpu{n}': '1' for n in range(1, 9)}
        for providers, flavor, expected in (
                (vfs, wanted(0, gpu1='1'), 256),
                (vfs, wanted(0, **eight, numa='required'), 32),
                (vfs, wanted(0, gpu1='1', gpu2='2', gpu3='3'), 42),
                (regions, wanted(0, fpga1='1', fpga2='1', fpga3='1',
                                 policy='isolate'), 21),
                (regions, wanted(0, fpga1='1', fpga2='1', fpga3='1',
                                 numa='required'), 20),
                (regions, wanted(0, fpga1='1', fpga2='1', function1=FUNCTION,
                                 policy='isolate'), 32)):
            self.assertEqual(expected, self.count(
                [root(vcpus=999), *providers], flavor)[0])
        self.assertLess(time.process_time() - start, 20)
