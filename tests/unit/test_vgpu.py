# Licensed under the Apache License, Version 2.0. See LICENSE.
"""vGPUs of a simulated host, in every shape that GPUs have them."""

import dataclasses
import errno
import logging
import threading
import time

import ddt
import fixtures
from tests.unit import configured
import testscenarios

from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel.drivers import sriov
from nova_accel.drivers import vgpu
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from tests.unit.host import SimulatedHost
from tests.unit.nvfm_library import NvfmLibrary
from tests.unit.vgpus import gpu, GPU, MTTY, NUMBERS, TRAIT, TYPES, VF

#: of a type that no driver of these tests has
GONE = 'CUSTOM_NVIDIA_2235_A40_8Q'


class VgpuTestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger(level=logging.WARNING))

    def start(self, *vgpus, **kinds):
        self.host = self.useFixture(SimulatedHost(vgpus=list(vgpus), **kinds))
        self.kernel = self.host.kernel
        self.driver = vgpu.VgpuDriver(self.kernel)
        self.known = {}

    def device(self, address=GPU):
        self.known = self.driver.discover(self.known)
        return self.known[address]

    def quarantined(self, address=GPU):
        device = self.device(address)
        self.assertIs(model.Health.QUARANTINED, device.health)
        return device.reason

    def available(self, address=GPU):
        return {t.kernel_name: t.available
                for t in self.device(address).creatable}

    def make(self, type_, number=0, address=GPU, fresh=True):
        """The handle that was made into a type, the nth of those offered."""
        device = self.device(address)
        handle = device.handles[number]
        self.driver.prepare(device, handle, TRAIT.get(type_, type_), fresh,
                            base.Use())
        return handle

    def release(self, handle, type_, address=GPU):
        self.driver.release(self.device(address), handle,
                            TRAIT.get(type_, type_), base.Use())


class EveryShape(testscenarios.TestWithScenarios, VgpuTestCase):

    scenarios = [(name, {'framework': name}) for name in (
        'mdev', 'sriov-mdev', 'vendor-vfio')]

    def setUp(self):
        super().setUp()
        self.start(gpu(self.framework))

    def test_offered(self):
        device = self.device()
        self.assertEqual(
            ('VGPU', 'NVIDIA', '2235', '10de', '2235', 1),
            (device.type, device.vendor, device.product, device.vendor_id,
             device.product_id, device.numa_node))
        self.assertEqual(tuple(sorted(TRAIT.values())), device.traits)
        self.assertEqual(device.traits, device.state_traits)
        self.assertEqual(4, len(device.handles))
        self.assertEqual(
            TRAIT, {t.kernel_name: t.trait for t in device.creatable})
        # in the order of their numbers
        self.assertEqual(
            list(TRAIT.values()), [t.name for t in device.creatable])

    def test_siblings_share(self):
        """One size at a time, and so many as there is room for."""
        first = self.make('nvidia-558')
        device = self.device()
        self.assertEqual((TRAIT['nvidia-558'],), device.traits)
        self.assertEqual(tuple(sorted(TRAIT.values())),
                         device.state_traits)
        self.assertEqual(0, self.available()['nvidia-557'])
        self.assertLess(0, self.available()['nvidia-558'])
        free = [h for h in device.handles if h != first]
        self.driver.prepare(device, free[0], TRAIT['nvidia-558'], True,
                            base.Use())
        self.assertEqual({0}, set(self.available().values()))
        self.assertEqual((), self.device().traits)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, device,
            free[1] if len(free) > 1 else model.AttachHandle(
                model.HandleType.MDEV, list(vgpu._slots(GPU))[9]),
            TRAIT['nvidia-558'], True, base.Use())
        self.assertIn(f'to become a {TRAIT["nvidia-558"]}', str(error))
        self.release(first, 'nvidia-558')
        self.release(free[0], 'nvidia-558')
        self.assertEqual(4, len(self.device().handles))
        self.assertNotIn(0, self.available().values())

    def test_another_size_after_the_last(self):
        handle = self.make('nvidia-1560')
        self.release(handle, 'nvidia-1560')
        self.make('nvidia-557')
        self.assertLess(0, self.available()['nvidia-557'])
        self.assertEqual(0, self.available()['nvidia-1560'])

    def test_prepared_and_released_twice(self):
        handle = self.make('nvidia-558')
        device = self.device()
        before = self.available()
        self.driver.prepare(device, handle, TRAIT['nvidia-558'], False,
                            base.Use())
        self.assertEqual(before, self.available())
        self.release(handle, 'nvidia-558')
        self.release(handle, 'nvidia-558')
        self.assertNotIn(0, self.available().values())

    def test_reboot(self):
        handle = self.make('nvidia-558')
        device = self.device()
        self.kernel.reboot()
        self.assertNotIn(0, self.available().values())
        self.driver.prepare(device, handle, TRAIT['nvidia-558'], False,
                            base.Use())
        self.assertEqual(0, self.available()['nvidia-557'])
        self.kernel.guest_opens(handle.address)

    def numbered(self, *names):
        """The host boots with a driver whose types have these names."""
        types = TYPES if self.framework != 'vendor-vfio' else NUMBERS
        units = {t['name']: t['units'] for t in TYPES}
        self.host.describe(vgpus=[gpu(self.framework, types=[
            {'id': t['id'], 'name': name, 'units': units[name]}
            for t, name in zip(types, names, strict=False)])])
        self.kernel.reboot()

    def test_other_numbers(self):
        """The server gets its type, by whatever number."""
        handle = self.make('nvidia-558')
        self.numbered('NVIDIA A40-1Q', 'NVIDIA A40-4Q', 'NVIDIA A40-2Q')
        for fresh in False, True:
            device = self.device()
            self.driver.prepare(
                device, handle, TRAIT['nvidia-558'], fresh, base.Use())
            self.assertEqual(TRAIT['nvidia-558'],
                             self.driver.created_type(device, handle))
            # 2 GB of 4 are left
            self.assertEqual(1, self.available()['nvidia-1560'])
            if not fresh:
                self.driver.prepare(
                    device, handle, TRAIT['nvidia-558'], fresh, base.Use())
                self.release(handle, 'nvidia-558')
                self.assertIsNone(self.driver.created_type(device, handle))

    def test_type_that_its_driver_has_no_more(self):
        handle = self.make('nvidia-558')
        self.numbered('NVIDIA A40-1Q', 'NVIDIA A40-4Q')
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, self.device(),
            handle, TRAIT['nvidia-558'], False, base.Use())
        self.assertEqual(
            f'{handle.address} had to become a {TRAIT["nvidia-558"]}, and the '
            f'driver of its GPU has no type of that name: shelve the server '
            f'and unshelve it, which gives it another one.', str(error))
        self.assertIsNone(self.driver.created_type(self.device(), handle))

    def test_claim_that_has_only_a_number(self):
        """Of an earlier release, read from a guest: what is there is kept,
        and nothing is made of a number."""
        handle = self.make('nvidia-558')

        def prepare(number):
            self.driver.prepare(
                self.device(), handle, number, False, base.Use())
        prepare('nvidia-558')
        self.assertRaises(exception.DeviceUnavailable, prepare, 'nvidia-557')
        self.assertEqual(TRAIT['nvidia-558'], self.driver.created_type(
            self.device(), handle))
        self.release(handle, 'nvidia-558')
        error = self.assertRaises(
            exception.DeviceUnavailable, prepare, 'nvidia-558')
        self.assertIn('may mean another type now: shelve the server',
                      str(error))

    def test_several_at_once(self):
        device = self.device()
        errors = []

        def prepare(handle):
            try:
                self.driver.prepare(
                    device, handle, TRAIT['nvidia-558'], True, base.Use())
            except exception.DeviceUnavailable as error:
                errors.append(error)
            except exception.DeviceError as error:
                # NVIDIA's VFs have no number for it
                self.assertEqual('vendor-vfio', self.framework)
                errors.append(error)
        threads = [threading.Thread(target=prepare, args=(h,))
                   for h in device.handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(2, len(errors))
        self.assertEqual({0}, set(self.available().values()))

    def test_chosen_types(self):
        for chosen, names in (
                (['nvidia-1560', 'A40-1Q'], ['nvidia-1560', 'nvidia-557']),
                ([f'{GPU}=558', '557'], ['nvidia-558']),
                ([f'{GPU.upper()}=nvidia A40-2q'], ['nvidia-558']),
                (['0000:42:00.0=558'], list(TRAIT))):
            self.config.config(vgpu_types=chosen, group='accel')
            device = self.device()
            self.assertEqual(
                names, [t.kernel_name for t in device.creatable])
            self.assertEqual({TRAIT[n] for n in names}, set(device.traits))
            # also those that an earlier configuration left in Placement
            self.assertEqual(set(TRAIT.values()), set(device.state_traits))

    def test_inventory_of_chosen_types(self):
        self.config.config(vgpu_types=['nvidia-1560'], group='accel')
        self.assertEqual(1, len(self.device().handles))

    def test_warned_of_unknown_types(self):
        self.config.config(vgpu_types=['558', 'nvidia-9', f'{GPU}=A16-8Q'],
                           group='accel')
        self.driver.configure()
        self.assertEqual(3, self.log.output.count('[accel] vgpu_types has'))
        self.assertIn('[accel] vgpu_types has 558, a number that an update of '
                      'the host may give to another type: write NVIDIA '
                      'A40-2Q.', self.log.output)
        self.assertIn('nvidia-9, which is not offered by any card',
                      self.log.output)
        self.assertIn(f'A16-8Q, which is not offered by {GPU}',
                      self.log.output)

    def test_unreadable(self):
        name = ('creatable_vgpu_types' if self.framework == 'vendor-vfio'
                else 'available_instances')
        handle = self.make('nvidia-558')
        before = self.device()
        self.kernel.set_fault(GPU, attributes={name: 'EIO'})
        self.assertIn('Input/output error', self.quarantined())
        # what servers have stays theirs
        self.assertEqual(before.handles, self.device().handles)
        self.assertEqual(before.creatable, self.device().creatable)
        self.kernel.set_fault(GPU, attributes=None)
        self.assertIs(model.Health.OK, self.device().health)
        self.release(handle, 'nvidia-558')

    def test_dead(self):
        self.device()
        self.kernel.set_fault(GPU, dead=True)
        self.assertIn('does not answer', self.quarantined())

    def test_vanished(self):
        self.device()
        self.kernel.set_fault(GPU, vanish=True)
        self.assertEqual({}, self.driver.discover(self.known))

    def test_fingerprint(self):
        before = self.driver.fingerprint()
        self.assertEqual(before, self.driver.fingerprint())
        self.kernel.set_fault(GPU, vanish=True)
        self.assertNotEqual(before, self.driver.fingerprint())


class MediatedDevices(VgpuTestCase):

    def test_handles(self):
        """Slots: the same at each look, also on another day."""
        self.start(gpu('mdev'))
        handles = self.device().handles
        self.assertEqual({model.HandleType.MDEV}, {h.type for h in handles})
        self.assertEqual(handles, self.device().handles)
        third = handles[2]
        self.driver.prepare(
            self.device(), third, TRAIT['nvidia-557'], True, base.Use())
        self.assertEqual(
            {*handles}, {*self.device().handles})
        self.kernel.reboot()
        self.assertEqual(handles, self.device().handles)

    def test_each_vf_is_a_parent(self):
        self.start(gpu('sriov-mdev', total_vfs=8, vfs=8))
        device = self.device()
        # the VFs promise 8, and the GPU has room for 4
        self.assertEqual({'nvidia-557': 4, 'nvidia-558': 2, 'nvidia-1560': 1},
                         self.available())
        self.assertEqual([*VF], [h.parent for h in device.handles])
        self.assertEqual({GPU, *VF}, device.functions())
        second = self.make('nvidia-557', number=1)
        self.assertTrue(self.kernel.exists(
            f'bus/pci/devices/{VF[1]}/{second.address}'))
        self.assertEqual(3, self.available()['nvidia-557'])
        self.assertEqual(4, len(self.device().handles))

    def test_sizes_side_by_side(self):
        self.start(gpu('mdev', mixed=True))
        self.make('nvidia-558')
        self.assertEqual({'nvidia-557': 2, 'nvidia-558': 1, 'nvidia-1560': 0},
                         self.available())
        self.assertEqual(3, len(self.device().handles))

    def test_mdev_of_somebody_else(self):
        self.start(gpu('mdev'))
        other = '11111111-2222-4333-8444-555555555555'
        self.kernel.create_mdev(GPU, 'nvidia-557', other)
        self.assertEqual(3, len(self.device().handles))
        self.assertNotIn(other, [h.address for h in self.device().handles])
        self.assertEqual(3, self.available()['nvidia-557'])

    def test_left_over(self):
        """Of a store that was lost: its slot is there to be used again."""
        self.start(gpu('mdev'))
        handle = self.make('nvidia-558')
        self.known = {}
        self.assertIn(handle, self.device().handles)
        self.driver.prepare(
            self.device(), handle, TRAIT['nvidia-1560'], True, base.Use())
        self.assertEqual(0, self.available()['nvidia-558'])

    def test_left_over_of_the_same_type(self):
        """A server gets a new one; one that starts again keeps its own."""
        self.start(gpu('mdev'))
        handle = self.make('nvidia-558')
        made = []
        create = self.kernel.create_mdev
        self.kernel.create_mdev = lambda *args: (
            made.append(args), create(*args))
        for fresh in False, True:
            self.driver.prepare(
                self.device(), handle, TRAIT['nvidia-558'], fresh, base.Use())
            self.assertEqual(fresh, bool(made))

    def test_busy(self):
        """Removing waits for who has it open, and is not over before."""
        self.start(gpu('mdev'))
        handle = self.make('nvidia-558')
        device = self.device()
        self.kernel.guest_opens(handle.address)
        first = threading.Thread(target=self.driver.release, args=(
            device, handle, TRAIT['nvidia-558'], base.Use()))
        first.start()
        while self.kernel.exists(f'bus/mdev/devices/{handle.address}'):
            time.sleep(0.01)
        # another process comes to it: its kernel link and its attribute are
        # gone, and it is not
        error = self.assertRaises(
            exception.DeviceError, self.driver.release, device, handle,
            TRAIT['nvidia-558'], base.Use())
        self.assertIn('is being removed', str(error))
        self.assertRaises(
            exception.DeviceError, self.driver.prepare, device, handle,
            TRAIT['nvidia-558'], False, base.Use())
        # it takes its room, and no server gets it
        self.assertEqual(1, self.available()['nvidia-558'])
        self.assertNotIn(handle, self.device().handles)
        self.assertTrue(first.is_alive())
        self.kernel.guest_closes(handle.address)
        first.join()
        self.driver.release(device, handle, TRAIT['nvidia-558'], base.Use())
        self.assertIn(handle, self.device().handles)

    def test_refused(self):
        self.start(gpu('mdev', faults={'busy': True}))
        handle = self.make('nvidia-558')
        error = self.assertRaises(
            exception.DeviceError, self.release, handle, 'nvidia-558')
        self.assertIn('find who keeps it open', str(error))
        for name, kind in (('EIO', exception.DeviceError),
                           ('EUSERS', exception.DeviceUnavailable)):
            self.kernel.set_fault(GPU, create=name)
            error = self.assertRaises(
                kind, self.make, 'nvidia-558', number=1)
            self.assertEqual(kind, type(error))

    def test_type_that_is_not_offered_any_more(self):
        self.start(gpu('mdev'))
        error = self.assertRaises(
            exception.DeviceUnavailable, self.make, GONE)
        self.assertIn('the driver of its GPU has no type of that name: the '
                      'build is retried on another host', str(error))

    def test_owner_reads_of_no_other_host(self):
        self.start(gpu('mdev'))
        error = self.assertRaises(
            exception.DeviceUnavailable, self.make, GONE)
        self.assertNotIn('another host', exception.for_owner(error))

    def test_bad_attributes(self):
        self.start(gpu('mdev'))
        for text in ('', '-1', '0x4', 'many'):
            self.kernel.set_fault(
                GPU, attributes={'available_instances': text})
            self.assertIn('which is not a number', self.quarantined())
        self.kernel.set_fault(GPU, attributes={
            'name': 'missing', 'description': 'missing'})
        device = self.device()
        # the type's own name
        self.assertIn('CUSTOM_NVIDIA_2235_557', device.traits)
        self.kernel.set_fault(GPU, attributes={'name': '***'})
        self.assertIn('may contain only letters', self.quarantined())

    def test_driver_goes_while_it_is_looked_at(self):
        self.start(gpu('mdev'))
        self.kernel.set_fault(
            GPU, attributes={'available_instances': 'missing'})
        self.assertEqual((), self.device().creatable)

    def test_other_kinds_of_mediated_devices(self):
        self.start(mdev_parents=[{**MTTY, 'device_api': 'vfio-ccw'}])
        self.assertEqual({}, self.driver.discover())

    def test_parent_that_is_no_pci_device(self):
        self.start(mdev_parents=[MTTY])
        device = self.device('mtty')
        self.assertEqual(('LINUX', 'MTTY', None), (
            device.vendor, device.product, device.numa_node))
        self.assertEqual(('CUSTOM_LINUX_MTTY_DUAL_PORT_SERIAL',
                          'CUSTOM_LINUX_MTTY_SINGLE_PORT_SERIAL'),
                         device.traits)
        self.assertEqual(24, len(device.handles))
        dual = 'CUSTOM_LINUX_MTTY_DUAL_PORT_SERIAL'
        handle = self.make(dual, address='mtty')
        self.assertIsNone(handle.parent)
        self.assertEqual({'mtty-1': 22, 'mtty-2': 11},
                         self.available('mtty'))
        self.assertEqual(23, len(self.device('mtty').handles))
        self.release(handle, dual, 'mtty')
        self.assertEqual(24, len(self.device('mtty').handles))
        self.kernel.set_fault('mtty', attributes={
            'available_instances': 'no'})
        self.assertIn("'no'", self.quarantined('mtty'))

    def test_parents_of_one_driver(self):
        """They are alike, for flavors and for a live migration."""
        self.start(mdev_parents=[MTTY, {**MTTY, 'name': 'second'}])
        one, other = (self.device(name) for name in ('mtty', 'second'))
        self.assertEqual(
            (one.product, one.product_id, one.traits, one.migrates_by),
            (other.product, other.product_id, other.traits,
             other.migrates_by))
        self.assertEqual(('MTTY', 'mtty'), (other.product, other.migrates_by))

    def test_traits_of_other_vendors(self):
        for title, vendor, trait in (
                (None, '8086', 'CUSTOM_INTEL_591D_I915_GVTG_V5_4'),
                ('GRID T4-2Q', '10de', 'CUSTOM_NVIDIA_591D_GRID_T4_2Q'),
                ('NVIDIA H100XM-1-10CME', '10de',
                 'CUSTOM_NVIDIA_591D_H100XM_1_10CME'),
                ('MIG 1g.10gb+me', '1af4', 'CUSTOM_1AF4_591D_MIG_1G_10GB_ME')):
            self.start(gpu('mdev', vendor=vendor, device='591d', types=[
                {'id': 'i915-GVTg_V5_4', 'name': title}]))
            self.assertEqual((trait,), self.device().traits)


@ddt.ddt
class UnderSwitchesTest(VgpuTestCase):
    """NVIDIA's GPUs of HGX boards."""

    SWITCH = {'address': '0000:07:00.0', 'driver': None, 'vendor': '10de',
              'class': '0x068000'}

    def test_partitions(self):
        for framework in ('mdev', 'sriov-mdev', 'vendor-vfio'):
            for command in (None, '/etc/nova/fabric'):
                self.config.config(group='accel', fabric_command=command)
                self.start(gpu(framework), others=[self.SWITCH])
                reason = self.quarantined()
                self.assertIn('error 802', reason)
                self.assertIn('[accel] fabric_command = libnvfm', reason)
            # the operator's Fabric Manager does it
            self.config.config(group='accel', fabric_command='static')
            self.assertEqual(4, len(self.device().handles))

    def start_with_partition(self, framework='vendor-vfio', **config):
        self.manager = self.useFixture(NvfmLibrary())
        self.config.config(
            group='accel', fabric_command='libnvfm:192.0.2.1:6666',
            **{'gpu_modules': [f'{GPU}=4'], **config})
        self.start(gpu(framework), others=[self.SWITCH])

    def test_partition_of_a_vgpu(self):
        self.start_with_partition()
        # a part of the GPU has no partition
        whole, = self.available()
        handle = self.make(whole)
        self.assertEqual([handle.address], self.manager.active(6))
        # as after a boot of the host
        device = self.device()
        fabric.deactivate(self.kernel, device, handle.address)
        for _ in range(2):
            self.driver.prepare(device, handle, TRAIT[whole], False,
                                base.Use())
            self.assertEqual([handle.address], self.manager.active(6))
        self.release(handle, whole)
        self.assertIsNone(self.manager.active(6))
        self.assertIsNone(self.driver.created_type(device, handle))

    def test_partition_of_another_vf(self):
        """The partition was active before."""
        self.start_with_partition()
        whole, = self.available()
        fabric.activate(self.kernel, self.device(), '0000:41:1f.7')
        handle = self.make(whole)
        self.assertEqual([handle.address], self.manager.active(6))

    def test_partition_that_cannot_be_had(self):
        self.start_with_partition()
        whole, = self.available()
        handle = self.make(whole)
        self.config.config(fabric_command='libnvfm', group='accel')
        error = self.assertRaises(
            exception.DeviceError, self.release, handle, whole)
        self.assertIn('had to be deactivated', str(error))
        # no other server gets the GPU meanwhile
        self.assertEqual(TRAIT[whole], self.driver.created_type(
            self.device(), handle))

    def test_check(self):
        self.start_with_partition()
        self.assertEqual([], list(self.driver.check(self.device())))
        self.config.config(gpu_modules=[f'{GPU}=3'], group='accel')
        found, = self.driver.check(self.device())
        self.assertIn('no partitions of exactly the modules 3', found.found)
        self.assertIsNone(self.manager.active(6))

    @ddt.data(({'gpu_modules': []}, 'gpu_modules does not say'),
              ({'vgpu_types': ['nvidia-558']}, 'only a vGPU with all'),
              ({'framework': 'sriov-mdev'}, 'are mediated devices'))
    @ddt.unpack
    def test_no_partition(self, config, words):
        self.start_with_partition(**config)
        self.assertIn(words, self.quarantined())

    def test_others(self):
        self.start(gpu('sriov', vendor='8086', device='56c0', driver='i915',
                       types=[]), others=[self.SWITCH])
        self.assertEqual(4, len(self.device().handles))


class VendorVfs(VgpuTestCase):

    def current(self, vf):
        return self.kernel.read(
            f'bus/pci/devices/{vf}/nvidia/current_vgpu_type')

    def test_handles(self):
        for header in (True, False):
            self.start(gpu('vendor-vfio', header=header))
            handles = self.device().handles
            self.assertEqual([(vf, False, GPU) for vf in VF],
                             [(h.address, h.managed, h.parent)
                              for h in handles])
        self.make('nvidia-558', number=1)
        self.assertEqual(['0', '558', '0', '0'],
                         [self.current(vf) for vf in VF])
        # what is made is in the claims, and room is left for one
        self.assertEqual([VF[0]], [h.address for h in self.device().handles])

    def test_room_by_the_size_of_types(self):
        """A VF says only that there is room for one more."""
        self.start(gpu('vendor-vfio', total_vfs=8, vfs=8))
        self.assertEqual({'nvidia-557': 4, 'nvidia-558': 2, 'nvidia-1560': 1},
                         self.available())
        self.assertEqual(4, len(self.device().handles))
        self.make('nvidia-557')
        # nova-compute starts again: what it knew is in its store
        self.assertEqual(
            {'nvidia-557': 3, 'nvidia-558': 0, 'nvidia-1560': 0},
            self.available())
        # one that does not know the card counts VFs
        self.known = {}
        self.assertEqual({'nvidia-557': 7}, self.available())

    def test_room_of_types_without_a_size(self):
        """MIG-backed ones, and names that say none."""
        for name in ('NVIDIA H100-1-10C', 'NVIDIA H100X'):
            self.start(gpu('vendor-vfio', types=[
                {'id': '745', 'name': name, 'units': 2}]))
            self.known = {}
            self.assertEqual({'nvidia-745': 4}, self.available())

    def test_vf_of_somebody_else(self):
        self.start(gpu('vendor-vfio'))
        device = self.device()
        self.kernel.write_attribute(
            VF[0], 'nvidia/current_vgpu_type', '558')
        self.assertNotIn(device.handles[0], self.device().handles)
        # another process was faster, with the same type and with another
        for type_ in ('nvidia-558', 'nvidia-557'):
            error = self.assertRaises(
                exception.DeviceUnavailable, self.driver.prepare, device,
                device.handles[0], type_, True, base.Use())
            self.assertIn('another program has made it a nvidia-558',
                          str(error))
        # nor is it cleared by who had the VF before
        self.driver.release(device, device.handles[0], TRAIT['nvidia-557'],
                            base.Use())
        self.assertEqual('558', self.current(VF[0]))
        self.assertIn('of another program now', self.log.output)

    def test_no_room_any_more(self):
        """MIG makes no room unasked: what is missing is named."""
        mig = 'which "nvidia-smi mig -cgi" creates after each boot'
        for name, said in (('NVIDIA A100-1-5C', mig),
                           ('NVIDIA DC-2-48Q', mig),
                           ('NVIDIA L40S-48Q', 'have taken the room')):
            # the whole GPU
            self.start(gpu('vendor-vfio', units=8, types=[
                {'id': '745', 'name': name, 'units': 8}]))
            self.known = {}
            device = self.device()
            trait = device.creatable[0].trait
            self.driver.prepare(device, device.handles[0], trait, True,
                                base.Use())
            error = self.assertRaises(
                exception.DeviceUnavailable, self.driver.prepare, device,
                dataclasses.replace(device.handles[0], address=VF[1]),
                trait, True, base.Use())
            self.assertIn(said, str(error))
            self.assertLessEqual(len(str(error)), 255)

    def test_driver_starts_when_all_is_in_use(self):
        self.start(gpu('vendor-vfio'))
        handle = self.make('nvidia-1560')
        device = self.device()
        self.assertEqual((), device.handles)
        self.assertEqual(dict.fromkeys(TRAIT, 0), self.available())
        self.config.config(vgpu_types=['nvidia-557'], group='accel')
        self.driver.configure()
        # that it is not offered cannot be said
        self.assertEqual('', self.log.output)
        self.known = {}
        self.assertEqual(((), ()), (self.device().handles,
                                    self.device().creatable))
        self.driver.release(device, handle, TRAIT['nvidia-1560'], base.Use())
        self.assertEqual({'nvidia-557': 4}, self.available())

    def test_type_that_a_full_gpu_has_never_shown(self):
        """It is that of the server: the store was lost."""
        self.start(gpu('vendor-vfio'))
        handle = self.make('nvidia-1560')
        self.known = {}
        device = self.device()
        self.driver.prepare(device, handle, TRAIT['nvidia-1560'], False,
                            base.Use())
        self.assertEqual('nvidia-1560',
                         self.driver.created_type(device, handle))
        self.release(handle, 'nvidia-1560')
        self.assertEqual('0', self.current(handle.address))

    def test_number_that_means_another_type_since(self):
        """Another program was faster than nova-compute after the boot."""
        self.start(gpu('vendor-vfio'))
        self.make('nvidia-557')
        self.host.describe(vgpus=[gpu('vendor-vfio', types=[
            {'id': '557', 'name': 'NVIDIA A40-2Q', 'units': 2},
            {'id': '558', 'name': 'NVIDIA A40-1Q', 'units': 1}])])
        self.kernel.reboot()
        self.kernel.write_attribute(VF[0], 'nvidia/current_vgpu_type', '557')
        types = {t.trait: (t.kernel_name, t.available)
                 for t in self.device().creatable}
        self.assertEqual({TRAIT['nvidia-558']: ('nvidia-557', 1),
                          TRAIT['nvidia-557']: ('', 0),
                          TRAIT['nvidia-1560']: ('nvidia-1560', 0)}, types)

    def test_open(self):
        self.start(gpu('vendor-vfio'))
        handle = self.make('nvidia-558')
        self.kernel.guest_opens(handle.address)
        error = self.assertRaises(
            exception.DeviceError, self.release, handle, 'nvidia-558')
        self.assertIn('Operation not permitted', str(error))
        self.assertIn('find who keeps it open', str(error))
        self.kernel.guest_closes(handle.address)
        self.release(handle, 'nvidia-558')
        self.assertEqual('0', self.current(handle.address))

    def test_vf_that_is_gone(self):
        self.start(gpu('vendor-vfio'))
        handle = self.make('nvidia-558')
        device = self.device()
        self.kernel.set_numvfs(GPU, 0)
        self.driver.release(device, handle, TRAIT['nvidia-558'], base.Use())
        self.assertRaises(exception.DeviceError, self.driver.prepare, device,
                          handle, TRAIT['nvidia-558'], False, base.Use())
        # without VFs and wishes it is a GPU as any other
        self.assertEqual({}, self.driver.discover(self.known))

    def test_bad_attributes(self):
        self.start(gpu('vendor-vfio'))
        for text in ('', '-1', 'none'):
            self.kernel.set_fault(GPU, attributes={'current_vgpu_type': text})
            self.assertIn('of current_vgpu_type', self.quarantined())
        self.kernel.set_fault(GPU, attributes={
            'creatable_vgpu_types': 'what\n : \n12\n x : y\n7 : \n 9: A B\n'})
        self.assertEqual({'nvidia-9': 4}, self.available())
        self.kernel.set_fault(GPU, attributes={
            'creatable_vgpu_types': 'missing'})
        self.assertIn('see that the vGPU manager', self.quarantined())

    def test_no_iommu(self):
        self.start(gpu('vendor-vfio'), iommu=False)
        self.assertIn('has no IOMMU group', self.quarantined())

    def test_vf_is_not_for_vfio_pci(self):
        self.start(gpu('vendor-vfio'))
        error = self.assertRaises(
            OSError, self.kernel.rebind, VF[0], 'vfio-pci')
        self.assertEqual(errno.EINVAL, error.errno)
        error = self.assertRaises(OSError, self.kernel.guest_opens, VF[0])
        self.assertEqual(errno.EINVAL, error.errno)

    def test_vfs_are_not_made_here(self):
        self.start(gpu('vendor-vfio', vfs=0))
        self.assertEqual({}, self.driver.discover())
        self.config.config(virtual_functions=[f'{GPU}=4'], group='accel')
        error = self.assertRaises(exception.DeviceError,
                                  self.driver.configure)
        self.assertIn(f'have "sriov-manage -e {GPU}" run', str(error))
        self.assertIn('sriov-manage', self.quarantined())
        self.assertEqual('0', self.kernel.read(
            f'bus/pci/devices/{GPU}/sriov_numvfs'))
        # the tool has run
        self.kernel.set_numvfs(GPU, 4)
        self.driver.configure()
        self.assertEqual(4, len(self.device().handles))


class ReadyVfs(VgpuTestCase):
    """Intel and AMD: a VF is a vGPU as it is."""

    def gpu(self, **more):
        return gpu('sriov', vendor='8086', device='56c0', driver='i915',
                   types=[], vfs=0, **more)

    def test_made_at_each_start(self):
        self.start(self.gpu())
        self.assertEqual({}, self.driver.discover())
        self.config.config(virtual_functions=[f'{GPU}=2'], group='accel')
        for _ in range(2):
            self.assertEqual(sriov.NONE, self.quarantined())
            self.driver.configure()
            device = self.device()
            self.assertEqual(
                ('VGPU', 'INTEL', (), ()),
                (device.type, device.vendor, device.creatable,
                 device.traits))
            self.assertEqual([(vf, True, GPU) for vf in VF[:2]],
                             [(h.address, h.managed, h.parent)
                              for h in device.handles])
            self.kernel.reboot()

    def xe(self, *quotas, vfs=2):
        self.start(gpu('sriov', vendor='8086', device='e211', driver='xe',
                       vram_mib=24576, types=[], vfs=0))
        self.config.config(group='accel', virtual_functions=[f'{GPU}={vfs}'],
                           xe_quotas=list(quotas))

    def of_vf(self, number, name):
        return self.kernel.read(f'bus/pci/devices/{GPU}/sriov_admin/'
                                f'vf{number}/profile/{name}')

    def test_quota_before_vfs(self):
        self.xe(f'{GPU}/vram_quota={4 << 30}', f'{GPU}/exec_quantum_ms=20',
                '0000:42:00.0/vram_quota=1')
        for _ in range(2):
            self.driver.configure()
            self.assertEqual((2, str(4 << 30), '20'), (
                len(self.device().handles), self.of_vf(2, 'vram_quota'),
                self.of_vf(2, 'exec_quantum_ms')))
            self.kernel.reboot()

    def test_without_quota(self):
        self.xe()
        self.driver.configure()
        self.assertEqual((str(12 << 30), '0'), (
            self.of_vf(1, 'vram_quota'), self.of_vf(1, 'exec_quantum_ms')))

    def test_quota_that_the_kernel_refuses(self):
        """More than there is, and a kernel or driver without it."""
        self.xe(f'{GPU}/vram_quota={25 << 30}')
        error = self.assertRaises(exception.DeviceError, self.driver.configure)
        self.assertIn('the kernel refused (Input/output error)', str(error))
        self.start(self.gpu())
        error = self.assertRaises(exception.DeviceError, self.driver.configure)
        self.assertIn('xe has it since Linux 7.0', str(error))
        self.assertLessEqual(len(str(error)), 255)
        self.assertEqual(sriov.NONE, self.quarantined())

    def test_quotas_that_mean_nothing(self):
        for item in (GPU, f'{GPU}/vram_quota', f'{GPU}/vram_quota=4G',
                     f'{GPU}/sched_priority=1', '41:00.0/vram_quota=1',
                     f'{GPU}=1'):
            self.config.config(group='accel', xe_quotas=[item])
            error = self.assertRaises(exception.ConfigurationError,
                                      vgpu.wanted_quotas)
            self.assertIn('[accel] xe_quotas has', str(error))

    def test_vfs_that_cannot_be_reset(self):
        """The next server would find what is in their memory."""
        self.start({**self.gpu(), 'vfs': 2})
        read = self.kernel.read

        def without(path):
            return '' if path.endswith('reset_method') else read(path)
        self.kernel.read = without
        self.assertIn('cannot be reset between two servers',
                      self.quarantined())
        self.config.config(handover=['none'], group='accel')
        self.assertEqual(2, len(self.device().handles))

    def test_processing_accelerators_of_amd(self):
        self.start(gpu('sriov', vendor='1002', device='74a1', types=[],
                       **{'class': '0x120000'}, driver='gim'))
        self.assertEqual('AMD', self.device().vendor)
        self.start(gpu('sriov', vendor='8086', device='09c4', types=[],
                       **{'class': '0x120000'}, driver='dfl-pci'))
        self.assertEqual({}, self.driver.discover())

    def mi300x(self, vfs, sharing=None):
        """Under gim, which creates the VFs when it is loaded."""
        self.start(gpu('sriov', vendor='1002', device='74a1', types=[],
                       vfs=vfs, **{'class': '0x120000'}, driver='gim'))
        read = self.kernel.read

        def read_too(path):
            if path != 'module/gim/parameters/fb_sharing_mode':
                return read(path)
            if sharing is None:
                raise FileNotFoundError(path)
            return sharing
        self.kernel.read = read_too

    def test_gim_makes_its_vfs(self):
        self.mi300x(2)
        self.assertEqual(2, len(self.device().handles))
        self.config.config(virtual_functions=[f'{GPU}=2'], group='accel')
        self.driver.configure()
        self.config.config(virtual_functions=[f'{GPU}=1'], group='accel')
        self.assertRaises(exception.DeviceError, self.driver.configure)
        self.mi300x(0)
        error = self.assertRaises(exception.DeviceError, self.driver.configure)
        self.assertIn('have gim loaded with vf_num=', str(error))
        # what a write would have answered
        self.assertEqual(errno.ENOENT, self.assertRaises(
            OSError, self.kernel.set_numvfs, GPU, 1).errno)

    def test_xgmi(self):
        """mi300_xgmi_is_fb_sharing_allowed() of amd/MxGPU-Virtualization."""
        for sharing in (None, '', '0', '1,8', '8'):
            self.mi300x(1, sharing)
            reason = self.quarantined()
            for said in ('fb_sharing_mode=1', '[accel] device_sets'):
                self.assertIn(said, reason)
        for sharing in ('1', '1,1,1,1'):
            self.mi300x(1, sharing)
            self.assertEqual(1, len(self.device().handles))
        self.mi300x(1)
        self.config.config(device_sets=[f'{GPU} 0000:99:00.0'], group='accel')
        self.assertEqual(1, len(self.device().handles))

    def test_no_driver_of_the_host(self):
        """What a server leaves in a VF meets none before the reset."""
        self.start(self.gpu())
        self.config.config(virtual_functions=[f'{GPU}=2'], group='accel')
        self.driver.configure()
        self.kernel.guest_takes(VF[0])
        self.kernel.guest_returns(VF[0])
        device = self.device()
        done = self.driver.release(
            device, device.handles[0], None, base.Use())
        self.assertEqual('not shown', base.facts_of(done)['memory'])
        self.assertEqual([None, None], [
            pci.driver(self.kernel, vf) for vf in VF[:2]])

    def test_no_iommu(self):
        self.start({**self.gpu(), 'vfs': 2}, iommu=False)
        self.assertIn('has no IOMMU group', self.quarantined())

    def test_more_than_it_can_have(self):
        self.start(self.gpu())
        self.config.config(virtual_functions=[f'{GPU}=5'], group='accel')
        error = self.assertRaises(exception.ConfigurationError,
                                  self.driver.configure)
        self.assertIn('and it can have 4', str(error))


class Options(testscenarios.TestWithScenarios, VgpuTestCase):

    scenarios = [(text, {'text': text}) for text in (
        '', '=nvidia-558', '0000:41:00.0=', '41:00=nvidia-558')]

    def test_item_that_means_nothing(self):
        self.start(gpu('mdev'))
        self.config.config(vgpu_types=[self.text], group='accel')
        error = self.assertRaises(exception.ConfigurationError,
                                  self.driver.configure)
        self.assertIn(self.text, str(error))
