# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a region carries: never changed under a guest, never said wrongly."""

import contextlib
from unittest import mock
import uuid

import fixtures
from nova.tests.fixtures import libvirt as fakelibvirt

from nova_accel import naming
from nova_accel import sim
from nova_accel.virt import guest
from tests.functional import base
from tests.functional import operations
from tests.functional import test_xrt

CARDS = ('0000:81:00.0', '0000:82:00.0')
USERS = ('0000:81:00.1', '0000:82:00.1')
DEVICE, VF = '0000:5e:00.0', '0000:5e:00.1'
REGION = f'compute1_accel_{DEVICE}_region0'


class Programmings(fixtures.Fixture):
    """Sees each programming of a card under XRT. Its kernel driver programs
    through the management function, also while a guest has the other one."""

    def _setUp(self):
        #: cards that were programmed, and those that a guest had meanwhile
        self.cards, self.under_guests = [], []
        program = sim.SimulatedKernel.program_xclbin

        def watched(kernel, function, *args):
            self.cards.append(function)
            user = kernel.readlink(
                f'bus/pci/devices/{function[:-1]}1/driver')
            if user.endswith('/vfio-pci'):
                self.under_guests.append(function)
            return program(kernel, function, *args)
        self.useFixture(fixtures.MockPatchObject(
            sim.SimulatedKernel, 'program_xclbin', watched))


class UnderGuestTest(operations.OperationsTestBase):
    """A server with two cards whose content its guest might change."""

    HOSTS = {'compute1': {'alveos': [
        {'address': address, 'programming_seconds': 0}
        for address in CARDS]}}
    upload_xclbin = test_xrt.XrtTestBase.upload_xclbin

    def setUp(self):
        super().setUp()
        self.function, self.other = str(uuid.uuid4()), str(uuid.uuid4())
        self.upload_xclbin(self.function)
        self.image = self.upload_xclbin(self.other, properties={})
        self.server = self.boot({
            **base.fpga_flavor('1', function_id=self.function,
                               runtime_programming='true'),
            **base.fpga_flavor('2', function_id=self.function,
                               runtime_programming='true'),
            'group_policy': 'isolate'}, image_uuid=self.glance.guest_image)
        self.before = self.assertHas(self.server, 2)
        self.programmings = self.useFixture(Programmings())

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_drivers=['xrt'], whole_cards=list(CARDS),
                   group='accel')
        return super().start_compute(hostname, *args, **kwargs)

    def group_of(self, user):
        claim, = (c for c in self.claims() if c.handle.address == user)
        return claim.group

    def program(self, user):
        """The owner asks for another function in one of the two.

        :returns: what the server's metadata say of it.
        """
        group = self.group_of(user)
        self.api.post_server_metadata(
            self.server['id'], {f'accel{group}:bitstream_id': self.image})
        self.computes['compute1'].driver.runtime.run()
        return self.api.get_server(self.server['id'])['metadata'][
            f'accel{group}:status']

    def assertUntouched(self, *cards):
        """Only these cards were programmed, and none under the guest."""
        self.assertEqual([], self.programmings.under_guests)
        self.assertEqual(set(cards), set(self.programmings.cards))
        self.assertEqual(self.before, self.assertHas(self.server, 2))

    def test_run_time(self):
        self.assertEqual(f'programmed {self.image}', self.program(USERS[0]))
        self.assertUntouched(CARDS[0])

    def test_guest_does_not_let_go(self):
        with mock.patch.object(guest, '_DETACH_SECONDS', 0), \
                mock.patch.object(fakelibvirt.Domain, 'detachDeviceFlags'):
            status = self.program(USERS[0])
        self.assertTrue(status.startswith('failed '), status)
        self.assertUntouched()

    def test_other_card_of_a_programming_that_failed(self):
        program, failed = sim.SimulatedKernel.program_xclbin, []

        def fails_once(kernel, function, *args):
            if not failed:
                failed.append(function)
                raise OSError(5, 'Input/output error')
            return program(kernel, function, *args)
        with mock.patch.object(
                sim.SimulatedKernel, 'program_xclbin', fails_once):
            status = self.program(USERS[0])
        self.assertTrue(status.startswith('failed '), status)
        self.assertEqual([CARDS[0]], failed)
        self.assertUntouched(CARDS[0])

    def test_other_card_of_a_device_that_comes_back(self):
        """One device was lost by the running guest; it gets that one back."""
        detach = fakelibvirt.Domain.detachDeviceFlags
        asked = []
        with mock.patch.object(guest, '_DETACH_SECONDS', 0), \
                mock.patch.object(fakelibvirt.Domain, 'detachDeviceFlags',
                                  lambda *args, **kwargs: asked.append(
                                      (args, kwargs))):
            self.program(USERS[0])
        # it lets go when nobody waits any longer
        for args, kwargs in asked:
            detach(*args, **kwargs)
        self.assertEqual([USERS[1]], self.hostdevs(self.server))
        self.computes['compute1'].driver.reconciler.run()
        self.assertEqual(self.before, self.assertHas(self.server, 2))
        self.assertEqual([], self.programmings.under_guests)
        self.assertNotIn(CARDS[1], self.programmings.cards)


class UnknownTest(base.AcceleratorTestBase):
    """Two releases of a function, which the card cannot tell apart: what a
    programming without a known end left is said to be neither of them."""

    HOSTS = {'compute1': {'cards': [base.card(DEVICE)]}}

    def setUp(self):
        super().setUp()
        self.one, self.two = (
            self.upload_bitstream(base.CRYPTO) for _ in range(2))
        self._delete_server(self.boot(self.flavor(self.one)))
        self.assertIn(naming.bitstream_trait(self.one), self.traits(REGION))

    @staticmethod
    def flavor(image):
        return base.fpga_flavor(bitstream_id=image)

    @contextlib.contextmanager
    def watched(self, after=None):
        """Programmings as they are; afterwards an exception, if any."""
        program, calls = sim.SimulatedKernel.program_dfl_port, []

        def watched(kernel, *args):
            calls.append(args)
            program(kernel, *args)
            if after:
                raise after
        with mock.patch.object(sim.SimulatedKernel, 'program_dfl_port',
                               watched):
            yield calls

    def assertUnknown(self):
        self.assertEqual(set(), self.traits(REGION) & {
            naming.bitstream_trait(self.one), naming.bitstream_trait(self.two),
            naming.function_trait(base.CRYPTO)})

    def assertProgrammedAgain(self):
        """Who asks for the one gets it, and not what is there."""
        with self.watched() as calls:
            server = self.boot(self.flavor(self.one))
        self.assertEqual(1, len(calls))
        self.assertEqual([VF], self.hostdevs(server))
        self.assertIn(naming.bitstream_trait(self.one), self.traits(REGION))

    def test_timeout(self):
        self.flags(programming_timeout=1, group='accel')
        kernel = self.kernel('compute1')
        kernel.set_fault(DEVICE, hang='program')
        server = self.boot(self.flavor(self.two), expected_state='ERROR')
        self.flags(programming_timeout=300, group='accel')
        self._delete_server(server)
        self.report()
        self.assertUnknown()
        kernel.set_fault(DEVICE, hang=None)

        def usable():
            self.report()
            self.assertNotIn(naming.FENCED, self.traits(REGION))
        self._wait_for_assert(usable)
        self.assertNotIn(
            naming.bitstream_trait(self.one), self.traits(REGION))
        self.assertProgrammedAgain()
