# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices that take long to be clean: who waits for them, and who does not.

Nova's start and its periodic tasks take one server after the other.
"""

import time

from nova.compute import task_states
from nova import context as nova_context
from nova import objects

from nova_accel import model
from tests.functional import operations

DISKS = '0000:02:00.0', '0000:03:00.0'
CLASS = 'CUSTOM_ACCELERATOR_SSD'
FLAVOR = {f'resources1:{CLASS}': '1'}
#: seconds for which a delete waits here
LONG = 60


class NotAwaitedTest(operations.OperationsTestBase):
    """The disks of servers that go take longer than anything waits."""

    # compute1 starts again
    FRESH_CLOUD = True
    HOSTS = {host: {'nvmes': [{'address': address} for address in DISKS]}
             for host in ('compute1', 'compute2')}
    RESOURCE_CLASS = CLASS

    def setUp(self):
        super().setUp()
        self.servers = [self.boot(FLAVOR, host='compute1')
                        for _ in DISKS]

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['nvme'], device_timeout=LONG,
                   group='accel')

    def hang(self, hang='format'):
        for address in DISKS:
            self.simulated('compute1').set_fault(address, hang=hang)

    def assertNotAwaited(self, do, *args):
        """It ends while disks are erased, which no server gets meanwhile."""
        self.hang()
        began = time.monotonic()
        do(*args)
        self.assertLess(time.monotonic() - began, LONG / 2)
        self.assertEqual([model.ClaimState.DELETING] * len(DISKS),
                         [c.state for c in self.claims('compute1')])
        self.report()
        for address in DISKS:
            inventory, *_ = self.provider_tree()[
                self.provider_name('compute1', address)]
            total, reserved = inventory[CLASS]
            self.assertEqual(total, reserved)
        self.hang(None)
        self._wait_for_assert(
            lambda: self.assertEqual([], self.claims('compute1')))

    def test_shelved_servers_are_offloaded(self):
        self.flags(shelved_offload_time=3600)
        for server in self.servers:
            self._shelve_server(server, expected_state='SHELVED')
        self.flags(shelved_offload_time=1)
        time.sleep(1.1)
        self.assertNotAwaited(
            self.computes['compute1'].manager._poll_shelved_instances,
            nova_context.get_admin_context())
        for server in self.servers:
            self._wait_for_state_change(server, 'SHELVED_OFFLOADED')
        self.delete_servers()

    def test_start_after_an_evacuation(self):
        """What their new host does with the servers is nothing to the old
        one."""
        self.stop_host()
        for server, busy in zip(self.servers, (
                task_states.RESIZE_MIGRATING, task_states.REBUILDING)):
            self._evacuate_server(server)
            self.set_task(server, busy)
        self.assertNotAwaited(self.restart_compute_service, 'compute1')
        self.assertEqual(len(DISKS), len(self.claims('compute2')))
        for server in self.servers:
            self.set_task(server, None)
        self.delete_servers()

    def test_start_after_deletes_that_were_interrupted(self):
        self.computes['compute1'].stop()
        for server in self.servers:
            self.set_task(server, task_states.DELETING)
        self.assertNotAwaited(self.restart_compute_service, 'compute1')
        for server in self.servers:
            self._wait_until_deleted(server)
        self.assertEqual([], self.claims())

    def test_owner_waits(self):
        """Where a user asks, what is gone is free."""
        self.flags(device_timeout=1, group='accel')
        self.hang()
        began = time.monotonic()
        for server in self.servers:
            self._shelve_server(server)
        self.assertGreater(time.monotonic() - began, len(DISKS))
        self.hang(None)
        self._wait_for_assert(lambda: self.assertEqual([], self.claims()))
        self.delete_servers()

    @staticmethod
    def set_task(server, state):
        instance = objects.Instance.get_by_uuid(
            nova_context.get_admin_context(), server['id'])
        instance.task_state = state
        instance.save()

    def stop_host(self):
        compute = self.computes['compute1']
        compute.stop()
        self.admin_api.put_service(
            compute.service_ref.uuid, {'forced_down': 'true'})
