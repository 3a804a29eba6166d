# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is broken in a cloud, and what check and why say of it.

A table: a name, what breaks the cloud, and words of the answer. Nothing may say
that all is well. What needs a host or a Keystone of its own (sudo, the IOMMU, a
wrong password) is in tests/unit/test_cmd_check.py.
"""

import json
import os
import sys
import traceback

import fixtures
from keystoneauth1 import loading

from nova_accel.cmd import check
from nova_accel.cmd import why
from nova_accel import conf
from tests.functional import base
from tests.functional.base import (
    card, CRYPTO, fpga_flavor, NLB0, NLB3, SHELL_11, SHELL_12)
from tests.unit import commands
from tests.unit import test_cmd_check

A = '0000:5e:00.0'
NOWHERE = 'http://127.0.0.1:1'
TOKEN = 'admin:openstack:admin,member,reader'
ACCEL, FILTERS = 'accel', 'filter_scheduler'
WEIGHER = 'nova_accel.scheduler.weights.AcceleratorWeigher'


class Broken(base.AcceleratorTestBase):
    """The cloud of the table."""

    def setUp(self):
        super().setUp()
        self.profile()
        self.upload_bitstream(NLB0)
        self.useFixture(fixtures.MonkeyPatch(
            # that of this process is the one of the cloud
            'nova_accel.cmd.configuration.read', lambda *arguments: None))
        for section in 'placement', 'service_user':
            conf.CONF.register_opts(loading.get_auth_plugin_conf_options(
                'admin_token'), group=section)
        self.become_operator(TOKEN)

    def profile(self, function=NLB0, **more):
        self.write_profiles({'name': 'nlb', 'groups': [{
            'resources:CUSTOM_ACCELERATOR_FPGA': 1,
            'accel:function_id': function, **more}]})

    def see(self, table, ask):
        """Ask each row of a table; the cloud is as before after each."""
        wrong = {}
        for name, breaks, *words in table:
            try:
                breaks()
                said = ask()
                missing = [word for word in words if word not in said]
                if missing:
                    wrong[name] = missing, said
            except Exception:
                wrong[name] = traceback.format_exc()
            finally:
                self.options.restore()
                self._repair_services()
                self._delete_every_server()
                self._forget_images()
                self.profile()
        self.assertEqual({}, wrong)


class CheckTest(Broken):

    def setUp(self):
        super().setUp()
        # Nova's tests forbid the import of the real one
        sys.modules['libvirt'] = test_cmd_check.Libvirt()
        self.addCleanup(sys.modules.pop, 'libvirt', None)

    def ask(self):
        self.flags(auth_type='admin_token', token=TOKEN, group='placement',
                   endpoint=self.placement.fixture.endpoint,
                   endpoint_override=self.override)
        self.flags(connection=self.database, group='api_database')
        if self.no_credentials:
            self.flags(auth_type=None, group=self.no_credentials)
        done = commands.run(
            'check', '-f', 'json', '--service', 'scheduler', '--service',
            'api', '--service', 'compute', check=check.Check)
        self.set_up_again()
        return ' '.join(f'{row["Check"]}: {row["Found"]}: {row["What to do"]}'
                        for row in json.loads(done.stdout)
                        if row['Result'] != 'ok')

    def set_up_again(self):
        self.override = self.placement.fixture.endpoint
        self.database, self.no_credentials = 'sqlite://', ''

    def has(self, **what):
        vars(self).update(what)

    def filters(self, *names):
        self.flags(enabled_filters=[*names], group=FILTERS)

    def test_check(self):
        self.set_up_again()
        said = self.ask()
        for name in 'Placement: ', 'Glance: ', 'profiles: ', 'filter: ':
            self.assertNotIn(name, said)

        def accel(**options):
            return lambda: self.flags(**options, group=ACCEL)

        def image(function, **properties):
            self.profile(function)
            self.upload_bitstream(function, properties={
                'accel:function_id': function, **properties})
        file = os.path.join(self.directory, 'a file')
        with open(file, 'w'):
            pass
        self.see([
            ('filter forgotten', lambda: self.filters('ComputeFilter'),
             'filter: ', 'does not have AcceleratorFilter'),
            ('filter twice', lambda: self.filters(
                'AcceleratorFilter', 'AcceleratorFilter'),
             'filter: ', '2 times'),
            ('filter first', lambda: self.filters(
                'AcceleratorFilter', 'ComputeFilter'), 'move it to the end'),
            ('filter not available', lambda: self.flags(
                available_filters=['nova.scheduler.filters.all_filters'],
                group=FILTERS), 'nova-scheduler does not start'),
            ('weigher forgotten', lambda: self.flags(
                weight_classes=['nova.scheduler.weights.all_weighers'],
                group=FILTERS), 'weigher: ', f'add {WEIGHER}'),
            ('weigher twice', lambda: self.flags(
                weight_classes=[WEIGHER] * 2, group=FILTERS), '2 times'),
            ('weigher without weight', accel(weight_multiplier=0.0),
             'weight_multiplier is 0'),
            ('Placement down', lambda: self.has(override=NOWHERE),
             'Placement: ', f'{NOWHERE}', 'cannot be reached'),
            ('no Placement credentials',
             lambda: self.has(no_credentials='placement'),
             '[placement] has no credentials', 'was not asked'),
            ('Placement of another kind',
             lambda: self.has(override=self.glance.service.url),
             'Placement: Placement does not answer'),
            ('database down', lambda: self.has(
                database='sqlite:////nonexistent/nova.sqlite'),
             'database: ', 'does not answer'),
            ('no database', lambda: self.has(database=None),
             'database: ', 'was not asked'),
            ('Glance down', lambda: self.flags(
                api_servers=[NOWHERE], group='glance'),
             'Glance: ', 'api_servers'),
            ('no Glance credentials',
             lambda: self.has(no_credentials='service_user'),
             'Glance: [service_user] has no credentials', 'was not asked'),
            ('driver', accel(enabled_drivers=['absent']), 'absent'),
            ('no driver', accel(enabled_drivers=[]),
             'enabled_drivers is empty'),
            ('cache is a file', accel(bitstream_cache=file),
             'cache: ', 'cannot be written'),
            ('profile file', lambda: self.write_profiles({'name': 'nlb'}),
             'profiles: '),
            ('no profiles', accel(device_profiles='/nonexistent'),
             'profiles: ', 'does not exist'),
            ('profile without image', lambda: self.profile(CRYPTO),
             'the profile nlb sends servers to regions of type',
             'No image of the operator'),
            ('profile of a trait that no provider has',
             lambda: self.profile(**{'trait:CUSTOM_FPGA_INTL': 'required'}),
             'CUSTOM_FPGA_INTL, which no provider has'),
            ('profile and private image',
             lambda: image(CRYPTO, visibility='private'),
             'No image of the operator'),
        ], self.ask)


class WhyTest(Broken):

    HOSTS = {'compute1': {'cards': [card(A)]},
             'compute2': {'cards': [card(A, [NLB3], interface=SHELL_12)]}}
    flavor = None

    def ask(self):
        specs = self.specs or fpga_flavor(function_id=CRYPTO)
        self.specs = None
        flavor = self._create_flavor(extra_spec=specs)
        done = commands.run('why', '-f', 'json', flavor, *self.arguments,
                            why=why.Why)
        self.arguments = '--host', 'compute1'
        self.assertNotEqual(0, done.returncode, done.stdout)
        for name in 'PLACEMENT', 'IMAGE':
            os.environ[f'OS_{name}_ENDPOINT_OVERRIDE'] = {
                'PLACEMENT': self.placement.fixture.endpoint,
                'IMAGE': self.glance.service.url}[name]
        return ' '.join(row['Why'] or '' for row in json.loads(
            done.stdout or '[]')) + done.stderr

    def flavor_of(self, **more):
        self.specs = fpga_flavor(**more)

    def image(self, interface=SHELL_11, data=None, **properties):
        self.image_id = self.upload_bitstream(
            CRYPTO, interface, data=data,
            properties={'accel:function_id': CRYPTO, **properties})

    def service(self, **fields):
        self.image()
        service, = self.admin_api.get_services(
            binary='nova-compute', host='compute1')
        self.admin_api.put_service(service['id'], fields)

    def test_why(self):
        self.specs, self.arguments = None, ('--host', 'compute1')

        def environment(name):
            os.environ[f'OS_{name}_ENDPOINT_OVERRIDE'] = NOWHERE

        def specs(**found):
            self.specs = {key.replace('__', ':'): value
                          for key, value in found.items()}

        def twice():
            self.image()
            self.image()

        def deactivated():
            self.image()
            self.glance.client.images.deactivate(self.image_id)

        def held():
            self.boot(fpga_flavor(), host='compute1')

        def fenced():
            self.simulated('compute1').set_fault(A, dead=True)
            self.accelerators('compute1').inventory.scan()
            self.report()

        def asked(name):
            self.arguments = '--host', name

        fpga = 'CUSTOM_ACCELERATOR_FPGA'
        self.see([
            ('wrong shell, and no property', lambda: self.image(SHELL_12),
             f'is for regions of type {SHELL_12}'),
            ('wrong shell, and a property', lambda: self.image(
                SHELL_12, **{'accel:region_type_id': SHELL_12}),
             f'has type {SHELL_11}'),
            ('property that is not that of the file', lambda: self.image(
                SHELL_12, **{'accel:region_type_id': SHELL_11}),
             f'is for regions of type {SHELL_12}'),
            ('no bitstream', lambda: self.image(data=b'a guest' * 1000),
             'is not a usable GBS file'),
            ('private', lambda: self.image(visibility='private'),
             'is private, of the project', 'bitstream_owners'),
            ('hidden', lambda: self.image(os_hidden=True), '--unhide'),
            ('no image', lambda: None, 'No image of the operator'),
            ('two images', twice, 'and the request needs one image'),
            ('deactivated', deactivated, 'none is active'),
            ('nova-compute down', lambda: self.service(forced_down=True),
             'its nova-compute is down'),
            ('nova-compute disabled', lambda: self.service(
                status='disabled', disabled_reason='broken fan'),
             "its nova-compute is disabled ('broken fan')"),
            ('Placement down', lambda: environment('PLACEMENT'),
             'Placement was asked'),
            ('Glance down', lambda: environment('IMAGE'), 'Glance'),
            ('device in use', lambda: (held(), self.image()),
             'held by server'),
            ('host that is not there', lambda: asked('nowhere'),
             'has none with this name'),
            ('more than there are',
             lambda: specs(**{f'resources1__{fpga}': '2'}),
             '2 CUSTOM_ACCELERATOR_FPGA asked'),
            ('class that is not there',
             lambda: specs(resources1__CUSTOM_ACCELERATOR_NPU='1'),
             'CUSTOM_ACCELERATOR_NPU'),
            ('trait that is not there', lambda: specs(**{
                f'resources1__{fpga}': '1',
                'trait1__CUSTOM_FPGA_INTL': 'required'}),
             'CUSTOM_FPGA_INTL'),
            ('profile that is not there',
             lambda: specs(accel__device_profile='nbl'), 'nova-api refuses'),
            ('flavor without accelerators',
             lambda: specs(hw__cpu_policy='shared'),
             'asks for no accelerator'),
            # the last one, as the end of the test puts the card right
            ('fenced', fenced, 'nova-accel claims'),
        ], self.ask)
