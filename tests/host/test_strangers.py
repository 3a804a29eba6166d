# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Images of other projects cost nobody a request, a place or a bitstream."""

import uuid

import fixtures

from nova_accel import exception
from tests.host import base
from tests.host import cloud as clouds
from tests.unit.host import A, FUNCTION, INTERFACE, plain

EVE = 'eve'


class StrangersTest(base.HostTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host({'address': A})
        #: how many records of Eve's were in answers of Glance
        self.read = 0
        get = clouds.Glance.get

        def counts(glance_, path, **more):
            response, body = get(glance_, path, **more)
            if isinstance(body, dict) and 'images' in body:
                self.read += sum(r['owner'] == EVE for r in body['images'])
            return response, body
        self.useFixture(fixtures.MonkeyPatch(
            'tests.host.cloud.Glance.get', counts))

    def squat(self, **properties):
        """Records with what the operator's images have; no data is needed."""
        for visibility in 'private', 'shared', 'community':
            self.host.cloud.upload(
                b'', owner=EVE, visibility=visibility, **properties)

    def boot(self, *specs):
        return self.host.boot(base.asks(*specs), self.host.allocation(A))

    def test_operators_function(self):
        image = self.host.upload(FUNCTION)
        self.squat(**{'accel:function_id': FUNCTION,
                      'accel:clears': 'memory',
                      'accel:region_type_id': str(uuid.UUID(INTERFACE))})
        server = self.boot(FUNCTION)
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
        self.host.delete(server)
        self.assertEqual(image, self.host.inventory.devices[A].region(
            0).bitstream_id)
        self.assertEqual(0, self.read)

    def test_image_of_an_owner(self):
        self.config.config(bitstream_owners=['operators'], group='accel')
        self.host.upload(FUNCTION, {'owner': 'operators',
                                    'visibility': 'private'})
        self.squat(**{'accel:function_id': FUNCTION})
        self.boot(FUNCTION)
        self.assertEqual((plain(FUNCTION), 0),
                         (self.host.carries(A), self.read))

    def test_own_image_comes_before_shared_ones(self):
        mine = self.host.upload(FUNCTION, {
            'owner': clouds.PROJECT, 'visibility': 'private'})
        self.squat(**{'accel:function_id': FUNCTION})
        self.host.boot(base.asks(FUNCTION, runtime_programming='true'),
                       self.host.allocation(A))
        self.assertEqual((mine, 0), (self.host.inventory.devices[A].region(
            0).bitstream_id, self.read))

    def test_more_than_are_looked_through(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.bitstream.glance._MOST_SHARED', 2))
        for _ in range(3):
            self.squat(**{'accel:function_id': FUNCTION})
        error = self.assertRaises(
            exception.BitstreamError, self.host.boot,
            base.asks(FUNCTION, runtime_programming='true'),
            self.host.allocation(A))
        self.assertIn('No image with', str(error))
