# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks, on simulated hosts."""

import dataclasses
import json
import threading

import ddt
import fixtures

from nova_accel.drivers import base
from nova_accel.drivers import nvme
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from tests.unit import configured
from tests.unit.host import A, B, SimulatedHost

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED
USES = ('mounted at /srv', 'used as swap', 'dm-3', 'md0', 'btrfs')


def vf(number):
    return f'{A[:-1]}{number + 1}'


class TestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.config.config(group='accel', include_devices=['address=*'])

    def start(self, *disks, **more):
        self.kernel = self.useFixture(
            SimulatedHost(nvmes=list(disks), **more)).kernel
        self.driver = nvme.NvmeDriver(self.kernel)
        return self.driver.discover()

    def handles(self, device):
        return [h.address for h in device.handles]


@ddt.ddt
class Discovery(TestCase):

    def test_disks(self):
        found = self.start({'address': A, 'numa_node': 1},
                           {'address': B, 'vendor': '1234', 'device': '0001'},
                           others=[{'address': '0000:01:00.0'}])
        self.assertEqual([A, B], sorted(found))
        one, two = found[A], found[B]
        self.assertEqual(
            ('SSD', 'SAMSUNG', 'a824', '144d', 'a824', 'nvme', 1, OK, [A]),
            (one.type, one.vendor, one.product, one.vendor_id,
             one.product_id, one.driver, one.numa_node, one.health,
             self.handles(one)))
        self.assertLessEqual({'CUSTOM_SSD_SAMSUNG', 'CUSTOM_SSD_SAMSUNG_A824'},
                             naming.device_traits(one))
        self.assertLessEqual({'CUSTOM_SSD_1234', 'CUSTOM_SSD_1234_0001'},
                             naming.device_traits(two))

    def test_policy_of_a_bus(self):
        """It is erased by other commands."""
        self.config.config(group='accel', handover=['nvme=bus'])
        found = self.start({'address': A})[A]
        self.assertEqual(QUARANTINED, found.health)
        self.assertIn(f'set [accel] handover to {A}=clear', found.reason)

    @ddt.data('clear', 'none')
    def test_what_it_can_erase_with(self, policy):
        """By the traits of Cyborg's drivers; also while a guest has it."""
        self.config.config(group='accel', handover=[policy])
        found = self.start({'address': A, 'sanitize': ['crypto', 'overwrite']},
                           {'address': B, 'sanitize': ['block']})
        self.assertEqual([('HW_NVME_CES',), ('HW_NVME_BES',)],
                         [found[address].traits for address in (A, B)])
        self.kernel.rebind(A, 'vfio-pci')
        self.assertEqual(found, self.driver.discover(found))

    @ddt.data('vfio-pci', None)
    def test_driver_of_the_host_does_not_have_it(self, bound):
        """Nothing of a new disk can be read then."""
        found = self.start({'address': A, 'driver': bound,
                            'signatures': ['ceph_bluestore']})
        self.assertEqual((QUARANTINED, []),
                         (found[A].health, self.handles(found[A])))
        self.assertIn('bind it to the driver nvme', found[A].reason)
        # which says more then
        before = self.driver.state(A)
        self.kernel.rebind(A, 'nvme')
        self.assertNotEqual(before, self.driver.state(A))
        found = self.driver.discover(found)
        self.assertIn('ceph_bluestore', found[A].foreign)
        self.kernel.sign_disk(A)
        known = self.driver.discover(found)
        self.assertEqual((OK, [A]),
                         (known[A].health, self.handles(known[A])))
        # it may go back to that driver
        self.kernel.rebind(A, bound)
        self.assertEqual(known, self.driver.discover(known))

    def test_controller_that_is_dead(self):
        """It is not offered again and again; the driver stays bound."""
        known = self.start({'address': A})
        self.kernel.set_fault(A, controller='resetting')
        before = self.driver.state(A)
        known = self.driver.discover(known)
        self.assertEqual(OK, known[A].health)
        self.kernel.set_fault(A, controller='dead')
        self.assertNotEqual(before, self.driver.state(A))
        known = self.driver.discover(known)
        self.assertEqual(QUARANTINED, known[A].health)
        self.assertIn('state dead', known[A].reason)
        self.kernel.set_fault(A, controller=None)
        self.assertEqual(OK, self.driver.discover(known)[A].health)

    def test_guest_has_it_and_the_store_is_new(self):
        self.start({'address': A})
        self.kernel.guest_takes(A)
        device = self.driver.discover()[A]
        self.assertEqual((OK, [A], ()), (
            device.health, self.handles(device), device.record))
        # it is not compared before it comes back
        self.driver.prepare(
            device, device.handles[0], None, False, base.Use())
        self.assertEqual('vfio-pci', pci.driver(self.kernel, A))
        self.assertIn('a guest has it', str(self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, device,
            device.handles[0], None, True, base.Use())))

    def test_disk_of_a_guest_is_as_known(self):
        known = self.start({'address': A})
        self.kernel.guest_takes(A)
        self.assertEqual(known, self.driver.discover(known))

    @ddt.data(*USES)
    def test_used_by_the_host(self, use):
        found = self.start({'address': A, 'use': use, 'namespaces': 2},
                           {'address': B})
        self.assertEqual((QUARANTINED, ()),
                         (found[A].health, found[A].handles))
        # which of its partitions, and how
        self.assertIn('n2p1', found[A].reason)
        self.assertIn(use.split()[-1], found[A].reason)
        self.assertEqual(OK, found[B].health)

    @ddt.data(*USES)
    def test_used_over_another_path(self, use):
        found = self.start({'address': A, 'use': use, 'multipath': True})
        self.assertEqual(QUARANTINED, found[A].health)
        self.assertIn('n1p1', found[A].reason)

    @ddt.data(*USES)
    def test_use_that_begins_and_ends(self, use):
        known = self.start({'address': A}, {'address': B})
        before = self.driver.fingerprint()
        self.kernel.use_disk(A, use)
        self.assertNotEqual(before, self.driver.fingerprint())
        used = self.driver.discover(known)
        # what was offered is reserved whole
        self.assertEqual((QUARANTINED, [A], OK),
                         (used[A].health, self.handles(used[A]),
                          used[B].health))
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, known[A],
            known[A].handles[0], None, True, base.Use())
        self.assertIn(A, str(error))
        self.kernel.use_disk(A, None)
        self.assertEqual(known, self.driver.discover(used))
        self.driver.prepare(
            known[A], known[A].handles[0], None, True, base.Use())

    def test_attributes_that_cannot_be_read(self):
        found = self.start({'address': A, 'faults': {
            'attributes': {'dev': 'EIO'}}}, {'address': B})
        # its use cannot be determined, so no server gets it
        self.assertEqual([QUARANTINED, OK],
                         [found[a].health for a in (A, B)])

    def test_numbers_change_at_each_scan(self):
        known = self.start({'address': A, 'use': 'dm-1',
                            'faults': {'renumber': True}}, {'address': B})
        self.assertEqual([QUARANTINED, OK],
                         [known[a].health for a in (A, B)])
        for _ in range(3):
            again = self.driver.discover(known)
            self.assertEqual([QUARANTINED, OK],
                             [again[a].health for a in (A, B)])

    def test_controller_that_cannot_erase(self):
        """Known before a server has it, not with its data on it."""
        found = self.start({'address': A, 'faults': {'format': 'unsupported'}},
                           {'address': B, 'sanitize': ['block'],
                            'faults': {'format': 'unsupported'}})
        self.assertEqual((QUARANTINED, (), OK), (
            found[A].health, found[A].handles, found[B].health))
        self.assertIn('neither Sanitize nor Format NVM', found[A].reason)
        self.config.config(group='accel', handover=['nvme=operator'])
        found = self.driver.discover(found)
        self.assertEqual((OK, [A]), (found[A].health, self.handles(found[A])))
        # also where the policy changes later
        self.config.config(group='accel', handover=[])
        self.assertEqual(QUARANTINED, self.driver.discover(found)[A].health)

    def test_controller_that_cannot_erase_on_vfio_pci(self):
        """It was seen under a policy that does not erase."""
        self.config.config(group='accel', handover=['nvme=operator'])
        self.start({'address': A, 'faults': {'format': 'unsupported'}})
        found = self.driver.discover()
        self.kernel.rebind(A, 'vfio-pci')
        self.config.config(group='accel', handover=[])
        device = self.driver.discover(found)[A]
        self.assertIn('neither Sanitize nor Format NVM', str(self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, device,
            device.handles[0], None, True, base.Use())))
        # the server that has it starts again all the same
        self.driver.prepare(device, device.handles[0], None, False, base.Use())

    def test_controller_that_does_not_tell_whether_it_can_erase(self):
        found = self.start({'address': A, 'faults': {'identify': 'refused'}})
        self.assertEqual((QUARANTINED, ()), (found[A].health,
                                             found[A].handles))
        self.assertIn('not report whether it can erase it (', found[A].reason)

    def test_company_in_the_iommu_group(self):
        device = self.start(
            {'address': A, 'iommu_group': 7},
            others=[{'address': '0000:5f:00.0', 'driver': 'ahci',
                     'iommu_group': 7}])[A]
        self.assertEqual(QUARANTINED, device.health)
        self.assertIn('ahci', device.reason)


@ddt.ddt
class Content(TestCase):
    """What is on a disk when it is first seen."""

    def refused(self, *said, known=None):
        device = self.driver.discover(known)[A]
        self.assertEqual(QUARANTINED, device.health)
        for text in said:
            self.assertIn(text, device.reason)
        return {A: device}

    def foreign(self, *said, known=None):
        """There is something on it, which inventory fences."""
        device = self.driver.discover(known)[A]
        self.assertEqual((OK, [A]), (device.health, self.handles(device)))
        for text in said:
            self.assertIn(text, device.foreign)
        return {A: device}

    def changed(self, change, *args, **kwargs):
        """Whether a change is a reason to look again."""
        before = self.driver.state(A)
        self.assertEqual(before, self.driver.state(A))
        change(*args, **kwargs)
        return before != self.driver.state(A)

    @ddt.data(['ext4'], ['dos'], ['gpt', 'PMBR'], ['linux_raid_member'],
              ['LVM2_member'], ['ceph_bluestore'], ['crypto_LUKS'],
              ['zfs_member'], ['swap'])
    def test_somebody_put_it_there(self, kinds):
        found = self.start({'address': A, 'signatures': kinds},
                           {'address': B})
        self.assertEqual('', found[B].foreign)
        for text in (', '.join(kinds), 'wipefs --all /dev/nvme', 'n1'):
            self.assertIn(text, found[A].foreign)
        again = self.foreign('wipefs', known=found)
        # its namespaces may be others before it is offered
        self.kernel.change_disk(A, namespaces=[[1 << 19, 4096, 0, True]])
        self.assertTrue(self.changed(self.kernel.sign_disk, A))
        device = self.driver.discover(again)[A]
        self.assertEqual((OK, ''), (device.health, device.foreign))
        self.assertIn(('namespace', f'{1 << 19}x4096+0'), device.record)

    def test_data_without_a_signature(self):
        """As of a database on the disk itself, or after wipefs alone."""
        self.start({'address': A})
        self.kernel.write_disk(A, 'of another host')
        found = self.foreign('data without a signature', 'blkdiscard')
        self.kernel.write_disk(A, '')
        self.assertEqual('', self.driver.discover(found)[A].foreign)
        # noise may be what a crypto erase leaves before the next server
        self.kernel.write_disk(A, 'noise')
        self.prepare(self.driver.discover(self.driver.discover(found))[A],
                     True)

    @ddt.data('nvme=none', 'nvme=reset', 'nvme=operator')
    def test_whatever_the_policy(self, policy):
        self.config.config(group='accel', handover=[policy])
        self.start({'address': A, 'signatures': ['ext4']})
        self.foreign('ext4')

    def test_namespaces_that_nobody_sees(self):
        """As an operator prepares them for secondary controllers."""
        TestCase.start(self, {'address': A, 'namespaces': 2})
        spaces = [[1 << 20, 512, 0, True], [1 << 20, 512, 0, False]]
        self.kernel.change_disk(A, namespaces=spaces)
        self.refused('1 namespaces that are attached to no controller')
        spaces[1][3] = True
        self.kernel.change_disk(A, namespaces=spaces)
        device = self.driver.discover()[A]
        self.assertEqual((OK, [A]), (device.health, self.handles(device)))
        # what a server detaches is another thing
        spaces[0][3] = False
        self.kernel.change_disk(A, namespaces=spaces)
        self.assertIn('were', self.driver.discover({A: device})[A].reason)

    def test_what_a_server_wrote(self):
        known = self.start({'address': A})
        self.kernel.sign_disk(A, 'ext4')
        self.assertEqual(known, self.driver.discover(known))

    def prepare(self, device, fresh):
        self.driver.prepare(
            device, device.handles[0], None, fresh, base.Use())

    @ddt.data('nvme', 'vfio-pci')
    def test_somebody_put_it_there_since(self, bound):
        """No server had it, or it was erased after the last one."""
        known = self.start({'address': A})[A]
        self.kernel.sign_disk(A, 'LVM2_member')
        self.kernel.rebind(A, bound)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.prepare, known, True)
        for text in (A, 'LVM2_member', 'wipefs --all'):
            self.assertIn(text, str(error))
        self.assertEqual(bound, pci.driver(self.kernel, A))
        # a server that has it may have written that itself
        self.prepare(known, False)
        self.config.config(group='accel', handover=['nvme=none'])
        self.prepare(known, True)
        self.config.config(group='accel', handover=[])
        self.kernel.rebind(A, 'nvme')
        self.kernel.sign_disk(A)
        self.prepare(known, True)

    def test_disk_of_a_server_of_release_0_1(self):
        """It has no record, and was offered."""
        known = self.start({'address': A})
        self.kernel.sign_disk(A, 'gpt')
        old = {A: dataclasses.replace(known[A], record=())}
        self.assertEqual(OK, self.driver.discover(old)[A].health)
        # nor does the first start without a rule for it change that
        self.config.config(group='accel', include_devices=[])
        found = self.refused('include_devices', known=old)
        self.config.config(group='accel', include_devices=['vendor=144d'])
        self.assertEqual(OK, self.driver.discover(found)[A].health)

    def test_another_disk(self):
        """It is new, whatever the one before was."""
        known = self.start({'address': A})
        self.kernel.sign_disk(A, 'LVM2_member')
        self.kernel.change_disk(A, serial='OTHER')
        self.refused('serial number', known=known)
        self.config.config(group='accel', handover=[f'{A}=none'])
        found = self.foreign('LVM2_member', known=known)
        self.kernel.sign_disk(A)
        device = self.driver.discover(found)[A]
        self.assertEqual((OK, ''), (device.health, device.foreign))
        self.assertIn(('serial number', 'OTHER'), device.record)

    @ddt.data(('ENOENT', 'wipefs of util-linux'), ('EIO', 'can be read'),
              ('ETIMEDOUT', 'timed out'))
    @ddt.unpack
    def test_it_cannot_be_told(self, fault, said):
        self.start({'address': A, 'faults': {'signatures': fault}})
        found = self.refused(said)
        self.kernel.set_fault(A, signatures=None)
        self.assertEqual(OK, self.driver.discover(found)[A].health)

    def test_no_rule_includes_it(self):
        """Such a disk is not even read."""
        self.config.config(group='accel', include_devices=[])
        self.start({'address': A, 'signatures': ['ext4']})
        found = self.refused('[accel] include_devices', f'address={A}',
                             'vendor=144d product=a824')
        self.assertNotIn('ext4', found[A].reason)

    def test_writes_of_the_host_are_no_reason_to_look(self):
        self.start({'address': A, 'use': 'mounted at /'})
        self.assertFalse(self.changed(self.kernel.sign_disk, A, 'ext4'))


class VirtualFunctions(TestCase):

    def test_are_its_handles(self):
        self.config.config(group='accel', virtual_functions=[f'{A}=2'])
        self.start({'address': A, 'total_vfs': 4}, {'address': B})
        self.driver.configure()
        found = self.driver.discover()
        self.assertEqual([A, B], sorted(found))
        self.assertEqual([vf(0), vf(1)], self.handles(found[A]))
        self.assertEqual({A}, {h.parent for h in found[A].handles})
        self.kernel.guest_takes(vf(1))
        self.assertEqual(found, self.driver.discover(found))
        self.kernel.reboot()
        # it is not given whole then
        lost = self.driver.discover(found)[A]
        self.assertEqual((QUARANTINED, found[A].handles),
                         (lost.health, lost.handles))
        self.driver.configure()
        self.assertEqual(found, self.driver.discover(found))

    def test_of_a_controller_that_the_host_uses(self):
        # the namespaces of VFs are others
        found = self.start({'address': A, 'total_vfs': 2, 'vfs': 2,
                            'use': 'mounted at /'})
        self.assertEqual((OK, [vf(0), vf(1)]),
                         (found[A].health, self.handles(found[A])))

    def test_without_driver(self):
        # the host's driver gives up one that has no queues yet
        self.start({'address': A, 'total_vfs': 2, 'vfs': 2})
        self.assertIsNone(pci.driver(self.kernel, vf(0)))
        device = self.driver.discover()[A]
        self.driver.prepare(device, device.handles[0], None, True, base.Use())

    def test_that_cannot_be_had(self):
        self.config.config(group='accel', virtual_functions=[
            f'{A}=9', f'{B}=2', '0000:99:00.0=1'])
        self.start({'address': A, 'total_vfs': 4},
                   {'address': B, 'total_vfs': 4})
        error = self.assertRaises(exception.ConfigurationError,
                                  self.driver.configure)
        self.assertIn(f'9 VFs of {A}', str(error))
        # one that cannot be costs the others nothing
        self.assertEqual(2, len(pci.virtual_functions(self.kernel, B)))


class ReleaseTestCase(TestCase):
    """A server had a disk or VF, and left data on it."""

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.nvme._POLL_SECONDS', 0.01))
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.nvme._SETTLE_SECONDS', 0))

    def start(self, serial=None, bound=None, **disk):
        """
        :param serial: of the disk that comes back.
        :param bound: driver to which the operator binds the disk after
            nova-compute has seen it.
        """
        found = super().start({'address': A, **disk})
        if bound:
            self.kernel.rebind(A, bound)
        # as the claim store gives it back after a restart
        self.device = model.from_dict(model.Device, json.loads(json.dumps(
            dataclasses.asdict(found[A]), default=lambda v: v.value)))
        self.assertEqual(found[A], self.device)
        self.handle = self.device.handles[0]
        self.kernel.guest_takes(self.handle.address)
        self.kernel.write_disk(self.handle.address, 'a secret')
        if serial:
            self.kernel.change_disk(A, serial=serial)
        self.kernel.guest_returns(self.handle.address)
        #: as the claim store has it
        self.memory = None

    def watch(self):
        """Return a list of the calls that change the disk from now on."""
        calls = []

        def note(name, method):
            def call(*args, **more):
                calls.append(name)
                return method(*args, **more)
            return call
        for name in ('reset_nvme', 'start_nvme_sanitize',
                     'exit_nvme_sanitize_failure', 'format_nvme',
                     'restore_nvme_namespaces', 'format_nvme_vf',
                     'reset_nvme_vf', 'rebind'):
            setattr(self.kernel, name, note(name, getattr(self.kernel, name)))
        return calls

    def release(self):
        return self.driver.release(self.device, self.handle, None, base.Use(
            memory=self.memory, remember=self.remember))

    def remember(self, value):
        self.memory = json.loads(json.dumps(value))

    def look(self):
        return self.driver.examine(A, self.device)

    def data(self):
        return self.kernel.data_of_disk(self.handle.address)

    def refused(self, said, data='a secret'):
        error = self.assertRaises(exception.DeviceError, self.release)
        self.assertIn(self.handle.address, str(error))
        self.assertIn(said, str(error))
        self.assertLessEqual(len(str(error)), 255)
        self.assertTrue(str(error).endswith('.'))
        self.assertEqual(data, self.data())


@ddt.ddt
class Scrub(ReleaseTestCase):

    @ddt.data({}, {'namespaces': 3}, {'multipath': True})
    def test_erased(self, disk):
        self.start(**disk)
        self.assertEqual('a secret', self.data())
        self.release()
        self.assertEqual('', self.data())
        self.release()

    @ddt.data(['nvme=none'], ['nvme=operator'], [f'{A}=none', 'nvme=clear'],
              ['vendor=144d=none', 'nvme=clear'])
    def test_turned_off(self, policies):
        self.config.config(group='accel', handover=policies)
        self.start(serial='another')
        calls = self.watch()
        self.release()
        self.assertEqual([], calls)
        self.assertEqual('a secret', self.data())

    def test_reset_only(self):
        self.config.config(group='accel', handover=['nvme=reset'])
        self.start()
        calls = self.watch()
        self.release()
        self.assertEqual(['reset_nvme'], calls)
        self.kernel.set_fault(A, reset='refused')
        self.refused('busy')

    def test_steps_of_format(self):
        self.start()
        calls = self.watch()
        self.release()
        self.assertEqual(['reset_nvme', 'format_nvme'], calls)

    def test_bound_to_vfio_by_the_operator(self):
        self.start(bound='vfio-pci')
        self.kernel.set_fault(A, format='refused')
        self.refused('Input/output')
        self.assertEqual('vfio-pci', pci.driver(self.kernel, A))
        self.kernel.set_fault(A, format=None)
        self.release()
        self.assertEqual(('', 'vfio-pci'),
                         (self.data(), pci.driver(self.kernel, A)))

    def test_without_driver(self):
        # as a crash leaves it between two bindings
        self.start()
        self.kernel.unbind(A)
        self.release()
        self.assertEqual('', self.data())

    @ddt.data(('refused', 'Input/output error'),
              ('unsupported', 'not supported'))
    @ddt.unpack
    def test_disk_that_cannot_be_erased(self, fault, said):
        self.start()
        self.kernel.set_fault(A, format=fault)
        self.refused(said)
        self.kernel.set_fault(A, format=None)
        self.release()
        self.assertEqual('', self.data())

    @ddt.data(*USES, 'zfs')
    def test_used_by_the_host_since(self, use):
        # what a server leaves there may be brought up when it comes back
        self.start()
        self.kernel.use_disk(A, use)
        self.refused('busy')

    def test_gone(self):
        self.start()
        self.kernel.set_fault(A, vanish=True)
        self.refused('No such')

    def test_controller_that_does_not_come_up(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.nvme._READY_SECONDS', 0.2))
        self.start()
        self.kernel.set_fault(A, attributes={'state': 'connecting'})
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.nvme._LIVE_SECONDS', 0.2))
        self.refused('its controller is connecting')

    def test_controller_that_takes_its_time(self):
        """As long as CAP.TO, in which the host's driver waits."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.nvme._READY_SECONDS', 0.1))
        self.start()
        self.kernel.set_fault(A, attributes={'state': 'connecting'})
        timer = threading.Timer(0.5, self.kernel.set_fault, [A],
                                {'attributes': None})
        timer.start()
        self.addCleanup(timer.join)
        self.driver._await_controller(A)

    def test_controller_that_refuses_the_reset(self):
        self.start()
        self.kernel.set_fault(A, reset='refused')
        self.refused('busy')

    def test_zfs_is_found_when_the_disk_is_given(self):
        self.start()
        self.kernel.use_disk(A, 'zfs')
        log = self.useFixture(fixtures.FakeLogger())
        # no attribute shows it
        self.assertEqual(OK, self.driver.discover()[A].health)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, self.device,
            self.handle, None, True, base.Use())
        self.assertIn('the host uses it', str(error))
        self.assertIn('ZFS', log.output)

    def test_mounted_when_it_is_given(self):
        """The owner of the server reads no path of the host."""
        self.start()
        log = self.useFixture(fixtures.FakeLogger())
        self.kernel.use_disk(A, 'mounted at /srv/of-eve')
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, self.device,
            self.handle, None, True, base.Use())
        self.assertNotIn('/srv', str(error))
        self.assertIn('mounted at /srv/of-eve', log.output)


@ddt.ddt
class Sanitize(ReleaseTestCase):

    @ddt.data((['overwrite', 'crypto', 'block'], 'crypto'),
              (['overwrite', 'block'], 'block'), (['overwrite'], 'overwrite'))
    @ddt.unpack
    def test_best_method(self, methods, chosen):
        self.start(sanitize=methods)
        calls = self.watch()
        self.assertEqual('completed', base.facts_of(
            self.release())['sanitize_status'])
        # nothing is left for Format NVM
        self.assertEqual(['reset_nvme', 'start_nvme_sanitize'], calls)
        self.assertEqual((chosen, ''), (
            self.kernel.read_nvme_sanitize(A).method, self.data()))

    def begin(self):
        """A release in a thread; returns it and what it raises."""
        errors = []

        def run():
            try:
                self.release()
            except Exception as error:
                errors.append(error)
        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join)
        return thread, errors

    def until(self, state):
        while self.kernel.read_nvme_sanitize(A).state != state:
            pass

    def test_is_polled(self):
        self.start(sanitize=['block'])
        self.kernel.set_fault(A, hang='sanitize')
        thread, errors = self.begin()
        self.until('running')
        thread.join(0.2)
        self.assertEqual((True, 'a secret'), (thread.is_alive(), self.data()))
        self.kernel.set_fault(A, hang=None)
        thread.join()
        self.assertEqual(([], ''), (errors, self.data()))

    def test_has_a_limit_while_its_progress_does_not_change(self):
        self.start(sanitize=['block'])
        self.kernel.set_fault(A, hang='sanitize')
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.nvme._PROGRESS_SECONDS', 0.1))
        self.refused('Sanitize has stayed at 50 percent for 0.1 seconds')
        read, progress = self.kernel.read_nvme_sanitize, iter(range(50))

        def goes_on(address):
            found, now = read(address), next(progress, None)
            if now is None:
                self.kernel.set_fault(A, hang=None)
            return dataclasses.replace(found, progress=now)
        self.kernel.read_nvme_sanitize = goes_on
        self.release()
        self.assertEqual('', self.data())

    def test_one_that_runs_since_nova_compute_was_killed(self):
        self.start(sanitize=['crypto', 'block'])
        self.kernel.sanitize_disk(A, 'crypto', 1)
        calls = self.watch()
        self.release()
        self.assertEqual((['reset_nvme'], ''), (calls, self.data()))

    def test_one_that_the_server_began(self):
        # another kind may leave what the server chose
        self.start(sanitize=['crypto', 'overwrite'])
        self.kernel.sanitize_disk(A, 'overwrite', 0.1)
        calls = self.watch()
        self.release()
        self.assertEqual((['reset_nvme', 'start_nvme_sanitize'], ''),
                         (calls, self.data()))

    def test_overwriting_that_the_server_began(self):
        """With a pattern of its own, which the next server would read."""
        self.start(sanitize=['overwrite'])
        self.kernel.sanitize_disk(A, 'overwrite', 0.1)
        calls = self.watch()
        self.release()
        self.assertEqual(['reset_nvme', 'start_nvme_sanitize'], calls)

    def test_one_that_ended_before_proves_nothing(self):
        self.start(sanitize=['crypto'])
        self.kernel.sanitize_disk(A, 'crypto')
        self.until('done')
        self.kernel.write_disk(A, 'written since')
        self.release()
        self.assertEqual('', self.data())

    @ddt.data('fails', 'locked')
    def test_failure_mode(self, fault):
        self.start(sanitize=['crypto'])
        self.kernel.set_fault(A, sanitize=fault)
        calls = self.watch()
        self.refused('Sanitize (crypto) ended in failure mode')
        self.assertEqual(['reset_nvme', 'start_nvme_sanitize',
                          'exit_nvme_sanitize_failure'], calls)
        self.assertEqual('never' if fault == 'fails' else 'failed',
                         self.kernel.read_nvme_sanitize(A).state)
        self.refused('failure mode')
        self.kernel.set_fault(A, sanitize=None)
        self.release()
        self.assertEqual('', self.data())

    def test_refused(self):
        self.start(sanitize=['crypto'])
        self.kernel.set_fault(A, sanitize='refused')
        self.refused('Input/output')

    def test_used_by_the_host_since(self):
        self.start(sanitize=['crypto'])
        self.kernel.use_disk(A, 'dm-3')
        self.refused('busy')


WHOLE = [1 << 30, 512, 0, True]


@ddt.ddt
class Namespaces(ReleaseTestCase):

    #: what a server may leave
    LEFT = ([], [[1 << 20, 512, 0, True]], [[1 << 29, 512, 0, True]] * 2,
            [[*WHOLE[:3], False]], [[1 << 27, 4096, 0, True]],
            [[1 << 30, 512, 8, True]])

    def found(self):
        return self.kernel._look()[1]['cards'][A]['namespaces']

    @ddt.data(*((methods, left) for left in LEFT
                for methods in ([], ['crypto'])))
    @ddt.unpack
    def test_changed_by_the_server(self, methods, left):
        self.start(sanitize=methods)
        self.kernel.change_disk(A, namespaces=left)
        # meanwhile no server gets it
        looked = self.look()
        self.assertEqual((QUARANTINED, self.device.record),
                         (looked.health, looked.record))
        self.assertIn('its namespaces are', looked.reason)
        self.release()
        self.assertEqual(([WHOLE], ''), (self.found(), self.data()))
        self.assertEqual(self.device, self.driver.examine(A, looked))

    def test_several_are_restored(self):
        self.start(namespaces=3)
        self.kernel.change_disk(A, namespaces=[[3 << 30, 512, 0, True]])
        calls = self.watch()
        self.release()
        # what no namespace covered is erased as well
        self.assertEqual(['reset_nvme', 'restore_nvme_namespaces',
                          'format_nvme'], calls)
        self.assertEqual(([WHOLE] * 3, ''), (self.found(), self.data()))

    def test_steps_after_sanitize(self):
        self.start(sanitize=['block'])
        self.kernel.change_disk(A, namespaces=[])
        calls = self.watch()
        self.release()
        self.assertEqual(['reset_nvme', 'start_nvme_sanitize',
                          'restore_nvme_namespaces'], calls)

    @ddt.data(*LEFT)
    def test_of_a_disk_that_had_none(self, left):
        # then it has one of the full capacity
        self.start()
        self.device = dataclasses.replace(
            self.device, record=self.device.record[:2])
        self.kernel.change_disk(A, namespaces=left)
        self.release()
        (blocks, size, _, attached), = self.found()
        self.assertEqual((1 << 39, True, ''),
                         (blocks * size, attached, self.data()))

    def test_without_management(self):
        self.start(namespace_management=False)
        self.kernel.change_disk(A, namespaces=[[1 << 20, 512, 0, True]])
        self.refused('no Namespace Management')
        # what a server can do there
        self.kernel.change_disk(A, namespaces=[[1 << 27, 4096, 0, True]])
        self.release()
        self.assertEqual(([WHOLE], ''), (self.found(), self.data()))

    def test_without_management_of_a_disk_that_had_none(self):
        self.start(namespace_management=False, namespaces=2)
        self.device = dataclasses.replace(
            self.device, record=self.device.record[:2])
        self.release()
        self.assertEqual(([WHOLE] * 2, ''), (self.found(), self.data()))

    @ddt.data(('refused', 'Input/output'), ('ignored', 'not as they were'))
    @ddt.unpack
    def test_that_cannot_be_restored(self, fault, said):
        self.start()
        self.kernel.change_disk(A, namespaces=[])
        self.kernel.set_fault(A, namespaces=fault)
        self.refused(said)
        self.kernel.set_fault(A, namespaces=None)
        self.release()
        self.assertEqual(([WHOLE], ''), (self.found(), self.data()))

    def test_killed_before_the_disk_is_formatted(self):
        self.start()
        self.kernel.change_disk(A, namespaces=[])
        self.kernel.set_fault(A, format='refused')
        self.refused('Input/output')
        self.assertEqual([WHOLE], self.found())
        self.kernel.set_fault(A, format=None)
        self.release()
        self.assertEqual('', self.data())


@ddt.ddt
class Record(ReleaseTestCase):

    def test_of_a_disk(self):
        self.start(namespaces=2)
        self.assertEqual(
            (('serial number', 'S00005e000'), ('firmware', 'SIM1'),
             *(('namespace', '1073741824x512+0'),) * 2), self.device.record)

    @ddt.data((), (('firmware', 'SIM1'),))
    def test_disk_without_serial_number_is_not_erased(self, record):
        """Nobody knows whether it is the one that the server had."""
        self.start(bound='vfio-pci')
        self.device = dataclasses.replace(self.device, record=record)
        self.refused('serial number is not known')
        looked = self.look()
        self.assertEqual((QUARANTINED, [A]),
                         (looked.health, self.handles(looked)))
        self.assertIn('bind it to the driver nvme', looked.reason)

    def test_disk_that_reports_no_serial_number(self):
        self.start()
        self.kernel.change_disk(A, serial='')
        for before in (None, self.device):
            looked = self.driver.examine(A, before)
            self.assertEqual(QUARANTINED, looked.health)
            self.assertIn('no serial number', looked.reason)

    def test_begins_when_the_host_has_the_disk(self):
        self.start()
        self.device = dataclasses.replace(self.device, record=())
        self.refused('bind it to the driver nvme')
        self.device = self.look()
        self.assertIn(('serial number', 'S00005e000'), self.device.record)
        self.release()
        self.assertEqual('', self.data())

    def test_namespaces_that_the_kernel_finds_later(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.nvme._SETTLE_SECONDS', 60))
        self.start()
        self.kernel.change_disk(A, namespaces=[])
        thread = threading.Timer(
            0.1, self.kernel.change_disk, [A], {'namespaces': [WHOLE]})
        thread.start()
        self.addCleanup(thread.join)
        self.assertEqual(self.device, self.look())

    def test_kernel_that_does_not_tell_the_metadata(self):
        self.start(faults={'attributes': {'metadata_bytes': 'missing'}})
        self.assertIn(('namespace', '1073741824x512'), self.device.record)
        self.release()
        self.assertEqual(self.device, self.look())

    def test_firmware(self):
        self.start()
        self.kernel.change_disk(A, firmware='EVIL')
        before = self.driver.state(A)
        self.refused("its firmware is 'EVIL', and was 'SIM1'", data='')
        looked = self.look()
        self.assertEqual((QUARANTINED, self.device.record),
                         (looked.health, looked.record))
        self.assertIn("its firmware is 'EVIL'", looked.reason)
        self.kernel.change_disk(A, firmware='SIM1')
        self.assertNotEqual(before, self.driver.state(A))
        self.release()
        self.assertEqual(self.device, self.driver.examine(A, looked))

    def test_firmware_that_the_operator_accepts(self):
        self.start()
        self.kernel.change_disk(A, firmware='SIM2')
        looked = self.look()
        self.config.config(group='accel', handover=[f'{A}=none'])
        self.release()
        accepted = self.driver.examine(A, looked)
        self.assertEqual((OK, 'SIM2'), (
            accepted.health, dict(accepted.record)['firmware']))
        self.config.config(group='accel', handover=[])
        self.assertEqual(accepted, self.driver.examine(A, accepted))

    def test_another_disk_is_not_erased(self):
        self.start(serial='OTHER')
        calls = self.watch()
        self.refused("its serial number is 'OTHER'")
        self.assertEqual(['reset_nvme'], calls)
        self.assertEqual(QUARANTINED, self.look().health)

    def test_of_an_earlier_release(self):
        self.start()
        known = dataclasses.asdict(self.device)
        for name in ('serial', 'record'):
            del known[name]
        self.device = model.from_dict(
            model.Device, {**known, 'health': 'ok', 'handles': []})
        self.assertEqual((
            ('serial number', 'S00005e000'), ('firmware', 'SIM1'),
            ('namespace', '1073741824x512+0')), self.look().record)


class Subsystem(TestCase):

    def test_that_two_disks_share(self):
        found = self.start({'address': A, 'subsystem': 'nqn.1'},
                           {'address': B, 'subsystem': 'nqn.1'})
        self.assertEqual([(QUARANTINED, ())] * 2, [
            (found[a].health, found[a].handles) for a in (A, B)])
        self.assertIn(B, found[A].reason)
        self.assertIn(A, found[B].reason)

    def test_of_two_disks(self):
        found = self.start({'address': A, 'subsystem': 'nqn.1'},
                           {'address': B, 'subsystem': 'nqn.2'})
        self.assertEqual([OK, OK], [found[a].health for a in (A, B)])

    def test_state_tells_of_the_other(self):
        self.start({'address': A, 'subsystem': 'nqn.1'},
                   {'address': B, 'subsystem': 'nqn.1',
                    'driver': 'vfio-pci'})
        before = self.driver.state(A)
        self.kernel.rebind(B, 'nvme')
        self.assertNotEqual(before, self.driver.state(A))


@ddt.ddt
class CleanVirtualFunctions(ReleaseTestCase):

    def start(self, **disk):
        super().start(**{'total_vfs': 4, 'vfs': 2, **disk})
        self.assertEqual(vf(0), self.handle.address)
        self.kernel.write_disk(vf(1), 'of another')
        self.kernel.write_disk(A, 'of the host')

    def refused(self, said, data='a secret'):
        super().refused(said, data)
        self.assertOthers()

    def assertOthers(self):
        self.assertEqual(['of another', 'of the host'], [
            self.kernel.data_of_disk(a) for a in (vf(1), A)])

    def test_erased(self):
        self.start()
        calls = self.watch()
        self.release()
        self.assertEqual((['format_nvme_vf', 'reset_nvme_vf'], ''),
                         (calls, self.data()))
        self.assertOthers()
        self.assertEqual(self.device, self.look())

    def test_reset_only(self):
        self.config.config(group='accel', handover=[f'{vf(0)}=reset'])
        self.start()
        calls = self.watch()
        self.release()
        self.assertEqual((['reset_nvme_vf'], 'a secret'),
                         (calls, self.data()))

    @ddt.data('none', 'operator')
    def test_nothing_is_done(self, policy):
        self.config.config(group='accel', handover=[f'{A}={policy}'])
        self.start(secondary='offline')
        calls = self.watch()
        self.release()
        self.assertEqual(([], 'a secret'), (calls, self.data()))

    @ddt.data(({'format': 'refused'}, 'Input/output'),
              ({'format': 'unsupported'}, 'not supported'),
              ({'virtualization': 'refused'}, 'Input/output'))
    @ddt.unpack
    def test_that_cannot_be_erased(self, fault, said):
        self.start()
        self.kernel.set_fault(A, **fault)
        self.refused(said)
        self.kernel.set_fault(A, **dict.fromkeys(fault))
        self.release()
        self.assertEqual('', self.data())

    def test_used_by_the_host_since(self):
        self.start()
        self.kernel.rebind(vf(0), 'nvme')
        self.kernel.use_disk(vf(0), 'dm-3')
        self.refused('busy')

    @ddt.data(('offline', 'Input/output'), ('ignored', 'is offline'))
    @ddt.unpack
    def test_that_does_not_come_online(self, fault, said):
        self.start()
        self.kernel.set_fault(A, virtualization=fault)
        self.refused(said, data='')
        # as a kill leaves it after it was erased
        self.assertEqual([vf(1)], self.handles(self.look()))
        self.kernel.set_fault(A, virtualization=None)
        self.release()
        self.assertEqual(self.device, self.look())

    def resources(self):
        return [(found.queues, found.interrupts)
                for found in self.kernel.read_nvme_vfs(A)[:2]]

    def test_resources_as_they_were(self):
        """Going offline takes them away."""
        self.start()
        self.kernel.set_secondary(A, 1, True, (7, 5))
        self.kernel.set_fault(A, format='refused')
        self.refused('Input/output')
        self.assertEqual([(0, 0), (3, 2)], self.resources())
        self.kernel.set_fault(A, format=None)
        self.release()
        self.assertEqual([(7, 5), (3, 2)], self.resources())
        # the operator has changed them since
        self.kernel.set_secondary(A, 1, True, (9, 9))
        self.release()
        self.assertEqual([(9, 9), (3, 2)], self.resources())

    def test_without_resources(self):
        """As after a boot of the host."""
        self.start()
        self.kernel.set_secondary(A, 1, False)
        self.refused('give its secondary controller some with nvme virt-mgmt',
                     data='')
        self.kernel.set_secondary(A, 1, True)
        self.release()
        self.assertEqual(self.device, self.look())

    def test_shared_since_with_another_vf(self):
        """What the other has there would be erased as well."""
        self.start()
        self.kernel.share_namespaces(A, 1, 2)
        error = self.assertRaises(exception.DeviceError, self.release)
        self.assertIn('busy', str(error))
        self.assertEqual('a secret', self.data())
        self.kernel.share_namespaces(A, 1)
        self.release()
        self.assertEqual('', self.data())
        self.assertOthers()

    def test_without_namespace(self):
        """Neither of use to a server, nor to be erased after it."""
        device = TestCase.start(self, {
            'address': A, 'total_vfs': 2, 'vfs': 2, 'vf_namespaces': 0})[A]
        self.assertEqual((QUARANTINED, ()), (device.health, device.handles))
        self.assertIn(f'{vf(0)} has no namespace: attach one', device.reason)

    def test_that_lost_its_namespace(self):
        self.start()
        self.kernel.format_nvme_vf = lambda pf, number: 0
        self.refused('it has no namespace')

    @ddt.data('clear', 'reset')
    def test_namespace_that_another_controller_has(self, policy):
        """The host, or the guest of another VF, reads what a server writes."""
        self.config.config(group='accel', handover=[policy])
        self.start()
        known = self.look()
        self.assertEqual([vf(0), vf(1)], self.handles(known))
        for others, left in (((0,), [vf(1)]), ((2,), []), ((0, 2), [])):
            before = self.driver.state(A)
            self.kernel.share_namespaces(A, 1, *others)
            for other in others:
                self.assertIn('a secret', self.kernel.data_of_disk(
                    A if not other else vf(other - 1)))
            self.assertNotEqual(before, self.driver.state(A))
            found = self.driver.examine(A, known)
            if left:
                self.assertEqual(left, self.handles(found))
            else:
                self.assertEqual(QUARANTINED, found.health)
                self.assertIn('nvme detach-ns', found.reason)
            # in the moment between that look and the server
            self.assertIn(f'of {vf(0)} is attached to the controller', str(
                self.assertRaises(
                    exception.DeviceUnavailable, self.driver.prepare, known,
                    known.handles[0], None, True, base.Use())))
            # the server that has it starts again
            self.driver.prepare(known, known.handles[0], None, False,
                                base.Use())
            self.kernel.share_namespaces(A, 1)
        self.assertEqual(known, self.driver.examine(A, known))
        self.driver.prepare(known, known.handles[0], None, True, base.Use())

    def test_namespace_that_the_operator_shares(self):
        self.config.config(group='accel', handover=[f'{vf(0)}=none'])
        self.start()
        self.kernel.share_namespaces(A, 1, 0)
        known = self.look()
        self.assertEqual([vf(0), vf(1)], self.handles(known))
        self.driver.prepare(known, known.handles[0], None, True, base.Use())

    def test_gone(self):
        self.start()
        self.kernel.set_numvfs(A, 0)
        self.refused('No such device')

    def test_of_the_host(self):
        # which would start it again while it is offline
        self.start()
        self.kernel.rebind(vf(0), 'nvme')
        calls = self.watch()
        self.release()
        self.assertEqual(['rebind', 'format_nvme_vf', 'reset_nvme_vf'], calls)
        self.assertEqual('vfio-pci', pci.driver(self.kernel, vf(0)))

    def test_only_those_online_are_offered(self):
        self.start()
        before = self.driver.state(A)
        self.kernel.set_secondary(A, 1, False)
        self.assertNotEqual(before, self.driver.state(A))
        self.assertEqual([vf(1)], self.handles(self.look()))
        self.kernel.set_secondary(A, 2, False)
        looked = self.look()
        self.assertEqual(QUARANTINED, looked.health)
        self.assertIn('virt-mgmt', looked.reason)
        self.kernel.set_secondary(A, 1, True)
        self.assertEqual([vf(0)], self.handles(
            self.driver.examine(A, looked)))

    @ddt.data({'secondary': 'none'}, {'namespace_management': False},
              {'faults': {'format': 'unsupported'}}, {'formats_all': True})
    def test_of_a_controller_that_cannot_clean_them(self, less):
        device = TestCase.start(self, {
            'address': A, 'total_vfs': 2, 'vfs': 2, **less})[A]
        self.assertEqual((QUARANTINED, ()), (device.health, device.handles))
        self.assertIn('[accel] handover', device.reason)
        self.config.config(group='accel', handover=[f'{vf(1)}=none'])
        self.assertEqual([vf(1)], self.handles(self.driver.examine(A, device)))
        self.config.config(group='accel', handover=[f'{A}=operator'])
        self.assertEqual([vf(0), vf(1)],
                         self.handles(self.driver.examine(A, device)))
