# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The plugin of the command openstack, in openstackclient itself.

Its entry points are those of the installation.
"""

# chooses the threading mode, and so comes before the rest of Nova
from tests import functional  # noqa: F401

import json
import os

import fixtures
import testtools

from nova_accel import conf
from nova_accel import model
from nova_accel import naming
from tests.functional import openstack
from tests.unit import placement

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
FUNCTION = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
SERVER = '5e5e5e5e-1111-4222-8333-444444444444'


class OpenStackTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.addCleanup(conf.CONF.reset)
        self.services = self.useFixture(placement.Services())
        root = self.services.provider('compute1', inventory={'VCPU': 8})
        card = self.services.provider('compute1_accel_0000:5e:00.0', root)
        self.region = self.services.provider(
            'compute1_accel_0000:5e:00.0_region0', card, {FPGA: 1},
            {naming.function_trait(model.uuid_hex(FUNCTION))})
        self.services.allocate(SERVER, self.region, **{FPGA: 1})
        self.services.answer('/servers?all_tenants=1&limit=1000&node=', {
            'servers': [{'id': SERVER, 'name': 'web1'}]})

    def openstack(self, *arguments):
        status, stdout, stderr = openstack.run(*arguments)
        # no warning of a name that openstack has itself, either
        self.assertEqual((0, ''), (status, stderr))
        return stdout

    def test_devices(self):
        card, region = json.loads(self.openstack(
            'accelerator', 'provider', 'list', '-f', 'json', 'compute1'))
        self.assertEqual('compute1_accel_0000:5e:00.0', card['Provider'])
        self.assertEqual(
            ['compute1', self.region, FPGA, FUNCTION, 1,
             [{'id': SERVER, 'name': 'web1', 'amount': 1}]],
            [region[name] for name in ('Host', 'UUID', 'Class', 'Function ID',
                                       'Used', 'Held by')])
        self.assertIn('0000:5e:00.0',
                      self.openstack('accelerator', 'provider', 'list'))

    def test_claims(self):
        row, = json.loads(self.openstack(
            'accelerator', 'claim', 'list', '-f', 'json'))
        self.assertEqual({
            'Server': 'web1', 'Server ID': SERVER, 'Amount': 1, 'Class': FPGA,
            'Function': FUNCTION, 'Host': 'compute1',
            'Provider': 'compute1_accel_0000:5e:00.0_region0',
            'Provider ID': self.region}, row)

    def test_profiles(self):
        directory = self.useFixture(fixtures.TempDir()).path
        config = os.path.join(directory, 'nova.conf')
        with open(config, 'w') as file:
            file.write(f'[accel]\ndevice_profiles = {directory}\n')
        with open(os.path.join(directory, 'nlb.yaml'), 'w') as file:
            file.write(f'name: nlb\ngroups:\n- resources:{FPGA}: 1\n')
        self.assertEqual(['nlb'], [row['Name'] for row in json.loads(
            self.openstack('accelerator', 'profile', 'list', '-f', 'json',
                           '--config-file', config))])
