# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What servers are given, on a simulated host and without Nova."""

import os
import uuid

import fixtures
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel import exception
from nova_accel.virt import attach
from tests.unit.host import A, SimulatedHost

NODE = 'host'
SPECS = {'resources1:CUSTOM_ACCELERATOR_FPGA': '1'}


class AttachTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = self.useFixture(config_fixture.Config(conf.CONF))
        self.instance = str(uuid.uuid4())

    def start(self, *cards, drivers=('dfl',), **more):
        """nova-compute starts, for the first time or again."""
        if cards or more:
            self.host = self.useFixture(SimulatedHost(*cards, **more))
            self.state = self.useFixture(fixtures.TempDir()).path
        self.config.config(
            enabled_drivers=list(drivers), simulated_host=self.host.path,
            bitstream_cache=os.path.join(self.state, 'cache'), group='accel')
        self.accelerators = attach.Accelerators(
            images=None, publish=lambda context, uuids: None)
        self.accelerators.initialize(NODE, self.state)
        self.addCleanup(self.accelerators.close)
        inventory = self.accelerators.inventory
        inventory.node, inventory._root_uuid = NODE, str(uuid.uuid5(
            uuid.NAMESPACE_DNS, NODE))

    def allocation(self, resource_class='CUSTOM_ACCELERATOR_FPGA'):
        return {p.uuid: {'resources': {resource_class: 1}} for p in
                self.accelerators.inventory.own_providers().values()
                if resource_class in p.inventory}

    def plug(self, allocations, specs=SPECS):
        return self.accelerators.plug(
            None, self.instance, specs, allocations, {})

    def test_allocation_without_accelerator(self):
        self.start({'address': A})
        error = self.assertRaises(exception.DeviceUnavailable, self.plug, {})
        self.assertIn('the allocation has none of ours', str(error))
        self.assertEqual([], self.accelerators.store.claims())

    def test_native_vgpu_beside_standard_classes(self):
        """A class of both Nova's and ours, allocated from Nova's provider."""
        self.start({'address': A})
        self.config.config(resource_classes='standard', group='accel')
        self.assertEqual([], self.plug(
            {str(uuid.uuid4()): {'resources': {'VGPU': 1}}},
            {'resources1:VGPU': '1'}))

    def test_vf_that_was_not_made_again(self):
        self.start({'address': A, 'product': 'PAC_D5005', 'ports': 1,
                    'vfs': 1})
        claim, = self.plug(self.allocation())
        self.accelerators.restore(None, self.instance)
        self.host.kernel.reboot()
        self.start()
        error = self.assertRaises(
            exception.DeviceUnavailable, self.accelerators.restore, None,
            self.instance)
        self.assertIn(f'{claim.handle.address} of {A}', str(error))
        self.config.config(virtual_functions=[f'{A}=1'], group='accel')
        self.host.kernel.reboot()
        self.start()
        self.accelerators.restore(None, self.instance)
