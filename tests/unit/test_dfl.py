# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The DFL driver: on simulated hosts, and on trees as Linux 6.12 shows them."""

import dataclasses
import errno
import os
import threading
import time

import ddt
import fixtures

from nova_accel.drivers import dfl
from nova_accel.drivers import pci_rule
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import pci
from nova_accel import model
from tests.unit import configured
from tests.unit.host import (A, B, FIRST, FUNCTION, INTERFACE, OTHER, plain,
                             SimulatedHost, vf)

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED


def handles(region):
    return [handle.address for handle in region.handles]


class TestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.config.config(group='accel', whole_cards=[A, B])

    def start(self, *cards, **more):
        self.host = self.useFixture(SimulatedHost(*cards, **more))
        self.kernel = self.host.kernel
        self.driver = dfl.DflDriver(self.kernel)
        return self.driver.discover()


@ddt.ddt
class SlotTest(TestCase):
    """A board of OFS: its port has no AFU, which has several VFs."""

    VFS = tuple(vf(A, n) for n in range(3))

    def start(self, vfs=3, linux_dfl=True, **more):
        self.config.config(group='accel', virtual_functions=[f'{A}=3'],
                           whole_cards=[])
        return super().start({
            'address': A, 'product': 'N6001', 'vfs': vfs,
            'afu_vfs': 3 * linux_dfl, 'programming_seconds': 0, **more})[A]

    def look(self, before=None):
        return self.driver.discover({A: before} if before else None)[A]

    def program(self, device, function=OTHER):
        return self.driver.program(
            device, device.regions[0], self.driver.read_bitstream(
                self.host.gbs(function)))

    def test_all_vfs_are_one_accelerator(self):
        device = self.start()
        region, = device.regions
        self.assertEqual(
            (OK, OK, INTERFACE, FIRST, True, False),
            (device.health, region.health, region.region_type_uuid,
             region.function_uuid, region.programmable,
             region.guest_can_reprogram))
        handle, = region.handles
        self.assertEqual(self.VFS, handle.functions)
        self.assertEqual((), device.handles)

    def test_vfs_are_created_without_a_driver(self):
        self.start(vfs=0)
        self.driver.configure()
        self.assertEqual([None] * 3, [
            pci.driver(self.kernel, address) for address in self.VFS])
        # it has them
        self.driver.configure()
        self.assertEqual(OK, self.look().health)

    def test_mainline_linux(self):
        """It has the port, and gives it no VFs."""
        self.assertEqual(sriov.NONE, self.start(
            vfs=0, linux_dfl=False).reason)
        self.config.config(group='accel', virtual_functions=[])
        device = self.look()
        self.assertEqual((QUARANTINED, []),
                         (device.health, handles(device.regions[0])))
        for said in ('board of OFS', 'under linux-dfl', 'EINVAL'):
            self.assertIn(said, device.reason)
        self.config.config(group='accel', virtual_functions=[f'{A}=1'])
        error = self.assertRaises(
            exception.DeviceError, self.driver.configure)
        self.assertIn('use linux-dfl', str(error))
        # nor is the port released, which would have the card reset no more
        self.kernel.reset_dfl_port(A, 0)

    def test_it_is_never_given_whole(self):
        """The physical function has the flash, and no AFU."""
        self.config.config(group='accel', whole_cards=[A])
        device = super().start({'address': A, 'product': 'N6001'})[A]
        self.assertEqual((QUARANTINED, []),
                         (device.health, handles(device.regions[0])))

    def test_group_that_a_guest_cannot_have(self):
        self.host = self.useFixture(SimulatedHost(
            {'address': A, 'product': 'N6001', 'vfs': 3, 'afu_vfs': 3},
            iommu=False))
        self.kernel = self.host.kernel
        self.driver = dfl.DflDriver(self.kernel)
        region, = self.look().regions
        self.assertEqual([], handles(region))
        self.assertIn('IOMMU', region.reason)

    def test_program(self):
        device = self.start()
        self.assertEqual(plain(OTHER), self.program(device))
        self.assertEqual(plain(OTHER), self.look().regions[0].function_uuid)
        self.assertEqual(3, len(pci.virtual_functions(self.kernel, A)))

    def test_of_a_guest(self):
        """Its registers are the guest's: what was known counts."""
        before = self.start()
        self.kernel.guest_takes(*self.VFS)
        self.assertEqual(before, self.look(before))
        self.assertIsNone(self.look().regions[0].function_uuid)
        self.assertRaises(exception.DeviceError,
                          self.driver.reset_region, before, before.regions[0])

    def test_vfs_that_are_kept_for_guests(self):
        """Nothing is programmed that could not be read after it."""
        device = self.start()
        self.kernel.rebind(self.VFS[0], 'vfio-pci')
        error = self.assertRaises(
            exception.ProgrammingFailed, self.program, device)
        self.assertIn('nothing was done', str(error))
        self.assertIn('leave it without a driver', str(error))
        self.kernel.rebind(self.VFS[0], None)
        self.assertEqual(FIRST, self.look().regions[0].function_uuid)

    def test_reset(self):
        device = self.start()
        self.kernel.guest_takes(*self.VFS)
        self.kernel.guest_writes(self.VFS[0], registers='left')
        for address in self.VFS:
            self.kernel.guest_returns(address)
        self.assertEqual('port reset', self.driver.reset_region(
            device, device.regions[0]))
        self.kernel.guest_takes(self.VFS[0])
        self.assertEqual({}, self.kernel.guest_reads(self.VFS[0]))

    @ddt.data('crc', 'timeout')
    def test_programming_that_fails(self, error):
        """The port stays disabled, and the driver binds dfl-pci again, which
        takes the VFs away."""
        device = self.start(timeout_seconds=0, faults={
            'pr_error': error, 'pr_error_count': 1})
        self.assertIn('it was recovered', str(self.assertRaises(
            exception.ProgrammingFailed, self.program, device)))
        after = self.look(device)
        self.assertEqual((OK, self.VFS), (
            after.regions[0].health, after.regions[0].handles[0].functions))
        self.assertEqual(plain(OTHER), self.program(after))

    def test_port_that_is_disabled(self):
        device = self.start(faults={'pr_error': 'crc'})

        def refuses(address):
            raise exception.DeviceError('no')
        self.driver.recover = refuses
        self.assertRaises(
            exception.ProgrammingFailed, self.program, device)
        region, = self.look(device).regions
        self.assertEqual(QUARANTINED, region.health)
        self.assertIn('port is disabled', region.reason)

    def test_slot_without_function(self):
        self.start()

        def reads(function):
            raise OSError(number, os.strerror(number))
        self.kernel.read_afu = reads
        number = errno.ENODEV
        region, = self.look().regions
        self.assertEqual((OK, None), (region.health, region.function_uuid))
        # a kernel that is locked down
        number = errno.EPERM
        region, = self.look().regions
        self.assertEqual(QUARANTINED, region.health)
        self.assertIn(f'registers of {self.VFS[0]}', region.reason)


@ddt.ddt
class Discovery(TestCase):

    def test_two_cards(self):
        found = self.start({'address': A, 'numa_node': 1, 'vfs': 1},
                           {'address': B, 'product': 'PAC_D5005', 'ports': 2,
                            'vfs': 2, 'functions': [FUNCTION, OTHER]})
        self.assertEqual([A, B], sorted(found))
        one, two = found[A], found[B]
        self.assertEqual(
            ('FPGA', 'INTEL', 'PAC_ARRIA10', 'ARRIA10', '8086', '09c4', 'dfl',
             1, '0x123000200000185', OK, ()),
            (one.type, one.vendor, one.product, one.family, one.vendor_id,
             one.product_id, one.driver, one.numa_node, one.shell_id,
             one.health, one.handles))
        region, = one.regions
        self.assertEqual((0, INTERFACE, FIRST, [vf(A, 0)], True, False, OK,
                          ''),
                         (region.index, region.region_type_uuid,
                          region.function_uuid, handles(region),
                          region.programmable, region.guest_can_reprogram,
                          region.health, region.reason))
        self.assertIsNone(two.numa_node)
        self.assertEqual([(0, plain(FUNCTION), [vf(B, 0)]),
                          (1, plain(OTHER), [vf(B, 1)])],
                         [(r.index, r.function_uuid, handles(r))
                          for r in two.regions])

    @ddt.data(('PAC_ARRIA10', 'PAC_ARRIA10', 'ARRIA10'),
              ('PAC_N3000', 'PAC_N3000', 'ARRIA10'),
              ('PAC_D5005', 'PAC_D5005', 'STRATIX10'),
              ('N6000', 'N6000', 'AGILEX'), ('N6001', 'N6001', 'AGILEX'))
    @ddt.unpack
    def test_product(self, simulated, product, family):
        device = self.start({'address': A, 'product': simulated})[A]
        self.assertEqual(('INTEL', product, family),
                         (device.vendor, device.product, device.family))

    def test_errors_of_a_port(self):
        """They are evidence of what a guest did, and the log keeps them."""
        device = self.start({'address': A, 'vfs': 1, 'faults': {
            'port_errors': '0x4000'}})[A]
        log = self.useFixture(fixtures.FakeLogger())
        self.driver.reset_region(device, device.regions[0])
        self.assertIn('has the errors 0x4000', log.output)

        def refuses(function, port):
            raise OSError(errno.EBUSY, 'Device or resource busy')
        self.kernel.clear_dfl_port_errors = refuses
        error = self.assertRaises(
            exception.DeviceError, self.driver.reset_region, device,
            device.regions[0])
        self.assertIn('power state may be AP6', str(error))

    def test_board_given_by_a_rule(self):
        """A rule gives the VFs of its slot, and the driver pci makes them."""
        self.config.config(
            group='accel', enabled_drivers=['dfl', 'pci'],
            pci_devices=[f'address={A} type=FPGA vfs=together'],
            virtual_functions=[f'{A}=3'])
        board = {'address': A, 'product': 'N6001', 'afu_vfs': 3}
        self.assertEqual({B}, self.start(
            board, {**board, 'address': B}).keys())
        driver = pci_rule.PciRuleDriver(self.kernel)
        driver.configure()
        handle, = driver.discover()[A].handles
        self.assertEqual(3, len(handle.functions))
        # the card is programmed by its physical function, which stays
        self.assertEqual('dfl-pci', pci.driver(self.kernel, A))

    @ddt.data(1, 2)
    def test_no_guest_gets_the_management_function(self, ports):
        """The device is shown, for a server that has it."""
        self.config.config(group='accel', whole_cards=[])
        device = self.start({'address': A, 'ports': ports})[A]
        self.assertEqual((QUARANTINED, [A]),
                         (device.health, handles(device.regions[0])))
        for said in (f'[accel] virtual_functions = {A}=',
                     '[accel] whole_cards', 'can program and flash'):
            self.assertIn(said, device.reason)

    @ddt.data('0000:5E:00.0', '00000000:5E:00.0', A)
    def test_card_that_is_named_is_given_whole(self, spelling):
        self.config.config(group='accel', whole_cards=[spelling])
        found = self.start({'address': A}, {'address': B})
        region, = found[A].regions
        self.assertEqual(
            (OK, '', [A], True, OK, ''),
            (found[A].health, found[A].reason, handles(region),
             region.guest_can_reprogram, region.health, region.reason))
        self.assertEqual(QUARANTINED, found[B].health)

    def test_card_that_is_named_has_several_ports(self):
        device = self.start({'address': A, 'ports': 2})[A]
        self.assertEqual(QUARANTINED, device.health)
        self.assertIn('several ports', device.reason)
        first, second = device.regions
        self.assertEqual(([A], []), (handles(first), handles(second)))
        self.assertIn('the whole card', second.reason)
        # also where one of them is not to be seen
        self.kernel.release_dfl_port(A, 1)
        self.assertEqual(device.reason, self.driver.discover()[A].reason)

    def test_card_that_is_named_has_vfs(self):
        device = self.start({'address': A, 'vfs': 1})[A]
        region, = device.regions
        self.assertEqual((OK, [vf(A, 0)], False), (
            device.health, handles(region), region.guest_can_reprogram))

    def test_card_whose_vfs_are_gone(self):
        self.config.config(group='accel', whole_cards=[],
                           virtual_functions=[f'{A}=1'])
        device = self.start({'address': A})[A]
        self.assertEqual(QUARANTINED, device.health)
        self.assertEqual(sriov.NONE, device.reason)

    def test_address_that_is_none(self):
        self.config.config(group='accel', whole_cards=['5e:00.0'])
        error = self.assertRaises(exception.ConfigurationError, self.start,
                                  {'address': A})
        self.assertIn("[accel] whole_cards has '5e:00.0', which is not a PCI "
                      'address', str(error))

    def test_port_left_with_the_card_while_vfs_are_enabled(self):
        first, second = self.start(
            {'address': A, 'ports': 2, 'vfs': 1})[A].regions
        self.assertEqual([vf(A, 0)], handles(first))
        self.assertEqual([], handles(second))
        self.assertIn('not released', second.reason)

    def test_released_port_without_vf(self):
        self.start({'address': A, 'ports': 2})
        self.kernel.release_dfl_port(A, 1)
        first, second = self.driver.discover()[A].regions
        self.assertEqual((OK, [A]), (first.health, handles(first)))
        self.assertEqual((1, QUARANTINED), (second.index, second.health))
        self.assertIn('released', second.reason)

    def test_port_that_no_driver_took_again(self):
        self.start({'address': A, 'ports': 2})
        self.kernel.release_dfl_port(A, 1)
        self.kernel.assign_dfl_port(A, 1)
        first, second = self.driver.discover()[A].regions
        self.assertEqual((OK, QUARANTINED), (first.health, second.health))
        self.assertIn('bind it again', second.reason)
        self.driver.recover(A)
        self.assertEqual([OK, OK],
                         [r.health for r in self.driver.discover()[A].regions])

    def test_card_of_a_guest_is_as_known(self):
        known = self.start({'address': A}, {'address': B})
        self.kernel.guest_takes(A)
        self.assertEqual(known, self.driver.discover(known))
        unknown = self.driver.discover()
        self.assertEqual((QUARANTINED, ()),
                         (unknown[A].health, unknown[A].regions))
        self.assertIn('vfio-pci', unknown[A].reason)
        self.assertEqual(OK, unknown[B].health)
        # quarantined as unknown, it is healed once it can be seen
        self.kernel.guest_returns(A)
        self.assertEqual(known, self.driver.discover(unknown))

    def test_vf_of_a_guest_is_as_known(self):
        known = self.start({'address': A, 'ports': 2, 'vfs': 2})
        self.kernel.guest_takes(vf(A, 1))
        self.assertEqual(known, self.driver.discover(known))
        first, second = self.driver.discover()[A].regions
        self.assertEqual((OK, [vf(A, 0)]), (first.health, handles(first)))
        self.assertEqual((1, QUARANTINED, []),
                         (second.index, second.health, handles(second)))
        self.assertIn(vf(A, 1), second.reason)

    def test_unbound_card(self):
        found = self.start({'address': A, 'driver': None})
        self.assertEqual(QUARANTINED, found[A].health)
        self.assertIn('no driver', found[A].reason)

    def test_known_of_other_drivers_are_left_to_them(self):
        found = self.start({'address': A}, others=[{'address': B}])
        other = dataclasses.replace(found[A], address=B, driver='gpu')
        self.assertEqual([A], list(self.driver.discover({B: other})))

    def _payload(self):
        parsed = self.driver.read_bitstream(
                self.host.gbs(), 'image 1')
        return parsed.payload_offset, parsed.payload_size

    @ddt.data('0000:5E:00.0', '00000000:5E:00.0', A)
    def test_fixed_devices(self, spelling):
        self.config.config(group='accel', fixed_devices=[spelling])
        found = self.start({'address': A}, {'address': B})
        self.assertEqual([False, True],
                         [found[a].regions[0].programmable for a in (A, B)])

    def test_foreign_member_of_the_iommu_group(self):
        other = {'address': '0000:5f:00.0', 'driver': 'ahci',
                 'iommu_group': 7}
        found = self.start({'address': A, 'iommu_group': 7}, {'address': B},
                           others=[other])
        region = found[A].regions[0]
        self.assertEqual([], handles(region))
        self.assertIn('0000:5f:00.0', region.reason)
        self.assertIn('ahci', region.reason)
        self.assertEqual([B], handles(found[B].regions[0]))

    @ddt.data(None, 'vfio-pci', 'pcieport')
    def test_harmless_member_of_the_iommu_group(self, bound):
        other = {'address': '0000:5f:00.0', 'driver': bound, 'iommu_group': 7}
        found = self.start({'address': A, 'iommu_group': 7}, others=[other])
        self.assertEqual([A], handles(found[A].regions[0]))

    def test_no_iommu(self):
        region = self.start({'address': A}, iommu=False)[A].regions[0]
        self.assertEqual([], handles(region))
        self.assertIn('IOMMU', region.reason)

    def test_dead_card(self):
        known = self.start({'address': A}, {'address': B})
        self.kernel.set_fault(A, dead=True)
        for before in (known, None):
            found = self.driver.discover(before)
            self.assertEqual((QUARANTINED, OK),
                             (found[A].health, found[B].health))
            self.assertIn('power-cycle', found[A].reason)
        self.assertEqual(known[A].regions,
                         self.driver.discover(known)[A].regions)

    def test_vanished_card(self):
        known = self.start({'address': A}, {'address': B})
        self.kernel.set_fault(A, vanish=True)
        self.assertEqual([B], list(self.driver.discover(known)))

    # attribute, what it reads, health of the card, health of the region
    @ddt.data(('afu_id', 'missing', OK, QUARANTINED),
              ('afu_id', 'EIO', OK, QUARANTINED),
              ('afu_id', 'EBUSY', OK, QUARANTINED),
              ('afu_id', 'what is this', OK, QUARANTINED),
              ('afu_id', 'f' * 32, OK, QUARANTINED),
              ('numa_node', 'missing', OK, OK),
              ('numa_node', 'EIO', OK, OK),
              ('bitstream_id', 'missing', OK, OK),
              ('status', 'missing', OK, OK), ('state', 'EIO', OK, OK),
              ('power_state', 'missing', OK, OK),
              ('subsystem_device', 'missing', OK, OK),
              ('compat_id', 'EIO', QUARANTINED, None),
              ('compat_id', 'garbage', QUARANTINED, None),
              ('id', 'EIO', QUARANTINED, None),
              ('config', 'EIO', QUARANTINED, None))
    @ddt.unpack
    def test_attribute(self, name, text, device_health, region_health):
        found = self.start(
            {'address': A, 'faults': {'attributes': {name: text}}},
            {'address': B})
        device = found[A]
        self.assertEqual(device_health, device.health)
        self.assertEqual(device_health is OK, not device.reason)
        if region_health:
            region, = device.regions
            self.assertEqual(region_health, region.health)
            self.assertEqual(region_health is OK, not region.reason)
        self.assertEqual((OK, OK), (found[B].health,
                                    found[B].regions[0].health))

    def test_region_without_type_is_not_programmable(self):
        region, = self.start({'address': A, 'faults': {
            'attributes': {'compat_id': 'missing'}}})[A].regions
        self.assertEqual((None, False, [A], OK),
                         (region.region_type_uuid, region.programmable,
                          handles(region), region.health))

    def test_all_zeros_is_no_function(self):
        region, = self.start({'address': A, 'faults': {
            'attributes': {'afu_id': '0' * 32}}})[A].regions
        self.assertEqual((None, OK), (region.function_uuid, region.health))

    @ddt.data('vendor', 'device')
    def test_ids_that_cannot_be_read_any_more(self, attribute):
        known = self.start({'address': A}, {'address': B})
        for text in ('EIO', '0xffff'):
            self.kernel.set_fault(A, attributes={attribute: text})
            found = self.driver.discover(known)
            self.assertEqual((QUARANTINED, OK),
                             (found[A].health, found[B].health))

    def test_card_that_is_another_now(self):
        known = self.start({'address': A}, {'address': B})
        self.kernel.set_fault(A, attributes={'device': '0x1234'})
        self.assertEqual([B], list(self.driver.discover(known)))

    def test_numbers_change_at_each_scan(self):
        known = self.start({'address': A, 'ports': 2, 'vfs': 2,
                            'faults': {'renumber': True}}, {'address': B})
        names = set()
        for _ in range(3):
            self.assertEqual(known, self.driver.discover(known))
            names.add(tuple(self.kernel.listdir(
                f'bus/pci/devices/{A}/fpga_region')))
        self.assertEqual(3, len(names))

    def test_fingerprint(self):
        self.start({'address': A, 'ports': 2}, {'address': B})
        marks = [self.driver.fingerprint()]
        self.assertEqual(marks[0], self.driver.fingerprint())
        for change in (lambda: self.kernel.guest_takes(B),
                       lambda: self.kernel.release_dfl_port(A, 0),
                       lambda: self.kernel.set_numvfs(A, 1),
                       lambda: self.kernel.set_fault(B, vanish=True)):
            change()
            marks.append(self.driver.fingerprint())
        # a release alone changes no function; all else is seen
        self.assertEqual(marks[1], marks.pop(2))
        self.assertEqual(len(marks), len(set(marks)))


class Configuration(TestCase):
    """[accel] virtual_functions, at the start of nova-compute."""

    def begin(self, count, whole=(), **card):
        self.config.config(virtual_functions=[f'{A}={count}'],
                           whole_cards=list(whole), group='accel')
        return self.start({'address': A, 'product': 'PAC_D5005', 'ports': 2,
                           'functions': [FUNCTION, OTHER], **card})[A]

    def offered(self):
        return [handles(r) for r in self.driver.discover()[A].regions]

    def test_ports_are_handed_over(self):
        self.begin(2)
        self.driver.configure()
        self.assertEqual([[vf(A, 0)], [vf(A, 1)]], self.offered())

    def test_fewer_vfs_than_ports(self):
        self.begin(1)
        self.driver.configure()
        self.assertEqual([[vf(A, 0)], []], self.offered())

    def test_nothing_is_done_where_they_are_there(self):
        before = self.begin(2, vfs=2)
        self.kernel.guest_takes(vf(A, 0))
        # would wait for the guest
        self.driver.configure()
        self.assertEqual({A: before}, self.driver.discover({A: before}))

    def test_after_a_reboot(self):
        self.begin(2)
        self.driver.configure()
        self.kernel.reboot()
        self.driver.configure()
        self.assertEqual([[vf(A, 0)], [vf(A, 1)]], self.offered())

    def test_killed_between_the_ports(self):
        self.begin(2)
        self.kernel.release_dfl_port(A, 0)
        self.driver.configure()
        self.assertEqual([[vf(A, 0)], [vf(A, 1)]], self.offered())

    def test_card_of_a_guest_is_left_alone(self):
        self.begin(2)
        self.kernel.guest_takes(A)
        self.driver.configure()
        self.assertEqual([], self.offered())

    def test_another_number_is_there(self):
        self.begin(2, vfs=1)
        error = self.assertRaises(exception.DeviceError,
                                  self.driver.configure)
        self.assertIn(f'requests 2 VFs of {A}, and it has 1', str(error))
        self.assertEqual([[vf(A, 0)], []], self.offered())

    def test_more_than_there_can_be(self):
        self.begin(3)
        error = self.assertRaises(exception.ConfigurationError,
                                  self.driver.configure)
        self.assertIn('it can have 2', str(error))

    def test_one_port(self):
        self.begin(1, ports=1, functions=[FUNCTION])
        self.driver.configure()
        self.assertEqual([[vf(A, 0)]], self.offered())

    def test_card_that_is_also_to_be_given_whole(self):
        self.begin(2, whole=[A])
        error = self.assertRaises(exception.ConfigurationError,
                                  self.driver.configure)
        for option in ('virtual_functions', 'whole_cards'):
            self.assertIn(f'[accel] {option}', str(error))

    def test_card_without_vfs(self):
        self.begin(1, product='PAC_N3000')
        error = self.assertRaises(exception.DeviceError,
                                  self.driver.configure)
        self.assertIn('see that its driver supports SR-IOV', str(error))


@ddt.ddt
class Programming(TestCase):

    def program(self, index=0, address=A, **gbs):
        bitstream = self.driver.read_bitstream(
                self.host.gbs(**gbs), 'image 1')
        device = self.driver.discover()[address]
        return self.driver.program(device, device.region(index), bitstream)

    def fails(self, error=exception.ProgrammingFailed, **program):
        return str(self.assertRaises(error, self.program, **program))

    def functions(self, address=A):
        return [r.function_uuid
                for r in self.driver.discover()[address].regions]

    @ddt.data(0, 2)
    def test_program(self, vfs):
        self.start({'address': A, 'ports': 2, 'vfs': vfs}, {'address': B})
        self.assertEqual(plain(FUNCTION), self.program(1))
        self.assertEqual([FIRST, plain(FUNCTION)], self.functions())
        self.assertEqual(plain(OTHER), self.program(0, function=OTHER))
        self.assertEqual([plain(OTHER), plain(FUNCTION)], self.functions())
        self.assertEqual([FIRST], self.functions(B))

    def test_numbers_change_meanwhile(self):
        self.start({'address': A, 'faults': {'renumber': True}})
        self.assertEqual(plain(FUNCTION), self.program())

    def test_wrong_interface_touches_nothing(self):
        before = self.start({'address': A, 'faults': {'port_errors': '0x1'}})
        with open(f'{self.host.path}.state') as file:
            state = file.read()
        said = self.fails(exception.IncompatibleBitstream, interface=OTHER)
        self.assertIn(plain(OTHER), said)
        self.assertIn(INTERFACE, said)
        with open(f'{self.host.path}.state') as file:
            self.assertEqual(state, file.read())
        self.assertEqual(before, self.driver.discover())

    @ddt.data(('operation', 'EIO: reconfig operation error'),
              ('crc', 'EIO: reconfig CRC error'),
              ('incompatible', 'EIO: reconfig incompatible image'),
              ('protocol', 'EIO: reconfig IP protocol error'),
              ('fifo', 'EIO: reconfig fifo overflow error'),
              ('timeout', 'ETIMEDOUT'))
    @ddt.unpack
    def test_failure_and_recovery(self, fault, said):
        before = self.start({'address': A, 'ports': 2})
        self.kernel.set_fault(A, pr_error=fault, pr_error_count=1)
        self.assertIn(said, self.fails())
        self.assertEqual(before, self.driver.discover())
        self.assertEqual(plain(FUNCTION), self.program())

    def test_recovery_enables_the_vfs_again(self):
        before = self.start({'address': A, 'ports': 3, 'vfs': 2})
        self.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.assertIn('recovered', self.fails(index=1))
        self.assertEqual(before, self.driver.discover())
        self.assertEqual(plain(FUNCTION), self.program(1))

    def test_no_recovery_while_a_guest_has_another_port(self):
        known = self.start({'address': A, 'ports': 2, 'vfs': 2})
        self.kernel.guest_takes(vf(A, 0))
        self.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        bitstream = self.driver.read_bitstream(
                self.host.gbs(), 'image 1')
        error = self.assertRaises(
            exception.ProgrammingFailed, self.driver.program, known[A],
            known[A].region(1), bitstream)
        self.assertIn('CRC', str(error))
        self.assertIn(vf(A, 0), str(error))
        first, second = self.driver.discover(known)[A].regions
        self.assertEqual(known[A].regions[0], first)
        self.assertEqual((QUARANTINED, [vf(A, 1)]),
                         (second.health, handles(second)))
        self.assertIn('bind it again', second.reason)
        # the guest goes, and the operator does what the reason says
        self.kernel.guest_returns(vf(A, 0))
        self.driver.recover(A)
        self.assertEqual(known, self.driver.discover(known))

    def test_port_disabled_by_an_earlier_failure(self):
        self.start({'address': A, 'ports': 2})
        self.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        parsed = self.driver.read_bitstream(
                self.host.gbs(), 'image 1')
        self.assertRaises(OSError, self.kernel.program_dfl_port, A, 0,
                          parsed.path, parsed.payload_offset,
                          parsed.payload_size)
        first, second = self.driver.discover()[A].regions
        self.assertEqual((QUARANTINED, OK), (first.health, second.health))
        self.assertIn('failed', first.reason)
        self.assertEqual(plain(FUNCTION), self.program())

    def test_payload_with_another_function(self):
        self.start({'address': A})
        said = self.fails(payload_function=OTHER)
        self.assertIn(plain(OTHER), said)
        self.assertEqual([plain(OTHER)], self.functions())

    def test_card_that_accepts_another_interface(self):
        self.start({'address': A})
        self.kernel.set_fault(A, accept_id=OTHER)
        self.assertIn('incompatible image', self.fails())
        self.assertEqual(plain(FUNCTION),
                         self.program(payload_interface=OTHER))

    def test_slow_programming_is_seen(self):
        self.start({'address': A, 'ports': 2, 'programming_seconds': 0.5},
                   {'address': B})
        seen = []
        parsed = self.driver.read_bitstream(
                self.host.gbs(), 'image 1')
        device = self.driver.discover()[A]
        worker = threading.Thread(target=self.driver.program, args=(
            device, device.region(0), parsed))
        worker.start()
        while worker.is_alive():
            found = self.driver.discover()
            seen.append(found[A].regions[0].reason)
            self.assertEqual([OK, OK], [found[A].regions[1].health,
                                        found[B].regions[0].health])
            time.sleep(0.02)
        worker.join()
        self.assertIn('it is being programmed', seen)
        self.assertEqual([plain(FUNCTION), FIRST], self.functions())

    def test_busy_card(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.dfl.BUSY_SECONDS', 1))
        before = self.start({'address': A, 'faults': {'busy': True}})
        self.assertIn('another process', self.fails())
        self.assertEqual(before, self.driver.discover())
        threading.Timer(0.3, self.kernel.set_fault, (A,),
                        {'busy': False}).start()
        self.assertEqual(plain(FUNCTION), self.program())

    def test_port_errors_are_cleared(self):
        self.start({'address': A, 'faults': {'port_errors': '0x4'}})
        path = (f'bus/pci/devices/{A}/fpga_region/'
                f'{self.kernel.listdir(f"bus/pci/devices/{A}/fpga_region")[0]}')
        port, = [name for name in self.kernel.listdir(path)
                 if name.startswith('dfl-port')]
        path = f'{path}/{port}/errors/errors'
        self.assertEqual('0x4', self.kernel.read(path))
        self.program()
        self.assertEqual('0x0', self.kernel.read(path))

    def test_fixed_device(self):
        self.start({'address': A})
        self.config.config(group='accel', fixed_devices=[A])
        self.assertIn('fixed_devices', self.fails())
        self.assertEqual([FIRST], self.functions())

    @ddt.data((A, 1, 0, 'vfio-pci'), (vf(A, 1), 2, 2, 'port 1'))
    @ddt.unpack
    def test_function_of_a_guest(self, taken, ports, vfs, said):
        device = self.start({'address': A, 'ports': ports, 'vfs': vfs})[A]
        self.kernel.guest_takes(taken)
        error = self.assertRaises(
            exception.ProgrammingFailed, self.driver.program, device,
            device.regions[-1],
            self.driver.read_bitstream(
                self.host.gbs(), 'image 1'))
        self.assertIn('nothing was done', str(error))
        self.assertIn(said, str(error))
        self.kernel.guest_returns(taken)
        self.assertEqual([FIRST] * ports, self.functions())

    def test_dead_card(self):
        device = self.start({'address': A})[A]
        self.kernel.set_fault(A, dead=True)
        error = self.assertRaises(
            exception.ProgrammingFailed, self.driver.program, device,
            device.regions[0], self.driver.read_bitstream(
                self.host.gbs(), 'image 1'))
        self.assertIn('does not answer', str(error))

    def test_file_that_went_away(self):
        device = self.start({'address': A})[A]
        parsed = self.driver.read_bitstream(
                self.host.gbs(), 'image 1')
        os.unlink(parsed.path)
        error = self.assertRaises(
            exception.ProgrammingFailed, self.driver.program, device,
            device.regions[0], parsed)
        self.assertIn('before it touched', str(error))
        self.assertEqual({A: device}, self.driver.discover())


@ddt.ddt
class Reset(TestCase):

    @ddt.data(0, 2)
    def test_port(self, vfs):
        """The port resets by its own function; the card answers by its PF,
        as the identifiers of a VF read 0xffff."""
        device = self.start({'address': A, 'ports': 2, 'vfs': vfs})[A]
        guest = vf(A, 1) if vfs else A
        self.kernel.guest_takes(guest)
        self.kernel.guest_writes(guest, registers='secret', memory='secret')
        self.kernel.guest_returns(guest)
        # the guest has caused them
        self.kernel.set_fault(A, port_errors='0x4')
        region = device.region(1 if vfs else 0)
        self.assertEqual('port reset',
                         self.driver.reset_region(device, region))
        ports = [self.kernel.read(f'{port.path}/errors/errors')
                 for port in self.driver._ports(
                     A, pci.virtual_functions(self.kernel, A))
                 if port.id == region.index]
        self.assertEqual(['0x0'], ports)
        self.kernel.guest_takes(guest)
        self.assertEqual({'memory': 'secret'}, self.kernel.guest_reads(guest))

    @ddt.data(0, 1)
    def test_port_that_stays_disabled(self, vfs):
        """A port that does not end in 1 ms, as while it works."""
        device = self.start({'address': A, 'vfs': vfs})[A]
        self.kernel.set_fault(A, port_reset='ETIMEDOUT')
        self.assertRaises(exception.DeviceError, self.driver.reset_region,
                          device, device.regions[0])
        self.kernel.set_fault(A, port_reset=None)
        # it is disabled, until dfl-pci is bound again
        self.assertEqual('port reset', self.driver.reset_region(
            device, device.regions[0]))
        self.assertEqual({A: device}, self.driver.discover({A: device}))

    def test_port_that_stays_disabled_beside_a_guest(self):
        device = self.start({'address': A, 'ports': 2, 'vfs': 2})[A]
        self.kernel.guest_takes(vf(A, 0))
        self.kernel.set_fault(A, port_reset='ETIMEDOUT')
        error = self.assertRaises(
            exception.DeviceError, self.driver.reset_region, device,
            device.regions[1])
        self.assertIn(f'{vf(A, 0)} of it may be in use', str(error))
        self.assertEqual('vfio-pci', pci.driver(self.kernel, vf(A, 0)))

    @ddt.data({'port_reset': 'ETIMEDOUT'}, {'dead': True})
    def test_failure(self, fault):
        device = self.start({'address': A})[A]
        self.kernel.set_fault(A, **fault)
        error = self.assertRaises(exception.DeviceError,
                                  self.driver.reset_region, device,
                                  device.region(0))
        self.assertIn('had to be reset, and that failed', str(error))
        self.assertIn('power-cycle', str(error))


TOP = f'devices/pci0000:5e/{A}'


@ddt.ddt
class RecordedTree(TestCase):
    """The tree of a card with two ports as Linux 6.12 makes it."""

    def setUp(self):
        super().setUp()
        self.root = self.useFixture(fixtures.TempDir()).path
        base = f'{TOP}/fpga_region/region0'
        fme = f'{base}/dfl-fme.0'
        for path, text in (
                ('vendor', '0x8086'), ('device', '0x09c4'),
                ('class', '0x120000'), ('numa_node', '-1'),
                ('config', '\x86\x80'), ('subsystem_device', '0x0000')):
            self.write(f'{TOP}/{path}', text)
        for path, text in (
                ('ports_num', '2'), ('bitstream_id', '0x123000200000185'),
                ('dfl-fme-mgr.0/fpga_manager/fpga0/state', 'unknown'),
                ('dfl-fme-mgr.0/fpga_manager/fpga0/status', '')):
            self.write(f'{fme}/{path}', text)
        for port in range(2):
            # regions of the FME are numbered on from the base region's
            self.write(f'{fme}/dfl-fme-region.{port + 2}/fpga_region/'
                       f'region{port + 1}/compat_id', INTERFACE)
            self.write(f'{base}/dfl-port.{port}/id', str(port))
            self.write(f'{base}/dfl-port.{port}/afu_id', FIRST)
        for link, target in (
                (f'bus/pci/devices/{A}', f'../../../{TOP}'),
                (f'{TOP}/driver', '../../../bus/pci/drivers/dfl-pci'),
                (f'{TOP}/iommu_group', '../../../kernel/iommu_groups/7'),
                (f'kernel/iommu_groups/7/devices/{A}', f'../../../../{TOP}'),
                (f'bus/pci/drivers/dfl-pci/{A}', f'../../../../{TOP}'),
                ('class/fpga_region/region0', f'../../{base}')):
            self.link(link, target)
        self.base, self.fme = base, fme
        self.driver = dfl.DflDriver(host_kernel.Kernel(self.root))

    def write(self, path, text):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w', encoding='latin-1') as file:
            file.write(f'{text}\n')

    def link(self, path, target):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.islink(path):
            os.unlink(path)
        os.symlink(target, path)

    def test_discover(self):
        device = self.driver.discover()[A]
        self.assertIn('several ports', device.reason)
        self.assertEqual((QUARANTINED, 'INTEL', 'PAC_ARRIA10', None),
                         (device.health, device.vendor, device.product,
                          device.numa_node))
        self.assertEqual([(0, INTERFACE, FIRST, [A]),
                          (1, INTERFACE, FIRST, [])],
                         [(r.index, r.region_type_uuid, r.function_uuid,
                           handles(r)) for r in device.regions])

    def test_uuids_in_other_spellings(self):
        self.write(f'{self.base}/dfl-port.0/afu_id',
                   'D8424DC4-A4A3-C413-F89E-433683F9040B')
        self.write(f'{self.fme}/dfl-fme-region.2/fpga_region/region1/'
                   f'compat_id', '9926AB6D-6C92-5A68-AABC-A7D84C545738')
        region = self.driver.discover()[A].regions[0]
        self.assertEqual((FIRST, INTERFACE),
                         (region.function_uuid, region.region_type_uuid))

    def test_port_numbers_are_not_the_order_of_names(self):
        self.write(f'{self.base}/dfl-port.0/id', '1')
        self.write(f'{self.base}/dfl-port.1/id', '0')
        self.write(f'{self.base}/dfl-port.1/afu_id', OTHER)
        self.assertEqual([plain(OTHER), FIRST], [
            r.function_uuid for r in self.driver.discover()[A].regions])

    def test_regions_of_one_fme_that_differ(self):
        self.write(f'{self.fme}/dfl-fme-region.2/fpga_region/region1/'
                   f'compat_id', OTHER)
        device = self.driver.discover()[A]
        self.assertEqual(QUARANTINED, device.health)
        self.assertIn('compat_id', device.reason)

    @ddt.data(('1c2c', '1000', '', 'SILICOM', 'N5010'),
              ('1c2c', '1001', '', 'SILICOM', 'N5011'),
              ('8086', 'bcce', '138d', 'INTEL', 'PAC_D5005'),
              ('8086', 'bcce', '17d4', 'INTEL', 'C6100'),
              ('8086', 'bcce', '9999', 'INTEL', 'DFL'),
              ('8086', 'bcc0', '', 'INTEL', 'INTEGRATED_6'))
    @ddt.unpack
    def test_product(self, vendor, device, board, name, product):
        self.write(f'{TOP}/vendor', f'0x{vendor}')
        self.write(f'{TOP}/device', f'0x{device}')
        self.write(f'{TOP}/subsystem_device', f'0x{board}')
        found = self.driver.discover()[A]
        self.assertEqual((name, product, vendor, device),
                         (found.vendor, found.product, found.vendor_id,
                          found.product_id))

    @ddt.data('09c5', '10c9')
    def test_ids_that_are_not_ours(self, device):
        self.write(f'{TOP}/device', f'0x{device}')
        self.assertEqual({}, self.driver.discover())

    def test_dead_card_whose_ids_read_as_ones(self):
        known = self.driver.discover()
        self.write(f'{TOP}/vendor', '0xffff')
        self.write(f'{TOP}/device', '0xffff')
        found = self.driver.discover(known)[A]
        self.assertEqual((QUARANTINED, known[A].regions, 'PAC_ARRIA10'),
                         (found.health, found.regions, found.product))

    def test_no_sysfs(self):
        driver = dfl.DflDriver(host_kernel.Kernel(f'{self.root}/none'))
        self.assertRaises(exception.DeviceError, driver.discover)
