# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The fewest migrations that make room, against all migrations there are."""

import dataclasses
import random

import testtools

from nova_accel import near as levels
from nova_accel.planning import capacity
from nova_accel.planning import defrag
from nova_accel import request
from tests.unit.capacity import GPU, wanted
from tests.unit.gpu_clouds import Cloud, compare, FOUR, ONE, THREE, TWO


class PlanTest(testtools.TestCase):

    def test_random(self):
        """tests.bench.capacity does this with more of them."""
        self.assertGreater(compare(self, range(120)), 6)

    def test_near(self):
        self.assertGreater(compare(self, range(120), kind='rack'), 5)
        self.assertGreater(compare(self, range(80), kind='together'), 12)

    def test_required_level_is_kept(self):
        """Else the migration of a job's server would tear it apart."""
        for near, target in (('rack=required', 'host1'),
                             ('rack=preferred', 'host2')):
            bound = dataclasses.replace(ONE, affinity=request.Affinity(
                levels=levels.levels(near)))
            cloud = Cloud([[4], [4], [2]], [[(bound, 0)], [(bound, 0)], []],
                          racks='AAB')
            [move] = cloud.plan(FOUR, 1, 'rack').moves
            self.assertEqual(target, move.target)

    def test_required_level_of_the_flavor(self):
        """Room in two racks of a row is none for a job that needs one."""
        bound = dataclasses.replace(FOUR, affinity=request.Affinity(
            levels=levels.levels('rack=required')))
        cloud = Cloud([[4], [4], [4]], [[], [], [(ONE, 0)]], racks='ABB')
        self.assertEqual((), cloud.plan(FOUR, 2, 'row').moves)
        [move] = cloud.plan(bound, 2, 'row').moves
        self.assertEqual(('host2', 'host0'), (move.source, move.target))

    def moves(self, cloud, flavor, amount):
        found = cloud.plan(flavor, amount)
        return found and [(m.server, m.source, m.target) for m in found.moves]

    def test_nothing_has_to_move(self):
        cloud = Cloud([[4], [4]], [[(ONE, 0)], []])
        found = cloud.plan(FOUR, 1)
        self.assertEqual(((), 1, 1), (found.moves, found.now, found.then))

    def test_one_of_the_host_with_one(self):
        cloud = Cloud([[4], [4], [4]], [
            [(ONE, 0), (ONE, 0)], [(ONE, 0)], [(TWO, 0)]])
        found = cloud.plan(FOUR, 1)
        [move] = found.moves
        self.assertEqual(('server10', 'host1'), (move.server, move.source))
        self.assertEqual((0, 1), (found.now, found.then))

    def test_one_makes_room_for_another(self):
        """The small one leaves the host to which the large one goes."""
        cloud = Cloud([[4], [3], [1]], [[(THREE, 0)], [(ONE, 0)], []])
        self.assertEqual([('server10', 'host1', 'host2'),
                          ('server00', 'host0', 'host1')],
                         self.moves(cloud, FOUR, 1))

    def test_no_room_at_all(self):
        cloud = Cloud([[4], [4]], [[(THREE, 0)], [(THREE, 0)]])
        self.assertIsNone(cloud.plan(FOUR, 1))
        self.assertIsNone(cloud.plan(FOUR, 3))

    def test_id(self):
        """It is that of these migrations and no other ones."""
        cloud = Cloud([[4], [4]], [[(ONE, 0)], [(ONE, 0)]])
        plan = cloud.plan(FOUR, 1)
        self.assertEqual(plan.id, cloud.plan(FOUR, 1).id)
        other = Cloud([[4], [4], [4]], [[(ONE, 0)], [(ONE, 0)], [(ONE, 0)]])
        self.assertNotEqual(plan.id, other.plan(FOUR, 2).id)

    def test_after(self):
        cloud = Cloud([[4], [4], [1]], [[(ONE, 0)], [(TWO, 0)], []])
        moves = cloud.plan(FOUR, 1).moves

        def after(moves, cloud=cloud):
            return defrag.after(moves, cloud.hosts, cloud.servers,
                                defrag.Goal(FOUR, 1))
        self.assertEqual((0, 1), (after(()), after(moves)))
        for there in ([[(TWO, 0)], [(TWO, 0)], [(ONE, 0)]],
                      [[], [(TWO, 0)], []]):
            # the room is taken, the server is gone
            with self.assertRaises(defrag.Changed) as raised:
                after(moves, Cloud([[4], [4], [1]], there))
            self.assertEqual(moves[0].server, str(raised.exception))
        with self.assertRaises(defrag.Changed):
            after([defrag.Move('server00', 'host0', 'gone')])

    def test_many_hosts(self):
        """A hundred hosts of eight in a few seconds, and no more states than
        allowed."""
        chance = random.Random(0)
        servers = []
        for _ in range(100):
            left, there = 8, []
            while left and chance.random() < .75:
                flavor = chance.choice([ONE, ONE, TWO, FOUR])
                amount = flavor.groups['1'].resources[GPU]
                if amount <= left:
                    left -= amount
                    there.append((flavor, 0))
            servers.append(there)
        cloud = Cloud([[8]] * 100, servers)
        now = sum(capacity.count(wanted(gpu1='8'), host, host.free)
                  for host in cloud.hosts.values())
        found = cloud.plan(wanted(gpu1='8'), now + 3)
        self.assertEqual(3, len(found.moves))
        self.assertTrue(found.is_shortest)
        cut = cloud.plan(wanted(gpu1='8'), now + 40, states=50)
        self.assertTrue(cut is None or not cut.is_shortest)
