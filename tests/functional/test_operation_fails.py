# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Operations that fail: what the owner reads, and what is left.

Found by test_random_operations; one test for each.
"""

import os
import sys
from unittest import mock

from nova import context as nova_context
from nova import objects
from nova.scheduler.client import report
import oslo_messaging as messaging
from placement import exception as placement_exc
from placement.objects import allocation

from nova_accel import exception
from nova_accel import model
from tests.functional import base
from tests.functional import operations
from tests.functional import process
from tests import limits


class FailedOperationsTest(operations.OperationsTestBase):

    def assertFault(self, server, word):
        """A whole sentence: Nova cuts faults off after 255 characters."""
        text = self.fault(server)
        self.assertIn(word, text)
        self.assertTrue(text.endswith('.'), text)
        self.assertNotIn('Insufficient compute resources', text)

    def test_fault_of_a_resize(self):
        server = self.boot(base.fpga_flavor(function_id=base.NLB0))
        self.break_cards()
        self.api.post_server_action(server['id'], {
            'resize': {'flavorRef': self._create_flavor(
                extra_spec=self.specs)}})
        server = self._wait_for_state_change(server, 'ERROR')
        self.assertFault(server, 'CRC')

    def test_rebuild_that_cannot_program(self):
        """Not ACTIVE, as there is no guest; the device stays the server's."""
        server = self.boot(
            {**self.specs, 'accel1:runtime_programming': 'true'},
            image_uuid=self.glance.guest_image)
        self.break_cards()
        image = self.glance.service.upload(
            self.glance.client, 'other', b'another', visibility='public',
            **{'accel:bitstream_id': self.upload_bitstream(base.NLB3)})['id']
        self.api.post_server_action(
            server['id'], {'rebuild': {'imageRef': image}})
        server = self._wait_for_state_change(server, 'ERROR')
        self.assertFault(server, 'CRC')
        self.assertEqual(1, len(self.allocated(server['id'])))
        (host, _), = held = self.held(server)
        self.computes[host].driver.parts.reconciler.run()
        self.assertEqual(held, self.held(server))
        self.mend_cards()
        self.delete_servers()

    def test_resume_while_the_database_is_away(self):
        """The guest gets its device back; the metadata stay as they were."""
        server = self._suspend_server(self.boot(self.specs))
        read = objects.Instance.get_by_uuid

        def away(*args, **kwargs):
            if sys._getframe(1).f_globals['__name__'].startswith('nova_accel'):
                raise messaging.MessagingTimeout('nova-conductor is away')
            return read(*args, **kwargs)
        with mock.patch.object(objects.Instance, 'get_by_uuid', away):
            self._resume_server(server)
        self.assertHas(server)
        self.delete_servers()

    def test_database_of_nova_compute(self):
        """It is that of its cell, whatever other threads read."""
        server = self.boot({})
        context = nova_context.get_admin_context()
        with nova_context.target_cell(context, self.cell_mappings['cell0']):
            self.assertEqual(server['id'], objects.Instance.get_by_uuid(
                nova_context.get_admin_context(), server['id']).uuid)
        self.delete_servers()

    def test_placement_refuses_the_end_of_a_move(self):
        """As where a region is shown as free just then: all tries of one
        request fail, see docs/source/contributor/testing.rst."""
        server = self.boot(base.fpga_flavor(function_id=base.NLB0))
        self._migrate_server(server)
        usual, refusals = allocation.replace_all, []
        put = report.SchedulerReportClient.put

        def later(client, url, *args, **kwargs):
            if url.startswith('/allocations/'):
                # that the region is shown as free refuses no third request
                process.until(lambda: self.assertEqual(set(), limits.at_work()))
            return put(client, url, *args, **kwargs)

        def refuse(context, allocs):
            if len(refusals) < 2 and not any(a.used for a in allocs):
                refusals.append(allocs)
                raise placement_exc.ResourceProviderConcurrentUpdateDetected
            return usual(context, allocs)
        with mock.patch.object(allocation, 'replace_all', refuse), \
                mock.patch.object(report.SchedulerReportClient, 'put', later):
            self._confirm_resize(server)
        self.assertEqual(2, len(refusals))
        self.assertHas(server)
        self.delete_all()

    def test_migration_away_from_a_host_whose_disk_is_full(self):
        """The claim store cannot be written: the server is as it was, with its
        disk, so that the next try does not take that for a left-over."""
        server = self.boot(base.fpga_flavor(function_id=base.NLB0))
        held = self.held(server)
        disk = os.path.join(self.instances_path, server['id'], 'disk')
        with open(disk, 'w') as file:
            file.write('data')
        with mock.patch.object(
                self.parts(self.host_of(server)).store, 'update',
                side_effect=exception.AcceleratorsUnavailable(
                    'The disk is full.')):
            self.api.post_server_action(server['id'], {'migrate': None})
            event = self._wait_for_action_fail_completion(
                server, 'migrate', 'compute_resize_instance')
            self._wait_for_server_parameter(server, {
                'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'})
        self.assertEqual('The disk is full.', event['details'])
        self.assertTrue(os.path.exists(disk))
        self.assertEqual(held, self.held(server))
        self._migrate_server(server)

    def test_migration_that_nova_cannot_begin(self):
        """Its devices are its own again."""
        server = self.boot(base.fpga_flavor(function_id=base.NLB0))
        held = self.held(server)
        with mock.patch('nova.virt.libvirt.utils.save_and_migrate_vtpm_dir',
                        side_effect=OSError(28, 'No space left on device')):
            self.api.post_server_action(server['id'], {'migrate': None})
            server = self._wait_for_state_change(server, 'ERROR')
        self.assertEqual(held, self.held(server))
        self.assertEqual([model.Role.CURRENT], [
            c.role for c in self.claims(self.host_of(server))])
