# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices that are only given together."""

import os

import ddt
import fixtures

from nova_accel import exception
from nova_accel import naming
from tests.host import base

CLASS = 'CUSTOM_ACCELERATOR_GPU'
A, B, C, D = GPUS = [f'0000:0{n}:00.0' for n in range(1, 5)]


class SetsTestCase(base.HostTestCase):

    def sets(self, *sets):
        self.config.config(device_sets=[' '.join(s) for s in sets],
                           group='accel')

    def start(self, *sets):
        self.sets(*sets)
        self.start_host(gpus=[{'address': a} for a in GPUS], drivers=('gpu',))

    def change(self, *sets):
        self.sets(*sets)
        self.restart()
        self.host.report()

    def amounts(self):
        """(total, reserved, step) of each provider that has the class."""
        return sorted(
            (item['total'], item['reserved'], item['step_size'])
            for provider in self.host.cloud.read()['providers'].values()
            for item in provider['inventory'].values())

    def boot(self, address, amount=2):
        return self.host.boot({f'resources:{CLASS}': str(amount)},
                              self.host.allocation(address, CLASS, amount))


class SetsTest(SetsTestCase):

    def test_all_of_it(self):
        self.start([C, A])
        self.assertEqual([(2, 0, 1), (2, 0, 2)], self.amounts())
        server = self.boot(C)
        self.assertHas(server, A, C)
        self.assertHas(self.boot(B), B, D)
        self.assertRaises(exception.DeviceUnavailable, self.boot, A)
        self.host.reboot(server)
        self.assertHas(server, A, C)
        self.restart()
        self.host.reconcile()
        self.assertHas(server, A, C)
        self.host.revert(server, self.host.migrate_away(server))
        self.assertHas(server, A, C)
        self.host.delete(server)
        self.host.report()
        self.assertEqual([(2, 0, 1), (2, 0, 2)], self.amounts())
        self.assertHas(self.boot(A), A, C)

    def test_device_that_is_not_well(self):
        """Nobody gets the others of its set; who has it, keeps it."""
        self.start([A, B], [C, D])
        self.host.kernel.set_fault(A, dead=True)
        self.host.inventory.scanner.scan()
        self.host.report()
        self.assertEqual([(2, 0, 2), (2, 2, 2)], self.amounts())
        error = self.assertRaises(exception.DeviceUnavailable, self.boot, B)
        self.assertIn('and 0 of it are free', str(error))
        server = self.boot(C)
        self.host.kernel.set_fault(D, dead=True)
        self.host.inventory.scanner.scan()
        self.host.report()
        self.assertEqual([(2, 0, 2), (2, 2, 2)], self.amounts())
        self.assertHas(server, C, D)
        # and what cannot be cleaned keeps the other one from servers
        self.host.delete(server)
        self.host.report()
        self.assertEqual([(2, 2, 2)] * 2, self.amounts())
        self.assertEqual([D], [
            c.device_address for c in self.host.holdings.all()])

    def test_reservation_of_the_operator(self):
        self.start([A, B])
        self.config.config(handover=[f'{A}=operator'], group='accel')
        server = self.boot(A)
        self.host.delete(server)
        for _ in range(2):
            self.host.report()
        self.assertIn((2, 2, 2), self.amounts())
        self.host.maintenance.release(A)
        self.assertEqual([(2, 0, 1), (2, 0, 2)], self.amounts())

    def test_device_that_is_not_there(self):
        self.start([A, '0000:77:00.0'])
        self.assertIn('[accel] device_sets names 0000:77:00.0, which no '
                      'driver', self.log.output)
        self.assertEqual([(2, 2, 2), (3, 0, 1)], self.amounts())

    def test_server_that_has_one_of_it(self):
        """It keeps what it has; the set waits for it."""
        self.start()
        server = self.boot(A, 1)
        self.assertHas(server, A)
        allocation = self.host.cloud.read()['allocations'][server]
        self.change([A, B])
        self.host.reconcile()
        self.host.report()
        self.assertEqual([(2, 2, 2), (3, 0, 1)], self.amounts())
        self.assertEqual(
            allocation, self.host.cloud.read()['allocations'][server])
        self.host.reboot(server)
        self.assertHas(server, A)
        self.host.delete(server)
        self.host.report()
        self.assertEqual([(2, 0, 1), (2, 0, 2)], self.amounts())
        self.assertHas(self.boot(A), A, B)

    def test_server_that_has_all_of_it(self):
        """Its allocation moves, there and back."""
        self.start()
        server = self.boot(A)
        for sets in ([A, B],), (), ([A, B, C],):
            self.change(*sets)
            claims = self.host.holdings.all()
            self.assertEqual(
                {claims[0].provider_uuid: {'resources': {CLASS: 2}}},
                self.host.cloud.read()['allocations'][server])
            providers = self.host.inventory.shown.providers()
            self.assertEqual(
                len(sets) and len(sets[0]) == 2,
                naming.SET in providers[claims[0].provider_uuid].traits)
            self.assertHas(server, A, B)
        self.host.delete(server)
        self.host.report()
        self.assertEqual([(1, 0, 1), (3, 0, 3)], self.amounts())

    def test_killed_while_claims_were_changed(self):
        """Placement has the allocation with the set, and of the claims only
        the first says so."""
        self.start()
        server = self.boot(A)
        before = {c.provider_uuid for c in self.host.holdings.all()}
        self.change([A, B])
        one, two = self.host.holdings.all()
        self.assertNotIn(two.provider_uuid, before)
        self.host.store.update([two], provider_uuid=before.pop())
        for starting in False, True:
            if starting:
                self.restart()
            self.host.report()
            self.assertEqual({one.provider_uuid}, {
                c.provider_uuid for c in self.host.holdings.all()})
        self.assertEqual([(2, 0, 1), (2, 0, 2)], self.amounts())
        self.assertHas(server, A, B)

    def test_other_set(self):
        """What cannot move keeps the rest of the set where it is allocated."""
        self.start([A, B])
        server = self.boot(A)
        before = self.host.cloud.read()['allocations']
        self.change([B, C])
        self.assertEqual(before, self.host.cloud.read()['allocations'])
        self.assertHas(server, A, B)
        self.host.reconcile()
        self.host.reboot(server)
        self.assertHas(server, A, B)
        self.host.report()
        # of the pool, of the new one, of the old one, which goes
        self.assertEqual([(1, 0, 1), (2, 2, 2), (2, 2, 2)], self.amounts())
        self.host.delete(server)
        for _ in range(2):
            self.host.report()
        self.assertEqual([(2, 0, 1), (2, 0, 2)], self.amounts())

    def test_servers_that_have_one_each(self):
        """Placement would refuse less than a set: nothing moves."""
        self.start()
        one, two = (self.boot(address, 1) for address in (A, B))
        self.assertHas(one, A)
        self.assertHas(two, B)
        before = self.host.cloud.read()['allocations']
        self.change([A, B])
        self.assertEqual(before, self.host.cloud.read()['allocations'])
        self.assertIn((2, 2, 2), self.amounts())

    def test_server_with_its_old_self(self):
        """A migration that waits has one of the set, the server the other."""
        self.start()
        server = self.boot(A, 1)
        migration = self.host.migrate_away(server)
        self.host.cloud.allocate(
            server, self.host.allocation(A, CLASS, 1))
        self.host.spawn(server)
        self.assertEqual({A, B}, {
            c.device_address for c in self.host.holdings.all()})
        before = self.host.cloud.read()['allocations']
        self.change([A, B])
        self.assertEqual(before, self.host.cloud.read()['allocations'])
        self.host.confirm(server, migration)
        self.host.delete(server)
        self.host.report()
        self.assertEqual([(2, 0, 1), (2, 0, 2)], self.amounts())


@ddt.ddt
class RefusedTest(SetsTestCase):
    """nova-compute does not start with a set that cannot be given."""

    @ddt.data(
        ([A, '0000:5e:00.0'], 'names 0000:5e:00.0, which is of the driver '
                              'dfl: a set consists of whole devices of one'),
        ([A, '0000:6d:00.0'], 'names 0000:6d:00.0, which is a AI, and '
                              f'{A} is a GPU'),
        (['0000:6d:00.0', '0000:6e:00.0'],
         'names 0000:6e:00.0, which is given to servers by 2 VFs'),
        ([A], "has the set '0000:01:00.0', which is not two or more"))
    @ddt.unpack
    def test_refused(self, devices, said):
        self.sets(devices)
        self.config.config(pci_devices=['vendor=1ac1 type=AI'], group='accel')
        error = self.assertRaises(
            exception.ConfigurationError, self.start_host,
            {'address': '0000:5e:00.0'}, gpus=[{'address': A}], others=[
                {'address': '0000:6d:00.0', 'vendor': '1ac1'},
                {'address': '0000:6e:00.0', 'vendor': '1ac1',
                 'total_vfs': 2, 'vfs': 2}], drivers=('gpu', 'dfl', 'pci'))
        self.assertIn(f'[accel] device_sets {said}', str(error))


class FabricTest(SetsTestCase):
    """GPUs of which the operator's command activates the partition."""

    def setUp(self):
        super().setUp()
        self.fabric = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'fabric')
        self.answers()
        self.config.config(fabric_command=self.fabric, group='accel')
        self.sets([A, B], [C, D])
        self.start_host(
            gpus=[{'address': a, 'device': '2330'} for a in GPUS],
            others=[{'address': '0000:07:00.0', 'driver': None,
                     'vendor': '10de', 'class': '0x068000'}],
            drivers=('gpu',))

    def answers(self, deactivate=0, activate=0):
        with open(self.fabric, 'w') as file:
            file.write(f'''#!/bin/sh
echo "$@" >> {self.fabric}.log
case $1 in activate) exit {activate};; *) exit {deactivate};; esac
''')
        os.chmod(self.fabric, 0o700)

    def said(self):
        """What was asked of the command since the last time, in order."""
        with open(f'{self.fabric}.log') as file:
            lines = file.read().splitlines()
        os.unlink(f'{self.fabric}.log')
        return list(dict.fromkeys(lines))

    def test_around_a_server(self):
        server = self.boot(A)
        self.assertEqual([f'activate {A} {B}'], self.said())
        self.host.reboot(server)
        self.assertEqual([f'activate {A} {B}'], self.said())
        self.host.delete(server)
        self.assertEqual([f'deactivate {A} {B}'], self.said())
        self.assertEqual([], self.host.holdings.all())

    def test_not_activated(self):
        self.answers(activate=1)
        self.assertRaises(exception.DeviceError, self.boot, A)
        self.assertEqual([], self.host.holdings.all())
        self.answers()
        self.boot(A)

    def test_not_deactivated(self):
        server = self.boot(A)
        self.answers(deactivate=1)
        self.host.delete(server)
        self.assertEqual(2, len(self.host.holdings.being_released()))
        self.assertRaises(exception.DeviceUnavailable, self.boot, A)
        self.answers()
        self.host.reconciler.run()
        self.assertEqual([], self.host.holdings.all())
        self.boot(A)


class VfsTest(SetsTestCase):
    """GPUs that are given by the one VF that each has, as under gim."""

    def test_all_of_it(self):
        self.sets([A, B])
        self.start_host(vgpus=[{
            'address': a, 'framework': 'sriov', 'vendor': '1002',
            'device': '74a1', 'class': '0x120000', 'driver': 'gim',
            'types': [], 'total_vfs': 1, 'vfs': 1} for a in (A, B)],
            drivers=('vgpu',))
        name = 'CUSTOM_ACCELERATOR_VGPU'
        self.assertEqual([(2, 0, 2)], self.amounts())
        server = self.host.boot({f'resources:{name}': '2'},
                                self.host.allocation(A, name, 2))
        self.assertEqual(2, len(self.host.holdings.of(server)))
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
