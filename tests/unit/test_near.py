# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which domains servers get, compared with all possible ways on small clouds.
"""

import collections
import itertools
import random

import testtools

from nova_accel import exception
from nova_accel import near

#: small clouds that are compared with all possible ways
CLOUDS = 10000
FORMS = ((near.Level('rack', True),), (near.Level('rack', False),),
         (near.Level('nvlink', True), near.Level('rack', False)),
         (near.Level('nvlink', False), near.Level('rack', True)),
         (near.Level('nvlink', True), near.Level('rack', True)),
         (near.Level('nvlink', False), near.Level('rack', False)))


class LevelsTest(testtools.TestCase):

    def test_read(self):
        self.assertEqual(
            (('nvlink', True), ('rack', False)),
            near.levels('nvlink=required, rack = preferred'))

    def test_refused(self):
        for text in ('', 'rack', 'rack=yes', 'Rack=required', 'rack=required,',
                     'a_b=required', '=required', 'rack=required;'):
            error = self.assertRaises(
                exception.InvalidRequest, near.levels, text)
            self.assertIn('write levels of [accel] near', str(error))
        error = self.assertRaises(
            exception.Contradiction, near.levels,
            'rack=required,rack=preferred')
        self.assertIn('the level rack twice', str(error))


class Cloud:
    """Hosts in racks, with NVLink domains inside, some of which have none."""

    def __init__(self, chance):
        self.free, self.domains = {}, {}
        for number in range(chance.randrange(1, 9)):
            host = f'h{number}'
            self.free[host] = chance.randrange(4)
            rack, part = chance.randrange(3), chance.randrange(2)
            found = self.domains[host] = {}
            if chance.random() < .9:
                found['rack'] = f'R{rack}'
                if chance.random() < .9:
                    found['nvlink'] = f'N{rack}.{part}'

    def place(self, order, servers):
        """As the scheduler: one after the other, by rank and by chance."""
        free, placed = dict(self.free), []
        for _ in range(servers):
            having = [host for host in order if free[host]]
            if not having:
                return placed
            rank = min(order[host] for host in having)
            best = next(h for h in having if order[h] == rank)
            free[best] -= 1
            placed.append(best)
        return placed

    def ways(self, servers):
        """All sets of hosts that have room for the servers."""
        hosts = [host for host in self.free if self.free[host]]
        for size in range(1, min(servers, len(hosts)) + 1):
            for some in itertools.combinations(hosts, size):
                if sum(self.free[host] for host in some) >= servers:
                    yield some

    def count(self, hosts, level):
        return len({self.domains[host].get(level, host) for host in hosts})

    def satisfies(self, hosts, wanted):
        return all(len({self.domains[host].get(level.name)
                        for host in hosts}) == 1
                   and level.name in self.domains[hosts[0]]
                   for level in wanted if level.required)


class ChoiceTest(testtools.TestCase):

    def test_all_ways(self):
        """The best domain, the fewest domains, required is never violated."""
        chance = random.Random(57)
        seen = collections.Counter()
        for number in range(CLOUDS):
            cloud = Cloud(chance)
            wanted = FORMS[number % len(FORMS)]
            servers = chance.randrange(1, 7)
            choice = near.choose(wanted, servers, cloud.free, cloud.domains,
                                 chance=chance.random)
            ways = [way for way in cloud.ways(servers)
                    if cloud.satisfies(way, wanted)]
            strict = any(level.required for level in wanted)
            with_room = sum(cloud.free.values()) >= servers
            about = (cloud.free, cloud.domains, wanted, servers, choice)
            if not ways:
                self.assertTrue(choice.refusal if strict else not with_room,
                                about)
                seen['refused'] += strict
                continue
            self.assertEqual('', choice.refusal, about)
            placed = cloud.place(choice.order, servers)
            self.assertEqual(servers, len(placed), about)
            self.assertTrue(cloud.satisfies(placed, wanted), about)
            names = [level.name for level in reversed(wanted)
                     if not level.required]
            spread = [cloud.count(placed, name) for name in names]
            least = min([cloud.count(way, name) for name in names]
                        for way in ways)
            # with several farther domains the nearer ones are not compared
            self.assertEqual(least[:1], spread[:1], about)
            if least[:1] == [1]:
                self.assertEqual(least, spread, about)
            seen[tuple(spread)] += 1
        for kind in 'refused', (), (1,), (2,), (1, 2), (2, 2):
            self.assertTrue(seen[kind] > 20, seen)

    def test_fullest(self):
        """Of the domains that hold all the fullest, empty ones stay empty."""
        chance = random.Random(58)
        for _ in range(1000):
            cloud = Cloud(chance)
            servers = chance.randrange(1, 7)
            for wish in True, False:
                room = collections.Counter()
                for host, found in cloud.domains.items():
                    if wish or 'rack' in found:
                        room[found.get('rack')] += cloud.free[host]
                    else:
                        room[host] += cloud.free[host]
                del room[None]
                fitting = [n for n in room.values() if n >= servers]
                if not fitting:
                    continue
                choice = near.choose(
                    [near.Level('rack', wish)], servers, cloud.free,
                    cloud.domains)
                first = cloud.place(choice.order, servers)[0]
                self.assertEqual(
                    min(fitting),
                    room[cloud.domains[first].get('rack', first)])

    def test_members(self):
        """Later members go to the domain of the first ones."""
        chance = random.Random(59)
        followed = 0
        for _ in range(2000):
            cloud = Cloud(chance)
            hosts = list(cloud.free)
            servers = chance.randrange(1, 4)
            member = cloud.domains[chance.choice(hosts)]
            for wish in True, False:
                choice = near.choose(
                    [near.Level('rack', wish)], servers, cloud.free,
                    cloud.domains, [member])
                there = sum(cloud.free[h] for h in hosts if cloud.domains[
                    h].get('rack') == member.get('rack'))
                placed = cloud.place(choice.order, servers)
                inside = sum(cloud.domains[host].get('rack') == member.get(
                    'rack') for host in placed if 'rack' in member)
                if wish:
                    self.assertEqual(
                        bool(choice.refusal),
                        'rack' not in member or there < servers)
                    self.assertEqual(0 if choice.refusal else servers, inside)
                elif 'rack' in member:
                    self.assertEqual(min(servers, there), inside)
                    followed += 0 < there
        self.assertTrue(followed > 500, followed)

    def choose(self, wanted, servers, members=(), **racks):
        """:param racks: servers that fit on each host of a rack."""
        free = {f'{rack}{n}': places for rack, hosts in racks.items()
                for n, places in enumerate(hosts)}
        return near.choose(
            near.levels(wanted), servers, free,
            {host: {'rack': host[0]} for host in free},
            [{'rack': one} for one in members])

    def test_refusals(self):
        for said, found in (
                ('the largest free part of a rack has 5 of 8', self.choose(
                    'rack=required', 8, a=[2, 3], b=[1, 1, 1])),
                ('accel:near requires the level rail, and no suitable host '
                 'reports a domain of it', self.choose(
                    'rack=preferred,rail=required', 1, a=[1])),
                ('the free part of rack b of the first member has 1 of 2',
                 self.choose('rack=required', 2, 'b', a=[9], b=[1])),
                ('the free part of rack c of the first member has 0 of 1',
                 self.choose('rack=required', 1, 'c', a=[9])),
                ('the members of the server group are not in one rack',
                 self.choose('rack=required', 1, 'ab', a=[9], b=[9])),
                ('the largest free part of a rack has 0 of 1', self.choose(
                    'rack=required', 1, a=[0]))):
            self.assertEqual(({}, said), found)
        # each level is reported, and no host reports both
        self.assertEqual(
            ({}, 'no suitable host reports a domain of each of rail, rack'),
            near.choose(near.levels('rail=required,rack=required'), 1,
                        {'a': 1, 'b': 1},
                        {'a': {'rail': '1'}, 'b': {'rack': '2'}}))

    def test_single_server(self):
        """It may be tried in another domain; with others it may not."""
        self.assertEqual({'a0': 1, 'b0': 0}, self.choose(
            'rack=required', 1, a=[3], b=[1]).order)
        self.assertEqual({'a0': 0}, self.choose(
            'rack=required', 2, a=[3], b=[1]).order)
        self.assertEqual({'b0': 0}, self.choose(
            'rack=required', 1, 'b', a=[3], b=[1]).order)

    def test_chance(self):
        """Schedulers that decide at once do not all take the same domain."""
        found = {min(self.choose('rack=required', 2, a=[2], b=[2]).order)
                 for _ in range(60)}
        self.assertEqual({'a0', 'b0'}, found)
        free = {'a': 3, 'b': 1}
        found = {min(near.choose(
            near.levels('rack=required'), 1, free,
            {'a': {'rack': 'A'}, 'b': {'rack': 'B'}}, [],
            fullest=fullest).order.items(), key=lambda item: item[1])[0]
            for fullest in [False] * 60}
        self.assertEqual({'a', 'b'}, found)
