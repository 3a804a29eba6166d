# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Device profiles and extra specs through Nova's own REST API."""

import os
import uuid

import fixtures
# chooses the threading mode, and so comes before the rest of Nova
from nova.tests.functional import integrated_helpers

from nova.compute import api as compute_api
from nova.compute import flavors
from nova import context
from nova.limit import local as local_limit
from nova import objects
from nova.tests.functional.api import client
from oslo_limit import fixture as limit_fixture
import yaml

from nova_accel.api import expansion
from nova_accel.api import extra_specs
from nova_accel import conf
from nova_accel import request
from tests import functional

FUNCTION = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
EXPANDED = {f'resources_ACCEL0:{FPGA}': '1',
            'trait_ACCEL0:CUSTOM_FPGA_INTEL': 'required',
            'accel_ACCEL0:function_id': FUNCTION, 'accel:profile': 'nlb'}


class ExpansionTest(integrated_helpers.ProviderUsageBaseTestCase):
    """Servers on Nova's fake hosts, each with one region in Placement."""

    compute_driver = 'fake.SmallFakeDriver'

    def setUp(self):
        self.flags(api_paste_config=functional.API_PASTE, group='wsgi')
        super().setUp()
        self.flags(device_profiles=os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'profiles.yaml'),
            group='accel')
        self.write_profile()
        for host in ('host1', 'host2'):
            self._start_compute(host)
            self.add_region(host)

    def write_profile(self, **changes):
        with open(conf.CONF.accel.device_profiles, 'w') as file:
            yaml.safe_dump({'name': 'nlb', 'groups': [{
                f'resources:{FPGA}': 1, 'trait:CUSTOM_FPGA_INTEL': 'required',
                'accel:function_id': FUNCTION, **changes}]}, file)

    def add_region(self, host):
        uuid = self.placement.post('/resource_providers', version='1.20', body={
            'name': f'{host}_region',
            'parent_provider_uuid': self._get_provider_uuid_by_host(host),
        }).body['uuid']
        for trait in ('CUSTOM_FPGA_INTEL',):
            self.placement.put(f'/traits/{trait}', {}, version='1.6')
        self.placement.put(f'/resource_classes/{FPGA}', {}, version='1.7')
        self._set_inventory(uuid, {'resource_class': FPGA, 'total': 1})
        self._set_provider_traits(uuid, ['CUSTOM_FPGA_INTEL'])
        return uuid

    def flavor(self, **specs):
        return self._create_flavor(extra_spec={
            k.replace('__', ':'): v for k, v in specs.items()})

    def refused(self, call, *args, **kwargs):
        error = self.assertRaises(client.OpenStackApiException, call, *args,
                                  **kwargs)
        self.assertEqual(400, error.response.status_code)
        return error.response.json()['badRequest']['message']

    def test_create(self):
        flavor = self.flavor(accel__device_profile='nlb', hw__cpu_sockets='1')
        server = self._create_server(flavor_id=flavor, networks='none')
        self.assertEqual({**EXPANDED, 'hw:cpu_sockets': '1'},
                         server['flavor']['extra_specs'])
        allocated = self._get_allocations_by_server_uuid(server['id'])
        self.assertIn({FPGA: 1}, [a['resources'] for a in allocated.values()])
        # the operator sees what he wrote, and can change it
        for url in (f'flavors/{flavor}/os-extra_specs', f'flavors/{flavor}'):
            body = self.admin_api.api_get(url).body
            self.assertEqual(
                {'accel:device_profile': 'nlb', 'hw:cpu_sockets': '1'},
                body.get('extra_specs') or body['flavor']['extra_specs'])
        self.admin_api.api_delete(
            f'flavors/{flavor}/os-extra_specs/hw:cpu_sockets')
        self.assertEqual(
            {'accel:device_profile': 'nlb'}, self.admin_api.api_get(
                f'flavors/{flavor}/os-extra_specs').body['extra_specs'])
        # an edited profile changes nothing that runs
        self.write_profile(**{'trait:CUSTOM_FPGA_INTEL': 'forbidden'})
        server = self.admin_api.get_server(server['id'])
        self.assertEqual({**EXPANDED, 'hw:cpu_sockets': '1'},
                         server['flavor']['extra_specs'])
        # nor does Nova's ban for Cyborg's flavors apply
        self._suspend_server(server)
        self._resume_server(server)

    def limit(self, **classes):
        """Unified limits of the project, as Keystone has them."""
        self.flags(driver='nova.quota.UnifiedLimitsDriver', group='quota')
        self.useFixture(limit_fixture.LimitFixture({
            local_limit.SERVER_METADATA_ITEMS: 128,
            local_limit.INJECTED_FILES: 5,
            local_limit.INJECTED_FILES_CONTENT: 10240,
            local_limit.INJECTED_FILES_PATH: 255,
            'servers': 10, 'class:VCPU': 100, 'class:MEMORY_MB': 1 << 20,
            'class:DISK_GB': 1000, **{
                f'class:{name}': count for name, count in classes.items()}},
            {}))

    def over_limit(self, call, *args, **kwargs):
        error = self.assertRaises(client.OpenStackApiException, call, *args,
                                  **kwargs)
        self.assertEqual(403, error.response.status_code)
        self.assertIn(f'class:{FPGA}',
                      error.response.json()['forbidden']['message'])

    def create(self, flavor):
        return self.api.post_server({'server': self._build_server(
            flavor_id=flavor, networks='none')})

    def test_quota_by_profile(self):
        """Also at a resize; what is deleted counts no more."""
        self.limit(**{FPGA: 1})
        by_profile = self.flavor(accel__device_profile='nlb')
        first = self._create_server(flavor_id=by_profile, networks='none')
        self.over_limit(self.create, by_profile)
        plain = self._create_server(
            flavor_id=self.flavor(), networks='none')
        self.over_limit(self.api.post_server_action, plain['id'], {
            'resize': {'flavorRef': by_profile}})
        self._delete_server(first)
        self._create_server(flavor_id=by_profile, networks='none')

    def test_quota_by_group(self):
        self.limit(**{FPGA: 1})
        by_group = self.flavor(**{f'resources1__{FPGA}': '1'})
        self._create_server(flavor_id=by_group, networks='none')
        self.over_limit(self.create, by_group)

    def test_unknown_profile(self):
        flavor = self.flavor(accel__device_profile='nbl')
        self.assertEqual(
            "The flavor asks for the device profile 'nbl', which cannot be "
            "used: ask the operator of the cloud.",
            self.refused(self.api.post_server, {'server': self._build_server(
                flavor_id=flavor, networks='none')}))
        self.assertIn(f"'nbl', and {conf.CONF.accel.device_profiles} has nlb",
                      self.stdlog.logger.output)

    def test_malformed_profile(self):
        """The operator is told; what was good in the file stays."""
        flavor = self.flavor(accel__device_profile='nlb')
        self.write_profile(**{'accel:function_id': 'nlb'})
        os.rename(conf.CONF.accel.device_profiles,
                  f'{conf.CONF.accel.device_profiles}.bad')
        self.write_profile()
        self._delete_server(self._create_server(
            flavor_id=flavor, networks='none'))
        os.rename(f'{conf.CONF.accel.device_profiles}.bad',
                  conf.CONF.accel.device_profiles)
        server = self._create_server(flavor_id=flavor, networks='none')
        self.assertEqual(EXPANDED, server['flavor']['extra_specs'])
        said = self.stdlog.logger.output
        self.assertIn("line 2, key 'accel:function_id'", said)
        self.assertIn('is not a UUID', said)

    def test_groups_of_the_operator_are_checked(self):
        # as stored before 2.86, when Nova validated nothing
        self.admin_api.microversion = '2.85'
        flavor = self.flavor(**{f'resources1__{FPGA}': '1',
                                'accel1__function_id': 'nlb'})
        self.admin_api.microversion = 'latest'
        self.assertEqual(
            'accel1:function_id=nlb is not a UUID: give the UUID of the '
            'function.', self.refused(
                self.api.post_server, {'server': self._build_server(
                    flavor_id=flavor, networks='none')}))

    def test_resize(self):
        plain = self.flavor()
        server = self._create_server(flavor_id=plain, networks='none')
        flavor = self.flavor(accel__device_profile='nlb')
        server = self._resize_server(server, flavor)
        self.assertEqual(EXPANDED, server['flavor']['extra_specs'])
        server = self._confirm_resize(server)
        # and from there on
        server = self._migrate_server(server)
        self.assertEqual(EXPANDED, server['flavor']['extra_specs'])
        server = self._confirm_resize(server)
        other = self._create_flavor(
            vcpu=1, extra_spec={'accel:device_profile': 'nlb',
                                'hw:cpu_sockets': '1'})
        server = self._resize_server(server, other)
        server = self._revert_resize(server)
        self.assertEqual(EXPANDED, server['flavor']['extra_specs'])
        self.assertEqual(
            {'accel:device_profile': 'nlb'}, self.admin_api.api_get(
                f'flavors/{flavor}/os-extra_specs').body['extra_specs'])

    def test_resize_to_unknown_profile(self):
        server = self._create_server(
            flavor_id=self.flavor(), networks='none')
        flavor = self.flavor(accel__device_profile='nbl')
        self.assertIn(
            "device profile 'nbl'", self.refused(
                self.api.post_server_action, server['id'],
                {'resize': {'flavorRef': flavor}}))
        server = self.api.get_server(server['id'])
        self.assertEqual('ACTIVE', server['status'])
        # a failed resize leaves nothing behind in the process
        self.assertEqual(
            'nbl', self.admin_api.api_get(f'flavors/{flavor}').body[
                'flavor']['extra_specs']['accel:device_profile'])

    def image(self, **properties):
        """Return the id of an image with these properties."""
        return self.glance.create(None, {
            'name': 'x', 'status': 'active', 'container_format': 'bare',
            'disk_format': 'raw', 'size': 1, 'min_ram': 0, 'min_disk': 0,
            'properties': properties})['id']

    def test_confidential_guests(self):
        """A device of the host cannot read encrypted memory."""
        uefi = self.image(hw_firmware_type='uefi', hw_machine_type='q35')
        encrypted = self.image(hw_firmware_type='uefi', hw_machine_type='q35',
                               hw_mem_encryption='true')
        plain, fpga, both = self.flavor(), self.flavor(
            accel__device_profile='nlb'), self.flavor(
            accel__device_profile='nlb', hw__mem_encryption='true')
        said = 'asks for encrypted memory'
        for flavor, image in (both, uefi), (fpga, encrypted):
            self.assertIn(said, self.refused(
                self.api.post_server, {'server': self._build_server(
                    flavor_id=flavor, image_uuid=image, networks='none')}))
        # what Nova refuses anyway it says itself
        self.assertNotIn(said, self.refused(
            self.api.post_server, {'server': self._build_server(
                flavor_id=both, image_uuid=self.image(
                    hw_firmware_type='bios'), networks='none')}))
        server = self._create_server(
            flavor_id=fpga, image_uuid=uefi, networks='none')
        for action in ({'rebuild': {'imageRef': encrypted}},
                       {'resize': {'flavorRef': both}}):
            self.assertIn(said, self.refused(
                self.api.post_server_action, server['id'], action))
        # as an earlier nova_accel let it be created
        server = self._shelve_server(server)
        instance = objects.Instance.get_by_uuid(
            context.get_admin_context(), server['id'])
        instance.system_metadata['image_hw_mem_encryption'] = 'true'
        instance.save()
        self.assertIn(said, self.refused(
            self.api.post_server_action, server['id'], {'unshelve': None}))
        # an encrypted server without accelerators is Nova's business
        self.assertNotIn(said, str(self.api.post_server({
            'server': self._build_server(flavor_id=plain,
                                         image_uuid=encrypted,
                                         networks='none')})))

    def test_contradictions(self):
        """At the flavor, in one request or one after the other; and at create,
        of a flavor that an earlier nova_accel has let be made."""
        admin = context.get_admin_context()
        for specs in (
                {'accel:same': 'numa', 'accel:numa_affinity': 'none'},
                {f'resources1:{FPGA}': '1', 'accel1:function_id': FUNCTION,
                 'accel1:function_name': 'nlb'},
                {f'resources1:{FPGA}': '1', 'accel1:prefer': 'CUSTOM_A',
                 'trait1:CUSTOM_A': 'forbidden'},
                {'accel:near': 'rack=required,rack=preferred'}):
            flavor = self.flavor(**{f'resources1__{FPGA}': '1'})
            url = f'flavors/{flavor}/os-extra_specs'
            self.assertIn('keep one', self.refused(
                self.admin_api.api_post, url, {'extra_specs': specs}))
            *others, (last, value) = specs.items()
            self.admin_api.api_post(url, {'extra_specs': dict(others)})
            self.assertIn('keep one', self.refused(
                self.admin_api.api_put, f'{url}/{last}', {last: value}))
            self.assertNotIn(last, self.admin_api.api_get(
                url).body['extra_specs'])
            made = objects.Flavor.get_by_flavor_id(admin, flavor)
            made._flavor_extra_specs_add(admin, made.id, {last: value})
            self.assertIn('keep one', self.refused(self.create, flavor))
            # incomplete options contradict nothing
            self.admin_api.api_delete(f'{url}/resources1:{FPGA}')

    def test_validators(self):
        flavor = self.flavor()
        url = f'flavors/{flavor}/os-extra_specs'
        spelled = FUNCTION.upper().replace('-', '_')
        for key, value in (
                ('accel:function_id', FUNCTION),
                ('accel1:function_id', FUNCTION.replace('-', '')),
                ('accel_ACCEL0:bitstream_id', FUNCTION),
                ('accel2:function_id', f'{FUNCTION}, {uuid.uuid4()}'),
                ('accel:function_name', 'nlb 0'),
                ('accel2:function_name', 'nlb 0,nlb-1'),
                ('accel:device_profile', 'nlb'), ('accel:profile', 'nlb'),
                ('accel1:driver_power_limit', '100'),
                ('accel:near', 'nvlink=required, rack=preferred'),
                *((key, value) for key, values in request.FLAVOR_KEYS.items()
                  for value in values[:3]), ('accelerate:foo', 'not ours'),
                (f'function:CUSTOM_FPGA_INTEL_FUNCTION_{spelled}',
                 'required'),
                ('function_name:nlb', 'required'),
                (f'bitstream:{FUNCTION}', 'required')):
            self.admin_api.api_post(url, {'extra_specs': {key: value}})
        for key, value in (
                ('accel:function_id', 'nlb'),
                ('accel2:function_id', f'{FUNCTION},nlb'),
                ('accel2:function_name', 'nlb,,nlb1'),
                ('accel_A:bitstream_id', FUNCTION + '0'),
                ('accel:function_name', '../nlb'),
                ('accel:function_name', 'n' * 230),
                ('accel:functoin_id', FUNCTION), ('accel:same', 'rack'),
                ('accel:numa_affinity', 'yes'), ('accel1:same', 'numa'),
                ('accel:max_downtime', '0'), ('accel:near', 'rack'),
                ('accel:near', 'rack=required,'), ('accel1:near', 'a=required'),
                ('accel_A:device_profile', 'nlb'),
                ('accel1:driver_', '1'), ('accel1:driver_a.b', '1'),
                ('function:nlb', 'required'),
                ('function_name:nlb', 'forbidden'),
                ('bitstream:latest', 'required')):
            said = self.refused(self.admin_api.api_post, url,
                                {'extra_specs': {key: value}})
            self.assertIn('Validation failed', said)

    def test_installed_once(self):
        before = (compute_api.API.create, compute_api.API.resize,
                  flavors.get_flavor_by_flavor_id)
        self.assertTrue(extra_specs.register())
        expansion.install()
        self.assertEqual(before, (
            compute_api.API.create, compute_api.API.resize,
            flavors.get_flavor_by_flavor_id))

    def test_failed_installation_is_an_error_in_the_log(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova.compute.api.API', type('API', (), {})))
        # Nova goes on to have the validators
        self.assertTrue(extra_specs.register())
        self.assertIn('could not be installed', self.stdlog.logger.output)
