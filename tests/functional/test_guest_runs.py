# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a guest that runs has is held by its server, and by nobody else."""

import contextlib
from unittest import mock

from nova.virt.libvirt import driver as libvirt_driver

from tests.functional import base
from tests.functional import operations


class FailsAfterStartTest(operations.OperationsTestBase):
    """An operation fails after libvirt has started the guest."""

    def setUp(self):
        super().setUp()
        self.server = self.boot(self.specs)
        self.before = self.assertHas(self.server)
        self.host = self.before[0][0]

    @contextlib.contextmanager
    def fails_after_start(self):
        create = libvirt_driver.LibvirtDriver._create_guest_with_network

        def created(*args, **kwargs):
            create(*args, **kwargs)
            raise RuntimeError('the message bus does not answer')
        with mock.patch.object(libvirt_driver.LibvirtDriver,
                               '_create_guest_with_network', created):
            yield

    def running(self):
        """(host, address) of what guests that run have."""
        return sorted(
            (host, address) for host in self.HOSTS
            for domain in self.guests(host) if domain.isActive()
            for address in base.hostdev_addresses(domain.XMLDesc(0)))

    def act(self, action, **more):
        self.api.post_server_action(self.server['id'], {action: more or None})
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None})

    def assertHeldWhileItRuns(self, more=0):
        """It is held until the guest is gone.

        :param more: servers that are built meanwhile; none of them gets it.
        """
        held = self.held(self.server)
        self.assertEqual(self.running(), held)
        self.assertEqual(1, len(held))
        (host, address), = held
        self.compare()
        self.assertEqual(held, self.held(self.server))
        others = [self.boot(self.specs) for _ in range(more)]
        self.assertEqual(1 + more, len(set(self.running())))
        self.assertEqual(held, self.held(self.server))
        for other in others:
            self.api.delete_server(other['id'])
            self._wait_until_deleted(other)
        connection = self.computes[host].driver._host.get_connection()
        domain = connection.lookupByUUIDString(self.server['id'])
        domain.destroy()
        domain.undefine()

    def test_unshelve(self):
        self._shelve_server(self.server)
        with self.fails_after_start():
            self.act('unshelve')
        self.assertEqual([], self.allocated(self.server['id']))
        self.assertHeldWhileItRuns(more=3)
        self.compare()
        self.assertEqual([], self.claims())
        self._unshelve_server(self.server)
        self.assertFunction(self.assertHas(self.server), self.function)

    def test_finish_migration(self):
        with self.fails_after_start():
            self.act('migrate')
        self._wait_for_state_change(self.server, 'ERROR')
        (there, _), = self.running()
        self.assertNotEqual(self.host, there)
        self.assertEqual(self.running(), self.held(self.server))

    def test_rebuild(self):
        with self.fails_after_start():
            self.act('rebuild', imageRef=self.glance.guest_image)
        self._wait_for_state_change(self.server, 'ERROR')
        self.assertEqual(self.before, self.running())
        # what it has counts for it, and for its project
        self.assertEqual(1, len(self.allocated(self.server['id'])))
        self.assertHeldWhileItRuns()
        # its owner may start it again
        self.compare()
        self.api.post_server_action(
            self.server['id'], {'os-resetState': {'state': 'active'}})
        self._reboot_server(self.server, hard=True)
        self.assertEqual(self.before, self.running())

    def test_boot(self):
        """Nova destroys the guest: nothing is held or left running."""
        with self.fails_after_start():
            self.boot(self.specs, expected_state='ERROR')
        self.assertEqual(self.before, self.running())
        self.assertEqual(1, len(self.claims()))
