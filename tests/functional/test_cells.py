# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Resize and cold migration to another cell, which Nova does in its own way.

There is a snapshot in place of the disk, spawn() in place of
finish_migration(), and the source is told of the confirm by cleanup() alone.
As in test_operations, the docstring of a test is its row in
docs/source/operations.rst.
"""

from nova.policies import base as base_policies
from nova.policies import servers

from nova_accel import model
from tests.functional import base
from tests.functional import operations
from tests.functional import process

CELLS = {'compute1': 'cell1', 'compute2': 'cell2'}


class CrossCellTest(operations.OperationsTestBase):

    NUMBER_OF_CELLS = 2

    def setUp(self):
        super().setUp()
        self.policy.set_rules(
            {servers.CROSS_CELL_RESIZE: base_policies.RULE_ADMIN_API},
            overwrite=False)
        self.server = self.boot(
            self.specs, host='compute1', image_uuid=self.glance.guest_image)
        self.before = self.assertHas(self.server)

    def start_compute(self, hostname, *args, **kwargs):
        if not args:
            kwargs['cell_name'] = CELLS[hostname]
        return super().start_compute(hostname, *args, **kwargs)

    def resize(self, function):
        """To the other cell; what the server holds there."""
        flavor = self._create_flavor(
            extra_spec=base.fpga_flavor(function_id=function))
        self._resize_server(self.server, flavor)
        self.assertEqual('compute2', self.host_of(self.server))
        after = self.assertHas(self.server)
        self.assertFunction(after, function)
        self.assertEqual(self.before, self.held(
            self.server, model.Role.OLD))
        self.compare()
        self.assertEqual(self.before, self.held(
            self.server, model.Role.OLD))
        self.assertEqual(after, self.assertHas(self.server))
        # the guest itself is gone from there
        self.assertEqual(
            [], self.computes['compute1'].driver.list_instance_uuids())
        return after

    def assertBack(self):
        """The server has what it had before, and nothing else is held."""
        self.assertEqual('compute1', self.host_of(self.server))
        self.assertEqual(self.before, self.assertHas(self.server))
        self.assertFunction(self.before, self.function)
        self.assertEqual(1, len(self.claims()))
        self.compare()
        self.assertEqual(self.before, self.held(self.server))

    def test_confirm(self):
        """Resize to another cell: as to another host; the old devices are
        kept until the confirm."""
        after = self.resize(base.NLB3)
        self._confirm_resize(self.server, cross_cell=True)
        self.assertEqual([], self.claims('compute1'))
        self.assertEqual(after, self.assertHas(self.server))
        self.assertFunction(after, base.NLB3)
        self._reboot_server(self.server, hard=True)
        self.assertEqual(after, self.assertHas(self.server))
        self.delete_all()

    def test_revert(self):
        """Revert of a resize to another cell: the original devices, with
        their original function."""
        self.resize(base.NLB3)
        # what the old card carries is gone meanwhile
        self.kernel('compute1').power_cycle()
        self.restart_compute_service('compute1')
        self.compare()
        self._revert_resize(self.server)
        self.assertEqual([], self.claims('compute2'))
        self.assertBack()
        self.delete_all()

    def test_cold_migration(self):
        """Cold migration to another cell: programmed there, and the old
        devices are released at the confirm."""
        self._migrate_server(self.server)
        self.assertEqual('compute2', self.host_of(self.server))
        after = self.assertHas(self.server)
        self.assertFunction(after, self.function)
        self._confirm_resize(self.server, cross_cell=True)
        self.assertEqual([], self.claims('compute1'))
        self.assertEqual(after, self.assertHas(self.server))
        self.delete_all()

    def test_deleted_before_the_confirm(self):
        self.resize(base.NLB3)
        self.delete_all()

    def test_destination_fails(self):
        """A resize to another cell that fails there: released there; a hard
        reboot attaches the original devices."""
        self.fails()
        self.assertEqual([], self.claims('compute2'))
        self.compare()
        self.forget_functions('compute1')
        self._reboot_server(self.server, hard=True)
        self.assertBack()
        self.delete_all()

    def test_destination_fails_and_the_server_is_deleted(self):
        self.fails()
        self.delete_in_error(self.server)

    def fails(self):
        self.break_cards('compute2')
        self.api.post_server_action(self.server['id'], {'migrate': None})
        server = self._wait_for_state_change(self.server, 'ERROR')
        # the conductor, which says ERROR once more, is done with it
        self.notifier.wait_for_versioned_notifications(
            'compute_task.migrate_server.error', timeout=process.PATIENCE)
        self.assertEqual('compute1', self.host_of(server))
        self.assertIn('CRC', self.fault(server))
