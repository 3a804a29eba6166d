# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is broken in a cloud, and what check and why say of it.

One table for one cloud: what is broken, the command, what breaks it, and words
of the answer. Nothing may say that all is well. What each check examines beside
is in tests/unit/test_cmd_check.py.
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import sqlite3
import sys
import traceback
import types
from unittest import mock

import fixtures
from keystoneauth1 import loading
from oslo_privsep import daemon
import yaml

from nova_accel.cmd import check
from nova_accel.cmd import why
from nova_accel import conf
from nova_accel import naming
from nova_accel import privsep
from nova_accel import sim
from nova_accel.store import claim_store
from nova_accel.store import values
from tests.functional import base
from tests.functional.base import (
    card, CRYPTO, fpga_flavor, NLB0, NLB3, SHELL_11, SHELL_12)
from tests.functional import process
from tests.unit import checked
from tests.unit import commands
from tests.unit import pages

A = '0000:5e:00.0'
REGION = f'compute1_accel_{A}_region0'
GPU = '0000:3b:00.0'
NOWHERE = 'http://127.0.0.1:1'
TOKEN = 'admin:openstack:admin,member,reader'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
FILTERS = 'filter_scheduler'
WEIGHER = 'nova_accel.scheduler.weights.AcceleratorWeigher'
#: the process of privileges, as nova-compute starts it
CHANNEL = daemon.RootwrapClientChannel
#: a compute host of which check is asked, and that is not in the cloud
SPARE = 'spare'


class ToldTest(base.AcceleratorTestBase):

    LIMIT = 900
    HOSTS = {'compute1': {'cards': [card(A)]},
             'compute2': {'cards': [card(A, [NLB3], interface=SHELL_12)]}}

    def build(self):
        super().build()
        self.upload_bitstream(NLB0)

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            # that of this process is the one of the cloud
            'nova_accel.cmd.configuration.read', lambda *arguments: None))
        # tests.layouts import the driver for real, in two seconds each time
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.check_nova.failure', lambda driver, seconds: None))
        for section in 'placement', 'service_user':
            conf.CONF.register_opts(loading.get_auth_plugin_conf_options(
                'admin_token'), group=section)
        self.become_operator(TOKEN)
        # Nova's tests forbid the import of the real one
        self.addCleanup(sys.modules.pop, 'libvirt', None)

    @staticmethod
    def use_libvirt(module):
        sys.modules['libvirt'] = module

    # The commands

    def ask(self, command):
        return {'check': self.check, 'why': self.why}[command]()

    def check(self):
        """What is not well."""
        self.flags(auth_type=None if 'placement' in self.without
                   else 'admin_token', token=self.token, group='placement',
                   endpoint=self.placement.fixture.endpoint,
                   endpoint_override=self.override)
        self.flags(connection=self.database, group='api_database')
        self.flags(host=self.host)
        for section in {'service_user'} & self.without:
            self.flags(auth_type=None, group=section)
        done = commands.run(
            'check', '-f', 'json', '--service', 'scheduler', '--service',
            'api', '--service', 'compute', check=check.Check)
        return '\n'.join(f'{row["Check"]}: {row["Found"]}: {row["What to do"]}'
                         for row in json.loads(done.stdout or '[]')
                         if row['Result'] != 'ok') + done.stderr

    def why(self):
        flavor = self._create_flavor(
            extra_spec=self.specs or fpga_flavor(function_id=CRYPTO))
        done = commands.run('why', '-f', 'json', flavor, '--host', self.asked,
                            why=why.Why)
        self.assertNotEqual(0, done.returncode, done.stdout)
        return ' '.join(row['Why'] or '' for row in json.loads(
            done.stdout or '[]')) + done.stderr

    # The cloud

    def begin(self):
        """As before the first row."""
        self.use_libvirt(checked.Libvirt())
        #: of check
        self.override, self.token = self.placement.fixture.endpoint, TOKEN
        self.database, self.without, self.host = 'sqlite://', set(), 'compute1'
        #: of why
        self.specs, self.asked = None, 'compute1'
        self.profile()
        # what a row does and restores itself
        self.undo = contextlib.ExitStack()

    def end(self):
        self.undo.close()
        self.options.restore()
        self._repair_services()
        self._delete_every_server()
        self._forget_images()

    def profile(self, function=NLB0, **more):
        self.write_profiles({'name': 'nlb', 'groups': [{
            'resources:CUSTOM_ACCELERATOR_FPGA': 1,
            'accel:function_id': function, **more}]})

    def image(self, interface=SHELL_11, data=None, **properties):
        return self.upload_bitstream(
            CRYPTO, interface, data=data,
            properties={'accel:function_id': CRYPTO, **properties})

    def spare(self, **description):
        """check is asked of a host with these devices."""
        self.describe_host(SPARE, description)
        path = os.path.join(self.hosts, f'{SPARE}.yaml')
        self.host = SPARE
        self.undo.callback(shutil.rmtree, f'{path}.state.d', True)
        for name in path, f'{path}.state', f'{path}.state.lock':
            self.undo.callback(_unlink, name)

    def store(self, change):
        """The spare host has a claim store."""
        self.spare(cards=[card(A)])
        path = os.path.join(conf.CONF.state_path, claim_store.file_name(SPARE))
        self.undo.callback(_unlink, path)
        change(path)

    def real(self, **description):
        """The spare host is not a simulated one, as far as check knows."""
        self.spare(**description)
        kernel = sim.SimulatedKernel(os.path.join(self.hosts, 'spare.yaml'))
        self.flags(simulated_host=None, group='accel')
        self.patch('nova_accel.machine.open_kernel',
                   lambda host, writes: kernel)

    def patch(self, name, value):
        self.undo.enter_context(mock.patch(name, value))

    def service(self, **fields):
        self.image()
        service, = self.admin_api.get_services(
            binary='nova-compute', host='compute1')
        self.admin_api.put_service(service['id'], fields)

    def disable(self):
        """As nova-accel disable on the host, with a server on the device."""
        self.image()
        self.boot(fpga_flavor(), host='compute1')
        known = claim_store.existing(
            self.parts('compute1').store.path)
        known.disable(values.Disabled(A, '', 'it is hot', 'now'))
        process.until(lambda: self.assertIn(
            naming.FENCED, self.provider_tree()[REGION][1]))
        self.undo.callback(
            process.until, lambda: self.assertFalse(known.disabled()))
        self.undo.callback(lambda: known.enable(known.disabled()))

    def fence(self):
        self.simulated('compute1').set_fault(A, dead=True)
        self.parts('compute1').inventory.scanner.scan()
        self.report()

    # The table

    def rows(self):
        def flags(group='accel', **options):
            return lambda: self.flags(group=group, **options)

        def sets(**what):
            return lambda: vars(self).update(what)

        def filters(*names):
            return flags(FILTERS, enabled_filters=[*names])

        def profile(function=NLB0, **more):
            return lambda: self.profile(function, **more)

        def image(*arguments, **more):
            return lambda: self.image(*arguments, **more)

        def several(*steps):
            return lambda: [step() for step in steps]

        def specs(**found):
            return sets(specs={key.replace('__', ':'): value
                               for key, value in found.items()})

        def environment(**variables):
            return lambda: self.undo.enter_context(mock.patch.dict(
                os.environ, {f'OS_{name}': value
                             for name, value in variables.items()}))

        def later(path):
            claim_store.ClaimStore(path)
            with contextlib.closing(sqlite3.connect(path)) as db:
                db.execute('PRAGMA user_version = 99')

        def garbage(path):
            with open(path, 'wb') as file:
                file.write(b'a text of some other program ' * 99)

        def points(*, group, found=importlib.metadata.entry_points):
            return [] if group == 'nova.api.extra_spec_validators' else found(
                group=group)

        def free(mib):
            return lambda: self.patch(
                'shutil.disk_usage',
                lambda path: types.SimpleNamespace(free=mib << 20))

        def no_sudo():
            self.real(cards=[card(A)])
            self.flags(helper_command='/nonexistent',
                       group='nova_accel_privileged')
            # Nova's tests forbid to start one
            self.patch('oslo_privsep.daemon.RootwrapClientChannel', CHANNEL)
            privsep.ctx.set_client_mode(True)
            self.undo.callback(privsep.ctx.set_client_mode, False)

        def deactivated():
            self.glance.client.images.deactivate(self.image())

        def held():
            self.image()
            self.boot(fpga_flavor(), host='compute1')

        file = os.path.join(self.directory, 'a file')
        with open(file, 'w'):
            pass
        glance = self.glance.service.url
        gpus = [{'address': GPU}]
        return [
            # the scheduler
            ('filter forgotten', 'check', filters('ComputeFilter'),
             'filter: ', 'does not have AcceleratorFilter'),
            ('filter twice', 'check',
             filters('ComputeFilter', *2 * ('AcceleratorFilter',)),
             'filter: ', '2 times'),
            ('filter first', 'check',
             filters('AcceleratorFilter', 'ComputeFilter'),
             'set enabled_filters = ComputeFilter,AcceleratorFilter'),
            ('filter not available', 'check', flags(
                FILTERS, available_filters=[
                    'nova.scheduler.filters.all_filters']),
             'nova-scheduler does not start'),
            ('weigher forgotten', 'check', flags(FILTERS, weight_classes=[
                'nova.scheduler.weights.all_weighers']),
             'weigher: ', f'set weight_classes = '
             f'nova.scheduler.weights.all_weighers,{WEIGHER}'),
            ('weigher twice', 'check',
             flags(FILTERS, weight_classes=[
                 'nova.scheduler.weights.all_weighers', WEIGHER, WEIGHER]),
             '2 times'),
            ('weigher without weight', 'check', flags(weight_multiplier=0.0),
             'weight_multiplier is 0'),

            # services and credentials
            ('Placement down', 'check', sets(override=NOWHERE),
             'Placement: ', NOWHERE, 'cannot be reached'),
            ('Placement down', 'why', environment(
                PLACEMENT_ENDPOINT_OVERRIDE=NOWHERE), 'Placement was asked'),
            ('another service as Placement', 'check', sets(override=glance),
             'Placement: Placement does not answer'),
            ('no credentials for Placement', 'check',
             sets(without={'placement'}),
             '[placement] has no credentials', 'was not asked'),
            ('wrong user of [placement]', 'check', sets(token='bob'),
             'Placement refuses the user of [placement]', 'give it the role'),
            ('Glance down', 'check', flags('glance', api_servers=[NOWHERE]),
             'Glance: ', 'api_servers'),
            ('Glance down', 'why', environment(
                IMAGE_ENDPOINT_OVERRIDE=NOWHERE), 'Glance'),
            ('no credentials for Glance', 'check',
             sets(without={'service_user'}),
             'Glance was not asked, because [service_user] has no'),
            ('wrong user of [service_user]', 'check',
             flags('service_user', token='expired'),
             'Glance: Glance rejects the token of the user of [service_user]',
             'profiles: where the profiles lead to was not checked'),
            ('database down', 'check',
             sets(database='sqlite:////nonexistent/nova.sqlite'),
             'database: ', 'does not answer'),
            ('no database', 'check', sets(database=None),
             'database: ', 'was not asked'),
            ('a user without rights', 'why', environment(TOKEN='bob:beta:'),
             'use credentials of an administrator'),
            ('a cloud that clouds.yaml does not have', 'why',
             environment(CLOUD='nowhere'),
             'Cloud nowhere was not found', 'give --os-cloud'),
            ('nova_accel not installed for nova-api', 'check',
             lambda: self.patch('importlib.metadata.entry_points', points),
             'entry point: ', 'one of Cyborg', 'install nova_accel'),

            # the compute host
            ('another compute driver', 'check', lambda: self.flags(
                compute_driver='libvirt.LibvirtDriver'),
             'libvirt.LibvirtDriver', 'set it to accel.AccelLibvirtDriver'),
            ('no drivers', 'check', flags(enabled_drivers=[]),
             'enabled_drivers is empty'),
            ('a driver that is not installed', 'check',
             flags(enabled_drivers=['absent']), "'absent'", 'installed are'),
            ('libvirt does not run', 'check', lambda: self.use_libvirt(
                checked.Libvirt(refuses='Failed to connect')),
             'libvirt cannot be reached', 'start libvirtd'),
            ('no IOMMU', 'check',
             lambda: self.spare(cards=[card(A)], iommu=False),
             'the kernel has no IOMMU groups', 'firmware'),
            ('no sudo', 'check', no_sudo, 'privileges: ', '/nonexistent',
             '[nova_accel_privileged] helper_command'),
            ('a GPU that Nova itself gives to servers', 'check', several(
                flags(enabled_drivers=['gpu'], virtual_functions=[]),
                lambda: self.spare(gpus=gpus),
                flags('pci', device_spec=[json.dumps(
                    {'vendor_id': '10de', 'product_id': '26b9'})])),
             f'{GPU}: ', '[pci] device_spec'),
            ('a GPU that no option names', 'check', several(
                flags(enabled_drivers=['gpu'], include_devices=[],
                      virtual_functions=[]),
                lambda: self.spare(gpus=gpus)),
             f'include_devices names: add address={GPU}'),
            ('a store of a later release', 'check',
             lambda: self.store(later), 'claim store: ', 'later'),
            ('a file that is not a store', 'check',
             lambda: self.store(garbage), 'claim store: '),
            ('no place for the store', 'check', lambda: (
                self.spare(cards=[card(A)]),
                self.flags(state_path='/nonexistent')),
             '/nonexistent, for the claim store, cannot be written'),
            ('cache cannot be written', 'check', flags(bitstream_cache=file),
             'cache: ', 'cannot be written'),
            ('cache is full', 'check', free(5), 'cache: ', '5 MiB are free'),
            ('nova-compute down', 'why',
             lambda: self.service(forced_down=True),
             'its nova-compute is down'),
            ('nova-compute disabled', 'why', lambda: self.service(
                status='disabled', disabled_reason='broken fan'),
             "its nova-compute is disabled ('broken fan')"),
            ('a host that is not there', 'why', sets(asked='nowhere'),
             'has none with this name'),

            # profiles and flavors
            ('an error in a file of profiles', 'check',
             lambda: self.write_profiles({'name': 'nlb'}), 'profiles: '),
            ('an error in a file of profiles', 'why', several(
                lambda: self.write_profiles({'name': 'nlb'}),
                specs(accel__device_profile='nlb')), 'profile'),
            ('no profiles', 'check', flags(device_profiles='/nonexistent'),
             'profiles: ', 'does not exist'),
            ('a profile without an image', 'check', profile(CRYPTO),
             'the profile nlb sends servers to regions of type',
             'No image of the operator'),
            ('a profile with a private image', 'check', several(
                profile(CRYPTO), image(visibility='private')),
             'No image of the operator'),
            ('a profile of a trait that no provider has', 'check',
             profile(**{'trait:CUSTOM_FPGA_INTL': 'required'}),
             'CUSTOM_FPGA_INTL, which no provider has'),
            ('a profile that prefers what no provider has', 'check',
             profile(CRYPTO, **{'accel:prefer': 'CUSTOM_FPGA_D5006'}),
             'prefers the trait CUSTOM_FPGA_D5006, which no provider has'),
            ('a flavor that prefers what no provider has', 'why',
             specs(**{f'resources1__{FPGA}': '2',
                      'accel1__prefer': 'CUSTOM_FPGA_D5006'}),
             'accel1:prefer names CUSTOM_FPGA_D5006, which no provider has'),
            ('a profile that is not there', 'why',
             specs(accel__device_profile='nbl'), 'nova-api refuses'),
            ('a flavor without accelerators', 'why',
             specs(hw__cpu_policy='shared'), 'asks for no accelerator'),
            ('more than there are', 'why',
             specs(**{f'resources1__{FPGA}': '2'}), f'2 {FPGA} asked'),
            ('a class that is not there', 'why',
             specs(resources1__CUSTOM_ACCELERATOR_NPU='1'),
             'CUSTOM_ACCELERATOR_NPU'),
            ('a trait that is not there', 'why',
             specs(**{f'resources1__{FPGA}': '1',
                      'trait1__CUSTOM_FPGA_INTL': 'required'}),
             'CUSTOM_FPGA_INTL'),

            # bitstreams
            ('wrong shell, and no property', 'why', image(SHELL_12),
             f'is for regions of type {SHELL_12}'),
            ('wrong shell, and a property', 'why', image(
                SHELL_12, **{'accel:region_type_id': SHELL_12}),
             f'has type {SHELL_11}'),
            ('a property that is not that of the file', 'why', image(
                SHELL_12, **{'accel:region_type_id': SHELL_11}),
             f'is for regions of type {SHELL_12}'),
            ('no bitstream', 'why', image(data=b'a guest' * 1000),
             'is not a usable GBS file'),
            ('a private image', 'why', image(visibility='private'),
             'is private, of the project', 'bitstream_owners'),
            ('a hidden image', 'why', image(os_hidden=True), '--unhidden'),
            ('no image', 'why', lambda: None, 'No image of the operator'),
            ('two images', 'why', several(image(), image()),
             'and the request needs one image'),
            ('a deactivated image', 'why', deactivated, 'none is active'),

            # devices
            ('device in use', 'why', held, 'held by server'),
            ('device disabled, and a server on it', 'why', self.disable,
             'is fenced by nova_accel', 'nova-accel claims'),
            # the last one, as the end of the test repairs the card
            ('fenced', 'why', self.fence, 'nova-accel claims'),
        ]

    def test_all(self):
        self.begin()
        try:
            said = self.ask('check')
        finally:
            self.end()
        # what is not well in this cloud without a fault
        for name in ('Placement: ', 'Glance: ', 'profiles: ', 'filter: ',
                     'claim store: ', 'cache: ', A):
            self.assertNotIn(name, said)
        wrong = {}
        for name, command, breaks, *words in self.rows():
            try:
                self.begin()
                breaks()
                said = self.ask(command)
                missing = [word for word in words if word not in said]
                if missing:
                    wrong[command, name] = missing, said
            except Exception:
                wrong[command, name] = traceback.format_exc()
            finally:
                self.end()
        self.assertEqual({}, wrong)

    def test_first_profiles_lead_to_the_right_shell(self):
        """Those that one copies: of the page, and the shipped one. There is
        an image for the shell of compute1."""
        with open(pages.ROOT / 'etc/nova_accel/device_profiles/nlb.yaml'
                  ) as file:
            shipped = yaml.safe_load(file)
        page = pages.Page(pages.ROOT / 'docs/source/profiles.rst')
        found = [shipped[0], page.profiles()[0]]
        for profile in found:
            self.write_profiles(profile)
            specs = {'accel:device_profile': profile['name']}
            for host, status in ('compute1', 'ACTIVE'), ('compute2', 'ERROR'):
                server = self.boot(specs, host=host, expected_state=status)
                if status == 'ERROR':
                    self.assertIn('No valid host', self.fault(server))
                self._delete_server(server)
            self.claims()


def _unlink(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
