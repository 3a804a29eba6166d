# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Images of other projects cost no request, no place and no bitstream."""

import dataclasses
from unittest import mock
import uuid

import fixtures

from nova_accel import exception
from tests.host import base
from tests.host import cloud as clouds
from tests.unit.host import A, B, FUNCTION, INTERFACE, OTHER, plain

EVE = 'eve'


class StrangersTest(base.HostTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host({'address': A})
        #: how many records of Eve's were in answers of Glance
        self.read = 0
        answer = clouds.Glance.answer

        def counts(glance_, url):
            status, body = answer(glance_, url)
            if isinstance(body, dict) and 'images' in body:
                self.read += sum(r['owner'] == EVE for r in body['images'])
            return status, body
        self.useFixture(fixtures.MonkeyPatch(
            'tests.host.cloud.Glance.answer', counts))

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


class EvictionTest(base.HostTestCase):

    def test_what_a_server_has_stays(self):
        """However little room others leave: it starts without Glance after
        the host has lost its power."""
        self.config.config(bitstream_cache_size=0, group='accel')
        self.start_host({'address': A}, {'address': B})
        self.host.upload(FUNCTION)
        self.host.upload(OTHER)
        mine = self.host.boot(base.asks(FUNCTION), self.host.allocation(A))
        self.host.boot(base.asks(OTHER), self.host.allocation(B), project=EVE)
        self.host.power_cut()
        self.restart()
        with mock.patch.object(
                clouds.Glance, 'answer', return_value=clouds.BUSY):
            self.host.start_guest(mine)
        self.assertEqual(plain(FUNCTION), self.host.carries(A))


class PurgedTest(base.HostTestCase):
    """Any project can choose the id of a purged image (OSSN-0075)."""

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        image = self.host.upload(FUNCTION)
        self.mine = self.host.boot(base.asks(FUNCTION),
                                   self.host.allocation(A))
        self.host.cloud.delete_image(image)
        self.host.upload(OTHER, {'id': image, 'owner': EVE,
                                 'visibility': 'private'})
        self.host.boot(
            base.asks(bitstream_id=image, runtime_programming='true'),
            self.host.allocation(B), project=EVE)
        self.assertEqual(plain(OTHER), self.host.carries(B))
        self.programmed = []
        program = self.host.kernel.program_dfl_port

        def programs(address, port, path, *more):
            self.programmed.append(path)
            return program(address, port, path, *more)
        self.host.kernel.program_dfl_port = programs

    def test_content_is_known(self):
        self.host.delete(self.mine)
        self.assertEqual(1, len(self.programmed))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    def test_content_is_not_known(self):
        self.host.inventory.contents.set_loaded(A, 0, dataclasses.replace(
            self.host.store.loaded()[A, 0], content=''))
        self.host.delete(self.mine)
        self.assertEqual([], self.programmed)
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
