# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A card is given as a whole or by VFs, never both: the kernel forgets VFs at
each boot of the host, and the physical function reaches what the server of a VF
has on the card."""

import errno
import threading
import time

import fixtures

from nova_accel import exception
from nova_accel import model
from tests.host import base
from tests.unit.host import A, B, vf

AI, GPU, SSD, VGPU = (f'CUSTOM_ACCELERATOR_{type_}'
                      for type_ in ('AI', 'GPU', 'SSD', 'VGPU'))
NPU = {'vendor': '19e5', 'device': 'd801', 'class': '0x120000',
       'driver': 'davinci', 'total_vfs': 2}
RULE = 'vendor=19e5 product=d801 type=AI'


class TestCase(base.HostTestCase):

    CLASS = SSD

    def boot(self, address=A):
        return self.host.boot({f'resources1:{self.CLASS}': '1'},
                              self.host.allocation(address, self.CLASS))

    def refused(self, address=A):
        self.assertRaises(exception.DeviceUnavailable, self.boot, address)

    def lose_vfs(self):
        """The host boots, and nobody has made VFs when nova-compute looks."""
        self.host.power_cut()
        self.restart()
        self.host.reconciler.run()
        self.host.report()

    def free(self):
        """How many accelerators of each provider Placement has free."""
        return {address: sum(
            inventory[self.CLASS]['total'] - inventory[self.CLASS]['reserved']
            - self.given(uuid) for uuid, inventory in (
                (uuid, provider['inventory']) for uuid, provider
                in self.host.cloud.read()['providers'].items())
            if self.CLASS in inventory
            and address in
            self.host.inventory.shown.providers()[uuid].addresses)
            for address in (A, B)}

    def given(self, uuid):
        return sum(uuid in allocations for allocations
                   in self.host.cloud.read()['allocations'].values())

    def make_vfs(self, *addresses):
        for address in addresses:
            self.simulated.kernel.set_numvfs(address, 2)
        self.host.inventory.scanner.scan()
        self.host.report()


class DiskTest(TestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host(drivers=('nvme',), nvmes=[
            {'address': A, 'total_vfs': 4, 'vfs': 2},
            {'address': B, 'total_vfs': 4, 'vfs': 2}])
        self.server = self.boot()
        self.held, = self.host.devices_of(self.server)
        self.simulated.kernel.write_disk(self.held, 'secret')

    def test_pf_while_a_server_has_a_vf(self):
        self.lose_vfs()
        self.refused()
        self.assertEqual([B], self.host.devices_of(self.boot(B)))
        self.make_vfs(A)
        self.assertNotEqual(self.held, self.host.devices_of(self.boot())[0])
        self.host.start_guest(self.server)
        self.assertHas(self.server, self.held)

    def test_pf_while_a_vf_is_not_clean(self):
        """The server is deleted while its VF is away."""
        self.lose_vfs()
        self.host.delete(self.server)
        self.host.reconciler.run()
        self.host.report()
        claim, = self.host.holdings.all()
        self.assertIs(model.ClaimState.DELETING, claim.state)
        self.assertEqual([A], self.fenced())
        self.refused()
        self.make_vfs(A)
        self.host.reconciler.run()
        self.host.report()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('', self.simulated.kernel.data_of_disk(self.held))
        self.assertEqual([], self.fenced())

    def test_pf_while_a_vf_waits_for_the_operator(self):
        self.config.config(handover=['operator'], group='accel')
        self.host.delete(self.server)
        self.lose_vfs()
        self.refused()

    def test_store_was_lost(self):
        """The server has its VF, with its data, and nothing else: its
        allocation is not for the whole disk, which is not erased."""
        self.lose_store()
        self.lose_vfs()
        self.host.settle()
        self.assertEqual([self.held], [
            claim.handle.address for claim in self.host.holdings.all()
            if claim.device_address == A])
        self.assertNotIn(A, [
            record.handle for record
            in self.host.store.handovers()])
        self.make_vfs(A)
        self.host.reconcile()
        self.host.settle()
        self.host.start_guest(self.server)
        self.assertHas(self.server, self.held)
        self.assertEqual('secret',
                         self.simulated.kernel.data_of_disk(self.held))

    def test_vfs_that_are_wanted_and_not_made(self):
        """Then nobody gets the disk whole either."""
        self.host.delete(self.server)
        self.config.config(virtual_functions=[f'{A}=2'], group='accel')
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.sim.SimulatedKernel.set_numvfs', self.no_memory))
        self.lose_vfs()
        self.refused()
        self.assertIn(f'requests 2 VFs of {A}, and the kernel refused (Cannot '
                      f'allocate memory)',
                      self.host.inventory.devices[A].reason)

    @staticmethod
    def no_memory(kernel, pf, count, probe):
        raise OSError(errno.ENOMEM, 'Cannot allocate memory')

    def fenced(self):
        return [a for a, free in self.free().items() if not free]


class PooledDiskTest(DiskTest):

    POOLS = 'host'

    def test_count_of_the_pool(self):
        self.lose_vfs()
        self.assertEqual({A: 1, B: 1}, self.free())
        self.assertEqual([B], self.host.devices_of(self.boot()))
        self.refused()

    # the provider has both disks
    test_pf_while_a_server_has_a_vf = None
    test_pf_while_a_vf_is_not_clean = None
    test_pf_while_a_vf_waits_for_the_operator = None
    test_vfs_that_are_wanted_and_not_made = None


class RuleTest(TestCase):

    CLASS = AI
    POOLS = 'none'

    def start(self, vfs):
        self.config.config(pci_devices=[RULE], group='accel')
        self.start_host(drivers=('pci',), others=[
            {'address': address, 'vfs': vfs, **NPU} for address in (A, B)])
        return self.boot()

    def test_pf_while_a_server_has_a_vf(self):
        server = self.start(vfs=2)
        self.lose_vfs()
        self.refused()
        self.make_vfs(A)
        self.host.start_guest(server)
        self.assertHas(server, vf(A))

    def test_vfs_that_do_not_answer(self):
        """A reset failed after a fatal error, and sriov_numvfs tells VFs: no
        server gets one, and none of them is lost for its server."""
        self.config.config(discovery_interval=3600, group='accel')
        server = self.start(vfs=2)
        kernel = self.simulated.kernel
        kernel.set_fault(A, lost_vfs=True)
        self.host.inventory.looks.run()
        self.host.report()
        # its server has one of those that are reserved
        self.assertEqual({A: -1, B: 2}, self.free())
        self.refused()
        self.assertIn('its VFs do not answer',
                      self.host.inventory.devices[A].reason)
        self.assertHas(server, vf(A))
        refused = self.assertRaises(
            exception.DeviceUnavailable, self.host.reboot, server)
        self.assertIn('write 0 and then their number', str(refused))
        self.host.delete(server)
        self.assertEqual([model.ClaimState.DELETING], [
            claim.state for claim in self.host.holdings.all()])
        kernel.set_numvfs(A, 0)
        self.make_vfs(A)
        self.host.reconciler.run()
        self.host.report()
        self.assertEqual([], self.host.holdings.all())
        self.assertHas(self.boot(), vf(A))

    def test_vfs_while_a_stopped_server_has_the_pf(self):
        server = self.start(vfs=0)
        self.host.cloud.stop_guest(server)
        self.config.config(virtual_functions=[f'{A}=2'], group='accel')
        self.restart()
        self.host.report()
        self.assertEqual([vf(A), vf(A, 1)], [
            h.address for h in self.host.inventory.devices[A].handles])
        self.refused()
        self.assertEqual([B], self.host.devices_of(self.boot(B)))


class TogetherTest(TestCase):
    """A card of which all VFs are one accelerator."""

    CLASS = AI
    POOLS = 'none'
    TOGETHER = f'{RULE} vfs=together'

    def start(self, rule=TOGETHER):
        self.config.config(pci_devices=[rule], group='accel')
        self.start_host(drivers=('pci',), others=[
            {'address': address, 'vfs': 2, **NPU} for address in (A, B)])

    def change(self, rule):
        self.config.config(pci_devices=[rule], group='accel')
        self.restart()
        self.host.report()

    def test_one_claim_of_two_functions(self):
        self.start()
        self.assertEqual({A: 1, B: 1}, self.free())
        server = self.boot()
        self.assertHas(server, vf(A))
        self.assertEqual([vf(A), vf(A, 1)], self.host.devices_of(server))
        self.assertEqual([model.ClaimState.BOUND],
                         self.host.states(server))
        self.assertEqual({A: 0, B: 1}, self.free())
        self.assertEqual({vf(A), vf(A, 1)},
                         self.host.descriptions.roles(server).keys())
        self.host.reboot(server)
        self.restart()
        self.host.reconciler.run()
        self.assertHas(server, vf(A))
        self.host.delete(server)
        self.assertEqual([vf(A), vf(A, 1)], [
            function for function, _ in self.simulated.kernel.resets(A)])
        self.assertEqual({A: 1, B: 1}, self.free())
        self.boot()

    def test_of_a_lost_store(self):
        """What the guest has are functions of one device."""
        self.start()
        server = self.boot()
        self.lose_store()
        self.host.reconciler.run()
        self.assertHas(server, vf(A))
        self.refused()

    def test_cleaned_by_the_operator(self):
        self.start()
        self.assertEqual(
            f'{A} is clean (reset flr, reset flr {vf(A, 1)}).',
            self.host.maintenance.clean(A))

    def test_that_were_not(self):
        self.start(RULE)
        second = self.host.boot(
            {f'resources1:{AI}': '1'}, self.host.allocation(A, AI))
        server = self.boot()
        self.host.delete(second)
        self.assertEqual([vf(A, 1)], self.host.devices_of(server))
        self.host.cloud.stop_guest(server)
        self.change(self.TOGETHER)
        self.assertGreaterEqual(0, self.free()[A])
        self.refused()
        self.host.start_guest(server)
        self.assertHas(server, vf(A, 1))
        self.host.delete(server)
        self.host.report()
        self.assertHas(self.boot(), vf(A))

    def test_that_are_not_any_more(self):
        self.start()
        server = self.boot()
        self.host.cloud.stop_guest(server)
        self.change(RULE)
        self.assertGreaterEqual(0, self.free()[A])
        self.refused()
        self.host.start_guest(server)
        self.assertEqual([vf(A), vf(A, 1)], self.host.devices_of(server))
        self.host.delete(server)
        self.assertEqual(2, len(self.simulated.kernel.resets(A)))
        self.host.report()
        self.assertEqual([[vf(A)], [vf(A, 1)]], sorted(
            self.host.devices_of(self.boot()) for _ in range(2)))


class OtherDriverTest(TestCase):
    """VFs of a GPU that make vGPUs; without them it is a whole GPU."""

    CLASS = VGPU

    def setUp(self):
        super().setUp()
        card = {'framework': 'sriov', 'vendor': '8086', 'device': '56c0',
                'driver': 'xe', 'total_vfs': 4, 'vfs': 2}
        self.start_host(drivers=('vgpu', 'gpu'), vgpus=[
            {'address': address, **card} for address in (A, B)])
        self.inventory = self.host.inventory
        self.drivers = self.inventory._drivers

    def until(self, condition):
        """Wait for what another thread does."""
        end = time.monotonic() + 20
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.002)

    def test_found_before_it_is_lost(self):
        """The next driver finds it, and then the one before loses it."""
        find = self.drivers['vgpu'].find

        def late():
            self.until(lambda: A in self.inventory.table.shared.found_twice())
            return find()
        self.drivers['vgpu'].find = late
        self.simulated.kernel.set_numvfs(A, 0)
        self.inventory.scanner.scan()
        self.assertEqual(('gpu', set()), (
            self.inventory.devices[A].driver, self.inventory.table.kinds(A)))

    def test_lost_while_it_is_examined(self):
        """The one before loses it while the next driver examines it."""
        examine, begun = self.drivers['gpu'].examine, threading.Event()

        def late(address, before):
            begun.set()
            self.until(lambda: not self.inventory.present(A))
            return examine(address, before)
        self.drivers['gpu'].examine = late
        self.simulated.kernel.set_numvfs(A, 0)
        other = threading.Thread(
            target=self.inventory.scanner.scan, args=(['gpu'],))
        other.start()
        self.assertTrue(begun.wait(20))
        self.drivers['gpu'].examine = examine
        self.inventory.scanner.scan(['vgpu'])
        other.join()
        self.assertEqual(('gpu', set()), (
            self.inventory.devices[A].driver, self.inventory.table.kinds(A)))

    def test_allocation_stays(self):
        """Placement refuses to move it to an inventory of another class."""
        server = self.boot()
        held, = self.host.devices_of(server)
        self.lose_vfs()
        self.assertEqual('gpu', self.host.inventory.devices[A].driver)
        self.CLASS = GPU
        self.assertEqual([B], self.host.devices_of(self.boot()))
        self.refused()
        self.make_vfs(A, B)
        self.host.start_guest(server)
        self.assertHas(server, held)
