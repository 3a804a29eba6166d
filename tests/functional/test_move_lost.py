# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The operator deletes in Placement what a move has, before it ends."""

from unittest import mock

from nova import exception as nova_exception

from nova_accel import model
from tests.functional import operations

OLD = model.Role.OLD


class MoveLostTest(operations.MoveTestBase):

    def setUp(self):
        super().setUp()
        self.server = self._migrate_server(self.server)
        self.lose()

    def lose(self):
        self.migration, = {
            claim.consumer_uuid for claim in self.claims(self.host)}
        self.provider = self.allocated(self.migration)
        self.placement.delete(f'/allocations/{self.migration}')
        self.assertEqual([], self.allocated(self.migration))

    def test_revert(self):
        self.compare()
        self.assertEqual(self.provider, self.allocated(self.migration))
        self._revert_resize(self.server)
        self.compare()
        self.assertEqual(self.before, self.assertHas(self.server))
        self.assertEqual([], self.allocated(self.migration))
        self.delete_all()

    def test_compared_while_it_is_reverted(self):
        """And not before: Nova finds no allocation that it could move."""
        driver = self.computes[self.host].driver
        comes = driver.finish_revert_migration

        def compares(*args, **kwargs):
            self.compare()
            comes(*args, **kwargs)
        with mock.patch.object(driver, 'finish_revert_migration', compares):
            self._revert_resize(self.server)
        self.assertEqual(self.before, self.held(self.server))
        self.compare()
        self.assertIn(*self.provider, self.allocated(self.server['id']))
        self.delete_all()

    def test_confirm_that_fails(self):
        """Neutron does not answer: what Nova has left is not put back, also
        before Nova writes that the move has failed."""
        self.compare()
        compute = self.computes[self.host]
        seen = []

        def compares(*args):
            self.compare()
            seen.append((self.allocated(self.migration),
                         self.held(self.server, OLD)))
        with mock.patch(
                'nova.network.neutron.API.setup_networks_on_host',
                side_effect=nova_exception.PortNotFound(port_id='1')), \
            mock.patch.object(compute.manager,
                              '_delete_scheduler_instance_info', compares):
            self.api.post_server_action(
                self.server['id'], {'confirmResize': None})
            self._wait_for_state_change(self.server, 'ERROR')
        self.assertEqual([([], [])], seen)
        self.delete_all()
