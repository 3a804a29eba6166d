# Licensed under the Apache License, Version 2.0. See LICENSE.
"""No project has more accelerators than its limit in Keystone.

test_random_operations looks for sequences of operations that do it; what it
found, or Nova's code shows, is here.
"""

from nova.tests.functional.api import client as api_client
from oslo_limit import fixture as limit_fixture

from tests.functional import base
from tests.functional import operations


class LimitsTest(operations.OperationsTestBase):

    def setUp(self):
        super().setUp()
        self.flags(driver='nova.quota.UnifiedLimitsDriver', group='quota')
        self.useFixture(limit_fixture.LimitFixture(
            {**operations.WITHOUT_LIMIT, f'class:{self.RESOURCE_CLASS}': 1},
            {}))
        # a tenant's, as Nova counts for who asks
        self.api = self.api_fixture.api
        self.api.microversion = self.microversion

    def test_unshelve(self):
        """Of servers that had one after the other what may be had once."""
        first = self.boot(base.fpga_flavor())
        self._shelve_server(first)
        second = self.boot(base.fpga_flavor())
        refusal = self.assertRaises(
            api_client.OpenStackApiException, self.api.post_server_action,
            first['id'], {'unshelve': None})
        self.assertEqual(403, refusal.response.status_code)
        self.assertIn(self.RESOURCE_CLASS, str(refusal))
        self.assertHas(second)
        self._delete_server(second)
        self._unshelve_server(first)
        self.assertHas(first)

    def test_rebuild_that_fails(self):
        """Its owner makes it fail; the server keeps its device, which goes on
        to count."""
        server = self.boot(base.fpga_flavor())
        held = self.assertHas(server)
        image = self.glance.service.upload(
            self.glance.client, 'bad', b'a guest', visibility='public',
            hw_video_ram='64')['id']
        self.api.post_server_action(
            server['id'], {'rebuild': {'imageRef': image}})
        self._wait_for_state_change(server, 'ERROR')
        refusal = self.assertRaises(
            api_client.OpenStackApiException, self.boot, base.fpga_flavor())
        self.assertEqual(403, refusal.response.status_code)
        self._rebuild_server(server, self.glance.guest_image)
        self.assertEqual(held, self.assertHas(server))
