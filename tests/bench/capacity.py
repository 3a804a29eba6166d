# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What nova-accel fits and defrag say, against all ways there are.

Random hosts and flavors: the number of servers that fit is compared with
trying each way to place one after the other until none fits, and the number of
migrations with trying each order of migrations. It ends with an error at the
first cloud in which they differ, and names its seed. Prints how many clouds
had room, and how many needed a migration: a comparison of nothings would prove
nothing.

Run with ``python -m tests.bench.capacity [clouds [first seed]]``.
"""

import sys
import time
import unittest

from tests.unit import capacity
from tests.unit import gpu_clouds


def main():
    given = [int(argument) for argument in sys.argv[1:]]
    clouds, first = [*given, *(1000, 0)[len(given):]]
    test = unittest.TestCase()
    for name, compare, what in (
            ('fits', capacity.compare, 'with room for a server'),
            ('defrag', gpu_clouds.compare, 'with room after migrations')):
        start = time.process_time()
        some = compare(test, range(first, first + clouds))
        print(f'{name:7} {clouds} clouds as all ways, {some} {what}, '
              f'{time.process_time() - start:.0f} s of processor', flush=True)


if __name__ == '__main__':
    main()
