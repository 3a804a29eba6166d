# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The door to Nova holds Nova's own lock."""

import json
import threading
import types
from unittest import mock
import uuid

import fixtures
from keystoneauth1 import exceptions as ks_exc
from nova.compute import resource_tracker
from nova import exception as nova_exception
from nova import objects
from nova.scheduler.client import report
from nova import utils
import requests
import testtools

from nova_accel import exception
from nova_accel.virt import cloud
from tests.unit.answers import DEEP


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
        door.change_metadata(instance, {'accel1:function': 'crypto'})
        self.assertEqual({'mine': 'kept'}, instance.metadata)
        self.assertEqual(set(), instance.obj_what_changed())
        self.assertIn('does not show', log.output)


class FaultTest(testtools.TestCase):
    """The owner of a server reads what Placement did not say."""

    def test_address_of_placement(self):
        client = report.SchedulerReportClient(types.SimpleNamespace())
        self.useFixture(fixtures.MockPatchObject(
            client, 'get', side_effect=ks_exc.ConnectFailure(
                'Unable to establish connection to http://secret.internal'
                ':8778/allocations/x: [Errno 111]')))
        door = cloud.NovaCloud(types.SimpleNamespace(
            _set_managed_mode=None,
            virtapi=types.SimpleNamespace(reportclient=client)))
        for ask in (lambda: door.allocations(
                door.admin_context(), 'x'),
                    lambda: door.find_providers(uuid='x')):
            error = self.assertRaises(exception.PlacementUnavailable, ask)
            self.assertIn('secret.internal', str(error))
            self.assertNotIn('secret', exception.for_owner(error))


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
            self.answer(200, allocations={
                'a server': {'resources': {}}})))

    def test_other_errors(self):
        for status, content in ((503, {}), (500, {
                'errors': [{'status': 500}]})):
            self.assertIn('check that it answers', str(self.assertRaises(
                exception.PlacementUnavailable, self.consumers,
                self.answer(status, **content))))


#: what a proxy sends with status 200, and JSON that is not Placement's
NOT_PLACEMENTS = (
    b'<html>Log in</html>', b'', b'{"allocations": {', b'\xff', b'[]', b'null',
    DEEP,
    b'{}', b'{"allocations": [], "resource_providers": {"x": 1}, "traits": 1, '
    b'"inventories": []}', b'{"allocations": {"x": 1}, '
    b'"resource_providers": [{}], "resource_provider_generation": 1}')


class NotPlacementTest(testtools.TestCase):
    """Another structure than Placement's is handled as a 503."""

    CALLS = (
        lambda door: door.allocations(door.admin_context(), 'x'),
        lambda door: door.consumers('x'),
        lambda door: door.find_providers(uuid='x'),
        lambda door: door.unknown_traits(['HW_NVME_CES']),
        lambda door: door.show('x', None, None),
        lambda door: door.consumers_of(['x']),
        lambda door: door._listed(door._get('/resource_providers', '1.14')))

    def test_every_call(self):
        for call in self.CALLS:
            for content in NOT_PLACEMENTS:
                answer = requests.Response()
                answer.status_code, answer._content = 200, content
                client = report.SchedulerReportClient(types.SimpleNamespace())
                with mock.patch.object(client, 'get', return_value=answer):
                    door = cloud.NovaCloud(types.SimpleNamespace(
                        _set_managed_mode=None,
                        virtapi=types.SimpleNamespace(reportclient=client)))
                    self.assertRaises(
                        exception.PlacementUnavailable, call, door)

    def test_reallocate(self):
        """What is not known is not written."""
        self.useFixture(fixtures.MockPatchObject(
            objects.Instance, 'get_by_uuid',
            return_value=types.SimpleNamespace(project_id='p', user_id='u')))
        for content in NOT_PLACEMENTS[:-2]:
            answer = requests.Response()
            answer.status_code, answer._content = 200, content
            client = report.SchedulerReportClient(types.SimpleNamespace())
            with mock.patch.object(client, 'get', return_value=answer), \
                    mock.patch.object(client, 'put_allocations') as put:
                door = cloud.NovaCloud(types.SimpleNamespace(
                    _set_managed_mode=None,
                    virtapi=types.SimpleNamespace(reportclient=client)))
                self.assertRaises(
                    exception.PlacementUnavailable, door.reallocate,
                    'server', 'x', {'provider': {'CLASS': 1}})
                put.assert_not_called()


class ShowTest(testtools.TestCase):
    """A provider is changed as it is, not as it was a moment before."""

    def setUp(self):
        super().setUp()
        self.uuid = str(uuid.uuid4())
        self.generation, self.reserved = 5, 0
        #: called with each request; may change what Placement has
        self.meanwhile = lambda method, url: None
        client = report.SchedulerReportClient(types.SimpleNamespace())
        for method in ('get', 'put'):
            self.useFixture(fixtures.MockPatchObject(
                client, method, side_effect=getattr(self, method)))
        self.useFixture(fixtures.MockPatchObject(client, '_ensure_traits'))
        self.door = cloud.NovaCloud(types.SimpleNamespace(
            _set_managed_mode=None,
            virtapi=types.SimpleNamespace(
                reportclient=client, _compute=types.SimpleNamespace(
                    rt=types.SimpleNamespace(provider_configs={
                        'name': {'inventories': {'additional': [
                            {'CUSTOM_Y': {}}, {'CUSTOM_Z': {}}]}},
                        self.uuid: {'traits': {}}})))))
        self.calls = []

    def get(self, url, **kwargs):
        self.meanwhile('get', url)
        return ConsumersTest.answer(
            200, resource_provider_generation=self.generation,
            inventories={'CUSTOM_X': {'total': 1, 'reserved': self.reserved}},
            traits=['CUSTOM_T'])

    def put(self, url, data, **kwargs):
        self.meanwhile('put', url)
        if data['resource_provider_generation'] != self.generation:
            return ConsumersTest.answer(409)
        self.generation += 1
        if 'inventories' in data:
            self.reserved = data['inventories']['CUSTOM_X']['reserved']
        return ConsumersTest.answer(
            200, resource_provider_generation=self.generation)

    def change(self, inventory, traits):
        """Add one."""
        reserved = inventory['CUSTOM_X']['reserved'] + 1
        self.calls.append((reserved - 1, self.generation))
        return {'CUSTOM_X': {'total': 1, 'reserved': reserved}}, {'CUSTOM_U'}

    def show(self):
        self.door.show(self.uuid, self.change,
                       lambda: self.calls.append('refused'))

    def once(self, method, part):
        """The operator reserves one more, before one request is answered."""
        def meanwhile(*request):
            if request[0] == method and part in request[1]:
                self.meanwhile = lambda method, url: None
                self.generation, self.reserved = (
                    self.generation + 1, self.reserved + 1)
        self.meanwhile = meanwhile

    def test_nothing_in_between(self):
        self.show()
        self.assertEqual(7, self.generation)
        self.assertEqual([(0, 5)], self.calls)

    def test_between_the_reads(self):
        self.once('get', 'traits')
        self.show()
        self.assertEqual(8, self.generation)
        self.assertEqual([(1, 6)], self.calls)

    def test_before_the_write(self):
        self.once('put', 'inventories')
        self.show()
        self.assertEqual([(0, 5), 'refused', (1, 6)], self.calls)

    def test_refused_and_then_away(self):
        """That it was refused is told, although it is not tried again."""
        def meanwhile(method, url):
            if self.calls:
                if method == 'get':
                    raise ks_exc.ConnectFailure()
                self.generation += 1
        self.meanwhile = meanwhile
        self.assertRaises(ks_exc.ConnectFailure, self.show)
        self.assertEqual([(0, 5), 'refused'], self.calls)

    def test_between_the_writes(self):
        """The inventory was taken, so that nothing of it was refused."""
        self.once('put', 'traits')
        self.show()
        self.assertEqual([(0, 5), (2, 7)], self.calls)

    def test_configured_classes(self):
        self.assertEqual(
            {self.uuid: set(), 'name': {'CUSTOM_Y', 'CUSTOM_Z'}},
            self.door.configured_classes())
