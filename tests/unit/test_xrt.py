# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The XRT driver on simulated hosts."""

import dataclasses
import errno
import threading

import ddt
import fixtures
import testtools

from nova_accel.drivers import base
from nova_accel.drivers import xrt
from nova_accel import exception
from nova_accel import model
from tests.unit import configured
from tests.unit.host import (A, B, FUNCTION, INTERFACE, OTHER, plain, SHELL,
                             SimulatedHost)

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED
USER = f'{A[:-1]}1'
#: requests by which a guest changes the card: LOAD_XCLBIN_SLOT_KADDR,
#: READ_P2P_BAR_ADDR, PROGRAM_SHELL, RECLOCK, LOAD_XCLBIN_KADDR, HOT_RESET
CLOSED = '0x2c2a0'
#: and LOAD_SLOT_XCLBIN and LOAD_XCLBIN, which load the host's file otherwise
ALL_CLOSED = '0x6c3a0'


class TestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.xrt.READY_SECONDS', 0.1))

    def start(self, *cards, **more):
        cards = [{'programming_seconds': 0, **c} for c in cards]
        self.host = self.useFixture(SimulatedHost(alveos=cards, **more))
        self.kernel = self.host.kernel
        self.driver = xrt.XrtDriver(self.kernel)
        return self.driver.discover()

    def region(self, known=None, address=A):
        return self.driver.discover(known)[address].regions[0]

    def quarantined(self, part, known=None, address=A):
        device = self.driver.discover(known)[address]
        self.assertEqual(QUARANTINED, device.health)
        self.assertIn(part, device.reason)
        return device

    def program(self, known, function=FUNCTION, **file):
        device = known[A]
        found = self.driver.program(
            device, device.regions[0], self.driver.read_bitstream(
                self.host.xclbin(function, **file)))
        # as the inventory remembers it
        return {A: device.with_region(0, function_uuid=found)}


class SerialTest(TestCase):

    def test_of_the_controller_of_the_card(self):
        self.start({'address': A, 'device_serial': '21770205K01Y'})
        self.assertEqual('21770205K01Y', self.driver.serial(A))

    def test_not_told(self):
        self.start({'address': A})
        self.assertIsNone(self.driver.serial(A))


@ddt.ddt
class Discovery(TestCase):

    def test_a_card(self):
        device = self.start({'address': A, 'numa_node': 1,
                             'function': FUNCTION})[A]
        self.assertEqual(
            ('FPGA', 'XILINX', 'U250', 'ALVEO', '10ee', '5004', 'xrt', 1,
             (('DDR', 65536),), OK, ()),
            (device.type, device.vendor, device.product, device.family,
             device.vendor_id, device.product_id, device.driver,
             device.numa_node, device.memory, device.health,
             device.handles))
        region, = device.regions
        # nothing but the user function is ever given away
        handle, = region.handles
        self.assertEqual(
            (USER, model.HandleType.PCI, True, ()),
            (handle.address, handle.type, handle.managed, handle.companions))
        self.assertEqual((0, SHELL, plain(FUNCTION), True, False, OK, ''),
                         (region.index, region.region_type_uuid,
                          region.function_uuid, region.programmable,
                          region.guest_can_reprogram, region.health,
                          region.reason))
        self.assertEqual({A, USER}, device.functions())

    def test_shell(self):
        logic = self.start({'address': A})[A].shell_id
        lines = self.kernel.read(
            f'bus/pci/devices/{A}/logic_uuids').split()
        self.assertEqual((2, logic), (len(lines), lines[-1]))

    @ddt.data(('U200', 'ALVEO', (('DDR', 65536),)),
              ('U280', 'ALVEO', (('DDR', 32768), ('HBM', 8192))),
              ('U50', 'ALVEO', (('HBM', 8192),)), ('V70', 'VERSAL', ()))
    @ddt.unpack
    def test_products(self, product, family, memory):
        device = self.start({'address': A, 'product': product})[A]
        self.assertEqual((product, family, memory),
                         (device.product, device.family, device.memory))

    @ddt.data(('006c', '0065'), ('0078', '0077'))
    @ddt.unpack
    def test_user_function_by_its_id(self, management, user):
        """devices.h of XRT: not the next number."""
        self.start({'address': A, 'user_driver': 'vfio-pci'})
        read = self.kernel.read
        changed = {f'{A}/vendor': '0x13fe', f'{USER}/vendor': '0x13fe',
                   f'{A}/device': f'0x{management}',
                   f'{USER}/device': f'0x{user}'}

        def other(path):
            return changed.get(path.removeprefix('bus/pci/devices/')
                               ) or read(path)
        self.kernel.read = other
        self.assertEqual(OK, self.driver.discover()[A].health)
        changed[f'{USER}/device'] = '0x006d'
        self.quarantined('is 13fe:006d and not its user function')

    def test_v80(self):
        """It is sold with AVED: XRT's remedies do not help."""
        self.start({'address': A, 'faults': {'attributes': {
            'device': '0x50b4'}}}, {'address': B})
        self.start({'address': A, 'driver': None, 'faults': {'attributes': {
            'device': '0x50b4'}}})
        device = self.quarantined('driver ami')
        self.assertEqual('V80', device.product)
        self.assertNotIn('bind it to', device.reason)

    def test_unknown_card_with_the_marker(self):
        device = self.start({'address': A, 'faults': {'attributes': {
            'device': '0x57f0'}}})[A]
        self.assertEqual(('XRT_57F0', None, OK),
                         (device.product, device.family, device.health))

    def test_others(self):
        self.assertEqual({}, self.start(others=[
            {'address': A, 'vendor': '10ee', 'device': '9048'}]))

    @ddt.data(('mgmt_pf', 'missing', 'not flashed with an XRT shell'),
              ('ready', '0', 'could not start it'),
              ('dev_offline', '1', 'offline'),
              ('mfg', '1', 'sold with'), ('recovery', '1', 'recovery image'),
              ('ready', 'EIO', 'cannot be read'),
              ('ready', 'yes', 'cannot be read'),
              ('ready', '', 'cannot be read'),
              ('user_pf', 'missing', 'has no user_pf'),
              ('device_bad_state', '1', 'bad state'),
              ('interface_uuids', 'x', 'cannot be read'),
              ('interface_uuids', 'EIO', 'cannot be read'),
              ('xclbinuuid', '123', 'cannot be read'))
    @ddt.unpack
    def test_defects(self, name, value, part):
        known = self.start({'address': A, 'function': FUNCTION},
                           {'address': B})
        self.kernel.set_fault(A, attributes={name: value})
        device = self.quarantined(part, known)
        self.assertEqual(known[A].regions, device.regions)
        self.assertEqual(OK, self.driver.discover()[B].health)
        self.kernel.set_fault(A, attributes=None)
        self.assertEqual(known, self.driver.discover(known))

    @ddt.data('mfg', 'recovery', 'dev_offline', 'ready', 'device_bad_state',
              'logic_uuids', 'numa_node', 'ip_layout')
    def test_attributes_that_may_be_missing(self, name):
        self.start({'address': A, 'function': FUNCTION})
        self.kernel.set_fault(A, attributes={name: 'missing'})
        device = self.driver.discover()[A]
        self.assertEqual((OK, plain(FUNCTION)),
                         (device.health, device.regions[0].function_uuid))

    def test_not_flashed(self):
        self.start({'address': A, 'flashed': False})
        self.quarantined('not flashed with an XRT shell')

    def test_management_function_without_its_driver(self):
        known = self.start({'address': A})
        for driver in (None, 'vfio-pci'):
            self.start({'address': A, 'driver': driver})
            device = self.quarantined('keep it there', known)
            self.assertEqual(known[A].regions, device.regions)

    def test_dead(self):
        known = self.start({'address': A})
        self.kernel.set_fault(A, dead=True)
        self.quarantined('does not answer on the PCI bus', known)

    def test_gone(self):
        known = self.start({'address': A}, {'address': B})
        self.kernel.set_fault(A, vanish=True)
        self.assertEqual({B: known[B]}, self.driver.discover(known))

    def test_user_function_that_is_none(self):
        known = self.start({'address': A, 'user_driver': 'vfio-pci'})
        self.assertEqual(OK, known[A].health)
        self.kernel.set_fault(A, attributes={'device': '0x5020'})
        self.quarantined('and not its user function 10ee:5021')

    def test_shell_without_uuids(self):
        for value in ('EINVAL', '', 'missing'):
            self.start({'address': A, 'faults': {
                'attributes': {'interface_uuids': value}}})
            region = self.region()
            self.assertEqual((None, False, OK),
                             (region.region_type_uuid, region.programmable,
                              region.health))

    def test_base_without_shell(self):
        self.start({'address': A, 'interfaces': [INTERFACE]})
        self.assertEqual(INTERFACE, self.region().region_type_uuid)

    def test_uuids_in_any_spelling(self):
        dashed = '862C7020-A250-293E-3203-6F19956669E5'
        self.start({'address': A, 'faults': {
            'attributes': {'interface_uuids': f'{INTERFACE}\n{dashed}'}}})
        self.assertEqual(SHELL, self.region().region_type_uuid)

    @ddt.data('', '\n', '00000000-0000-0000-0000-000000000000')
    def test_nothing_loaded(self, shown):
        self.start({'address': A,
                    'faults': {'attributes': {'xclbinuuid': shown}}})
        self.assertIsNone(self.region().function_uuid)

    def test_several_slots(self):
        self.start({'address': A, 'faults': {
            'attributes': {'xclbinuuid': f'{FUNCTION}\n{OTHER}'}}})
        self.assertEqual(plain(FUNCTION), self.region().function_uuid)

    def test_group_with_the_management_function(self):
        self.start({'address': A, 'iommu_group': 7, 'user_iommu_group': 7})
        region = self.region()
        self.assertEqual((OK, ()), (region.health, region.handles))
        self.assertIn(f'IOMMU group with {A}, which the driver xclmgmt',
                      region.reason)

    def test_fixed(self):
        self.config.config(group='accel', fixed_devices=[A.upper()])
        self.assertFalse(self.start({'address': A})[A].regions[0].programmable)

    @ddt.data(('0x0', CLOSED), ('0x40120', ALL_CLOSED), (CLOSED, CLOSED),
              ('0x6c3a2', '0x6c3a2'), ('0x10', '0x2c2b0'))
    @ddt.unpack
    def test_mailbox_is_closed(self, before, after):
        self.start({'address': A, 'mailbox_disabled': before})
        self.assertFalse(self.region().guest_can_reprogram)
        self.assertEqual(after, self.kernel.read(
            f'bus/pci/devices/{A}/config_mailbox_channel_disable'))
        # closed already, xclmgmt does not fetch, and loads nothing either
        self.assertEqual(str(int(before != '0x6c3a2')), self.kernel.read(
            f'bus/pci/devices/{A}/config_xclbin_change'))

    def test_driver_that_cannot_fetch(self):
        self.start({'address': A, 'faults': {
            'attributes': {'config_xclbin_change': 'missing'}}})
        self.assertFalse(self.region().guest_can_reprogram)
        self.assertEqual(ALL_CLOSED, self.kernel.read(
            f'bus/pci/devices/{A}/config_mailbox_channel_disable'))

    @ddt.data(('0x0', True), ('0x40120', True), ('0x4c320', True),
              ('0x44180', True),
              ('0x64180', False), (CLOSED, True), (ALL_CLOSED, False))
    @ddt.unpack
    def test_mailbox_that_the_operator_leaves_open(self, disabled, is_open):
        self.config.config(group='accel', whole_cards=[A])
        device = self.start({'address': A, 'mailbox_disabled': disabled})[A]
        self.assertEqual((OK, is_open), (
            device.health, device.regions[0].guest_can_reprogram))
        self.assertEqual(disabled, self.kernel.read(
            f'bus/pci/devices/{A}/config_mailbox_channel_disable'))

    # fault -> what is said, and whether the mailbox is known to be open
    @ddt.data(({'mailbox': 'EACCES'}, 'Permission denied'),
              ({'mailbox': 'ignored'}, 'it is 0x100 after that'),
              ({'attributes': {'config_mailbox_channel_disable': 'missing'}},
               'No such file'))
    @ddt.unpack
    def test_mailbox_that_cannot_be_closed(self, fault, part):
        known = self.start({'address': A, 'mailbox_disabled': '0x100',
                            'faults': fault}, {'address': B})
        device = self.quarantined(part, known)
        for said in ('0x2c2a0 could not', 'config_mailbox_channel_disable',
                     '[accel] whole_cards'):
            self.assertIn(said, device.reason)
        region, = device.regions
        self.assertTrue(region.guest_can_reprogram)
        self.assertEqual(OK, known[B].health)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.driver.prepare, device,
            region.handles[0], None, True, base.Use())
        self.assertIn('retried on another host', str(error))
        # a server that has it may start
        self.driver.prepare(device, region.handles[0], None, False, base.Use())
        self.config.config(group='accel', whole_cards=[A])
        self.assertEqual(OK, self.driver.discover()[A].health)

    @ddt.data({}, {'attributes': {'dev_offline': '1'}}, {'dead': True})
    def test_mailbox_is_found_open_before_it_is_closed(self, fault):
        """Also where the card is not well, as while it is reset."""
        known = self.start({'address': A})
        self.kernel.opens_mailbox(A)
        self.kernel.set_fault(A, **fault)
        for _ in range(2):
            found = self.driver.examine(A, known[A])
            self.assertTrue(found.regions[0].guest_can_reprogram)
        region, = self.driver.confine(found).regions
        self.assertFalse(region.guest_can_reprogram)
        region, = self.driver.examine(A, known[A]).regions
        self.assertFalse(region.guest_can_reprogram)

    def test_state(self):
        self.start({'address': A})
        before = self.driver.state(A)
        self.assertEqual(before, self.driver.state(A))
        self.kernel.opens_mailbox(A)
        states = [before, self.driver.state(A), self.driver.state(A)]
        # until a look has closed it
        self.assertEqual(3, len(set(states)))
        self.driver.discover()
        self.assertEqual(before, self.driver.state(A))

    def test_fingerprint(self):
        self.start({'address': A})
        before = self.driver.fingerprint()
        self.assertEqual(before, self.driver.fingerprint())
        self.kernel.guest_takes(USER)
        self.assertNotEqual(before, self.driver.fingerprint())

    def test_user_function_that_is_late(self):
        known = self.start({'address': A, 'ready_seconds': 0.3})
        self.kernel.guest_takes(USER)
        self.kernel.guest_returns(USER)
        self.quarantined(f'its user function {USER} is not ready', known)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.xrt.READY_SECONDS', 60))
        self.assertEqual(known, self.driver.discover(known))


class Known(TestCase):
    """What is loaded, when nobody shows it."""

    def test_guest_has_it(self):
        known = self.program(self.start({'address': A}))
        self.kernel.guest_takes(USER)
        self.assertEqual(known, self.driver.discover(known))
        # never seen with its own driver: all but the function is known
        region = self.region()
        self.assertEqual((None, [USER], OK),
                         (region.function_uuid,
                          [h.address for h in region.handles], region.health))

    def test_bound_anew(self):
        known = self.program(self.start({'address': A}))
        self.kernel.guest_takes(USER)
        self.kernel.guest_returns(USER)
        self.assertEqual('', self.kernel.read(
            f'bus/pci/devices/{USER}/xclbinuuid'))
        self.assertEqual(known, self.driver.discover(known))

    def test_reboot(self):
        known = self.start({'address': A, 'function': FUNCTION})
        self.kernel.reboot()
        self.assertIsNone(self.region(known).function_uuid)

    def test_reboot_with_the_user_function_on_vfio(self):
        self.start({'address': A, 'user_driver': 'vfio-pci'})
        known = self.program(self.driver.discover())
        self.assertEqual(known, self.driver.discover(known))
        self.kernel.reboot()
        self.assertIsNone(self.region(known).function_uuid)

    def test_versal_does_not_say(self):
        known = self.program(self.start({'address': A, 'product': 'V70'}),
                             versal=True)
        self.assertEqual(plain(FUNCTION), known[A].regions[0].function_uuid)
        self.assertIsNone(self.region(known).function_uuid)


@ddt.ddt
class Programming(TestCase):

    def test_programmed(self):
        known = self.program(self.start({'address': A}))
        self.assertEqual(plain(FUNCTION), known[A].regions[0].function_uuid)
        self.assertEqual(known, self.driver.discover(known))

    def test_user_function_on_vfio(self):
        self.start({'address': A, 'user_driver': 'vfio-pci'})
        known = self.program(self.driver.discover())
        self.assertEqual(known, self.driver.discover(known))

    def test_what_xocl_shows_would_be_wrong(self):
        known = self.start({'address': A})
        self.kernel.xocl_programs(USER, self.host.xclbin(OTHER))
        known = self.driver.discover(known)
        self.assertEqual(plain(OTHER), known[A].regions[0].function_uuid)
        known = self.program(known)
        self.assertEqual(plain(FUNCTION), self.region(known).function_uuid)

    def refused(self, error, known=None, **file):
        known = known or self.driver.discover()
        text = str(self.assertRaises(error, self.program, known, **file))
        self.assertIn(f'region0 of {A} had to be programmed with '
                      f'{FUNCTION}', text)
        self.assertLessEqual(len(text), 255)
        self.assertThat(text, testtools.matchers.EndsWith('.'))
        return text

    def test_another_shell(self):
        known = self.start({'address': A, 'function': OTHER})
        text = self.refused(exception.IncompatibleBitstream, known,
                            interface=INTERFACE)
        self.assertIn(INTERFACE, text)
        self.assertIn(SHELL, text)
        self.assertEqual(known, self.driver.discover(known))

    def test_shell_changed_since(self):
        known = self.start({'address': A})
        self.kernel.set_fault(A, attributes={'interface_uuids': INTERFACE})
        self.refused(exception.IncompatibleBitstream, known)

    def test_header_that_lies(self):
        known = self.start({'address': A})
        text = self.refused(exception.ProgrammingFailed, known,
                            payload_interface=INTERFACE)
        self.assertIn('EINVAL', text)
        self.assertIn('not for the card\'s shell', text)

    @ddt.data('EACCES', 'EBUSY', 'EINVAL', 'EKEYREJECTED', 'ENOTTY',
              'EOPNOTSUPP', 'ENODEV')
    def test_refusals(self, name):
        known = self.start({'address': A, 'faults': {'program_error': name}})
        text = self.refused(exception.ProgrammingFailed, known)
        number = errno.errorcode[getattr(errno, name)]
        self.assertIn(f'xclmgmt refuses it ({number}): '
                      f'{xrt._REFUSALS[getattr(errno, name)]};', text)

    def test_interface_that_the_kernel_does_not_find(self):
        known = self.start({'address': A,
                            'faults': {'program_error': 'ENOENT'}})
        self.refused(exception.IncompatibleBitstream, known)

    def test_failure(self):
        known = self.program(self.start({'address': A}), OTHER)
        self.kernel.set_fault(A, program_error='EIO')
        text = self.refused(exception.ProgrammingFailed, known)
        self.assertIn('the card failed (EIO)', text)
        # neither the old nor the new function is there
        region = self.region(known)
        self.assertEqual((None, OK), (region.function_uuid, region.health))
        self.kernel.set_fault(A, program_error=None)
        self.assertEqual(plain(FUNCTION),
                         self.region(self.program(known)).function_uuid)

    def test_card_that_is_not_in_order(self):
        known = self.start({'address': A})
        for fault, part in (({'dead': True}, 'does not answer'),
                            ({'attributes': {'dev_offline': '1'}}, 'offline'),
                            ({'attributes': {'ready': 'EIO'}}, 'Input/output'),
                            ({'vanish': True}, 'No such file')):
            self.kernel.set_fault(A, **fault)
            text = self.refused(exception.ProgrammingFailed, known)
            self.assertIn('nothing was done because', text)
            self.assertIn(part, text)
            self.kernel.set_fault(A, **dict.fromkeys(fault))

    def test_fixed(self):
        known = self.start({'address': A})
        self.config.config(group='accel', fixed_devices=[A])
        self.assertIn('fixed_devices', self.refused(
            exception.ProgrammingFailed, known))
        self.assertIsNone(self.region(known).function_uuid)

    def test_something_else_is_read_back(self):
        known = self.start({'address': A})
        self.kernel.set_fault(A, attributes={'xclbinuuid': OTHER})
        text = self.refused(exception.ProgrammingFailed, known)
        self.assertIn(f'now shows {OTHER}', text)
        # another that has other kernels
        host, device = self.host, known[A]
        self.kernel.set_fault(A, attributes=None)
        path = host.xclbin(FUNCTION, kernels=('vadd',))
        bitstream = self.driver.read_bitstream(path)
        program = self.kernel.program_xclbin

        def others_too(function, path, size):
            program(function, path, size)
            self.kernel.xocl_programs(USER, host.xclbin(
                FUNCTION, kernels=('miner',)))
        self.kernel.program_xclbin = others_too
        text = str(self.assertRaises(
            exception.ProgrammingFailed, self.driver.program, device,
            device.regions[0], bitstream))
        self.assertLessEqual(len(text), 255)
        self.assertIn('shows the kernels miner:miner_1, the file has '
                      'vadd:vadd_1', text)

    def test_layout_of_more_than_a_page(self):
        known = self.start({'address': A})
        kernels = [f'kernel_{n}' for n in range(80)]
        self.assertEqual(
            plain(FUNCTION), self.program(
                known, kernels=kernels)[A].regions[0].function_uuid)

    def test_file_that_goes_away(self):
        known = self.start({'address': A})
        device = known[A]
        bitstream = dataclasses.replace(
            self.driver.read_bitstream(self.host.xclbin()), path='/nowhere')
        self.assertRaises(exception.AcceleratorError, self.driver.program,
                          device, device.regions[0], bitstream)

    def test_hang(self):
        known = self.start({'address': A, 'faults': {'hang': 'program'}})
        failed = []

        def program():
            try:
                self.program(known)
            except exception.ProgrammingFailed as error:
                failed.append(str(error))
        thread = threading.Thread(target=program)
        thread.start()
        thread.join(0.3)
        self.assertTrue(thread.is_alive())
        self.kernel.set_fault(A, hang=None)
        thread.join(10)
        self.assertIn('ETIMEDOUT', failed[0])

    def test_killed_meanwhile(self):
        known = self.start({'address': A, 'programming_seconds': 0.3})
        path = self.host.xclbin()
        thread = threading.Thread(
            target=self.kernel.program_xclbin,
            args=(A, path, self.driver.read_bitstream(path).payload_size))
        thread.start()
        thread.join(0.1)
        # neither the old function nor the new one
        self.assertIsNone(self.region(known).function_uuid)
        thread.join()


@ddt.ddt
class Mailbox(TestCase):
    """Guests that have the card programmed themselves."""

    def test_open(self):
        self.config.config(group='accel', whole_cards=[A])
        known = self.program(self.start({'address': A}))
        self.kernel.guest_takes(USER)
        self.kernel.guest_programs(USER, self.host.xclbin(
            OTHER, kernels=('miner',)))
        self.kernel.guest_returns(USER)
        # the driver cannot know, and so says that somebody has to ask
        self.assertTrue(self.region(known).guest_can_reprogram)

    def guest_loads(self, function, user=USER, **file):
        """A guest's application opens a function: stripped files will do."""
        self.kernel.guest_programs(user, self.host.xclbin(
            function, stripped=True, **file))

    def refused(self, number, *args, **file):
        self.assertEqual(number, self.assertRaises(
            OSError, self.guest_loads, *args, **file).errno)

    def test_what_the_card_carries(self):
        known = self.program(self.start({'address': A}))
        for _ in range(2):
            self.kernel.guest_takes(USER)
            # what the guest sends is not what is loaded
            self.guest_loads(FUNCTION, kernels=('miner',))
            self.refused(errno.ENOENT, OTHER)
            self.kernel.guest_returns(USER)
            region = self.region(known)
            self.assertEqual((plain(FUNCTION), False),
                             (region.function_uuid,
                              region.guest_can_reprogram))
        known = self.program(known, OTHER)
        self.kernel.guest_takes(USER)
        self.guest_loads(OTHER)
        self.refused(errno.ENOENT, FUNCTION)

    @ddt.data('0x6c3a2', ALL_CLOSED)
    def test_operator_has_closed_them(self, mask):
        known = self.program(self.start({'address': A,
                                         'mailbox_disabled': mask}))
        self.kernel.guest_takes(USER)
        self.refused(errno.ETIMEDOUT, FUNCTION)
        found, = self.driver.check(known[A])
        self.assertIn('have no compute units', found.found)
        self.assertIn('write 0x2c2a0 to its config_mailbox', found.remedy)

    def test_two_cards(self):
        known = self.start({'address': A}, {'address': B})
        other, user = known[B], f'{B[:-1]}1'
        for function in (FUNCTION, OTHER):
            self.driver.program(
                other, other.regions[0], self.driver.read_bitstream(
                    self.host.xclbin(function, kernels=(function[:4],))))
            known = self.program(known, FUNCTION)
            self.kernel.guest_takes(USER, user)
            self.guest_loads(FUNCTION)
            self.guest_loads(function, user)
            self.kernel.guest_returns(USER)
            self.kernel.guest_returns(user)
        # files are offered by the host, and not by card: it is noticed
        self.assertEqual(plain(FUNCTION), self.region(known).function_uuid)
        self.kernel.guest_takes(USER)
        before = self.driver.state(A)
        self.guest_loads(OTHER)
        self.assertNotEqual(before, self.driver.state(A))
        self.assertIsNone(self.region(known).function_uuid)
        self.assertEqual((), tuple(self.driver.check()))

    def test_function_that_is_not_offered(self):
        """A guest could not use what is there: it is programmed again."""
        known = self.program(self.start({'address': A}))
        self.kernel.withdraw_xclbin(A)
        found, = self.driver.check(known[A])
        self.assertIn(f'xilinx/xclbins/{FUNCTION}_{SHELL}.xclbin',
                      found.remedy)
        self.assertIsNone(self.region(known).function_uuid)
        self.assertEqual([], list(self.driver.check(self.program(known)[A])))

    def test_file_cannot_be_placed(self):
        known = self.program(self.start({'address': A}))
        self.kernel.set_fault(A, firmware='EROFS')
        error = self.assertRaises(exception.ProgrammingFailed, self.program,
                                  known, OTHER)
        self.assertIn('/lib/firmware/xilinx/xclbins', str(error))
        self.assertEqual(plain(FUNCTION), self.region(known).function_uuid)

    def test_card_that_fails(self):
        known = self.program(self.start({'address': A}))
        self.kernel.set_fault(A, program_error='EIO')
        self.assertRaises(exception.ProgrammingFailed, self.program, known,
                          OTHER)
        self.kernel.set_fault(A, program_error=None)
        self.kernel.guest_takes(USER)
        for function in (FUNCTION, OTHER):
            self.refused(errno.ENOENT, function)

    def test_whole_card_offers_nothing(self):
        self.config.config(group='accel', whole_cards=[A])
        known = self.program(self.start({'address': A}))
        self.assertFalse(self.kernel.offers_xclbin(FUNCTION, SHELL))
        self.assertEqual(plain(FUNCTION), self.region(known).function_uuid)
        self.assertEqual([], list(self.driver.check(known[A])))
