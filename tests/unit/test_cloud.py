# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The door to Nova holds Nova's own lock."""

import json
import threading
import types
import uuid

import fixtures
from nova.compute import resource_tracker
from nova import exception as nova_exception
from nova import objects
from nova.scheduler.client import report
from nova import utils
import requests
import testtools

from nova_accel import exception
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


class ConsumersTest(testtools.TestCase):
    """Who uses a provider, asked of Nova's own client."""

    def consumers(self, *answers):
        client = report.SchedulerReportClient(types.SimpleNamespace())
        self.useFixture(fixtures.MockPatchObject(
            client, 'get', side_effect=answers))
        door = cloud.NovaCloud(types.SimpleNamespace(
            _set_managed_mode=None,
            virtapi=types.SimpleNamespace(reportclient=client)))
        return door.consumers(str(uuid.uuid4()))

    @staticmethod
    def answer(status, **content):
        answer = requests.Response()
        answer.status_code = status
        answer._content = json.dumps(content).encode()
        return answer

    def test_provider_that_is_being_created(self):
        """It was not there when it was asked for: no second request, which a
        report of nova-compute may answer otherwise."""
        self.assertEqual(set(), self.consumers(
            self.answer(404, errors=[{'status': 404}])))

    def test_consumers(self):
        self.assertEqual({'a server'}, self.consumers(
            self.answer(200, allocations={'a server': {}})))

    def test_other_errors(self):
        for status, content in ((503, {}), (500, {
                'errors': [{'status': 500}]})):
            self.assertIn('see that it answers', str(self.assertRaises(
                exception.PlacementUnavailable, self.consumers,
                self.answer(status, **content))))
