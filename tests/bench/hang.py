# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a build costs while one of eight cards hangs.

One host with eight cards of the driver pci in one pool, and nova-compute's
verbs on it (tests.host.base), without Nova: a server is built with a card and
deleted, while looks follow one another. Run with ``python -m tests.bench.hang
[builds]``.

=========  ===================================================================
none       no card hangs
begins     reads of one card hang, and [accel] discovery_timeout is not over:
           nova-compute does not know it yet
fenced     it is over; the card is fenced, and its call still hangs
=========  ===================================================================

Milliseconds are of the wall, the median and the longest; "looks" are those that
ended meanwhile: the one that waits for the card does not. The card that hangs
is the last one of the pool. Not measured: what Nova does.
"""

import statistics
import sys
import threading
import time

from tests.bench import boot
from tests.host import base

BUILDS = int(sys.argv[1]) if len(sys.argv) > 1 else 50
CARD = 'CUSTOM_ACCELERATOR_CARD'
#: seconds between two looks
_PAUSE = 0.1
CARDS = tuple(f'0000:{number:02x}:00.0' for number in range(2, 10))


class Hang(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.config.config(
            group='accel', health=['act'], discovery_interval=3600,
            discovery_timeout=60, pci_devices=['vendor=8086 type=CARD'])
        self.start_host(drivers=('pci',), others=[
            {'address': address, 'bridges': ['pci0000:00', f'0000:00:{n}.0']}
            for n, address in enumerate(CARDS, 10)])
        self.look()

    def look(self):
        self.host.inventory.looks.run()

    def build(self):
        start = time.perf_counter()
        server = self.host.boot({f'resources1:{CARD}': '1'},
                                self.host.allocation(None, CARD))
        took = time.perf_counter() - start
        self.assertNotEqual([CARDS[-1]], self.host.devices_of(server))
        self.host.delete(server)
        return took

    def measure(self, what):
        ends, looks = threading.Event(), []

        def look():
            while not ends.wait(_PAUSE):
                self.look()
                looks.append(1)
        self.thread = threading.Thread(target=look, daemon=True)
        self.thread.start()
        # the first look is under way
        time.sleep(2 * _PAUSE)
        found = [1000 * self.build() for _ in range(BUILDS)]
        ends.set()
        print(f'{what:8}{statistics.median(found):10.1f}{max(found):10.1f}'
              f'{len(looks):8}', file=boot.OUT)

    def runTest(self):
        self.build()
        print(f'{BUILDS} builds with one of {len(CARDS)} cards, ms\n'
              f'{"hangs":8}{"median":>10}{"longest":>10}{"looks":>8}',
              file=boot.OUT)
        self.measure('none')
        self.thread.join()
        self.hang('read')
        self.measure('begins')
        self.hang(None)
        self.thread.join()
        self.config.config(group='accel', discovery_timeout=1)
        self.hang('read')
        self.addCleanup(self.hang, None)
        self.look()
        self.assertIn('did not end',
                      self.host.inventory.cards.hanging(CARDS[-1]))
        self.measure('fenced')

    def hang(self, what):
        self.host.kernel.set_fault(CARDS[-1], hang=what)


if __name__ == '__main__':
    boot.main(Hang)
