# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Random orders of events on a host: tests.host.explorer.

Without anything in the environment the same few orders are played each time. In
the environment:

NOVA_ACCEL_EXPLORE_MINUTES
    play orders for so long, other ones each time. This is ``make explore``. Of
    an order that fails, a short one is looked for.
NOVA_ACCEL_SEED
    the number of the first order.
"""

import collections
import itertools
import os
import random
import sys
import time

import ddt
import testtools

from nova_accel import exception
from tests.host import explorer
from tests.host.explorer import Event

MINUTES = float(os.environ.get('NOVA_ACCEL_EXPLORE_MINUTES', 0))
#: how many orders are played everyday, and of how many events
ORDERS, EVENTS = 14, 24


class ExplorerTest(testtools.TestCase):

    LIMIT = 600 + 120 * MINUTES

    def test_orders_of_events(self):
        """Nothing is shared, lost, read by others, withheld or left."""
        first = int(os.environ.get('NOVA_ACCEL_SEED') or (
            random.SystemRandom().randrange(10 ** 6) if MINUTES else 0))
        began, counted = time.monotonic(), collections.Counter()
        for seed in itertools.count(first):
            counted += self.play(seed)
            counted['orders'] += 1
            if (time.monotonic() > began + 60 * MINUTES if MINUTES
                    else seed == first + ORDERS - 1):
                break
        self.assertLess(ORDERS, counted['boot'])
        if MINUTES:
            say(f'From seed {first} on: ' + ', '.join(
                f'{count} {what}' for what, count in counted.items()))

    def play(self, seed):
        try:
            return explorer.explore(*explorer.events_of(seed), EVENTS)
        except explorer.Failed as failure:
            say(f'To play this again: NOVA_ACCEL_SEED={seed} make explore '
                f'EXPLORE_MINUTES=0.01')
            if MINUTES:
                say(explorer.shrink(failure))
            raise


@ddt.ddt
class KnownTest(testtools.TestCase):
    """Orders that the explorer once took for defects."""

    @ddt.data(
        # a region behind the VF of a guest, which a new store does not know
        ('host', (0, 4), Event('boot', 19099, None),
         Event('replace_store', 56502, None)),
        # nor can it be allocated again
        ('none', (0, 1), Event('boot', 29919, None),
         Event('replace_store', 2769, None),
         Event('lose_allocation', 50403, None)),
        # a disk that comes back where a guest that does not run had another
        ('none', (0,), Event('come', 7324, None), Event('pull', 55783, None),
         Event('reconcile', 11481, None), Event('come', 21177, None),
         Event('arrive', 42589, None)),
        # a disk that a guest had at the first start is in another slot
        ('host', (0,), Event('boot', 4835, None),
         Event('replace_store', 46687, None), Event('exchange', 14734, None)),
        # a disk that could not be read, and is another one than in the copy
        ('host', (0,), Event('exchange', 38590, None), Event('boot', 40144, 4),
         Event('replace_store', 37838, None), Event('come', 16630, 4),
         Event('boot', 61537, None)),
        # a copy in which a device is disabled
        ('host', (3, 4), Event('disable', 49892, None),
         Event('reconcile', 25984, 3), Event('enable', 16931, None),
         Event('replace_store', 283, None)))
    @ddt.unpack
    def test_order(self, pools, kinds, *events):
        counted = explorer.explore(
            events, explorer.Setting(pools, kinds), len(events))
        self.assertEqual(len(events), sum(
            counted[name] for name in {event.name for event in events}))

    def test_no_inventory(self):
        """The small Placement refuses to allocate what a provider lacks."""
        explored = explorer.Explored(explorer.Setting('none', (0,)))
        self.addCleanup(explored.close)
        provider, *_ = explored.cloud.read()['providers']
        self.assertRaises(
            exception.PlacementUnavailable, explored.cloud.reallocate,
            'server', 'server', {provider: {'CUSTOM_NONE': 1}})


def say(text):
    """On the screen, which stestr does not keep."""
    print(text, file=sys.__stderr__, flush=True)
