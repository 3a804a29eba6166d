# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How long nova-compute takes to choose the closest of the free devices.

Devices of a host are on NUMA nodes, below PCI root complexes and switches, and
wanted with and without a limit to the nodes; "two kinds" are as many GPUs and
as many network cards that are to be near each other. "odd" trees are such as no
host should have: a chain of 200 bridges, or each device on a node of its own.
Run with ``python -m tests.bench.closeness [rounds]``.

Times are of the processor, the least of some rounds. A build waits for the
choice, and so does each other one on its host: milliseconds are well, and
seconds are not. That the choice is never worse than the best one of all is what
tests.unit.test_closeness shows.

The second table compares the exact search with one kind after the other, which
is chosen above closeness._EXACT: on how many random hosts the devices are less
close, and by how much.
"""

import collections
import random
import sys
import time
from unittest import mock

from nova_accel.attach import closeness


def tree(count, kind, nodes=2, roots=2, switches=2):
    """Places of devices, spread over all nodes, roots and switches."""
    places = []
    for number in range(count):
        node = number * nodes // count
        root = number * nodes * roots // count
        switch = number * nodes * roots * switches // count
        places.append((node, f'root{root}', f'switch{switch}',
                       f'{kind}{number}'))
    return places


def chain(count):
    bridges = tuple(f'bridge{number}' for number in range(200))
    return [(0, *bridges[:200 - number], f'device{number}')
            for number in range(count)]


def cases():
    """(name, wants, limit)"""
    want = closeness.Want
    one, half = closeness.Limit(1, 1), closeness.Limit(1, 8)
    for amount, count in ((8, 16), (16, 64), (64, 256)):
        name = f'{amount} of {count}'
        yield name, [want(tree(count, 'gpu'), amount)], None
        yield f'{name}, one node', [
            want(tree(count, 'gpu'), amount)], one
        yield f'{name}, two kinds', [
            want(tree(count, 'gpu'), amount),
            want(tree(count, 'nic'), amount)], None
    yield 'six kinds, 8 of 16', [
        want(tree(16, kind), 8) for kind in 'abcdef'], one
    yield 'odd: 16 of 64, a chain', [want(chain(64), 16)], None
    alone = [(number, f'device{number}') for number in range(64)]
    yield 'odd: 8 of 64 nodes', [want(alone, 8)], half
    yield 'odd: 8 of 64 nodes, six kinds', [
        want([(node, kind) for node, _ in alone], 8)
        for kind in 'abcdef'], half


def close(wants):
    """Number of names that chosen devices share, over all pairs."""
    shared = collections.Counter(
        want.places[number][:depth]
        for want, numbers in zip(wants, closeness.choose(wants))
        for number in numbers for depth in (1, 2, 3))
    return sum(count * (count - 1) // 2 for count in shared.values())


def compare(kinds, hosts=500):
    """Return on how many hosts one kind after the other is worse, and the
    mean loss on these."""
    seeded = random.Random(kinds)
    losses = []
    for _ in range(hosts):
        parts = [seeded.choice(numbers)
                 for numbers in ((1, 2, 2, 4), (1, 2, 4), (1, 2))]
        wants = []
        for kind in 'abc'[:kinds]:
            places = tree(seeded.choice((8, 16)), kind, *parts)
            free = sorted(seeded.sample(places, seeded.randint(4, 8)))
            wants.append(closeness.Want(free, seeded.randint(1, 4)))
        best = close(wants)
        with mock.patch.object(closeness, '_EXACT', 0):
            losses.append(1 - close(wants) / best if best else 0)
    worse = [loss for loss in losses if loss]
    return len(worse) / hosts, sum(worse) / max(1, len(worse))


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f'{"devices":32} {"ms":>8}   (the least of {rounds})')
    for name, wants, limit in cases():
        times = []
        for _ in range(rounds):
            start = time.process_time()
            closeness.choose(wants, limit)
            times.append(1000 * (time.process_time() - start))
        print(f'{name:32} {min(times):8.1f}', flush=True)
    print('\none after the other   worse   mean loss')
    for kinds in 1, 2, 3:
        worse, loss = compare(kinds)
        print(f'{kinds} kinds {worse:20.0%} {loss:11.0%}')


if __name__ == '__main__':
    main()
