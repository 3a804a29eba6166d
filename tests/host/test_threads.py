# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute creates few threads: one that begins or ends may take SIGTERM
away from the main thread (host.signals)."""

import threading
import time

import fixtures

from tests.host import base
from tests import limits

DISKS = [f'0000:{bus:02x}:00.0' for bus in range(1, 25)]
SSD = 'CUSTOM_ACCELERATOR_SSD'
SPECS = {f'resources{group}:{SSD}': '1' for group in range(1, 9)}


class ThreadsTest(base.HostTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.created = 0
        start = threading.Thread.start

        def count(thread):
            self.created += 1
            start(thread)
        self.useFixture(fixtures.MonkeyPatch('threading.Thread.start', count))

    def created_by(self, function, *args):
        self.created = 0
        result = function(*args)
        while limits.at_work():
            # lets green threads run
            time.sleep(0.001)
        return result, self.created

    def test_few(self):
        # a process that has just begun
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.limited._IDLE', []))
        _, start = self.created_by(lambda: self.start_host(
            nvmes=[{'address': disk} for disk in DISKS], drivers=('nvme',)))
        _, scans = self.created_by(
            lambda: [self.host.inventory.scanner.scan() for _ in range(2)])
        allocation = {}
        for disk in DISKS[:8]:
            allocation.update(self.host.allocation(disk, SSD))
        server, boot = self.created_by(self.host.boot, SPECS, allocation)
        _, delete = self.created_by(self.host.delete, server)
        # on a loaded machine all devices are scanned side by side
        self.assertLess(start, 35)
        # one for each call would be 48, 9 and 24
        self.assertLess(scans + boot + delete, 15)
