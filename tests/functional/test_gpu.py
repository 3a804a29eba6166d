# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whole GPUs reach guests together with what else is in their slot."""

from unittest import mock

import fixtures
from nova.tests.fixtures import libvirt as fakelibvirt

from nova_accel.host import pci
from tests.functional import operations

GPU, SOUND, OTHER = '0000:5e:00.0', '0000:5e:00.1', '0000:81:00.0'
CLASS = 'CUSTOM_ACCELERATOR_GPU'
FLAVOR = {f'resources1:{CLASS}': '1',
          'trait1:CUSTOM_GPU_NVIDIA_L40S': 'required'}


class GpuTest(operations.OperationsTestBase):

    HOSTS = {'compute1': {
        'gpus': [{'address': GPU, 'iommu_group': 7, 'bar_gib': 64},
                 # shown, and given to nobody
                 {'address': OTHER, 'iommu_group': 8}],
        'others': [{'address': SOUND, 'vendor': '10de', 'device': '10fa',
                    'class': '0x040300', 'driver': 'snd_hda_intel',
                    'iommu_group': 7},
                   {'address': '0000:82:00.0', 'driver': 'ahci',
                    'iommu_group': 8}]}}

    def setUp(self):
        super().setUp()
        self.start = self.provider_tree()

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['gpu'], group='accel')

    def bound(self):
        return [pci.driver(self.kernel('compute1'), a) for a in (GPU, SOUND)]

    def assertAsAtStart(self):
        self.assertEqual([], self.claims())
        self.report()
        self.assertEqual(self.start, self.provider_tree())
        self.assertEqual(['nvidia', 'vfio-pci'], self.bound())
        # while the host's driver did not have it
        self.assertEqual([[[GPU, None]], [[SOUND, 'vfio-pci']]], [
            self.simulated('compute1').resets(a)[-1:] for a in (GPU, SOUND)])

    def test_boot(self):
        inventory, traits, _ = self.start[
            self.provider_name('compute1', GPU)]
        self.assertEqual({CLASS: (1, 0)}, inventory)
        for trait in ('CUSTOM_GPU_NVIDIA', 'CUSTOM_GPU_NVIDIA_26B9',
                      'CUSTOM_GPU_NVIDIA_ADA', 'OWNER_CYBORG'):
            self.assertIn(trait, traits)
        # the other one, which is of the same kind, does not count
        self.assertEqual([self.provider_name('compute1', OTHER)],
                         list(self.start))
        define, defined = fakelibvirt.Connection.defineXML, []
        # its own XMLDesc() has no maxphysaddr
        self.useFixture(fixtures.MockPatchObject(
            fakelibvirt.Connection, 'defineXML', lambda connection, xml: (
                defined.append(xml), define(connection, xml))[1]))
        # as with libvirt 8.7; the imitation is older
        self.enterContext(mock.patch.dict(
            self.computes['compute1'].driver.capabilities,
            supports_address_space_emulated=True))
        server = self.boot(FLAVOR)
        self.assertEqual([GPU, SOUND], self.hostdevs(server))
        # its region has no room in what QEMU tells a guest otherwise
        self.assertIn('<maxphysaddr mode="emulate" bits="46"/>', defined[0])
        self.assertEqual(['vfio-pci', 'vfio-pci'], self.bound())
        # into a guest that runs they go one by one
        self._suspend_server(server)
        self.assertEqual([], self.hostdevs(server))
        self._resume_server(server)
        self.assertEqual([GPU, SOUND], self.hostdevs(server))
        second = self.boot(FLAVOR, expected_state='ERROR')
        self.assertIn('No valid host', self.fault(second))
        self._delete_server(second)
        self._delete_server(server)
        self.assertAsAtStart()
