# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How long a fault that only polling finds takes to be seen by others.

A host with cards of the driver pci, each of a server, and nova-compute's parts
(tests.host.base) with a small cloud in place of Nova. A card gets a fault in
the simulated kernel at a random moment between two glances: fewer lanes of its
link, or an uncorrectable PCIe error. The time ends when Placement has the
trait, the metadata of the server the word, and the file of metrics the finding.
Run with ``python -m tests.bench.notice [faults]``.

The clock is simulated in one place: the thread that waits between two glances
waits until the fault is there, and the rest of its wait is added. All other
work really runs and is measured: the reading of all cards, what is concluded,
the changes of Placement, of the metadata and of the file. Nova's periodic task
does not run: with it the time is the same or shorter. "busy" is with a thread
that boots and deletes servers without a pause.

Not measured: what Placement and nova-conductor take to write.
"""

import os
import random
import statistics
import sys
import threading
import time

from tests.bench import boot

from nova_accel.host import limited  # noqa: I100 (boot chooses the threading)
from nova_accel.inventory import looks
from nova_accel import naming
from nova_accel.sim import tree
from tests.host import health

FAULTS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
CARDS = tuple(f'0000:{number:02x}:00.0' for number in range(2, 12))
#: seconds from a glance to the next; its thread checks the time once a second
PERIOD = looks._PART * 60 + 1


class Clock(threading.Event):
    """Nova-compute's event "closed", whose waits the benchmark ends."""

    def __init__(self):
        super().__init__()
        self._waits, self._ends = threading.Event(), threading.Event()

    def wait(self, timeout=None):
        assert timeout == 1, timeout
        self._waits.set()
        while not (self.is_set() or self._ends.wait(0.1)):
            pass
        self._ends.clear()
        return self.is_set()

    def tick(self):
        """Let the next glance begin, once the one before has ended."""
        self._waits.wait()
        self._waits.clear()
        self.glances._asked_at = float('-inf')
        self._ends.set()


class Notice(health.HealthTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.metrics = os.path.join(self.directory, 'x.prom')
        self.start(*CARDS, metrics_file=self.metrics)
        self.config.config(group='accel', discovery_interval=60)
        # in place of the one that waits
        self.clock = self.host.inventory.looks._closed = Clock()
        self.clock.glances = self.host.inventory.looks.glances
        limited.start(self.host.inventory.looks._poll)
        self.random = random.Random(58)
        self.servers = {a: self.boot(address=a) for a in CARDS[:-1]}
        self.look()

    def runTest(self):
        print(f'{FAULTS} faults, seconds until Placement, metadata and '
              f'metrics show them\n'
              f'{"host":8}{"median":>10}{"longest":>10}{"of it work":>12}',
              file=boot.OUT)
        self.measure('idle')
        ends = threading.Event()

        def work():
            while not ends.is_set():
                self.host.delete(self.boot(address=CARDS[-1]))
        busy = threading.Thread(target=work, daemon=True)
        busy.start()
        self.measure('busy')
        ends.set()
        busy.join()

    def measure(self, what):
        found, work = [], []
        for number in range(FAULTS):
            address = CARDS[number % (len(CARDS) - 1)]
            of_link = number % 10 or what == 'busy'
            name = 'aer_dev_nonfatal'
            self.host.kernel.set_fault(address, attributes=(
                health.WORN if of_link else
                {name: tree.errors(name, MalfTLP=number + 1)}))
            waited = self.random.uniform(0, PERIOD)
            began = time.perf_counter()
            self.clock.tick()
            self.wait(address, lambda seen: all(seen))
            work.append(time.perf_counter() - began)
            found.append(waited + work[-1])
            self.host.kernel.set_fault(address, attributes={})
            # a server later
            self.host.inventory.health.restart_counters(address)
            self.look()
            self.wait(address, lambda seen: not any(seen))
        print(f'{what:8}{statistics.median(found):10.2f}{max(found):10.2f}'
              f'{max(work):12.2f}', file=boot.OUT)

    def wait(self, address, condition):
        while not condition(self.seen(address)):
            time.sleep(0.01)

    def seen(self, address):
        """Whether Placement, the owner and monitoring see a finding."""
        state = self.host.cloud.read()
        uuid_, = self.host.allocation(address, health.CARD)
        with open(self.metrics) as file:
            return (
                naming.SUSPECT in state['providers'][uuid_]['traits'],
                naming.health_key('1') in state['servers'][
                    self.servers[address]]['metadata'],
                any(line.startswith('nova_accel_device_finding')
                    and address in line for line in file))


if __name__ == '__main__':
    boot.main(Notice)
