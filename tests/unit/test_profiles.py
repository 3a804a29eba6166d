# Licensed under the Apache License, Version 2.0. See LICENSE.

import os
import shutil
import tempfile
import textwrap
import unittest

from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel import exception
from nova_accel import naming
from nova_accel import profiles
from nova_accel import request

FUNCTION = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
NLB = f"""\
    name: nlb
    description: loopback
    groups:
      - resources:{FPGA}: 1
        trait:CUSTOM_FPGA_INTEL: required
        accel:function_id: {FUNCTION}
    """


class ProfilesTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        config = config_fixture.Config(conf.CONF)
        config.setUp()
        self.addCleanup(config.cleanUp)
        self.config = config
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        self.path = os.path.join(self.directory, 'profiles.yaml')
        config.config(group='accel', device_profiles=self.path)
        self.store = profiles.ProfileStore()

    def write(self, text, path=None):
        with open(path or self.path, 'w', encoding='utf-8') as file:
            file.write(textwrap.dedent(text))

    def expand(self, **specs):
        return profiles.expand(
            {k.replace('__', ':'): v for k, v in specs.items()},
            self.store.get)

    def malformed(self, text, *words):
        self.write(text)
        files = profiles.load(self.path)
        self.assertEqual({}, files.good)
        said = files.bad[self.path]
        self.assertRegex(said, r'\.\Z')
        for word in words:
            self.assertIn(word, said)

    def refused(self, name='nlb', *words):
        """What the log says; the tenant is told no path and no other name."""
        with (self.assertRaises(exception.InvalidProfile) as got,
              self.assertLogs(profiles.LOG.name, 'ERROR') as log):
            self.store.get(name)
        self.assertEqual(
            f'The flavor asks for the device profile {name!r}, which cannot '
            f'be used: ask the operator of the cloud.', str(got.exception))
        for word in words:
            self.assertIn(word, '\n'.join(log.output))

    def test_expand(self):
        self.write(NLB)
        self.assertEqual({
            'hw:cpu_policy': 'dedicated', 'accel:profile': 'nlb',
            f'resources_ACCEL0:{FPGA}': '1',
            'trait_ACCEL0:CUSTOM_FPGA_INTEL': 'required',
            'accel_ACCEL0:function_id': FUNCTION,
        }, self.expand(accel__device_profile='nlb',
                       hw__cpu_policy='dedicated'))

    def test_group_by_its_profile(self):
        """As owners and operators read it, who do not see its suffix."""
        self.write(NLB)
        wanted, = request.parse(self.expand(accel__device_profile='nlb'))
        self.assertEqual(f'group 0 of the device profile nlb ({FPGA}=1)',
                         str(wanted))
        wanted, = request.parse({f'resources_ACCEL0:{FPGA}': '1'})
        self.assertEqual(f'group _ACCEL0 ({FPGA}=1)', str(wanted))

    def test_expand_once(self):
        self.write(NLB)
        once = self.expand(accel__device_profile='nlb')
        self.assertEqual(once, profiles.expand(once, self.store.get))

    def test_flavor_without_accelerators_reads_no_file(self):
        specs = {'hw:cpu_policy': 'dedicated', 'resources:VGPU': '1'}
        self.assertEqual(specs, profiles.expand(specs, self.store.get))

    def test_two_groups_need_a_policy(self):
        self.write(f"""\
            name: two
            groups:
              - resources:{FPGA}: 1
              - resources:{FPGA}: 1
            """)
        self.assertEqual('none', self.expand(
            accel__device_profile='two')['group_policy'])
        self.assertEqual('isolate', self.expand(
            accel__device_profile='two', group_policy='isolate',
        )['group_policy'])

    def test_each_of_several_fpgas_has_a_group(self):
        self.write(f"""\
            name: pair
            groups:
              - resources:CUSTOM_ACCELERATOR_QAT: 2
              - resources:FPGA: 2
                resources:{naming.memory_class('DDR')}: 4096
                accel:function_id: {FUNCTION}
            """)
        specs = self.expand(accel__device_profile='pair')
        self.assertEqual({
            'accel:profile': 'pair', 'group_policy': 'none',
            'resources_ACCEL0:CUSTOM_ACCELERATOR_QAT': '2', **{
                f'{kind}_ACCEL1_{number}:{name}': value
                for number in (0, 1) for kind, name, value in (
                    ('resources', FPGA, '1'),
                    ('resources', naming.memory_class('DDR'), '4096'),
                    ('accel', 'function_id', FUNCTION))}}, specs)
        self.assertEqual(
            [('_ACCEL0', 2), ('_ACCEL1_0', 1), ('_ACCEL1_1', 1)],
            [(r.group, r.amount) for r in request.parse(specs)])

    def test_group_of_the_operator_counts(self):
        self.write(NLB)
        self.assertEqual('none', self.expand(**{
            'accel__device_profile': 'nlb', 'resources1__CUSTOM_X': '1',
        })['group_policy'])

    def test_bitstream_needs_a_programmable_region(self):
        self.assertEqual('required', self.expand(**{
            f'resources1__{FPGA}': '1', 'accel1__bitstream_id': FUNCTION,
        })[f'trait1:{naming.PROGRAMMABLE}'])

    def test_early_spellings(self):
        self.assertEqual(
            {f'resources:{FPGA}': '1',
             'accel:function_id': FUNCTION.replace('-', '')},
            self.expand(**{
                f'resources__{FPGA}': '1',
                'function__CUSTOM_FPGA_FUNCTION_INTEL_'
                + FUNCTION.upper().replace('-', '_'): 'required'}))

    def test_class_in_either_spelling(self):
        for spelling in ('FPGA', FPGA):
            self.write(NLB.replace(f'resources:{FPGA}',
                                   f'resources:{spelling}'))
            self.assertIn(f'resources_ACCEL0:{FPGA}', profiles.expand(
                {'accel:device_profile': 'nlb'}, profiles.ProfileStore().get))
        self.config.config(group='accel', resource_classes='standard')
        for spelling in ('FPGA', FPGA):
            self.write(NLB.replace(f'resources:{FPGA}',
                                   f'resources:{spelling}'))
            self.assertIn('resources_ACCEL0:FPGA', profiles.expand(
                {'accel:device_profile': 'nlb'}, profiles.ProfileStore().get))

    def test_class_in_both_spellings(self):
        self.malformed(f"""\
            name: nlb
            groups:
              - resources:{FPGA}: 1
                resources:FPGA: 1
            """, 'line 4', 'both spellings')

    def test_group_name_taken(self):
        self.write(NLB)
        with self.assertRaisesRegex(exception.InvalidRequest,
                                    'use another group name'):
            self.expand(**{'accel__device_profile': 'nlb',
                           f'resources_ACCEL0__{FPGA}': '1'})

    def test_whole_server(self):
        """Where all accelerators are to be stands beside the groups."""
        self.write(NLB + """\
accel:same: pcie_root
    accel:numa_affinity: required
    """)
        specs = self.expand(accel__device_profile='nlb')
        self.assertEqual(
            ('pcie_root', 'required', {'', '_ACCEL0'}),
            (specs['accel:same'], specs['accel:numa_affinity'],
             {key.partition(':')[0].removeprefix('accel') for key in specs
              if key.startswith('accel')}))
        with self.assertRaisesRegex(exception.InvalidRequest,
                                    "has accel:same, which .* 'nlb' writes"):
            self.expand(accel__device_profile='nlb', accel__same='numa')
        # in the flavor it is of the profile's groups, too
        self.write(NLB)
        self.assertEqual('numa', self.expand(
            accel__device_profile='nlb', accel__same='numa')['accel:same'])

    def test_unknown_profile(self):
        self.write(NLB)
        self.refused('nbl', f"'nbl', and {self.path} has nlb: correct")

    def test_no_file(self):
        self.refused('nlb', f'{self.path} does not exist', 'no profiles')

    def test_changed_file_is_read_again(self):
        self.write(NLB)
        self.assertEqual('loopback', self.store.get('nlb').description)
        self.write(NLB.replace('loopback', 'changed'))
        os.utime(self.path, ns=(1, 1))
        self.assertEqual('changed', self.store.get('nlb').description)

    def test_spoiled_file(self):
        """What was good in it stays, and the log says once what is wrong."""
        self.write(NLB)
        self.store.get('nlb')
        self.write('name: [')
        with self.assertLogs(profiles.LOG.name, 'ERROR') as log:
            self.assertEqual('loopback', self.store.get('nlb').description)
        self.assertIn('line 1', log.output[0])
        os.utime(self.path, ns=(1, 1))
        with self.assertNoLogs(profiles.LOG.name, 'ERROR'):
            self.assertEqual('loopback', self.store.get('nlb').description)
        self.write(NLB.replace('loopback', 'changed'))
        self.assertEqual('changed', self.store.get('nlb').description)
        os.unlink(self.path)
        self.assertEqual('changed', self.store.get('nlb').description)

    def test_brackets_without_end(self):
        """It costs its own file, as any other that cannot be read."""
        self.write(NLB)
        self.store.get('nlb')
        self.write('[' * 1000)
        with self.assertLogs(profiles.LOG.name, 'ERROR'):
            self.assertEqual('loopback', self.store.get('nlb').description)

    def test_malformed_from_the_start(self):
        self.write('name: [')
        self.refused('nlb', 'line 1')
        self.write(NLB)
        self.assertEqual('nlb', self.store.get('nlb').name)

    def test_malformed_file_costs_its_own_profiles(self):
        self.config.config(group='accel', device_profiles=self.directory)
        self.write(NLB)
        other = os.path.join(self.directory, 'a.yml')
        self.write(NLB.replace('nlb', 'a'), other)
        self.assertEqual('a', self.store.get('a').name)
        self.write('- 1', other)
        self.assertEqual(['nlb', 'a'], [
            self.store.get(name).name for name in ('nlb', 'a')])
        # nova-api starts again
        self.store = profiles.ProfileStore()
        self.assertEqual('nlb', self.store.get('nlb').name)
        self.refused('a', f'{self.directory} has nlb')
        os.unlink(other)
        self.assertEqual('nlb', self.store.get('nlb').name)

    def test_other_directory(self):
        """Nothing is left of the one that the option named before."""
        self.write(NLB)
        self.store.get('nlb')
        self.config.config(group='accel', device_profiles='/nonexistent')
        self.refused('nlb', '/nonexistent does not exist')

    def test_profile_that_moved_to_another_file(self):
        self.config.config(group='accel', device_profiles=self.directory)
        self.write(NLB)
        self.store.get('nlb')
        self.write('- 1')
        self.write(NLB.replace('loopback', 'moved'),
                   os.path.join(self.directory, 'a.yaml'))
        self.assertEqual('moved', self.store.get('nlb').description)

    def test_directory(self):
        self.config.config(group='accel', device_profiles=self.directory)
        self.write(NLB)
        self.write('not: a profile', os.path.join(self.directory, 'README'))
        self.assertEqual('nlb', self.store.get('nlb').name)
        second = os.path.join(self.directory, 'second.yaml')
        self.write(NLB, second)
        files = profiles.load(self.directory)
        self.assertEqual([self.path], list(files.good))
        self.assertIn(f"{second}, line 1: the profile name 'nlb' is taken by "
                      f"{self.path}, line 1", files.bad[second])

    @unittest.skipIf(os.geteuid() == 0, 'root may read everything')
    def test_unreadable(self):
        self.config.config(group='accel', device_profiles=self.directory)
        os.chmod(self.directory, 0)
        self.addCleanup(os.chmod, self.directory, 0o700)
        self.refused('nlb', 'cannot be read')

    def test_unreadable_file(self):
        os.mkdir(self.path)
        self.config.config(group='accel', device_profiles=self.directory)
        self.refused('nlb', f'{self.path} cannot be read')

    def test_malformed(self):
        for text, *words in (
                ('name: nlb\ngroups: [', 'line 2'),
                ('name: nlb\n\tgroups: x', 'line 2'),
                ('\x01', 'profiles.yaml'),
                ('- - a', 'line 1', 'a profile has to be a mapping'),
                ('just text', 'line 1', 'a profile has to be a mapping'),
                ('description: x', 'line 1', 'has no name'),
                ('name: nlb', 'has no groups'),
                ('name:\ngroups: [{}]', "key 'name'", 'empty'),
                ('name: nlb\nname: nlb', 'line 2', "key 'name'", 'duplicate'),
                ('name: nlb\ngroups: []', 'line 2', "key 'groups'"),
                ('name: nlb\ngroups: {a: b}', 'line 2', "key 'groups'"),
                ('name: nlb\ncolour: red', 'line 2', "key 'colour'"),
                ('name: nlb\naccel:same: rack\ngroups: [{}]', 'line 2',
                 "key 'accel:same'", 'numa, pcie_root'),
                ('name: [nlb]\ngroups: [{}]', 'line 1', "key 'name'",
                 'plain value'),
                ('name: nlb\ngroups:\n- text', 'line 3',
                 'a group has to be a mapping'),
                ('name: nlb\ngroups:\n- trait:CUSTOM_A: required', 'line 3',
                 'does not request an accelerator'),
                ('name: nlb\n--- \nname: nlc', 'line 2')):
            with self.subTest(text):
                self.malformed(text, *words)

    def test_malformed_group(self):
        for key, value, *words in (
                (f'resources:{FPGA}', '0', 'not an amount'),
                (f'resources:{FPGA}', '-1', 'not an amount'),
                (f'resources:{FPGA}', 'one', 'not an amount'),
                ('resources:CUSTOM_ACCELERATOR_a', '1', 'Placement'),
                ('resources:', '1', 'correct the key'),
                ('resources1:CUSTOM_A', '1', 'correct the key'),
                ('vendor', 'intel', 'correct the key'),
                ('trait:CUSTOM_A', 'maybe', 'neither required'),
                ('trait:CUSTOM-A', 'required', 'Placement'),
                (f'trait:{"T" * 256}', 'required', '255'),
                ('accel:function_uuid', FUNCTION, 'unknown'),
                ('accel:same', 'numa', 'write it beside groups'),
                ('accel:function_id', 'nlb', 'not a UUID'),
                ('accel:function_name', 'a/b', 'function name'),
                ('accel:bitstream_id', 'latest', 'not a UUID')):
            with self.subTest(key=key, value=value):
                self.malformed(f"""\
                    name: nlb
                    groups:
                      - resources:CUSTOM_ACCELERATOR_GPU: 1
                        {key}: {value}
                    """, f"line 4, key '{key}'", *words)

    def test_bitstream_and_function(self):
        self.malformed(f"""\
            name: nlb
            groups:
              - resources:{FPGA}: 1
                accel:function_id: {FUNCTION}
                accel:bitstream_id: {FUNCTION}
            """, 'line 3', 'keep one of them')

    def test_flavor_of_the_operator_is_checked(self):
        with self.assertRaisesRegex(exception.InvalidRequest, 'not a UUID'):
            self.expand(**{f'resources1__{FPGA}': '1',
                           'accel1__function_id': 'nlb'})

    def test_what_expands_is_what_is_parsed(self):
        self.write(NLB)
        wanted, = request.parse(self.expand(accel__device_profile='nlb'))
        self.assertEqual(('_ACCEL0', FPGA, 1, FUNCTION.replace('-', '')),
                         (wanted.group, wanted.resource_class, wanted.amount,
                          wanted.function_id))
