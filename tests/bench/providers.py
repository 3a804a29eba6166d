# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the providers of a host cost from the claim of a boot to its spawn.

Real nova-compute with its resource tracker, and a real Placement, in one
process (tests.functional.base), on simulated hosts: one with Nova's
LibvirtDriver, and hosts with 0, 16, 64 and 512 FPGA regions, four of a card.
Run with ``python -m tests.bench.providers [--without] [--http] [--servers N]
[boots [regions ...]]``. --without leaves Nova's report client and its trees of
providers as they are without nova_accel; with --http Placement answers over
HTTP in a process of its own; with --servers each host has up to N servers with
a region before it is started again, and only the starts are measured.

Rows are "plain", a server without accelerators; "FPGA", one with a region that
has its function; "report", a periodic pass of the resource tracker; and "old",
a pass where Nova's copy of Placement is older than [compute]
resource_provider_association_refresh. Of a boot it is measured from
ResourceTracker.instance_claim() to the driver's spawn(), of a pass all. The
hosts take turns, because other work of the machine then affects all of them.
"reads" and "writes" are requests of nova-compute to Placement; "ms" are of the
clock, "processor" of the whole process, in which Placement answers as well if
not over HTTP, and "least" the fewest of these: compare them with each other.
"start" is the start of nova-compute where Placement has the providers already;
beside it is by how much the resident memory and the threads of the process have
grown at the first start.
"""

import argparse
import functools
import gc
import resource
import statistics
import subprocess
import sys
import threading
import time

import fixtures

from tests.bench import boot
from tests.functional import base
from tests.functional import process

from nova.compute import manager  # noqa: I100 (after base)
from nova.compute import resource_tracker
from nova import context
from nova.scheduler.client import report
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel.virt import provider_trees
from nova_accel.virt import report_client

#: regions of a card
REGIONS = 4
READS, WRITES = 'read', 'write'


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument('--without', action='store_true')
    parser.add_argument('--http', action='store_true')
    parser.add_argument('--servers', type=int, default=0)
    parser.add_argument('boots', nargs='?', type=int, default=9)
    parser.add_argument('regions', nargs='*', type=int,
                        default=[0, 16, 64, 512])
    return parser.parse_args()


class Providers(boot.Metered, base.AcceleratorTestBase):

    FRESH_CLOUD = True
    LIMIT = 7200
    HOSTS = {}
    TIMED = []
    NOVAS = [(boot.NOVAS_OWN, READS if name == 'get' else WRITES,
              report.SchedulerReportClient, name)
             for name in ('get', 'put', 'post', 'delete')]

    def setUp(self):
        self.options = arguments()
        if self.options.without:
            for module, name in ((report_client, 'watch'),
                                 (provider_trees, 'install')):
                self.useFixture(fixtures.MockPatchObject(
                    module, name, lambda *args: None))
        self.done = threading.Event()
        self.marks = []
        self._patch(resource_tracker.ResourceTracker, 'instance_claim',
                    self._marking)
        self._patch(libvirt_driver.LibvirtDriver, 'spawn', self._marking)
        self._patch(manager.ComputeManager, '_build_and_run_instance',
                    self._telling)
        super().setUp()
        if self.options.http:
            fixture = self.placement.fixture
            server = subprocess.Popen(
                [sys.executable, '-m', 'tests.bench.placement_app',
                 fixture.conf_fixture.conf.placement_database.connection],
                stdout=subprocess.PIPE, text=True)
            self.addCleanup(server.wait)
            self.addCleanup(server.kill)
            fixture.endpoint = server.stdout.readline().strip()

    def _mark(self):
        self.marks.append((time.perf_counter(), time.process_time(),
                           self.meter.counts.copy()))

    def _marking(self, function):
        def marking(*args, **kwargs):
            self._mark()
            return function(*args, **kwargs)
        return marking

    def _telling(self, function):
        def telling(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            finally:
                self.done.set()
        return telling

    def runTest(self):
        self.write_profiles({'name': 'nlb0', 'groups': [{
            'resources:CUSTOM_ACCELERATOR_FPGA': 1,
            'accel:function_id': base.NLB0}]})
        # as many servers as regions fit
        self.flags(cpu_allocation_ratio=1000.0)
        self.flags(instances=-1, cores=-1, ram=-1, group='quota')
        plain, fpga = (self._create_flavor(
            memory_mb=8, disk=0, ephemeral=0, extra_spec=specs)
            for specs in ({}, {'accel:device_profile': 'nlb0'}))
        print(f'median of {self.options.boots} each\n{"host":14}'
              f'{"providers":>10} {"":8}{"reads":>7}{"writes":>7}{"ms":>9}'
              f'{"processor":>11}{"least":>9}', file=boot.OUT)
        self.flags(compute_driver='libvirt.LibvirtDriver')
        rows = self.start('LibvirtDriver', 'stock', {}, {'plain': plain})
        self.flags(compute_driver='accel.AccelLibvirtDriver')
        for number in self.options.regions:
            rows += self.start(f'{number} regions', f'host{number}', {
                'cards': [base.card(f'0000:{card // 32:02x}:{card % 32:02x}.0',
                                    [base.NLB0] * REGIONS)
                          for card in range(number // REGIONS)]},
                {'plain': plain, **({'FPGA': fpga} if number else {})},
                min(number, self.options.servers))
        found = [[] for _ in rows]
        # the first ones also warm up Python, and note what has changed
        for number in range(self.options.boots + 2):
            for (_, measure), results in zip(rows, found, strict=True):
                result = measure()
                if number > 1:
                    results.append(result)
        for (row, _), results in zip(rows, found, strict=True):
            reads, writes, wall, worked = (
                statistics.median(column) for column in zip(*results))
            print(f'{row}{reads:7.0f}{writes:7.0f}{1000 * wall:9.1f}'
                  f'{1000 * worked:11.1f}'
                  f'{1000 * min(result[3] for result in results):9.1f}',
                  file=boot.OUT, flush=True)

    def start(self, name, host, description, flavors, servers=0):
        """Start a host.

        :param servers: number of servers that it has when it is started again.
        :returns: its rows: the beginning of the line, and what measures once.
        """
        self.describe_host(host, {'cards': [], **description})
        before = _resident(), threading.active_count()
        self.start_compute(host)
        grown = [now - then for now, then in zip(
            (_resident(), threading.active_count()), before)]
        aggregate = self._create_aggregate(host, availability_zone=host)
        self.admin_api.add_host_to_aggregate(aggregate, host)
        if servers:
            self.api.post_server({'server': {'min_count': servers, **(
                self._build_server(flavor_id=flavors['FPGA'], networks='none',
                                   az=host))}})
            while any(s['status'] == 'BUILD' for s in self.api.get_servers()):
                time.sleep(1)
        self.show_start(name, host, *grown)
        if self.options.servers:
            return []
        of = len(self.computes[host].manager.rt.provider_tree
                 .get_provider_uuids(host))
        measures = {kind: functools.partial(self.boot_once, flavor, host)
                    for kind, flavor in flavors.items()}
        for kind in ('report', 'old'):
            measures[kind] = functools.partial(
                self.report_once, self.computes[host].manager, kind == 'old')
        return [(f'{name:14}{of:10} {kind:8}', measure)
                for kind, measure in measures.items()]

    def show_start(self, name, host, megabytes, threads):
        there = [s for s in self.admin_api.get_servers()
                 if s['status'] == 'ACTIVE'
                 and s['OS-EXT-SRV-ATTR:host'] == host]
        self.meter.clear()
        began = time.process_time()
        self.restart_compute_service(host)
        counts = self.meter.counts
        print(f'{name:14}{"":10} start   {counts[boot.NOVAS_OWN, READS]:7}'
              f'{counts[boot.NOVAS_OWN, WRITES]:7}{"":9}'
              f'{1000 * (time.process_time() - began):11.0f}'
              f'{megabytes:6.0f} MB{threads:4} threads'
              f'{len(there):5} servers', file=boot.OUT, flush=True)

    def taken(self):
        """(reads, writes, seconds, of the processor) between two marks."""
        (began, worked, before), (ended, until, after) = self.marks[:2]
        return (*(after[boot.NOVAS_OWN, kind] - before[boot.NOVAS_OWN, kind]
                  for kind in (READS, WRITES)),
                ended - began, until - worked)

    def boot(self, flavor, host):
        body = self._build_server(flavor_id=flavor, networks='none', az=host)
        self.done.clear()
        self.marks.clear()
        server = self.api.post_server({'server': body})
        self.assertTrue(self.done.wait(60))
        return self._wait_for_state_change(server, 'ACTIVE')

    def boot_once(self, flavor, host):
        server = self.boot(flavor, host)
        found = self.taken()
        self._delete_server(server)
        if host != 'stock':
            # else the next boot would run beside the cleaning of the region
            process.until(lambda: self.assertEqual([], self.claims(host)))
        return found

    def report_once(self, of, is_old):
        if is_old:
            times = of.reportclient._association_refresh_time
            times |= dict.fromkeys(times, time.time() - 1000)
        self.marks.clear()
        self._mark()
        of.rt.update_available_resource(
            context.get_admin_context(), of.host)
        self._mark()
        return self.taken()


def _resident():
    """MB, of /proc (proc(5))."""
    gc.collect()
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2 ** 20


def main():
    boot.main(Providers)


if __name__ == '__main__':
    main()
