# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A host leaves nova_accel: its providers, with Placement and Nova."""

import os

import fixtures
from nova.cmd import manage
from nova.virt.libvirt import driver as libvirt_driver
from oslo_config import cfg
from oslo_utils import uuidutils

from nova_accel.cmd import cloud as commands_cloud
from nova_accel.cmd import providers
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from tests.functional import base
from tests.functional import openstack
from tests.host import base as host_base

CONF = cfg.CONF


class PurgeTest(base.AcceleratorTestBase):

    FRESH_CLOUD = True
    HOSTS = {name: {'cards': [
        base.card('0000:5e:00.0', [base.NLB0, base.NLB3])]}
        for name in ('compute1', 'compute2')}

    def setUp(self):
        super().setUp()
        # as an operator has them, who has no Keystone
        for name, value in (
                ('AUTH_TYPE', 'admin_token'), ('TOKEN', 'admin:openstack'),
                ('ENDPOINT', self.placement.fixture.endpoint),
                ('PLACEMENT_ENDPOINT_OVERRIDE',
                 self.placement.fixture.endpoint),
                ('COMPUTE_ENDPOINT_OVERRIDE', self.admin_api.base_url)):
            self.useFixture(fixtures.EnvironmentVariable(f'OS_{name}', value))
        self.service = commands_cloud.Cloud()
        self.compute = self.service.adapter('compute')
        # in Nova's test harness they stand for a token
        self.compute.additional_headers.update({
            'X-Auth-User': 'admin', 'X-Auth-Project-Id': 'openstack',
            'X-Roles': 'admin'})

    def names(self, host):
        return {name for name in self.provider_tree()
                if name.startswith(f'{host}_')}

    def stock_driver(self, host):
        """nova-compute of the host starts with Nova's own driver."""
        self.flags(compute_driver='libvirt.LibvirtDriver')
        self.restart_compute_service(host)
        self.assertIs(libvirt_driver.LibvirtDriver,
                      type(self.computes[host].manager.driver))

    def test_host_returns_to_the_driver_of_nova(self):
        flavor = base.fpga_flavor(function_id=base.NLB0)
        before = self.names('compute1')
        self.assertEqual(3, len(before))
        self.stock_driver('compute1')
        self.assertEqual(before, self.names('compute1'))
        # of two servers one would have been built there
        server = self.boot(flavor)
        self.assertEqual('compute2', self.admin_api.get_server(
            server['id'])['OS-EXT-SRV-ATTR:host'])
        self.boot(flavor, expected_state='ERROR')
        self.assertIn('Host compute1 gets no servers with accelerators',
                      '\n'.join(text for _, text in self.logs()))
        self.assertTrue(providers.is_running(self.service, 'compute1'))
        providers.purge(self.service, 'compute1')
        self.assertEqual(set(), self.names('compute1'))
        self.assertEqual(3, len(self.names('compute2')))
        self.report()
        self.assertEqual(set(), self.names('compute1'))

    def test_what_remains_on_a_host(self):
        """The driver of Nova runs, and the providers are removed."""
        image = self.upload_bitstream(base.CRYPTO)
        self._delete_server(self.boot(
            base.fpga_flavor(function_id=base.CRYPTO), host='compute1'))
        self.claims()
        self.stock_driver('compute1')
        providers.purge(self.service, 'compute1')
        kernel, card = self.simulated('compute1'), '0000:5e:00.0'
        carried = sorted(host_base.function_on_card(kernel, vf)
                         for vf in pci.virtual_functions(kernel, card))
        self.assertEqual(2, len(carried))
        self.assertIn(model.uuid_hex(base.CRYPTO), carried)
        cache = os.path.join(self.directory, 'cache')
        cached = os.listdir(cache)
        self.assertIn(f'image-{image.replace("-", "")}', cached)
        self.assertTrue(os.path.exists(os.path.join(
            CONF.state_path, 'accel_claims_compute1.sqlite')))
        kernel.reboot()
        self.assertEqual([], pci.virtual_functions(kernel, card))
        self.assertEqual(carried, sorted(
            host_base.functions_on_card(kernel, card)))
        self.assertEqual(cached, os.listdir(cache))

    def test_refused(self):
        """While a server has a device, and for a host that Nova lacks."""
        for host in ('compute9', 'compute1_accel_0000:5e:00.0'):
            error = self.assertRaises(exception.NotThere,
                                      providers.purge, self.service, host)
            self.assertIn(f'compute node {host!r}, and has none with this '
                          f'name', str(error))
        self.assertFalse(providers.is_running(self.service, 'compute9'))
        server = self.boot(base.fpga_flavor(function_id=base.NLB0))
        host = self.admin_api.get_server(
            server['id'])['OS-EXT-SRV-ATTR:host']
        before = self.names(host)
        error = self.assertRaises(exception.DeviceUnavailable,
                                  providers.purge, self.service, host)
        self.assertIn(f'{server["id"]} from {host}_accel_0000:5e:00.0_region',
                      str(error))
        self.assertEqual(before, self.names(host))
        self._delete_server(server)
        self.claims()
        found = providers.purge(self.service, host, dry_run=True)
        self.assertEqual(before, {p.name for p in found})
        # regions before their card
        self.assertEqual(f'{host}_accel_0000:5e:00.0', found[-1].name)
        self.assertEqual(before, self.names(host))
        # of nova_accel itself: what Placement keeps can be deleted
        for name in self.computes:
            providers.purge(self.service, name)
        trait = f'/traits/{naming.function_trait(base.NLB3)}'
        self.assertEqual(204, self.placement.get(
            trait, version='1.6').status)
        self.placement.delete(trait, version='1.6')
        self.assertEqual(404, self.placement.get(
            trait, version='1.6').status)

    def test_tree_that_changes_meanwhile(self):
        """nova-compute adds a region between the look and the removal."""
        card = self.provider('compute1_accel_0000:5e:00.0')['uuid']
        adapter = self.service.adapter('placement')
        look, added = adapter.get, []

        def add_after(url, **kwargs):
            response = look(url, **kwargs)
            if url.endswith(f'{card}/allocations') and not added:
                added.append(url)
                made = self.placement.post('/resource_providers', {
                    'name': 'compute1_accel_0000:5e:00.0_region2',
                    'parent_provider_uuid': card}, version='1.20').body
                self.placement.put(
                    f'/resource_providers/{made["uuid"]}/traits', {
                        'traits': ['OWNER_CYBORG'],
                        'resource_provider_generation': made['generation']},
                    version='1.14')
            return response
        adapter.get = add_after
        self.assertEqual(4, len(providers.purge(self.service, 'compute1')))
        self.assertEqual(set(), self.names('compute1'))


class OrphanTest(base.AcceleratorTestBase):
    """The allocation of a consumer that is not a server of Nova."""

    HOSTS = {'compute1': {'cards': [base.card('0000:5e:00.0')]}}
    CLASS = 'CUSTOM_ACCELERATOR_FPGA'

    def test_delete(self):
        """nova-manage placement audit --delete deletes Nova's own classes
        only; the command that our messages name deletes all."""
        region = self.provider('compute1_accel_0000:5e:00.0_region0')['uuid']
        node = self.compute_rp_uuids['compute1']
        orphan = uuidutils.generate_uuid()
        url = f'/allocations/{orphan}'
        self.placement.put(url, {
            'allocations': {node: {'resources': {'MEMORY_MB': 1}},
                            region: {'resources': {self.CLASS: 1}}},
            'project_id': 'demo', 'user_id': 'demo',
            'consumer_generation': None}, version='1.28')
        self.assertEqual(4, manage.PlacementCommands().audit(delete=True))
        self.assertEqual(
            {region}, set(self.placement.get(url).body['allocations']))
        self.become_operator()
        self.assertEqual((0, '', ''), openstack.run(
            'resource', 'provider', 'allocation', 'delete', orphan))
        self.assertEqual({}, self.placement.get(url).body['allocations'])
