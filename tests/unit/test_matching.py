# Licensed under the Apache License, Version 2.0. See LICENSE.

import collections
import itertools
import random
import time

from hypothesis import given
from hypothesis import strategies as st
import testtools

from nova_accel import matching
from nova_accel.matching import Item

PLACES = ['p1', 'p2', 'p3']


def choices(items, places):
    """(cost, choice) of every choice there is, the best first."""
    found = []
    for choice in itertools.product(places, repeat=len(items)):
        used = collections.defaultdict(collections.Counter)
        for item, place in zip(items, choice):
            used[place].update(item.amounts)
        if (all(place in item.costs
                for item, place in zip(items, choice))
                and all(places[place].get(kind, 0) >= amount
                        for place, amounts in used.items()
                        for kind, amount in amounts.items())):
            cost = sum(item.costs[place]
                       for item, place in zip(items, choice))
            found.append((cost, choice))
    # product() has them in the order of items and places
    return sorted(found, key=lambda item: item[0])


def items(amounts, most=4):
    return st.lists(st.builds(Item, amounts, st.dictionaries(
        st.sampled_from(PLACES), st.integers(0, 2))), max_size=most)


def places(most):
    return st.fixed_dictionaries({place: st.dictionaries(
        st.sampled_from('AB'), st.integers(0, most)) for place in PLACES})


class AssignTest(testtools.TestCase):

    def test_table(self):
        one, two, both = {'A': 1}, {'A': 2}, {'A': 1, 'B': 1}
        free = dict.fromkeys(PLACES, 0)
        for name, asked, there, expected in (
                ('nothing', [], {}, []),
                ('nothing of something', [], {'p1': one}, []),
                ('no place', [Item(one, {})], {}, None),
                ('the order of places', [Item(one, free)] * 2,
                 {'p2': one, 'p1': one}, ['p2', 'p1']),
                ('the first may not', [Item(one, free),
                                       Item(one, {'p1': 0})],
                 {'p1': one, 'p2': one}, ['p2', 'p1']),
                ('the cheapest', [Item(one, {'p1': 1, 'p2': 0}),
                                  Item(one, {'p1': 3, 'p2': 1})],
                 {'p1': one, 'p2': one}, ['p1', 'p2']),
                ('too little', [Item(one, free)] * 2, {'p1': one}, None),
                ('not from two', [Item(two, free)],
                 {'p1': one, 'p2': one}, None),
                ('one and two of three', [Item(one, free),
                                          Item(two, free)],
                 {'p1': {'A': 3}}, ['p1', 'p1']),
                ('two only where two are', [Item(one, free),
                                            Item(two, free)],
                 {'p1': two, 'p2': one}, ['p2', 'p1']),
                ('a surplus', [Item(one, {'p1': 1, 'p2': 0})],
                 {'p1': one, 'p2': two}, ['p2']),
                ('all kinds from one place', [Item(both, free)],
                 {'p1': one, 'p2': {'B': 1}, 'p3': both}, ['p3']),
                ('and none without it', [Item(both, free)],
                 {'p1': one, 'p2': {'B': 1}}, None),
                ('kinds do not take from each other',
                 [Item({'B': 1}, free), Item(one, free)],
                 {'p1': both}, ['p1', 'p1']),
                ('a packing that only looks possible',
                 [Item({'A': 3}, free)] * 3,
                 {'p1': {'A': 5}, 'p2': {'A': 5}}, None)):
            with self.subTest(name):
                self.assertEqual(expected, matching.assign(asked, there))

    @given(items(st.sampled_from([{'A': 1}, {'B': 2}])), places(3))
    def test_equal_amounts_against_brute_force(self, asked, there):
        best = next(iter(choices(asked, there)), None)
        self.assertEqual(best and list(best[1]),
                         matching.assign(asked, there))

    @given(items(st.dictionaries(st.sampled_from('AB'), st.integers(1, 3),
                                 min_size=1), 5), places(6))
    def test_any_amounts_against_brute_force(self, asked, there):
        found = {choice: cost for cost, choice in choices(asked, there)}
        got = matching.assign(asked, there)
        self.assertEqual(bool(found), got is not None)
        if found:
            self.assertEqual(min(found.values()), found[tuple(got)])

    def assertQuick(self, asked, there, seconds=0.25):
        # this thread's own time: other work on the machine does not count
        began = time.thread_time()
        got = matching.assign(asked, there)
        self.assertLess(time.thread_time() - began, seconds)
        return got

    def test_sixteen(self):
        one = {'A': 1}
        there = {f'p{n:02}': one for n in range(16)}
        self.assertEqual(
            list(there),
            self.assertQuick([Item(one, dict.fromkeys(there, 0))] * 16,
                             there))
        # each may go to one place less than the one before
        self.assertEqual(
            list(there)[::-1],
            self.assertQuick([Item(one, {
                place: 0 for place in list(there)[:16 - n]})
                for n in range(16)], there))
        rand = random.Random(1)
        self.assertEqual(16, len(set(self.assertQuick([Item(one, {
            place: rand.randint(0, 1) for place in there})
            for _ in range(16)], there))))
        # and where that is one too many
        self.assertIsNone(self.assertQuick(
            [Item(one, dict.fromkeys(there, 0))] * 17, there))

    def test_sixteen_of_different_amounts(self):
        there = {f'p{n:02}': {'A': 3} for n in range(16)}
        rand = random.Random(2)
        asked = [Item({'A': 1 + n % 2},
                      {place: rand.randint(0, 1) for place in there})
                 for n in range(32)]
        # which could be cheaper only below nothing
        got = self.assertQuick(asked, there, seconds=5)
        self.assertEqual(0, sum(d.costs[p] for d, p in zip(asked, got)))

    def test_contrived_packings_come_to_an_end(self):
        there = {f'p{n}': {'A': 10} for n in range(6)}
        free = dict.fromkeys(there, 0)
        self.assertIsNone(self.assertQuick(
            [Item({'A': 4}, free)] * 13 + [Item({'A': 1}, free)] * 3,
            there, seconds=10))
