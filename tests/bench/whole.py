# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Servers of eight devices that find no host although eight are free.

A trace of requests for 1, 2, 4 or 8 GPUs is played on hosts with eight, which
are one pool of the host or one of each of two NUMA nodes: a server of eight
takes four of both. The run times are stretched until the offered load is a
fraction of all GPUs. ``openb`` or any other file (.csv.gz) has columns as those
of tests.bench.reuse, seconds since the first request, duration, and in the
third the number of GPUs; without one the trace is random, 6 of 10 for one GPU,
2 for two and 1 each for four and eight.

"best fit" takes the host, and there the pools, that have least left. "cost"
is that of the scheduler with Nova's weights of RAM, CPU and disk beside it,
which follow the GPUs; "Nova" is these weights alone. Printed are the servers of
eight, those that met less than eight free GPUs, and for each rule the others
that were refused; all of that by seed is added up.

No times are measured: any machine gives the same figures. Run with ``python -m
tests.bench.whole [--hosts N] [--requests N] [--seeds N] [TRACE...]``.
"""

import argparse
import collections
import heapq
import operator
import os
import random

from nova_accel import conf
from nova_accel import demand
from nova_accel.scheduler import scheduling
from tests.bench import reuse

GPU = 'CUSTOM_ACCELERATOR_GPU'
WHOLE = 8
LOADS = .5, .7, .9
NODES = 1, 2


def chosen(seed, count):
    """(start, duration, GPUs), exponential both."""
    chance = random.Random(seed)
    now, found = 0.0, []
    for wanted in chance.choices((1, 2, 4, WHOLE), (6, 2, 1, 1), k=count):
        now += chance.expovariate(1)
        found.append((now, chance.expovariate(1), wanted))
    return found


def stretched(trace, gpus, load):
    """The same, with run times that make the load."""
    span = trace[-1][0] - trace[0][0]
    stretch = load * gpus * span / sum(d * wanted for _, d, wanted in trace)
    return [(start, start + duration * stretch, wanted)
            for start, duration, wanted in trace]


class Refused(collections.Counter):
    """Of the servers of eight: 'whole', all; 'full', those that met less than
    eight free GPUs; 'refused', of the others."""


def play(rule, trace, hosts, nodes, seed=0):
    """:param trace: of stretched()."""
    chance = random.Random(seed)
    free = {(host, node): WHOLE // nodes
            for host in range(hosts) for node in range(nodes)}
    running, found = [], Refused()
    for number, (start, end, wanted) in enumerate(trace):
        while running and running[0][0] <= start:
            for place, amount in heapq.heappop(running)[2].items():
                free[place] += amount
        there = places(free, wanted, hosts, nodes)
        taken = rule(free, there, wanted, nodes, chance) if there else {}
        for place, amount in taken.items():
            free[place] -= amount
        if taken:
            heapq.heappush(running, (end, number, taken))
        if wanted == WHOLE:
            found['whole'] += 1
            found['full'] += not taken and sum(free.values()) < WHOLE
            found['refused'] += not taken and sum(free.values()) >= WHOLE
    return found


def places(free, wanted, hosts, nodes):
    """One dict of place -> amount for each candidate."""
    if wanted <= WHOLE // nodes:
        return [{place: wanted} for place in free if free[place] >= wanted]
    found = [{(host, node): wanted // nodes for node in range(nodes)}
             for host in range(hosts)]
    return [one for one in found
            if all(free[place] >= one[place] for place in one)]


def _left(free, nodes, host):
    return sum(free[host, node] for node in range(nodes))


def best_fit(free, there, wanted, nodes, chance):
    return min(there, key=lambda p: (
        _left(free, nodes, min(p)[0]), sum(free[one] for one in p), min(p)))


def nova(free, there, wanted, nodes, chance):
    return max(there, key=lambda p: (
        _left(free, nodes, min(p)[0]), chance.random()))


class Spec:
    """Has what is read of a RequestSpec."""

    def __init__(self, extra_specs):
        self.flavor = reuse.Flavor(extra_specs=extra_specs)

    def __contains__(self, name):
        return hasattr(self, name)


def cheapest(free, there, wanted, nodes, chance):
    specs = ({f'resources1:{GPU}': str(wanted)} if wanted <= WHOLE // nodes
             else {f'resources{n}:{GPU}': str(wanted // nodes)
                   for n in range(nodes)})
    begun = scheduling.Scheduling(
        Spec(specs), {place: {
            'traits': [], 'root_provider_uuid': place[0], 'resources': {GPU: {
                'capacity': WHOLE // nodes, 'used': WHOLE // nodes - left}}}
            for place, left in free.items()}, demand.Demand(), get=None)
    groups = [one.group for one in begun.requests]
    of_hosts = collections.defaultdict(list)
    for place in there:
        made = {'allocations': {p: {'resources': {GPU: n}}
                                for p, n in place.items()},
                'mappings': {group: [p] for group, p
                             in zip(groups, sorted(place))}}
        of_hosts[min(place)[0]].append((begun.cost(made), place))
    first = operator.itemgetter(0)

    def weight(host):
        # RAM, CPU and disk of Nova follow the devices
        return (-min(of_hosts[host], key=first)[0]
                * conf.CONF.accel.weight_multiplier
                + 3 * _left(free, nodes, host) / WHOLE)
    return min(of_hosts[max(of_hosts, key=weight)], key=first)[1]


RULES = {'best fit': best_fit, 'cost': cheapest, 'Nova': nova}


def main():
    parser = argparse.ArgumentParser(prog='python -m tests.bench.whole')
    parser.add_argument('--hosts', type=int, default=16)
    parser.add_argument('--requests', type=int)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('traces', nargs='*')
    args = parser.parse_args()
    named = [(os.path.basename(path).split('.')[0], [reuse.read(path)])
             for path in args.traces] + [
        ('random', [chosen(seed, args.requests or 2000)
                    for seed in range(args.seeds)])]
    for name, traces in named:
        unknown = {wanted for trace in traces for _, _, wanted in trace
                   } - set(range(1, WHOLE + 1))
        if unknown:
            parser.error(f'the third column of {name} has {min(unknown)}, '
                         f'which is not a number of GPUs of a host')
    print(f'{args.hosts} hosts of {WHOLE} GPUs')
    print(f'{"trace":10} {"load":>4} {"pools":6} {"servers":>7} '
          f'{"of 8":>5} {"full":>5}'
          + ''.join(f'{name:>9}' for name in RULES))
    for name, traces in named:
        for load in LOADS:
            for nodes in NODES:
                found = {rule: sum((play(choose, stretched(
                    trace[:args.requests], WHOLE * args.hosts, load),
                    args.hosts, nodes) for trace in traces),
                    start=Refused()) for rule, choose in RULES.items()}
                first = found['best fit']
                servers = sum(len(t[:args.requests]) for t in traces)
                print(f'{name:10} {load:4} {("host", "node")[nodes - 1]:6} '
                      f'{servers:7} {first["whole"]:5} {first["full"]:5}'
                      + ''.join(f'{one["refused"]:9}'
                                for one in found.values()), flush=True)


if __name__ == '__main__':
    main()
