# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A cloud of thousands of hosts: where servers land, and what it costs.

Nova's SchedulerManager with its filters and weighers, those of nova_accel and a
real Placement, which claims too. The hosts are rows written into Placement's
database, and HostStates as nova-scheduler has them of the cells. nova-compute,
and servers that end, are played by rows, too: a region shows the function of
its last server, and that it is programmable while it is free. The trace is of
Zipf's kind; half of the regions (--load) are taken when it begins, and servers
end as others begin, and the load stays.

Several schedulers know of their own requests only. Of as many requests in a
row as there are schedulers, all have Placement's answer before the first of
them claims: no cloud has more races than that. With --every SECONDS requests
come at a rate, one each so many seconds, and with --trace FILE, which is as
those of tests.bench.reuse, when they came and for as long as it says, while
--load of the regions stays taken. Then only those that come while another one
is scheduled have its answer.

Columns of what is printed:

loaded      share of servers whose region carried their function
there       share of servers for which a free region of the cloud carried it
all seen    loaded of the same trace without Placement, where one scheduler
            sees all regions (tests.bench.reuse)
refused     servers that found no host
races       claims that another server was faster with, for each server
asked       requests of nova_accel to Placement, for each server
Nova, ms    of Placement, for each of Nova's questions for candidates
accel       of Placement and the client, for nova_accel's requests of a server
scheduler   what the scheduling of a server took beside both, the claim included

Below a row is what the owners of three servers without a host read, and what it
takes to find that out: where a filter refused all hosts, where no free region
carries the function that a flavor demands, and where a zone has none.

All ms are of the processor, Placement's included, which is in the same process
and has its rows in SQLite in memory. Python's collection of garbage is left
out. Nearly all of it is Nova's question, for which Placement goes through
all free regions of the cloud: some 0.1 ms for each on a slow machine.

Run with ``python -m tests.bench.fleet [--requests N] [--randomize]
[--every SECONDS | --trace FILE] [ROW ...]``; a row is
hosts,functions,limit,schedulers, and --randomize sets Placement's [placement]
randomize_allocation_candidates. A trace has its own number of functions.
"""

import argparse
import collections
import datetime
import functools
import gc
import heapq
import json
import logging
import math
import os
import random
import statistics
import time
import unittest
import uuid

os.environ.setdefault('OS_NOVA_DISABLE_EVENTLET_PATCHING', 'true')
# chooses the threading mode, and so comes before the rest of Nova
import nova.tests.functional  # noqa: E402,F401

import fixtures  # noqa: E402
from nova import context  # noqa: E402
from nova import exception  # noqa: E402
from nova import objects  # noqa: E402
from nova.scheduler.client import report  # noqa: E402
from nova.scheduler import manager  # noqa: E402
from nova import test  # noqa: E402
from nova.tests.functional import fixtures as nova_fixtures  # noqa: E402
from placement.db.sqlalchemy import models  # noqa: E402
from placement import db_api  # noqa: E402
import sqlalchemy  # noqa: E402

from nova_accel import naming  # noqa: E402
from nova_accel.scheduler import fault  # noqa: E402
from nova_accel.scheduler import filters  # noqa: E402
from nova_accel.scheduler import scheduling  # noqa: E402
from tests.bench import reuse  # noqa: E402
from tests.bench import weigh  # noqa: E402
from tests import cheap  # noqa: E402
from tests import scheduling as options  # noqa: E402

FPGA = weigh.FPGA
REGIONS = weigh.REGIONS
#: servers of a row without --requests: Placement's questions times hosts, the
#: time of which grows with both; and what no row has more than
QUESTIONS, MOST = 2000000, 2000
#: hosts, functions, [scheduler] max_placement_results, schedulers
ROWS = ((2500, 300, 1000, 1), (2500, 1000, 1000, 1), (2500, 3000, 1000, 1),
        (2500, 1000, 1000, 3), (2500, 1000, 1000, 16),
        (10000, 1000, 1000, 1), (10000, 3000, 1000, 1))
CELL = str(uuid.UUID(int=1))
FORM = ('{:>6} {:>7} {:>9} {:>6} {:>10} {:>7} {:>6} {:>6} {:>8} {:>7} {:>5} '
        '{:>5} {:>8} {:>5} {:>9}')


@functools.cache
def number(name):
    """A function by its number, as its UUID."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, f'function{name}'))


class Fleet:
    """Regions that carry something; the same for Placement and without it."""

    def __init__(self, hosts, functions, load, requests, every=None,
                 trace=None):
        chance = random.Random(0)
        popularity = [1 / (1 + n) for n in range(functions)]
        if trace:
            popularity = [0] * functions
            for _, _, function in trace:
                popularity[function] += 1

        def some(count):
            return chance.choices(range(functions), popularity, k=count)
        regions = hosts * REGIONS
        self.carried = some(regions)
        busy = chance.sample(range(regions), int(load * regions))
        #: whether times are seconds
        self.is_at_rate = bool(every or trace)
        if trace:
            #: (end, region) of the servers that are there when it begins
            self.running = [(math.inf, region) for region in busy]
            self.trace = [(start, start + duration, function) for
                          start, duration, function in trace[:requests]]
            return
        mean = load * regions * every if every else 1
        self.running = [(mean * chance.expovariate(1), region)
                        for region in busy]
        now, self.trace = 0, []
        for function in some(requests):
            now += mean * chance.expovariate(load * regions)
            self.trace.append((
                now, now + mean * chance.expovariate(1), function))

    def with_all_seen(self):
        """Share of servers whose region carried their function."""
        chance = random.Random(0)
        known = scheduling.Schedulings(get=None)
        carried, busy = list(self.carried), list(self.running)
        heapq.heapify(busy)
        idle, copies = {}, collections.defaultdict(list)

        def show(region):
            copies[carried[region]].append(region)
            idle[region] = {'resources': {FPGA: {'capacity': 1, 'used': 0}},
                            'traits': traits(number(carried[region]))}
        for region in set(range(len(carried))) - {n for _, n in busy}:
            show(region)
        loaded = []
        for start, end, function in self.trace:
            while busy and busy[0][0] <= start:
                show(heapq.heappop(busy)[1])
            begun = known.begin(reuse.Spec(number(function)), idle)
            begun.count('server')
            # regions that carry the same are alike
            best = max((found for found in copies if copies[found]),
                       key=lambda found: (-begun.cost({
                           'mappings': {'1': [copies[found][0]]}}),
                           chance.random()))
            region = copies[best].pop()
            del idle[region]
            loaded.append(best == function)
            carried[region] = function
            heapq.heappush(busy, (end, region))
        return statistics.mean(loaded)


def traits(function, idle=True):
    """What nova-compute shows of a region."""
    spelled = naming.function_trait(function)
    shown = ['CUSTOM_FPGA_INTEL', spelled,
             spelled.replace('FPGA_', 'FPGA_INTEL_')]
    return shown + [naming.PROGRAMMABLE] if idle else shown


class Cloud(test.TestCase):
    """A cloud in this process; a test for the sake of Nova's fixtures."""

    USES_DB_SELF = True

    #: a Fleet, and numbers: hosts, functions, limit, schedulers
    plan: tuple
    #: hosts in each, of which traits are reported; 0: none
    rack = 0

    def runTest(self):
        self.begin(*self.plan)
        self.results.extend(self.play())
        self.told.extend(self.reasons())

    def begin(self, fleet, hosts, functions, limit, schedulers, randomize):
        self.fleet, self.randomize = fleet, randomize
        self.flags(max_placement_results=limit, group='scheduler')
        self.flags(**options.OPTIONS)
        running = self.useFixture(nova_fixtures.PlacementFixture())
        running.conf_fixture.config(
            randomize_allocation_candidates=randomize, group='placement')
        self.placement = running.api
        self.context = context.RequestContext('user', 'project')
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.host_manager.HostManager._init_aggregates',
            lambda manager: None))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.host_manager.HostManager._init_instance_info',
            lambda manager: None))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.host_manager.HostManager.'
            'get_host_states_by_uuids', self.states_of))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.utils.claim_resources',
            self.claim(manager.utils.claim_resources)))
        self.get = report.SchedulerReportClient.get
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.client.report.SchedulerReportClient.get',
            self.watched_get))
        self.candidates = (
            report.SchedulerReportClient.get_allocation_candidates)
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.client.report.SchedulerReportClient.'
            'get_allocation_candidates', self.answered))
        self.schedulers = [scheduling.Schedulings(filters._get)
                           for _ in range(schedulers)]
        self.manager = manager.SchedulerManager()
        self.write(hosts, functions)
        for host in self.hosts:
            self.state(host)
        # Placement has a process of its own, without a fleet to look through
        gc.collect()
        gc.freeze()
        self.addCleanup(gc.unfreeze)
        gc.disable()
        self.addCleanup(gc.enable)
        self.counts.clear()
        self.times.clear()

    # Placement

    def write(self, hosts, functions):
        """The rows of a fleet."""
        self.placement.put(f'/resource_classes/{FPGA}', {}, version='1.7')
        names = {name for n in range(functions) for name in traits(number(n))}
        names |= {self.rack_of(host) for host in range(hosts if self.rack
                                                       else 0)}
        self.engine = db_api.placement_context_manager.writer.get_engine()
        with self.engine.begin() as connection:
            have = dict(connection.execute(sqlalchemy.select(
                models.Trait.name, models.Trait.id)).all())
            connection.execute(
                sqlalchemy.insert(models.Trait),
                [{'name': name} for name in sorted(names - have.keys())])
            self.trait_ids = dict(connection.execute(sqlalchemy.select(
                models.Trait.name, models.Trait.id)).all())
            classes = dict(connection.execute(sqlalchemy.select(
                models.ResourceClass.name, models.ResourceClass.id)).all())
            providers, inventories, carried = [], [], []
            busy = {region for _, region in self.fleet.running}
            self.hosts, self.regions = [], []

            def provider(name, root, parent, **inventory):
                row = len(providers) + 1
                providers.append({
                    'id': row, 'uuid': str(uuid.uuid5(uuid.NAMESPACE_DNS,
                                                      name)),
                    'name': name, 'generation': 1,
                    'root_provider_id': root or row,
                    'parent_provider_id': parent})
                for class_, total in inventory.items():
                    inventories.append({
                        'resource_provider_id': row,
                        'resource_class_id': classes[class_], 'total': total,
                        'reserved': 0, 'min_unit': 1, 'max_unit': total,
                        'step_size': 1, 'allocation_ratio': 1.0})
                return row
            for host in range(hosts):
                root = provider(f'host{host}', None, None, VCPU=128,
                                MEMORY_MB=65536, DISK_GB=1000)
                self.hosts.append(providers[-1]['uuid'])
                if self.rack:
                    carried.append({
                        'resource_provider_id': root,
                        'trait_id': self.trait_ids[self.rack_of(host)]})
                for index in range(REGIONS):
                    device = provider(f'host{host}_{index}', root, root)
                    region = provider(f'host{host}_{index}_region', root,
                                      device, **{FPGA: 1})
                    carried += self.shown(
                        region, self.fleet.carried[len(self.regions)],
                        len(self.regions) not in busy)
                    self.regions.append(providers[-1]['uuid'])
            self.row_of = {one['uuid']: one['id'] for one in providers}
            self.host_of = {region: self.hosts[n // REGIONS]
                            for n, region in enumerate(self.regions)}
            self.busy = [(end, str(uuid.uuid4()), self.regions[n])
                         for end, n in self.fleet.running]
            heapq.heapify(self.busy)
            consumers, allocations = [], []
            for _, server, region in self.busy:
                consumers.append({'uuid': server, 'project_id': 1,
                                  'user_id': 1, 'generation': 1})
                for provider, class_, used in (
                        (self.host_of[region], 'VCPU', 1),
                        (self.host_of[region], 'MEMORY_MB', 64),
                        (self.host_of[region], 'DISK_GB', 1),
                        (region, FPGA, 1)):
                    allocations.append({
                        'resource_provider_id': self.row_of[provider],
                        'consumer_id': server, 'used': used,
                        'resource_class_id': classes[class_]})
            for table, rows in (
                    (models.Project, [{'id': 1, 'external_id': 'p'}]),
                    (models.User, [{'id': 1, 'external_id': 'u'}]),
                    (models.ResourceProvider, providers),
                    (models.Inventory, inventories),
                    (models.ResourceProviderTrait, carried),
                    (models.Consumer, consumers),
                    (models.Allocation, allocations)):
                connection.execute(sqlalchemy.insert(table), rows)
        self.carried = dict(zip(
            self.regions, self.fleet.carried, strict=True))
        self.computes = frozenset(self.hosts)
        self.used = collections.Counter(
            self.host_of[region] for _, _, region in self.busy)
        self.idle = collections.Counter(self.fleet.carried)
        self.idle.subtract(self.carried[region] for _, _, region in self.busy)
        self.state_of = {}

    def rack_of(self, host):
        return f'CUSTOM_NEAR_RACK_{host // self.rack}'

    def shown(self, row, function, idle):
        return [{'resource_provider_id': row,
                 'trait_id': self.trait_ids[name]}
                for name in traits(number(function), idle)]

    def taken(self, end, server, region):
        heapq.heappush(self.busy, (end, server, region))
        self.used[self.host_of[region]] += 1
        with self.engine.begin() as connection:
            self.show(connection, region, idle=False)

    def ended(self, now):
        """Servers end, and their regions keep their functions."""
        with self.engine.begin() as connection:
            while self.busy and self.busy[0][0] <= now:
                _, server, region = heapq.heappop(self.busy)
                connection.execute(sqlalchemy.delete(models.Allocation).where(
                    models.Allocation.consumer_id == server))
                connection.execute(sqlalchemy.delete(models.Consumer).where(
                    models.Consumer.uuid == server))
                self.used[self.host_of[region]] -= 1
                self.idle[self.carried[region]] += 1
                self.show(connection, region, idle=True)

    def show(self, connection, region, idle):
        row = self.row_of[region]
        connection.execute(sqlalchemy.delete(
            models.ResourceProviderTrait).where(
                models.ResourceProviderTrait.resource_provider_id == row))
        connection.execute(
            sqlalchemy.insert(models.ResourceProviderTrait),
            self.shown(row, self.carried[region], idle))
        connection.execute(sqlalchemy.update(models.ResourceProvider).where(
            models.ResourceProvider.id == row).values(
                generation=models.ResourceProvider.generation + 1))
        self.state_of.pop(self.host_of[region], None)

    # what Nova's scheduler asks

    def states_of(self, manager_, context_, uuids, spec=None):
        # Nova asks for all providers of the answer: the cells have the hosts
        return (self.state(host) for host in uuids if host in self.computes)

    def state(self, host):
        if host not in self.state_of:
            state, = weigh.states([(host, ())])
            used = self.used[host]
            state.host = state.nodename = host
            state.cell_uuid = CELL
            state.free_ram_mb -= 64 * used
            state.vcpus_used = state.num_instances = used
            self.state_of[host] = state
        # else it counts as down after a minute
        self.state_of[host].service['last_seen_up'] = datetime.datetime.now(
            datetime.UTC)
        return self.state_of[host]

    def answered(self, client, context_, resources):
        """Nova's question; where schedulers are at it at once, the answer of
        before any of them claimed."""
        if self.early:
            return json.loads(self.early.popleft())
        begin = time.process_time()
        answer = self.candidates(client, context_, resources)
        self.times['Nova'] += time.process_time() - begin
        self.counts['asked'] += 1
        return answer

    def watched_get(self, client, url, *args, **kwargs):
        begin = time.process_time()
        try:
            return self.get(client, url, *args, **kwargs)
        finally:
            # the others are Nova's
            if url.startswith('/resource_providers') or 'in_tree' in url or (
                    'in%3A' in url):
                self.counts['accel'] += 1
                self.times['accel'] += time.process_time() - begin

    def claim(self, claims):
        def claimed(*args, **kwargs):
            done = claims(*args, **kwargs)
            self.counts['races'] += not done
            return done
        return claimed

    # the trace

    def play(self):
        """Return [(whether a free region carried the function, whether its
        own did), None: refused]."""
        self.early = collections.deque()
        results = []
        for batch in self.batches():
            self.ended(batch[0][0])
            gc.collect()
            early = self.ask(batch) if len(batch) > 1 else []
            for n, (_, end, function) in enumerate(batch):
                filters.SCHEDULINGS = self.schedulers[n]
                self.early.extend(early[n:n + 1])
                results.append(
                    self.schedule(self.spec(function), end, function))
        return results

    def batches(self):
        """Requests of which all have an answer before the first one claims."""
        left = collections.deque(self.fleet.trace)
        done = 0
        while left:
            batch = [left.popleft()]
            # what a scheduling took so far; the first one is not known
            until = batch[0][0] + sum(self.times.values()) / done if done else 0
            while left and len(batch) < len(self.schedulers) and (
                    not self.fleet.is_at_rate or left[0][0] < until):
                batch.append(left.popleft())
            yield batch
            done += len(batch)

    def ask(self, batch):
        """What Placement answers each request of a batch, as JSON.

        No function is in Nova's question. Where the order of the answer is
        not by chance, all have the same.
        """
        answers = []
        for _, _, function in batch if self.randomize else batch[:1]:
            spec = self.spec(function)
            manager.request_filter.process_reqspec(self.context, spec)
            begin = time.process_time()
            answers.append(json.dumps(self.candidates(
                self.manager.placement_client, self.context,
                manager.utils.resources_from_request_spec(
                    self.context, spec, self.manager.host_manager))))
            self.times['Nova'] += time.process_time() - begin
            self.counts['asked'] += 1
        return answers if self.randomize else answers * len(batch)

    def schedule(self, spec, end, function):
        asked = self.times['Nova'] + self.times['accel']
        begin = time.process_time()
        try:
            [[selected, *_]] = self.manager.select_destinations(
                self.context, spec_obj=spec,
                instance_uuids=[spec.instance_uuid], return_objects=True,
                return_alternates=True)
        except exception.NoValidHost:
            return None
        finally:
            self.times['rest'] += time.process_time() - begin - (
                self.times['Nova'] + self.times['accel'] - asked)
        held = json.loads(selected.allocation_request)['allocations']
        region, = held.keys() & self.carried.keys()
        there = self.idle[function] > 0
        loaded = self.carried[region] == function
        self.idle[self.carried[region]] -= 1
        self.carried[region] = function
        self.taken(end, spec.instance_uuid, region)
        return there, loaded

    def reasons(self):
        """(what a request wants that finds no host, requests to Placement for
        the reason, ms of the processor, the reason)."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.scheduler.fault.LIMIT', 600))
        nobodys = naming.function_trait(number('nobodys'))
        self.placement.put(f'/traits/{nobodys}', {}, version='1.6')
        for what, specs, zone in (
                ('what is free', {}, None),
                ('a function', {f'trait_ACCEL0:{nobodys}': 'required'}, None),
                ('a zone', {}, [str(uuid.uuid4())])):
            spec = self.spec(0)
            spec.flavor.extra_specs.update(specs)
            if zone:
                spec.requested_destination = objects.Destination(
                    aggregates=zone)
            asked = []

            def get(url, version):
                asked.append(url)
                return filters._get(url, version)
            begin = time.process_time()
            text = fault.reason(get, filters.SCHEDULINGS, self.manager,
                                self.context, spec, 1)
            yield (what, len(asked), 1000 * (time.process_time() - begin),
                   text)

    def spec(self, function):
        flavor = weigh.spec(number(function)).flavor
        for name, value in {'id': 1, 'name': 'f', 'flavorid': 'f',
                            'disabled': False, 'is_public': True,
                            'rxtx_factor': 1.0, 'vcpu_weight': 0,
                            'description': None, 'projects': [],
                            'deleted': False, 'deleted_at': None,
                            'created_at': None, 'updated_at': None}.items():
            setattr(flavor, name, value)
        spec = objects.RequestSpec.from_components(
            self.context, str(uuid.uuid4()),
            objects.ImageMeta.from_dict({}), flavor, None, None, {}, None,
            None)
        spec.num_instances = 1
        return spec


def measure(hosts, functions, limit, schedulers, args):
    requests = args.requests or min(MOST, schedulers * QUESTIONS // hosts)
    trace = reuse.read(args.trace) if args.trace else None
    if trace:
        functions = 1 + max(function for _, _, function in trace)
    fleet = Fleet(hosts, functions, args.load, requests, args.every, trace)
    cloud = Cloud()
    cloud.plan = (fleet, hosts, functions, limit, schedulers,
                  args.randomize)
    results, told, counts, times = played(cloud)
    placed = [found for found in results if found is not None]
    count = len(results)
    there, loaded = map(statistics.mean, zip(*placed))
    return told, (
        hosts, hosts * REGIONS, functions, limit, schedulers, count,
        f'{loaded:.3f}', f'{there:.3f}', f'{fleet.with_all_seen():.3f}',
        count - len(placed), f'{counts["races"] / count:.2f}',
        f'{counts["accel"] / count:.2f}',
        f'{1000 * times["Nova"] / counts["asked"]:.0f}',
        *(f'{1000 * times[what] / count:.0f}' for what in ('accel', 'rest')))


def played(cloud):
    """Results, reasons, counts and times of a cloud with a plan."""
    # Nova's tests forget what they have when they end
    found = cloud.results, cloud.told, cloud.counts, cloud.times = (
        [], [], collections.Counter(), collections.Counter())
    result = unittest.TestResult()
    cloud.run(result)
    for _, text in result.errors + result.failures:
        raise SystemExit(text)
    return found


def begin():
    objects.register_all()
    cheap.placement()
    # Nova's tests put each line of DEBUG into words, the scores of hosts too
    logging.disable(logging.INFO)


def _row(text):
    hosts, functions, limit, schedulers = map(int, text.split(','))
    return hosts, functions, limit, schedulers


def main():
    parser = argparse.ArgumentParser(prog='python -m tests.bench.fleet')
    parser.add_argument('--requests', type=int)
    parser.add_argument('--load', type=float, default=.5)
    parser.add_argument('--randomize', action='store_true')
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument('--every', type=float, metavar='SECONDS')
    rate.add_argument('--trace', metavar='FILE')
    parser.add_argument('rows', nargs='*', type=_row, default=ROWS)
    args = parser.parse_args()
    begin()
    print(FORM.format(
        'hosts', 'regions', 'functions', 'limit', 'schedulers', 'servers',
        'loaded', 'there', 'all seen', 'refused', 'races', 'asked',
        'Nova, ms', 'accel', 'scheduler'))
    for row in args.rows:
        told, found = measure(*row, args)
        print(FORM.format(*found))
        for what, asked, ms, text in told:
            print(f'  no host for {what}: {asked} requests, {ms:.0f} ms: '
                  f'{text}', flush=True)


if __name__ == '__main__':
    main()
