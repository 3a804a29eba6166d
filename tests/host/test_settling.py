# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The claim store is lost, and the host is not new.

Servers keep their devices, what no server has is cleaned before it is offered,
and nothing is erased on a guess.
"""

import contextlib
import os
import sqlite3
import uuid

import ddt

from nova_accel import exception
from nova_accel.inventory import holds
from nova_accel import model
from nova_accel.store import claim_store
from tests.host import base
from tests.host import cloud as clouds
from tests.unit import vgpus
from tests.unit.host import A, B, FUNCTION, INTERFACE, OTHER, plain, vf

State = model.ClaimState
ONE, TWO, THREE = '0000:02:00.0', '0000:03:00.0', '0000:04:00.0'
SSD, VGPU = (f'CUSTOM_ACCELERATOR_{type_}' for type_ in ('SSD', 'VGPU'))
NO_ANSWER = exception.PlacementUnavailable('Placement answered 500.')


class SettlingTestCase(base.HostTestCase):

    POOLS = 'none'

    CLASS = SSD

    @property
    def path(self):
        return os.path.join(self.directory, claim_store.file_name(clouds.NODE))

    def boot(self, address):
        return self.host.boot(
            {f'resources1:{self.CLASS}': '1'},
            self.host.allocation(address, self.CLASS))

    def lose(self):
        """The file is moved away while nova-compute is stopped."""
        self.host.parts.close()
        for name in os.listdir(self.directory):
            if name.startswith(os.path.basename(self.path)):
                os.unlink(os.path.join(self.directory, name))

    def lost(self):
        self.lose()
        return self.restart()

    def upload_clearing(self):
        return self.host.upload(OTHER, {
            'accel:clears': 'registers', 'accel:function_id': None,
            'accel:region_type_id': INTERFACE})

    def fenced(self):
        self.host.report()
        return [name.rpartition('accel_')[2] for name in self.host.fenced()]

    def settled(self):
        """All that servers could have now."""
        self.assertEqual([], [
            (row, device.address) for row in self.host.store.unsettled()
            for device in self.host.inventory.devices.values()
            if row.means(device)])


@ddt.ddt
class DiskTest(SettlingTestCase):

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': a} for a in (ONE, TWO, THREE)],
                        drivers=('nvme',))
        for address in (ONE, TWO, THREE):
            self.write(address)

    def write(self, address):
        self.simulated.kernel.write_disk(address, f'secret on {address}')

    def assertKept(self, *addresses):
        for address in addresses:
            self.assertEqual(f'secret on {address}', self.data(address))

    def data(self, address):
        return self.simulated.kernel.data_of_disk(address)

    def test_new_host(self):
        """Nothing is erased, and nothing is fenced."""
        self.settled()
        self.assertEqual([], self.fenced())
        self.host.reconciler.run()
        self.assertKept(ONE, TWO, THREE)
        self.boot(ONE)

    def test_store_of_a_commit_before_the_first_release(self):
        """nova-compute does not start with it, and does as the error advises.
        """
        server = self.boot(ONE)
        self.host.parts.close()
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            db.execute('PRAGMA user_version = 11')
        error = self.assertRaises(exception.AcceleratorsUnavailable,
                                  self.restart)
        self.assertIn(f'{self.path} has version 11', str(error))
        self.assertIn('move it away', str(error))
        self.assertKept(ONE, TWO, THREE)
        self.lost()
        self.host.report()
        self.host.reconciler.run()
        self.assertEqual([ONE], self.host.devices_of(server))
        self.assertKept(ONE)

    def test_new_host_and_libvirt_does_not_answer(self):
        self.lose()
        with self.host.cloud.state() as state:
            state['providers'].clear()
        self.host.cloud.libvirt_error = RuntimeError('no connection')
        self.restart()
        # it is not told of any
        self.host.report()
        self.assertEqual([clouds.NODE], [
            p['name'] for p in self.host.cloud.read()['providers'].values()])
        self.assertIn('no connection', self.log.output)
        self.assertRaises(RuntimeError, self.host.reconciler.run)
        self.assertKept(ONE, TWO, THREE)
        # then it is a new host, which nova_accel has not seen
        self.host.cloud.libvirt_error = None
        self.assertEqual([ONE, TWO, THREE], self.fenced())
        self.settled()
        self.assertEqual({holds.Kind.FOREIGN},
                         self.host.inventory.table.kinds(ONE))
        self.assertKept(ONE, TWO, THREE)
        self.simulated.kernel.write_disk(ONE, '')
        self.host.inventory.scanner.scan()
        self.assertEqual([TWO, THREE], self.fenced())

    def servers(self):
        """One runs, one is shut down, and one disk is free."""
        servers = self.boot(ONE), self.boot(TWO)
        self.host.cloud.stop_guest(servers[1])
        self.before = {c.handle: (c.group, c.provider_uuid, c.project_id,
                                  c.serial) for c in self.host.holdings.all()
                       if c.device_address == TWO}
        return servers

    def test_lost(self):
        runs, off = self.servers()
        self.lost()
        # before it is known, nothing is given, erased or released
        self.assertEqual([ONE, TWO, THREE], self.fenced())
        new = self.host.cloud.add_server({f'resources1:{SSD}': '1'})
        self.host.cloud.allocate(new, self.host.allocation(THREE, SSD))
        self.assertRaises(exception.DeviceUnavailable, self.host.spawn, new)
        self.host.cloud.allocate(new, None)
        # its guest says what it has: nothing is asked of Placement
        self.host.cloud.placement_error = NO_ANSWER
        self.host.start_guest(off)
        self.assertHas(off, TWO)
        self.host.cloud.placement_error = None
        self.assertKept(ONE, TWO, THREE)
        self.host.reconciler.run()
        self.settled()
        self.assertEqual([], self.fenced())
        self.assertHas(runs, ONE)
        self.assertEqual(self.before, {
            c.handle: (c.group, c.provider_uuid, c.project_id, c.serial)
            for c in self.host.holdings.all() if c.device_address == TWO})
        self.assertKept(ONE, TWO)
        self.assertEqual('', self.data(THREE))
        # and they end as ever
        for server, address in ((runs, ONE), (off, TWO)):
            self.host.delete(server)
            self.assertEqual('', self.data(address))
        self.assertEqual([], self.host.holdings.all())

    def test_partition_tables(self):
        """What servers write has signatures. The operator is not told to
        erase it: a server that is shut off starts with its data."""
        runs, off = self.servers()
        for address in (TWO, THREE):
            self.simulated.kernel.sign_disk(address, 'gpt')
        self.lost()
        self.host.reconciler.run()
        self.assertEqual([], self.fenced())
        self.assertNotIn('wipefs', self.log.output)
        self.host.start_guest(off)
        self.assertHas(off, TWO)
        self.assertHas(runs, ONE)
        self.assertKept(ONE, TWO)
        self.assertEqual('', self.data(THREE))
        self.host.delete(off)
        self.assertEqual([], self.fenced())

    def test_without_guests(self):
        """libvirt's files are lost as well: which disk the server has is not
        guessed."""
        server = self.boot(ONE)
        self.host.cloud.stop_guest(server, undefine=True)
        self.lost()
        self.assertStaysWithheld(server)
        self.assertKept(ONE, TWO, THREE)
        self.end(server)
        self.host.reconciler.run()
        self.assertEqual([], self.fenced())
        self.assertEqual('', self.data(ONE))

    def assertStaysWithheld(self, server):
        """No server gets anything, for this reason; it does not start."""
        for _ in range(2):
            self.host.reconciler.run()
            self.assertEqual([ONE, TWO, THREE], self.fenced())
        self.assertIn(f'Placement has allocated {SSD} to {server}, and '
                      f'neither a claim nor a guest shows which device',
                      self.log.output)
        error = self.assertRaises(exception.DeviceUnavailable,
                                  self.host.start_guest, server)
        self.assertIn('has determined its devices', str(error))

    def test_without_allocation(self):
        """As after a rebuild that failed: the guest has it, and the server is
        allocated it again."""
        server = self.boot(ONE)
        allocations = self.host.cloud.read()['allocations'][server]
        self.host.cloud.allocate(server, None)
        self.lost()
        self.host.reconciler.run()
        self.assertHas(server, ONE)
        self.assertEqual(allocations,
                         self.host.cloud.read()['allocations'][server])
        self.assertEqual([], self.fenced())
        self.assertKept(ONE)

    def test_start_does_not_wait(self):
        """A server that starts has its own devices settled."""
        _, off = self.servers()
        self.lost()
        self.host.start_guest(off)
        self.assertHas(off, TWO)
        self.assertKept(ONE, TWO)

    def test_guest_that_is_not_of_nova(self):
        """It keeps what its operator gave to it until it is undefined."""
        self.lose()
        self.host.cloud.start_guest('a-guest', [model.AttachHandle(
            model.HandleType.PCI, ONE)])
        self.host.cloud.stop_guest('a-guest')
        self.restart()
        for _ in range(2):
            self.host.reconciler.run()
        self.assertKept(ONE)
        self.host.cloud.stop_guest('a-guest', undefine=True)
        self.host.reconciler.run()
        self.assertEqual('', self.data(ONE))

    def test_guest_that_is_not_of_nova_and_its_disk_moves(self):
        """It is not cleaned where it is then."""
        self.lose()
        self.host.cloud.start_guest('a-guest', [model.AttachHandle(
            model.HandleType.PCI, ONE)])
        self.host.cloud.stop_guest('a-guest')
        self.host.start()
        self.exchange(ONE, THREE)
        self.host.reconciler.run()
        self.assertEqual(f'secret on {ONE}', self.data(THREE))

    @ddt.data('placement_error', 'libvirt_error')
    def test_no_answer(self, fault):
        runs, off = self.servers()
        self.lose()
        setattr(self.host.cloud, fault, NO_ANSWER)
        self.restart()
        for _ in range(2):
            self.assertRaisesOrNot(self.host.reconciler.run)
            self.assertEqual([ONE, TWO, THREE], self.fenced())
        self.assertKept(ONE, TWO, THREE)
        # what guests say is known without Placement
        self.assertEqual(
            2 if fault == 'placement_error' else 0,
            len(self.host.holdings.all()))
        self.assertIn('Placement answered 500.', self.log.output)
        setattr(self.host.cloud, fault, None)
        self.host.reconciler.run()
        self.settled()
        self.assertHas(runs, ONE)
        self.host.start_guest(off)
        self.assertHas(off, TWO)

    def assertRaisesOrNot(self, function):
        try:
            function()
        except exception.PlacementUnavailable:
            pass

    def test_deleted_meanwhile(self):
        """Its guest has said what it has, and the delete releases it."""
        runs, off = self.servers()
        self.lost()
        self.host.delete(off)
        self.assertKept(ONE, THREE)
        self.assertEqual('', self.data(TWO))
        self.host.reconciler.run()
        self.assertHas(runs, ONE)

    def test_was_being_released(self):
        server = self.boot(ONE)
        self.simulated.kernel.set_fault(ONE, format='refused')
        self.host.delete(server)
        self.lost()
        self.host.reconciler.run()
        self.assertEqual([ONE], self.fenced())
        claim, = self.host.holdings.all()
        self.assertIs(State.DELETING, claim.state)
        self.assertKept(ONE)
        self.simulated.kernel.set_fault(ONE, format=None)
        self.host.reconciler.run()
        self.assertEqual([], self.fenced())
        self.assertEqual('', self.data(ONE))

    def test_moved_away(self):
        """The source of a resize that is not confirmed."""
        server = self.boot(ONE)
        migration = self.host.migrate_away(server)
        self.lost()
        self.host.reconciler.run()
        claim, = self.host.holdings.all()
        self.assertEqual((model.Role.OLD, migration, server), (
            claim.role, claim.consumer_uuid, claim.instance_uuid))
        self.assertEqual([], self.fenced())
        self.host.revert(server, migration)
        self.assertHas(server, ONE)
        self.assertKept(ONE)

    def test_moved_away_without_a_guest(self):
        """The allocation of the move is its server's."""
        server = self.boot(ONE)
        migration = self.host.migrate_away(server)
        self.host.cloud.stop_guest(server, undefine=True)
        self.lost()
        for _ in range(2):
            self.host.reconciler.run()
            self.assertEqual([ONE, TWO, THREE], self.fenced())
        self.assertKept(ONE, TWO, THREE)
        self.host.cloud.allocate(migration, None)
        self.host.reconciler.run()
        self.assertEqual([], self.fenced())
        self.assertEqual('', self.data(ONE))

    def test_second_disk_of_a_server_comes_later(self):
        """That the server has the first one says nothing of it."""
        server = self.host.boot(
            {f'resources1:{SSD}': '1', f'resources2:{SSD}': '1',
             'group_policy': 'isolate'},
            {**self.host.allocation(ONE, SSD),
             **self.host.allocation(TWO, SSD)})
        self.host.cloud.stop_guest(server)
        for vanish in (True, None):
            self.simulated.kernel.set_fault(TWO, vanish=vanish)
            if vanish:
                self.lost()
            self.host.inventory.scanner.scan()
            self.host.reconciler.run()
            self.host.settle()
        self.assertKept(ONE, TWO)
        self.assertEqual(['1', '2'], sorted(
            claim.group for claim in self.host.holdings.all()))
        self.host.start_guest(server)
        self.assertHas(server, ONE, TWO)

    def test_disk_that_the_host_uses(self):
        self.simulated.kernel.set_fault(TWO, attributes={
            'subsysnqn': 'nqn.2014-08.org.nvmexpress:S000003000'})
        self.lost()
        self.host.reconciler.run()
        self.assertEqual('', self.data(ONE))

    def test_card_that_is_away(self):
        """It is cleaned when it comes back."""
        server = self.boot(ONE)
        self.host.cloud.stop_guest(server, undefine=True)
        self.simulated.kernel.set_fault(ONE, vanish=True)
        self.lost()
        self.assertStaysWithheld(server)
        self.host.cloud.allocate(server, None)
        self.host.reconciler.run()
        self.host.report()
        self.host.report()
        self.restart()
        self.simulated.kernel.set_fault(ONE, vanish=None)
        self.host.inventory.scanner.scan()
        self.assertEqual([ONE], self.fenced())
        self.assertKept(ONE)
        self.host.reconciler.run()
        self.assertEqual('', self.data(ONE))
        self.assertEqual([], self.fenced())

    def lost_and_exchanged(self, one, other, empty=None):
        """nova-compute has started once since, and libvirt did not answer."""
        self.lose()
        self.host.start()
        self.exchange(one, other, empty)

    def exchange(self, one, other, empty=None):
        """Cards change their slots while the host is off.

        :param empty: the slot whose card is away then.
        """
        kernel = self.simulated.kernel
        self.host.parts.close()
        self.host.cloud.lose_power()
        for address in (one, other):
            kernel.set_fault(address, vanish=None)
        kernel.exchange_cards(one, other)
        if empty:
            kernel.set_fault(empty, vanish=True)
        kernel.reboot()
        self.restart()

    def server_beside_an_empty_slot(self):
        server = self.boot(ONE)
        self.host.cloud.stop_guest(server)
        self.simulated.kernel.set_fault(THREE, vanish=True)
        self.restart()
        for _ in range(2):
            self.host.report()
        return server

    def end(self, server):
        self.host.cloud.delete_server(server)
        self.host.cloud.allocate(server, None)

    @ddt.data(ONE, THREE)
    def test_away_and_another_card_in_its_slot(self, comes_back):
        """It is cleaned when it comes back, wherever that is."""
        server = self.server_beside_an_empty_slot()
        self.host.cloud.stop_guest(server, undefine=True)
        self.lost_and_exchanged(ONE, THREE, THREE)
        self.end(server)
        self.simulated.kernel.write_disk(ONE, '')
        self.restart()
        self.host.reconciler.run()
        self.assertEqual([], self.fenced())
        self.exchange(ONE, THREE)
        if comes_back == THREE:
            self.exchange(ONE, THREE)
        self.assertEqual([comes_back], self.fenced())
        self.assertEqual(f'secret on {ONE}', self.data(comes_back))
        self.host.reconciler.run()
        self.assertEqual('', self.data(comes_back))
        self.assertEqual([], self.fenced())
        self.assertEqual(frozenset(), self.host.store.unsettled())

    @ddt.data('guest', 'allocation')
    def test_moved_while_its_server_is_sought(self, left):
        """It is not cleaned as long as its server may have it."""
        server = self.server_beside_an_empty_slot()
        self.lost_and_exchanged(ONE, THREE, ONE)
        for _ in range(2):
            self.host.reconciler.run()
            self.assertEqual(f'secret on {ONE}', self.data(THREE))
        self.assertRaises(exception.DeviceUnavailable, self.boot, THREE)
        self.host.start_guest(server)
        self.assertHas(server, THREE)
        if left == 'guest':
            self.host.cloud.allocate(server, None)
        else:
            self.host.cloud.stop_guest(server, undefine=True)
        self.host.reconciler.run()
        self.assertEqual(f'secret on {ONE}', self.data(THREE))
        self.host.cloud.stop_guest(server, undefine=True)
        self.end(server)
        for _ in range(2):
            self.host.reconciler.run()
        self.assertEqual('', self.data(THREE))
        self.assertEqual([], self.fenced())
        self.assertEqual(frozenset(), self.host.store.unsettled())

    def test_moved_and_another_server_wants_what_is_in_its_slot(self):
        server = self.server_beside_an_empty_slot()
        self.host.cloud.stop_guest(server, undefine=True)
        self.lost_and_exchanged(ONE, THREE)
        self.simulated.kernel.write_disk(ONE, '')
        self.restart()
        self.assertStaysWithheld(server)
        self.assertRaises(exception.DeviceUnavailable, self.boot, ONE)
        self.assertEqual(f'secret on {ONE}', self.data(THREE))
        self.end(server)
        self.host.reconciler.run()
        self.assertEqual('', self.data(THREE))
        self.assertEqual([], self.fenced())
        self.assertHas(self.boot(ONE), ONE)

    def test_moved_to_where_another_server_had_one(self):
        """It is cleaned once neither can have it."""
        servers = [self.boot(address) for address in (ONE, TWO)]
        for server in servers:
            self.host.cloud.stop_guest(server, undefine=True)
        self.lost_and_exchanged(ONE, TWO, ONE)
        self.end(servers[0])
        self.host.reconciler.run()
        self.assertEqual(f'secret on {ONE}', self.data(TWO))
        self.assertRaises(exception.DeviceUnavailable,
                          self.host.start_guest, servers[1])
        self.end(servers[1])
        self.host.reconciler.run()
        self.assertEqual('', self.data(TWO))

    def test_swapped_while_their_servers_are_sought(self):
        """Neither server gets the disk of the other."""
        servers = [self.boot(address) for address in (ONE, TWO)]
        for server in servers:
            self.host.cloud.stop_guest(server)
        self.lost_and_exchanged(ONE, TWO)
        self.host.reconciler.run()
        for server, address in zip(servers, (TWO, ONE), strict=True):
            self.host.start_guest(server)
            self.assertHas(server, address)
        self.assertEqual([f'secret on {TWO}', f'secret on {ONE}'],
                         [self.data(a) for a in (ONE, TWO)])

    def test_policy_none(self):
        """The operator wants nothing to be erased."""
        self.config.config(handover=['none'], group='accel')
        self.lost()
        self.host.reconciler.run()
        self.settled()
        self.assertKept(ONE, TWO, THREE)
        # and the next server does not read it unless the operator says so
        self.assertEqual([ONE, TWO, THREE], self.fenced())


class NvmeVfTest(SettlingTestCase):
    """Handles that Placement does not tell apart."""

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': ONE, 'total_vfs': 3, 'vfs': 3}],
                        drivers=('nvme',))
        self.servers = [self.boot(ONE), self.boot(ONE)]
        self.handles = [self.host.guests.handles(s)[0].address
                        for s in self.servers]
        for handle in self.handles:
            self.simulated.kernel.write_disk(handle, f'secret on {handle}')

    def data(self):
        return [self.simulated.kernel.data_of_disk(h) for h in self.handles]

    def offer(self, vf, is_online):
        """Have a VF be offered from the next scan on, or not; as long as it
        is not, nothing brings it online."""
        kernel = self.simulated.kernel
        kernel.set_fault(ONE, virtualization=None if is_online else 'refused')
        kernel.set_secondary(ONE, int(vf[-1]), is_online)

    def server_of(self, count):
        """The only server, with so many VFs."""
        for server in self.servers:
            self.host.delete(server)
        provider, = self.host.allocation(ONE, SSD)
        return self.host.boot({f'resources1:{SSD}': str(count)},
                              {provider: {'resources': {SSD: count}}})

    def test_guests_tell(self):
        before = self.data()
        self.host.cloud.stop_guest(self.servers[0])
        self.lost()
        self.host.reconciler.run()
        self.settled()
        self.host.start_guest(self.servers[0])
        for server, handle in zip(self.servers, self.handles, strict=True):
            self.assertHas(server, handle)
        self.assertEqual(before, self.data())
        self.assertEqual([], self.fenced())

    def test_server_with_several_groups(self):
        for server in self.servers:
            self.host.delete(server)
        (uuid_, allocation), = self.host.allocation(ONE, SSD).items()
        server = self.host.boot(
            {f'resources1:{SSD}': '1', f'resources2:{SSD}': '2',
             'group_policy': 'none'},
            {uuid_: {'resources': {SSD: 3}}})
        before = self.host.devices_of(server)
        self.host.cloud.stop_guest(server)
        self.lost()
        self.host.reconciler.run()
        self.assertEqual(['1', '2', '2'], sorted(
            c.group for c in self.host.holdings.all()))
        self.host.start_guest(server)
        self.assertHas(server, *before)

    def test_no_guest_tells(self):
        before = self.data()
        for server in self.servers:
            self.host.cloud.stop_guest(server, undefine=True)
        self.lost()
        self.host.reconciler.run()
        self.restart()
        self.host.reconciler.run()
        self.assertEqual([ONE], self.fenced())
        self.assertEqual(before, self.data())
        self.assertIn('a guest shows which device', self.log.output)
        self.assertRaises(exception.DeviceUnavailable,
                          self.host.start_guest, self.servers[0])
        # the operator decides
        for server in self.servers:
            self.host.delete(server)
        self.host.reconciler.run()
        self.settled()
        self.assertEqual(['', ''], self.data())
        self.assertEqual([], self.fenced())

    def test_guest_has_lost_one_of_them(self):
        """What is left is the server's, too, as Placement says."""
        server = self.server_of(3)
        claim, *others = self.host.holdings.of(server)
        self.simulated.kernel.write_disk(claim.handle.address, 'a secret')
        self.host.cloud.detach(server, [claim.handle])
        self.lost()
        self.host.reconciler.run()
        self.settled()
        self.host.reboot(server)
        self.assertHas(server, *(
            c.handle.address for c in (claim, *others)))
        self.assertEqual('a secret', self.simulated.kernel.data_of_disk(
            claim.handle.address))

    def test_no_guest_tells_and_one_is_not_offered_yet(self):
        """It may be the server's, and not the one that is free."""
        before = self.data()
        self.host.cloud.stop_guest(self.servers[0], undefine=True)
        self.offer(self.handles[0], False)
        self.lost()
        self.host.reconciler.run()
        self.restart()
        self.offer(self.handles[0], True)
        self.host.inventory.scanner.scan()
        self.host.reconciler.run()
        self.host.settle()
        self.assertEqual(before, self.data())
        self.assertIn('a guest shows which device', self.log.output)

    def test_guest_has_one_that_is_not_offered_now(self):
        """What is free is not taken for what the server lacks."""
        server, kept = self.servers
        self.host.delete(server)
        self.offer(self.handles[1], False)
        self.lost()
        self.host.reconciler.run()
        self.settled()
        self.assertEqual([self.handles[1]], [
            claim.handle.address for claim in self.host.holdings.of(kept)])
        # which is known without its guest from then on
        self.host.cloud.stop_guest(kept, undefine=True)
        self.offer(self.handles[1], True)
        self.host.inventory.scanner.scan()
        self.host.reconciler.run()
        self.host.start_guest(kept)
        self.assertHas(kept, self.handles[1])
        self.assertEqual(f'secret on {self.handles[1]}', self.data()[1])

    def test_one_after_the_other_is_not_offered(self):
        """What has a claim already counts once."""
        server = self.server_of(2)
        first, second = self.host.devices_of(server)
        self.simulated.kernel.write_disk(second, 'a secret')
        self.offer(second, False)
        self.lost()
        self.host.reconciler.run()
        self.host.cloud.stop_guest(server, undefine=True)
        self.offer(second, True)
        self.offer(first, False)
        self.host.inventory.scanner.scan()
        self.host.reconciler.run()
        self.host.settle()
        self.assertEqual([first, second], sorted(
            claim.handle.address for claim in self.host.holdings.of(server)))
        self.assertEqual('a secret',
                         self.simulated.kernel.data_of_disk(second))

    def test_vf_that_is_not_offered_yet(self):
        """The host has just booted, and not all of them are online."""
        got, other = self.handles
        server, kept = self.servers
        self.host.cloud.stop_guest(server, undefine=True)
        self.host.cloud.allocate(server, None)
        self.offer(got, False)
        self.lost()
        self.host.reconciler.run()
        self.settled()
        # as it stays with the next start
        self.restart()
        self.offer(got, True)
        self.host.inventory.scanner.scan()
        self.assertEqual([ONE], self.fenced())
        self.host.reconciler.run()
        self.settled()
        self.assertEqual(['', f'secret on {other}'], self.data())
        self.assertEqual([], self.fenced())
        self.assertHas(kept, other)


class FpgaTest(SettlingTestCase):

    CLASS = base.FPGA

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.image = self.host.upload(FUNCTION)

    def region(self, address):
        return self.host.inventory.devices[address].region(0)

    def test_what_a_tenant_loaded_is_no_operators(self):
        """A free region may carry anything that the last server loaded."""
        self.host.delete(self.host.boot(
            base.asks(FUNCTION), self.host.allocation(B)))
        server = self.host.boot(base.asks(FUNCTION), self.host.allocation(A))
        self.lost()
        self.assertIn(f'{B}_region0', self.fenced())
        self.host.reconciler.run()
        self.host.settle()
        # the VF that the guest has was not seen
        self.assertEqual([vf(A)], self.host.devices_of(server))
        # no clearing image
        self.assertIn(f'{B}_region0', self.fenced())
        self.assertIsNone(self.region(B).origin)
        self.upload_clearing()
        self.host.reconciler.run()
        self.host.settle()
        self.assertNotIn(f'{B}_region0', self.fenced())
        self.assertEqual(model.OPERATOR, self.region(B).origin)
        # the server is given a genuine one when it starts
        self.host.reboot(server)
        self.assertHas(server, vf(A))
        self.assertEqual((plain(FUNCTION), self.image, model.OPERATOR), (
            self.region(A).function_uuid, self.region(A).bitstream_id,
            self.region(A).origin))
        self.assertEqual([], self.fenced())


class PortsTest(SettlingTestCase):

    CLASS = base.FPGA

    def allocation_of(self, index):
        provider, = [p.uuid for p
                     in self.host.inventory.shown.providers().values()
                     if p.region_index == index]
        return {provider: {'resources': {self.CLASS: 1}}}

    def test_vf_that_stayed_with_vfio(self):
        """Its region is cleaned when it can be offered, and only it."""
        self.start_host({'address': A, 'ports': 2, 'vfs': 2})
        server = self.host.boot(base.ONE, self.allocation_of(1))
        got, = self.host.devices_of(server)
        self.host.kernel.guest_writes(got, registers='a secret')
        self.host.cloud.stop_guest(server, undefine=True)
        self.host.cloud.allocate(server, None)
        self.host.kernel.rebind(got, 'vfio-pci')
        self.upload_clearing()
        self.lost()
        self.host.reconciler.run()
        self.host.settle()
        self.settled()
        # what can be offered is
        kept = self.host.boot(base.ONE, self.allocation_of(0))
        device, = self.host.devices_of(kept)
        self.host.kernel.rebind(got, 'dfl-pci')
        self.host.inventory.scanner.scan()
        self.assertIn(f'{A}_region1', self.fenced())
        self.host.reconciler.run()
        self.host.settle()
        self.assertEqual([], self.fenced())
        self.assertHas(kept, device)
        server = self.host.boot(base.ONE, self.allocation_of(1))
        self.assertHas(server, got)
        self.assertNotIn('a secret', str(self.host.kernel.guest_reads(got)))
        self.assertEqual(frozenset(), self.host.store.unsettled())

    def test_second_region_of_a_server_comes_later(self):
        """That the server has the first one says nothing of it."""
        self.start_host({'address': A, 'ports': 2, 'vfs': 2})
        server = self.host.boot(
            {**base.ONE, f'resources2:{self.CLASS}': '1',
             'group_policy': 'isolate'},
            {**self.allocation_of(0), **self.allocation_of(1)})
        self.host.cloud.stop_guest(server)
        self.host.kernel.rebind(vf(A, 1), 'vfio-pci')
        self.lost()
        self.host.reconciler.run()
        self.host.kernel.rebind(vf(A, 1), 'dfl-pci')
        self.host.inventory.scanner.scan()
        self.host.reconciler.run()
        self.host.start_guest(server)
        self.assertHas(server, vf(A), vf(A, 1))


class VgpuTest(SettlingTestCase):

    CLASS = VGPU

    def test_lost(self):
        self.start_host(vgpus=[vgpus.gpu('mdev')], drivers=('vgpu',))
        runs, off = (self.boot(vgpus.GPU) for _ in range(2))
        before = {s: self.host.devices_of(s) for s in (runs, off)}
        self.host.cloud.stop_guest(off)
        self.lost()
        self.host.reconciler.run()
        self.settled()
        self.assertEqual(before[runs], self.host.devices_of(runs))
        self.host.start_guest(off)
        self.assertEqual(1, len(self.host.devices_of(off)))
        self.assertNotEqual(before[runs], self.host.devices_of(off))
        for server in (runs, off):
            self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual([], self.fenced())

    def test_no_guest_tells(self):
        """A vGPU is made again: nothing of what is free is its server's."""
        self.start_host(vgpus=[vgpus.gpu('mdev')], drivers=('vgpu',))
        server = self.boot(vgpus.GPU)
        self.host.cloud.stop_guest(server, undefine=True)
        self.lost()
        self.host.reconciler.run()
        self.settled()
        self.host.start_guest(server)
        self.assertEqual(1, len(self.host.devices_of(server)))


class PoolTest(SettlingTestCase):
    """Disks that share a provider: Placement does not say who has which."""

    POOLS = 'host'

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': a} for a in (ONE, TWO, THREE)],
                        drivers=('nvme',))
        for address in (ONE, TWO, THREE):
            self.host.kernel.write_disk(address, f'data of {address}')

    def boot(self, amount=1):
        uuid, = self.host.inventory.shown.providers()
        return self.host.boot(
            {f'resources1:{SSD}': str(amount)},
            {uuid: {'resources': {SSD: amount}}})

    def reserved(self):
        self.host.report()
        return self.item['reserved']

    @property
    def total(self):
        return self.item['total']

    @property
    def item(self):
        provider, = [p for p in self.host.cloud.read()['providers'].values()
                     if '_accel_' in p['name']]
        return provider['inventory'][SSD]

    def kept(self):
        return [a for a in (ONE, TWO, THREE)
                if self.host.kernel.data_of_disk(a)]

    def test_guests_tell(self):
        runs, off = self.boot(), self.boot()
        self.host.cloud.stop_guest(off)
        for server, address in ((runs, ONE), (off, TWO)):
            self.host.kernel.write_disk(address, 'a secret')
        self.lost()
        self.assertEqual((3, 3), (self.reserved(), self.total))
        self.host.reconciler.run()
        self.settled()
        self.assertEqual((0, 3), (self.reserved(), self.total))
        self.assertHas(runs, ONE)
        self.host.start_guest(off)
        self.assertHas(off, TWO)
        self.assertEqual([ONE, TWO], self.kept())
        for server in (runs, off):
            self.host.delete(server)
        self.assertEqual([], self.kept())
        self.assertEqual(0, self.reserved())

    def test_one_of_several(self):
        """What may be the server's is cleaned when it is gone."""
        runs, lost = self.boot(), self.boot()
        self.host.cloud.stop_guest(lost, undefine=True)
        for address in (TWO, THREE):
            self.host.kernel.write_disk(address, 'a secret')
        self.lost()
        for _ in range(2):
            self.host.reconciler.run()
        self.assertHas(runs, ONE)
        self.assertEqual([TWO, THREE], self.kept()[-2:])
        # only the disk counts that the first server has
        self.assertEqual(0, self.reserved())
        self.assertEqual(1, self.total)
        self.assertRaises(exception.DeviceUnavailable,
                          self.host.start_guest, lost)
        self.host.cloud.allocate(lost, None)
        self.host.reconciler.run()
        self.settled()
        self.assertEqual(0, self.reserved())
        self.assertNotIn(TWO, self.kept())
        self.assertNotIn(THREE, self.kept())

    def test_before_the_allocation_has_moved(self):
        """The store is lost and the disks come to share a provider at once."""
        self.config.config(pools='none', group='accel')
        self.restart()
        server = self.host.boot({f'resources1:{SSD}': '1'},
                                self.host.allocation(TWO, SSD))
        self.host.cloud.stop_guest(server)
        self.host.kernel.write_disk(TWO, 'a secret')
        self.lose()
        self.config.config(pools='host', group='accel')
        self.restart()
        self.host.reconciler.run()
        self.settled()
        self.host.start_guest(server)
        self.assertHas(server, TWO)
        self.assertEqual([TWO], self.kept())
        self.restart()
        self.host.report()
        self.assertEqual(0, self.reserved())
        claim, = self.host.holdings.all()
        self.assertEqual(
            {claim.provider_uuid: {'resources': {SSD: 1}}},
            self.host.cloud.read()['allocations'][server])


class StandardClassesTest(SettlingTestCase):
    """A class that Nova has as well does not hide that a claim is missing."""

    CARDS = (ONE, TWO)

    def start(self, type_, **devices):
        self.config.config(resource_classes='standard', group='accel')
        self.start_host(drivers=(type_,), **devices)

    def boot_both(self, name):
        return self.host.boot(
            {'resources1:' + name: '1', 'resources2:' + name: '1',
             'group_policy': 'isolate'},
            {uuid: allocation for address in self.CARDS for uuid, allocation
             in self.host.allocation(address, name).items()})

    def lost_while_one_is_away(self):
        self.host.parts.close()
        self.host.power_cut()
        self.simulated.kernel.set_fault(self.CARDS[1], vanish=True)
        self.lost()
        self.host.reconciler.run()

    def assertStartsWithBothOrNot(self, server):
        self.assertRaises(exception.DeviceUnavailable,
                          self.host.start_guest, server)
        self.assertIsNone(self.host.devices_of(server))
        self.simulated.kernel.set_fault(self.CARDS[1], vanish=None)
        self.host.inventory.scanner.scan()
        self.host.reconciler.run()
        self.settled()
        self.host.start_guest(server)

    def test_whole_cards(self):
        self.start('gpu', gpus=[{'address': a} for a in self.CARDS])
        server = self.boot_both('PGPU')
        self.lost_while_one_is_away()
        self.assertStartsWithBothOrNot(server)
        self.assertHas(server, *self.CARDS)

    def test_vgpus(self):
        self.start('vgpu', vgpus=[
            vgpus.gpu('mdev', address=a, types=vgpus.TYPES[:1])
            for a in self.CARDS])
        server = self.boot_both('VGPU')
        self.lost_while_one_is_away()
        self.assertEqual(2 * [State.BOUND], self.host.states(server))
        self.assertStartsWithBothOrNot(server)
        self.assertEqual(2, len(self.host.devices_of(server)))

    def test_vgpu_of_novas_own(self):
        """It is no device that would have to be settled."""
        self.start('gpu', gpus=[{'address': a} for a in self.CARDS])
        native = {str(uuid.uuid4()): {'resources': {'VGPU': 1}}}
        server = self.host.boot(
            {'resources1:PGPU': '1', 'resources2:VGPU': '1'},
            {**self.host.allocation(ONE, 'PGPU'), **native})
        self.lost_while_one_is_away()
        self.assertNotEqual(frozenset(), self.host.store.unsettled())
        self.host.start_guest(server)
        self.assertHas(server, ONE)

    def test_vgpu_of_novas_own_and_a_pool_with_others(self):
        """A server that has all of the pool that is its own does not wait
        until it is known who has the rest."""
        self.POOLS = 'host'
        self.start('gpu', gpus=[{'address': a} for a in (ONE, TWO, THREE)])
        pool = self.host.allocation(None, 'PGPU')
        server = self.host.boot(
            {'resources1:PGPU': '1', 'resources2:VGPU': '1'},
            {**pool, str(uuid.uuid4()): {'resources': {'VGPU': 1}}})
        before = self.host.devices_of(server)
        other = self.host.boot({'resources1:PGPU': '1'}, pool)
        self.host.cloud.stop_guest(other, undefine=True)
        self.lost()
        self.host.reconciler.run()
        self.assertRaises(exception.DeviceUnavailable,
                          self.host.start_guest, other)
        self.host.reboot(server)
        self.assertHas(server, *before)


class CleanTest(SettlingTestCase):
    """The host is installed again, and its operator cleans what is there."""

    CLASS = base.FPGA

    def test_part_that_cannot_be_given(self):
        """The answer does not speak of it as clean."""
        self.start_host({'address': A, 'ports': 2, 'vfs': 2})
        self.host.kernel.rebind(vf(A, 1), 'vfio-pci')
        self.lose()
        with self.host.cloud.state() as state:
            state['providers'].clear()
        self.restart()
        self.host.report()
        self.assertRegex(
            self.host.maintenance.clean(A), 'is clean .* region1 of it cannot '
            'be given to servers now, and was left alone[.]$')
