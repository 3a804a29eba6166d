# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What nova-api refuses and expands: each condition of api/expansion.py."""

import itertools
import os
from unittest import mock

import ddt
import fixtures
from nova.compute import api as compute_api
from nova.compute import flavors
from nova import exception as nova_exception
from nova.objects import fields
from oslo_config import fixture as config_fixture
from oslo_limit import exception as limit_exceptions
import testtools
import yaml

from nova_accel.api import expansion
from nova_accel import conf
from nova_accel import exception
from nova_accel import request
from tests.unit import nova_api

FPGA, SSD = 'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_ACCELERATOR_SSD'
ONE = {f'resources1:{FPGA}': '1'}
SPECS = {
    'plain': {'hw:cpu_sockets': '1'}, 'one': ONE,
    'encrypted': {'hw:mem_encryption': 'true'},
    'both': {**ONE, 'hw:mem_encryption': 'true'},
    'several': {**ONE, f'resources2:{FPGA}': '2', f'resources3:{SSD}': '1'},
    'profile': {'accel:device_profile': 'nlb'},
    'detach': {**ONE, 'accel:live_migration': 'detach'},
    'transparent': {**ONE, 'accel:live_migration': 'transparent'},
    'runtime': {**ONE, 'accel1:runtime_programming': 'true'},
    'fixed': {**ONE, 'accel1:bitstream_id': nova_api.IMAGE},
    'malformed': {**ONE, 'accel1:bitstream': 'x'},
}
UEFI = {'hw_firmware_type': 'uefi', 'hw_machine_type': 'q35'}
#: all that Nova 34 takes for encrypted memory in the properties of an image
ENCRYPTED = [{**UEFI, 'hw_mem_encryption': value, **more}
             for value in ('true', 'True', '1', 'yes', 'on')
             for more in ({}, {'hw_mem_encryption_model': 'amd-sev'})]
#: which encrypts nothing
NOT_ENCRYPTED = [{}, UEFI, {'hw_mem_encryption': 'false'},
                 {**UEFI, 'hw_mem_encryption_model': 'amd-sev'},
                 {'trait:HW_CPU_X86_AMD_SEV': 'required'},
                 {'os_secure_boot': 'required'}]
REFUSED = 'asks for encrypted memory'
SNAPSHOT = {request.SNAPSHOT_PROPERTY: 'true'}


class ApiTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.nova = self.useFixture(nova_api.NovaApi(dict(SPECS)))
        self.api = self.nova.api
        self.config = self.useFixture(config_fixture.Config(conf.CONF))

    def refusal(self, call, *args, kind=nova_exception.InvalidRequest):
        return str(self.assertRaises(kind, call, None, *args))

    def boot(self, flavor, **properties):
        return self.api._validate_and_build_base_options(
            None, self.nova.flavor(flavor),
            {'id': nova_api.IMAGE, 'properties': properties})

    def rebuild(self, flavor, **properties):
        return self.api.rebuild(
            None, self.nova.server(flavor),
            {'id': nova_api.IMAGE, 'properties': properties})


@ddt.ddt
class ConfidentialTest(ApiTestCase):
    """A device of the host cannot read encrypted memory."""

    def ways(self, flavor, image):
        """Each way to bring a flavor and the properties of an image together.
        """
        yield lambda: self.boot(flavor, **image)
        yield lambda: self.rebuild(flavor, **image)
        yield lambda: self.api.resize(
            None, self.nova.server('plain', **image), flavor)
        yield lambda: self.api.unshelve(
            None, self.nova.server(flavor, **image))
        yield lambda: self.api.unshelve(
            None, self.nova.server(flavor, 'shelved', **image))

    @ddt.idata([*(('one', image) for image in ENCRYPTED), ('both', UEFI)])
    @ddt.unpack
    def test_refused(self, flavor, image):
        for way in self.ways(flavor, image):
            self.assertIn(REFUSED, str(self.assertRaises(
                nova_exception.InvalidRequest, way)))

    @ddt.idata([*(('one', image) for image in NOT_ENCRYPTED),
                *itertools.product(('plain', 'encrypted'), ENCRYPTED)])
    @ddt.unpack
    def test_not_refused(self, flavor, image):
        for way in self.ways(flavor, image):
            way()

    def test_contradiction(self):
        """Nova says it in its own words."""
        for way in self.ways('both', {'hw_mem_encryption': 'false'}):
            way()

    def test_models(self):
        """All that this Nova knows."""
        models = getattr(fields, 'MemEncryptionModel', None)
        for model in models.ALL if models else ():
            image = {**UEFI, 'hw_mem_encryption': 'true',
                     'hw_mem_encryption_model': model,
                     'hw_firmware_stateless': 'true', 'hw_video_model': 'none'}
            for way in self.ways('one', image):
                self.assertIn(REFUSED, str(self.assertRaises(
                    nova_exception.InvalidRequest, way)))


class SnapshotTest(ApiTestCase):
    """The software of a snapshot expects the function of its server."""

    def test_boot(self):
        self.boot('plain', **SNAPSHOT)
        self.boot('one')
        self.assertIn('is a snapshot', str(self.assertRaises(
            nova_exception.InvalidRequest, self.boot, 'one', **SNAPSHOT)))
        self.config.config(allow_snapshot_boot=True, group='accel')
        self.boot('one', **SNAPSHOT)

    def test_rebuild(self):
        """From a snapshot of the server itself, and of another one."""
        self.rebuild('one', instance_uuid=nova_api.SERVER, **SNAPSHOT)
        for other in {}, {'instance_uuid': nova_api.IMAGE}:
            self.assertIn('is a snapshot', str(self.assertRaises(
                nova_exception.InvalidRequest, self.rebuild, 'one', **other,
                **SNAPSHOT)))
        self.rebuild('plain', **SNAPSHOT)

    def test_of_a_volume(self):
        """Is marked, with what Nova adds."""
        snapshot = self.api.snapshot_volume_backed
        self.assertEqual(SNAPSHOT, snapshot(
            None, self.nova.server('one'), 'name'))
        self.assertEqual({'a': 'b', **SNAPSHOT}, snapshot(
            None, self.nova.server('one'), 'name', {'a': 'b'}))
        self.assertEqual({'a': 'b'}, snapshot(
            None, self.nova.server('plain'), 'name', {'a': 'b'}))


class RebuildTest(ApiTestCase):
    """The image may ask for a bitstream."""

    ASKS = {'accel:bitstream_id': nova_api.IMAGE}

    def test_there(self):
        self.rebuild('runtime', **self.ASKS)

    def test_not_there(self):
        self.nova.hidden = {nova_api.IMAGE}
        error = str(self.assertRaises(
            nova_exception.InvalidRequest, self.rebuild, 'runtime',
            **self.ASKS))
        self.assertIn('no such image is visible to you', error)
        self.assertIn('accel1:bitstream_id', error)
        # one that the flavor names is the operator's, and need not be visible
        self.rebuild('fixed')
        # and no image needs to be there of which nothing is asked
        self.rebuild('runtime')
        self.rebuild('plain', **self.ASKS)

    def test_glance_does_not_answer(self):
        """nova-compute asks again."""
        self.nova.glance_error = nova_exception.GlanceConnectionFailed(
            server='s', reason='r')
        self.rebuild('runtime', **self.ASKS)

    def test_malformed(self):
        self.assertIn("no uuid is not a UUID", str(self.assertRaises(
            nova_exception.InvalidRequest, self.rebuild, 'runtime',
            **{'accel:bitstream_id': 'no uuid'})))

    def test_ends_with_the_request(self):
        """Nova checks other images in the same way."""
        self.nova.hidden = {nova_api.IMAGE}
        self.assertRaises(nova_exception.InvalidRequest, self.rebuild,
                          'runtime', **self.ASKS)
        image = {'id': nova_api.IMAGE, 'properties': self.ASKS}
        self.assertIs(image, self.api._checks_for_create_and_rebuild(
            None, nova_api.IMAGE, image))


class LimitTest(ApiTestCase):
    """A project shelves and boots in turns."""

    def unshelve(self, flavor='several', vm_state='shelved_offloaded'):
        return self.api.unshelve(None, self.nova.server(flavor, vm_state))

    def over(self, name='class:CUSTOM_ACCELERATOR_FPGA'):
        return limit_exceptions.ProjectOverLimit('p', [
            limit_exceptions.OverLimitInfo(name, 1, 1, 3)])

    def test_all_groups_count(self):
        self.unshelve()
        self.assertEqual([('p', {f'class:{FPGA}': 3, f'class:{SSD}': 1})],
                         self.nova.asked)

    def test_over(self):
        self.nova.limit_error = self.over()
        with mock.patch.object(expansion.limit_utils, 'should_enforce',
                               lambda error: True):
            self.assertRaises(nova_exception.TooManyInstances, self.unshelve)
        with mock.patch.object(expansion.limit_utils, 'should_enforce',
                               lambda error: False):
            self.unshelve()

    def test_not_asked(self):
        """One that was not offloaded has its devices; and without unified
        limits Nova has none of these."""
        self.unshelve(vm_state='shelved')
        self.unshelve('plain')
        self.unshelve('malformed')
        self.nova.uses_limits = False
        self.unshelve()
        self.assertEqual([], self.nova.asked)


class LiveMigrationTest(ApiTestCase):

    def migrate(self, flavor, vm_state='active'):
        return self.api.live_migrate(None, self.nova.server(flavor, vm_state))

    def test_flavor_without(self):
        self.assertIn('does not allow live migration', str(self.assertRaises(
            nova_exception.ForbiddenWithAccelerators, self.migrate, 'one')))
        for flavor in 'plain', 'detach', 'transparent':
            self.migrate(flavor)

    def test_paused(self):
        self.assertIn('is paused', str(self.assertRaises(
            nova_exception.ForbiddenWithAccelerators, self.migrate, 'detach',
            'paused')))
        for flavor in 'plain', 'transparent':
            self.migrate(flavor, 'paused')


class FlavorTest(ApiTestCase):

    def setUp(self):
        super().setUp()
        path = os.path.join(self.useFixture(fixtures.TempDir()).path, 'p')
        self.config.config(device_profiles=path, group='accel')
        with open(path, 'w') as file:
            yaml.safe_dump({'name': 'nlb', 'groups': [
                {f'resources:{FPGA}': 1}]}, file)

    def test_without_a_profile(self):
        """It is Nova's object itself."""
        for name in 'plain', 'one':
            flavor = self.nova.flavor(name)
            self.assertIs(flavor, self.api.create(None, flavor))

    def test_with_a_profile(self):
        """Nova has a copy, which it does not save; also in a resize."""
        flavor = self.nova.flavor('profile')
        for expanded in (self.api.create(None, flavor),
                         self.api.resize(None, self.nova.server('one'),
                                         'profile')):
            self.assertEqual('1', expanded.extra_specs[
                f'resources_ACCEL0:{FPGA}'])
            self.assertEqual({}, expanded.obj_get_changes())
        self.assertEqual(SPECS['profile'], flavor.extra_specs)

    def test_flavors_api(self):
        """It shows what the operator wrote, also after a resize that failed.
        """
        def look_up():
            return flavors.get_flavor_by_flavor_id('profile').extra_specs
        self.assertEqual(SPECS['profile'], look_up())
        self.api.resize(None, self.nova.server('one'), 'profile')
        self.assertRaises(KeyError, self.api.resize, None,
                          self.nova.server('one'), 'nothing')
        self.assertEqual(SPECS['profile'], look_up())

    def test_refused(self):
        self.assertIn('bitstream', self.refusal(
            self.api.create, self.nova.flavor('malformed')))

    def test_installed_once(self):
        before = compute_api.API.create
        expansion.install()
        self.assertIs(before, compute_api.API.create)

    def test_another_nova(self):
        """Of which nothing is changed."""
        found = {name: getattr(compute_api.API, name).__wrapped__
                 for name in ('create', 'resize', 'rebuild')}
        other = type('API', (), dict(found))
        with mock.patch.object(compute_api, 'API', other):
            self.assertRaises(AttributeError, expansion.install)
        self.assertEqual(found, {name: vars(other)[name] for name in found})

    def test_malformed_has_accelerators(self):
        """What cannot be read is not taken for a plain flavor."""
        self.assertRaises(nova_exception.ForbiddenWithAccelerators,
                          self.api.live_migrate, None,
                          self.nova.server('malformed', 'active'))
        self.assertRaises(exception.InvalidRequest, request.parse,
                          SPECS['malformed'])
