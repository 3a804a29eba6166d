# Licensed under the Apache License, Version 2.0. See LICENSE.
"""vGPUs reach guests: types that share a GPU, and Nova's own beside ours."""

import dataclasses

import nova.conf

from nova_accel.virt import conflicts
from tests.functional import base
from tests.functional.vgpus import (
    flavor, gpu, GPU, LARGE, NativeTestBase, SMALL, STRANGER, VF, VgpuTestBase)


class MediatedDevicesTest(VgpuTestBase):

    def test_types_share_a_gpu(self):
        self.assertEqual((4, {SMALL, LARGE}), self.shown())
        first = self.boot(flavor(LARGE))
        (_, uuid), = self.assertHas(first)
        self.assertEqual((2, {LARGE}), self.shown())
        traits = self.traits(self.provider_name)
        self.assertLessEqual({'CUSTOM_VGPU_NVIDIA', 'CUSTOM_VGPU_NVIDIA_2235',
                              'OWNER_CYBORG'}, traits)
        server = self.boot(flavor(SMALL), expected_state='ERROR')
        self.assertIn('No valid host', self.fault(server))
        second = self.boot(flavor(LARGE))
        self.assertHas(second)
        self.assertEqual((2, set()), self.shown())
        self.report()
        self.assertEqual((2, set()), self.shown())
        self._delete_server(first)
        self.assertEqual((2, {LARGE}), self.shown())
        self._delete_server(second)
        self.assertEqual((4, {SMALL, LARGE}), self.shown())
        third = self.boot(flavor(SMALL))
        # the slot, now as another type
        self.assertEqual([('compute1', uuid)], self.assertHas(third))

    def test_operations(self):
        server = self.boot(flavor(LARGE))
        held = self.assertHas(server)
        self._reboot_server(server, hard=True)
        self.assertEqual(held, self.assertHas(server))
        self._suspend_server(server)
        self.kernel('compute1').guest_opens(held[0][1])
        self.kernel('compute1').guest_closes(held[0][1])
        self._resume_server(server)
        self.assertEqual(held, self.assertHas(server))
        small = self._create_flavor(extra_spec=flavor(SMALL))
        # a stopped server keeps its type, and its room
        self._stop_server(server)
        self.boot_host()
        self.assertEqual((2, {LARGE}), self.shown())
        self._start_server(server)
        self.assertEqual(held, self.assertHas(server))
        # a running one comes back with it
        kernel = self.boot_host()
        self._wait_for_state_change(server, 'ACTIVE')
        self.assertEqual(held, self.assertHas(server))
        self.assertEqual([held[0][1]], kernel.listdir('bus/mdev/devices'))
        # what the old guest had and the claims have not is not put back
        store = self.parts('compute1').store
        claim, = store.claims()
        other = [h for h in self.parts('compute1').inventory.devices[
            GPU].handles if h != claim.handle][0]
        for mine in (dataclasses.replace(claim, handle=other), claim):
            store.remove(store.claims())
            store.add([mine])
            self._reboot_server(server, hard=True)
            self.assertEqual([('compute1', mine.handle.address)],
                             self.assertHas(server))
        kernel.remove_mdev(other.address)
        self._delete_server(server)
        self.assertEqual([], kernel.listdir('bus/mdev/devices'))
        self._create_server(flavor_id=small, networks='none',
                            image_uuid=self.glance.guest_image)


class ElsewhereTest(VgpuTestBase):

    HOSTS = {'compute1': {'vgpus': [gpu()]},
             'compute2': {'vgpus': [gpu('vendor-vfio')]}}

    def test_room_that_somebody_took(self):
        """Since the last report; the build goes to the next host."""
        self.flags(shuffle_best_same_weighed_hosts=False,
                   group='filter_scheduler')
        server = self.boot(flavor(LARGE))
        first, second = sorted(self.HOSTS, key=lambda host: host
                               != self.host_of(server))
        self._delete_server(server)
        if first == 'compute1':
            self.kernel(first).create_mdev(GPU, 'nvidia-557', STRANGER)
        else:
            self.kernel(first).write_attribute(
                VF, 'nvidia/current_vgpu_type', '557')
        before = self.shown(first)
        server = self.boot(flavor(LARGE))
        self.assertEqual(second, self.host_of(server))
        self.assertHas(server)
        # it was tried, and says now what there is
        self.assertEqual((4, {SMALL, LARGE}), before)
        self.assertEqual((3, {SMALL}), self.shown(first))


class VendorVfsTest(VgpuTestBase):

    HOSTS = {'compute1': {'vgpus': [gpu('vendor-vfio')]}}

    def current(self):
        return self.kernel('compute1').read(
            f'bus/pci/devices/{VF}/nvidia/current_vgpu_type')

    def test_written_at_each_boot(self):
        server = self.boot(flavor(LARGE))
        self.assertEqual([('compute1', VF)], self.assertHas(server))
        self.assertEqual({(VF, False)},
                         base.hostdevs(self.guest_xml(server)))
        self.assertEqual({LARGE}, self.shown()[1])
        self._suspend_server(server)
        self._resume_server(server)
        self.assertHas(server)
        kernel = self.boot_host()
        self._wait_for_state_change(server, 'ACTIVE')
        self.assertEqual([('compute1', VF)], self.assertHas(server))
        self.assertEqual('558', self.current())
        self.assertEqual({LARGE}, self.shown()[1])
        self._delete_server(server)
        self.assertEqual('0', self.current())
        self.assertEqual((4, {SMALL, LARGE}), self.shown())
        self.assertIn(VF, kernel.listdir('bus/pci/drivers/nvidia'))


class NativeTest(NativeTestBase):

    def test_each_has_its_own(self):
        native = self.boot({'resources:VGPU': '1'}, host='compute1')
        ours = self.boot(flavor(SMALL), host='compute1')
        uuid, = self.hostdevs(native)
        self.assertEqual(self.TYPE, self.type_of(uuid))
        (_, other), = held = self.assertHas(ours)
        self.assertEqual('nvidia-557', self.type_of(other))
        for server in (native, ours):
            self._reboot_server(server, hard=True)
        self.assertEqual([uuid], self.hostdevs(native))
        self.assertEqual(held, self.assertHas(ours))
        # from Nova's to ours, and back
        small = self._create_flavor(extra_spec=flavor(SMALL))
        self._resize_server(native, small)
        self.assertEqual('compute2', self.host_of(native))
        (_, there), = self.assertHas(native)
        self.assertEqual('nvidia-557', self.type_of(there, 'compute2'))
        self._revert_resize(native)
        self.assertEqual([uuid], self.hostdevs(native))
        self.assertEqual([], self.claims('compute2'))
        # and from ours to Nova's
        self._resize_server(ours, self._create_flavor(
            extra_spec={'resources:VGPU': '1'}))
        self.assertEqual([], self.held(ours))
        moved, = self.hostdevs(ours)
        self.assertEqual(self.TYPE, self.type_of(moved, 'compute2'))
        self._confirm_resize(ours)
        self.assertEqual([], self.claims())
        self.assertEqual([uuid],
                         self.kernel('compute1').listdir('bus/mdev/devices'))

    def test_card_that_both_have(self):
        for types, option in (
                ([self.TYPE, 'nvidia-557'], 'device_addresses of [mdev_'),
                (['nvidia-558'], 'enabled_mdev_types')):
            self.flags(enabled_mdev_types=types, group='devices')
            nova.conf.devices.register_dynamic_opts(nova.conf.CONF)
            if len(types) > 1:
                self.flags(device_addresses=[GPU], group='mdev_nvidia-557')
            driver = libvirt_driver_of(self.computes['compute1'])
            said = conflicts.Conflicts(
                self.kernel('compute1'), driver.pgpu_type_mapping,
                driver.pgpu_type_default).taken_elsewhere(
                    self.parts('compute1').inventory.devices[GPU])
            self.assertIn(GPU, said)
            self.assertIn(option, said)


class StandardClassesTest(NativeTestBase):

    CLASSES = 'standard'

    def test_standard_classes(self):
        """Both are VGPU, and Nova makes nothing for ours."""
        ours = self.boot(flavor(SMALL, 'VGPU'))
        self.assertEqual(1, len(self.held(ours)))
        held = self.hostdevs(ours)
        self.assertEqual([h for _, h in self.held(ours)], held)
        native = self.boot({'resources1:VGPU': '1',
                            'trait1:CUSTOM_VGPU_NVIDIA': 'forbidden'})
        self.assertEqual([], self.held(native))
        uuid, = self.hostdevs(native)
        self.assertEqual(self.TYPE, self.type_of(uuid, self.host_of(native)))
        self._reboot_server(ours, hard=True)
        self._reboot_server(native, hard=True)
        self.assertEqual(([uuid], held),
                         (self.hostdevs(native), self.hostdevs(ours)))


def libvirt_driver_of(compute):
    """As after a restart with another configuration of Nova's."""
    driver = compute.manager.driver
    driver.pgpu_type_mapping.clear()
    driver.pgpu_type_default = None
    driver.supported_vgpu_types = driver._get_supported_vgpu_types()
    return driver
