# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The door to Nova holds Nova's own lock."""

import threading
import types
import uuid

import fixtures
from nova.compute import resource_tracker
from nova import exception as nova_exception
from nova import objects
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


class TellTest(testtools.TestCase):

    def test_database_that_does_not_answer(self):
        """The server starts all the same, and Nova writes no metadata."""
        log = self.useFixture(fixtures.FakeLogger('nova_accel.virt.cloud'))
        objects.register_all()
        instance = objects.Instance(uuid=str(uuid.uuid4()),
                                    metadata={'mine': 'kept'})
        instance.obj_reset_changes()
        door = cloud.NovaCloud(types.SimpleNamespace(_set_managed_mode=None))
        self.useFixture(fixtures.MockPatchObject(
            objects.Instance, 'get_by_uuid',
            side_effect=nova_exception.CellTimeout()))
        door.tell(instance, {'accel1:function': 'crypto'})
        self.assertEqual({'mine': 'kept'}, instance.metadata)
        self.assertEqual(set(), instance.obj_what_changed())
        self.assertIn('is not told', log.output)
