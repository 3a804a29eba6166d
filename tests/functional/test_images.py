# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whose images a server gets its bitstreams from, with real notifications.

Nova's test harness stands in for the notifier of oslo.messaging. The real one
leaves a context without token as the current one of the thread, with each
notification and also where none is sent anywhere.
"""

from unittest import mock
import uuid

import fixtures
from nova import rpc
from nova.tests.functional.api import client as api_client
import oslo_messaging

from nova_accel.drivers import dfl
from tests.functional import base
from tests.functional import operations

FUNCTION = 'a9d4b7a2-6d9e-4f3b-8a47-31f0b5c0f9d1'


class RealNotifications(fixtures.Fixture):
    """Nova's notifiers as rpc.init() makes them, with nowhere to send to."""

    def _setUp(self):
        transport = rpc.NOTIFIER.transport
        serializer = rpc.RequestContextSerializer(rpc.JsonPayloadSerializer())
        for name in ('LEGACY_NOTIFIER', 'NOTIFIER'):
            self.useFixture(fixtures.MonkeyPatch(
                f'nova.rpc.{name}', oslo_messaging.Notifier(
                    transport, serializer=serializer, driver='noop')))


class TenantTest(operations.OperationsTestBase):
    """A tenant, and images of another project; nova-compute itself has
    credentials that see all of them."""

    def start_compute(self, *args, **kwargs):
        # each nova-compute takes its notifier as it starts
        self.useFixture(RealNotifications())
        # there is no image that clears what the tenant loads
        self.flags(handover=['none'], group='accel')
        return super().start_compute(*args, **kwargs)

    def setUp(self):
        super().setUp()
        self.flavor = self._create_flavor(
            extra_spec=base.fpga_flavor(function_id=FUNCTION,
                                        runtime_programming='true'))
        # the flavors are the administrator's, the servers a tenant's
        self.api = self.api_fixture.api
        self.api.microversion = self.microversion
        self.eve = self.glance.service.client('eve', 'others')

    def boot(self, expected_state='ACTIVE'):
        return self._create_server(
            flavor_id=self.flavor, networks='none',
            image_uuid=self.glance.guest_image, expected_state=expected_state)

    def upload_as(self, client, visibility='private'):
        return self.upload_bitstream(FUNCTION, client=client, properties={
            'visibility': visibility, 'accel:function_id': FUNCTION})

    def test_rebuild_with_a_bitstream_that_cannot_be_had(self):
        """nova-api refuses, where a rebuild that fails would take the guest;
        a missing image and another project's get the same words."""
        tenant = self.glance.service.client('tenant', self.api.project_id)
        self.upload_as(tenant)
        server = self.boot()
        held = self.assertHas(server)
        said = set()
        for bitstream in str(uuid.uuid4()), self.upload_as(self.eve):
            image = self.glance.service.upload(
                tenant, 'other', b'another',
                **{'accel:bitstream_id': bitstream})['id']
            refusal = self.assertRaises(
                api_client.OpenStackApiException, self.api.post_server_action,
                server['id'], {'rebuild': {'imageRef': image}})
            self.assertEqual(400, refusal.response.status_code)
            said.add(refusal.response.json()['badRequest']['message'].replace(
                bitstream, 'it').replace(image, 'image'))
        self.assertEqual({
            'Image image asks for the bitstream it, and no such image is '
            'visible to you: correct its accel1:bitstream_id.'}, said)
        self.assertEqual('ACTIVE', self.api.get_server(
            server['id'])['status'])
        self.assertEqual(held, self.assertHas(server))

    def test_bitstream_that_fails_costs_one_card(self):
        """However many hosts Nova may try for one request."""
        self.upload_as(self.glance.service.client(
            'tenant', self.api.project_id))
        for host in self.HOSTS:
            for address in ('0000:5e:00.0', '0000:af:00.0'):
                self.kernel(host).set_fault(address, pr_error='crc')
        touched, program = set(), dfl.DflDriver.program

        def programs(driver, device, *args):
            touched.add((driver.kernel, device.address))
            return program(driver, device, *args)
        with mock.patch.object(dfl.DflDriver, 'program', programs):
            server = self.boot('ERROR')
            self.assertIn('CRC', self.fault(server))
            self._delete_server(server)
        self.assertEqual(1, len(touched), touched)

    def test_migration_by_an_administrator(self):
        """Whose token sees the images of all projects."""
        tenant = self.glance.service.client(
            'tenant', self.api.project_id)
        own = self.upload_as(tenant)
        server = self.boot()
        for _ in range(2):
            self.upload_as(self.eve)
        self.admin_api.post_server_action(server['id'], {'migrate': None})
        self._wait_for_state_change(server, 'VERIFY_RESIZE')
        (host, address), = self.held(server)
        region = self.parts(host).inventory.devices[
            base.pf(address)].region(0)
        self.assertEqual((own, self.api.project_id),
                         (region.bitstream_id, region.origin))

    def test_without_credentials_of_nova_compute(self):
        """Boots need none: the tenant's token is enough."""
        self.flags(auth_type=None, group='service_user')
        self.upload_as(self.glance.client, 'public')
        self.assertFunction(self.held(self.boot()), FUNCTION)
