# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How often a server finds its function loaded, by what is overwritten else.

A trace of requests is played on hosts with one FPGA region each. A request
that finds no free region is refused. Its columns are seconds since the first
request, duration in seconds, and the number of the function; the run times are
stretched until the offered load is a fraction of the regions. ``TRACE=file``
of ``make bench-reuse`` is such a file (.csv.gz); without one it is a Zipf
trace, other ones for other seeds.

Each column is a rule. All but the first take a free region with the function
where there is one, and an empty one next. "ours" is the cost of the
scheduler (nova_accel.scheduler) on candidates and provider summaries as
Placement has them, the least first and ties by chance; "ours of 3" are
three schedulers that know of a third of the requests each. "uses per idle
copy" counts all requests since the start, without decay, and knows of all.

With --plain SHARE so many requests want a region without a function, and leave
it empty. Shown is the share of the others. "plain by chance" is the cost,
but such a request gets any free region.

Each rule plays the same traces with the same seeds: two rules are
compared seed by seed: the mean of the differences, and its standard error
(their standard deviation by the root of the number of seeds). The benchmark
fails in a row where ours is worse than "uses per idle copy", or three
schedulers are worse than "random", by more than seeds explain: where the mean
difference is more than two standard errors below zero.

Run with ``python -m tests.bench.reuse [--seeds N] [--requests N]
[--plain SHARE] [TRACE...]``.
No times are measured: any machine gives the same figures.
"""

import argparse
import collections
import csv
import gzip
import heapq
import itertools
import math
import os
import random
import statistics
import sys
import types
import uuid

from nova_accel import naming
from nova_accel.scheduler import scheduling

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
#: (regions, offered load)
ROWS = ((32, .15), (32, .5), (64, .5))
FUNCTIONS = 60


def zipf(seed, count=4000):
    """(start, duration, function): popularity 1 / rank."""
    chance = random.Random(seed)
    functions = chance.choices(
        range(FUNCTIONS), [1 / (1 + n) for n in range(FUNCTIONS)], k=count)
    starts = itertools.accumulate(chance.expovariate(1) for _ in functions)
    return [(start, chance.expovariate(1), function)
            for start, function in zip(starts, functions)]


def read(path):
    with gzip.open(path, 'rt', newline='') as file:
        rows = [row for row in csv.reader(file) if row[0][:1].isdigit()]
    return sorted((float(start), float(duration), int(function))
                  for start, duration, function in rows)


class Region:

    def __init__(self, number):
        self.uuid = str(uuid.UUID(int=number))
        self.function = None
        self.used = 0


class Rule:
    """Chooses one of the free regions; says nothing of the others."""

    def __init__(self, chance):
        self.chance = chance

    def choose(self, free, function, now):
        """:param free: list of Region in an order of chance."""
        loaded = [r for r in free if r.function == function]
        empty = [r for r in free if r.function is None]
        return (loaded or empty or [self.victim(free)])[0]


class AnyRegion(Rule):
    name = 'any region'

    def choose(self, free, function, now):
        return free[0]


class LoadedFirst(Rule):
    name = 'random'

    def victim(self, free):
        return free[0]


class LeastRecentlyUsed(Rule):
    name = 'LRU'

    def victim(self, free):
        return min(free, key=lambda region: region.used)


class UsesPerIdleCopy(Rule):
    name = 'uses/idle copy'

    def __init__(self, chance):
        super().__init__(chance)
        self.uses = collections.Counter()

    def choose(self, free, function, now):
        self.uses[function] += 1
        return super().choose(free, function, now)

    def victim(self, free):
        idle = collections.Counter(r.function for r in free)
        return min(free, key=lambda r: self.uses[r.function]
                   / idle[r.function])


class Flavor(types.SimpleNamespace):

    def __contains__(self, name):
        # as nova.objects: whether it is set
        return hasattr(self, name)


class Spec:
    """Has what is read of a RequestSpec."""

    def __init__(self, function):
        self.flavor = Flavor(extra_specs={
            f'resources1:{FPGA}': '1',
            **({'accel1:function_id': function} if function else {})})

    def __contains__(self, name):
        return hasattr(self, name)


class Ours(Rule):
    name = 'ours'
    schedulers = 1

    def __init__(self, chance):
        super().__init__(chance)
        self.begun = [scheduling.Schedulings(get=None)
                      for _ in range(self.schedulers)]
        self.ids = [str(uuid.UUID(int=n + 1)) for n in range(1000)]
        self.traits = {number: [
            'CUSTOM_FPGA_INTEL', naming.PROGRAMMABLE,
            naming.function_trait(function),
            naming.function_trait(function).replace('FPGA_', 'FPGA_INTEL_')]
            for number, function in enumerate(self.ids)}
        self.traits[None] = self.traits[0][:2]

    def choose(self, free, function, now):
        # each host has a root provider, and its candidates name that too
        summaries = {region.uuid: {
            'resources': {FPGA: {'capacity': 1, 'used': 0}},
            'traits': self.traits[region.function]} for region in free}
        spec = Spec(None if function is None else self.ids[function])
        begun = self.chance.choice(self.begun).begin(spec, summaries)
        begun.count('server')
        return min(free, key=lambda region: begun.cost({
            'allocations': {region.uuid: {'resources': {FPGA: 1}}},
            'mappings': {'1': [region.uuid]}}))


class OursOfThree(Ours):
    name = 'ours of 3'
    schedulers = 3


class PlainByChance(Ours):
    name = 'plain by chance'

    def choose(self, free, function, now):
        return free[0] if function is None else super().choose(
            free, function, now)


RULES = (AnyRegion, LoadedFirst, LeastRecentlyUsed, UsesPerIdleCopy, Ours,
         OursOfThree)


#: (one rule, another one that must not be better)
PAIRS = ((Ours, UsesPerIdleCopy), (OursOfThree, LoadedFirst))


def play(rule, trace, regions, load, seed, plain=0):
    """Return the share of placements whose function was loaded.

    :param plain: share of the requests that want no function.
    """
    chance = random.Random(seed)
    # by other draws: the rest is as without
    wants = random.Random(-seed - 1)
    chosen = rule(random.Random(seed))
    span = trace[-1][0] - trace[0][0]
    stretch = load * regions * span / sum(d for _, d, _ in trace)
    idle = [Region(number) for number in range(regions)]
    busy, placed, found = [], 0, 0
    for number, (start, duration, function) in enumerate(trace):
        while busy and busy[0][0] <= start:
            idle.append(heapq.heappop(busy)[2])
        if not idle:
            continue
        if plain and wants.random() < plain:
            function = None
        chance.shuffle(idle)
        region = chosen.choose(idle, function, start)
        idle.remove(region)
        placed += function is not None
        found += function is not None and region.function == function
        region.function, region.used = function, number
        heapq.heappush(busy, (start + duration * stretch, number, region))
    return found / placed


def difference(ones, others):
    """Mean of the differences seed by seed, and its standard error."""
    found = [one - other for one, other in zip(ones, others, strict=True)]
    return (statistics.mean(found),
            statistics.stdev(found) / math.sqrt(len(found)))


def is_worse(mean, error):
    return mean < -2 * error


def _seeds(text):
    if int(text) < 2:
        raise argparse.ArgumentTypeError('two seeds show a spread, one none')
    return int(text)


def main():
    parser = argparse.ArgumentParser(prog='python -m tests.bench.reuse')
    parser.add_argument('--seeds', type=_seeds, default=5)
    parser.add_argument('--requests', type=int, help='play the first only')
    parser.add_argument('--plain', type=float, default=0, metavar='SHARE')
    parser.add_argument('traces', nargs='*')
    args = parser.parse_args()
    rules = (PlainByChance, Ours) if args.plain else RULES
    pairs = ((Ours, PlainByChance),) if args.plain else PAIRS
    named = [(os.path.basename(path).split('.')[0],
              lambda seed, rows=read(path): rows)
             for path in args.traces] or [('Zipf', zipf)]
    head = f'{"trace, regions, load":22}'
    print(f'share of placements whose function was loaded: mean of '
          f'{args.seeds} seeds (and their standard deviation)')
    print(head + ''.join(f'{rule.name:>16}' for rule in rules))
    rows = []
    for name, trace in named:
        for regions, load in ROWS:
            rows.append((f'{name} {regions}, {load:.2f}', {}))
            print(f'{rows[-1][0]:22}', end='')
            for rule in rules:
                shares = rows[-1][1][rule] = [
                    play(rule, trace(seed)[:args.requests], regions, load,
                         seed, args.plain) for seed in range(args.seeds)]
                text = (f'{statistics.mean(shares):.3f} '
                        f'({statistics.stdev(shares):.3f})')
                print(f'{text:>16}', end='', flush=True)
            print()
    print('\ndifferences over the same seeds: mean (and its standard error)')
    print(head + ''.join(f'{f"{one.name} - {other.name}":>24}'
                         for one, other in pairs))
    worse = []
    for row, shares in rows:
        print(f'{row:22}', end='')
        for one, other in pairs:
            mean, error = difference(shares[one], shares[other])
            print(f'{f"{mean:+.3f} ({error:.3f})":>24}', end='')
            if is_worse(mean, error):
                worse.append(f'{one.name} than {other.name} in {row}')
        print()
    if worse:
        sys.exit(f'worse by more than the seeds explain: {"; ".join(worse)}')


if __name__ == '__main__':
    main()
