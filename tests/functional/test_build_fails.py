# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What goes wrong says why, and leaves nothing behind."""

from unittest import mock

import fixtures
from nova.compute import manager
from nova.compute import task_states
from nova import objects
import oslo_messaging as messaging

from nova_accel import model
from nova_accel import naming
from tests.functional import base
from tests.functional import cloud
from tests.functional import process

DEVICE, VF = '0000:5e:00.0', '0000:5e:00.1'
FUNCTION = 'a9d4b7a2-6d9e-4f3b-8a47-31f0b5c0f9d1'


class BuildFailsTest(base.AcceleratorTestBase):

    def setUp(self):
        super().setUp()
        self.specs = base.fpga_flavor(function_id=FUNCTION)

    def assertNothingLeft(self, server=None):
        """No claim, no allocation, and each region as it was or empty."""
        self.assertEqual([], self.claims())
        if server:
            self.assertEqual(
                {}, self._get_allocations_by_server_uuid(server['id']))
        for usages in (u for _t, _r, u in self.provider_tree().values()):
            self.assertFalse(any(usages.values()))

    def assertRefused(self, specs, *words, **kwargs):
        """The build ends in ERROR, says the words, and leaves nothing."""
        server = self.boot(specs, expected_state='ERROR', **kwargs)
        for word in words:
            self.assertIn(word, self.fault(server))
        # a whole sentence: Nova cuts faults off after 255 characters
        self.assertTrue(self.fault(server).endswith('.'), self.fault(server))
        self.assertNothingLeft(server)
        for host in self.HOSTS:
            self.assertNotIn(
                naming.function_trait(FUNCTION),
                self.traits(f'{host}_accel_{DEVICE}_region0'))
        return server

    def test_database_is_away(self):
        """Before spawn(), and where Nova cleans up after that: it calls
        neither, and what was claimed for the build is released."""
        save = objects.Instance.save

        def away(*args, **kwargs):
            raise messaging.MessagingTimeout('nova-conductor is away')

        def saved(instance, *args, **kwargs):
            if kwargs.get('expected_task_state') == (
                    task_states.BLOCK_DEVICE_MAPPING):
                away()
            return save(instance, *args, **kwargs)
        with mock.patch.object(objects.Instance, 'save', saved), \
                mock.patch.object(manager.ComputeManager,
                                  '_get_instance_block_device_info', away):
            server = self.boot(base.fpga_flavor(), expected_state='ERROR')
        process.until(lambda: self.assertEqual([], self.claims()))
        self.api.delete_server(server['id'])
        self._wait_until_deleted(server)

    # Bitstreams that cannot be used; more in test_glance, and in
    # tests/host/test_refused.py

    def test_image_of_another_project(self):
        other = self.glance.service.client('eve', 'others')
        image = self.upload_bitstream(
            FUNCTION, client=other, properties={'visibility': 'private'})
        flavor = self._create_flavor(
            extra_spec=base.fpga_flavor(bitstream_id=image))
        self.api = self.api_fixture.api
        self.api.microversion = self.microversion
        server = self._create_server(
            flavor_id=flavor, networks='none', expected_state='ERROR')
        self.assertIn(image, self.fault(server))
        self.assertNothingLeft(server)

    def test_not_a_bitstream(self):
        image = self.upload_bitstream(FUNCTION, data=b'#!/bin/sh\n' * 100)
        self.assertRefused(self.specs, image)

    def test_glance_does_not_answer(self):
        self.upload_bitstream(FUNCTION)
        image = self.glance.guest_image
        with self.glance.service.fault('503', on='/v2/images'):
            self.assertRefused(self.specs, 'Glance', image_uuid=image)

    # Flavors

    def assertBadRequest(self, specs, *words):
        # Nova looks at the extra specs of a flavor only from 2.86 on
        self.admin_api.microversion = '2.85'
        flavor = self._create_flavor(extra_spec=specs)
        self.admin_api.microversion = self.microversion
        response = self.api.api_post(
            '/servers', {'server': self._build_server(
                flavor_id=flavor, networks='none')},
            check_response_status=[400])
        for word in words:
            self.assertIn(word, response.body['badRequest']['message'])
        self.assertNothingLeft()

    def test_malformed_profile(self):
        with open(self.profiles, 'w') as file:
            file.write('- name: p\n  groups:\n  - resurces:X: 1\n')
        self.assertBadRequest({'accel:device_profile': 'p'},
                              "'p'", 'ask the operator')
        said = dict(self.logs())['nova']
        self.assertIn('line 3', said)
        self.assertIn('resurces:X', said)

    def test_bad_values(self):
        for specs, word in (
                (base.fpga_flavor(amount=0), '=0'),
                (base.fpga_flavor(amount='-1'), '=-1'),
                (base.fpga_flavor(amount='one'), '=one'),
                (base.fpga_flavor(colour='red'), 'accel1:colour'),
                (base.fpga_flavor(function_id='nlb0'), 'nlb0'),
                (base.fpga_flavor(function_name='a/b'), 'a/b'),
                (base.fpga_flavor(function_name='x' * 240), '255')):
            self.assertBadRequest(specs, word)

    # Cards

    @cloud.fresh
    def test_card_does_not_answer(self):
        self.upload_bitstream(FUNCTION)
        self.flags(programming_timeout=1, group='accel')
        for host in self.HOSTS:
            self.kernel(host).set_fault(DEVICE, hang='program')
        server = self.boot(self.specs, expected_state='ERROR')
        self.flags(programming_timeout=300, group='accel')
        self.assertIn('did not end within 1 s', self.fault(server))
        self.assertNothingLeft(server)
        # the region is kept from others, and the service goes on
        self.report()
        for host in self.HOSTS:
            totals, traits, _ = self.provider_tree()[
                f'{host}_accel_{DEVICE}_region0']
            self.assertEqual(base.FENCED_REGION, totals)
            self.assertIn(naming.FENCED, traits)
        self.boot({})
        for host in self.HOSTS:
            self.kernel(host).set_fault(DEVICE, hang=None)
        self._wait_for_assert(self.assertUsable)

    def assertUsable(self):
        self.report()
        for totals, traits, _ in self.provider_tree().values():
            self.assertNotIn(naming.FENCED, traits)
            self.assertIn(totals, ({}, base.REGION))

    def test_guest_does_not_start(self):
        # something else takes the card away from the host right after
        # nova-compute asked who has it
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.sim.SimulatedKernel.is_group_open',
            mock.Mock(return_value=False)))
        for host in self.HOSTS:
            self.kernel(host).guest_takes(VF)
        server = self.boot(base.fpga_flavor(), expected_state='ERROR')
        self.assertIn('which libvirt refuses', self.fault(server))
        # its words are for the log
        self.assertNotIn(VF, self.fault(server))
        # nobody knows what that did to the card
        self.assertEqual({model.ClaimState.DELETING},
                         {c.state for c in self.claims()})
        for host in self.HOSTS:
            self.kernel(host).guest_returns(VF)
            self.computes[host].driver.parts.reconciler.run()
        self.assertNothingLeft(server)
