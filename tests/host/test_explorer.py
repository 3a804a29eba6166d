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

import testtools

from tests.host import explorer

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


def say(text):
    """On the screen, which stestr does not keep."""
    print(text, file=sys.__stderr__, flush=True)
