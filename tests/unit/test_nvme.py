# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks, on simulated hosts."""

import ddt
import fixtures
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.drivers import nvme
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from tests.unit.host import A, B, SimulatedHost

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED
USES = ('mounted at /srv', 'used as swap', 'dm-3', 'md0', 'btrfs')


def vf(number):
    return f'{A[:-1]}{number + 1}'


class TestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = self.useFixture(config_fixture.Config(conf.CONF))

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

    @ddt.data('nvme', 'vfio-pci', None)
    def test_whatever_driver_it_has(self, bound):
        device = self.start({'address': A, 'driver': bound})[A]
        self.assertEqual((OK, [A]), (device.health, self.handles(device)))

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
            known[A].handles[0], None, True)
        self.assertIn(A, str(error))
        self.kernel.use_disk(A, None)
        self.assertEqual(known, self.driver.discover(used))
        self.driver.prepare(known[A], known[A].handles[0], None, True)

    def test_attributes_that_cannot_be_read(self):
        found = self.start({'address': A, 'faults': {
            'attributes': {'dev': 'EIO'}}}, {'address': B})
        # whether it is used cannot be told, so it is not given away
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

    def test_company_in_the_iommu_group(self):
        device = self.start(
            {'address': A, 'iommu_group': 7},
            others=[{'address': '0000:5f:00.0', 'driver': 'ahci',
                     'iommu_group': 7}])[A]
        self.assertEqual(QUARANTINED, device.health)
        self.assertIn('ahci', device.reason)


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
        self.assertEqual([A], self.handles(self.driver.discover(found)[A]))
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
        self.driver.prepare(device, device.handles[0], None, True)

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


@ddt.ddt
class Scrub(TestCase):

    def start(self, **disk):
        self.device = super().start({'address': A, **disk})[A]
        self.handle = self.device.handles[0]
        self.kernel.guest_takes(self.handle.address)
        self.kernel.write_disk(A, 'a secret')
        self.kernel.guest_returns(self.handle.address)

    def release(self):
        self.driver.release(self.device, self.handle, None)

    def data(self):
        return self.kernel.data_of_disk(A)

    def refused(self, said):
        error = self.assertRaises(exception.DeviceError, self.release)
        self.assertIn(A, str(error))
        self.assertIn(said, str(error))
        self.assertLessEqual(len(str(error)), 255)
        self.assertEqual('a secret', self.data())

    @ddt.data({}, {'namespaces': 3}, {'multipath': True})
    def test_erased(self, disk):
        self.start(**disk)
        self.assertEqual('a secret', self.data())
        self.release()
        self.assertEqual('', self.data())
        self.release()

    def test_turned_off(self):
        self.config.config(group='accel', nvme_scrub=False)
        self.start()
        self.release()
        self.assertEqual('a secret', self.data())

    def test_vf(self):
        # its namespaces are managed over the PF, by somebody else
        self.start(total_vfs=2, vfs=1)
        self.assertEqual(vf(0), self.handle.address)
        self.release()
        self.assertEqual('a secret', self.data())

    def test_bound_to_vfio_by_the_operator(self):
        self.start(driver='vfio-pci')
        self.kernel.set_fault(A, format='refused')
        self.refused('Input/output')
        self.assertEqual('vfio-pci', pci.driver(self.kernel, A))
        self.kernel.set_fault(A, format=None)
        self.release()
        self.assertEqual(('', 'vfio-pci'),
                         (self.data(), pci.driver(self.kernel, A)))

    def test_without_driver(self):
        # as a crash leaves it between two bindings
        self.start(driver=None)
        self.release()
        self.assertEqual('', self.data())

    @ddt.data(('refused', 'Input/output error'),
              ('unsupported', 'not supported'),
              ('unattached', 'busy'))
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
        self.refused('its controller is connecting')

    def test_zfs_is_found_when_the_disk_is_given(self):
        self.start()
        self.kernel.use_disk(A, 'zfs')
        # no attribute shows it
        self.assertEqual(OK, self.driver.discover()[A].health)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, self.device,
            self.handle, None, True)
        self.assertIn('ZFS', str(error))
