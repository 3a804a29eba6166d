# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A driver of another package, on a host with its devices.

The package is that of docs/source/drivers.rst.
"""

import json
import sys
import threading

from nova_accel import exception
from nova_accel.host import pci
from nova_accel.inventory import holds
from tests import acme
from tests.host import base
from tests.host import killed_operations
from tests.unit.host import A, B, FUNCTION, OTHER, plain

AI = 'CUSTOM_ACCELERATOR_AI'
LIMITED = {f'resources1:{AI}': '1', 'accel1:driver_power_limit': '100'}


class VendorTest(base.HostTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.package = self.useFixture(acme.Installed())

    def start(self, **more):
        return self.start_host(acmes=[{'address': A}, {'address': B}],
                               drivers=('acme',), **more)

    def boot(self, specs=LIMITED, address=A):
        return self.host.boot(specs, self.host.allocation(address, AI))

    def attribute(self, name, address=A):
        return self.simulated.kernel.read(pci.path(address, f'acme/{name}'))

    def fault(self, **fault):
        self.simulated.kernel.set_fault(A, **fault)

    def change_driver(self, old, new):
        self.package.change('driver', old, new)

    def test_remembered_until_the_end(self):
        """nova-compute, the guest and the host start again meanwhile."""
        self.start()
        server = self.boot()
        claim, = self.host.holdings.all()
        self.assertEqual('{"power_limit": "250"}', claim.driver_memory)
        self.restart()
        self.host.reboot(server)
        self.host.power_cut()
        self.restart()
        self.host.start_guest(server)
        self.assertHas(server, A)
        self.simulated.kernel.guest_returns(A)
        # the host's boot has reset it, and prepare() was called again
        self.assertEqual('100', self.attribute('power_limit'))
        self.simulated.kernel.guest_takes(A)
        self.host.delete(server)
        self.assertEqual(('250', '1'), (self.attribute('power_limit'),
                                        self.attribute('scrubs')))
        handover, = self.host.store.handovers()
        self.assertEqual(('reset flr, scrubbed', 'clean'),
                         (handover.method, handover.result))

    def test_prepare_that_fails_after_it_remembered(self):
        """release() is called all the same."""
        self.start()
        self.change_limit_fails()
        self.assertRaises(exception.DeviceError, self.boot)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('1', self.attribute('scrubs'))

    def change_limit_fails(self):
        kernel, write = self.host.kernel, self.host.kernel.write_attribute

        def fail(function, attribute, value, by):
            if value == '100':
                raise OSError(5, 'Input/output error')
            write(function, attribute, value, by)
        kernel.write_attribute = fail

    def test_prepare_that_fails_before(self):
        """Nothing of the server is on the card: it is not cleaned."""
        self.start()
        self.assertRaises(exception.InvalidRequest, self.boot, {
            **LIMITED, 'accel1:driver_power_limit': 'much'})
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('0', self.attribute('scrubs'))

    def test_key_that_the_driver_does_not_know(self):
        self.start()
        error = self.assertRaises(exception.InvalidRequest, self.boot, {
            f'resources1:{AI}': '1', 'accel1:driver_powr_limit': '100'})
        self.assertIn('accel1:driver_powr_limit', str(error))
        self.assertIn('The driver acme of', str(error))
        self.assertIn('power_limit', str(error))
        self.assertEqual([], self.host.holdings.all())

    def test_too_much_is_not_remembered(self):
        self.change_driver("use.remember({", "use.remember({'x': 'y' * 4096,")
        self.start()
        error = self.assertRaises(exception.DeviceError, self.boot)
        # what a driver raises may name anything: its server's owner reads
        # that it failed
        self.assertIn('the reason is in the log', str(error))
        self.assertNotIn('too many to be remembered', str(error))
        self.assertIn('too many to be remembered', self.log.output)
        self.assertEqual('250', self.attribute('power_limit'))

    def test_lost_meanwhile(self):
        """A prepare() that comes back late remembers nothing, and the card
        stays as it is: nobody would undo it."""
        self.start()
        read, reads, goes_on = (self.host.kernel.read, threading.Event(),
                                threading.Event())

        def late(path):
            found = read(path)
            if path.endswith('power_limit'):
                reads.set()
                goes_on.wait()
            return found
        self.host.kernel.read = late
        # the build waits no longer than that
        self.config.config(device_timeout=1, group='accel')
        while not reads.is_set():
            self.assertRaises(exception.AcceleratorError, self.boot)
        goes_on.set()
        self.wait_for(lambda: not self.host.inventory.cards.is_busy(A))
        self.assertEqual('250', self.attribute('power_limit'))
        # the card is kept until then
        self.host.reconciler.run()
        self.assertEqual([], self.host.holdings.all())

    def test_operation_that_fails(self):
        """The card is kept from other servers until it succeeds."""
        self.start()
        server = self.boot()
        self.fault(scrub='EIO')
        self.host.delete(server)
        claim, = self.host.holdings.all()
        self.assertIn('scrubbed after its server, and that failed '
                      '(Input/output error)', claim.error)
        self.fault(scrub=None)
        self.host.reconcile()
        self.host.settle()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('1', self.attribute('scrubs'))

    def test_operation_that_hangs(self):
        """It costs its card, and no other one."""
        self.start()
        server = self.boot()
        self.fault(scrub='hang')
        self.config.config(device_timeout=1, group='accel')
        self.host.delete(server, wait=False)
        inventory = self.host.inventory
        self.wait_for(
            lambda: inventory.table.kinds(A))
        self.config.config(device_timeout=30, group='accel')
        self.assertIn('did not end within 1 s', holds.reasons(
            inventory.table.withheld_by(A)))
        self.assertHas(self.boot(address=B), B)
        self.fault(scrub=None)
        self.wait_for(lambda: all(
            c.device_address != A for c in self.host.holdings.all()))

    def test_device_that_cannot_be_shown(self):
        """It costs itself: the other one is given, and Nova's own work, for
        which our providers are asked as well, goes on."""
        self.change_driver(
            'return dataclasses.replace(\n            device, handles',
            'return dataclasses.replace(\n            device, '
            f'memory=((\'HBM\', -8 if device.address == {A!r} else 8),), '
            'handles')
        self.start()
        self.assertHas(self.boot({f'resources1:{AI}': '1'}, B), B)
        line, = [line for line in self.log.output.splitlines()
                 if 'is not reported' in line]
        self.assertIn(f'Device {A}', line)
        self.assertIn('the driver acme reports', line)

    def test_driver_of_another_contract(self):
        """It is left out, and says so; the others go on."""
        self.change_driver('CONTRACT = 2', 'CONTRACT = 3')
        self.start_host({'address': B}, acmes=[{'address': A}],
                        drivers=('acme', 'dfl'))
        self.assertEqual({B}, set(self.host.inventory.devices))
        line, = [line for line in self.log.output.splitlines()
                 if 'contract' in line]
        self.assertEqual(
            "The driver 'acme' of [accel] enabled_drivers is for version 3 of "
            'the contract for drivers, and this nova_accel has version 2: '
            'install a later release of nova_accel, or an earlier one of '
            'acme_accel.', line)

    def test_server_of_a_driver_that_is_left_out(self):
        """It keeps what it has, and gets it back with the driver."""
        self.start()
        server = self.boot()
        driver = sys.modules['acme_accel.driver'].AcmeDriver
        driver.CONTRACT = 1
        self.restart()
        self.host.reconcile()
        self.assertRaises(exception.DeviceUnavailable, self.host.reboot,
                          server)
        driver.CONTRACT = 2
        self.restart()
        self.host.start_guest(server)
        self.assertHas(server, A)
        self.host.delete(server)
        self.assertEqual('250', self.attribute('power_limit'))


class RequestTest(base.HostTestCase):
    """What of a request drivers are told."""

    def asked(self):
        claim, = self.host.holdings.all()
        return json.loads(claim.driver_request)

    def test_image_of_a_rebuild(self):
        """It is the server's wish until the next rebuild."""
        self.start_host({'address': A})
        self.host.upload(FUNCTION)
        other = self.host.upload(OTHER)
        server = self.host.boot(
            base.asks(FUNCTION, runtime_programming='true'),
            self.host.allocation(A))
        self.assertEqual({'keys': {}, 'functions': [plain(FUNCTION)],
                          'bitstream_id': None}, self.asked())
        self.host.rebuild(server, {'accel1:bitstream_id': other})
        self.host.reboot(server)
        self.assertEqual({'keys': {}, 'functions': [], 'bitstream_id': other},
                         self.asked())


class KilledTest(killed_operations.KilledTestCase):
    """Wherever nova-compute is killed, the next server finds nothing."""

    test_plug = killed_operations.OperationsMixin.test_plug
    test_unplug = killed_operations.OperationsMixin.test_unplug

    DEVICES = {'acmes': [{'address': A}]}
    DRIVER, CLASS = 'acme', AI
    SPECS = LIMITED

    def setUp(self):
        self.useFixture(acme.Installed())
        super().setUp()

    def attribute(self, name):
        return self.simulated.kernel.read(pci.path(A, f'acme/{name}'))

    def check_clean(self):
        self.assertEqual('250', self.attribute('power_limit'))

    def check_next(self):
        kernel = self.simulated.kernel
        kernel.guest_returns(A)
        self.assertEqual('100', self.attribute('power_limit'))
        kernel.guest_takes(A)


class PrivateResetTest(base.HostTestCase):
    """The example of two functions, of which the one of the host resets."""

    POOLS = 'none'
    DPU = 'CUSTOM_ACCELERATOR_DPU'

    def test_between_servers(self):
        self.useFixture(acme.Installed())
        self.start_host(acme_dpus=[{'address': A}], drivers=('acme_dpu',))
        specs = {f'resources1:{self.DPU}': '1'}
        kernel = self.simulated.kernel
        server = self.host.boot(specs, self.host.allocation(A, self.DPU))
        self.assertHas(server, A)
        kernel.guest_writes(A, memory='of a server')
        kernel.set_fault(A, reset_dpu='EIO')
        self.host.delete(server)
        claim, = self.host.holdings.all()
        self.assertIn('reset by its management function', claim.error)
        kernel.set_fault(A, reset_dpu=None)
        self.host.reconcile()
        self.host.settle()
        self.assertEqual(('dpu reset', 'clean'), [
            (h.method, h.result) for h in self.host.store.handovers()][-1])
        self.host.boot(specs, self.host.allocation(A, self.DPU))
        self.assertEqual({}, kernel.guest_reads(A))
