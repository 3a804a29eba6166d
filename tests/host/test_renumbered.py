# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The firmware numbers buses otherwise, as after a card was added.

Each server starts with its card at the card's present address, and so goes
all that is known of the card.
"""

import os
import shutil
from unittest import mock

import ddt
import fixtures

from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.store import claim_store
from nova_accel.store import values
from tests.host import base
from tests.host import cloud as clouds
from tests.host import killed
from tests.unit.host import FUNCTION, plain, vf
from tests.unit import vgpus

GPU, SSD, FPGA, QAT = (f'CUSTOM_ACCELERATOR_{type_}' for type_ in (
    'GPU', 'SSD', 'FPGA', 'QAT'))
#: addresses as they are numbered one after the other
FIRST, SECOND, THIRD, FOURTH = (f'0000:0{bus}:00.0' for bus in range(2, 6))
AA, BB = '0011223344556677', '8899aabbccddeeff'


def at(address, port, **more):
    """A card behind a root port."""
    return {'address': address, 'bridges': ['pci0000:00', f'0000:00:{port}'],
            **more}


class RenumberedTestCase(base.HostTestCase):

    POOLS = 'none'
    CLASS = GPU

    def boot(self, address):
        return self.host.boot({f'resources1:{self.CLASS}': '1'},
                              self.host.allocation(address, self.CLASS))

    def renumber(self, *moved, **added):
        """
        :param moved: pairs of addresses, before and now.
        """
        self.host.parts.close()
        self.host.cloud.lose_power()
        self.simulated.renumber(dict(moved), **added)
        self.restart()

    def allocated(self, server):
        """Names of the providers from which a server has something."""
        state = self.host.cloud.read()
        return [state['providers'][uuid]['name'].rpartition('_accel_')[2]
                for uuid in state['allocations'][server]]

    def assertStarts(self, server, address):
        self.host.start_guest(server)
        self.assertHas(server, address)
        self.assertEqual([address], self.allocated(server))

    def withheld(self):
        return {hold.device: hold.reason
                for hold in self.host.inventory.table.all_holds()
                if hold.kind.withholds}


@ddt.ddt
class GpuTest(RenumberedTestCase):

    def start(self, *serials, **more):
        self.start_host(gpus=[
            at(FIRST, '03.0', device_serial=serials[0], **more),
            at(SECOND, '05.0', device_serial=serials[1], **more)],
            drivers=('gpu',))
        self.servers = [self.boot(FIRST), self.boot(SECOND)]

    def add(self, serial='', **more):
        """A card behind the first port."""
        self.renumber((FIRST, SECOND), (SECOND, THIRD), gpus=[
            at(FIRST, '01.0', device_serial=serial, **more)])

    @ddt.data((AA, BB, '1122334455667788'), ('', '', ''), (AA, AA, AA),
              (AA, '', BB))
    def test_card_added(self, serials):
        *before, new = serials
        self.start(*before)
        self.add(new)
        self.assertEqual({}, self.withheld())
        self.assertStarts(self.servers[0], SECOND)
        self.assertStarts(self.servers[1], THIRD)
        # and the new card is offered
        self.assertHas(self.boot(FIRST), FIRST)
        self.assertNotIn('put ', self.log.output)
        for server in self.servers:
            self.host.delete(server)
        self.host.report()
        self.assertEqual([FIRST], [
            c.device_address for c in self.host.holdings.all()])

    @ddt.data((AA, BB), ('', ''))
    def test_addresses_swapped(self, serials):
        self.start(*serials)
        self.renumber((FIRST, SECOND), (SECOND, FIRST))
        self.assertEqual({}, self.withheld())
        self.assertStarts(self.servers[0], SECOND)
        self.assertStarts(self.servers[1], FIRST)

    @ddt.data((AA, BB), ('', ''))
    def test_renumbered_twice(self, serials):
        """Once while nova-compute does not run."""
        self.start(*serials)
        self.host.parts.close()
        self.simulated.renumber({FIRST: SECOND, SECOND: THIRD}, gpus=[
            at(FIRST, '01.0')])
        self.renumber((FIRST, FIRST), (SECOND, THIRD), (THIRD, FOURTH),
                      gpus=[at(SECOND, '02.0')])
        self.assertEqual({}, self.withheld())
        self.assertStarts(self.servers[0], THIRD)
        self.assertStarts(self.servers[1], FOURTH)
        self.renumber((FIRST, FIRST), (THIRD, SECOND), (FOURTH, THIRD))
        self.assertStarts(self.servers[0], SECOND)
        self.assertStarts(self.servers[1], THIRD)

    def test_pool(self):
        """The allocations stay where they are."""
        self.POOLS = 'host'
        self.start('', '')
        before = [self.allocated(server) for server in self.servers]
        self.add()
        for server, address in zip(self.servers, (SECOND, THIRD), strict=True):
            self.host.start_guest(server)
            self.assertHas(server, address)
        self.assertEqual(before, [
            self.allocated(server) for server in self.servers])

    def test_another_product_at_the_same_ports(self):
        """It is another card, whose address the server's card had."""
        self.start('', '')
        self.renumber((SECOND, SECOND), gpus=[
            at(FIRST, '03.0', vendor='1002', device='7448')])
        error = str(self.assertRaises(
            exception.DeviceUnavailable, self.host.start_guest,
            self.servers[0]))
        self.assertIn('product 1002:7448', error)
        self.assertIn('put the first one back', error)
        self.assertStarts(self.servers[1], SECOND)

    def test_card_exchanged_for_one_at_other_ports(self):
        """Another one, which has the number of the first, without serial
        numbers."""
        self.start('', '')
        self.renumber((SECOND, SECOND), gpus=[at(FIRST, '01.0')])
        error = str(self.assertRaises(
            exception.DeviceUnavailable, self.host.start_guest,
            self.servers[0]))
        self.assertIn('behind pci0000:00/01.0/00.0 in place of '
                      'pci0000:00/03.0/00.0', error)
        self.host.delete(self.servers[0])
        self.assertEqual([], self.simulated.kernel.resets(FIRST))
        self.assertStarts(self.servers[1], SECOND)

    def test_card_taken_out(self):
        """The address of the second card is that of the first one's claim."""
        self.start('', '')
        self.renumber((SECOND, FIRST))
        error = str(self.assertRaises(
            exception.DeviceUnavailable, self.host.start_guest,
            self.servers[1]))
        self.assertIn(f'is at {FIRST} now, and server {self.servers[0]} has a '
                      f'claim on {FIRST}, whose card is not found', error)
        before = len(self.simulated.kernel.resets(FIRST))
        self.host.delete(self.servers[0])
        self.host.reconciler.run()
        self.assertEqual(before, len(self.simulated.kernel.resets(FIRST)))
        self.restart()
        self.assertStarts(self.servers[1], FIRST)

    def test_added_while_one_is_moved_by_hand(self):
        """Its serial number says which it is; the other one is at its ports.
        """
        self.start(AA, '')
        self.renumber((SECOND, FOURTH), gpus=[
            at(FIRST, '01.0', device_serial=BB),
            at(SECOND, '02.0', device_serial=AA)])
        self.assertStarts(self.servers[0], SECOND)
        self.assertStarts(self.servers[1], FOURTH)
        self.assertHas(self.boot(FIRST), FIRST)

    def test_without_privileges_at_first(self):
        """The serial numbers are read later, and the claims have none."""
        with mock.patch(
                'nova_accel.sim.SimulatedKernel.read_device_serial',
                side_effect=PermissionError(1, 'Operation not permitted')):
            self.start(AA, BB)
        self.add()
        self.assertStarts(self.servers[0], SECOND)
        self.assertStarts(self.servers[1], THIRD)

    def test_released_while_the_host_was_down(self):
        """What has to be cleaned is cleaned where it is now."""
        self.start('', '')
        self.host.cloud.stop_guest(self.servers[0], undefine=True)
        self.host.holdings.releasing(
            self.host.holdings.of(self.servers[0]))
        self.add()
        before = {a: len(self.simulated.kernel.resets(a))
                  for a in (FIRST, SECOND, THIRD)}
        self.host.cloud.allocate(self.servers[0], None)
        self.host.reconciler.run()
        self.assertEqual({**before, SECOND: before[SECOND] + 1}, {
            a: len(self.simulated.kernel.resets(a)) for a in before})
        self.assertEqual([self.servers[1]], self.host.currents())

    @ddt.data((AA, BB), ('', ''))
    def test_holds_follow(self, serials):
        self.start(*serials)
        self.host.disable(FIRST)
        self.host.delete(self.servers[0])
        self.add()
        self.assertEqual({SECOND}, set(self.withheld()))
        self.assertEqual({SECOND},
                         self.host.inventory.table.disabled().keys())
        self.assertHas(self.boot(FIRST), FIRST)
        self.host.enable()
        self.host.report()
        self.assertHas(self.boot(SECOND), SECOND)

    def test_unclean_follows(self):
        self.config.config(group='accel', handover=['none'])
        self.start('', '')
        for server in self.servers:
            self.host.delete(server)
        self.config.config(group='accel', handover=['clear'])
        self.add()
        self.host.reconciler.run()
        self.assertEqual([0, 1, 1], [
            len(self.simulated.kernel.resets(a))
            for a in (FIRST, SECOND, THIRD)])
        self.assertEqual({handover.NOT_SHOWN}, {
            row.policy for row in self.host.store.unclean()})

    def test_waiting_follows(self):
        self.config.config(group='accel', handover=['operator'])
        self.start('', '')
        self.host.delete(self.servers[0])
        self.add()
        self.assertEqual([SECOND], [
            c.handle.address for c in self.host.store.all_claims()
            if c.waits])
        self.host.report()
        self.assertRaises(exception.AcceleratorError, self.boot, SECOND)
        self.host.maintenance.release(SECOND)
        self.host.report()
        self.assertHas(self.boot(SECOND), SECOND)

    def test_owner_unknown_follows(self):
        self.start('', '')
        self.host.cloud.stop_guest(self.servers[0])
        with mock.patch.object(
                self.host.cloud, 'guest_devices', side_effect=OSError):
            self.host.holdings.settle(todo=[values.Unsettled(FIRST)])
            self.add()
        self.assertEqual({(FIRST, True)}, {
            (row.address, row.moved) for row in self.host.store.unsettled()})
        self.host.reconciler.run()
        self.assertEqual(frozenset(), self.host.store.unsettled())
        self.assertStarts(self.servers[0], SECOND)

    @ddt.data((AA, BB), ('', ''))
    def test_store_is_lost_as_well(self, serials):
        """Guests carry the claims, with the former addresses."""
        self.start(*serials)
        self.host.reconciler.run()
        self.host.parts.close()
        for name in os.listdir(self.directory):
            if name.startswith(claim_store.file_name(clouds.NODE)):
                os.unlink(os.path.join(self.directory, name))
        self.add()
        self.host.reconciler.run()
        self.host.report(starting=True)
        self.assertStarts(self.servers[0], SECOND)
        self.assertStarts(self.servers[1], THIRD)

    def test_running_guest(self):
        """What a guest has open is where it is, whatever the card says."""
        self.start(AA, BB)
        for address, serial in (FIRST, BB), (SECOND, AA):
            with self.simulated.kernel._update() as (_, state):
                state['cards'][address]['device_serial'] = serial
        self.restart()
        self.assertEqual([FIRST, SECOND], self.claimed())
        for server in self.servers:
            self.host.cloud.stop_guest(server)
        self.host.reconciler.run()
        self.assertEqual([SECOND, FIRST], self.claimed())

    def claimed(self):
        return [self.host.holdings.of(server)[0].device_address
                for server in self.servers]


class DiskTest(RenumberedTestCase):

    CLASS = SSD

    def test_local_disks(self):
        self.start_host(nvmes=[at(FIRST, '03.0'), at(SECOND, '05.0')],
                        drivers=('nvme',))
        servers = [self.boot(FIRST), self.boot(SECOND)]
        kernel = self.simulated.kernel
        for number, address in enumerate((FIRST, SECOND)):
            kernel.write_disk(address, f'secret of {number}')
        self.host.parts.close()
        self.host.cloud.lose_power()
        self.simulated.renumber({FIRST: SECOND, SECOND: THIRD}, nvmes=[
            at(FIRST, '01.0')])
        # the simulation numbers disks by their first address
        with kernel._update() as (_, state):
            state['cards'][FIRST]['serial'] = 'S1'
        self.restart()
        for server, address in zip(servers, (SECOND, THIRD), strict=True):
            self.assertStarts(server, address)
        self.assertEqual(['secret of 0', 'secret of 1'], [
            kernel.data_of_disk(a) for a in (SECOND, THIRD)])
        self.host.delete(servers[0])
        self.assertEqual(['', 'secret of 1'], [
            kernel.data_of_disk(a) for a in (SECOND, THIRD)])


class QatTest(RenumberedTestCase):
    """VFs, whose addresses follow from that of their PF."""

    CLASS = QAT

    def test_vfs(self):
        self.start_host(qats=[at(FIRST, '03.0', vfs=16),
                              at(SECOND, '05.0', vfs=16)],
                        drivers=('qat',))
        self.config.config(group='accel', virtual_functions=[
            f'{a}=16' for a in (FIRST, SECOND)])
        self.restart()
        servers = [self.boot(a) for a in (FIRST, FIRST, SECOND)]
        before = [self.host.devices_of(server) for server in servers]
        self.assertEqual([[vf(FIRST)], [vf(FIRST, 1)], [vf(SECOND)]], before)
        self.config.config(group='accel', virtual_functions=[
            f'{a}=16' for a in (FIRST, SECOND, THIRD)])
        self.renumber((FIRST, SECOND), (SECOND, THIRD), qats=[
            at(FIRST, '01.0', vfs=16)])
        for server, address in zip(servers, (
                vf(SECOND), vf(SECOND, 1), vf(THIRD)), strict=True):
            self.host.start_guest(server)
            self.assertHas(server, address)
        self.assertEqual([[SECOND], [SECOND], [THIRD]], [
            self.allocated(server) for server in servers])


class FpgaTest(RenumberedTestCase):
    """OFS boards have no serial number in their configuration space."""

    CLASS = FPGA

    def start(self):
        self.start_host(at(FIRST, '03.0'), at(SECOND, '05.0'))
        self.image = self.host.upload(FUNCTION)

    def add(self):
        self.config.config(group='accel', virtual_functions=[
            f'{a}=1' for a in (FIRST, SECOND, THIRD)])
        self.renumber((FIRST, SECOND), (SECOND, THIRD), cards=[
            base.simulated.with_vfs(at(FIRST, '01.0', programming_seconds=0,
                                       timeout_seconds=0))])

    def contents(self):
        return {address: (device.region(0).function_uuid,
                          device.region(0).bitstream_id,
                          device.region(0).origin)
                for address, device in self.host.inventory.devices.items()}

    def test_regions(self):
        self.start()
        server = self.host.boot(
            base.asks(FUNCTION), self.host.allocation(FIRST))
        before = self.contents()
        self.add()
        self.assertEqual(
            [before[FIRST], before[SECOND]],
            [self.contents()[a] for a in (SECOND, THIRD)])
        self.host.start_guest(server)
        self.assertHas(server, vf(SECOND))
        self.assertEqual(plain(FUNCTION), self.host.carries(SECOND))
        self.assertEqual([f'{SECOND}_region0'], self.allocated(server))

    def test_content_of_a_project_follows(self):
        self.start()
        self.host.inventory.contents.forget(FIRST, 0, 'a project')
        self.add()
        self.assertEqual('a project', self.contents()[SECOND][2])
        self.assertNotEqual('a project', self.contents()[FIRST][2])


class VgpuTest(RenumberedTestCase):

    CLASS = 'CUSTOM_ACCELERATOR_VGPU'

    def test_mediated_devices(self):
        self.start_host(vgpus=[
            {**vgpus.gpu('mdev'), **at(FIRST, '03.0')}],
            drivers=('vgpu',))
        servers = [self.boot(FIRST), self.boot(FIRST)]
        before = [self.host.devices_of(server) for server in servers]
        self.renumber((FIRST, SECOND), vgpus=[
            {**vgpus.gpu('mdev'), **at(FIRST, '01.0')}])
        for server in servers:
            self.host.start_guest(server)
        names = [self.host.devices_of(server) for server in servers]
        self.assertNotIn(names[0], before)
        self.assertEqual(
            sorted(name for there in names for name in there),
            sorted(self.host.kernel.listdir(
                f'class/mdev_bus/{SECOND}'))[:2])
        for server in servers:
            self.assertHas(server, *self.host.devices_of(server))
        self.assertEqual([[SECOND]] * 2, [
            self.allocated(server) for server in servers])
        self.host.delete(servers[0])
        self.host.report()
        self.assertHas(self.boot(SECOND), names[0][0])


class SetTest(RenumberedTestCase):

    def boot_with_set(self):
        """A server with the two devices of a set."""
        self.config.config(group='accel',
                           device_sets=[f'{FIRST} {SECOND}'])
        self.start_host(gpus=[at(FIRST, '03.0'), at(SECOND, '05.0')],
                        drivers=('gpu',))
        return self.host.boot({f'resources:{GPU}': '2'},
                              self.host.allocation(FIRST, GPU, 2))

    def test_set(self):
        """The operator has corrected the addresses of the set."""
        server = self.boot_with_set()
        self.config.config(group='accel',
                           device_sets=[f'{SECOND} {THIRD}'])
        self.renumber((FIRST, SECOND), (SECOND, THIRD), gpus=[
            at(FIRST, '01.0')])
        self.host.start_guest(server)
        self.assertHas(server, SECOND, THIRD)
        provider, = self.allocated(server)
        shown = self.host.inventory.shown.providers()
        self.assertIn(SECOND, str(shown[next(iter(
            self.host.cloud.read()['allocations'][server]))].addresses))

    def test_rule_that_names_the_old_addresses(self):
        """It means other cards now; nothing of a server goes to another."""
        server = self.boot_with_set()
        self.renumber((FIRST, SECOND), (SECOND, THIRD), gpus=[
            at(FIRST, '01.0')])
        self.host.start_guest(server)
        self.assertHas(server, SECOND, THIRD)


class KilledTest(RenumberedTestCase):

    def test_killed_while_claims_follow(self):
        """nova-compute is killed at each point of its start."""
        self.start_host(gpus=[at(FIRST, '03.0'), at(SECOND, '05.0')],
                        drivers=('gpu',))
        servers = [self.boot(FIRST), self.boot(SECOND)]
        self.host.disable(FIRST)
        self.host.end()
        self.host.cloud.lose_power()
        self.simulated.renumber({FIRST: SECOND, SECOND: THIRD},
                                gpus=[at(FIRST, '01.0')])
        state = f'{self.simulated.path}.state'
        kept = self.useFixture(fixtures.TempDir()).path
        shutil.copytree(self.directory, f'{kept}/host')
        shutil.copy(state, f'{kept}/state')
        compute = killed.Processes(
            self.directory, self.simulated.path, enabled_drivers=['gpu'],
            include_devices=['address=*'], pools='none',
            simulated_host=self.simulated.path,
            bitstream_cache=f'{self.directory}/cache')
        self.addCleanup(compute.end)
        for point in range(100):
            shutil.copytree(f'{kept}/host', self.directory,
                            dirs_exist_ok=True)
            shutil.copy(f'{kept}/state', state)
            try:
                compute.start(point)
                break
            except killed.Killed as where:
                said = str(where)
            compute.run([['start_guest', server] for server in servers])
            compute.end()
            self.assertEqual(
                {servers[0]: [SECOND], servers[1]: [THIRD]},
                {uuid: sorted(devices) for uuid, devices
                 in self.host.cloud.running().items()}, said)
            self.assertEqual(
                [[SECOND], [THIRD]],
                [self.allocated(server) for server in servers], said)
            self.assertEqual([SECOND], [
                row.device_address
                for row in self.host.command().disabled()], said)
        self.assertGreater(point, 3)
