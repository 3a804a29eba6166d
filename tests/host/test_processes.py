# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Processes of the host that have device nodes open."""

import time
from unittest import mock

import ddt
import fixtures

from nova_accel import exception
from nova_accel.host import usage
from nova_accel.inventory import offers
from tests.host import base

A, B = '0000:86:00.0', '0000:87:00.0'
SOUND = '0000:86:00.1'
EXPORTER = f'exporter (process 4711) has /dev/{A} open'
KINDS = {
    'gpu': ({'gpus': [{'address': A}, {'address': B}]}, ['gpu'],
            'CUSTOM_ACCELERATOR_GPU'),
    'rule': ({'others': [
        {'address': a, 'vendor': '1da3', 'driver': 'habanalabs'}
        for a in (A, B)]}, ['pci'], 'CUSTOM_ACCELERATOR_NPU'),
    'time card': ({'timecards': [{'address': A}, {'address': B}]},
                  ['timecard'], 'CUSTOM_ACCELERATOR_TIMECARD'),
}


class TestCase(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.config.config(
            discovery_interval=3600, device_timeout=1,
            pci_devices=['vendor=1da3 type=NPU'], group='accel')
        self.useFixture(fixtures.MockPatchObject(usage, '_PAUSE', 0.01))

    def start(self, kind='gpu', **more):
        devices, drivers, self.name = KINDS[kind]
        self.start_host(drivers=drivers, **{**devices, **more})

    def keep(self, address, keeps=True):
        self.host.kernel.set_fault(address, in_use=keeps or None)

    def boot(self, address=A):
        return self.host.boot({f'resources1:{self.name}': '1'},
                              self.host.allocation(address, self.name))

    def free(self):
        return sorted(offer.handle.address for offer
                      in self.host.inventory.table.offered().all()
                      if offer.state is offers.State.FREE)

    def driver(self, address):
        path = f'bus/pci/devices/{address}/driver'
        return (self.host.kernel.exists(path)
                and self.host.kernel.readlink(path).rpartition('/')[2])


@ddt.ddt
class KeptTest(TestCase):
    """A process has the node of a card, whose driver would wait for it."""

    @ddt.data('gpu', 'rule')
    def test_another_one_is_chosen(self, kind):
        self.start(kind)
        self.keep(A)
        self.assertHas(self.boot(), B)
        self.assertIn(f'is not given to servers, because {EXPORTER}',
                      self.log.output)

    @ddt.data(*KINDS)
    def test_none_is_left(self, kind):
        """The error names the process, and nothing waits."""
        self.start(kind)
        self.keep(A)
        bound = self.driver(A)
        mine = self.boot(B)
        began = time.monotonic()
        error = self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertLess(time.monotonic() - began, 1)
        self.assertIn(f'0 of it are free on this host ({EXPORTER})',
                      str(error))
        self.assertNotIn('exporter', exception.for_owner(error))
        self.assertEqual(bound, self.driver(A))
        # the hold ends with the next look
        self.host.inventory.looks.run()
        self.assertEqual([], self.free())
        self.keep(A, False)
        self.host.inventory.looks.run()
        self.assertEqual([A], self.free())
        server = self.boot()
        self.assertHas(server, A)
        for one in (mine, server):
            self.host.delete(one)
        self.assertEqual([A, B], self.free())
        self.assertEqual(bound, self.driver(A))

    def test_for_a_moment(self):
        """As nvidia-smi: the card is given to the server."""
        self.start()
        asked, ask = [], self.host.kernel.processes

        def asks(functions):
            asked.append(functions)
            found = ask(functions)
            self.keep(A, False)
            return found
        self.keep(A)
        self.host.kernel.processes = asks
        self.assertHas(self.boot(), A)
        self.assertEqual([[A], [A], [A]], asked)

    def test_vf(self):
        self.start('rule', others=[{
            'address': A, 'vendor': '1da3', 'driver': 'habanalabs',
            'vfs': 2, 'total_vfs': 2, 'vf_driver': 'habanalabs'}])
        self.keep(A)
        error = self.assertRaises(exception.DeviceUnavailable, self.boot)
        for number in 1, 2:
            self.assertIn(f'has /dev/{A[:-1]}{number} open', str(error))

    def test_company(self):
        """Sound has waited for the last close as well."""
        self.start(others=[{
            'address': SOUND, 'class': '0x040300',
            'driver': 'snd_hda_intel'}])
        self.keep(SOUND)
        self.assertHas(self.boot(), B)
        self.assertIn(f'has /dev/{SOUND} open', self.log.output)

    def test_server_that_starts_again(self):
        """It keeps its card, and its guest does not wait."""
        self.start()
        server = self.boot()
        self.host.cloud.stop_guest(server)
        self.assertEqual('nvidia', self.driver(A))
        self.keep(A)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.host.start_guest, server)
        self.assertIn(f'{A} cannot be taken from its driver on the host, '
                      f'because {EXPORTER}: end that process', str(error))
        self.assertNotIn('exporter', exception.for_owner(error))
        self.keep(A, False)
        self.host.start_guest(server)
        self.assertHas(server, A)

    def test_release(self):
        """The card is reset when the process has closed it."""
        self.start()
        server = self.boot()
        self.host.cloud.stop_guest(server, undefine=True)
        self.keep(A)
        self.host.delete(server)
        claim, = self.host.holdings.being_released()
        self.assertIn(f'its driver on the host may not let it go ({EXPORTER}):'
                      f' end that process', claim.error)
        self.assertFalse(self.host.inventory.cards.is_busy(A))
        self.assertEqual([], self.host.kernel.resets(A))
        self.assertHas(self.boot(), B)
        self.keep(A, False)
        self.host.reconciler.run()
        self.assertEqual([[A, None]], self.host.kernel.resets(A))
        self.assertEqual([A], self.free())

    def test_cost(self):
        """A build asks twice for each device that the host's drivers have: at
        the choice and before it is unbound. Looks do not ask."""
        self.start()
        asked, ask = [], self.host.kernel.processes

        def asks(functions):
            asked.append(functions)
            return ask(functions)
        self.host.kernel.processes = asks
        self.host.inventory.looks.run()
        self.assertEqual([], asked)
        server = self.boot()
        self.assertEqual([[A], [A]], asked)
        self.host.inventory.looks.run()
        self.assertEqual([[A], [A]], asked)
        # before it is reset
        self.host.delete(server)
        self.assertEqual([[A]] * 3, asked)
        for release in ((self.host.kernel.rebind, A, 'vfio-pci'),
                        (self.host.kernel.unbind, B)):
            release[0](*release[1:])
            self.host.inventory.looks.run()
            self.boot(release[1])
        self.assertEqual([[A]] * 3, asked)

    def test_cost_of_vfio(self):
        """One attribute of each device that a build chooses."""
        self.start(gpus=[{'address': a, 'driver': 'vfio-pci'}
                         for a in (A, B)])
        questions = []

        def counted(name):
            real = getattr(self.host.kernel, name)

            def asks(about, *more):
                if name != 'read' or about.endswith('/enable'):
                    questions.append((name, about))
                return real(about, *more)
            return mock.patch.object(self.host.kernel, name, asks)
        with counted('read'), counted('is_group_open'), counted('processes'):
            self.boot()
        self.assertEqual(
            [('read', f'bus/pci/devices/{A}/enable')], questions)


class HangsTest(TestCase):
    """A process opens a node after it was asked who has it."""

    #: a guest that gets the card never starts
    LIMIT = 60

    def setUp(self):
        super().setUp()
        self.start()
        self.addCleanup(self.keep, A, False)

    def open_after(self, times):
        ask = self.host.kernel.processes
        answers = iter([False] * (times - 1) + [True])

        def asks(functions):
            found = ask(functions)
            if next(answers, False):
                self.keep(A)
            return found
        self.host.kernel.processes = asks

    def assertRecovers(self):
        self.keep(A, False)
        self.wait_for(
            lambda: not self.host.inventory.cards.is_busy(A))
        self.host.reconciler.run()
        self.assertEqual([A], self.free())
        self.assertEqual('nvidia', self.driver(A))
        self.assertHas(self.boot(), A)

    def test_build_that_waited(self):
        """The card is not taken from its driver."""
        self.open_after(1)
        error = self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertIn(f'{A} cannot be taken from its driver on the host, '
                      f'because {EXPORTER}: end that process', str(error))
        self.assertEqual('nvidia', self.driver(A))
        self.assertHas(self.boot(), B)
        self.keep(A, False)
        self.host.inventory.looks.run()
        self.assertHas(self.boot(), A)

    def test_build(self):
        self.open_after(2)
        began = time.monotonic()
        error = self.assertRaises(exception.DeviceTimeout, self.boot)
        self.assertLess(time.monotonic() - began, 2)
        self.assertIn(f'Preparing {A} did not end within 1 s, because '
                      f'{EXPORTER}: end that process', str(error))
        self.assertNotIn('exporter', exception.for_owner(error))
        self.assertFalse(self.driver(A))
        # the next one gets another card, and nothing piles up
        running = len(self.host.inventory.cards._running)
        self.assertHas(self.boot(), B)
        self.host.reconciler.run()
        self.assertEqual(running, len(self.host.inventory.cards._running))
        self.assertRecovers()

    def test_restart_during_a_build(self):
        """The old driver has the card, which shows none."""
        self.open_after(2)
        self.assertRaises(exception.DeviceTimeout, self.boot)
        self.restart()
        self.host.reconciler.run()
        self.assertHas(self.boot(), B)
        claim, = self.host.holdings.being_released()
        self.assertIn(EXPORTER, claim.error)
        self.assertRecovers()

    def test_restart_during_a_start(self):
        """libvirt would wait as well, without a limit."""
        server = self.boot()
        self.host.cloud.stop_guest(server)
        self.open_after(1)
        self.assertRaises(
            exception.DeviceTimeout, self.host.start_guest, server)
        self.assertFalse(self.driver(A))
        self.restart()
        self.assertIn(EXPORTER, str(self.assertRaises(
            exception.DeviceUnavailable, self.host.start_guest, server)))
        # without the name of the process
        self.host.kernel.processes = mock.Mock(side_effect=PermissionError)
        self.assertIn('did not end within 1 s', str(self.assertRaises(
            exception.DeviceTimeout, self.host.start_guest, server)))
        self.keep(A, False)
        self.wait_for(
            lambda: not self.host.inventory.cards.is_busy(A))
        self.host.start_guest(server)
        self.assertHas(server, A)


class FailedBuildTest(TestCase):
    """libvirt does not start the guest: the card goes back to its driver."""

    def fail(self):
        self.start()
        self.host.cloud._takes = lambda handles, guest: 1 / 0
        self.assertRaises(ZeroDivisionError, self.boot)

    def test_reset(self):
        self.fail()
        self.assertEqual('nvidia', self.driver(A))

    def test_not_cleaned(self):
        self.config.config(handover=['none'], group='accel')
        self.fail()
        self.assertEqual('nvidia', self.driver(A))


class UnknownTest(TestCase):

    def test_without_privileges(self):
        """The build goes on."""
        self.start()

        def refuses(functions):
            raise PermissionError(1, 'Operation not permitted')
        self.host.kernel.processes = refuses
        self.assertHas(self.boot(), A)
