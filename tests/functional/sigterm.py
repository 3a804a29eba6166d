# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute gets SIGTERM at random moments, while it has much to do.

``python -m tests.functional.sigterm TRIALS`` starts and stops Nova's own main()
as many times (compute_process), and fails if one stop is not heard or does not
end. ``--without=waker`` or ``--without=workers`` (a thread for each call), or
both, shows what would be without these.

Servers with disks, FPGAs and without accelerators are created and deleted
through nova-api, and devices are scanned without a pause.
"""

import argparse
import contextlib
import functools
import os
import random
import select
import signal
import sys
import threading
import time
import traceback

from nova_accel.host import limited
from nova_accel.host import signals
from tests.functional import compute_process

#: seconds in which a signal is heard, and in which the process ends then, on a
#: loaded machine
HEARD, ENDED = 30, 120
#: in which it starts and builds a server
BUILT = 240
#: seconds of work after the first server, at most, before the signal
WORK = 2
SPECS = ({f'resources{group}:CUSTOM_ACCELERATOR_SSD': '1'
          for group in range(1, 5)},
         {'resources1:CUSTOM_ACCELERATOR_FPGA': '1'}, {})


def _work(cloud, ends, tell):
    """Create servers, and delete those that are built.

    Those of the stops before are deleted, too, and not waited for: of some
    the request to build them stays, which Nova shows as a server that is being
    built. Three of these would leave nothing to do.
    """
    mine: set[str] = set()
    while not ends.is_set():
        # as it stops, what nova-compute does fails
        with contextlib.suppress(Exception):
            servers = cloud.api.get_servers()
            building = 0
            for server in servers:
                if server['status'] not in ('ACTIVE', 'ERROR'):
                    if server['id'] in mine:
                        building += 1
                        continue
                elif server['id'] in mine:
                    os.write(
                        tell, b'b' if server['status'] == 'ACTIVE' else b'e')
                with contextlib.suppress(Exception):
                    cloud.api.delete_server(server['id'])
            if building < len(SPECS):
                for specs in SPECS:
                    mine.add(cloud.begin_server(specs))
        ends.wait(0.1)


def _scan(cloud, ends):
    while not ends.is_set():
        with contextlib.suppress(Exception):
            cloud.accelerators(compute_process.HOST).inventory.scanner.scan()


def compute(cloud, without: frozenset[str], tell: int) -> None:
    """Run nova-compute in this process until SIGTERM comes.

    :param tell: descriptor to which 'b' is written for each server that is
        built, and 's' when nova-compute begins to stop.
    """
    if 'workers' in without:
        limited._MOST_IDLE = 0
    if 'waker' in without:
        signals.Waker.start = lambda waker: None
    cloud.start_others([compute_process.HOST])
    ends = threading.Event()

    def started(service):
        if 'waker' not in without and not cloud.hears_signals():
            raise AssertionError('Nothing wakes the main thread.')
        for work in (functools.partial(_work, tell=tell), _scan):
            threading.Thread(target=work, args=(cloud, ends),
                             daemon=True).start()

    def stopping():
        ends.set()
        os.write(tell, b's')
    compute_process.run_main(cloud, started, stopping)


def _await(descriptor, mark, seconds):
    """Read until a mark comes.

    :returns: how many servers were built meanwhile; None where it did not
        come.
    """
    end, built = time.monotonic() + seconds, 0
    while select.select([descriptor], [], [],
                        max(0, end - time.monotonic()))[0]:
        read = os.read(descriptor, 1)
        built += read == b'b'
        if read == mark:
            return built
        if not read:
            break
    return None


def trial(cloud, random_: random.Random, without: frozenset[str],
          ) -> tuple[float | None, float | None, int]:
    """Start nova-compute and send it SIGTERM.

    :returns: seconds until it heard of it, and until it had ended, None where
        it did not; servers that were built.
    :raises AssertionError: it did not start, or died.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reads)
            compute(cloud, without, writes)
            os._exit(0)
        except BaseException:
            # Nova's harness swallows sys.stderr
            traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os.close(writes)
    try:
        if _await(reads, b'b', BUILT) is None:
            raise AssertionError(
                f'nova-compute built no server in {BUILT} s, or ended before')
        time.sleep(random_.uniform(0, WORK))
        began = time.monotonic()
        os.kill(child, signal.SIGTERM)
        built = _await(reads, b's', HEARD)
        if built is None:
            return None, None, 0
        heard = time.monotonic() - began
        while time.monotonic() < began + HEARD + ENDED:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                if os.waitstatus_to_exitcode(status):
                    raise AssertionError(f'nova-compute ended with {status}')
                return heard, time.monotonic() - began, built + 1
            time.sleep(0.01)
        return heard, None, built + 1
    finally:
        os.close(reads)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def stops(cloud, trials: int, seed: int, without: frozenset[str],
          ) -> list[tuple[float | None, float | None, int]]:
    """Stop nova-compute after nova-compute in a cloud of compute_process.

    :returns: of each what trial() does.
    """
    random_ = random.Random(seed)
    for specs in SPECS:
        cloud.flavor_of(specs)
    compute_process.close_databases()
    took: list[tuple[float | None, float | None, int]] = []
    for number in range(1, trials + 1):
        try:
            took.append(trial(cloud, random_, without))
        except AssertionError as error:
            # Nova's harness swallows sys.stderr
            print(f'Trial {number}: {error}', file=sys.__stderr__, flush=True)
            took.append((None, None, 0))
        if None in took[-1] or not number % 20:
            print(f'Trial {number}: {took[-1]}', file=sys.__stderr__,
                  flush=True)
    return took


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument('trials', type=int)
    parser.add_argument('--without', default='')
    parser.add_argument('--seed', type=int, default=None)
    options = parser.parse_args(arguments)
    seed = options.seed or random.randrange(1 << 30)
    cloud = compute_process.build()
    took = stops(cloud, options.trials, seed,
                 frozenset(filter(None, options.without.split(','))))
    for what, found in (('not heard', [heard for heard, _, _ in took]),
                        ('not ended', [ended for _, ended, _ in took])):
        there = sorted(seconds for seconds in found if seconds is not None)
        print(f'SIGTERM: {len(found) - len(there)} of {len(found)} {what}; '
              + (f'the others after {there[len(there) // 2]:.2f} s (median), '
                 f'at most {there[-1]:.2f} s; ' if there else '')
              + f'seed {seed}', flush=True)
    print(f'{sum(built for _, _, built in took)} servers were built meanwhile')
    compute_process.close_databases()
    cloud._ends.close()
    return any(None in trial for trial in took)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
