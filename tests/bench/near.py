# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Jobs of several hosts that get one rack, and what it costs to look for it.

A trace of jobs of 1 to 16 servers is played on hosts in racks of 18, each of
which holds one server. The run times are stretched until the offered load is a
fraction of all hosts. ``openb`` or any other file (.csv.gz) has columns as
those of tests.bench.reuse; its n-th shape of pods is a job of 1 + n modulo 16
servers. Without a file the trace is random: half of the jobs have one server,
the others 2 to 16.

"near" is the decision of the scheduler with accel:near=rack=preferred; "best
fit" takes the first free hosts in the order of their numbers, which is that of
the racks; "today" takes any, as hosts that are equally free have one cost.
Printed are, of the jobs of 2 to 16 servers that begin after the first third,
the share in one rack, for each rule; then, with rack=required and several
schedulers that decide at once: races, claims that another request was faster
with, for each server; how often a job was scheduled again because of that, for
each job; jobs that were refused because of it; those for which no rack had
room; and jobs in several racks, which has to be 0. No times are measured.

The second table has the time of the processor of whole schedulings of 4 servers
without accel:near and with it, in the cloud of tests.bench.fleet with a region
on each host: Placement's answers, nova-scheduler and the claims; sums of all
rounds, their ratio, the ratio of the calls of functions in one more round,
which does not depend on load, and the requests of nova_accel to Placement. The
aim is a ratio of 1.05 at most. With "required" Nova weighs the hosts of one
rack only.

The third has the part of that which Nova's own handlers take with the filter
and the weigher, the least of the rounds, as in tests.bench.weigh.

Run with ``python -m tests.bench.near [--hosts N] [--jobs N] [--rounds N]
[--cost] [TRACE...]``; --cost omits the first table.
"""

import argparse
import collections
import cProfile
import functools
import gc
import heapq
import itertools
import json
import os
import random
import statistics
import time
from unittest import mock
import uuid

from tests.bench import fleet
from tests.bench import reuse
from tests.bench import weigh

from nova_accel import near
from nova_accel.scheduler import filters
from nova_accel.scheduler import scheduling

GPU = 'CUSTOM_ACCELERATOR_GPU'
RACK, MOST = 18, 16
LOADS = 0, .5, .7, .9
SCHEDULERS = 1, 3, 16
#: of a job whose cost is measured
SERVERS = 4


def chosen(seed, count):
    """(start, duration, servers), exponential both."""
    chance = random.Random(seed)
    now = 0.0
    for _ in range(count):
        now += chance.expovariate(1)
        yield now, chance.expovariate(1), (
            1 if chance.random() < .5 else chance.randint(2, MOST))


def read(path):
    return [(start, duration, 1 + shape % MOST)
            for start, duration, shape in reuse.read(path)]


def stretched(trace, hosts, load):
    """The same, with run times that make the load."""
    span = trace[-1][0] - trace[0][0]
    stretch = load * hosts * span / sum(d * servers for _, d, servers in trace)
    return [(start, start + duration * stretch, servers)
            for start, duration, servers in trace]


class Cloud:

    def __init__(self, hosts, seed=0):
        self.chance = random.Random(seed)
        #: those that are free, of which a decision is made
        self.free = dict.fromkeys(range(hosts), 1)
        self.domains = {host: {'rack': host // RACK} for host in self.free}
        self.running = []
        self.number = itertools.count()

    def end(self, now):
        while self.running and self.running[0][0] <= now:
            self.free.update(dict.fromkeys(
                heapq.heappop(self.running)[2], 1))

    def take(self, end, hosts):
        for host in hosts:
            del self.free[host]
        self.run(end, hosts)

    def run(self, end, hosts):
        heapq.heappush(self.running, (end, next(self.number), hosts))

    # Rules: hosts in their order

    def near(self, servers, required=False, fullest=True):
        order = near.choose(
            [near.Level('rack', required)], servers, self.free, self.domains,
            chance=self.chance.random, fullest=fullest).order
        return sorted(order, key=lambda host: (
            order[host], self.chance.random()))

    def best_fit(self, servers):
        return sorted(self.free)

    def today(self, servers):
        hosts = sorted(self.free)
        return self.chance.sample(hosts, len(hosts))


RULES = {'near': Cloud.near, 'best fit': Cloud.best_fit, 'today': Cloud.today}


def together(rule, trace, hosts):
    """The share of jobs of several servers that are in one rack."""
    cloud, found = Cloud(hosts), []
    for number, (start, end, servers) in enumerate(trace):
        cloud.end(start)
        if len(cloud.free) < servers:
            continue
        taken = rule(cloud, servers)[:servers]
        cloud.take(end, taken)
        if servers > 1 and number > len(trace) / 3:
            found.append(len({host // RACK for host in taken}) == 1)
    return statistics.mean(found)


def races(schedulers, trace, hosts):
    """Play with rack=required; counts.

    The claims of requests that decide at once take turns. Those that lost
    begin again in different turns, as long as nova-scheduler waits at most.
    """
    cloud, count = Cloud(hosts), collections.Counter()
    for first in range(0, len(trace), schedulers):
        batch = trace[first:first + schedulers]
        cloud.end(batch[0][0])
        waves = [[(end, servers) for _, end, servers in batch]]
        for attempt in range(1 + scheduling._RETRIES):
            again = []
            for end, servers, order, taken in itertools.chain.from_iterable(
                    _claimed(cloud, wave, not attempt, count)
                    for wave in waves):
                if len(taken) == servers:
                    cloud.run(end, taken)
                    count['servers'] += servers
                    count['outside'] += len(
                        {host // RACK for host in taken}) > 1
                    continue
                cloud.free.update(dict.fromkeys(taken, 1))
                if not order:
                    count['no room'] += 1
                elif attempt < scheduling._RETRIES:
                    count['again'] += 1
                    again.append((end, servers))
                else:
                    count['lost'] += 1
            waves = [[] for _ in range(2 ** (attempt + 1))]
            for one in again:
                cloud.chance.choice(waves).append(one)
    return count


def _claimed(cloud, wave, fullest, count):
    """Decide for requests at once, and claim for them."""
    requests = [(end, servers, cloud.near(servers, True, fullest), [])
                for end, servers in wave]
    orders = [iter(order) for _, _, order, _ in requests]
    going = list(range(len(requests)))
    while going:
        for number in list(going):
            _, servers, _, taken = requests[number]
            for host in orders[number]:
                if cloud.free.pop(host, 0):
                    taken.append(host)
                    break
                count['races'] += 1
            else:
                going.remove(number)
                continue
            if len(taken) == servers:
                going.remove(number)
    return requests


# The cost

class Fleet(fleet.Cloud):

    rack = RACK

    def reasons(self):
        return ()

    def play(self):
        """Return [(seconds, requests, calls)] without accel:near and with it.
        """
        self.early, found = (), []
        for number in range(self.rounds + 2):
            both = {}
            # the first round warms up, and the last one counts calls
            profile = cProfile.Profile()
            schedule = self.manager.select_destinations
            if number > self.rounds:
                schedule = functools.partial(profile.runcall, schedule)
            for specs in ({}, {'accel:near': f'rack={self.wish}'})[
                    ::1 if number % 2 else -1]:
                profile.clear()
                spec = self.spec(0)
                spec.flavor.extra_specs = {
                    f'resources1:{fleet.FPGA}': '1', **specs}
                spec.num_instances = SERVERS
                servers = [str(uuid.uuid4()) for _ in range(SERVERS)]
                self.counts.clear()
                gc.collect()
                begin = time.process_time()
                selected = schedule(
                    self.context, spec_obj=spec, instance_uuids=servers,
                    return_objects=True, return_alternates=True)
                both[bool(specs)] = (
                    time.process_time() - begin, self.counts['accel'],
                    sum(entry.callcount for entry in profile.getstats()))
                for server, [host, *_] in zip(servers, selected):
                    self.placement.delete(f'/allocations/{server}')
                    del self.state_of[host.compute_node_uuid]
                    self.state(host.compute_node_uuid)
            found += [(both[False], both[True])] if number else []
        return found


def whole(hosts, limit, wish, rounds):
    """Without and with accel:near: ms, requests, calls."""
    with mock.patch.object(fleet, 'REGIONS', 1):
        cloud = Fleet()
        cloud.wish, cloud.rounds = wish, rounds
        cloud.plan = fleet.Fleet(hosts, 1, .5, 0), hosts, 1, limit, 1, False
        found, *_ = fleet.played(cloud)
    return [(1000 * sum(seconds for seconds, _, _ in one[:-1]),
             sum(n for _, n, _ in one[:-1]), one[-1][2])
            for one in zip(*found)]


def answer(hosts, limit):
    """[allocation requests, provider summaries] of Placement, as JSON."""
    requests, summaries = [], {}
    for number in range(min(hosts, limit)):
        root, pool = (str(uuid.UUID(int=2 * number + n)) for n in (0, 1))
        requests.append({
            'allocations': {root: {'resources': {'VCPU': 1, 'MEMORY_MB': 64}},
                            pool: {'resources': {GPU: 8}}},
            'mappings': {'': [root], '1': [pool]}})
        summaries[root] = weigh.summary(
            root, None, ['COMPUTE_NODE', 'HW_CPU_X86_AVX2', *(
                f'COMPUTE_TRAIT_{n}' for n in range(30)),
                f'CUSTOM_NEAR_RACK_{number // RACK}'],
            VCPU=(128, 4), MEMORY_MB=(65536, 1024), DISK_GB=(1000, 10))
        summaries[pool] = weigh.summary(
            root, root, ['CUSTOM_GPU_NVIDIA', 'OWNER_CYBORG'], **{
                GPU: (8, 0)})
    return json.dumps([requests, summaries])


def cost(hosts, limit, wish, rounds):
    """The least of the rounds without and with accel:near: ms, requests.

    :param wish: required, with which hosts are dropped before Nova weighs
        them, or preferred.
    """
    text, bench = answer(hosts, limit), weigh.Bench()
    there = [(root, ()) for root, found in json.loads(text)[1].items()
             if found['parent_provider_uuid'] is None]
    filters.SCHEDULINGS = scheduling.Schedulings(bench.get)
    found = []
    for number in range(rounds + 1):
        times = {}
        for specs in ({}, {'accel:near': f'rack={wish}'})[
                ::1 if number % 2 else -1]:
            wanted, state = weigh.spec(None), weigh.states(there)
            wanted.flavor.extra_specs = {f'resources1:{GPU}': '8', **specs}
            wanted.num_instances = SERVERS
            filters.SCHEDULINGS.expect(wanted, scheduling.Expected(SERVERS))
            gc.collect()
            gc.freeze()
            both = bench.of_both(wanted, state, text)
            begun = time.process_time()
            bench.with_ours(wanted, *both)
            end = time.process_time()
            gc.unfreeze()
            times[bool(specs)] = 1000 * (end - begun)
        # the first round warms up Python, too
        if number:
            found.append((times[False], times[True]))
    return [(min(one), len(bench.asked), 0)
            for one in zip(*found)]


def main():
    parser = argparse.ArgumentParser(prog='python -m tests.bench.near')
    parser.add_argument('--hosts', type=int, default=10000)
    parser.add_argument('--jobs', type=int, default=1000)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--cost', action='store_true')
    parser.add_argument('traces', nargs='*')
    args = parser.parse_args()
    if not args.cost:
        domains(args)
    costs(args)


def domains(args):
    traces = [(os.path.basename(path).split('.')[0], read(path)[:args.jobs])
              for path in args.traces] + [
        ('random', list(chosen(0, args.jobs)))]
    print(f'{args.hosts} hosts in racks of {RACK}, {args.jobs} jobs')
    print(f'{"trace":10} {"load":>4} '
          + ''.join(f'{name:>9}' for name in RULES)
          + f'{"schedulers":>12} {"races":>7} {"again":>6} {"lost":>5} '
            f'{"no room":>8} {"outside":>8}')
    for name, trace in traces:
        for load in LOADS:
            jobs = stretched(trace, args.hosts, load)
            shares = ''.join(f'{together(rule, jobs, args.hosts):9.3f}'
                             for rule in RULES.values())
            for schedulers in SCHEDULERS:
                count = races(schedulers, jobs, args.hosts)
                print(f'{name:10} {load:4} {shares} {schedulers:11} '
                      f'{count["races"] / count["servers"]:7.3f} '
                      f'{count["again"] / len(jobs):6.3f} '
                      f'{count["lost"]:5} {count["no room"]:8} '
                      f'{count["outside"]:8}', flush=True)


def costs(args):
    fleet.begin()
    for about, measure in ('whole', whole), ('our part', cost):
        print(f'{about:9} {"hosts":>6} {"in answer":>9} {"rack":>9} '
              f'{"without, ms":>11} {"with, ms":>9} {"ratio":>6} {"calls":>6} '
              f'requests')
        for limit in sorted({min(1000, args.hosts), args.hosts}):
            for wish in 'preferred', 'required':
                (without, _, before), (ours, requests, calls) = measure(
                    args.hosts, limit, wish, args.rounds)
                calls = f'{calls / before:.3f}' if before else ''
                print(f'{"":9} {args.hosts:6} {limit:9} {wish:>9} '
                      f'{without:11.1f} {ours:9.1f} {ours / without:6.3f} '
                      f'{calls:>6} {requests:8}', flush=True)


if __name__ == '__main__':
    main()
