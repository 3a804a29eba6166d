# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Hosts with vGPUs: of nova_accel, and some that Nova creates itself."""

import uuid as uuidlib

import fixtures
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.virt.libvirt import utils as libvirt_utils

from tests.functional import operations

GPU = '0000:41:00.0'
VF = '0000:41:00.1'
VGPU = 'CUSTOM_ACCELERATOR_VGPU'
TYPES = [{'id': 'nvidia-557', 'name': 'NVIDIA A40-1Q', 'units': 1},
         {'id': 'nvidia-558', 'name': 'NVIDIA A40-2Q', 'units': 2}]
SMALL, LARGE = 'CUSTOM_NVIDIA_2235_A40_1Q', 'CUSTOM_NVIDIA_2235_A40_2Q'
STRANGER = '11111111-2222-4333-8444-555555555555'
NATIVE_TYPE = {'id': fakelibvirt.NVIDIA_11_VGPU_TYPE, 'units': 1}


def gpu(framework='mdev', **more):
    """A GPU with room for four small vGPUs, or two large ones."""
    vfs = 0 if framework == 'mdev' else 4
    # the largest type has all of the GPU
    types = [*({**t, 'id': t['id'][-3:]} for t in TYPES), {
        'id': '560', 'name': 'NVIDIA A40-4Q', 'units': 4}] if (
        framework == 'vendor-vfio') else TYPES
    return {'address': GPU, 'vendor': '10de', 'device': '2235', 'units': 4,
            'types': types, 'framework': framework, 'total_vfs': vfs,
            'vfs': vfs, **more}


def flavor(trait, resource_class=VGPU):
    return {f'resources1:{resource_class}': '1', f'trait1:{trait}': 'required'}


class VgpuTestBase(operations.OperationsTestBase):

    HOSTS = {'compute1': {'vgpus': [gpu()]}}
    DRIVERS = ('vgpu',)

    def setUp(self):
        super().setUp()
        self.flags(resume_guests_state_on_host_boot=True)
        self.provider_name = f'compute1_accel_{GPU}'

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_drivers=list(self.DRIVERS), device_timeout=5,
                   group='accel')
        return super().start_compute(hostname, *args, **kwargs)

    def allocated(self, consumer):
        return sorted(
            uuid for uuid, allocation
            in self._get_allocations_by_server_uuid(consumer).items()
            if VGPU in allocation['resources'])

    def shown(self, host='compute1'):
        """Total and types of its GPU in Placement, without a report."""
        inventory, traits, _ = self.provider_tree()[f'{host}_accel_{GPU}']
        return inventory[VGPU][0], traits & {SMALL, LARGE}

    def boot_host(self):
        """compute1 reboots; its guests end, and come back."""
        self.host_reboots('compute1')
        return self.kernel('compute1')


class NativeTestBase(VgpuTestBase):
    """Nova makes vGPUs of another card itself."""

    # which libvirt's imitation would remember
    FRESH_CLOUD = True

    CLASSES = 'custom'
    NATIVE = '0000:81:00.0'
    TYPE = NATIVE_TYPE['id']
    HOSTS = {host: {'vgpus': [gpu(), gpu(
        address='0000:81:00.0', types=[NATIVE_TYPE])]}
        for host in ('compute1', 'compute2')}
    #: hosts on which libvirt shows Nova a card that makes vGPUs
    WITH_NOVAS = tuple(HOSTS)

    def setUp(self):
        test = self

        def create_mdev(driver, parent, type_, uuid=None):
            connection = driver._host.get_connection()
            uuid = uuid or str(uuidlib.uuid4())
            test.simulated(connection.hostname).create_mdev(
                test.NATIVE, type_, uuid)
            name = libvirt_utils.mdev_uuid2name(uuid)
            # libvirt's imitation does not see it otherwise
            connection.mdev_info.devices[name] = fakelibvirt.FakeMdevDevice(
                dev_name=name, type_id=type_, parent=parent)
            return uuid
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.LibvirtDriver._create_mdev',
            create_mdev))
        super().setUp()

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_mdev_types=[self.TYPE], group='devices')
        self.flags(exclude_devices=[f'address={self.NATIVE}'],
                   resource_classes=self.CLASSES, group='accel')
        kwargs['pci_info'] = fakelibvirt.HostPCIDevicesInfo(
            num_pci=0, num_pfs=0, num_vfs=0,
            num_mdevcap=int(hostname in self.WITH_NOVAS))
        return super().start_compute(hostname, *args, **kwargs)

    def type_of(self, uuid, host='compute1'):
        return self.kernel(host).readlink(
            f'bus/mdev/devices/{uuid}/mdev_type').rpartition('/')[2]
