# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The QAT driver on simulated hosts."""

import errno
import threading
import time

import ddt
import fixtures

from nova_accel.drivers import base
from nova_accel.drivers import qat
from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel import sim
from tests.unit import configured
from tests.unit.host import SimulatedHost

OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED
A, B = '0000:6b:00.0', '0000:70:00.0'
VFS = [f'0000:6b:{n >> 3:02x}.{n & 7}' for n in range(1, 17)]


def traits(*services):
    return tuple(sorted(naming.property_trait('QAT', 'SERVICE', service)
                        for service in services))


class TestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.qat.HEARTBEAT_SECONDS', 0.25))

    def start(self, *cards, **more):
        self.host = self.useFixture(SimulatedHost(
            qats=list(cards), **more))
        self.kernel = self.host.kernel
        self.driver = qat.QatDriver(self.kernel)

    def discover(self, known=None):
        found = self.driver.discover(known)
        for device in found.values():
            self.assertLess(len(device.reason), 256)
        return found

    def device(self, known=None):
        """The only one there is."""
        device, = self.discover(known).values()
        return device

    def again(self):
        """As nova-compute looks, which has seen the card before."""
        return self.device(self.discover())

    def assertQuarantined(self, device, *words):
        self.assertEqual(QUARANTINED, device.health)
        for word in words:
            self.assertIn(word, device.reason)

    def read(self, attribute, address=A):
        return self.kernel.read(f'bus/pci/devices/{address}/{attribute}')

    def configure(self, services=(), vfs=()):
        self.config.config(group='accel', qat_services=list(services),
                           virtual_functions=list(vfs))
        self.driver.configure()

    def refused(self, kind, services=(), vfs=()):
        """What configure() says."""
        error = self.assertRaises(kind, self.configure, services, vfs)
        self.assertLess(len(str(error)), 256)
        return str(error)


@ddt.ddt
class Discovery(TestCase):

    def test_vfs_are_the_inventory_of_their_pf(self):
        self.start({'address': A, 'vfs': 1, 'numa_node': 1})
        device = self.device()
        self.assertEqual(
            ('QAT', 'INTEL', '4XXX', 'GEN4', '8086', '4940', 'qat', 1, OK, ''),
            (device.type, device.vendor, device.product, device.family,
             device.vendor_id, device.product_id, device.driver,
             device.numa_node, device.health, device.reason))
        # the kernel makes all, whatever the number
        self.assertEqual(VFS, [h.address for h in device.handles])
        self.assertEqual({A}, {h.parent for h in device.handles})
        self.assertEqual(traits('asym', 'sym'), device.traits)

    @ddt.data(('DH895XCC', 'GEN2', 32), ('C62X', 'GEN2', 16),
              ('C3XXX', 'GEN2', 16), ('4XXX', 'GEN4', 16),
              ('420XX', 'GEN4', 16), ('6XXX', 'GEN6', 16))
    @ddt.unpack
    def test_products(self, product, family, vfs):
        self.start({'address': A, 'product': product, 'vfs': 1},
                   disable_denylist=True)
        device = self.device()
        self.assertEqual((product, family, vfs, OK),
                         (device.product, device.family, len(device.handles),
                          device.health))
        self.assertEqual(
            {'CUSTOM_QAT_INTEL', f'CUSTOM_QAT_INTEL_{product}',
             f'CUSTOM_QAT_INTEL_{family}', *device.traits, 'OWNER_CYBORG'},
            naming.device_traits(device))

    def test_generation_without_settings_says_nothing_of_services(self):
        self.start({'address': A, 'product': 'C62X', 'vfs': 16},
                   disable_denylist=True)
        self.assertEqual((), self.device().traits)

    def test_order_of_services_means_nothing(self):
        self.start({'address': A, 'vfs': 16},
                   {'address': B, 'vfs': 16, 'services': 'asym;sym'})
        found = self.discover()
        self.assertEqual(found[A].traits, found[B].traits)

    def test_service_that_only_a_newer_kernel_has(self):
        self.start({'address': A, 'vfs': 16})
        self.kernel.set_fault(A, attributes={'cfg_services': 'sym;kpt2'})
        device = self.again()
        self.assertEqual(traits('kpt2', 'sym'), device.traits)
        self.kernel.set_fault(A, attributes={})
        device = self.device({A: device})
        self.assertEqual(traits('asym', 'sym'), device.traits)
        # so that the trait of what it does not any more is taken away
        self.assertLessEqual({*traits('kpt2', 'dcc', 'decomp', 'dc')},
                             {*device.state_traits})

    def test_pf_without_vfs_stays_with_the_host(self):
        self.start({'address': A})
        device = self.device()
        self.assertEqual(((), traits('asym', 'sym')),
                         (device.handles, device.traits))
        self.assertQuarantined(device, '[accel] virtual_functions')

    def test_vfs_that_are_gone_are_not_shown_any_more(self):
        self.start({'address': A, 'vfs': 16})
        known = self.discover()
        self.kernel.set_numvfs(A, 0)
        self.assertEqual((), self.device(known).handles)

    def test_vf_whose_pf_is_gone_is_no_device(self):
        self.start(others=[{'address': A, 'device': '4941',
                            'driver': '4xxxvf', 'class': '0x0b4000'}])
        self.assertEqual({}, self.discover())

    @ddt.data('vfio-pci', None)
    def test_pf_that_the_host_does_not_drive(self, driver):
        self.start({'address': A})
        self.kernel.rebind(A, driver)
        self.assertQuarantined(
            self.device(), driver or 'no driver', 'bind it to 4xxx')

    # a kernel that is too old for a card leaves it without a driver
    @ddt.data(('420XX', '420xx (Linux 6.8 or later)'),
              ('6XXX', '6xxx (Linux 6.16 or later)'), ('C62X', 'c6xx'))
    @ddt.unpack
    def test_kernel_that_is_too_old(self, product, driver):
        self.start({'address': A, 'product': product, 'driver': None})
        reason = self.device().reason
        self.assertTrue(reason.endswith(f'bind it to {driver}'), reason)

    def test_vf_that_a_guest_has(self):
        self.start({'address': A, 'vfs': 16})
        known = self.discover()
        self.kernel.guest_takes(VFS[3])
        self.assertEqual(known, self.discover(known))

    def test_iommu(self):
        self.start({'address': A, 'vfs': 16}, iommu=False)
        device = self.device()
        self.assertEqual((), device.handles)
        self.assertQuarantined(device, 'IOMMU')

    def test_deny_list_of_vfio(self):
        self.start({'address': A, 'product': 'C62X', 'vfs': 16})
        device = self.device()
        self.assertEqual((), device.handles)
        self.assertQuarantined(device, 'deny-list', 'disable_denylist=1')
        # which is what the kernel does
        self.assertEqual(errno.EINVAL, self.assertRaises(
            OSError, self.kernel.guest_takes, VFS[0]).errno)

    def test_deny_list_switched_off(self):
        self.start({'address': A, 'product': 'C62X', 'vfs': 16},
                   disable_denylist=True)
        self.assertEqual(16, len(self.device().handles))
        self.kernel.guest_takes(VFS[0])

    @ddt.data((True, 16), (False, 0))
    @ddt.unpack
    def test_deny_list_of_another_kernel(self, loaded, handles):
        """Linux before 5.9 has none; a module that is not loaded yet may."""
        self.start({'address': A, 'product': 'C62X', 'vfs': 16})

        def read(path):
            if path.startswith('module'):
                raise FileNotFoundError(path)
            return type(self.kernel).read(self.kernel, path)
        self.useFixture(fixtures.MockPatchObject(self.kernel, 'read', read))

        def exists(path):
            return loaded if path.startswith('module') else type(
                self.kernel).exists(self.kernel, path)
        self.useFixture(fixtures.MockPatchObject(
            self.kernel, 'exists', exists))
        self.assertEqual(handles, len(self.device().handles))

    def test_fingerprint_follows_functions_and_state_the_time(self):
        self.config.config(group='accel', discovery_interval=1)
        self.start({'address': A})
        first = self.driver.fingerprint()
        self.kernel.set_numvfs(A, 16)
        self.assertNotEqual(first, self.driver.fingerprint())
        end = time.monotonic() + 120
        state = self.driver.state(A)
        while self.driver.state(A) == state:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)


@ddt.ddt
class Defects(TestCase):

    def setUp(self):
        super().setUp()
        self.start({'address': A, 'vfs': 16})

    def test_down(self):
        self.kernel.set_numvfs(A, 0)
        self.kernel.write_attribute(A, 'qat/state', 'down')
        self.assertQuarantined(self.device(), 'it is down', 'qat/state')

    @ddt.data(({'cfg_services': 'sym asym'}, 'not services'),
              ({'cfg_services': ''}, 'not services'),
              ({'cfg_services': 'ENODATA'}, 'cannot be read'),
              ({'state': 'EIO'}, 'cannot be read'),
              ({'state': 'sideways'}, 'neither up nor down'),
              ({'errors_fatal': 'EIO'}, 'cannot be read'))
    @ddt.unpack
    def test_attributes(self, attributes, words):
        known = self.discover()
        self.kernel.set_fault(A, attributes=attributes)
        device = self.device(known)
        self.assertQuarantined(device, words)
        # a server that has a VF can still be started
        self.assertEqual(16, len(device.handles))

    def test_attributes_of_an_older_kernel(self):
        self.kernel.set_fault(A, attributes={
            'state': 'missing', 'cfg_services': 'missing',
            'errors_fatal': 'missing'})
        device = self.device()
        self.assertEqual((OK, ()), (device.health, device.traits))

    def test_fatal_errors(self):
        self.kernel.set_fault(A, errors_fatal=2)
        self.assertQuarantined(self.device(), 'errors_fatal is 2')

    def test_lost_heartbeat(self):
        known = self.discover()
        self.kernel.set_fault(A, heartbeat='silent')
        # the kernel itself needs three looks
        for health in (OK, OK, QUARANTINED):
            time.sleep(0.25)
            device = self.device(known)
            self.assertEqual(health, device.health)
        self.assertQuarantined(device, 'heartbeat is lost')
        self.assertEqual((16, traits('asym', 'sym')),
                         (len(device.handles), device.traits))
        self.kernel.set_fault(A, heartbeat=None)
        time.sleep(0.25)
        self.assertEqual(OK, self.device({A: device}).health)

    def test_heartbeat_that_somebody_else_reads(self):
        """Then a card that lives looks like one that does not."""
        known = self.discover()
        time.sleep(0.25)
        self.assertEqual(0, self.kernel.read_qat_heartbeat(A))
        self.assertEqual(-1, self.kernel.read_qat_heartbeat(A))
        self.assertEqual(OK, self.device(known).health)

    @ddt.data('missing', 'EPERM', 'EACCES', 'EIO')
    def test_heartbeat_that_cannot_be_read(self, fault):
        self.kernel.set_fault(A, heartbeat=fault)
        self.assertEqual(OK, self.again().health)

    def test_heartbeat_without_privileged_process(self):
        def read(address):
            raise RuntimeError('no helper')
        self.useFixture(fixtures.MockPatchObject(
            self.kernel, 'read_qat_heartbeat', read))
        self.assertEqual(OK, self.again().health)

    def test_nova_accel_discover_needs_no_privileges(self):
        asked = []
        self.useFixture(fixtures.MockPatchObject(
            self.kernel, 'read_qat_heartbeat', asked.append))
        self.assertEqual(OK, self.device().health)
        self.assertEqual([], asked)

    def test_one_bad_card_of_two(self):
        self.start({'address': A, 'vfs': 16}, {'address': B, 'vfs': 16})
        self.kernel.set_fault(A, dead=True)
        found = self.discover()
        self.assertEqual((QUARANTINED, OK),
                         (found[A].health, found[B].health))


@ddt.ddt
class Configuration(TestCase):

    def test_services_and_then_vfs(self):
        self.start({'address': A}, {'address': B})
        self.configure(['dc', f'{B}=sym;asym'], [f'{A}=16', f'{B}=16'])
        found = self.discover()
        self.assertEqual(traits('dc'), found[A].traits)
        self.assertEqual(traits('asym', 'sym'), found[B].traits)
        self.assertEqual([16, 16], [len(d.handles) for d in found.values()])
        self.assertEqual([OK, OK], [d.health for d in found.values()])

    def test_nothing_is_touched_where_all_is_as_it_is_to_be(self):
        self.start({'address': A, 'vfs': 16})
        self.kernel.guest_takes(VFS[0])
        before = self.discover()
        # the kernel writes them in its own order
        self.configure(['sym;asym'], [f'{A}=16'])
        self.configure(['asym;sym'], [f'{A}=16'])
        self.assertEqual(before, self.discover())

    def test_after_a_reboot_of_the_host(self):
        self.start({'address': A})
        self.configure(['sym;dc'], [f'{A}=16'])
        before = self.device()
        self.kernel.reboot()
        self.assertEqual(traits('asym', 'sym'), self.device().traits)
        self.configure(['sym;dc'], [f'{A}=16'])
        self.assertEqual(before, self.device())

    @ddt.data('asym;sym', 'dc', 'sym;dc')
    def test_after_a_kill_while_the_card_was_down(self, services):
        self.start({'address': A})
        self.kernel.write_attribute(A, 'qat/state', 'down')
        self.configure([services], [f'{A}=16'])
        self.assertEqual(
            (OK, traits(*services.split(';'))),
            (self.device().health, self.device().traits))

    def test_card_that_an_operator_switched_off(self):
        self.start({'address': A})
        self.kernel.write_attribute(A, 'qat/state', 'down')
        self.configure()
        self.assertQuarantined(self.device(), 'it is down')

    def test_vfs_that_may_be_in_use(self):
        self.start({'address': A, 'vfs': 16})
        text = self.refused(exception.DeviceError, ['dc'])
        for word in (A, 'dc', 'asym', 'has VFs', 'sriov_numvfs'):
            self.assertIn(word, text)
        self.assertEqual(traits('asym', 'sym'), self.device().traits)

    @ddt.data('sym;asym;dc', 'sym;dcc', 'decomp', 'sym;sym', 'sym;des')
    def test_services_that_the_card_does_not_offer(self, services):
        self.start({'address': A})
        text = self.refused(exception.DeviceError, [services], [f'{A}=16'])
        for word in (A, services, 'refused', 'keeps'):
            self.assertIn(word, text)
        self.assertEqual('up', self.read('qat/state'))
        device = self.device()
        self.assertEqual(traits('asym', 'sym'), device.traits)
        # with VFs the services could not be set at the next start
        self.assertEqual((), device.handles)

    def test_services_that_only_another_generation_offers(self):
        self.start({'address': A, 'product': '6XXX'})
        self.configure(['sym;asym;dc'])
        self.assertEqual(traits('asym', 'dc', 'sym'), self.device().traits)
        self.configure(['decomp'])
        self.assertEqual(traits('decomp'), self.device().traits)

    def test_card_that_does_not_start_with_new_services(self):
        self.start({'address': A})
        self.kernel.set_fault(A, fails_with='dc')
        text = self.refused(exception.DeviceError, ['dc'])
        self.assertIn('keeps sym;asym', text)
        self.assertEqual('up', self.read('qat/state'))
        self.assertEqual(traits('asym', 'sym'), self.device().traits)

    def test_card_that_does_not_start_any_more(self):
        self.start({'address': A, 'faults': {'fails_with': 'asym;sym'}})
        self.kernel.set_fault(A, fails_with='asym;sym')
        self.assertIn('is down now', self.refused(
            exception.DeviceError, ['sym;asym;dc']))
        self.assertQuarantined(self.device(), 'it is down')

    def test_card_that_the_host_uses(self):
        self.start({'address': A})
        self.kernel.set_fault(A, busy=True)
        self.assertIn('the host itself',
                      self.refused(exception.DeviceError, ['dc']))
        self.assertEqual(traits('asym', 'sym'), self.device().traits)
        self.assertIn('busy', self.refused(
            exception.DeviceError, vfs=[f'{A}=16']))

    def test_one_card_that_fails_leaves_the_others(self):
        self.start({'address': A}, {'address': B})
        self.kernel.set_fault(A, busy=True)
        self.refused(exception.DeviceError, ['dc'], [f'{A}=16', f'{B}=16'])
        found = self.discover()
        self.assertEqual((OK, traits('dc'), 16), (
            found[B].health, found[B].traits, len(found[B].handles)))

    def test_generation_whose_services_cannot_be_set(self):
        self.start({'address': A, 'product': 'C62X'}, {'address': B})
        self.configure(['dc'])
        self.assertEqual(traits('dc'), self.discover()[B].traits)
        text = self.refused(exception.DeviceError, [f'{A}=dc'])
        for word in (A, 'dc', 'cannot be set', 'since Linux 6.0'):
            self.assertIn(word, text)

    def test_address_that_is_no_card(self):
        self.start({'address': A})
        for address in (B, VFS[0]):
            self.assertIn(address, self.refused(
                exception.DeviceError, [f'{address}=dc']))

    def test_attribute_that_cannot_be_read(self):
        self.start({'address': A})
        self.kernel.set_fault(A, attributes={'cfg_services': 'EIO'})
        self.assertIn('cannot be read',
                      self.refused(exception.DeviceError, ['dc']))

    def test_fewer_vfs_than_the_kernel_makes(self):
        self.start({'address': A})
        text = self.refused(exception.ConfigurationError, vfs=[f'{A}=4'])
        self.assertIn('all of its 16', text)
        self.assertEqual('0', self.read('sriov_numvfs'))

    @ddt.data('', 'SYM', 'sym,', 'sym asym', 'sym;', f'{A}=', '=sym',
              'x=sym', f'{A}=sym=dc', 'a;b;c;d;e')
    def test_option_that_cannot_be_read(self, item):
        self.start({'address': A})
        self.refused(exception.ConfigurationError, [item])

    def test_option_that_contradicts_itself(self):
        self.start({'address': A})
        for items in (['sym', 'dc'], [f'{A}=sym', f'{A.upper()}=dc']):
            self.assertIn('twice', self.refused(
                exception.ConfigurationError, items))


@ddt.ddt
class Simulation(TestCase):
    """The card behaves as its kernel driver does."""

    def fails(self, number, call, *args):
        error = self.assertRaises(OSError, call, *args)
        self.assertEqual(errno.errorcode[number],
                         errno.errorcode[error.errno])

    def test_services_while_it_is_up(self):
        self.start({'address': A})
        self.fails(errno.EINVAL, self.kernel.write_attribute, A,
                   'qat/cfg_services', 'dc')

    def test_going_down_takes_the_vfs(self):
        self.start({'address': A, 'vfs': 16})
        self.kernel.write_attribute(A, 'qat/state', 'down')
        self.kernel.write_attribute(A, 'qat/state', 'up')
        self.assertEqual('0', self.read('sriov_numvfs'))

    def test_going_down_waits_for_guests(self):
        self.start({'address': A, 'vfs': 16})
        self.kernel.guest_takes(VFS[5])
        thread = threading.Thread(target=self.kernel.write_attribute,
                                  args=(A, 'qat/state', 'down'))
        thread.start()
        self.addCleanup(thread.join)
        thread.join(0.2)
        self.assertTrue(thread.is_alive())
        self.assertEqual('up', self.read('qat/state'))
        self.kernel.guest_returns(VFS[5])
        thread.join(10)
        self.assertEqual('down', self.read('qat/state'))

    def test_attributes_that_are_not_there(self):
        self.start({'address': A, 'vfs': 16},
                   {'address': B, 'product': 'C62X'})
        for function, attribute in ((VFS[0], 'qat/state'), (B, 'qat/state'),
                                    (A, 'qat/other')):
            self.fails(errno.ENOENT, self.kernel.write_attribute, function,
                       attribute, 'down')
        self.fails(errno.ENOENT, self.kernel.read_qat_heartbeat, VFS[0])

    @ddt.data('product: X', 'vfs: 17', 'faults: {heartbeat: 3}')
    def test_description(self, line):
        host = self.useFixture(SimulatedHost())
        with open(host.path, 'w') as file:
            file.write(f'qats:\n  - address: "{A}"\n    {line}\n')
        text = str(self.assertRaises(exception.InvalidSimulation,
                                     sim.SimulatedKernel, host.path))
        self.assertIn('line 3', text)


@ddt.ddt
class Handover(TestCase):
    """What the guest of one VF left is not for the next one."""

    def start_vf(self, **card):
        self.start({'address': A, 'vfs': 16, **card})
        return self.device()

    def release(self, device):
        return self.driver.release(
            device, device.handles[0], None, base.Use())

    def test_reset(self):
        device = self.start_vf()
        self.driver.prepare(device, device.handles[0], None, True, base.Use())
        self.kernel.guest_takes(VFS[0])
        self.kernel.guest_returns(VFS[0])
        self.assertEqual('reset flr', self.release(device))
        (function, bound), = self.kernel.resets(A)
        self.assertEqual(VFS[0], function)
        self.assertIn(bound, (None, 'vfio-pci'))

    @ddt.data('none', 'operator')
    def test_policy(self, policy):
        self.config.config(group='accel', handover=[f'qat={policy}'])
        device = self.start_vf()
        self.assertIsNone(self.release(device))
        self.assertEqual([], self.kernel.resets(A))

    @ddt.data(('EIO', 'Input/output error'), ('ENOTTY', 'Inappropriate'),
              ('ETIMEDOUT', 'timed out'))
    @ddt.unpack
    def test_reset_that_fails(self, fault, said):
        device = self.start_vf()
        self.kernel.set_fault(A, reset=fault)
        error = self.assertRaises(exception.DeviceError, self.release, device)
        self.assertIn(f'{VFS[0]} must be reset', str(error))
        self.assertIn(said, str(error))

    def test_vfs_that_cannot_be_reset(self):
        """Known before a server has one."""
        none = {'attributes': {'reset_method': 'missing', 'reset': 'missing'}}
        device = self.start_vf(faults=none)
        self.assertQuarantined(device, f'{VFS[0]} cannot be reset between two',
                               f'{VFS[0]}=operator')
        self.assertEqual((), device.handles)
        self.config.config(group='accel', handover=[f'{VFS[1]}=operator'])
        self.assertEqual([VFS[1]], [h.address for h in self.again().handles])
