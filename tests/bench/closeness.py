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
"""

import sys
import time

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


if __name__ == '__main__':
    main()
