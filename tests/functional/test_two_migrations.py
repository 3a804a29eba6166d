# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A server moves again before all of its first move has ended."""

import threading

import fixtures
from nova.compute import manager
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel import model
from nova_accel.virt import driver
from tests.functional import base
from tests.functional import cloud
from tests.functional import live_migration
from tests.functional import process

_SECONDS = 60


class LateTestCase(live_migration.LiveMigrationTestBase):
    """What the new host does for the first live migration ends when the guest
    moves by the second one."""

    def setUp(self):
        super().setUp()
        self.moves, self.ended = threading.Event(), threading.Event()

    def first(self, owner, name, begins=lambda: None, ends=lambda: None):
        """Call something before and after the first call of a method."""
        sound, calls = getattr(owner, name), []

        def called(*args, **kwargs):
            calls.append(args)
            if len(calls) > 1:
                return sound(*args, **kwargs)
            try:
                begins()
                return sound(*args, **kwargs)
            finally:
                ends()
        self.useFixture(fixtures.MockPatchObject(owner, name, called))

    def wait(self):
        self.moves.wait(_SECONDS)

    def fail(self):
        self.wait()
        raise RuntimeError('the volume cannot be connected')

    def second(self, domain, destination, params, flags):
        """In place of libvirt's."""
        self.moves.set()
        self.assertTrue(self.ended.wait(_SECONDS))
        self.guest_moves(domain, self.destination, params['destination_xml'])

    def give_up(self):
        """The old host waits no longer for the first one."""
        self.flags(rpc_response_timeout=3, long_rpc_timeout=3)
        self.ask()
        self._wait_for_migration_status(self.server, ['failed', 'error'])
        self._wait_for_server_parameter(self.server, {
            'OS-EXT-STS:task_state': None})

    def assertMoves(self):
        self.libvirt_migrates(self.second)
        self.live_migrate()
        self.assertEqual(self.destination, self.host_of(self.server))
        self.compare()
        return self.assertHas(self.server)

    def wait_for_log(self, text):
        process.until(lambda: self.assertTrue(
            text in self.stdlog.logger.output, text))

    def preparation_fails(self):
        self.first(libvirt_driver.LibvirtDriver, 'pre_live_migration',
                   begins=self.fail)
        self.first(manager.ComputeManager, 'pre_live_migration',
                   ends=self.ended.set)
        self.give_up()
        process.until(lambda: self.assertEqual(
            [], self.held(self.server, model.Role.OLD)))

    def preparation_begins(self):
        self.first(driver.AccelLibvirtDriver, 'pre_live_migration',
                   begins=self.wait, ends=self.ended.set)
        self.give_up()


class DetachTest(LateTestCase):

    HOW = 'detach'

    @cloud.fresh
    def test_preparation_fails(self):
        self.start(self.specs)
        self.preparation_fails()
        self.assertFunction(self.assertMoves(), self.function)

    @cloud.fresh
    def test_rollback(self):
        self.start(self.specs)
        self.first(manager.ComputeManager,
                   'rollback_live_migration_at_destination',
                   begins=self.wait, ends=self.ended.set)
        self.live_migration_fails()
        # it finds what the first one has left
        self.compare()
        self.assertEqual([], self.held(self.server, model.Role.OLD))
        # the guest is not there yet, as where the old host copies memory
        self.domain_on(self.source, self.server)._job_type = (
            fakelibvirt.VIR_DOMAIN_JOB_UNBOUNDED)
        self.assertFunction(self.assertMoves(), self.function)


class TransparentTest(LateTestCase, live_migration.TransparentTestBase):
    """The guest is on the new host with its vGPU."""

    HOSTS = {host: live_migration.devices()
             for host in ('compute1', 'compute2')}

    def second(self, domain, destination, params, flags):
        self.computes[self.destination].driver._host.get_connection(
            ).defineXML(params['destination_xml']).create()
        self.moves.set()
        self.assertTrue(self.ended.wait(_SECONDS))
        domain.destroy()
        domain.complete_job()

    @cloud.fresh
    def test_preparation_fails(self):
        self.start(self.VGPU_FLAVOR)
        self.preparation_fails()
        self.assertMoves()

    @cloud.fresh
    def test_preparation_begins(self):
        self.start(self.VGPU_FLAVOR)
        self.preparation_begins()
        self.assertMoves()
        self.wait_for_log('a later one moves the server')

    @cloud.fresh
    def test_cold_where_its_guest_runs(self):
        """nova-compute of the old host is killed when the guest has moved.
        Nova has the server there, and its next move would take the vGPU from
        the guest."""
        self.start(self.VGPU_FLAVOR)
        self.libvirt_migrates(self.migrate)
        self.kill_source_after_the_move()
        self._wait_for_server_parameter(self.server, {
            'OS-EXT-STS:task_state': None})
        self.compare()
        there, = self.held(self.server, model.Role.OLD)
        self.admin_api.post_server_action(self.server['id'], {'migrate': None})
        self.wait_for_log('where its guest runs already')
        self._wait_for_server_parameter(self.server, {
            'OS-EXT-STS:task_state': None, 'status': 'ERROR'})
        self.assertEqual([there[1]], base.hostdev_addresses(self.domain_on(
            self.destination, self.server).XMLDesc(0)))
        self.assertIn(there, self.held(self.server, model.Role.OLD))
        # as it says
        self.admin_api.post_server_action(
            self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_server_parameter(self.server, {
            'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})
        self.compare()
        self.assertEqual(self.destination, self.host_of(self.server))
        self.assertHas(self.server)
