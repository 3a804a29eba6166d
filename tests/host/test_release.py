# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices of one server are cleaned side by side, and Nova does not wait."""

import dataclasses
import threading
from unittest import mock

from nova_accel import exception
from nova_accel import model
from tests.host import base

DISKS = [f'0000:0{n}:00.0' for n in (1, 2, 3)]
SSD = 'CUSTOM_ACCELERATOR_SSD'
SPECS = {f'resources{n}:{SSD}': '1' for n in (1, 2, 3)}


class ReleaseTest(base.HostTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': d} for d in DISKS],
                        drivers=('nvme',))
        self.server = self.host.boot(SPECS, self.all_disks())
        for disk in DISKS:
            self.simulated.kernel.write_disk(disk, 'a secret')

    def all_disks(self):
        allocation = {}
        for disk in DISKS:
            allocation.update(self.host.allocation(disk, SSD))
        return allocation

    def hang(self, *disks, until=None):
        for disk in disks:
            self.simulated.kernel.set_fault(disk, hang='format')

    def release(self, *disks):
        for disk in disks:
            self.simulated.kernel.set_fault(disk, hang=None)

    def secrets(self):
        return [d for d in DISKS if self.simulated.kernel.data_of_disk(d)]

    def test_what_a_server_wrote_is_no_obstacle(self):
        """Neither for its server, also when nova-compute starts, nor when it
        is cleaned."""
        first = DISKS[0]
        self.simulated.kernel.sign_disk(first, 'gpt', 'LVM2_member')
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.restart()
        self.assertEqual([], self.host.fenced())
        self.host.start_guest(self.server)
        self.host.delete(self.server)
        self.assertEqual([], self.host.fenced())
        self.assertEqual([], self.simulated.kernel.read_signatures(first))

    def test_release_0_1_had_given_it_to_a_server(self):
        """No rule includes it yet: the server keeps it, and it is erased."""
        self.simulated.kernel.sign_disk(DISKS[0], 'ext4')
        self.host.cloud.stop_guest(self.server, undefine=True)
        self.host.store.set_devices({
            address: dataclasses.replace(device, serial='', record=())
            for address, device in self.host.inventory.devices.items()})
        self.config.config(include_devices=[], group='accel')
        self.restart()
        self.assertEqual(3, len(self.host.fenced()))
        self.host.start_guest(self.server)
        self.assertEqual(DISKS, self.host.devices_of(self.server))
        self.host.delete(self.server)
        self.assertEqual([], self.secrets())
        self.assertRaises(exception.DeviceUnavailable, self.host.boot,
                          {f'resources1:{SSD}': '1'},
                          self.host.allocation(DISKS[0], SSD))
        self.config.config(include_devices=['vendor=144d'], group='accel')
        self.restart()
        self.assertEqual([], self.host.fenced())

    def test_server_is_deleted_while_claims_cannot_be_written(self):
        """The deletion does not fail. No other server gets the disks before
        they are erased."""
        self.read_only(True)
        self.host.delete(self.server)
        self.host.cloud.delete_server(self.server)
        self.read_only(False)
        self.assertEqual(DISKS, self.secrets())
        error = self.assertRaises(
            exception.DeviceUnavailable, self.host.boot,
            {f'resources1:{SSD}': '1'}, self.host.allocation(DISKS[0], SSD))
        self.assertTrue(error.elsewhere)
        self.host.reconcile()
        self.assertEqual([], self.secrets())
        self.assertEqual([], self.host.store.claims())

    def test_build_fails_while_claims_cannot_be_written(self):
        """Nova sees why it failed, and goes on to another host."""
        self.host.delete(self.server)

        def start_guest(*args):
            self.read_only(True)
            raise MemoryError('for the guest')
        with mock.patch.object(self.host.cloud, 'start_guest', start_guest):
            self.assertRaises(MemoryError, self.host.boot, SPECS,
                              self.all_disks())

    def test_side_by_side(self):
        self.hang(*DISKS)
        deleting = threading.Thread(
            target=self.host.delete, args=(self.server,))
        deleting.start()
        self.wait_for(lambda: all(map(
            self.host.inventory.cards.is_busy, DISKS)))
        self.release(*DISKS)
        deleting.join()
        self.assertEqual([], self.secrets())
        self.assertEqual([], self.host.holdings.all())

    def test_all_that_hang(self):
        self.hang(*DISKS)
        self.config.config(device_timeout=1, group='accel')
        self.host.delete(self.server)
        self.config.config(device_timeout=30, group='accel')
        self.assertEqual({model.ClaimState.DELETING},
                         set(self.host.states(self.server)))
        # none is offered before it is clean, then all are
        self.host.report()
        self.assertEqual(3, len(self.host.fenced()))
        self.release(*DISKS)
        self.wait_for(lambda: not self.host.holdings.all())
        self.assertEqual([], self.secrets())
        self.host.report()
        self.host.report()
        self.assertEqual([], self.host.fenced())

    def test_nobody_waits_where_nova_must_not(self):
        """As in Nova's periodic tasks."""
        self.config.config(device_timeout=120, group='accel')
        self.hang(*DISKS)
        self.host.delete(self.server, wait=False)
        # who waited would have been told of the limit
        self.assertEqual([''] * 3, [
            claim.error for claim in self.host.holdings.all()])
        self.release(*DISKS)
        self.wait_for(lambda: not self.host.holdings.all())

    def test_one_that_hangs_costs_itself(self):
        self.hang(DISKS[0])
        self.config.config(device_timeout=3, group='accel')
        self.host.delete(self.server)
        self.config.config(device_timeout=30, group='accel')
        self.assertEqual(DISKS[:1], self.secrets())
        claim, = self.host.holdings.all()
        self.assertEqual(DISKS[0], claim.device_address)
        self.assertIn('did not end within 3 s', claim.error)
        one = {f'resources1:{SSD}': '1'}
        server = self.host.boot(one, self.host.allocation(DISKS[1], SSD))
        self.assertHas(server, DISKS[1])
        self.assertRaises(
            exception.AcceleratorError, self.host.boot, one,
            self.host.allocation(DISKS[0], SSD))
        self.release(DISKS[0])
        self.wait_for(lambda: not self.host.inventory.cards.hanging(DISKS[0]))
        self.host.reconciler.run()
        self.wait_for(lambda: len(self.host.holdings.all()) == 1)

    def test_what_fails_is_tried_again(self):
        self.simulated.kernel.set_fault(DISKS[0], format='refused')
        self.host.delete(self.server)
        claim, = self.host.holdings.all()
        self.assertIn(DISKS[0], claim.error)
        self.host.reconciler.run()
        self.assertEqual(1, len(self.host.holdings.all()))
        self.simulated.kernel.set_fault(DISKS[0], format=None)
        self.host.reconciler.run()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual([], self.secrets())
