# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whether a device is clean is a fact of the device: what was released under
another policy is cleaned before the next server, once the policy says so."""

import ddt

from nova_accel import exception
from nova_accel.store import values
from tests.host import base
from tests.unit.host import A, FUNCTION, vf

SECRET = 'a secret'
DISK = '0000:41:00.0'
SSD = 'CUSTOM_ACCELERATOR_SSD'


class UncleanTestCase(base.HostTestCase):

    POOLS = 'none'

    def policy(self, *values):
        """The operator changes the option and starts nova-compute again."""
        self.config.config(handover=list(values), group='accel')
        self.restart()

    def results(self):
        return [handover.result
                for handover in self.host.store.handovers()]


@ddt.ddt
class DiskTest(UncleanTestCase):

    def setUp(self):
        super().setUp()
        self.start_host(drivers=('nvme',), nvmes=[{'address': DISK}])
        self.kernel = self.host.kernel

    def boot(self):
        return self.host.boot({f'resources1:{SSD}': '1'},
                              self.host.allocation(DISK, SSD))

    def leave_secret(self, *policy):
        self.policy(*policy)
        server = self.boot()
        self.kernel.write_disk(DISK, SECRET)
        self.host.delete(server)

    @ddt.data(('none', 'not cleaned'), ('reset', 'reset only'),
              (f'{DISK}=none', 'not cleaned'))
    @ddt.unpack
    def test_released_with_less(self, policy, result):
        self.leave_secret(policy)
        self.assertEqual([result], self.results())
        # the operator wants it so: the next server gets it as it is
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual(SECRET, self.kernel.data_of_disk(DISK))
        self.policy()
        # before the comparison that has it cleaned
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.host.reconcile()
        self.host.settle()
        self.assertEqual([result, values.CLEAN], self.results())
        server = self.boot()
        self.assertEqual('', self.kernel.data_of_disk(DISK))
        self.host.delete(server)
        self.assertEqual(frozenset(), self.host.store.unclean())

    def test_none_then_reset(self):
        """What nothing was done with is reset; after that it is not again."""
        self.leave_secret('none')
        self.policy('reset')
        for _ in range(2):
            self.host.reconcile()
            self.host.settle()
        self.assertEqual(['not cleaned', 'reset only'], self.results())
        self.host.delete(self.boot())

    def test_operator_takes_it_as_it_is(self):
        """By one start with the policy none, as the error says, also while
        the disk is not clean."""
        server = self.boot()
        self.kernel.change_disk(DISK, firmware='NEW')
        self.host.delete(server)
        claim, = self.host.holdings.all()
        self.assertIn("its firmware is 'NEW'", claim.error)
        self.policy('none')
        self.policy()
        self.host.reconcile()
        self.host.settle()
        self.host.delete(self.boot())

    def test_server_got_it_as_it_was(self):
        """It keeps its disk, which is cleaned after it."""
        self.leave_secret('none')
        server = self.boot()
        self.policy()
        self.host.reconcile()
        self.assertHas(server, DISK)
        self.assertEqual(SECRET, self.kernel.data_of_disk(DISK))
        self.host.delete(server)
        self.assertEqual('', self.kernel.data_of_disk(DISK))
        self.assertEqual(frozenset(), self.host.store.unclean())

    def test_cleaning_that_fails(self):
        """The disk is given to no server, and it is tried again."""
        self.leave_secret('none')
        self.policy()
        self.kernel.set_fault(DISK, sanitize='locked', format='refused')
        self.host.reconcile()
        self.host.settle()
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.kernel.set_fault(DISK, sanitize=None, format=None)
        self.host.reconcile()
        self.host.settle()
        self.host.delete(self.boot())
        self.assertEqual('', self.kernel.data_of_disk(DISK))


class RegionTest(UncleanTestCase):

    def setUp(self):
        super().setUp()
        self.start_host({'address': A})
        self.host.upload(FUNCTION)
        self.policy('none')
        self.server = self.host.boot(
            base.asks(FUNCTION), self.host.allocation(A))
        self.host.kernel.guest_writes(vf(A), registers=SECRET)

    def test_registers_of_the_last_server(self):
        self.host.delete(self.server)
        self.assertCleanedFirst()

    def test_card_is_away_when_the_last_server_is_released(self):
        self.host.cloud.stop_guest(self.server)
        self.host.kernel.set_fault(A, vanish=True)
        self.host.inventory.scanner.scan()
        self.host.delete(self.server)
        # the policy of then has nothing cleaned
        self.assertEqual(frozenset(), self.host.store.unsettled())
        self.host.kernel.set_fault(A, vanish=None)
        self.host.kernel.rebind(A, 'dfl-pci')
        self.assertCleanedFirst()

    def assertCleanedFirst(self):
        self.policy()
        self.assertRaises(exception.DeviceUnavailable, self.host.boot,
                          base.asks(FUNCTION), self.host.allocation(A))
        self.host.reconcile()
        self.host.settle()
        self.host.boot(base.asks(FUNCTION), self.host.allocation(A))
        self.assertEqual({}, self.host.kernel.guest_reads(vf(A)))


class TwoHandlesTest(UncleanTestCase):

    SSD = 'CUSTOM_ACCELERATOR_SSD'

    def test_one_is_cleaned(self):
        """Which says nothing of the other one of the same card."""
        self.start_host(drivers=('nvme',), nvmes=[
            {'address': A, 'total_vfs': 2, 'vfs': 2}])
        self.policy('none')
        servers = [self.host.boot({f'resources1:{self.SSD}': '1'},
                                  self.host.allocation(A, self.SSD))
                   for _ in range(2)]
        handles = [self.host.devices_of(server)[0] for server in servers]
        for handle in handles:
            self.host.kernel.write_disk(handle, 'a secret')
        self.host.delete(servers[0])
        self.policy()
        self.host.delete(servers[1])
        self.assertEqual(['a secret', ''], [
            self.host.kernel.data_of_disk(handle) for handle in handles])
        self.host.reconcile()
        self.host.settle()
        self.assertEqual(['', ''], [
            self.host.kernel.data_of_disk(handle) for handle in handles])
