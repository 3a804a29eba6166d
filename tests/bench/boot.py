# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a boot costs with an accelerator that has its function already.

Real nova-api, conductor, scheduler, nova-computes, Placement and Glance on
simulated hosts (tests.functional.base), in three kinds of boots by turns:
"stock" without accelerator on two hosts with Nova's LibvirtDriver, "ours"
without accelerator on two hosts with our driver and a card each, and
"accelerator" on the latter, by a device profile whose function both cards
carry. Run with ``python -m tests.bench.boot [boots]``.

Counted, from the request to the API until nova-compute is done with the build:
requests to Placement by the process that makes them, requests to Glance (also
those of Nova for the image of the guest), commits and statements of the claim
store, and subprocesses. Commits are those to a file with WAL and synchronous =
FULL; SQLite waits for the disk once in each while its connection stays open.

Times are of one process with one interpreter lock, SQLite in place of a
database server, and without network, libvirt, image or disk: compare them with
each other. "Ours" are the milliseconds inside our code, each in one place
only: they add up; all but the wait are what we do, and the wait is
what of it a boot has to wait for, since the rest of plug() runs beside what
Nova does. Not measured: programming, the release, and the periodic report
(tests.bench.report).
"""

import collections
import contextlib
import functools
import io
import logging
import os
import statistics
import sys
import threading
import time
import unittest

import fixtures

from tests.functional import base

from nova.compute import manager  # noqa: I100 (base chooses the threading)
from nova.scheduler.client import report

from nova_accel.api import expansion
from nova_accel.attach import accelerators
from nova_accel.attach import guests
from nova_accel.inventory import shown
from nova_accel.scheduler import filters
from nova_accel.scheduler import weights
from nova_accel.store import claim_store
from nova_accel.store import file as store_file
from nova_accel.virt import cloud

#: the start of a module's name -> the process that would run it
PROCESSES = (('nova.compute.manager', 'nova-compute'),
             ('nova_accel.virt', 'nova-compute'),
             ('nova_accel.admin', 'nova-compute'),
             ('nova_accel.notify', 'nova-compute'),
             ('nova_accel.attach', 'nova-compute'),
             ('nova_accel.inventory', 'nova-compute'),
             ('nova.scheduler.manager', 'nova-scheduler'),
             ('nova.conductor', 'nova-conductor'),
             ('nova.api', 'nova-api'))
#: our code: place, kind, where it is; the place None is that of the caller
OURS = [
    ('nova-api', 'device profile', expansion, 'expand_flavor'),
    ('nova-scheduler', 'filter', filters.AcceleratorFilter, 'filter_all'),
    ('nova-scheduler', 'weigher', weights.AcceleratorWeigher,
     'weigh_objects'),
    ('nova-compute, claim', 'provider tree', shown.Shown, 'update_tree'),
    ('nova-compute, spawn', 'start plug', guests.Guests, 'start_plug'),
    ('nova-compute, plug', 'Placement', cloud.NovaCloud, 'allocations'),
    ('nova-compute, plug', 'plug', accelerators.Accelerators, 'plug'),
    ('nova-compute, plug', 'publish', cloud.NovaCloud, 'show'),
    ('nova-compute, spawn', 'wait for plug', guests.Guests,
     'handles_to_start'),
    *((None, 'claim store', claim_store.ClaimStore, name)
      for name, value in vars(claim_store.ClaimStore).items()
      if callable(value) and not name.startswith('_')),
]
NOVAS = [(None, 'Placement', report.SchedulerReportClient, name)
         for name in ('get', 'put', 'post', 'delete')]
NOVAS_OWN = "Nova's"
WAIT = ('nova-compute, spawn', 'wait for plug')


class Meter:
    """Counts and times of one boot at a time."""

    def __init__(self):
        self._local = threading.local()
        self.clear()

    def clear(self):
        self.counts = collections.Counter()
        self.spent = collections.Counter()
        self.worked = collections.Counter()

    def read(self):
        """Counts, milliseconds, milliseconds of processor; copies."""
        return (self.counts.copy(), self.spent.copy(), self.worked.copy())

    def count(self, *what):
        self.counts[what] += 1

    def timed(self, place, kind, function):
        """function, whose own time counts, without that of timed ones that
        it calls."""
        @functools.wraps(function)
        def timed(*args, **kwargs):
            if kind == 'Placement' and place is None:
                self.count('Placement requests', process())
            calls = self._local.__dict__.setdefault('calls', [])
            here = place or (calls[-1][0] if calls else NOVAS_OWN)
            self.count(here, kind)
            calls.append([here, 0.0, 0.0])
            start, began = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = 1000 * (time.perf_counter() - start)
                worked = 1000 * (time.thread_time() - began)
                _, inner_spent, inner_worked = calls.pop()
                self.spent[here, kind] += spent - inner_spent
                self.worked[here, kind] += worked - inner_worked
                if calls:
                    calls[-1][1] += spent
                    calls[-1][2] += worked
        return timed

    def statement(self, sql):
        self.count('claim store', 'statements')
        if sql.startswith('COMMIT'):
            self.count('claim store', 'commits')

    def audit(self, event, _args):
        if event in ('subprocess.Popen', 'os.fork', 'os.posix_spawn'):
            self.count('subprocesses', 'all')


def process():
    """Which process of a cloud the present request would come from."""
    frame = sys._getframe(2)
    while frame:
        module = frame.f_globals.get('__name__', '')
        for prefix, name in PROCESSES:
            if module.startswith(prefix):
                return name
        frame = frame.f_back
    return 'others'


class Metered:
    """Before AcceleratorTestBase: a cloud with a meter in it."""

    #: place, kind, where it is: ours, and what Nova's fixtures replace
    TIMED = OURS
    NOVAS = NOVAS

    def setUp(self):
        self.meter = Meter()
        # not sqlalchemy's, which takes it from sqlite3.dbapi2
        self._patch(store_file.sqlite3, 'connect', self._watched)
        self._time(self.TIMED)
        super().setUp()
        self._time(self.NOVAS)
        sys.addaudithook(self.meter.audit)

    def _time(self, places):
        for place, kind, owner, name in places:
            self._patch(owner, name, functools.partial(
                self.meter.timed, place, kind))

    def _patch(self, owner, name, wrap):
        self.useFixture(fixtures.MockPatchObject(
            owner, name, wrap(getattr(owner, name))))

    def _watched(self, connect):
        def watched(*args, **kwargs):
            connection = connect(*args, **kwargs)
            connection.set_trace_callback(self.meter.statement)
            return connection
        return watched


class Boots(Metered, base.AcceleratorTestBase):

    FRESH_CLOUD = True
    HOSTS = {'ours1': {'cards': [base.card('0000:5e:00.0')]},
             'ours2': {'cards': [base.card('0000:5e:00.0')]}}

    def setUp(self):
        self.done = threading.Event()
        self._patch(manager.ComputeManager, '_build_and_run_instance',
                    self._telling)
        super().setUp()
        self.flags(compute_driver='libvirt.LibvirtDriver')
        for host in ('stock1', 'stock2'):
            # the imitation of libvirt looks there for every host
            self.describe_host(host, {'cards': []})
            self.start_compute(host)
        for zone in ('ours', 'stock'):
            aggregate = self._create_aggregate(zone, availability_zone=zone)
            for number in (1, 2):
                self.admin_api.add_host_to_aggregate(
                    aggregate, f'{zone}{number}')

    def _telling(self, function):
        @functools.wraps(function)
        def telling(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            finally:
                self.ended = time.perf_counter()
                self.done.set()
        return telling

    def runTest(self):
        boots = int(sys.argv[1]) if len(sys.argv) > 1 else 15
        self.write_profiles({'name': 'nlb0', 'groups': [{
            'resources:CUSTOM_ACCELERATOR_FPGA': 1,
            'accel:function_id': base.NLB0}]})
        plain = self._create_flavor()
        profile = self._create_flavor(
            extra_spec={'accel:device_profile': 'nlb0'})
        kinds = {'stock': (plain, 'stock'), 'ours': (plain, 'ours'),
                 'accelerator': (profile, 'ours')}
        results = {kind: [] for kind in kinds}
        for number in range(boots + 2):
            for kind, (flavor, zone) in kinds.items():
                result = self.measure(flavor, zone)
                # the first ones also warm up Python
                if number > 1:
                    results[kind].append(result)
        show(boots, results)

    def measure(self, flavor, zone):
        """(milliseconds, counts, ours, ours by processor) of one boot."""
        body = self._build_server(flavor_id=flavor, networks='none', az=zone)
        self.done.clear()
        self.meter.clear()
        glance = len(self.glance.service.requests())
        start = time.perf_counter()
        server = self.api.post_server({'server': body})
        self.assertTrue(self.done.wait(60))
        wall = 1000 * (self.ended - start)
        counts, spent, worked = self.meter.read()
        counts['Glance requests', 'all'] = len(
            self.glance.service.requests()) - glance
        self._wait_for_state_change(server, 'ACTIVE')
        self._delete_server(server)
        return wall, counts, spent, worked


def show(boots, results):
    def medians(pick):
        return [statistics.median(map(pick, results[k])) for k in results]

    def line(name, values, form, *more):
        print(f'{name:38}' + ''.join(f'{v:{form}}' for v in (*values, *more)),
              file=OUT)

    def ours(name, pick):
        """Wall clock of each kind, and processor time of the last one."""
        line(f'  {name}', medians(lambda r: pick(r[2])), '12.2f',
             medians(lambda r: pick(r[3]))[2])

    rows = sorted({key for found in results.values() for result in found
                   for key in (*result[1], *result[2])})
    print(f'median of {boots} boots each\n{"":38}'
          + ''.join(f'{k:>12}' for k in results), file=OUT)
    for row in rows:
        if not any(row in r[2] for found in results.values() for r in found):
            line(', '.join(row), medians(lambda r: r[1][row]), '12.0f')
    walls = medians(lambda r: r[0])
    line('whole boot, ms', walls, '12.1f')
    line('ratio to stock', [wall / walls[0] for wall in walls], '12.2f')
    line("of which Nova's Placement requests", medians(
        lambda r: r[2][NOVAS_OWN, 'Placement']), '12.1f')
    print(f'{"of which ours, ms":86}{"processor":>12}', file=OUT)
    places = [row for row in rows if row[0] != NOVAS_OWN
              and any(row in r[2] for found in results.values()
                      for r in found)]
    for row in places:
        ours(', '.join(row), lambda times: times[row])
    ours('all but the wait', lambda times: sum(
        times[row] for row in places if row != WAIT))
    ours('all but plug, which the wait is for', lambda times: sum(
        times[row] for row in places if row[0] != 'nova-compute, plug'))


OUT = sys.stdout


def main(case=Boots):
    """Run a case and end the process."""
    logging.disable(logging.CRITICAL)
    result = unittest.TestResult()
    with contextlib.redirect_stderr(io.StringIO()):
        case().run(result)
    for _, trace in result.errors + result.failures:
        print(trace)
    OUT.flush()
    # threads of a service must not keep the process
    os._exit(not result.wasSuccessful())


if __name__ == '__main__':
    main()
