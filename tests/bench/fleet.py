# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A cloud of thousands of hosts: where servers land, and what it costs.

Nova's SchedulerManager with its filters and weighers, those of nova_accel and a
real Placement, which claims too. The hosts are rows written into Placement's
database, and HostStates as nova-scheduler has them of the cells; nova-compute
is played by what it writes into Placement: a region shows the function of its
last server, and that it is programmable while it is free. The trace is of
Zipf's kind; half of the regions (--load) are taken when it begins, and servers
end as others begin, and the load stays.

Several schedulers know of their own requests only. Of as many requests in a
row as there are schedulers, all have Placement's answer before the first of
them claims: no cloud has more races than that.

Columns of what is printed:

loaded      share of servers whose region carried their function
all seen    the same trace without Placement, where one scheduler sees all
            regions (tests.bench.reuse)
refused     servers that found no host
races       claims that another server was faster with, for each server
Nova, accel requests to Placement for each server: of Nova, of nova_accel
ms          in which Placement answered Nova's question; nova_accel's; and
            what the scheduling took beside both

Run with ``python -m tests.bench.fleet [--requests N] [--randomize] [ROW ...]``;
a row is hosts,functions,limit,schedulers, and --randomize sets Placement's
[placement] randomize_allocation_candidates.
"""

import argparse
import collections
import datetime
import heapq
import json
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
from nova_accel.scheduler import filters  # noqa: E402
from nova_accel.scheduler import scheduling  # noqa: E402
from tests.bench import reuse  # noqa: E402
from tests.bench import weigh  # noqa: E402
from tests import scheduling as options  # noqa: E402

FPGA = weigh.FPGA
REGIONS = weigh.REGIONS
#: hosts, functions, [scheduler] max_placement_results, schedulers
ROWS = ((2500, 300, 1000, 1), (2500, 1000, 1000, 1), (2500, 3000, 1000, 1),
        (2500, 1000, 1000, 3), (2500, 1000, 1000, 16),
        (10000, 1000, 1000, 1))
CELL = str(uuid.UUID(int=1))
FORM = ('{:>6} {:>7} {:>9} {:>6} {:>10} {:>8} {:>7} {:>9} {:>8} {:>6} {:>6} '
        '{:>6} {:>8} {:>6} {:>9}')


def number(name):
    """A function by its number, as its UUID."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, f'function{name}'))


class Fleet:
    """Regions that carry something; the same for Placement and without it."""

    def __init__(self, hosts, functions, load, requests, seed=0):
        chance = random.Random(seed)
        popularity = [1 / (1 + n) for n in range(functions)]

        def some(count):
            return chance.choices(range(functions), popularity, k=count)
        regions = hosts * REGIONS
        self.carried = some(regions)
        busy = chance.sample(range(regions), int(load * regions))
        #: (end, region) of the servers that are there when it begins
        self.running = [(chance.expovariate(1), region) for region in busy]
        rate = load * regions
        now, self.trace = 0, []
        for function in some(requests):
            now += chance.expovariate(rate)
            self.trace.append((now, now + chance.expovariate(1), function))

    def with_all_seen(self):
        """Share of servers whose region carried their function."""
        rule = reuse.Ours(random.Random(0))
        rule.ids = [number(n) for n in range(
            1 + max([*self.carried, *(f for _, _, f in self.trace)]))]
        rule.traits = {n: traits(function)
                       for n, function in enumerate(rule.ids)}
        everything = [reuse.Region(n) for n in range(len(self.carried))]
        for region, function in zip(everything, self.carried, strict=True):
            region.function = function
        busy = list(self.running)
        heapq.heapify(busy)
        taken = {n for _, n in busy}
        idle = [r for n, r in enumerate(everything) if n not in taken]
        index = {region: n for n, region in enumerate(everything)}
        loaded = []
        for start, end, function in self.trace:
            while busy and busy[0][0] <= start:
                idle.append(everything[heapq.heappop(busy)[1]])
            rule.chance.shuffle(idle)
            region = rule.choose(idle, function, start)
            idle.remove(region)
            loaded.append(region.function == function)
            region.function = function
            heapq.heappush(busy, (end, index[region]))
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

    def runTest(self):
        self.begin(*self.plan)
        self.results.extend(self.play())

    def begin(self, fleet, hosts, functions, limit, schedulers, randomize):
        self.fleet = fleet
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
        self.counts.clear()
        self.times.clear()

    # Placement

    def write(self, hosts, functions):
        """The rows of a fleet."""
        self.placement.put(f'/resource_classes/{FPGA}', {}, version='1.7')
        names = {name for n in range(functions) for name in traits(number(n))}
        engine = db_api.placement_context_manager.writer.get_engine()
        with engine.begin() as connection:
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
                for index in range(REGIONS):
                    device = provider(f'host{host}_{index}', root, root)
                    region = provider(f'host{host}_{index}_region', root,
                                      device, **{FPGA: 1})
                    self.regions.append(providers[-1]['uuid'])
                    function = self.fleet.carried[len(self.regions) - 1]
                    carried += [{'trait_id': self.trait_ids[name],
                                 'resource_provider_id': region}
                                for name in traits(number(function))]
            for table, rows in ((models.ResourceProvider, providers),
                                (models.Inventory, inventories),
                                (models.ResourceProviderTrait, carried)):
                connection.execute(sqlalchemy.insert(table), rows)
        self.carried = dict(zip(
            self.regions, self.fleet.carried, strict=True))
        self.used = collections.Counter()
        self.state_of = {}
        self.host_of = {region: self.hosts[n // REGIONS]
                        for n, region in enumerate(self.regions)}
        self.busy = []
        for end, region in self.fleet.running:
            server = str(uuid.uuid4())
            region = self.regions[region]
            self.placement.put(f'/allocations/{server}', {
                'allocations': {
                    self.host_of[region]: {'resources': {
                        'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}},
                    region: {'resources': {FPGA: 1}}},
                'project_id': 'p', 'user_id': 'u',
                'consumer_generation': None}, version='1.28')
            self.taken(end, server, region)

    def taken(self, end, server, region):
        heapq.heappush(self.busy, (end, server, region))
        self.used[self.host_of[region]] += 1
        self.show(region, idle=False)

    def ended(self, now):
        """Servers end, and their regions keep their functions."""
        while self.busy and self.busy[0][0] <= now:
            _, server, region = heapq.heappop(self.busy)
            self.placement.delete(f'/allocations/{server}')
            self.used[self.host_of[region]] -= 1
            self.show(region, idle=True)

    def show(self, region, idle):
        url = f'/resource_providers/{region}'
        generation = self.placement.get(url).body['generation']
        self.placement.put(f'{url}/traits', {
            'resource_provider_generation': generation,
            'traits': traits(number(self.carried[region]), idle)},
            version='1.6')
        self.state_of.pop(self.host_of[region], None)

    # what Nova's scheduler asks

    def states_of(self, manager_, context_, uuids, spec=None):
        return (self.state(host) for host in uuids)

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
        begin = time.monotonic()
        answer = self.candidates(client, context_, resources)
        self.times['Nova'] += time.monotonic() - begin
        return answer

    def watched_get(self, client, url, *args, **kwargs):
        novas = url.startswith('/allocation_candidates') and (
            'in_tree' not in url)
        self.counts['Nova' if novas else 'accel'] += 1
        begin = time.monotonic()
        try:
            return self.get(client, url, *args, **kwargs)
        finally:
            if not novas:
                self.times['accel'] += time.monotonic() - begin

    def claim(self, claims):
        def claimed(*args, **kwargs):
            done = claims(*args, **kwargs)
            self.counts['Nova'] += 1
            self.counts['races'] += not done
            return done
        return claimed

    # the trace

    def play(self):
        """Return [whether its region carried the function, None: refused]."""
        self.early = collections.deque()
        results, at_once = [], len(self.schedulers)
        for begin in range(0, len(self.fleet.trace), at_once):
            batch = self.fleet.trace[begin:begin + at_once]
            self.ended(batch[0][0])
            specs = [self.spec(function) for _, _, function in batch]
            early = [json.dumps(self.ask(function))
                     for _, _, function in batch] if at_once > 1 else []
            for n, ((_, end, function), spec) in enumerate(
                    zip(batch, specs, strict=True)):
                filters.SCHEDULINGS = self.schedulers[n]
                self.early.extend(early[n:n + 1])
                results.append(self.schedule(spec, end, function))
        return results

    def ask(self, function):
        spec = self.spec(function)
        manager.request_filter.process_reqspec(self.context, spec)
        begin = time.monotonic()
        answer = self.candidates(
            self.manager.placement_client, self.context,
            manager.utils.resources_from_request_spec(
                self.context, spec, self.manager.host_manager))
        self.times['Nova'] += time.monotonic() - begin
        return answer

    def schedule(self, spec, end, function):
        asked = self.times['Nova'] + self.times['accel']
        begin = time.monotonic()
        try:
            [[selected, *_]] = self.manager.select_destinations(
                self.context, spec_obj=spec,
                instance_uuids=[spec.instance_uuid], return_objects=True,
                return_alternates=True)
        except exception.NoValidHost:
            return None
        finally:
            self.times['rest'] += time.monotonic() - begin - (
                self.times['Nova'] + self.times['accel'] - asked)
        held = json.loads(selected.allocation_request)['allocations']
        region, = held.keys() & self.carried.keys()
        loaded = self.carried[region] == function
        self.carried[region] = function
        self.taken(end, spec.instance_uuid, region)
        return loaded

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


def measure(hosts, functions, limit, schedulers, requests, load,
            randomize):
    fleet = Fleet(hosts, functions, load, requests)
    cloud = Cloud()
    cloud.plan = fleet, hosts, functions, limit, schedulers, randomize
    # Nova's tests forget what they have when they end
    results, counts, times = (cloud.results, cloud.counts, cloud.times) = (
        [], collections.Counter(), collections.Counter())
    result = unittest.TestResult()
    cloud.run(result)
    for _, text in result.errors + result.failures:
        raise SystemExit(text)
    placed = [loaded for loaded in results if loaded is not None]
    count = len(results)
    return (hosts, hosts * REGIONS, functions, limit, schedulers, count,
            f'{statistics.mean(placed):.3f}', f'{fleet.with_all_seen():.3f}',
            count - len(placed), f'{counts["races"] / count:.2f}',
            f'{counts["Nova"] / count:.2f}',
            f'{counts["accel"] / count:.2f}',
            *(f'{1000 * times[what] / count:.0f}'
              for what in ('Nova', 'accel', 'rest')))


def _row(text):
    hosts, functions, limit, schedulers = map(int, text.split(','))
    return hosts, functions, limit, schedulers


def main():
    parser = argparse.ArgumentParser(prog='python -m tests.bench.fleet')
    parser.add_argument('--requests', type=int, default=2000)
    parser.add_argument('--load', type=float, default=.5)
    parser.add_argument('--randomize', action='store_true')
    parser.add_argument('rows', nargs='*', type=_row, default=ROWS)
    args = parser.parse_args()
    objects.register_all()
    print(FORM.format(
        'hosts', 'regions', 'functions', 'limit', 'schedulers', 'servers',
        'loaded', 'all seen', 'refused', 'races', 'Nova', 'accel', 'Nova, ms',
        'accel', 'scheduler'))
    for row in args.rows:
        print(FORM.format(*measure(*row, args.requests, args.load,
                                   args.randomize)),
              flush=True)


if __name__ == '__main__':
    main()
