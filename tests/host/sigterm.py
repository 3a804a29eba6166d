# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute gets SIGTERM at random moments, while it has much to do.

``python -m tests.host.sigterm TRIALS`` starts and stops as many processes, and
fails if one does not end. ``--without=waker`` or ``--without=workers`` (a
thread for each call), or both, shows what would be without these.

The process is oslo.service's own launcher, called as nova.service.serve() of
Nova 34 calls it, in the main thread, with the driver's init_host() as far as
accelerators go: 18 devices, which are scanned without a pause, while servers
are built and deleted. Nova's manager, its message bus and libvirt are not in
it: their threads make the fault neither rarer nor more frequent, as none of
them begins or ends per call.
"""

import argparse
import inspect
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback

from oslo_service import backend

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel.host import signals
from tests.host import base
from tests.unit import host as simulated

DISKS = [f'0000:{bus:02x}:00.0' for bus in range(1, 17)]
SSD = 'CUSTOM_ACCELERATOR_SSD'
SPECS = {f'resources{group}:{SSD}': '1' for group in range(1, 5)}
#: seconds in which a process ends on a loaded machine
PATIENCE = 30
#: seconds of work, at most, before the signal
WORK = 1.5


def is_possible() -> bool:
    """Return whether this oslo.service has the launcher that Nova 34 uses."""
    try:
        from oslo_service.backend._threading import service
    except ImportError:
        return False
    return 'no_fork' in inspect.signature(service.launch).parameters


def _work(host):
    """Build and delete servers, for as long as the process lives."""
    allocation = {}
    for disk in DISKS[:4]:
        allocation.update(host.allocation(disk, SSD))
    while True:
        try:
            host.delete(host.boot(SPECS, allocation))
        except exception.AcceleratorError:
            # nova-compute stops
            return


def _scan(host):
    while True:
        host.inventory.scan()


def compute(directory: str, without: frozenset[str], ready: int) -> None:
    """Run nova-compute in this process until SIGTERM comes.

    :param ready: descriptor to which a byte is written before the work begins.
    """
    backend.init_backend(backend.BackendType.THREADING)
    from oslo_service import service
    cards = simulated.SimulatedHost(
        *({'address': a, 'vfs': 1} for a in (simulated.A, simulated.B)),
        nvmes=[{'address': disk} for disk in DISKS])
    cards.setUp()
    conf.CONF([])
    for name, value in dict(
            enabled_drivers=['nvme', 'dfl'], pools='none',
            include_devices=['address=*'], simulated_host=cards.path,
            bitstream_cache=os.path.join(directory, 'cache')).items():
        conf.CONF.set_override(name, value, 'accel')
    if 'workers' in without:
        limited._MOST_IDLE = 0

    class Compute(service.Service):

        def start(self):
            super().start()
            if 'waker' not in without:
                signals.Waker().start()
            self.host = base.Host(directory, cards.path).start()
            for work in (_work, _scan):
                threading.Thread(target=work, args=(self.host,),
                                 daemon=True).start()
            # what the main thread waits for, as that of nova.service.Service
            self.tg.add_timer(10, lambda: None)
            os.write(ready, b'r')

        def stop(self, graceful=True):
            self.host.accelerators.close()
            super().stop(graceful)

    service.launch(conf.CONF, Compute(), workers=1, restart_method='mutate',
                   no_fork=True).wait()


def trial(random_: random.Random, without: frozenset[str]) -> float | None:
    """Start nova-compute and send it SIGTERM.

    :returns: seconds until it ended; None where it did not.
    :raises AssertionError: it did not start, or died.
    """
    with tempfile.TemporaryDirectory() as directory:
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(reads)
                compute(directory, without, writes)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(writes)
        try:
            if not (select.select([reads], [], [], 120)[0]
                    and os.read(reads, 1)):
                raise AssertionError('nova-compute did not start')
            time.sleep(random_.uniform(0, WORK))
            began = time.monotonic()
            os.kill(child, signal.SIGTERM)
            while time.monotonic() < began + PATIENCE:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    child = 0
                    # oslo.service's handler ends so
                    if os.waitstatus_to_exitcode(status):
                        raise AssertionError(
                            f'nova-compute ended with {status}')
                    return time.monotonic() - began
                time.sleep(0.01)
            return None
        finally:
            os.close(reads)
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument('trials', type=int)
    parser.add_argument('--without', default='')
    parser.add_argument('--seed', type=int, default=None)
    options = parser.parse_args(arguments)
    if not is_possible():
        print('This oslo.service has no launcher for native threads.')
        return 0
    seed = options.seed or random.randrange(1 << 30)
    random_ = random.Random(seed)
    without = frozenset(filter(None, options.without.split(',')))
    took = [trial(random_, without) for _ in range(options.trials)]
    heard = sorted(seconds for seconds in took if seconds is not None)
    print(f'SIGTERM: {len(took) - len(heard)} of {len(took)} not heard; '
          + (f'the others after {heard[len(heard) // 2]:.2f} s (median), at '
             f'most {heard[-1]:.2f} s; ' if heard else '') + f'seed {seed}')
    return len(took) != len(heard)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
