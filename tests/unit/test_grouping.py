# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Traits that are in another group than their device."""

import ddt
import testtools

from nova_accel import exception
from nova_accel import profiles

GPU = 'CUSTOM_ACCELERATOR_GPU'
L40S = 'CUSTOM_GPU_NVIDIA_L40S'


@ddt.ddt
class GroupingTest(testtools.TestCase):

    @ddt.data(
        # the device in a numbered group, its trait in the other, and back
        ({f'resources1:{GPU}': '1', f'trait:{L40S}': 'required'},
         f'trait:{L40S} ', f'write trait1:{L40S}, as resources1:{GPU}'),
        ({f'resources:{GPU}': '1', f'trait1:{L40S}': 'required'},
         f'trait1:{L40S} ', f'write trait:{L40S}, as resources:{GPU}'),
        ({f'resources_A:{GPU}': '1', f'trait_B:{L40S}': 'required'},
         f'trait_B:{L40S} ', f'write trait_A:{L40S}'),
        # that of the device of its type
        ({f'resources1:{GPU}': '1',
          'resources2:CUSTOM_ACCELERATOR_FPGA': '1',
          'trait:CUSTOM_FPGA_INTEL_PAC': 'required'},
         'trait:CUSTOM_FPGA_INTEL_PAC ', 'write trait2:CUSTOM_FPGA_INTEL_PAC'),
        # of any name, in a group without resources
        ({f'resources:{GPU}': '1', 'trait1:CUSTOM_RACK': 'required'},
         'trait1:CUSTOM_RACK is in a group without resources', 'or remove it'),
        ({f'resources:{GPU}': '1', f'trait1:{L40S}': 'forbidden'},
         f'trait1:{L40S} is in a group without resources', 'or remove it'),
        ({f'resources1:{GPU}': '1',
          'trait:CUSTOM_ACCELERATOR_NUMA_0': 'required'},
         'trait:CUSTOM_ACCELERATOR_NUMA_0 ', 'write trait1:'))
    @ddt.unpack
    def test_refused(self, specs, *words):
        error = str(self.assertRaises(
            exception.InvalidRequest, profiles.check_groups, specs))
        for word in words:
            self.assertIn(word, error)

    @ddt.data(
        {f'resources1:{GPU}': '1', f'trait1:{L40S}': 'required'},
        {f'resources:{GPU}': '1', f'trait:{L40S}': 'required'},
        # of hosts
        {f'resources1:{GPU}': '1', 'trait:CUSTOM_GPU_RACK': 'required',
         'trait:HW_CPU_X86_AVX2': 'required'},
        # no more than no host with it
        {f'resources1:{GPU}': '1', f'trait:{L40S}': 'forbidden'},
        # Nova's own groups
        {'resources1:CUSTOM_X': '1', 'trait2:CUSTOM_Y': 'required'},
        {f'resources1:{GPU}': '1', 'resources2:CUSTOM_X': '1',
         'trait2:CUSTOM_Y': 'required'},
        {})
    def test_accepted(self, specs):
        profiles.check_groups(specs)
