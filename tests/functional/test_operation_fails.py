# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Operations that fail: what the owner reads, and what is left.

Found by test_random_operations; one test for each.
"""

from tests.functional import base
from tests.functional import operations


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
        self.assertEqual([], self.allocated(server['id']))
        (host, _), = held = self.held(server)
        self.computes[host].driver.reconciler.run()
        self.assertEqual(held, self.held(server))
        self.mend_cards()
        self.delete_servers()
