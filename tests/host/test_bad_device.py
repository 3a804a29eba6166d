# Licensed under the Apache License, Version 2.0. See LICENSE.
"""One device that does not do as it is told: servers get the others."""

import threading
from unittest import mock
import uuid

from nova_accel import exception
from tests.host import base
from tests.host.test_pf_and_vfs import AI, NPU, RULE
from tests.unit.host import A, B

SPECS = {f'resources1:{AI}': '1'}


class TestCase(base.HostTestCase):

    def start(self, *cards):
        self.config.config(pci_devices=[RULE], group='accel')
        self.start_host(drivers=('pci',), others=[
            {**NPU, **card} for card in cards])
        self.driver = self.host.inventory._drivers['pci']

    def boot(self):
        return self.host.boot(SPECS, self.host.allocation(A, AI))


class PrepareTest(TestCase):
    """It cannot be made ready for the first server that gets it."""

    def setUp(self):
        super().setUp()
        self.config.config(health=['act'], device_timeout=1, group='accel')
        self.bad = None

    def replace_prepare(self, fails):
        prepare = self.driver.prepare

        def prepares(device, handle, *args):
            self.bad = self.bad or handle.address
            if handle.address == self.bad:
                fails()
            return prepare(device, handle, *args)
        self.driver.prepare = prepares

    def test_vf_hangs(self):
        self.start({'address': A, 'vfs': 2})
        goes_on = threading.Event()
        self.addCleanup(goes_on.set)
        self.replace_prepare(lambda: goes_on.wait(60))
        self.assertRaises(exception.DeviceTimeout, self.boot)
        self.host.report()
        self.assertNotEqual(
            [self.bad], self.host.devices_of(self.boot()))
        # it is free once the call has returned
        goes_on.set()
        self.wait_for(lambda: not self.host.inventory.cards.is_busy(
            f'PCI:{self.bad}'))
        self.host.reconciler.run()
        self.assertEqual([self.bad], self.host.devices_of(self.boot()))

    def test_one_of_a_pool_fails(self):
        self.start(*({'address': address, 'vfs': 0} for address in (A, B)))

        def fails():
            raise OSError(5, 'Input/output error')
        self.replace_prepare(fails)
        self.assertRaises(exception.DeviceError, self.boot)
        self.host.inventory.scanner.look()
        self.assertNotEqual(
            [self.bad], self.host.devices_of(self.boot()))


class InAGuestTest(TestCase):
    """A guest has it without a claim, as after an older copy of the claim store
    was put back, and that was not seen yet."""

    def test_it_is_not_reset(self):
        self.start({'address': A, 'vfs': 0, 'total_vfs': 0})
        cloud, kernel = self.host.cloud, self.host.kernel
        stranger = str(uuid.uuid4())
        cloud.start_guest(stranger, self.host.inventory.devices[A].handles)
        resets = []
        reset = kernel.reset_function

        def resets_function(address, *args):
            resets.append(address)
            return reset(address, *args)
        kernel.reset_function = resets_function
        self.restart()
        with mock.patch.object(
                self.host.cloud, 'start_guest',
                side_effect=RuntimeError('in use by driver QEMU')):
            self.assertRaises(RuntimeError, self.boot)
        self.host.reconciler.run()
        self.assertEqual([], resets)
        self.assertIn(f'cannot be released while a running guest has {A}',
                      self.log.output)
        # its guest has ended
        self.host.cloud.stop_guest(stranger, undefine=True)
        self.host.reconciler.run()
        self.assertEqual([A], self.host.devices_of(self.boot()))
