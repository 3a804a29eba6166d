# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What it costs to schedule a server with k of n devices that are alike.

Simulated GPUs of one host, real nova-api, conductor, scheduler, nova-compute
and Placement in one process (tests.functional.base), in three ways:

each     a provider for each GPU ([accel] pools = none), and k groups of one
options  the same, with the options of Placement that nova-accel check asks for:
         [workarounds] optimize_for_wide_provider_trees, and [placement]
         max_allocation_candidates = 1000 and
         allocation_candidates_generation_strategy = breadth-first
pool     one provider (the default), and one group of k

Run with ``python -m tests.bench.candidates [--limit SECONDS] [--ways WAY ...]
[NUMBER ...]``; k and n are the numbers, by default 1, 2, 4, 8 and 16.

Printed for each boot: the candidates that nova-scheduler got, of which Nova
takes 1000 at most ([scheduler] max_placement_results), beside n! / (n - k)!,
the orders of k of n devices; milliseconds of the processor in which Placement
answered; and milliseconds from the request to the API until nova-compute is
done with the build. Each n of each way has a process of its own. What takes
longer than the limit, or more than 4 GiB of memory, is ended and says so, and
greater k are not tried.

Times are of one boot in one process with SQLite in place of a database server:
compare them with each other.
"""

import argparse
import contextlib
import functools
import io
import json
import math
import os
import resource
import select
import subprocess
import sys
import time
import unittest

LIMIT = 60
NUMBERS = (1, 2, 4, 8, 16)
#: of a process, bytes
MEMORY = 4 << 30
#: seconds until a process has its cloud
START = 300
CLASS = 'CUSTOM_ACCELERATOR_GPU'
WAYS = ('each', 'options', 'pool')
FORM = '{:8} {:>3} {:>3} {:>10} {:>16} {:>12} {:>10}'


def work(way, devices, limit):
    """In a process of its own: print a line of JSON for each k."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    import fixtures

    from tests.bench import boot
    from nova.scheduler.client import report  # noqa: I100 (after base)
    from nova.tests.functional import fixtures as nova_fixtures

    class Boots(boot.Boots):

        HOSTS = {'compute1': {'gpus': [
            {'address': f'0000:{0x10 + n:02x}:00.0', 'iommu_group': 10 + n}
            for n in range(devices)]}}

        def setUp(self):
            self.asked = []
            # all but the hosts of boot.Boots
            self.done = boot.threading.Event()
            self._patch(boot.manager.ComputeManager,
                        '_build_and_run_instance', self._telling)
            boot.Metered.setUp(self)
            # after Nova's fixtures, which replace it
            self._patch(report.SchedulerReportClient, 'get', self._watching)

        def build(self):
            if way == 'options':
                self.useFixture(fixtures.MonkeyPatch(
                    'nova.tests.functional.fixtures.PlacementFixture.'
                    '_configure_placement', _with_options(
                        nova_fixtures.PlacementFixture
                        ._configure_placement)))
            super().build()

        def _setup_compute_service(self):
            super()._setup_compute_service()
            self.flags(enabled_drivers=['gpu'], group='accel',
                       pools='host' if way == 'pool' else 'none')

        def _watching(self, get):
            @functools.wraps(get)
            def watching(client, url, *args, **kwargs):
                start = time.process_time()
                answer = get(client, url, *args, **kwargs)
                if url.startswith('/allocation_candidates'):
                    self.asked.append((
                        1000 * (time.process_time() - start),
                        len(answer.json()['allocation_requests'])
                        if answer else 0))
                return answer
            return watching

        def runTest(self):
            # imports and caches of Python
            self.measure_one(1)
            tell('ready')
            for k in sorted(map(int, sys.stdin.readline().split())):
                tell(self.measure_one(k))

        def measure_one(self, k):
            groups = [k] if way == 'pool' else [1] * k
            flavor = self._create_flavor(extra_spec={
                **{f'resources{number}:{CLASS}': str(amount)
                   for number, amount in enumerate(groups, 1)},
                **({'group_policy': 'isolate'} if len(groups) > 1 else {})})
            self.done.clear()
            self.asked.clear()
            start = time.perf_counter()
            server = self.api.post_server({'server': self._build_server(
                flavor_id=flavor, networks='none')})
            while not self.done.wait(0.1):
                status = self.api.get_server(server['id'])['status']
                if status == 'ERROR':
                    return {'k': k, 'error': 'no valid host'}
                if time.perf_counter() - start > limit:
                    return {'k': k, 'error': 'no end'}
            wall = 1000 * (self.ended - start)
            self._wait_for_state_change(server, 'ACTIVE')
            self._delete_server(server)
            (milliseconds, candidates), = self.asked
            return {'k': k, 'candidates': candidates, 'boot': wall,
                    'placement': milliseconds}

    def _with_options(configure):
        def configured(fixture, conf):
            configure(fixture, conf)
            conf.config(optimize_for_wide_provider_trees=True,
                        group='workarounds')
            conf.config(
                max_allocation_candidates=1000, group='placement',
                allocation_candidates_generation_strategy='breadth-first')
        return configured

    def tell(what):
        print(json.dumps(what), file=out, flush=True)

    out = sys.stdout
    logging = boot.logging
    logging.disable(logging.CRITICAL)
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()):
        Boots().run(result)
    for _, trace in result.errors + result.failures:
        print(trace, file=sys.stderr)
    out.flush()
    os._exit(not result.wasSuccessful())


class Worker:
    """The process of one way and one n."""

    def __init__(self, way, devices, limit):
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'tests.bench.candidates', '--limit',
             str(limit), '--work', way, str(devices)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL)

    def ask(self, amounts):
        self._process.stdin.write(
            f'{" ".join(map(str, amounts))}\n'.encode())
        self._process.stdin.flush()

    def answer(self, seconds):
        """What it tells next; None where it does not in time, or ended."""
        if select.select([self._process.stdout], [], [], seconds)[0]:
            line = self._process.stdout.readline()
            return json.loads(line) if line else None
        return None

    def end(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def measure(way, devices, amounts, limit):
    worker = Worker(way, devices, limit)
    try:
        if worker.answer(START) != 'ready':
            print(FORM.format(way, '', devices, 'has no', 'cloud', '', ''))
            return
        worker.ask(amounts)
        ended = False
        for k in amounts:
            orders = f'{math.perm(devices, k):,}' if way != 'pool' else '1'
            answer = None if ended else worker.answer(limit)
            if answer is None or 'error' in answer:
                why = ('not tried' if ended else
                       answer['error'] if answer else f'> {limit} s')
                ended = True
                found = '-', orders, '-', why
            else:
                found = (answer['candidates'], orders,
                         f'{answer["placement"]:.1f}',
                         f'{answer["boot"]:.0f}')
            print(FORM.format(way, k, devices, *found), flush=True)
    finally:
        worker.end()


def main():
    parser = argparse.ArgumentParser(prog='python -m tests.bench.candidates')
    parser.add_argument('--limit', type=int, default=LIMIT, metavar='SECONDS')
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=WAYS)
    parser.add_argument('--work', choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument('numbers', nargs='*', type=int)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.numbers[0], args.limit)
    numbers = sorted(args.numbers or NUMBERS)
    print(FORM.format('way', 'k', 'n', 'candidates', 'orders',
                      'Placement ms', 'boot ms'))
    for way in args.ways:
        for devices in numbers:
            measure(way, devices, [k for k in numbers if k <= devices],
                    args.limit)


if __name__ == '__main__':
    main()
