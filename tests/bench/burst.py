# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Where the servers of a burst land: all are scheduled, none is built yet.

Placement knows what each of them was allocated, and of no region what it is
about to carry: a region shows its function when it has been programmed. A
region with one handle is not offered again before that. One with several
handles is: to a server that wants the same function, and to one that wants
another function and whose build fails there.

Nova's HostState and weighers with our filter and weigher schedule the burst,
on summaries as Placement has them. "told" adds to the summaries what the
scheduler process has given away in this burst, as it would know it from one
more wrapped method of Nova; each of the processes (workers of nova-scheduler
on all controllers) is told of its own servers only. "at once" are requests
with the same answer of Placement, as of schedulers that asked at the same time:
the first that claims a region has it, and the others go on to their next host,
as Nova does.

"loaded" is the share of servers whose region carries their function, or is
going to for an earlier server; "refused" is the share of those whose region an
earlier server has programmed to another function. "possible" is the most that
could be loaded by a scheduler that knows the whole burst. No times are
measured, so that any machine gives the same figures.

Run with ``python -m tests.bench.burst [seeds]``.
"""

import collections
import itertools
import json
import math
import random
import statistics
import sys

from tests.bench import weigh

from nova import objects
from nova.scheduler import filters as nova_filters
from nova.scheduler import weights as nova_weights

from nova_accel import naming
from nova_accel.scheduler import filters
from nova_accel.scheduler import scheduling
from nova_accel.scheduler import weights

HOSTS, SERVERS = 8, 16
#: (what is asked for, weights of the functions)
KINDS = (('one function', [1]),
         ('20 functions, Zipf', [1 / (1 + n) for n in range(20)]))
HANDLES = (1, 2, 4)
#: None: not told
PROCESSES = (None, 1, 4, 16)
#: requests with the same answer of Placement
AT_ONCE = (4, 16)


class Fleet:
    """Hosts whose regions are all idle; a quarter carries nothing."""

    def __init__(self, handles, chance):
        carried = [1 / (1 + n) for n in range(len(weigh.FUNCTIONS))]
        self.handles = handles
        self.hosts = [(root, [(region, chance.choice([0, 1, 1, 1]) and
                               chance.choices(weigh.FUNCTIONS, carried)[0])
                              for region, _ in regions])
                      for root, regions in weigh.fleet(HOSTS)]
        #: region -> servers, and the function that it is going to carry
        self.used, self.future = {}, {}

    def answer(self, wanted):
        """What weigh.answer() is about, of regions with room."""
        offered = [(root, [(region, function) for region, function in regions
                           if self.used.get(region, 0) < self.handles])
                   for root, regions in self.hosts]
        requests, _ = json.loads(
            weigh.answer(offered, weigh.REGIONS * HOSTS, wanted))
        summaries = {rp: summary for root, regions in self.hosts
                     for rp, summary in weigh.tree(root, regions)}
        for region, summary in summaries.items():
            if weigh.FPGA in summary['resources']:
                summary['resources'][weigh.FPGA] = {
                    'capacity': self.handles,
                    'used': self.used.get(region, 0)}
        return requests, summaries

    def carries(self, region):
        return self.future.get(region) or next(
            function for _, regions in self.hosts
            for name, function in regions if name == region)


def tell(summaries, given):
    """Add what regions are going to carry: region -> function."""
    for region, function in given.items():
        summary = summaries[region]
        summaries[region] = {**summary, 'traits': [
            naming.function_trait(function), *itertools.filterfalse(
                naming.is_content, summary['traits'])]}


def possible(fleet, asked):
    """The share that can be loaded, if there are regions enough."""
    copies = collections.Counter(
        function for _, regions in fleet.hosts for _, function in regions)
    return sum(servers - max(0, math.ceil(
        servers / fleet.handles - copies[function]))
        for function, servers in collections.Counter(asked).items()) / SERVERS


def play(handles, kind, processes, seed, at_once=1):
    """(share that is loaded, share that is refused, share that could be
    loaded)."""
    chance = random.Random(seed)
    # which of the regions that are as good the filter takes
    random.seed(seed)
    fleet = Fleet(handles, chance)
    filters.SCHEDULINGS = scheduling.Schedulings(get=None)
    told = [{} for _ in range(processes or 1)]
    ours = [*(c() for c in nova_weights.all_weighers()),
            weights.AcceleratorWeigher()]
    loaded = refused = 0
    asked = chance.choices(weigh.FUNCTIONS[:len(kind)], kind, k=SERVERS)
    for number, function in enumerate(asked):
        if number % at_once == 0:
            requests, summaries = fleet.answer(function)
        given = chance.choice(told)
        if processes:
            tell(summaries, given)
        spec = weigh.spec(function)
        state = weigh.states(fleet.hosts)
        chance.shuffle(state)
        weigh.by_host(state, requests)
        state = [host for host in state if host.allocation_candidates]
        filters.SCHEDULINGS.begin(spec, summaries)
        state = nova_filters.HostFilterHandler().get_filtered_objects(
            [filters.AcceleratorFilter()], state, spec)
        ordered = nova_weights.HostWeightHandler().get_weighed_objects(
            ours, state, spec)
        offered = [region for weighed in ordered for region in
                   weighed.obj.allocation_candidates[0]['mappings']['_ACCEL0']]
        region = next((region for region in offered
                       if fleet.used.get(region, 0) < handles), None)
        if not region:
            # no host is left
            continue
        found = fleet.carries(region)
        if found == function:
            loaded += 1
        elif fleet.used.get(region):
            refused += 1
        else:
            fleet.future[region] = given[region] = function
        fleet.future.setdefault(region, found)
        fleet.used[region] = fleet.used.get(region, 0) + 1
    return loaded / SERVERS, refused / SERVERS, possible(fleet, asked)


def main():
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    objects.register_all()
    print(f'{HOSTS} hosts with {weigh.REGIONS} regions, a burst of {SERVERS} '
          f'servers; mean of {seeds} seeds: loaded, refused')
    print(f'{"handles of a region":20} {"asked for":20}' + ''.join(
        f'{f"told, {count} processes" if count else "not told":>20}'
        for count in PROCESSES) + ''.join(
        f'{f"{count} at once":>20}' for count in AT_ONCE)
        + f'{"possible":>12}')
    for handles, (name, kind) in itertools.product(HANDLES, KINDS):
        print(f'{handles:<20} {name:20}', end='')
        for processes, at_once in [
                *((count, 1) for count in PROCESSES),
                *((None, count) for count in AT_ONCE)]:
            played = [play(handles, kind, processes, seed, at_once)
                      for seed in range(seeds)]
            means = [statistics.mean(column) for column in zip(*played)]
            print(f'{f"{means[0]:.2f} {means[1]:.2f}":>20}', end='',
                  flush=True)
        print(f'{means[2]:12.2f}')


if __name__ == '__main__':
    main()
