# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Images of other projects cost no request, no place and no bitstream."""

import dataclasses
import shutil
from unittest import mock
import uuid

import ddt
import fixtures

from nova_accel import conf
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


@ddt.ddt
class ReusedIdTest(base.HostTestCase):
    """A host boots, its cache is empty, and another project has uploaded its
    own data under the id of the image of a server."""

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})

    def boot(self, image):
        return self.host.boot(
            base.asks(runtime_programming='true'), self.host.allocation(A),
            {'accel1:bitstream_id': image})

    def after_a_power_cut(self):
        shutil.rmtree(conf.CONF.accel.bitstream_cache)
        self.host.power_cut()
        self.restart()
        self.programmed = []
        program = self.host.kernel.program_dfl_port

        def programs(address, *args):
            self.programmed.append(address)
            return program(address, *args)
        self.host.kernel.program_dfl_port = programs

    def reuse(self, image, **properties):
        self.host.cloud.delete_image(image)
        self.host.upload(OTHER, {'id': image, 'owner': EVE, **properties})

    def refused(self, server):
        error = self.assertRaises(
            exception.BitstreamError, self.host.start_guest, server)
        self.assertEqual([], self.programmed)
        self.assertNotIn(server, self.host.cloud.running())
        return exception.for_owner(error)

    @ddt.data('community', 'public')
    def test_of_a_server(self, visibility):
        image = self.host.upload(FUNCTION, {
            'owner': clouds.PROJECT, 'visibility': 'private'})
        server = self.boot(image)
        self.reuse(image, visibility=visibility)
        self.after_a_power_cut()
        self.assertIn('its id was used again', self.refused(server))

    def test_same_image(self):
        image = self.host.upload(FUNCTION, {
            'owner': EVE, 'visibility': 'community'})
        server = self.boot(image)
        self.after_a_power_cut()
        self.host.start_guest(server)
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    @ddt.data(True, False)
    def test_first_attempt_fails(self, is_known):
        """The region's record is gone then, and the claim has the hash.

        :param is_known: whether that is so; not of a claim that an earlier
            release wrote into the guest.
        """
        image = self.host.upload(FUNCTION, {
            'owner': clouds.PROJECT, 'visibility': 'private'})
        server = self.boot(image)
        self.reuse(image, visibility='community')
        # so that the cache has the id
        self.host.boot(
            base.asks(runtime_programming='true'), self.host.allocation(B),
            {'accel1:bitstream_id': image}, project=EVE)
        self.host.power_cut()
        self.restart()
        self.host.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.assertRaises(exception.ProgrammingFailed,
                          self.host.start_guest, server)
        if is_known:
            self.host.start_guest(server)
            self.assertEqual(plain(FUNCTION), self.host.carries(A))
            return
        self.host.store.update(self.host.holdings.of(server),
                               restore_content=None)
        self.assertRaises(exception.ImageNotFound,
                          self.host.start_guest, server)
        self.assertNotEqual(plain(OTHER), self.host.carries(A))

    def test_of_the_operator(self):
        """A new image of the operator is not what was on the card."""
        image = self.host.upload(FUNCTION)
        server = self.host.boot(base.asks(FUNCTION), self.host.allocation(A))
        self.host.cloud.delete_image(image)
        self.host.upload(OTHER, {'id': image})
        shutil.rmtree(conf.CONF.accel.bitstream_cache)
        self.host.delete(server)
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    def test_of_the_next_server(self):
        """A region with the data before does not carry the image of today."""
        image = self.host.upload(FUNCTION)
        self.host.delete(self.host.boot(
            base.asks(FUNCTION), self.host.allocation(A)))
        self.host.cloud.delete_image(image)
        self.host.upload(OTHER, {'id': image})
        self.host.boot(base.asks(OTHER), self.host.allocation(A))
        self.assertEqual(plain(OTHER), self.host.carries(A))
