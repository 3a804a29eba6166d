# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Random clouds, and the fewest migrations that make room in them."""

import collections
import dataclasses
import random

from nova_accel import naming
from nova_accel.planning import capacity
from nova_accel.planning import defrag
from nova_accel.planning import reasons
from tests.unit.capacity import GPU, node, provider, root, wanted

FOUR, THREE, TWO, ONE = (wanted(gpu1=str(n)) for n in (4, 3, 2, 1))


class Cloud:
    """Hosts with pools of GPUs, and servers on them."""

    def __init__(self, sizes, servers, vcpus=64, racks=''):
        """:param servers: of each host: [(flavor, pool)].
        :param racks: a letter for each host.
        """
        self.hosts, self.servers = {}, {}
        for number, pools in enumerate(sizes):
            name, held = f'host{number}', {}
            self.servers[name] = []
            for count, (flavor, pool) in enumerate(servers[number]):
                uuid = f'server{number}{count}'
                amount = flavor.groups['1'].resources[GPU]
                given = {f'pool{pool}': {GPU: amount}, 'host': {'VCPU': 1,
                                                                'MEMORY_MB': 1}}
                held[uuid] = given
                self.servers[name].append(
                    defrag.Server(uuid, flavor, given))
            traits = {trait for rack in racks[number:number + 1] for trait in (
                f'CUSTOM_NEAR_RACK_{rack}', 'CUSTOM_NEAR_ROW_1')}
            providers = [dataclasses.replace(
                root(vcpus=vcpus), traits=frozenset(traits))] + [
                provider(f'pool{pool}', [node(pool)], **{GPU: total})
                for pool, total in enumerate(pools)]
            self.hosts[name] = capacity.Host([
                reasons.Provider(
                    p.uuid, p.name, p.root, p.inventories, p.traits,
                    {uuid: given[p.uuid] for uuid, given in held.items()
                     if p.uuid in given}, p.parent) for p in providers])

    def plan(self, flavor, amount, *args, **kwargs):
        return defrag.plan(self.hosts, self.servers, defrag.Goal(
            flavor, amount, *args), **kwargs)


class Brute:
    """Each order of migrations, from the shortest on."""

    def __init__(self, cloud, goal):
        self.hosts, self.goal = cloud.hosts, goal
        self.start = {name: (host.free, tuple(
            (one.uuid, one.wanted, self.held(host, one.allocations))
            for one in cloud.servers[name]))
            for name, host in self.hosts.items()}

    @staticmethod
    def held(host, allocations):
        return tuple(tuple(allocations.get(p.uuid, {}).get(name, 0)
                           for name in names)
                     for p, names in zip(host.providers, host.classes))

    def fewest(self, longest):
        now = [self.start]
        for moves in range(longest + 1):
            if any(self.fits(state) for state in now):
                return moves
            now = list({self.key(after): after for state in now
                        for after in self.after(state)}.values())
        return None

    @staticmethod
    def key(state):
        return tuple((free, tuple(sorted((uuid, held) for uuid, _, held
                                         in servers)))
                     for free, servers in state.values())

    def fits(self, state):
        count = collections.Counter()
        for name, (free, servers) in state.items():
            host, goal = self.hosts[name], self.goal
            domains = naming.near_of(host.providers[0].traits)
            if goal.level is None or goal.level in domains:
                count[domains.get(goal.level)] += sum(
                    uuid in goal.members for uuid, _, _ in servers
                ) if goal.members else capacity.count(goal.wanted, host, free)
        return max(count.values(), default=0) >= self.goal.amount

    def after(self, state):
        for source, (free, servers) in state.items():
            for index, (uuid, flavor, held) in enumerate(servers):
                for target, (room, others) in state.items():
                    placed = target != source and not (
                        self.goal.is_apart and uuid in self.goal.members
                        and any(one in self.goal.members
                                for one, _, _ in others)
                    ) and capacity.place(flavor, self.hosts[target], room)
                    if placed:
                        yield {**state, source: (
                            tuple(tuple(map(sum, zip(*pair)))
                                  for pair in zip(free, held)),
                            servers[:index] + servers[index + 1:]), target: (
                            placed, (*others, (uuid, flavor, tuple(
                                tuple(a - b for a, b in zip(*pair))
                                for pair in zip(room, placed)))))}


def random_cloud(chance, racks=''):
    sizes, servers = [], []
    for _ in range(chance.randint(2, 3)):
        pools = [chance.randint(1, 4) for _ in range(chance.randint(1, 2))]
        left, there = list(pools), []
        for _ in range(chance.randint(0, 3)):
            pool, flavor = chance.randrange(len(pools)), chance.choice(
                [ONE, ONE, TWO, THREE])
            amount = flavor.groups['1'].resources[GPU]
            if left[pool] >= amount:
                left[pool] -= amount
                there.append((flavor, pool))
        sizes.append(pools)
        servers.append(there)
    return Cloud(sizes, servers, vcpus=chance.choice([2, 3, 64]), racks=racks)


def random_goal(chance, cloud, kind):
    servers = [one for there in cloud.servers.values() for one in there]
    if kind == 'together' and servers:
        members = chance.sample(servers, min(len(servers), 3))
        flavors = {id(one.wanted): one.wanted for one in members}
        return defrag.Goal(
            flavors.popitem()[1] if len(flavors) == 1 else None,
            len(members), 'rack',
            frozenset(one.uuid for one in members), chance.random() < .3)
    flavor, amount = chance.choice([FOUR, THREE, TWO]), chance.randint(1, 3)
    return defrag.Goal(flavor, amount, 'rack' if kind else None)


def compare(test, seeds, longest=3, kind=''):
    """How many clouds needed a migration."""
    some = 0
    for seed in seeds:
        chance = random.Random(seed)
        cloud = random_cloud(chance, kind and chance.choice(['AAB', 'ABC']))
        goal = random_goal(chance, cloud, kind)
        amount = goal.amount
        fewest = Brute(cloud, goal).fewest(longest)
        found = defrag.plan(cloud.hosts, cloud.servers, goal)
        if fewest is None:
            test.assertFalse(found and len(found.moves) <= longest,
                             f'seed {seed}')
        else:
            test.assertEqual(fewest, len(found.moves), f'seed {seed}')
            test.assertTrue(found.is_shortest)
            test.assertGreaterEqual(found.then, amount)
            some += bool(fewest)
    return some
