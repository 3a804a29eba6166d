# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Small hosts, and how many servers they take as trying all ways shows."""

import functools
import itertools
import random

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
