# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What one tenant loads does not reach the next one, in a whole Nova.

Written as the attacker would: a tenant with a flavor that lets the owner of a
server choose the bitstream, on a host with one card.
"""

import threading
import uuid

import fixtures
from glanceclient import exc as glance_exc

from nova_accel import model
from nova_accel import naming
from tests.functional import base
from tests.functional import operations
from tests.functional import process
from tests.functional import test_images

CARD, VF = '0000:5e:00.0', '0000:5e:00.1'
REGION = f'compute1_accel_{CARD}_region0'


class HandoverTest(operations.OperationsTestBase):

    HOSTS = {'compute1': {'cards': [base.card(CARD, [base.NLB0])]}}

    def start_compute(self, *args, **kwargs):
        # what holds where nothing is cleaned between two servers
        self.flags(handover=['none'], group='accel')
        self.useFixture(test_images.RealNotifications())
        return super().start_compute(*args, **kwargs)

    def setUp(self):
        super().setUp()
        self.free, self.fixed = (
            self._create_flavor(extra_spec=specs) for specs in (
                base.fpga_flavor(runtime_programming='true'), self.specs))
        # the flavors are the administrator's, the servers a tenant's
        self.api = self.api_fixture.api
        self.api.microversion = self.microversion
        self.tenant = self.glance.service.client(
            'tenant', self.api.project_id)

    def boot_of(self, flavor, **kwargs):
        return self._create_server(
            flavor_id=flavor, networks='none',
            image_uuid=self.glance.guest_image, **kwargs)

    def ask(self, server, image):
        """:returns: what the server's metadata say of it then."""
        self.api.post_server_metadata(
            server['id'], {'accel1:bitstream_id': image})
        self.computes['compute1'].driver.parts.runtime.run()
        return self.api.get_server(server['id'])['metadata']['accel1:status']

    def region(self):
        return self.parts('compute1').inventory.devices[CARD].region(0)

    def test_file_that_names_the_function_of_the_operator(self):
        trojan = self.upload_bitstream(
            self.function, client=self.tenant, size=1234, properties={
                'visibility': 'private', 'accel:function_id': self.function})
        server = self.boot_of(self.free)
        self.assertEqual(f'programmed {trojan}', self.ask(server, trojan))
        self.assertEqual(
            (self.function.replace('-', ''), self.api.project_id),
            (self.region().function_uuid, self.region().origin))
        self._delete_server(server)
        self.report()
        self.assertEqual(set(), self.traits(REGION) & {
            naming.function_trait(self.function),
            naming.bitstream_trait(trojan)})
        self.boot_of(self.fixed)
        self.assertEqual(
            (self.bitstreams[self.function], model.OPERATOR),
            (self.region().bitstream_id, self.region().origin))
        self.assertIn(naming.function_trait(self.function),
                      self.traits(REGION))

    def test_private_image_of_the_operator(self):
        """A tenant's server gets it by its flavor; the tenant does not."""
        function = str(uuid.uuid4())
        image = self.upload_bitstream(function, properties={
            'visibility': 'private', 'accel:function_id': function})
        flavor = self.admin_api.post_flavor({'flavor': {
            'name': 'private', 'ram': 512, 'vcpus': 1, 'disk': 1,
            'id': str(uuid.uuid4())}})['id']
        self.admin_api.post_extra_spec(
            flavor, {'extra_specs': base.fpga_flavor(function_id=function)})
        server = self.boot_of(flavor, expected_state='ERROR')
        self.assertIn('No image', self.fault(server))
        self._delete_server(server)
        self.flags(bitstream_owners=[
            self.glance.client.images.get(image)['owner']], group='accel')
        server = self.boot_of(flavor)
        self.assertEqual((image, model.OPERATOR), (
            self.region().bitstream_id, self.region().origin))
        self._delete_server(server)
        self.assertRaises(glance_exc.HTTPNotFound,
                          self.tenant.images.get, image)
        server = self.boot_of(self.free)
        self.assertIn('not visible', self.ask(server, image))


class WarmTest(operations.OperationsTestBase):
    """A region that is programmed again after a server is not passed by."""

    HOSTS = {'compute1': {'cards': [base.card(CARD, [base.NLB0]),
                                    base.card('0000:af:00.0', [base.NLB3])]}}

    def test_next_server_waits(self):
        server = self.boot(self.specs)
        claim, = self.claims()
        region = f'compute1_accel_{claim.device_address}_region0'
        inventory = self.parts('compute1').inventory
        driver = inventory.driver_of(
            inventory.devices[claim.device_address])
        began, goes_on = threading.Event(), threading.Event()
        self.addCleanup(goes_on.set)
        programmed, program = [], driver.program

        def programs(device, *args):
            programmed.append(device.address)
            began.set()
            goes_on.wait(process.PATIENCE)
            return program(device, *args)
        self.useFixture(fixtures.MonkeyPatch(
            f'{type(driver).__module__}.{type(driver).__name__}.program',
            lambda driver, *args: programs(*args)))
        self._delete_server(server)
        self.assertTrue(began.wait(process.PATIENCE))
        # as Nova does after each delete
        self.report()
        self.assertEqual(set(), {
            naming.function_trait(self.function), naming.PROGRAMMABLE,
            naming.CLEANING} - self.traits(region))
        server = self.boot(self.specs, expected_state='BUILD')
        process.until(lambda: self.assertEqual(
            [claim.provider_uuid], self.allocated(server['id'])))
        goes_on.set()
        self._wait_for_state_change(server, 'ACTIVE')
        self.assertEqual([claim.device_address], programmed)
        self.assertHas(server)
        process.until(lambda: self.assertNotIn(
            naming.CLEANING, self.traits(region)))
