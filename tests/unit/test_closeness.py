# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The closest of the free devices, against trying all of them."""

import itertools

import ddt
import hypothesis
from hypothesis import strategies as st
import testtools

from nova_accel.attach import closeness


def shared(one, other):
    """How many names at the beginning two places share."""
    return len(list(itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(one, other))))


class Total:
    """Over all pairs of some places how many names they share."""

    def __init__(self, places):
        self._shared = [[shared(one, other) for other in places]
                        for one in places]

    def of(self, numbers):
        return sum(self._shared[one][other]
                   for one, other in itertools.combinations(numbers, 2))


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
        self.assertEqual([chosen], closeness.choose(
            [closeness.Want(list(map(tuple, places)), amount)]))

    @ddt.data(
        # places and amount of each want, limit, together -> which of each
        # the two of one want are where the other one has its
        ([('abab', 2), ('b', 1)], None, True, [[1, 3], [0]]),
        ([('aab', 1), ('bbb', 3)], None, True, [[2], [0, 1, 2]]),
        ([('aabb', 2), ('aabb', 2)], None, True, [[0, 1], [0, 1]]),
        # of two wants that can be together anywhere what leaves a whole group
        ([('aab', 1), ('aab', 1)], None, True, [[2], [2]]),
        # the server does not care: what is left is kept whole
        ([('aabc', 2)], None, True, [[0, 1]]),
        ([('aabc', 2)], None, False, [[2, 3]]),
        # all on one node, or on two
        ([('aab', 2)], (1, 1), True, [[0, 1]]),
        ([('aab', 2)], (1, 1), False, [[0, 1]]),
        ([('aab', 3)], (1, 1), True, None),
        ([('aab', 3)], (1, 2), True, [[0, 1, 2]]),
        ([('abc', 3)], (1, 2), True, None),
        ([('aab', 3)], (1, 9), True, [[0, 1, 2]]),
        ([('aab', 1), ('b', 1)], (1, 1), True, [[2], [0]]),
        ([('aa', 1), ('b', 1)], (1, 1), True, None),
        ([('a', 1), ('b', 1)], (1, 1), True, None),
        ([('a', 1), ('b', 1)], (1, 2), True, [[0], [0]]),
        # below one root
        ([(['ax', 'ay', 'ay'], 2)], (2, 1), True, [[1, 2]]),
        ([(['ax', 'ay', 'bx'], 2)], (2, 1), True, None),
        # what is narrower is not asked for
        ([(['axp', 'axq', 'ayp'], 2)], (2, 1), False, [[0, 1]]),
        # of some the host does not tell all
        ([(['a', 'a', 'ax'], 2)], (2, 1), True, [[0, 1]]),
        # some nodes only
        ([('aab', 1)], (1, 1, 'b'), True, [[2]]),
        ([('aab', 2)], (1, 2, 'b'), True, None),
        ([('abbc', 2)], (1, 2, 'ac'), True, [[0, 3]]),
        ([('aab', 1)], (1, 1, 'z'), True, None),
        ([(['ax', 'ax', 'bx'], 1)], (2, 1, 'b'), True, [[2]]),
        # what the server has beside, wherever it is
        ([('aab', 1), ('b', 1, True)], None, True, [[2], [0]]),
        ([('aab', 1), ('b', 1, True)], (1, 1, 'a'), True, [[0], [0]]),
        ([(['axp', 'axq', 'ayp'], 1), (['ax'], 1, True)], (2, 1), True,
         [[0], [0]]),
        ([('', 0)], (1, 1), True, [[]]),
        ([('ab', 0)], (1, 1), True, [[]]))
    @ddt.unpack
    def test_several(self, wants, limit, together, chosen):
        self.assertEqual(chosen, closeness.choose(
            [closeness.Want(list(map(tuple, places)), *more)
             for places, *more in wants],
            limit and closeness.Limit(*limit), together))

    @hypothesis.given(st.data())
    def test_never_worse_than_trying_all(self, data):
        """Random trees of devices."""
        place = st.lists(st.sampled_from('abc'), min_size=1, max_size=3)
        wants = []
        for size in data.draw(st.sampled_from(((10,), (5, 5), (4, 3, 3)))):
            places = data.draw(st.lists(place, max_size=size))
            wants.append(closeness.Want(list(map(tuple, places)), data.draw(
                st.integers(0, len(places)))))
        limit = data.draw(st.none() | st.builds(
            closeness.Limit, st.integers(1, 2), st.integers(1, 2),
            st.none() | st.sets(st.sampled_from('abc'))))
        wants += [closeness.Want([tuple(beside)], 1, anywhere=True)
                  for beside in data.draw(st.lists(place, max_size=2))]
        self._compare(wants, limit, data.draw(st.booleans()))

    @hypothesis.settings(max_examples=15)
    @hypothesis.given(st.data())
    def test_up_to_eight_of_sixteen(self, data):
        """Larger trees, some deep and some flat; each has 12,870 sets at
        most."""
        place = st.lists(st.sampled_from('abcd'), min_size=1, max_size=5)
        places = data.draw(st.lists(place, min_size=12, max_size=16))
        self._compare([closeness.Want(
            list(map(tuple, places)), data.draw(st.integers(2, 8)))],
            data.draw(st.none() | st.builds(
                closeness.Limit, st.integers(1, 2), st.integers(1, 3),
                st.none())),
            data.draw(st.booleans()))

    def _compare(self, wants, limit=None, together=True):
        chosen = closeness.choose(wants, limit, together)
        places = [place for want in wants for place in want.places]
        firsts = list(itertools.accumulate(
            (len(want.places) for want in wants), initial=0))
        total = Total(places)

        def value(positions):
            got = [first + position for first, mine in zip(firsts, positions)
                   for position in mine]
            limited = [want.places[position]
                       for want, mine in zip(wants, positions)
                       for position in mine if not want.anywhere]
            if limit and (
                    len({p[:limit.depth] for p in limited}) > limit.most
                    or limit.within is not None
                    and not {p[0] for p in limited} <= limit.within):
                return None
            left = set(range(len(places))).difference(got)
            return (total.of(got), total.of(left))[::1 if together else -1]
        best = max(filter(None, map(value, itertools.product(*(
            itertools.combinations(range(len(want.places)), want.amount)
            for want in wants)))), default=None)
        if best is None:
            self.assertIsNone(chosen)
            return
        self.assertEqual([sorted(set(mine)) for mine in chosen], chosen)
        self.assertEqual([want.amount for want in wants],
                         list(map(len, chosen)))
        self.assertEqual(best, value(chosen), (wants, limit, chosen))

    def test_each_device_on_a_node_of_its_own(self):
        """Of 64 nodes there are more sets than any host has time for."""
        def alone(kind, count=64):
            return closeness.Want(
                [(node, kind) for node in range(count)], 8)
        for most in 8, 32:
            self.assertEqual([list(range(8))], closeness.choose(
                [alone('gpu')], closeness.Limit(1, most)))
        kinds = [alone(kind) for kind in 'abcdef']
        self.assertEqual([list(range(8))] * 6, closeness.choose(
            kinds, closeness.Limit(1, 8)))
        for wants in [alone('gpu')], kinds:
            self.assertIsNone(closeness.choose(wants, closeness.Limit(1, 7)))

    def test_many_kinds(self):
        """Not exact, and still close, and where they have to be."""
        def kind(name):
            return closeness.Want([
                (node, node + root, f'{name}{card}') for node in '01'
                for root in 'ab' for card in range(4)], 8)
        wants = [kind(name) for name in 'cdefgh'] + [
            closeness.Want([('1', '1a', 'x')], 1)]
        for limit in None, closeness.Limit(1, 1):
            self.assertEqual([list(range(8, 16))] * 6 + [[0]],
                             closeness.choose(wants, limit))
        self.assertIsNone(closeness.choose(wants, closeness.Limit(2, 1)))

    def test_many(self):
        """All VFs of a host, and what goes with them, in no time."""
        vfs = [('0', card) for card in 'abcd' for _ in range(64)]
        self.assertEqual([list(range(64))], closeness.choose(
            [closeness.Want(vfs, 64)]))
        gpus = [(node, node + root, card) for node in '01' for root in 'ab'
                for card in '0123']
        wants = [closeness.Want(gpus, 8), closeness.Want(gpus, 8)] + [
            closeness.Want([gpu], 1) for gpu in gpus[:8]]
        self.assertEqual([list(range(8))] * 2 + [[0]] * 8,
                         closeness.choose(wants, closeness.Limit(1, 1)))
