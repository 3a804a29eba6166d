# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The door to Nova holds Nova's own lock."""

import threading

from nova.compute import resource_tracker
from nova import utils
import testtools

from nova_accel.virt import cloud


class ReportingTest(testtools.TestCase):

    def test_nova_does_not_report_meanwhile(self):
        reported = threading.Event()

        @utils.synchronized(resource_tracker.COMPUTE_RESOURCE_SEMAPHORE,
                            fair=True)
        def report():
            reported.set()
        nova = threading.Thread(target=report)
        with cloud.NovaCloud.reporting(None):
            nova.start()
            self.assertFalse(reported.wait(0.2))
        self.assertTrue(reported.wait(5))
        nova.join()
