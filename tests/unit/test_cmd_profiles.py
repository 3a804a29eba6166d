# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel profile ..., as an operator starts it."""

import os

import fixtures
# registers Nova's options, before other tests register some of them
import nova.conf  # noqa: F401

from tests.unit import commands
from tests.unit.host import SimulatedHost

FUNCTION = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
SHELL = 'CUSTOM_FPGA_INTEL_REGION_9926AB6D_6C92_5A68_AABC_A7D84C545738'
NLB = f"""\
name: nlb
description: loopback
groups:
- resources:{FPGA}: 1
  accel:bitstream_id: {FUNCTION}
  trait:{SHELL}: required
"""


class ProfilesTestCase(commands.CommandTestCase):

    def setUp(self):
        super().setUp()
        self.profiles = os.path.join(self.directory, 'profiles')
        os.mkdir(self.profiles)
        self.configure(device_profiles=self.profiles)
        self.good = self.write('nlb.yaml', NLB)

    def write(self, name, text):
        path = os.path.join(self.profiles, name)
        with open(path, 'w') as file:
            file.write(text)
        return path


class ListTest(ProfilesTestCase):

    COMMAND = 'profile list'

    def test_list(self):
        self.assertEqual([{
            'Name': 'nlb', 'Groups': 1, 'Description': 'loopback',
            'Where': f'{self.good}, line 1'}], self.rows())

    def test_configuration_of_nova_api(self):
        self.useFixture(fixtures.EnvironmentVariable('HOME', self.directory))
        directory = os.path.join(self.directory, '.nova')
        os.mkdir(directory)
        os.rename(self.config, os.path.join(directory, 'nova-api.conf'))
        self.assertIn('loopback', self.main('profile', 'list').stdout)

    def test_column_that_is_not_there(self):
        try:
            result = self.call('-c', 'Nix')
        except SystemExit as error:
            self.assertEqual(2, error.code)
        else:
            self.assertEqual(2, result.returncode)
        self.assertEqual('nlb\n', self.call(
            '-c', 'name', '-f', 'value').stdout)
        result = self.start('-c', 'Nix')
        self.assertEqual((2, ''), (result.returncode, result.stdout))
        self.assertIn("unknown column 'Nix': choose from 'Name', 'Groups'",
                      result.stderr)

    def test_malformed(self):
        bad = self.write('bad.yml', 'name: bad\n')
        result = self.call()
        self.assertEqual(1, result.returncode)
        self.assertIn('loopback', result.stdout)
        self.assertIn(f'{bad}, line 1: the profile has no groups',
                      result.stderr)


class ShowTest(ProfilesTestCase):

    COMMAND = 'profile show'

    def test_show(self):
        self.assertEqual(
            {'accel:profile': 'nlb', f'resources_ACCEL0:{FPGA}': '1',
             'accel_ACCEL0:bitstream_id': FUNCTION,
             f'trait_ACCEL0:{SHELL}': 'required',
             'trait_ACCEL0:CUSTOM_PROGRAMMABLE': 'required'},
            {row['Extra spec']: row['Value'] for row in self.rows('nlb')})

    def test_guest_that_does_not_see_all(self):
        """Four H100 NVL in 46 bits: with 512 GiB, not with 63.5 TiB."""
        kernel = self.useFixture(SimulatedHost(gpus=[
            {'address': f'0000:{n + 0x50:02x}:00.0', 'bar_gib': 128}
            for n in range(4)])).kernel
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.machine.open_kernel', lambda host, writes: kernel))
        self.write('gpus.yaml', """\
- name: four
  groups:
  - resources:CUSTOM_ACCELERATOR_GPU: 4
- name: five
  groups:
  - resources:CUSTOM_ACCELERATOR_GPU: 5
""")
        self.configure(device_profiles=self.profiles, enabled_drivers='gpu',
                       include_devices='vendor=10de')
        self.assertEqual((0, ''), self._ends('four', '--memory', '512'))
        status, said = self._ends('four', '--memory', '65024')
        self.assertEqual(1, status)
        self.assertIn('of its 4 devices with large memory regions 2 fit above '
                      'its 65024 GiB of memory into 46 bits', said)
        with open(self.config, 'a') as file:
            file.write('[libvirt]\nhw_machine_type = x86_64=q35\n'
                       'num_pcie_ports = 7\n')
        status, said = self._ends('four', '--memory', '512')
        self.assertEqual(1, status)
        self.assertIn('A guest with 512 GiB has no port left', said)
        status, said = self._ends('five', '--memory', '64')
        self.assertEqual(1, status)
        self.assertIn("does not have all that 'five' asks for", said)

    def _ends(self, *arguments):
        result = self.call(*arguments)
        return result.returncode, result.stderr

    def test_unknown(self):
        result = self.call('nbl')
        self.assertEqual(1, result.returncode)
        self.assertIn("no device profile 'nbl'", result.stderr)
        self.assertIn('it has nlb', result.stderr)


class CheckTest(ProfilesTestCase):

    COMMAND = 'profile check'

    def test_good(self):
        result = self.start()
        self.assertEqual((0, f'{self.profiles}: 1 profiles can be used\n', ''),
                         (result.returncode, result.stdout, result.stderr))

    def test_files(self):
        """Also files that are not there yet where nova-api reads them."""
        bad = os.path.join(self.directory, 'new.yaml')
        with open(bad, 'w') as file:
            file.write(NLB.replace(FUNCTION, 'latest'))
        result = self.call(self.good, bad)
        self.assertEqual(1, result.returncode)
        self.assertIn(f'{self.good}: 1 profiles', result.stdout)
        self.assertIn(f"{bad}, line 5, key 'accel:bitstream_id'",
                      result.stderr)
        self.assertNotIn('Traceback', result.stderr)

    def test_contradictions(self):
        bad = os.path.join(self.directory, 'new.yaml')
        for extra in (
                'accel:same: numa\naccel:numa_affinity: none\n',
                '  accel:function_name: nlb\n',
                '  trait:CUSTOM_A: forbidden\n  accel:prefer: CUSTOM_A\n'):
            with open(bad, 'w') as file:
                file.write(NLB + extra)
            result = self.call(bad)
            self.assertEqual(1, result.returncode)
            self.assertIn('keep one of them.', result.stderr)

    def test_group_that_names_no_shell(self):
        self.write('nlb.yaml', NLB.replace(f'  trait:{SHELL}: required\n', ''))
        result = self.call()
        self.assertEqual(0, result.returncode)
        self.assertIn("WARNING: ", result.stderr)
        self.assertIn("1 of the groups of 'nlb' request a function",
                      result.stderr)
        self.assertIn('REGION_<TYPE>: required', result.stderr)

    def test_shipped_profiles(self):
        """They lead to one shell."""
        result = self.call(os.path.join(
            os.path.dirname(__file__), '../../etc/nova_accel/device_profiles'))
        self.assertEqual((0, ''), (result.returncode, result.stderr))

    def test_name_that_is_taken(self):
        for name, status in (('new.yaml', 1), ('nlb.yaml', 0)):
            new = os.path.join(self.directory, name)
            with open(new, 'w') as file:
                file.write(NLB)
            result = self.call(new)
            self.assertEqual(status, result.returncode)
            self.assertEqual(
                f"{new}, line 1: the profile name 'nlb' is taken by "
                f'{self.good}, line 1: rename one of the two.\n' * status,
                result.stderr)

    def test_nothing_there(self):
        result = self.call('/nonexistent')
        self.assertEqual(1, result.returncode)
        self.assertIn('/nonexistent does not exist', result.stderr)
