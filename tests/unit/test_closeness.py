# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The closest of the free devices, against trying all of them."""

import itertools
import random

import ddt
import hypothesis
from hypothesis import strategies as st
import testtools

from nova_accel.attach import closeness


def shared(one, other):
    """How many names at the beginning two places share."""
    return len(list(itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(one, other))))


def total(places):
    return sum(shared(*pair) for pair in itertools.combinations(places, 2))


@ddt.ddt
class ClosenessTest(testtools.TestCase):

    @ddt.data(
        # places, how many -> which
        ('', 0, []),
        ('a', 1, [0]),
        ('aaaa', 2, [0, 1]),
        # all on one node
        ('abba', 2, [0, 3]),
        ('abbb', 3, [1, 2, 3]),
        ('aabbb', 3, [2, 3, 4]),
        # one is taken where it breaks no larger group
        ('aabaa', 1, [2]),
        ('aaaabb', 2, [4, 5]),
        ('aaabbbb', 1, [0]),
        # more than any has
        ('aabb', 3, [0, 1, 2]),
        ('aaabbbbc', 5, [3, 4, 5, 6, 7]),
        ('aabb', 4, [0, 1, 2, 3]),
        # switches below nodes
        (['ax', 'ay', 'bx', 'bx'], 2, [2, 3]),
        (['ax', 'ay', 'bx', 'bx', 'ax'], 2, [2, 3]),
        (['ax', 'ax', 'ay', 'ay', 'bz', 'bz', 'bz'], 4, [0, 1, 2, 3]),
        (['ax', 'ax', 'ay', 'bx'], 1, [3]),
        (['ax', 'ax', 'ay'], 1, [2]),
        # of some the host does not tell all
        (['a', 'ax', 'a', 'ax'], 2, [1, 3]))
    @ddt.unpack
    def test_table(self, places, amount, chosen):
        self.assertEqual(chosen, closeness.choose(
            [tuple(place) for place in places], amount))

    @hypothesis.settings(deadline=None, max_examples=60)
    @hypothesis.given(st.data())
    def test_never_worse_than_trying_all(self, data):
        """Random trees of devices."""
        places = data.draw(st.lists(st.lists(
            st.sampled_from('abc'), min_size=1, max_size=3), max_size=10))
        self._compare(list(map(tuple, places)), data.draw(
            st.integers(0, len(places))))

    def test_eight_of_sixteen(self):
        chance = random.Random(12)
        for _ in range(2):
            self._compare([tuple(chance.choice(names) for names in (
                'ab', 'xyz', 'pq')) for _ in range(16)], 8)

    def _compare(self, places, amount):
        count = len(places)
        chosen = closeness.choose(places, amount)
        self.assertEqual((amount, sorted(set(chosen))),
                         (len(chosen), chosen))

        def value(positions):
            left = set(range(count)) - set(positions)
            return (total([places[n] for n in positions]),
                    total([places[n] for n in left]))
        self.assertEqual(
            max(map(value, itertools.combinations(range(count), amount))),
            value(chosen), (places, chosen))

    def test_many(self):
        """All VFs of a host, in no time."""
        places = [('0', card) for card in 'abcd' for _ in range(64)]
        self.assertEqual(list(range(64)), closeness.choose(places, 64))
