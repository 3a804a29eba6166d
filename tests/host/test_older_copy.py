# Licensed under the Apache License, Version 2.0. See LICENSE.
"""An older copy of the claim store is put back.

No server gets what another one has, nothing of another server is erased, and
what cannot be known stays withheld.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import sqlite3

import ddt

from nova_accel import exception
from nova_accel import model
from nova_accel.store import claim_store
from tests.host import base
from tests.host import cloud as clouds
from tests.unit.host import A, FUNCTION, vf

ONE, TWO, THREE = '0000:02:00.0', '0000:03:00.0', '0000:04:00.0'
#: with room for the VFs of the disks before it
FAR = '0000:08:00.0'
SSD = 'CUSTOM_ACCELERATOR_SSD'
NO_ANSWER = exception.PlacementUnavailable('Placement answered 500.')


class OlderCopyTestCase(base.HostTestCase):

    CLASS = SSD

    @property
    def path(self):
        return os.path.join(self.directory, claim_store.file_name(clouds.NODE))

    def boot(self, address=None, amount=1):
        return self.host.boot(
            {f'resources1:{self.CLASS}': str(amount)},
            self.host.allocation(address, self.CLASS, amount))

    def copy(self, name='copy'):
        self.host.store._db.execute(
            'VACUUM INTO ?', (f'{self.directory}/{name}',))

    def put_back(self, name='copy'):
        """While nova-compute does not run; it has not started yet."""
        self.host.parts.close()
        # the connection stays open as long as this process
        for suffix in '', '-wal', '-shm':
            if os.path.exists(self.path + suffix):
                os.unlink(self.path + suffix)
        shutil.copy(f'{self.directory}/{name}', self.path)

    def restore(self, name='copy'):
        self.put_back(name)
        self.restart()

    def exchange(self, one, other):
        """Disks change their slots while the host is off."""
        self.host.parts.close()
        self.host.power_cut()
        self.simulated.kernel.exchange_cards(one, other)

    def reconcile(self):
        self.host.reconciler.run()
        self.host.settle()
        self.host.report()

    def data(self, address):
        return self.simulated.kernel.data_of_disk(address)

    def write(self, address, data='a secret'):
        self.simulated.kernel.write_disk(address, data)

    def assertNothingFree(self, address=None):
        self.assertRaises(exception.DeviceUnavailable, self.boot, address)


@ddt.ddt
class PoolTest(OlderCopyTestCase):

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': a} for a in (ONE, TWO)],
                        drivers=('nvme',))

    def disk_of(self, server):
        disk, = self.host.guests.handles(server)
        return disk.address

    def test_of_another_host(self):
        """Its claims are about disks of the other host at the same addresses.
        It counts as an older copy: disks are withheld and keep their data."""
        there = self.boot()
        disk = self.disk_of(there)
        self.copy()
        self.host.delete(there)
        here = self.boot()
        self.assertEqual(disk, self.disk_of(here))
        self.write(disk)
        self.host.cloud.stop_guest(here)
        other = '00000000-0000-0000-0000-000000000000'
        with contextlib.closing(
                sqlite3.connect(f'{self.directory}/copy')) as db, db:
            db.execute('UPDATE node SET uuid = ?', (other,))
            db.execute('UPDATE runs SET run = ?', (other,))
        self.copy('own')
        self.restore()
        self.reconcile()
        self.assertEqual('a secret', self.data(disk))
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        # the operator puts the file of this host back
        self.restore('own')
        self.reconcile()
        self.host.start_guest(here)
        self.assertHas(here, disk)
        self.assertEqual('a secret', self.data(disk))

    @ddt.data(True, False)
    def test_server_that_is_shut_off(self, stops):
        """The next server does not read its disk."""
        self.copy()
        server = self.boot()
        disk = self.disk_of(server)
        self.write(disk)
        if stops:
            self.host.cloud.stop_guest(server)
        self.restore()
        # before anything is known, no server gets anything
        self.assertNothingFree()
        self.reconcile()
        other = self.boot()
        self.assertNotEqual(disk, self.disk_of(other))
        self.assertEqual('', self.data(self.disk_of(other)))
        if stops:
            self.host.start_guest(server)
        self.assertHas(server, disk)
        self.assertEqual('a secret', self.data(disk))
        self.assertIn('is older than', self.log.output)
        # and it is not older any more
        self.restart()
        self.assertEqual(1, self.log.output.count('is older than'))

    def test_server_that_was_deleted(self):
        """Its disk is another server's by now, and is not erased."""
        deleted = self.boot()
        disk = self.disk_of(deleted)
        self.copy()
        self.host.delete(deleted)
        server = self.boot()
        self.assertEqual(disk, self.disk_of(server))
        self.write(disk)
        self.host.cloud.stop_guest(server)
        self.restore()
        for _ in range(2):
            self.reconcile()
        self.assertEqual('a secret', self.data(disk))
        self.host.start_guest(server)
        self.assertHas(server, disk)
        self.assertEqual([server], [
            claim.instance_uuid for claim in self.host.holdings.all()])

    def test_server_that_was_deleted_and_the_other_has_no_guest(self):
        """Placement says that the claims are not all."""
        deleted = self.boot()
        disk = self.disk_of(deleted)
        self.copy()
        self.host.delete(deleted)
        server = self.boot()
        self.write(disk)
        self.host.cloud.delete_server(deleted)
        self.host.cloud.stop_guest(server, undefine=True)
        self.restore()
        for _ in range(2):
            self.reconcile()
        self.assertEqual('a secret', self.data(disk))
        self.assertNothingFree()
        self.assertIn(server, self.log.output)
        # the operator decides
        self.host.cloud.delete_server(server)
        self.host.cloud.allocate(server, None)
        for _ in range(2):
            self.reconcile()
        self.assertEqual('', self.data(disk))
        self.assertEqual([], self.host.holdings.all())
        self.assertHas(self.boot(), disk)

    @ddt.data(*itertools.product((True, False), repeat=2))
    @ddt.unpack
    def test_disk_that_changed_its_slot(self, ends, runs):
        """The copy has the claim of a server that is gone for the disk that
        another server has in another slot.

        :param ends: whether the claim of the copy is being released.
        :param runs: whether the other server runs when nova-compute starts.
        """
        deleted = self.boot()
        slot = self.disk_of(deleted)
        now, = {ONE, TWO} - {slot}
        if ends:
            self.host.holdings.releasing(self.host.holdings.all())
        self.copy()
        self.host.delete(deleted)
        if ends:
            self.host.cloud.delete_server(deleted)
        self.exchange(ONE, TWO)
        self.restart()
        self.reconcile()
        servers = [self.boot(), self.boot()]
        server = next(s for s in servers if self.disk_of(s) == now)
        other, = {*servers} - {server}
        self.host.delete(other)
        self.write(now)
        if not runs:
            self.host.cloud.stop_guest(server)
        self.put_back()
        self.restart()
        for _ in range(3):
            self.reconcile()
        self.assertEqual([server], [
            claim.instance_uuid for claim in self.host.holdings.all()])
        self.assertEqual('a secret', self.data(now))
        self.assertHas(self.boot(), slot)
        self.host.delete(server)
        if runs:
            # its serial number could not be read while the server had it
            self.assertNothingFree()
            self.assertEqual('a secret', self.data(now))
            self.reconcile()
        self.assertEqual('', self.data(now))
        self.assertHas(self.boot(), now)

    def test_server_without_a_guest_beside_one_that_is_restored(self):
        """It keeps its claim for another disk."""
        kept = self.boot()
        claims = self.host.holdings.of(kept)
        self.copy()
        server = self.boot()
        self.host.cloud.stop_guest(kept, undefine=True)
        self.restore()
        self.reconcile()
        self.assertEqual(claims, self.host.holdings.of(kept))
        self.assertEqual(1, len(self.host.devices_of(server)))

    def test_host_that_was_restored(self):
        """Guests are those of then, too."""
        self.copy()
        guests = self.host.cloud.read()['guests']
        server = self.boot()
        disk = self.disk_of(server)
        self.write(disk)
        self.host.cloud.stop_guest(server)
        with self.host.cloud.state() as state:
            state['guests'] = guests
        self.restore()
        for _ in range(2):
            self.reconcile()
            self.assertNothingFree()
            self.assertRaises(exception.DeviceUnavailable,
                              self.host.start_guest, server)
        self.assertEqual('a secret', self.data(disk))
        self.host.delete(server)
        self.reconcile()
        self.assertEqual('', self.data(disk))
        self.boot()

    def test_server_is_being_built(self):
        """It has no claim yet: nothing is withheld for it."""
        new = self.host.cloud.add_server({f'resources1:{SSD}': '1'})
        self.host.cloud.allocate(new, self.host.allocation(None, SSD))
        self.restart()
        self.boot()
        self.host.spawn(new)
        self.assertEqual('', self.log.output)

    def test_claim_that_ended(self):
        """Nova deletes the allocation after that, or leaves it where a server
        is in ERROR: as often as nova-compute starts."""
        server = self.boot()
        self.host.cloud.stop_guest(server, undefine=True)
        self.host.guests.unplug(server)
        for _ in range(2):
            self.restart()
            self.assertEqual(frozenset(), self.host.store.unsettled())
        self.assertNotEqual(set(), self.host.store.ended())
        self.host.cloud.allocate(server, None)
        self.restart()
        self.assertEqual(set(), self.host.store.ended())
        self.boot()

    def test_server_that_is_moving(self):
        """Its migration has the allocation; and Nova is at work on it."""
        server = self.boot()
        self.host.migrate_away(server)
        moving = self.host.cloud.add_server({f'resources1:{SSD}': '1'})
        self.host.cloud.set_server(
            moving, launched=True, task_state='resize_finish')
        self.host.cloud.allocate(moving, self.host.allocation(None, SSD))
        self.restart()
        self.assertEqual(frozenset(), self.host.store.unsettled())

    def test_server_that_has_fewer_now(self):
        """What the copy has of it beside that is cleaned."""
        server = self.boot(amount=2)
        self.copy()
        self.host.delete(server)
        self.host.boot({f'resources1:{SSD}': '1'},
                       self.host.allocation(None, SSD), uuid_=server)
        disk = self.disk_of(server)
        other, = {ONE, TWO} - {disk}
        self.write(other)
        self.restore()
        self.reconcile()
        self.assertHas(server, disk)
        self.assertEqual('', self.data(other))
        self.assertHas(self.boot(), other)

    def test_server_that_is_about_to_come(self):
        """By a migration, of which this host has not heard."""
        new = self.host.cloud.add_server({f'resources1:{SSD}': '1'})
        self.host.cloud.set_server(new, is_here=False)
        self.host.cloud.allocate(new, self.host.allocation(None, SSD))
        self.restart()
        self.boot()

    @ddt.data('placement_error', 'libvirt_error')
    def test_no_answer(self, fault):
        """Nothing is given to a server before the comparison."""
        self.boot()
        allocation = self.host.allocation(None, SSD)
        setattr(self.host.cloud, fault, NO_ANSWER)
        self.restart()
        self.host.boot_that_fails({f'resources1:{SSD}': '1'}, allocation)
        setattr(self.host.cloud, fault, None)
        self.host.report()
        self.boot()

    def test_guest_that_starts_first(self):
        """The host boots: guests start before Nova's first report."""
        moved, other = self.boot(), self.boot()
        disks = {server: self.disk_of(server) for server in (moved, other)}
        self.copy()
        for server in disks:
            self.host.delete(server)
        again = {server: self.host.boot(
            {f'resources1:{SSD}': '1'}, self.host.allocation(None, SSD),
            uuid_=server) for server in (other, moved)}
        self.assertEqual(disks[moved], self.disk_of(other))
        self.write(disks[moved], f'of {other}')
        self.host.power_cut()
        self.put_back()
        self.host.report = lambda **_: None
        self.restart()
        for server in again:
            self.host.start_guest(server)
        self.assertHas(other, disks[moved])
        self.assertHas(moved, disks[other])

    def test_killed_at_once(self):
        """What was restored is known; what was not begins again."""
        self.copy()
        server = self.boot()
        disk = self.disk_of(server)
        self.write(disk)
        self.host.cloud.stop_guest(server)
        self.restore()
        for _ in range(2):
            self.restart()
        self.assertNothingFree()
        self.reconcile()
        self.boot()
        self.assertEqual('a secret', self.data(disk))

    def test_several_copies(self):
        """The history of the store has branches."""
        self.copy()
        first = self.boot()
        self.write(self.disk_of(first))
        self.restore()
        self.reconcile()
        second = self.boot()
        self.write(self.disk_of(second))
        self.restore()
        self.reconcile()
        for server in first, second:
            self.assertEqual(1, len(self.host.devices_of(server)))
            self.assertEqual('a secret', self.data(self.disk_of(server)))

    def test_copy_of_now(self):
        """It is as good as the file."""
        server = self.boot()
        self.copy()
        self.restore()
        self.assertHas(server, self.disk_of(server))
        self.boot()
        self.assertEqual('', self.log.output)

    def change(self, server, change):
        with self.host.cloud.state() as state:
            guest = state['guests'][server]
            guest['carried'] = change(guest['carried'])

    @ddt.data(
        ('they are damaged', lambda text: text[:-1]),
        ('they are damaged', lambda text: '[]'),
        ('they are damaged', lambda text: text.replace('"bus', '"bux')
         .replace('"group"', '"gruop"')),
        ('they have version 2', lambda text: text.replace(
            '"version": 1', '"version": 2')),
        ('they are of compute node 00000000-0000-0000-0000-000000000000',
         lambda text: json.dumps({
             **json.loads(text),
             'node': '00000000-0000-0000-0000-000000000000'})))
    @ddt.unpack
    def test_metadata_that_are_not_used(self, why, change):
        self.copy()
        server = self.boot()
        disk = self.disk_of(server)
        self.write(disk)
        self.host.cloud.stop_guest(server)
        self.change(server, change)
        self.host.cloud.allocate(server, None)
        self.restore()
        for _ in range(2):
            self.reconcile()
        self.assertIn(why, self.log.output)
        other = self.boot()
        self.assertNotEqual(disk, self.disk_of(other))
        self.assertNothingFree()
        self.assertEqual('a secret', self.data(disk))
        self.host.cloud.stop_guest(server, undefine=True)
        self.reconcile()
        self.assertEqual('', self.data(disk))

    def test_metadata_of_another_server(self):
        """As where the XML of a guest was copied for another one."""
        self.copy()
        server = self.boot()
        disk = self.disk_of(server)
        self.write(disk)
        with self.host.cloud.state() as state:
            state['guests']['a-guest'] = {
                **state['guests'][server], 'running': False}
        self.restore()
        self.reconcile()
        self.assertHas(server, disk)
        self.assertEqual('a secret', self.data(disk))

    def test_two_guests_carry_one_disk(self):
        self.copy()
        server, other = self.boot(), self.boot()
        disk = self.disk_of(server)
        self.write(disk)
        self.change(other, lambda text: text.replace(
            self.disk_of(other), disk))
        for uuid in server, other:
            self.host.cloud.stop_guest(uuid)
        self.restore()
        for _ in range(2):
            self.reconcile()
        self.assertEqual([], self.host.holdings.all())
        self.assertNothingFree()
        self.assertEqual('a secret', self.data(disk))


@ddt.ddt
class ExcludedTest(OlderCopyTestCase):

    POOLS = 'none'

    @ddt.data(True, False)
    def test_new_store_and_disks_that_changed_their_slots(self, is_seen):
        """What is said of the disk that was left out is what makes it free.

        :param is_seen: whether nova-compute has it in the other slot.
        """
        self.start_host(nvmes=[{'address': a} for a in (ONE, TWO)],
                        drivers=('nvme',))
        self.write(ONE)
        self.config.config(group='accel', exclude_devices=[f'address={ONE}'])
        self.lose_store()
        if is_seen:
            self.config.config(group='accel', exclude_devices=[])
        self.exchange(ONE, TWO)
        self.restart()
        self.config.config(group='accel', exclude_devices=[])
        self.exchange(ONE, TWO)
        self.restart()
        self.reconcile()
        self.assertNothingFree(ONE)
        option, = {re.search(r'set \[accel\] handover = (\S+) for one start',
                             str(hold)).group(1)
                   for offer in self.host.inventory.table.offered().of(
                       (ONE, None)) for hold in offer.all_holds}
        self.config.config(group='accel', handover=[option])
        self.restart()
        self.reconcile()
        self.config.config(group='accel', handover=[])
        self.restart()
        self.reconcile()
        self.assertHas(self.boot(ONE), ONE)
        self.assertEqual('', self.data(ONE))


class DiskWithVfsTest(OlderCopyTestCase):

    def test_server_that_is_shut_off(self):
        self.start_host(nvmes=[{'address': ONE, 'total_vfs': 3, 'vfs': 3}],
                        drivers=('nvme',))
        kept = self.boot(ONE)
        self.copy()
        server = self.boot(ONE)
        handle, = self.host.guests.handles(server)
        self.write(handle.address)
        self.host.cloud.stop_guest(server)
        self.restore()
        self.assertNothingFree(ONE)
        self.reconcile()
        other = self.boot(ONE)
        self.assertNotIn(handle, self.host.guests.handles(other))
        self.assertEqual('a secret', self.data(handle.address))
        self.host.start_guest(server)
        self.assertHas(server, handle.address)
        self.assertEqual(1, len(self.host.devices_of(kept)))

    def test_disk_that_changed_its_slot(self):
        """What another server has of it in the other slot is not affected."""
        self.POOLS = 'none'
        self.start_host(nvmes=[{'address': a, 'total_vfs': 3, 'vfs': 3}
                               for a in (ONE, FAR)], drivers=('nvme',))
        kept = self.boot(ONE)
        self.copy()
        self.exchange(ONE, FAR)
        for address in ONE, FAR:
            self.simulated.kernel.set_numvfs(address, 3)
        self.restart()
        self.reconcile()
        server = self.boot(FAR)
        handles = {s: self.host.guests.handles(s) for s in (kept, server)}
        for address in (h.address for one, in handles.values() for h in [one]):
            self.write(address, f'of {address}')
        self.host.cloud.stop_guest(kept, undefine=True)
        self.restore()
        self.reconcile()
        self.assertEqual(handles, {
            s: self.host.guests.handles(s) for s in handles})
        for one, in handles.values():
            self.assertEqual(f'of {one.address}', self.data(one.address))


class PortsTest(OlderCopyTestCase):

    CLASS = base.FPGA

    def test_server_that_is_shut_off(self):
        """The region carries what it carried for the server."""
        self.start_host({'address': A, 'ports': 2, 'vfs': 2})
        self.host.upload(FUNCTION)
        self.copy()
        provider = next(p.uuid for p in
                        self.host.inventory.shown.providers().values()
                        if p.region_index == 0)
        server = self.host.boot(base.asks(FUNCTION), {
            provider: {'resources': {self.CLASS: 1}}})
        claim, = self.host.holdings.of(server)
        self.host.cloud.stop_guest(server)
        self.restore()
        self.assertEqual([claim], self.host.holdings.of(server))
        self.reconcile()
        self.host.start_guest(server)
        self.assertHas(server, vf(A))
        region = self.host.inventory.devices[A].region(0)
        self.assertEqual(
            (claim.restore_bitstream, model.OPERATOR),
            (region.bitstream_id, region.origin))
