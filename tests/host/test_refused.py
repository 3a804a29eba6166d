# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A build that is refused says why, and leaves nothing behind.

What Glance answers is in tests/functional/test_glance.py.
"""

import uuid

from nova_accel import exception
from nova_accel import model
from tests.host import base
from tests.unit.host import A, FIRST, FUNCTION, OTHER, plain, vf

OTHER_INTERFACE = '69528db6-eb31-577a-8c36-68f9faa081f6'


class RefusedTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.start_host({'address': A, 'functions': [FIRST]})
        self.specs = base.asks(FUNCTION)

    def assertRefused(self, *words, specs=None):
        error = self.assertRaises(
            exception.AcceleratorError, self.host.boot, specs or self.specs,
            self.host.allocation(A))
        for word in words:
            self.assertIn(word, str(error))
        # a whole sentence
        self.assertTrue(str(error).endswith('.'), str(error))
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual(plain(FIRST), self.host.carries(A))
        self.host.report()
        self.assertEqual([], self.host.fenced())

    def named(self, **more):
        """A bitstream that is found by the function."""
        return self.host.upload(FUNCTION, **more)

    def test_no_image_has_the_function(self):
        self.assertRefused(FUNCTION, 'image')

    def test_several_images_have_the_function(self):
        images = [self.named() for _ in range(2)]
        self.assertRefused(FUNCTION, *images)

    def test_image_is_missing(self):
        image = str(uuid.uuid4())
        self.assertRefused(image, specs=base.asks(bitstream_id=image))

    def test_image_of_another_project(self):
        image = self.named(image={'visibility': 'private', 'owner': 'eve'})
        error = self.assertRaises(
            exception.AcceleratorError, self.host.boot,
            base.asks(bitstream_id=image), self.host.allocation(A),
            context=self.host.cloud.user_context('demo'))
        self.assertIn(image, str(error))
        self.assertEqual([], self.host.holdings.all())

    def test_not_a_bitstream(self):
        self.assertRefused(self.host.cloud.upload(
            b'#!/bin/sh\n' * 100, **{'accel:function_id': FUNCTION}))

    def test_wrong_bytes(self):
        image = self.named()
        record = self.host.cloud.service_images().answer(
            f'/v2/images/{image}')[1]
        self.host.cloud.change_image(image, os_hash_value='0' * 128)
        self.assertRefused(image)
        # nothing bad was kept: the same image now works
        self.host.cloud.change_image(
            image, os_hash_value=record['os_hash_value'])
        server = self.host.boot(self.specs, self.host.allocation(A))
        self.assertHas(server, vf(A))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))

    def test_other_function_than_the_properties_say(self):
        image = self.host.upload(OTHER, {'accel:function_id': FUNCTION})
        self.assertRefused(image, OTHER)

    def test_wrong_interface(self):
        image = self.named(interface=OTHER_INTERFACE)
        self.assertRefused(image, OTHER_INTERFACE,
                           specs=base.asks(bitstream_id=image))

    def test_larger_than_the_limit(self):
        self.config.config(bitstream_max_size=1, group='accel')
        self.named(size=2 << 20)
        self.assertRefused('bitstream_max_size')

    def test_taken_since_it_was_scheduled(self):
        """A server that Placement has forgotten holds it here."""
        provider_uuid, = self.host.allocation(A)
        self.host.store.add([model.Claim(
            uuid=str(uuid.uuid4()), instance_uuid=str(uuid.uuid4()),
            consumer_uuid=str(uuid.uuid4()),
            provider_uuid=provider_uuid, resource_class=base.FPGA, group='1',
            device_address=A, region_index=0,
            handle=model.AttachHandle(model.HandleType.PCI, vf(A)))])
        error = self.assertRaises(
            exception.AcceleratorError, self.host.boot, base.asks(),
            self.host.allocation(A))
        self.assertIn('0 of it are free', str(error))
        # the name of the provider begins with that of the host
        self.assertNotIn('_accel_', exception.for_owner(error))
        # neither guest nor allocation stands behind that claim
        self.host.reconcile()
        self.assertEqual([], self.host.holdings.all())
        self.assertHas(self.host.boot(base.asks(), self.host.allocation(A)),
                       vf(A))

    def test_placement_says_nothing(self):
        server = self.host.cloud.add_server(base.asks())
        error = self.assertRaises(
            exception.AcceleratorError, self.host.spawn, server)
        self.assertIn('allocation has no accelerators', str(error))
        self.assertEqual([], self.host.holdings.all())
