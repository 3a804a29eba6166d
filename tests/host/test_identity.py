# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Cards are exchanged, moved and swapped while the host has no power.

A server gets its own card or an error. Only the card that it had is cleaned
after it, wherever that is.
"""

import dataclasses
from unittest import mock

import ddt
import fixtures

from nova_accel.attach import holdings
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values
from tests.host import base
from tests.host import cloud as clouds
from tests.host import handovers
from tests.unit.host import A, B, FUNCTION, INTERFACE, OTHER, plain, vf

State = model.ClaimState
ONE, TWO, EMPTY = '0000:02:00.0', '0000:03:00.0', '0000:04:00.0'
SSD, GPU, CLOCK = (f'CUSTOM_ACCELERATOR_{type_}' for type_ in (
    'SSD', 'GPU', 'TIMECARD'))


class IdentityTestCase(base.HostTestCase):

    POOLS = 'none'

    CLASS = SSD

    def boot(self, address):
        return self.host.boot(
            {f'resources1:{self.CLASS}': '1'},
            self.host.allocation(address, self.CLASS))

    def exchange(self, *pairs, taken=None):
        """The host is off, and cards change their slots.

        :param taken: address of a slot whose card is taken out.
        """
        self.host.parts.close()
        self.host.cloud.lose_power()
        for one, other in pairs:
            self.simulated.kernel.exchange_cards(one, other)
        if taken:
            self.empty(taken)
        self.simulated.kernel.reboot()
        self.restart()

    def assertStarts(self, server, address):
        self.host.start_guest(server)
        self.assertHas(server, address)

    def empty(self, address):
        self.simulated.kernel.set_fault(address, vanish=True)

    def refused(self, server, *texts):
        for start in (self.host.start_guest, self.host.reboot):
            error = str(self.assertRaises(
                exception.DeviceUnavailable, start, server))
            for text in texts:
                self.assertIn(text, error)
        self.assertIsNone(self.host.devices_of(server))

    def fenced(self):
        self.host.report()
        return [address for address in (
            name.rpartition('_')[2] for name in self.host.fenced())
            if address != EMPTY or self.host.kernel.exists(pci.path(EMPTY))]

    def results(self):
        return [(h.handle, h.server, h.method, h.result)
                for h in self.host.store.handovers()]


@ddt.ddt
class DiskTest(IdentityTestCase):

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': a} for a in (ONE, TWO, EMPTY)],
                        drivers=('nvme',))
        self.empty(EMPTY)
        self.restart()
        self.server = self.boot(ONE)
        self.write(ONE, 'a secret')

    def write(self, address, text):
        self.simulated.kernel.write_disk(address, text)

    def data(self, address):
        return self.simulated.kernel.data_of_disk(address)

    def test_serial_is_remembered(self):
        claim, = self.host.holdings.all()
        self.assertEqual('S000002000', claim.serial)
        self.assertEqual('S000002000',
                         self.host.inventory.devices[ONE].serial)

    def test_swapped(self):
        other = self.boot(TWO)
        self.write(TWO, 'another secret')
        self.exchange((ONE, TWO))
        self.assertStarts(self.server, TWO)
        self.assertStarts(other, ONE)
        # each is cleaned where it is now
        self.host.delete(self.server)
        self.assertEqual(('another secret', ''),
                         (self.data(ONE), self.data(TWO)))
        self.assertHas(other, ONE)
        self.host.delete(other)
        self.assertEqual(('', ''), (self.data(ONE), self.data(TWO)))
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual([], self.fenced())
        self.boot(ONE)
        self.boot(TWO)

    @ddt.data(True, False)
    def test_swapped_while_a_third_is_absent(self, is_back_later):
        """Two disks change their slots, and the disk of a third server is
        taken out. Nothing of its claim applies to another disk."""
        self.simulated.kernel.set_fault(EMPTY, vanish=False)
        self.restart()
        other, third = self.boot(TWO), self.boot(EMPTY)
        self.write(TWO, 'another secret')
        self.write(EMPTY, 'a third secret')
        self.exchange((ONE, TWO), taken=EMPTY)
        self.assertStarts(self.server, TWO)
        self.assertStarts(other, ONE)
        self.refused(third, 'is gone')
        self.host.reconciler.run()
        self.assertEqual(3, len(self.host.holdings.all()))
        for address in ONE, TWO:
            self.assertRaises(
                exception.DeviceUnavailable, self.boot, address)
        if not is_back_later:
            self.host.delete(third)
        self.simulated.kernel.set_fault(EMPTY, vanish=False)
        self.exchange((ONE, EMPTY), (TWO, ONE))
        self.host.reconcile()
        self.assertEqual(
            ['a secret', 'a third secret' if is_back_later else '',
             'another secret'],
            [self.data(address) for address in (ONE, TWO, EMPTY)])
        self.assertStarts(self.server, ONE)
        self.assertStarts(other, EMPTY)
        if is_back_later:
            self.assertStarts(third, TWO)
        else:
            self.assertHas(self.boot(TWO), TWO)

    def test_swapped_in_a_resize(self):
        """Placement swaps what the server and its move have, which each
        claim says then."""
        move = self.host.resize_here(
            self.server, self.host.allocation(TWO, SSD))
        self.write(TWO, 'another secret')
        self.exchange((ONE, TWO))
        self.assertEqual({move: TWO, self.server: ONE}, {
            c.consumer_uuid: c.device_address
            for c in self.host.holdings.all()})
        self.assertAllocated()

    def test_swapped_of_one_server(self):
        self.host.delete(self.server)
        self.host.boot(
            {f'resources{n}:{SSD}': '1' for n in (1, 2)},
            self.host.allocation(ONE, SSD) | self.host.allocation(TWO, SSD))
        written, write = [], holdings.Holdings.reshaped

        def dies(*args):
            # between the two claims
            if written:
                raise KeyboardInterrupt
            written.append(write(*args))
        with mock.patch.object(holdings.Holdings, 'reshaped', dies):
            self.assertRaises(
                KeyboardInterrupt, self.exchange, (ONE, TWO))
        self.restart()
        self.assertAllocated()

    def assertAllocated(self):
        """Claims say what Placement has after a start, and agree with it."""
        self.host.report(starting=True)
        self.host.report()
        allocations = self.host.cloud.read()['allocations']
        for claim in self.host.holdings.all():
            self.assertIn(claim.provider_uuid,
                          allocations[claim.consumer_uuid])
            self.assertEqual(
                claim.provider_uuid,
                self.host.inventory.shown.provider_of(claim))
        self.assertNotIn('does not show it any more', self.log.output)

    def test_swapped_after_the_store_is_lost(self):
        """A guest had the disk when the new store began: the claim that it
        carries has the serial number, and nothing else does."""
        self.lose_store()
        self.exchange((ONE, TWO))
        self.host.report()
        self.host.reconcile()
        self.assertStarts(self.server, TWO)
        self.host.delete(self.server)
        self.assertEqual(([], ''), (self.host.holdings.all(), self.data(TWO)))

    def test_swapped_and_put_back(self):
        other = self.boot(TWO)
        self.exchange((ONE, TWO))
        self.exchange((ONE, TWO))
        for server, address in ((self.server, ONE), (other, TWO)):
            self.host.start_guest(server)
            self.assertHas(server, address)
        self.assertEqual('a secret', self.data(ONE))

    def test_moved_to_an_empty_slot(self):
        self.exchange((ONE, EMPTY))
        self.assertStarts(self.server, EMPTY)
        self.assertRaises(exception.DeviceUnavailable, self.boot, EMPTY)
        self.assertEqual('a secret', self.data(EMPTY))
        self.host.delete(self.server)
        self.assertEqual('', self.data(EMPTY))
        self.assertEqual([], self.host.holdings.all())
        self.assertNotIn(EMPTY, self.fenced())
        self.boot(EMPTY)

    @ddt.data(ONE, TWO)
    def test_excluded_meanwhile(self, excluded):
        """Two disks change their slots while one of the slots is excluded."""
        servers = {ONE: self.server, TWO: self.boot(TWO)}
        self.write(TWO, 'another secret')
        self.config.config(
            group='accel', exclude_devices=[f'address={excluded}'])
        self.restart()
        self.exchange((ONE, TWO))
        self.host.delete(servers[excluded])
        self.config.config(group='accel', exclude_devices=[])
        self.restart()
        self.host.reconciler.run()
        left, = {ONE, TWO} - {excluded}
        self.assertEqual([servers[left]], self.host.currents())
        self.assertEqual(1, len(self.host.holdings.all()))
        self.host.delete(servers[left])
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual(('', ''), (self.data(ONE), self.data(TWO)))

    def test_moved_with_a_part_that_is_not_settled(self):
        """What a server has is not cleaned with the rest of its card."""
        self.exchange((ONE, EMPTY))
        self.host.holdings.settle(todo=[values.Unsettled(serial='S000002000')])
        self.host.reconciler.run()
        self.assertEqual('a secret', self.data(EMPTY))
        self.host.delete(self.server)
        self.host.reconciler.run()
        self.assertEqual('', self.data(EMPTY))
        self.assertEqual(frozenset(), self.host.store.unsettled())
        self.assertNotIn(EMPTY, self.fenced())

    def test_moved_while_it_was_deleted(self):
        """Killed between the end of the server and the cleaning."""
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.holdings.releasing(self.host.holdings.all())
        self.exchange((ONE, EMPTY))
        self.assertEqual('a secret', self.data(EMPTY))
        self.host.reconciler.run()
        self.assertEqual('', self.data(EMPTY))
        self.assertEqual([], self.host.holdings.all())

    def exchanged(self):
        """Another disk is in the slot, and the first one is away."""
        self.exchange((ONE, TWO), taken=TWO)
        self.write(ONE, 'data of the operator')

    def test_exchanged(self):
        self.exchanged()
        self.refused(self.server, 'another card is there', 'S000003000')
        self.assertIn(ONE, self.fenced())
        self.host.delete(self.server)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('data of the operator', self.data(ONE))
        self.assertEqual([(ONE, self.server, 'none',
                           'another card is in its place')], self.results())

    def test_exchanged_and_it_comes_back_later(self):
        self.exchanged()
        self.host.delete(self.server)
        self.simulated.kernel.set_fault(TWO, vanish=None)
        self.restart()
        self.assertIn(TWO, self.fenced())
        self.assertRaises(exception.DeviceUnavailable, self.boot, TWO)
        self.assertEqual('a secret', self.data(TWO))
        self.host.reconciler.run()
        self.assertEqual('', self.data(TWO))
        self.assertNotIn(TWO, self.fenced())
        self.assertEqual(frozenset(), self.host.store.unsettled())

    def test_comes_back_and_cannot_be_cleaned(self):
        self.exchanged()
        self.host.delete(self.server)
        self.simulated.kernel.set_fault(TWO, vanish=None, format='refused')
        self.restart()
        self.host.reconciler.run()
        self.restart()
        self.host.reconciler.run()
        self.assertIn(TWO, self.fenced())
        claim, = self.host.holdings.all()
        self.assertIs(State.DELETING, claim.state)
        self.assertIn('had to be erased', claim.error)
        self.simulated.kernel.set_fault(TWO, format=None)
        self.host.reconciler.run()
        self.assertEqual('', self.data(TWO))
        self.assertNotIn(TWO, self.fenced())

    def test_unknown_serial_in_the_claim(self):
        """It counts as before, and is filled in when the guest runs with the
        device."""
        claim, = self.host.holdings.all()
        self.host.store.update([claim], serial='')
        self.host.cloud.stop_guest(self.server)
        self.host.reconciler.run()
        self.host.start_guest(self.server)
        self.assertEqual('', self.host.holdings.all()[0].serial)
        self.host.reconciler.run()
        self.assertEqual('S000002000', self.host.holdings.all()[0].serial)

    def test_unknown_serial_of_the_device(self):
        self.simulated.kernel.set_fault(
            TWO, attributes={'serial': 'missing'})
        self.exchange((ONE, TWO), taken=TWO)
        # another server's disk it may be, and is
        self.refused(self.server, 'which disk it is cannot be read')


class VfioDiskTest(IdentityTestCase):
    """The operator keeps disks on vfio-pci, where they cannot be read."""

    def start_disks(self, **disk):
        self.start_host(nvmes=[{'address': a, **disk} for a in (ONE, TWO)],
                        drivers=('nvme',))

    def bind(self, driver):
        for address in (ONE, TWO):
            self.simulated.kernel.rebind(address, driver)
        self.host.inventory.scanner.scan()

    def data(self):
        return [self.simulated.kernel.data_of_disk(a) for a in (ONE, TWO)]

    def test_never_seen(self):
        self.start_disks(driver='vfio-pci')
        self.assertEqual([ONE, TWO], self.fenced())
        self.bind('nvme')
        self.assertEqual([], self.fenced())
        self.boot(ONE)

    def test_swapped_and_killed(self):
        """The store has two rows that may be about a disk: one with its serial
        number, and one of its slot, where it could not be read."""
        self.start_disks()
        # by their rows
        (one, _), (two, disk) = self.host.inventory.devices.items()
        server = self.boot(two)
        kernel = self.simulated.kernel
        kernel.write_disk(two, 'a secret')
        self.host.parts.close()
        self.host.cloud.lose_power()
        kernel.exchange_cards(one, two)
        kernel.rebind(one, 'vfio-pci')
        self.restart()
        self.host.report()
        kernel.rebind(one, 'nvme')
        # nova-compute is killed before it has more than found the disk
        self.host.parts.close()
        self.host.store.place(dataclasses.replace(
            disk, address=one, ports=self.host.inventory.devices[one].ports),
            True, {})
        self.restart()
        self.assertStarts(server, one)
        self.host.delete(server)
        self.assertEqual((['', ''], []), (self.data(), self.fenced()))

    def test_swapped(self):
        """As cards are while the host is off, after which the disks are on
        vfio-pci before nova-compute starts."""
        self.start_disks()
        self.bind('vfio-pci')
        servers = [self.boot(a) for a in (ONE, TWO)]
        kernel = self.simulated.kernel
        for number, address in enumerate((ONE, TWO)):
            kernel.write_disk(address, f'secret of {number}')
            self.assertEqual('vfio-pci', pci.driver(kernel, address))
        self.host.parts.close()
        self.host.cloud.lose_power()
        kernel.exchange_cards(ONE, TWO)
        for address in (ONE, TWO):
            kernel.rebind(address, 'vfio-pci')
        self.restart()
        for server in servers:
            self.refused(server, 'its serial number is')
        # what is of the other server is not erased
        self.host.delete(servers[0])
        claim, = self.host.store.claims(servers[0])
        self.assertIn('its serial number is', claim.error)
        self.assertEqual(['secret of 1', 'secret of 0'], self.data())
        self.assertRaises(exception.DeviceUnavailable, self.boot, ONE)
        # where it can be told which is which, each is cleaned where it is
        self.bind('nvme')
        self.host.reconciler.run()
        self.assertEqual(['secret of 1', ''], self.data())
        self.host.delete(servers[1])
        self.assertEqual(['', ''], self.data())
        self.assertEqual(([], []), (self.host.holdings.all(), self.fenced()))

    def test_starts_again(self):
        self.start_disks()
        self.bind('vfio-pci')
        server = self.boot(ONE)
        self.simulated.kernel.write_disk(ONE, 'a secret')
        self.host.reboot(server)
        self.restart()
        # as before the guest of a rescue ends
        self.host.accelerators.resume(
            self.host.cloud.admin_context(), self.host.cloud.server(server))
        self.assertHas(server, ONE)
        self.assertEqual(['a secret', ''], self.data())
        self.host.delete(server)
        self.assertEqual((['', ''], 'vfio-pci'), (
            self.data(), pci.driver(self.host.kernel, ONE)))
        self.boot(ONE)


@ddt.ddt
class RecordTest(IdentityTestCase):

    @ddt.data(TWO, EMPTY)
    def test_follows_the_disk(self, slot):
        """What the server made of it is not what it is restored to."""
        self.start_host(nvmes=[
            {'address': a, 'namespaces': 3, 'faults': {'vanish': a == EMPTY}}
            for a in (ONE, TWO, EMPTY)], drivers=('nvme',))
        before = self.host.kernel.read_nvme(ONE).namespaces
        server = self.boot(ONE)
        self.simulated.kernel.change_disk(ONE, namespaces=[])
        self.exchange((ONE, slot))
        if slot == EMPTY:
            # no disk was ever there
            self.simulated.kernel.set_fault(EMPTY, vanish=False)
            self.simulated.kernel.set_fault(ONE, vanish=True)
            self.restart()
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual((3, before), (
            len(before), self.host.kernel.read_nvme(slot).namespaces))

    def test_killed_before_the_disk_is_written_down(self):
        self.start_host(nvmes=[{'address': a, 'namespaces': 3}
                               for a in (ONE, TWO)], drivers=('nvme',))
        before = self.host.kernel.read_nvme(ONE).namespaces
        server = self.boot(ONE)
        self.simulated.kernel.change_disk(ONE, namespaces=[])
        with mock.patch.object(claim_store.ClaimStore, 'set_devices'):
            self.exchange((ONE, TWO))
        self.restart()
        self.host.delete(server)
        self.assertEqual((3, before), (
            len(before), self.host.kernel.read_nvme(TWO).namespaces))

    def test_of_a_disk_that_comes_back(self):
        self.start_host(nvmes=[{'address': a, 'namespaces': 3}
                               for a in (ONE, TWO)], drivers=('nvme',))
        before = self.host.kernel.read_nvme(ONE).namespaces
        server = self.boot(ONE)
        self.simulated.kernel.change_disk(ONE, namespaces=[])
        self.exchange((ONE, TWO))
        self.empty(TWO)
        self.restart()
        self.host.delete(server)
        self.restart()
        self.simulated.kernel.set_fault(TWO, vanish=None)
        self.restart()
        self.host.reconciler.run()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual((3, before), (
            len(before), self.host.kernel.read_nvme(TWO).namespaces))


class NvmeVfTest(IdentityTestCase):

    def test_swapped(self):
        self.start_host(nvmes=[
            {'address': a, 'total_vfs': 2, 'vfs': 2} for a in (ONE, TWO)],
            drivers=('nvme',))
        server = self.boot(ONE)
        self.exchange((ONE, TWO))
        # the kernel has forgotten the VFs
        self.host.delete(server)
        claim, = self.host.holdings.all()
        self.assertIs(State.DELETING, claim.state)
        self.assertEqual(TWO, claim.device_address)
        self.assertIn('No such device', claim.error)
        self.assertEqual([TWO], self.fenced())


@ddt.ddt
class OtherKindsTest(IdentityTestCase):

    CLASS = GPU

    def start_gpus(self, *serials):
        self.start_host(gpus=[
            {'address': a, 'device_serial': serial}
            for a, serial in zip((A, B), serials, strict=True)],
            drivers=('gpu',))

    def resets(self, address):
        return len(self.simulated.kernel.resets(address))

    def test_swapped(self):
        self.start_gpus('0011223344556677', '8899aabbccddeeff')
        server = self.boot(A)
        self.exchange((A, B))
        self.assertStarts(server, B)
        before = self.resets(A), self.resets(B)
        self.host.delete(server)
        self.assertEqual((before[0], before[1] + 1),
                         (self.resets(A), self.resets(B)))
        self.assertEqual(([], []),
                         (self.host.holdings.all(), self.fenced()))

    def test_swapped_and_the_store_is_away(self):
        """No server gets the other card before it is known which it is."""
        self.start_gpus('0011223344556677', '8899aabbccddeeff')
        server = self.boot(A)
        with fixtures.MonkeyPatch(
                'nova_accel.store.claim_store.ClaimStore.place',
                self.unwritten):
            self.exchange((A, B))
            self.refused(server, 'another card is in its place')
            self.assertRaises(exception.DeviceUnavailable, self.boot, B)
        self.host.inventory.scanner.scan()
        self.assertStarts(server, B)

    @staticmethod
    def unwritten(*args):
        raise exception.AcceleratorsUnavailable(
            'The claim store cannot be written.')

    @ddt.data('', '0011223344556677')
    def test_that_cannot_be_told_apart(self, serial):
        """No serial number, or the same one for all cards of a kind."""
        self.start_gpus(serial, serial)
        server = self.boot(A)
        self.exchange((A, B))
        self.host.start_guest(server)
        self.assertHas(server, A)
        self.assertEqual('', self.host.holdings.all()[0].serial)

    def start_products(self):
        self.start_host(gpus=[
            {'address': A}, {'address': B, 'vendor': '1002',
                             'device': '7448'}], drivers=('gpu',))

    def test_another_product(self):
        """Neither has a serial number."""
        self.start_products()
        server, other = self.boot(A), self.boot(B)
        self.exchange((A, B))
        self.refused(server, 'another card is there', '1002:7448')
        self.refused(other, 'another card is there', '10de:')
        before = self.resets(A), self.resets(B)
        self.host.delete(server)
        # not its own, whose guest may have made it look so
        self.assertEqual(before, (self.resets(A), self.resets(B)))
        self.assertEqual([other], [c.instance_uuid
                                   for c in self.host.holdings.all()])
        self.assertEqual([(A, server, 'none', 'another card is in its place')],
                         self.results())
        for _ in range(3):
            self.host.report()
        self.assertRaises(exception.AcceleratorError, self.boot, A)
        # when it comes back, it is cleaned first
        self.exchange((A, B))
        self.assertRaises(exception.AcceleratorError, self.boot, A)
        self.host.start_guest(other)
        self.assertHas(other, B)
        before = self.resets(A), self.resets(B)
        self.host.reconciler.run()
        self.assertEqual((before[0] + 1, before[1]),
                         (self.resets(A), self.resets(B)))
        self.assertEqual(frozenset(), self.host.store.unsettled())
        self.host.reattach()
        self.assertHas(self.boot(A), A)

    def test_another_product_that_the_operator_takes(self):
        self.start_products()
        server = self.boot(A)
        self.exchange((A, B))
        self.empty(B)
        self.restart()
        self.host.delete(server)
        self.host.report()
        self.assertRaises(exception.AcceleratorError, self.boot, A)
        self.host.reattach()
        self.assertHas(self.boot(A), A)

    def test_product_is_filled_in(self):
        """The claim was made while it could not be read."""
        self.start_products()
        server = self.boot(A)
        claim, = self.host.holdings.all()
        self.host.store.update([claim], ids='')
        self.host.reconciler.run()
        self.assertEqual(claim.ids, self.host.holdings.all()[0].ids)
        self.assertTrue(claim.ids.startswith('10de:'))
        self.exchange((A, B))
        self.refused(server, 'another card is there')

    def test_same_serial_and_one_of_them_dies(self):
        """The other one is not cleaned while a server has it."""
        self.start_gpus('0011223344556677', '0011223344556677')
        self.simulated.kernel.set_fault(B, vanish=True)
        self.restart()
        first = self.boot(A)
        self.simulated.kernel.set_fault(B, vanish=None)
        self.restart()
        other = self.boot(B)
        before = self.resets(B)
        self.exchange()
        self.simulated.kernel.set_fault(A, vanish=True)
        self.restart()
        self.host.start_guest(other)
        self.host.delete(first)
        self.assertEqual(before, self.resets(B))
        self.assertHas(other, B)
        self.assertIn(f'has a claim on {B}',
                      self.host.store.claims(first)[0].error)

    def test_serial_is_read_when_the_card_comes(self):
        reads = []
        self.start_gpus('0011223344556677', '8899aabbccddeeff')
        read = self.host.kernel.read_device_serial
        self.host.kernel.read_device_serial = (
            lambda address: reads.append(address) or read(address))
        self.restart()
        for _ in range(3):
            self.host.inventory.scanner.scan()
        self.assertEqual([A, B], sorted(reads))
        self.simulated.kernel.set_fault(A, vanish=True)
        self.host.inventory.scanner.scan()
        self.simulated.kernel.set_fault(A, vanish=None)
        self.host.inventory.scanner.scan()
        self.assertEqual([A, A, B], sorted(reads))

    def test_without_privileges(self):
        self.start_gpus('0011223344556677', '8899aabbccddeeff')

        def read(address):
            raise PermissionError(1, 'Operation not permitted')
        self.host.kernel.read_device_serial = read
        self.restart()
        self.assertHas(self.boot(A), A)
        self.assertIn('Operation not permitted', self.log.output)

    def test_clock_whose_guest_writes_its_serial(self):
        """It would look like another card, which is not to be cleaned."""
        self.CLASS = CLOCK
        self.start_host(timecards=[{'address': A,
                                    'serial': '3c:6d:89:00:12:fe'}],
                        drivers=('timecard',))
        server = self.boot(A)
        self.simulated.kernel.change_timecard(
            A, serial='3c:6d:89:00:99:99', firmware='666')
        self.host.cloud.stop_guest(server)
        self.restart()
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.host.report()
        # until the operator gives it free
        self.assertRaises(exception.AcceleratorError, self.boot, A)
        self.host.reattach()
        self.boot(A)

    def start_clock(self):
        self.CLASS = CLOCK
        self.start_host(timecards=[{'address': A,
                                    'serial': '3c:6d:89:00:12:fe'}],
                        drivers=('timecard',))
        return self.boot(A)

    def write_serial(self):
        self.simulated.kernel.change_timecard(A, serial='3c:6d:89:00:99:99')

    def test_guest_undoes_the_operators_word(self):
        server = self.start_clock()
        self.host.disable(A)
        self.write_serial()
        self.host.cloud.stop_guest(server)
        self.restart()
        self.assertEqual({A}, self.host.inventory.table.disabled().keys())
        self.host.delete(server)
        self.host.report()
        self.host.reattach()
        self.assertRaises(exception.AcceleratorError, self.boot, A)
        self.restart()
        self.assertRaises(exception.AcceleratorError, self.boot, A)
        self.host.enable()
        self.host.report()
        self.host.reattach()
        self.assertHas(self.boot(A), A)

    def test_guest_makes_it_look_clean(self):
        """Its policy was none, and is clear when the next server comes."""
        self.config.config(group='accel', handover=['none'])
        server = self.start_clock()
        self.write_serial()
        self.host.delete(server)
        self.assertEqual(1, len(self.host.store.unclean()))
        self.config.config(group='accel', handover=['clear'])
        before = self.resets(A)
        self.restart()
        self.host.reconciler.run()
        self.assertLess(before, self.resets(A))
        self.assertEqual(frozenset(), self.host.store.unclean())
        self.assertHas(self.boot(A), A)


class FpgaTest(base.HostTestCase):
    """What a project has loaded stays its own, wherever the card goes."""

    def setUp(self):
        super().setUp()
        self.start_host(
            {'address': A, 'device_serial': '0011223344556677'},
            {'address': B, 'device_serial': '8899aabbccddeeff'})
        self.image = self.host.upload(FUNCTION)
        self.server = self.host.boot(
            base.asks(FUNCTION), self.host.allocation(A))

    def swap(self, taken=None):
        """:param taken: address of a slot whose card is taken out."""
        self.host.parts.close()
        self.host.cloud.lose_power()
        self.simulated.kernel.exchange_cards(A, B)
        if taken:
            self.simulated.kernel.set_fault(taken, vanish=True)
        self.restart()

    def origins(self):
        return [self.host.inventory.devices[a].region(0).origin
                for a in (A, B)]

    def test_swapped(self):
        self.assertEqual([model.OPERATOR] * 2, self.origins())
        self.swap()
        # the host rebooted warm: the cards keep what they carry
        self.assertEqual(plain(FUNCTION), self.host.carries(B))
        self.assertEqual([None, None], self.origins())
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(B))
        self.host.delete(self.server)
        self.assertEqual([], self.host.holdings.all())
        # programmed again, on the card that the server had
        self.assertEqual([None, model.OPERATOR], self.origins())

    def test_exchanged(self):
        """The server could have written the serial number of its card, so
        that the operator has to say that it is another one."""
        self.swap(taken=B)
        self.assertRaises(exception.DeviceUnavailable,
                          self.host.start_guest, self.server)
        self.host.delete(self.server)
        self.assertEqual([], self.host.holdings.all())
        self.host.report()
        self.assertIn(f'{clouds.NODE}_accel_{A}_region0', self.host.fenced())
        self.host.reattach()
        self.assertNotIn(f'{clouds.NODE}_accel_{A}_region0',
                         self.host.fenced())
        # the first one comes back, and there is no clearing image
        self.simulated.kernel.set_fault(B, vanish=None)
        self.host.inventory.scanner.scan()
        for _ in range(2):
            self.host.report()
            self.assertIn(f'{clouds.NODE}_accel_{B}_region0',
                          self.host.fenced())
            self.host.reconciler.run()
            self.host.settle()

    def test_put_back(self):
        self.swap()
        self.swap()
        self.host.start_guest(self.server)
        self.assertHas(self.server, vf(A))
        self.assertEqual(plain(FUNCTION), self.host.carries(A))


@ddt.ddt
class MovedContentTest(base.HostTestCase):
    """A card has what a project loaded, and is elsewhere when it comes back.
    """

    POOLS = 'none'

    def start(self, serial, **options):
        self.config.config(group='accel', runtime_programming_pause=0,
                           **options)
        self.start_host({'address': A, 'device_serial': serial},
                        {'address': B, 'faults': {'vanish': True}})
        self.restart()
        trojan = self.host.upload(OTHER, handovers.private(handovers.EVE))
        server = self.host.boot(
            handovers.FREE, self.host.allocation(A), project=handovers.EVE,
            image_properties={'accel:bitstream_id': trojan})
        self.assertEqual(plain(OTHER), self.host.carries(A))
        return server

    def away(self):
        """The card is taken out, and the host starts without it."""
        self.host.parts.close()
        self.host.cloud.lose_power()
        self.simulated.kernel.set_fault(A, vanish=True)
        self.simulated.kernel.reboot()
        self.restart()

    def comes_to_another_slot(self):
        self.host.parts.close()
        self.simulated.kernel.exchange_cards(A, B)
        self.simulated.kernel.set_fault(A, vanish=True)
        self.simulated.kernel.set_fault(B, vanish=None)
        self.restart()
        self.host.report()

    def shown(self):
        """Traits of what the region in the other slot carries."""
        return {trait for provider
                in self.host.cloud.read()['providers'].values()
                for trait in provider['traits']
                if B in provider['name'] and 'FUNCTION' in trait}

    @ddt.data('0011223344556677', '')
    def test_released_while_it_is_away(self, serial):
        server = self.start(serial)
        self.away()
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        # nothing in memory tells of it
        self.restart()
        self.assertNotIn(A, self.host.inventory.devices)
        self.comes_to_another_slot()
        self.assertEqual(
            handovers.EVE if serial else model.SOME_PROJECT,
            self.host.inventory.devices[B].region(0).origin)
        self.assertEqual(set(), self.shown())
        allocation = self.host.allocation(B)
        for specs in (base.ONE, base.asks(OTHER)):
            self.assertRaises(exception.AcceleratorError, self.host.boot,
                              specs, allocation, project=handovers.BOB)
        # the operator has what takes it away
        self.host.upload(FUNCTION, {'accel:clears': 'registers',
                                    'accel:region_type_id': INTERFACE})
        self.host.reconciler.run()
        self.host.settle()
        self.assertEqual(plain(FUNCTION), self.host.carries(B))
        self.host.boot(base.ONE, allocation, project=handovers.BOB)

    def test_new_card_beside_it(self):
        """Without a serial number, too; nothing is missing."""
        self.start('')
        self.simulated.kernel.set_fault(B, vanish=None)
        self.restart()
        self.assertEqual(handovers.EVE,
                         self.host.inventory.devices[A].region(0).origin)
        self.assertEqual(model.OPERATOR,
                         self.host.inventory.devices[B].region(0).origin)

    def test_reset_only(self):
        """The policy leaves it; it stays the project's."""
        server = self.start('0011223344556677', handover=['reset'])
        self.host.delete(server)
        self.away()
        self.restart()
        self.comes_to_another_slot()
        region = self.host.inventory.devices[B].region(0)
        self.assertEqual((handovers.EVE, plain(OTHER)),
                         (region.origin, region.function_uuid))
        self.assertEqual(set(), self.shown())

    def test_cleaned_before_it_moved(self):
        server = self.start('0011223344556677')
        self.host.upload(FUNCTION, {'accel:clears': 'registers',
                                    'accel:region_type_id': INTERFACE})
        self.host.delete(server)
        self.assertEqual({model.OPERATOR}, {
            loaded.origin for loaded
            in self.host.store.loaded().values()})
