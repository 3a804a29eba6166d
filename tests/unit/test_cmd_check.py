# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel check: a host that is well, and one broken thing per test."""

import contextlib
import json
import os
import sqlite3
import sys
import threading
import time
import types
from unittest import mock

import ddt
import fixtures
from oslo_config import fixture as config_fixture
import requests
import requests_mock

from nova_accel.cmd import check
from nova_accel.cmd import check_services
from nova_accel import conf
from nova_accel.drivers import dfl
from nova_accel import exception
from nova_accel import model
from nova_accel import privsep
from nova_accel.store import claim_store
from tests import acme
from tests import limits
from tests.unit.checked import (
    CheckTestCase, DISK, FUNCTION, GLANCE, GOOD, GPU, HELPER, KEYSTONE,
    Libvirt, LOADING_FAILURE, NOVA, OTHER_SHELL, PLACEMENT, PROFILE, SHELL)
from tests.unit import commands
from tests.unit.claims import claim
from tests.unit.host import A, SimulatedHost


class WellTest(CheckTestCase):

    def test_all_is_well(self):
        self.assertEqual([], self.check(0))
        self.assertEqual(
            ['options', 'Nova', 'compute driver', 'drivers', 'IOMMU', 'VFIO',
             'privileges', 'claim store', 'metrics', 'near', 'libvirt', 'cache',
             'Glance', 'memory', 'flavors', 'switches', 'live migration',
             'live migration',
             'Placement', 'database', 'filter', 'weigher', 'entry point',
             'profiles', 'traits of flavors', 'clearing images', GPU, A,
             DISK],
            [line['Check'] for line in self.lines])

    def test_service_of_the_configuration(self):
        for gone in ('libvirt', 'accel', 'api', 'api_database'):
            del self.sections[gone]
        self.set('DEFAULT', compute_driver=None)
        bad, = self.check(2)
        self.assertIn('was not asked', bad['Found'])
        self.assertEqual(
            ['database', 'options', 'Nova', 'Placement', 'filter', 'weigher'],
            [line['Check'] for line in self.lines])

    def test_services_with_files_of_their_own(self):
        """Each is checked with what it reads, and with nothing else."""
        self.useFixture(fixtures.EnvironmentVariable('HOME', self.directory))
        directory = os.path.join(self.directory, '.nova')
        os.mkdir(directory)
        everything = self.sections
        for program, names in (
                ('nova-compute', {'libvirt', 'service_user', 'placement'}),
                ('nova-scheduler', {'filter_scheduler', 'placement'}),
                ('nova-api', {'api', 'placement', 'service_user'}),
                ('nova', everything.keys() - {
                    'libvirt', 'service_user', 'filter_scheduler', 'api',
                    'placement'})):
            self.config = os.path.join(directory, f'{program}.conf')
            self.sections = {'DEFAULT': {}, **{
                name: everything[name] for name in names}}
            self.set('DEFAULT')
        self.assertEqual([], self.bad_of_all())
        self.assertEqual(1, [x['Check'] for x in self.lines].count('options'))
        self.assertIn('filter', [line['Check'] for line in self.lines])
        with open(os.path.join(directory, 'nova-scheduler.conf'), 'a') as file:
            file.write('[accel]\nweight_multiplier = 0\n')
        self.assertEqual(['weigher'], self.bad_of_all())

    def bad_of_all(self):
        try:
            result = commands.run('check', '-f', 'json', check=check.Check)
        finally:
            check_services.forget_credentials()
        self.assertEqual('', result.stderr)
        self.lines = json.loads(result.stdout)
        return [x['Check'] for x in self.lines if x['Result'] != 'ok']

    def test_service_that_is_asked_for(self):
        self.set('accel', enabled_drivers='absent')
        self.check(0, '--service', 'api')
        self.assertEqual(
            ['options', 'Nova', 'Placement', 'database', 'entry point',
             'profiles', 'traits of flavors', 'clearing images'],
            [line['Check'] for line in self.lines])

    def test_services_that_cannot_be_known(self):
        self.sections = {'DEFAULT': {},
                         'service_user': GOOD['service_user']}
        self.set('DEFAULT', host='compute1')
        result = self.call()
        self.assertEqual(255, result.returncode)
        self.assertIn('give --service', result.stderr)

    def test_configuration_that_cannot_be_read(self):
        os.unlink(self.config)
        result = self.call()
        self.assertEqual(255, result.returncode)
        self.assertIn('--config-file', result.stderr)

    def test_what_nobody_expects(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.checks.lines', None))
        result = self.call()
        self.assertEqual(255, result.returncode)
        self.assertIn('report it', result.stderr)
        # it has passwords
        self.assertNotIn('nova.conf', result.stderr)

    def test_configuration_that_is_no_configuration(self):
        with open(self.config, 'w') as file:
            file.write('compute_driver\n')
        result = self.call()
        self.assertEqual(255, result.returncode)
        self.assertIn('cannot be read', result.stderr)

    def test_it_changes_nothing(self):
        before = sorted(os.listdir(self.directory))
        self.check(0)
        self.assertEqual(before, sorted(os.listdir(self.directory)))


class ComputeTest(CheckTestCase):

    def test_misspelled_option(self):
        self.set('accel', fixed_device=A)
        self.assertFails('options', "'fixed_device'", 'write fixed_devices')

    def test_option_of_another_type(self):
        self.set('accel', runtime_programming_pause='soon')
        self.assertFails('options', 'runtime_programming_pause',
                         "int() with base 10: 'soon'): correct it")

    def test_all_options_of_other_types(self):
        self.set('accel', runtime_programming_pause='soon', pools='all',
                 fixed_devices='5e:00.0')
        bad = [line['Found'] for line in self.check(2)
               if line['Check'] == 'options']
        self.assertEqual(3, len(bad))
        self.assertNotIn('LocationInfo', result := ' '.join(bad))
        for words in ("found 'all'", "'soon'", 'fixed_devices'):
            self.assertIn(words, result)

    def test_option_of_nova_of_another_type(self):
        self.set('libvirt', virt_type='none')
        self.assertFails('libvirt', 'virt_type', "found 'none'): correct it")

    def test_set_of_two_kinds(self):
        self.set('accel', device_sets=f'{GPU} {DISK}')
        self.assertFails('options', '[accel] device_sets', 'of one type')

    def test_clock_of_a_network_card(self):
        nic = '0000:04:00.0'
        self.use_kernel(self.useFixture(SimulatedHost(
            nics=[{'address': nic}])).kernel)
        self.set('accel', enabled_drivers='timecard', ptp_devices=nic,
                 include_devices=None)
        self.assertIn(('options', 'remove it from the option'), [
            (line['Check'], line['What to do']) for line in self.check(2)])

    def test_card_given_whole_and_by_vfs(self):
        self.set('accel', whole_cards=A, virtual_functions=f'{A}=1')
        self.assertIn(('options', 'remove it from one of the two'), [
            (line['Check'], line['What to do']) for line in self.check(2)])

    def test_two_drivers_that_find_a_card(self):
        self.set('accel', enabled_drivers='dfl,gpu,nvme,pci',
                 pci_devices='vendor=10de type=GPU')
        self.assertIn(('options', f'{GPU} is found by the drivers gpu and pci '
                                  f'of [accel] enabled_drivers'), [
            (line['Check'], line['Found']) for line in self.check(2)])

    def test_rule_without_effect(self):
        self.set('accel', exclude_devices='vendor=8086 product=ffff',
                 handover='0000:99:00.0=operator')
        bad = self.check(1)
        self.assertEqual([('options', 'warning')] * 2, [
            (line['Check'], line['Result']) for line in bad])
        self.assertIn('product=ffff matches no device', bad[0]['Found'])

    def test_driver_that_fails(self):
        """What is to be done is of the error where it says it."""
        for error, remedy in (
                (exception.ConfigurationError('[accel] x is y: correct it.'),
                 'correct it'),
                (OSError(5, "Input/output error: 'path'"),
                 'see the kernel log')):
            self.useFixture(fixtures.MonkeyPatch(
                'nova_accel.drivers.gpu.GpuDriver.find',
                mock.Mock(side_effect=error)))
            lines = {line['Check']: line for line in self.check(2)}
            self.assertEqual(remedy, lines['drivers']['What to do'])

    def test_malformed_values(self):
        """All of them, whatever reads the option, and in the same way."""
        given = {'fixed_devices': '5e:00.0', 'whole_cards': 'one',
                 'virtual_functions': f'{A}=x', 'handover': 'gpu=clean',
                 'device_sets': A, 'function_class': 'NETWORK',
                 'pci_devices': 'vendor=1da3', 'qat_services': 'sym+asym',
                 'ptp_devices': 'eth0', 'vgpu_types': '='}
        self.set('accel', **given)
        bad = [line['Found'] for line in self.check(2)
               if line['Check'] == 'options']
        self.assertEqual(len(given), len(bad))
        for option in given:
            self.assertEqual(1, sum(f'[accel] {option} has' in line
                                    for line in bad), option)

    def test_rule_that_cannot_be_read(self):
        self.set('accel', exclude_devices='vendr=8086')
        self.assertIn(('options', 'failure'), [
            (line['Check'], line['Result']) for line in self.check(2)])

    def test_simulated_host(self):
        self.set('accel', simulated_host=self.host.path)
        self.assertFails('options', 'simulated_host', 'ends at Placement',
                         result='warning')

    def test_other_compute_driver(self):
        self.set('DEFAULT', compute_driver='libvirt.LibvirtDriver')
        self.assertFails('compute driver', 'libvirt.LibvirtDriver',
                         'accel.AccelLibvirtDriver')

    def test_driver_that_cannot_be_imported(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.check_nova.failure', LOADING_FAILURE))
        nova_compute = os.path.join(self.directory, 'nova-compute')
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.check_nova.nova_compute', lambda: nova_compute))
        for first, says in (
                # a Python without Nova
                (f'#!{sys.base_prefix}/bin/python3', 'nova'),
                ('#!/nonexistent/python3', '/nonexistent/python3')):
            with open(nova_compute, 'w') as file:
                file.write(f'{first}\n')
            self.assertFails('compute driver', nova_compute, says)

    def test_other_nova(self):
        for name, release, result in (('OLDEST', 999, 'failure'),
                                      ('NEWEST', 30, 'warning')):
            with fixtures.MonkeyPatch(f'nova_accel.versions.{name}', release):
                self.assertFails('Nova', f'{release}', 'this is Nova',
                                 result=result)

    def test_no_driver(self):
        self.set('accel', enabled_drivers=None)
        self.assertFails('drivers', 'enabled_drivers')

    def test_driver_that_is_not_installed(self):
        self.set('accel', enabled_drivers='dfl,gpu,nvme,fpga')
        self.assertFails('drivers', "'fpga'", 'installed are')

    def test_driver_without_devices(self):
        self.set('accel', enabled_drivers='dfl,gpu,nvme,xrt')
        self.assertFails('drivers', 'xrt finds no device', result='warning')

    def test_wipefs(self):
        self.useFixture(fixtures.MonkeyPatch(
            'shutil.which', lambda name, path=None: None))
        self.assertFails('drivers', 'wipefs', 'util-linux')

    def test_no_iommu(self):
        self.use_kernel(self.useFixture(SimulatedHost(
            {'address': A, 'vfs': 1}, iommu=False)).kernel)
        self.set('accel', enabled_drivers='dfl')
        bad = {line['Check']: line for line in self.check(2)}
        self.assertEqual({'IOMMU', A}, set(bad))
        self.assertIn('firmware', bad['IOMMU']['What to do'])
        self.assertIn('IOMMU group', bad[A]['Found'])

    def test_no_vfio(self):
        exists = self.host.kernel.exists
        self.host.kernel.exists = lambda path: (
            'vfio' not in path and exists(path))
        self.useFixture(fixtures.MonkeyPatch(
            'os.uname', lambda: types.SimpleNamespace(
                release='none', machine='x86_64')))
        self.assertFails('VFIO', 'vfio-pci', 'load')

    def test_privileged_processes(self):
        self.use_processes()
        self.assertEqual([], self.check(0))
        self.assertTrue(privsep.ctx.channel and privsep.disks.channel
                        and privsep.processes.channel)

    def test_privileged_process_that_cannot_be_started(self):
        privsep.ctx.set_client_mode(True)
        self.set('nova_accel_privileged', helper_command='/bin/false')
        self.assertFails('privileges', '[nova_accel_privileged]', 'sudo')

    def test_no_sudo(self):
        privsep.disks.set_client_mode(True)
        self.set('nova_accel_privileged_disks', helper_command='/nonexistent')
        self.assertFails('privileges', '[nova_accel_privileged_disks]',
                         '/nonexistent')

    def test_privileged_process_without_its_capability(self):
        self.need_root()
        privsep.disks.set_client_mode(True)
        self.addCleanup(privsep.disks.stop)
        self.set('nova_accel_privileged_disks', helper_command=(
            f'{HELPER} --config-file {self.config}'), capabilities='CAP_CHOWN')
        self.assertFails('privileges', 'CAP_SYS_ADMIN')

    def test_privileged_process_of_another_user(self):
        self.need_root()
        privsep.ctx.set_client_mode(True)
        self.addCleanup(privsep.ctx.stop)
        self.set('nova_accel_privileged', helper_command=(
            f'{HELPER} --config-file {self.config}'), user='nobody')
        os.chmod(self.directory, 0o755)
        self.assertFails('privileges', 'as user', 'root')

    def test_check_of_a_driver_that_fails(self):
        """It has a line, and those of other drivers are not lost."""
        self.set('accel', enabled_drivers='dfl,gpu,nvme,qat')
        with mock.patch.object(dfl.DflDriver, 'check',
                               side_effect=KeyError('a key')):
            found = [line['Found'] for line in self.check(2)
                     if line['Check'] == 'drivers']
        self.assertIn("the driver dfl cannot be checked: KeyError, 'a key'",
                      found)
        self.assertIn('the driver qat finds no device', found)

    def test_privileged_process_of_another_package(self):
        """Its driver says which process it has."""
        self.useFixture(acme.Installed())
        self.set('accel', enabled_drivers='acme', include_devices=None)
        self.set('acme_accel_privileged', helper_command='/bin/false')
        self.check(2)
        line, = [line for line in self.lines if line['Check'] == 'privileges']
        self.assertEqual('failure', line['Result'])
        self.assertIn('[acme_accel_privileged] does not start', line['Found'])
        self.assertIn('[acme_accel_privileged] helper_command',
                      line['What to do'])

    def test_store_of_a_later_release(self):
        path = os.path.join(self.directory, claim_store.file_name('compute1'))
        claim_store.ClaimStore(path)
        with contextlib.closing(sqlite3.connect(path)) as file:
            file.execute('PRAGMA user_version = 99')
            file.commit()
        self.assertFails('claim store', path)

    def test_state_path(self):
        self.sections['DEFAULT']['host'] = 'compute1'
        # by default below it
        self.set('accel', bitstream_cache=self.directory)
        with open(self.config) as file:
            text = file.read()
        with open(self.config, 'w') as file:
            file.write(text.replace(f'state_path = {self.directory}',
                                    'state_path = /nonexistent'))
        self.assertFails('claim store', '/nonexistent')

    def test_no_libvirt(self):
        self.use_libvirt(None)
        self.assertFails('libvirt', 'libvirt-python', 'install')

    def test_libvirt_that_cannot_be_reached(self):
        module = self.use_libvirt(Libvirt(refuses='Failed to connect\nsocket'))
        self.assertFails('libvirt', 'qemu:///system',
                         'Failed to connect socket', 'libvirtd')
        self.assertEqual({'qemu:///system'}, {*module.uris})

    def test_old_libvirt(self):
        self.use_libvirt(Libvirt(libvirt=7010000))
        self.assertFails('libvirt', '7.10.0', '8.0.0')

    def test_libvirt_and_a_vendors_driver(self):
        self.use_kernel(self.useFixture(SimulatedHost(vgpus=[{
            'address': GPU, 'framework': 'vendor-vfio', 'total_vfs': 2,
            'vfs': 2, 'units': 2, 'types': [
                {'id': '558', 'name': 'NVIDIA L40S-1Q', 'units': 1}],
        }])).kernel)
        self.set('accel', enabled_drivers='vgpu')
        self.assertEqual([], self.check(0))
        self.use_libvirt(Libvirt(libvirt=9000000))
        self.assertFails('libvirt', '9.0.0', '10.0.0', GPU)
        self.use_libvirt(Libvirt(qemu=8000000))
        self.assertFails('libvirt', 'QEMU', '8.2.2', GPU)

    def test_live_migration(self):
        """What guests take along and what not; for none it is a fault."""
        def said():
            self.assertEqual([], self.check(0))
            return [(line['Found'], line['What to do'] or '')
                    for line in self.lines
                    if 'migrate live' in (line['Found'] or '')]
        self.assertEqual([
            (f'guests do not take {GPU}, {DISK} along when they migrate live: '
             f'its VFIO driver is vfio_pci, which does not save its state',
             ''),
            (f'guests do not take {A} along when they migrate live: nothing '
             f'saves its state', '')], said())
        self.use_kernel(self.useFixture(SimulatedHost(vgpus=[{
            'address': GPU, 'units': 2, 'types': [
                {'id': 'nvidia-558', 'name': 'NVIDIA A40-2Q', 'units': 1}],
        }])).kernel)
        self.set('accel', enabled_drivers='vgpu')
        along = (f'guests take {GPU} along when they migrate live, by nvidia '
                 f'550.54.16, and pause for up to ')
        self.assertEqual([(f'{along}1.7 s for a device with 2048 MiB',
                           'set accel:max_downtime in their flavors')], said())
        self.set('libvirt', live_migration_bandwidth=10240)
        self.assertEqual(
            [(f'{along}0.2 s for a device with 2048 MiB', '')], said())
        self.set('libvirt', live_migration_parallel_connections=4)
        over = (', which QEMU 10.0 and later send over 4 connections'
                if hasattr(conf.CONF.libvirt,
                           'live_migration_parallel_connections') else '')
        self.assertEqual(
            [(f'{along}0.2 s for a device with 2048 MiB{over}', '')], said())
        self.set('libvirt', live_migration_permit_post_copy='true')
        (_, remedy), = said()
        self.assertIn('set that to false', remedy)
        self.use_libvirt(Libvirt(libvirt=9000000, qemu=8000000))
        self.assertEqual([(
            f'guests would take {GPU} along when they migrate live, by nvidia '
            f'550.54.16, with libvirt 10.0.0 and QEMU 8.2.2, and this host '
            f'has libvirt 9.0.0 and QEMU 8.0.0', '')], said())

    def test_no_credentials(self):
        self.set('service_user', auth_type=None)
        self.assertFails('Glance', '[service_user]', 'auth_type',
                         result='warning')
        self.set('accel', bitstream_owners='3f2c')
        self.assertFails('Glance', '[service_user]', 'bitstream_owners')

    def test_wrong_password(self):
        self.http.post(f'{KEYSTONE}/auth/tokens', status_code=401)
        bad = self.check(2)
        self.assertEqual(
            ['Glance', 'Placement', 'flavors', 'traits of flavors'],
            [line['Check'] for line in bad])
        for line, section in zip(bad, (
                'service_user', 'placement', 'service_user', 'service_user')):
            for word in (f'[{section}]', '401'):
                self.assertIn(word, line['Found'])
            self.assertIn('correct', line['What to do'])

    def test_no_keystone(self):
        for path in ('', '/auth/tokens'):
            self.http.register_uri(
                requests_mock.ANY, f'{KEYSTONE}{path}',
                exc=requests.exceptions.ConnectionError('refused'))
        bad = {line['Check']: line for line in self.check(2)}
        for name, section in (('Glance', 'service_user'),
                              ('Placement', 'placement')):
            self.assertIn(f'Keystone at {KEYSTONE}', bad[name]['Found'])
            self.assertIn(f'correct [{section}] auth_url',
                          bad[name]['What to do'])
        self.assertNotIn('rejects', str(self.lines))

    def test_no_glance(self):
        self.http.get(f'{GLANCE}/v2/images', status_code=503)
        self.assertFails('Glance', 'api_servers')

    def test_cache(self):
        path = os.path.join(self.directory, 'file')
        with open(path, 'w'):
            pass
        self.set('accel', bitstream_cache=path)
        self.assertFails('cache', path, 'cannot be written')
        self.set('accel', bitstream_cache=os.path.join(path, 'below'))
        self.assertFails('cache', 'give the directory to')
        self.set('accel', bitstream_cache=self.directory)
        for free, result in (5, 'failure'), (900, 'warning'):
            self.useFixture(fixtures.MonkeyPatch(
                'shutil.disk_usage',
                lambda path: types.SimpleNamespace(free=free << 20)))
            self.assertFails('cache', f'{free} MiB are free', result=result)
        # without regions nothing is fetched
        self.set('accel', enabled_drivers='gpu')
        self.check(0)

    def test_no_placement(self):
        self.http.get(f'{PLACEMENT}/resource_providers',
                      exc=requests.exceptions.ConnectionError('refused'))
        self.assertFails('Placement', PLACEMENT, 'cannot be reached',
                         'see that it runs')

    def test_placement_that_refuses(self):
        self.http.get(f'{PLACEMENT}/resource_providers', status_code=403)
        self.assertFails('Placement', 'refuses the user of [placement]',
                         'give it the role')

    def test_answer_of_another_server(self):
        for text in '<html>', '5', '{"resource_providers": [5]}':
            self.http.get(f'{PLACEMENT}/resource_providers', text=text)
            self.assertFails('Placement', 'does not answer')

    def test_placement_without_credentials(self):
        self.set('placement', auth_type=None)
        self.assertFails('Placement', 'was not asked', 'set auth_type')

    def test_wide_tree(self):
        path = os.path.join(self.directory, 'placement.conf')
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.check_services._PLACEMENT_CONF', path))
        self.use_kernel(self.useFixture(SimulatedHost(gpus=[
            {'address': f'0000:{n}0:00.0'} for n in range(1, 9)])).kernel)
        self.set('accel', enabled_drivers='gpu')
        self.assertEqual([], self.check(0))
        self.set('accel', pools='none')
        # no flavor asks for five
        few = {f'resources{n}:CUSTOM_ACCELERATOR_GPU': '1' for n in range(4)}
        self.flavors({'gpu4': few})
        self.assertEqual([], self.check(0))
        self.assertNotIn('providers of this host', str(self.lines))
        self.flavors({'gpu4': few, 'gpu5': {
            **few, 'resources5:CUSTOM_ACCELERATOR_GPU': '1'}})
        self.assertEqual([], self.check(0))
        line, = [line for line in self.lines if line['Check'] == 'Placement']
        self.assertIn('not on this host', line['Found'])
        with open(path, 'w') as file:
            file.write('[placement]\n')
        self.assertFails('Placement', '8 providers', 'breadth-first',
                         'servers of the flavor gpu5', result='warning')
        # what a profile of another host asks for is not known here
        self.flavors({'gpu': {'accel:device_profile': 'gpus'}})
        self.assertFails('Placement', 'a server that asks for 5 of them',
                         result='warning', arguments=('--service', 'compute'))
        with open(path, 'a') as file:
            file.write('max_allocation_candidates = 1000\n'
                       'allocation_candidates_generation_strategy = '
                       'breadth-first\n')
        # without it a cloud of ten such hosts waits for minutes
        self.assertFails('Placement', '8 providers',
                         'optimize_for_wide_provider_trees',
                         result='warning')
        with open(path, 'a') as file:
            file.write('[workarounds]\n'
                       'optimize_for_wide_provider_trees = True\n')
        self.assertEqual([], self.check(0))


class UpgradeTest(CheckTestCase):

    def test_configuration_of_release_0_1(self):
        """What the upgrade needs is named before nova-compute starts."""
        self.use_kernel(self.useFixture(SimulatedHost(
            {'address': A}, gpus=[{'address': GPU}],
            nvmes=[{'address': DISK}])).kernel)
        del self.sections['service_user']
        self.set('accel', include_devices=None)
        said = {line['Check']: f'{line["Found"]}: {line["What to do"]}'
                for line in self.check(2)}
        self.assertEqual({GPU, DISK, A, 'Glance'}, set(said))
        for device in (GPU, DISK):
            self.assertIn(f'include_devices names: add address={device}',
                          said[device])
        self.assertIn('whole_cards', said[A])
        self.assertIn('virtual_functions', said[A])
        self.assertIn('[service_user] has no credentials', said['Glance'])


class DeviceTest(CheckTestCase):

    def test_no_reset_method(self):
        self.use_kernel(self.useFixture(SimulatedHost(
            gpus=[{'address': GPU, 'reset_method': ''}])).kernel)
        self.set('accel', enabled_drivers='gpu')
        self.assertFails(GPU, 'reset', f'{GPU}=operator')

    def use_acme(self, *change):
        package = self.useFixture(acme.Installed())
        if change:
            package.change('driver', *change)
        self.use_kernel(self.useFixture(SimulatedHost(
            acmes=[{'address': GPU}])).kernel)
        self.set('accel', enabled_drivers='acme')

    def found(self):
        line, = [line for line in self.lines if line['Check'] == GPU]
        return line['Result'], line['Found']

    def test_name_that_placement_refuses(self):
        self.use_acme('CUSTOM_ACME_FIRMWARE_{firmware}', 'Firmware')
        self.call_check()
        result, found = self.found()
        self.assertEqual('failure', result)
        self.assertIn("it is not reported to Placement: the driver acme "
                      "reports values that cannot be shown (ValueError: "
                      "'Firmware' is not a name for Placement", found)

    def test_exception_with_debug(self):
        self.use_acme('        firmware = self.kernel.read(',
                      """        {}['power']
        firmware = self.kernel.read(""")
        self.assertNotIn('Traceback', self.call().stderr)
        errors = commands.run('--debug', 'check', '--config-file', self.config,
                              check=check.Check).stderr
        self.assertIn('Traceback', errors)
        self.assertIn("{}['power']", errors)

    def test_cleaned_by(self):
        self.use_acme()
        self.call_check()
        self.assertEqual(('ok', 'AI of the driver acme, reset by flr'),
                         self.found())
        self.set('accel', handover='none')
        self.call_check()
        self.assertEqual(
            ('ok', 'AI of the driver acme, not cleaned between two servers'),
            self.found())

    def test_cleaned_by_its_driver(self):
        self.use_acme('    RESETS = True\n', '')
        self.call_check()
        self.assertEqual(('ok', 'AI of the driver acme, cleaned by its '
                                'driver'), self.found())

    def call_check(self):
        self.lines = json.loads(self.call('-f', 'json').stdout)

    def test_group_that_is_shared(self):
        self.use_kernel(self.useFixture(SimulatedHost(
            gpus=[{'address': GPU, 'iommu_group': 7}],
            others=[{'address': '0000:3c:00.0', 'vendor': '8086',
                     'device': '1533', 'driver': 'igb', 'class': '0x020000',
                     'iommu_group': 7}])).kernel)
        self.set('accel', enabled_drivers='gpu')
        line, = self.check(2)
        self.assertEqual(GPU, line['Check'])
        self.assertIn('igb', line['Found'])

    def test_vfs_that_nova_compute_makes(self):
        self.use_kernel(self.useFixture(SimulatedHost(
            {'address': A, 'ports': 1})).kernel)
        self.set('accel', enabled_drivers='dfl')
        self.assertFails(A, 'VFs', 'virtual_functions')
        self.set('accel', virtual_functions=f'{A}=1')
        self.assertEqual([], self.check(0))
        self.set('accel', virtual_functions=f'{A}=9')
        self.assertFails(A, 'requests 9 VFs')

    def test_card_that_a_process_keeps(self):
        """libvirt would wait for it."""
        self.use_kernel(self.useFixture(SimulatedHost(gpus=[
            {'address': GPU, 'faults': {'in_use': True}},
            {'address': A}])).kernel)
        self.set('accel', enabled_drivers='gpu')
        self.assertFails(
            GPU, f'exporter (process 4711) has /dev/{GPU} open, and no server '
            f'gets it meanwhile', 'end that process')

    def test_card_that_a_guest_has(self):
        """It is as nova-compute saw it before."""
        kernel = self.useFixture(SimulatedHost({'address': A})).kernel
        self.use_kernel(kernel)
        self.set('accel', enabled_drivers='dfl', whole_cards=A)
        with_option = config_fixture.Config(conf.CONF)
        with with_option:
            with_option.config(group='accel', whole_cards=[A])
            devices = dfl.DflDriver(kernel).discover()
        store = claim_store.ClaimStore(os.path.join(
            self.directory, claim_store.file_name('compute1')))
        store.set_devices(devices)
        kernel.guest_takes(A)
        self.assertFails(A, 'bound to vfio-pci')
        store.add([claim('s1', model.AttachHandle(
            model.HandleType.PCI, A), device_address=A, region_index=0,
            state=model.ClaimState.BOUND)])
        self.assertEqual([], self.check(0))
        # it was named when the server got it
        self.set('accel', whole_cards=None)
        line, = self.check(1)
        self.assertEqual(A, line['Check'])
        self.assertIn('no other server gets it afterwards', line['Found'])

    def test_card_that_hangs(self):
        """It costs its own line, and no more than the limit."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.checks._SECONDS', 3))
        self.set('accel', discovery_timeout=3)
        self.host.kernel.set_fault(GPU, hang='read')
        self.addCleanup(self.host.kernel.set_fault, GPU, hang=None)
        began = time.monotonic()
        bad = self.check(2)
        self.assertLess(time.monotonic() - began, 60)
        line, = bad
        self.assertEqual(GPU, line['Check'])
        self.assertIn('did not end within', line['Found'])
        self.assertIn('else reset the card', line['What to do'])

    def test_check_that_does_not_end(self):
        """No card is to be reset for it; and that it ended while the table was
        written is not told beside the table."""
        answer = threading.Event()
        self.addCleanup(answer.set)

        class Slow(Libvirt):

            def openAuth(self, *args):
                answer.wait()
                return super().openAuth(*args)

        def produce(*args):
            answer.set()
            while limits.at_work():
                time.sleep(0.01)
            return written(*args)

        written = check.Check.produce_output
        self.use_libvirt(Slow())
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.check.Check.produce_output', produce))
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.checks._SECONDS', 3))
        result = self.call('-f', 'json')
        line, = (line for line in json.loads(result.stdout)
                 if line['Check'] == 'libvirt')
        self.assertEqual('run it again when this host has less to do; else '
                         'see what does not answer', line['What to do'])
        self.assertNotIn('after all', result.stderr)

    def test_pci_of_nova(self):
        self.set('pci', device_spec=json.dumps(
            {'vendor_id': '10de', 'product_id': '26b9'}))
        self.assertFails(GPU, '[pci] device_spec', 'one of the two')
        self.assertEqual(1, [line['Check'] for line in self.lines].count(GPU))

    def test_malformed_pci_of_nova(self):
        self.set('pci', device_spec='{"vendor_id": 10de}')
        self.assertFails('options', 'correct [pci] device_spec')

    def test_vgpus_of_nova(self):
        self.use_kernel(self.useFixture(SimulatedHost(vgpus=[{
            'address': GPU, 'framework': 'mdev', 'units': 2, 'types': [
                {'id': 'nvidia-558', 'name': 'L40S-1Q', 'units': 1}],
        }])).kernel)
        self.set('accel', enabled_drivers='vgpu')
        self.set('devices', enabled_mdev_types='nvidia-558')
        self.assertFails(GPU, '[devices] enabled_mdev_types')
        self.set('mdev_nvidia-558', device_addresses='0000:99:00.0')
        self.assertEqual([], self.check(0))

    def test_disk_that_does_not_answer(self):
        self.host.kernel.read_nvme = self._refuse
        lines = {line['Result']: line for line in self.check(2)}
        self.assertIn('its controller does not report whether it can erase it '
                      '(Operation not permitted)', lines['failure']['Found'])
        self.assertIn('see the line on privileges',
                      lines['warning']['What to do'])

    @staticmethod
    def _refuse(function):
        raise PermissionError(1, 'Operation not permitted')

    def test_large_bar(self):
        self.use_kernel(self.useFixture(SimulatedHost(
            gpus=[{'address': GPU, 'bar_gib': 64}])).kernel)
        self.set('accel', enabled_drivers='gpu')
        self.assertFails(GPU, '64 GiB', 'q35', result='warning')
        self.set('libvirt', hw_machine_type='x86_64=pc-q35-8.2')
        self.assertEqual([], self.check(0))

    def test_large_bars_of_all_together(self):
        """Seven of eight: tianocore/edk2 pull request 12997."""
        self.set('libvirt', hw_machine_type='x86_64=q35')
        self.set('accel', enabled_drivers='gpu')
        for count, result in ((7, 0), (8, 1)):
            self.use_kernel(self.useFixture(SimulatedHost(gpus=[
                {'address': f'0000:{n + 0x50:02x}:00.0', 'bar_gib': 512}
                for n in range(count)])).kernel)
            self.assertEqual(result, len(
                [line for line in self.check(result)
                 if 'an eighth' in line['Found']]))


class SwitchesTest(CheckTestCase):
    """Two GPUs below one switch, a third below another that is below it."""

    UP, DOWN = '0000:18:00.0', ('0000:19:00.0', '0000:19:01.0', '0000:19:02.0')
    BELOW, BELOW_DOWN = '0000:1c:00.0', ('0000:1d:00.0', '0000:1d:01.0')
    GPUS = '0000:1a:00.0', '0000:1b:00.0', '0000:1e:00.0', '0000:1f:00.0'

    def switches(self, acs=(None,) * 4, groups=(1, 2, 3, 4), status=0):
        """:returns: (result, what was found) of each line about them."""
        top = ['pci0000:17', '0000:17:00.0', self.UP]
        chains = ([*top, self.DOWN[0]], [*top, self.DOWN[1]],
                  *([*top, self.DOWN[2], self.BELOW, down]
                    for down in self.BELOW_DOWN))
        self.use_kernel(self.useFixture(SimulatedHost(
            {'address': A, 'vfs': 1}, nvmes=[{'address': DISK}],
            gpus=[{'address': address, 'bridges': chain, 'iommu_group': group,
                   'driver': 'vfio-pci',
                   **({} if bits is None else {'acs': bits})}
                  for address, chain, bits, group
                  in zip(self.GPUS, chains, acs, groups)])).kernel)
        self.check(status)
        return [(line['Result'], line['Found']) for line in self.lines
                if line['Check'] == 'switches']

    def test_as_linux_sets_it(self):
        way = ('to other devices below the switch {} go up to the root '
               'complex, by ACS of {}')
        self.assertEqual([
            ('ok', f'requests of {", ".join(self.GPUS)} ' + way.format(
                self.UP, ', '.join((*self.DOWN, *self.BELOW_DOWN)))),
            ('ok', f'requests of {", ".join(self.GPUS[2:])} ' + way.format(
                self.BELOW, ', '.join(self.BELOW_DOWN)))], self.switches())

    def test_directly(self):
        """The operator has it so, and gives them together."""
        self.set('accel', device_sets=' '.join(self.GPUS))
        found = self.switches((0, 0, 0, 0), groups=(1, 1, 1, 1))
        self.assertEqual([
            ('ok', f'requests of {", ".join(gpus)} to other devices below the '
                   f'switch {switch} go there directly')
            for gpus, switch in ((self.GPUS, self.UP),
                                 (self.GPUS[2:], self.BELOW))], found)

    def test_past_the_iommu(self):
        """pcie_acs_override of some kernels makes groups of one of them."""
        found = self.switches((None, 0x19, None, None), status=1)
        self.assertEqual(['warning', 'ok', 'ok'], [
            result for result, _ in found])
        self.assertEqual(
            f'requests of {self.GPUS[1]} to other devices below the switch '
            f'{self.UP} bypass the IOMMU, although these devices have other '
            f'IOMMU groups: a server can reach devices of others', found[0][1])

    def test_one_by_one(self):
        """Two servers cannot have devices of one IOMMU group."""
        self.switches((0, 0, None, None), groups=(1, 1, 2, 3), status=2)
        found = {line['Check']: line['Found'] for line in self.lines
                 if line['Result'] == 'failure'}
        one, other, *_ = self.GPUS
        self.assertEqual({one, other}, found.keys())
        self.assertEqual(
            f'it is not given to servers: {one} is in one IOMMU group with '
            f'{other}, and the kernel gives a group to one guest', found[one])

    def test_cannot_be_read(self):
        def refuse(kernel, port):
            raise PermissionError(1, 'Operation not permitted')
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.sim.SimulatedKernel.read_acs', refuse))
        self.assertEqual([
            ('warning', f'ACS of the ports of the switch {switch} cannot be '
                        f'read (Operation not permitted)')
            for switch in (self.UP, self.BELOW)], self.switches(status=1))


@ddt.ddt
class FlavorTest(CheckTestCase):
    """Four H100 NVL: blog.rackspacecloud.com, December 2025."""

    ram = 768

    def setUp(self):
        super().setUp()
        self.use_kernel(self.useFixture(SimulatedHost(gpus=[
            {'address': f'0000:{n + 0x50:02x}:00.0', 'bar_gib': 128}
            for n in range(4)])).kernel)
        self.set('libvirt', hw_machine_type='x86_64=q35')
        self.set('accel', enabled_drivers='gpu')

    def flavor(self, amount=4, **more):
        self.flavors({'plain': {}, 'four': {
            'resources1:CUSTOM_ACCELERATOR_GPU': str(amount),
            **{f'hw:maxphysaddr_{name}': value
               for name, value in more.items()}}})

    def test_bits_of_the_host(self):
        self.flavor()
        self.assertEqual([], self.check(0))

    @ddt.data((256, '3 fit'), (512, '2 fit'), (768, '1 fit'))
    @ddt.unpack
    def test_flavor_with_few_bits(self, ram, words):
        self.ram = ram
        self.flavor(mode='emulate', bits='40')
        self.assertFails('flavors', 'the flavor four', 'of its 4 devices',
                         words, f'{ram} GiB', '40 bits', result='warning')

    def test_functions_that_are_given_together(self):
        """One accelerator, and each of its functions needs room."""
        self.use_kernel(self.useFixture(SimulatedHost(gpus=[{
            'address': A, 'vendor': '1002', 'bar_gib': 128,
            'total_vfs': 3, 'vfs': 3}])).kernel)
        self.set('accel', enabled_drivers='pci',
                 pci_devices='vendor=1002 type=AI vfs=together')
        self.flavors({'three': {
            'resources1:CUSTOM_ACCELERATOR_AI': '1',
            'hw:maxphysaddr_mode': 'emulate', 'hw:maxphysaddr_bits': '40'}})
        self.assertFails('flavors', 'of its 3 devices', '1 fit',
                         result='warning')

    def test_flavor_for_other_hosts(self):
        for specs in ({'amount': 5}, {'amount': 1}):
            self.flavor(mode='emulate', bits='40', **specs)
            self.assertEqual([], self.check(0))

    def test_machine_without_kvm(self):
        self.set('libvirt', virt_type='qemu')
        self.flavor()
        self.assertFails('flavors', '40 bits', result='warning')
        self.set('libvirt', virt_type='kvm')
        self.assertEqual([], self.check(0))

    def test_profile_that_is_not_here(self):
        self.flavors({'one': {'accel:device_profile': 'other'}})
        self.check(0)
        self.assertIn('were not checked: one', ''.join(
            line['Found'] for line in self.lines
            if line['Check'] == 'flavors'))

    def test_flavors_that_cannot_be_read(self):
        self.http.get(f'{NOVA}/flavors/detail', status_code=503)
        self.assertFails('flavors', 'not checked', result='warning',
                         arguments=('--service', 'compute'))

    def use_mediated_devices(self):
        self.use_kernel(self.useFixture(SimulatedHost(vgpus=[{
            'address': GPU, 'units': 8, 'types': [{'id': 'nvidia-558'}]}],
            )).kernel)
        self.set('accel', enabled_drivers='vgpu')

    def test_nova_that_is_not_needed(self):
        self.use_mediated_devices()
        self.http.get(f'{NOVA}/flavors/detail', status_code=503)
        self.assertEqual([], self.check(0, '--service', 'compute'))

    def test_memory_that_is_promised_twice(self):
        for option in 'ram_allocation_ratio', 'initial_ram_allocation_ratio':
            self.set('DEFAULT', **{option: '1.5'})
            self.assertFails('memory', '1.5 times', 'VFIO',
                             'ram_allocation_ratio = 1.0', result='warning')
        # it counts before the initial one
        self.set('DEFAULT', ram_allocation_ratio='1.0')
        self.assertEqual([], self.check(0))

    def test_memory_of_guests_with_mediated_devices(self):
        self.use_mediated_devices()
        self.set('DEFAULT', ram_allocation_ratio='1.5')
        self.assertEqual([], self.check(0))

    # GiB of a guest, hw:mem_page_size and hw:numa_nodes, pages of 2 MiB and of
    # 1 GiB on each node of this host, whether the guest starts
    @ddt.data((256, '1GB', 1, [0], [256], True),
              (256, '1GB', 1, [0], [255], False),
              (256, '1048576', 1, [0], [256], True),
              (256, '2MB', 1, [131072], [0], True),
              (256, '2MB', 1, [0], [512], False),
              (256, 'large', 1, [131072], [0], True),
              (256, 'large', 1, [1024], [255], False),
              # all of a guest's node is on one of the host's
              (256, '1GB', 1, [], [128, 128], False),
              (256, '1GB', 2, [], [128, 128], True),
              (256, '1GB', 2, [], [255, 127], False),
              (256, '1GB', 1, [], [0, 256], True),
              (256, 'any', 1, [0], [0], True), (256, '', 1, [], [], True),
              (256, 'small', 1, [0], [0], True),
              (256, '4KB', 1, [0], [0], True),
              (256, 'wrong', 1, [0], [0], True))
    @ddt.unpack
    def test_huge_pages(self, ram, asked, nodes, small, large, starts):
        self.ram = ram
        self.use_kernel(self.useFixture(SimulatedHost(
            gpus=[{'address': GPU}],
            huge_pages={2048: small, 1048576: large})).kernel)
        specs = {'hw:mem_page_size': asked, 'hw:numa_nodes': str(nodes)}
        self.flavors({'huge': {'resources1:CUSTOM_ACCELERATOR_GPU': '1',
                               **specs}, 'without': specs})
        if starts:
            self.assertEqual([], self.check(0))
        else:
            self.assertFails(
                'flavors', 'the flavor huge is not built on this host',
                f'{nodes} times {ram // nodes} GiB',
                f'hw:mem_page_size={asked}',
                f'{"+".join(map(str, large))} of 1024 MiB',
                'hugepagesz=1G', result='warning')

    def test_kernel_without_huge_pages(self):
        self.flavors({'huge': {'resources1:CUSTOM_ACCELERATOR_GPU': '1',
                               'hw:mem_page_size': '1GB'}})
        self.assertFails('flavors', 'this host has none', result='warning')

    # devices, [libvirt] num_pcie_ports, machine, further extra specs, whether
    # a port is left beside those of a disk, an interface and the balloon
    @ddt.data((4, 8, 'q35', {}, True), (4, 7, 'q35', {}, False),
              (1, 4, 'q35', {}, False), (1, 5, 'q35', {}, True),
              # libvirt sees to it
              (4, 0, 'q35', {}, True), (4, 4, 'pc', {}, True),
              # the devices have ports of their own
              (4, 4, 'q35', {'hw:numa_nodes': '2'}, True))
    @ddt.unpack
    def test_ports(self, amount, ports, machine, more, is_free):
        self.use_kernel(self.useFixture(SimulatedHost(gpus=[
            {'address': f'0000:{n + 0x50:02x}:00.0'} for n in range(4)],
            )).kernel)
        self.set('libvirt', hw_machine_type=f'x86_64={machine}',
                 num_pcie_ports=str(ports))
        self.flavors({'gpus': {
            'resources1:CUSTOM_ACCELERATOR_GPU': str(amount), **more}})
        if is_free:
            self.assertEqual([], self.check(0))
        else:
            self.assertFails('flavors', 'the flavor gpus has no port left',
                             f'{amount} PCI functions', f'is {ports}',
                             'at most 28', result='warning')

    def test_no_uefi(self):
        self.use_libvirt(Libvirt(firmware='bios'))
        self.assertFails('libvirt', 'hw_firmware_type=uefi', 'OVMF',
                         result='warning')
        # it does not say
        self.use_libvirt(Libvirt(firmware=None))
        self.assertEqual([], self.check(0))

    def test_old_libvirt(self):
        self.use_libvirt(Libvirt(libvirt=8000000))
        self.assertFails('libvirt', '8.0.0', '8.7.0', '40 bits',
                         result='warning')
        self.set('libvirt', cpu_mode='host-passthrough')
        self.assertEqual([], self.check(0))


class SchedulerTest(CheckTestCase):

    def test_filter_that_is_not_enabled(self):
        self.set('filter_scheduler', enabled_filters='ComputeFilter')
        self.assertFails('filter', 'enabled_filters')

    def test_filter_that_is_not_available(self):
        self.set('filter_scheduler', available_filters=None)
        self.assertFails('filter', 'available_filters', 'does not start')

    def test_order_of_filters(self):
        for names, words in (
                ('AcceleratorFilter,ComputeFilter',
                 'set enabled_filters = ComputeFilter,AcceleratorFilter'),
                ('AcceleratorFilter,ComputeFilter,AcceleratorFilter',
                 '2 times')):
            self.set('filter_scheduler', enabled_filters=names)
            self.assertFails('filter', words, result='warning')

    def test_weigher_twice(self):
        self.set('filter_scheduler', weight_classes=GOOD['filter_scheduler'][
            'weight_classes'] + ',nova_accel.scheduler.weights.'
            'AcceleratorWeigher')
        self.assertFails('weigher', '2 times', result='warning')

    def test_database(self):
        secret = 'mysql+pymysql://nova:secret@127.0.0.1:1/nova_api'
        self.set('api_database', connection=secret)
        self.assertFails('database', 'does not answer', 'see that it runs')
        self.assertNotIn('secret', str(self.lines))
        self.set('api_database', connection=None)
        self.assertFails('database', 'was not asked')

    def test_no_weigher(self):
        self.set('filter_scheduler', weight_classes=None)
        self.assertFails('weigher', 'weight_classes', 'AcceleratorWeigher')

    def test_weigher_without_weight(self):
        self.set('accel', weight_multiplier='0')
        self.assertFails('weigher', 'weight_multiplier', result='warning')


class ApiTest(CheckTestCase):

    def test_no_entry_point(self):
        self.useFixture(fixtures.MonkeyPatch(
            'importlib.metadata.entry_points', lambda **kwargs: []))
        self.assertFails('entry point', 'accel:device_profile',
                         arguments=('--service', 'api'))

    def test_malformed_profile(self):
        with open(self.profile, 'w') as file:
            file.write('name: plain\n')
        self.assertFails('profiles', f'{self.profile}, line 1')

    def write(self, *extra):
        with open(self.profile, 'w') as file:
            file.write(PROFILE + ''.join(f'  {line}\n' for line in extra)
                       + f'  accel:function_id: {FUNCTION}\n')

    def test_profile_of_two_shells(self):
        """One of two has an image; a region may carry the function without."""
        def images(request, context):
            return {'images': [{
                'id': FUNCTION, 'name': 'nlb', 'status': 'active', 'size': 1,
                'visibility': 'public', 'checksum': 32 * 'a',
                'accel:function_id': FUNCTION, 'accel:region_type_id':
                '9926ab6d-6c92-5a68-aabc-a7d84c545738'}]
                if request.qs.get('accel:function_id') else []}
        self.http.get(f'{GLANCE}/v2/images', json=images)
        carries = ('CUSTOM_FPGA_FUNCTION_'
                   + FUNCTION.upper().replace('-', '_'))
        self.write()
        self.placement({'one': {SHELL}, 'two': {OTHER_SHELL, carries}})
        self.check(0)
        self.placement({'one': {SHELL}, 'two': {OTHER_SHELL}})
        self.assertFails('profiles', 'plain also sends servers',
                         '69528db6-eb31-577a-8c36-68f9faa081f6',
                         'require the trait', result='warning')
        self.write(f'trait:{SHELL}: required')
        self.check(0)
        self.write(f'trait:{OTHER_SHELL}: required')
        self.assertFails('profiles', 'plain sends servers to regions of type '
                         '69528db6', result='warning')
        self.write('trait:CUSTOM_FPGA_INTL: required')
        self.assertFails('profiles', 'CUSTOM_FPGA_INTL, which no provider',
                         result='warning')

    def test_profiles_without_credentials(self):
        self.write()
        self.placement({'one': {SHELL}})
        self.set('service_user', auth_type=None)
        self.check(0, '--service', 'api')
        self.assertIn('Glance was not asked', str(self.lines))

    def test_no_profiles(self):
        self.set('accel', device_profiles='/nonexistent')
        self.assertFails('profiles', '/nonexistent', result='warning')

    def test_levels_of_flavors(self):
        gpu = {'resources1:CUSTOM_ACCELERATOR_GPU': '1'}
        self.placement({'one': {'CUSTOM_NEAR_RACK_R6', 'CUSTOM_NEAR_RACK_R7'}})
        self.flavors({'gpu': {**gpu, 'accel:near': 'rack=required'}})
        self.check(0, '--service', 'api')
        self.flavors({'gpu': {
            **gpu, 'accel:near': 'rail=preferred,rack=required'}})
        self.assertFails(
            'traits of flavors', 'accel:near prefers the level rail, and no '
            'suitable host reports a domain of it, and the flavor gpu asks '
            'for it', result='warning', arguments=('--service', 'api'))

    def test_near(self):
        self.http.get(f'{PLACEMENT}/resource_providers/compute1/traits',
                      json={'traits': ['CUSTOM_NEAR_RACK_R7']})
        both = {'compute1': {'CUSTOM_NEAR_RACK_R7'},
                'compute2': {'CUSTOM_NEAR_RACK_R7'}}
        self.placement(both)
        arguments = '--service', 'compute'
        for name, items, words in (
                ('options', ('rack=R7',), (
                    'has rack=R7, which is not a trait of that level',
                    'write CUSTOM_NEAR_RACK_<DOMAIN>')),
                ('options', ('rack',), (
                    "has 'rack', which is not <level>=<trait>",)),
                ('options', ('rack=CUSTOM_NEAR_RACK_R7',
                             'rack=CUSTOM_NEAR_RACK_R8'),
                 ('has the level rack twice, and a host is in one domain of '
                  'a level', 'keep one of them')),
                ('options', ('rack=auto',), ('only the level nvlink',)),
                ('near', ('rack=/nonexistent',), (
                    '/nonexistent of [accel] near cannot be read',
                    'write the name')),
                ('near', ('nvlink=auto',), (
                    'libnvidia-ml.so.1 cannot be used',
                    'name the domain in the option'))):
            self.set('accel', near=','.join(items))
            self.assertFails(name, *words, arguments=arguments)
        self.set('accel', near='rack=CUSTOM_NEAR_RACK_R7')
        self.check(0, *arguments)
        self.assertIn('CUSTOM_NEAR_RACK_R7', str(self.lines))
        for there in {}, {'compute1': both['compute1']}:
            self.placement(there)
            self.assertFails(
                'near', 'no other host reports a domain of the level rack',
                result='warning', arguments=arguments)
        # another rack, and the host in both
        self.http.get(f'{PLACEMENT}/resource_providers/compute1/traits',
                      json={'traits': ['CUSTOM_NEAR_RACK_R7',
                                       'CUSTOM_NEAR_RACK_R6']})
        self.placement({**both, 'compute3': {'CUSTOM_NEAR_RACK_R6'}})
        self.assertFails(
            'near', 'Placement has this host in CUSTOM_NEAR_RACK_R6 as well',
            result='warning', arguments=arguments)

    def test_traits_of_flavors(self):
        gpu = {'resources1:CUSTOM_ACCELERATOR_GPU': '1'}
        self.placement({'one': {'CUSTOM_A40'}})
        for extra, said in (
                ({'accel1:prefer': 'CUSTOM_A4O,CUSTOM_A40'},
                 'gpu prefers the trait CUSTOM_A4O, which no provider has'),
                ({'trait1:CUSTOM_A4O': 'required'},
                 'gpu needs the trait CUSTOM_A4O, which no provider has')):
            # what is not of accelerators
            self.flavors({'gpu': {**gpu, **extra},
                          'cpu': {'trait:CUSTOM_CPU': 'required'}})
            self.assertFails('traits of flavors', said, 'correct the trait',
                             result='warning')
        self.flavors({'gpu': {**gpu, 'accel1:prefer': 'CUSTOM_A40'}})
        self.check(0)
        self.flavors({'bad': {'accel1:x': 'y'}})
        self.assertFails('traits of flavors', 'the flavor bad', 'accel1:x',
                         result='warning')

    # Images that clear what users program

    def images(self, **image):
        """Glance has an image that clears, or none."""
        def listed(request, context):
            wanted = request.qs.get('accel:clears', [''])[0]
            return {'images': [{
                'id': FUNCTION, 'name': 'blank', 'status': 'active', 'size': 1,
                'visibility': 'public', 'checksum': 32 * 'a', **image}]
                if image and wanted == image['accel:clears'] else []}
        self.http.get(f'{GLANCE}/v2/images', json=listed)

    def test_users_program_and_nothing_clears(self):
        """Today the operator finds it out when his regions are reserved."""
        users = {'resources1:CUSTOM_ACCELERATOR_FPGA': '1',
                 'accel1:runtime_programming': 'true'}
        self.flavors({'fixed': {'resources1:CUSTOM_ACCELERATOR_FPGA': '1'},
                      **{f'daas{n}': users for n in range(5)}})
        # no region, no question
        self.check(0)
        self.placement({'one': {SHELL}})
        self.images()
        self.assertFails(
            'clearing images', 'the flavor daas0, the flavor daas1, the '
            'flavor daas2 and 2 more let users program regions of type '
            '9926ab6d-6c92-5a68-aabc-a7d84c545738', 'no image of yours',
            'accel:clears', result='warning')
        clears = {'accel:clears': 'registers', 'accel:region_type_id':
                  '9926ab6d-6c92-5a68-aabc-a7d84c545738'}
        self.images(**clears)
        self.check(0)
        self.images(**clears, status='deactivated')
        self.assertFails('clearing images', 'status in Glance is deactivated',
                         result='warning')
        # of another type, to which the flavors do not lead
        self.images(**clears)
        self.placement({'one': {SHELL}, 'two': {OTHER_SHELL}})
        self.assertFails('clearing images', '69528db6', result='warning')
        self.flavors({'daas': {**users, f'trait1:{SHELL}': 'required'}})
        self.check(0)

    def test_profile_lets_users_program(self):
        self.write('accel:runtime_programming: true')
        self.placement({'one': {SHELL, (
            'CUSTOM_FPGA_FUNCTION_' + FUNCTION.upper().replace('-', '_'))}})
        self.images()
        self.assertFails('clearing images', 'the profile plain lets',
                         result='warning')

    def test_flavors_that_cannot_be_read(self):
        flavor = {'id': 'f', 'name': 'f'}
        for answer in (
                {'status_code': 503}, {'json': {'flavors': [flavor]}},
                # the same one, whatever page is asked for
                {'json': {'flavors': [
                    {**flavor, 'extra_specs': {}, 'ram': 1}]}}):
            self.http.get(f'{NOVA}/flavors/detail', **answer)
            self.assertFails('traits of flavors', 'flavors', 'not checked',
                             result='warning', arguments=('--service', 'api'))
