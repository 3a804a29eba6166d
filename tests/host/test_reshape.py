# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices come to share a provider, and share none, while servers have them;
Placement moves the allocations when nova-compute starts."""

import ddt

from nova_accel import conf
from nova_accel import exception
from nova_accel import model
from tests.host import base
from tests.host import killed

CLASS = 'CUSTOM_ACCELERATOR_GPU'
GPUS = [f'0000:0{n}:00.0' for n in range(1, 5)]
TWO = {f'resources:{CLASS}': '2'}
ONE = {f'resources1:{CLASS}': '1'}
CURRENT, OLD = model.Role.CURRENT, model.Role.OLD


class ReshapeTestCase(base.HostTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host(gpus=[{'address': a} for a in GPUS], drivers=('gpu',))

    def pools(self, value):
        self.config.config(pools=value, group='accel')

    def change(self, value):
        self.pools(value)
        self.restart()

    def amounts(self):
        """(total, reserved, used) of each provider."""
        state = self.host.cloud.read()
        return sorted(
            (item['total'], item['reserved'], sum(
                a.get(uuid, {}).get('resources', {}).get(CLASS, 0)
                for a in state['allocations'].values()))
            for uuid, provider in state['providers'].items()
            for item in provider['inventory'].values())

    def given(self, *addresses):
        """The allocation of these devices."""
        found: dict = {}
        for address in addresses:
            uuid = self.provider(address)
            resources = found.setdefault(uuid, {'resources': {CLASS: 0}})
            resources['resources'][CLASS] += 1
        return found

    def provider(self, address):
        return next(p.uuid for p
                    in self.host.inventory.shown.providers().values()
                    if address in p.addresses)

    def boot(self, *addresses):
        return self.host.boot({
            f'resources{n}:{CLASS}': '1' for n in range(len(addresses))},
            self.given(*addresses))

    def assertMoved(self):
        """Claims and Placement name the present providers."""
        allocations = self.host.cloud.read()['allocations']
        expected: dict = {}
        for claim in self.host.store.claims():
            self.assertEqual(self.provider(claim.device_address),
                             claim.provider_uuid)
            given = expected.setdefault(claim.consumer_uuid, {})
            resources = given.setdefault(claim.provider_uuid, {
                'resources': {CLASS: 0}})
            resources['resources'][CLASS] += 1
        self.assertEqual(expected, allocations)


@ddt.ddt
class ReshapeTest(ReshapeTestCase):

    def test_to_a_pool_and_back(self):
        one, two = self.boot(GPUS[2]), self.boot(GPUS[0], GPUS[3])
        away = self.boot(GPUS[1])
        migration = self.host.migrate_away(away)
        self.change('host')
        self.assertMoved()
        self.host.report()
        self.assertEqual([(4, 0, 4)], self.amounts())
        self.host.reconcile()
        self.assertHas(one, GPUS[2])
        self.assertHas(two, GPUS[0], GPUS[3])
        self.host.reboot(two)
        self.host.rebuild(one)
        self.host.revert(away, migration)
        self.assertHas(away, GPUS[1])
        migration = self.host.migrate_away(two)
        self.change('none')
        self.assertMoved()
        self.host.report()
        self.assertEqual([(1, 0, 1)] * 4, self.amounts())
        self.host.confirm(two, migration)
        self.host.delete(away)
        self.change('numa_node')
        self.host.report()
        self.assertMoved()
        self.assertEqual([(4, 0, 1)], self.amounts())
        self.host.delete(one)
        self.assertEqual([(4, 0, 0)], self.amounts())

    def test_move_while_claims_are_compared(self):
        """Reconciliation asks for the one provider before the allocation is
        there, and for the other one after it has left."""
        server = self.boot(GPUS[2])
        self.change('host')
        consumers, asked = self.host.cloud.consumers, set()

        def in_neither_at_first(provider_uuid):
            if provider_uuid in asked:
                return consumers(provider_uuid)
            asked.add(provider_uuid)
            return set()
        self.host.cloud.consumers = in_neither_at_first
        self.host.reconcile()
        self.assertTrue(asked)
        self.assertNotIn(server, self.log.output)
        self.host.report()
        self.assertEqual([(4, 0, 1)], self.amounts())

    def test_from_a_pool(self):
        """Claims choose which; nothing is shared."""
        self.change('host')
        uuid = self.provider(GPUS[0])
        servers = [self.host.boot(TWO, {uuid: {'resources': {CLASS: 2}}})
                   for _ in range(2)]
        self.assertEqual(GPUS, sorted(
            a for s in servers for a in self.host.devices_of(s)))
        error = self.assertRaises(
            exception.DeviceUnavailable, self.host.boot, ONE,
            {uuid: {'resources': {CLASS: 1}}})
        self.assertIn('allocated 1 of host_accel_pool_GPU_NVIDIA_L40S_',
                      str(error))
        self.assertIn('and 0 of it are free', str(error))

    def test_of_one_node(self):
        """The closest ones, and the largest group stays whole."""
        self.host.parts.close()
        self.POOLS = 'host'
        self.start_host(gpus=[
            {'address': address, 'numa_node': node} for address, node
            in zip(GPUS, (0, 1, 1, 0))], drivers=('gpu',))
        uuid = self.provider(GPUS[0])
        two = self.host.boot(TWO, {uuid: {'resources': {CLASS: 2}}})
        self.assertHas(two, GPUS[0], GPUS[3])
        one = self.host.boot(ONE, {uuid: {'resources': {CLASS: 1}}})
        self.assertHas(one, GPUS[1])
        self.host.delete(two)
        last = self.host.boot(ONE, {uuid: {'resources': {CLASS: 1}}})
        # the other one of the node of which one is taken
        self.assertHas(last, GPUS[2])

    def test_sick_devices_are_not_chosen(self):
        self.change('host')
        uuid = self.provider(GPUS[0])
        self.host.kernel.set_fault(GPUS[0], dead=True)
        self.host.inventory.scanner.scan()
        self.host.report()
        self.assertEqual([(3, 0, 0)], self.amounts())
        server = self.host.boot(TWO, {uuid: {'resources': {CLASS: 2}}})
        self.assertHas(server, *GPUS[1:3])

    def test_begun_move(self):
        """Nova has given the allocation to a migration; we did not hear of
        it yet."""
        server = self.boot(GPUS[0])
        self.host.cloud.move_allocation(server, 'm')
        self.change('host')
        self.assertEqual([CLASS], [
            name for a in self.host.cloud.read()['allocations'].values()
            for r in a.values() for name in r['resources']])
        claim, = self.host.store.claims()
        self.assertEqual(
            {claim.provider_uuid: {'resources': {CLASS: 1}}},
            self.host.cloud.read()['allocations']['m'])
        self.host.cloud.stop_guest(server)
        self.host.accelerators.set_aside(server, 'm')
        self.host.reconcile()
        self.assertEqual([OLD], [
            c.role for c in self.host.store.claims()])

    def test_without_an_allocation(self):
        """What a server has all the same is allocated to it again."""
        server = self.boot(GPUS[0])
        self.host.cloud.allocate(server, None)
        self.change('host')
        self.host.reconcile()
        self.host.report()
        self.assertEqual([(4, 0, 1)], self.amounts())
        self.assertHas(server, GPUS[0])

    def test_of_somebody_else(self):
        """An allocation that no claim explains stays where it is."""
        server = self.boot(GPUS[0])
        self.host.cloud.allocate('stranger', self.given(GPUS[1]))
        self.change('host')
        for _ in range(3):
            self.host.report()
        self.assertEqual([(1, 1, 1), (4, 0, 1)], self.amounts())
        self.host.cloud.allocate('stranger', None)
        self.host.report()
        self.assertEqual([(4, 0, 1)], self.amounts())
        self.assertMoved()
        self.host.delete(server)

    def test_when_placement_does_not_answer(self):
        """The server keeps what it has until the next start."""
        server = self.boot(GPUS[0])
        self.host.parts.close()
        self.pools('host')
        self.host.cloud.placement_error = exception.PlacementUnavailable('No.')
        self.restart()
        self.host.cloud.placement_error = None
        for _ in range(3):
            self.host.report()
        self.assertEqual(1, self.log.output.count(
            'the allocation moves when nova-compute is started again'))
        self.assertEqual([(1, 1, 1), (3, 0, 0)], self.amounts())
        self.assertHas(server, GPUS[0])
        self.host.reconcile()
        for act in (self.host.reboot, self.host.rebuild):
            act(server)
            self.assertHas(server, GPUS[0])
        uuid = self.provider(GPUS[0])
        other = self.host.boot(ONE, {uuid: {'resources': {CLASS: 1}}})
        self.assertHas(other, GPUS[1])
        self.restart()
        self.host.report()
        self.assertEqual([(4, 0, 2)], self.amounts())
        self.assertMoved()

    def test_deleted_before_it_moved(self):
        server = self.boot(GPUS[0])
        self.pools('host')
        self.restart()
        self.pools('none')
        self.host.report()
        self.pools('host')
        self.host.delete(server)
        for _ in range(3):
            self.host.report()
        self.assertEqual([(4, 0, 0)], self.amounts())

    @ddt.data(0, 1)
    def test_operators_reservation(self, mine):
        """It stays behind, and stops no move."""
        server = self.boot(GPUS[0])
        rest = [self.boot(a) for a in GPUS[1:]]
        with self.host.cloud.state() as state:
            for address in GPUS:
                state['providers'][self.provider(address)]['inventory'][
                    CLASS]['reserved'] = 1
        self.host.report()
        if not mine:
            for other in rest:
                self.host.delete(other)
        self.change('host')
        self.host.report()
        self.assertEqual([(4, 0, 4 if mine else 1)], self.amounts())
        self.assertMoved()
        self.assertHas(server, GPUS[0])

    def test_other_node_while_a_server_has_it(self):
        """It moves at the next start, and is given to nobody meanwhile."""
        self.change('numa_node')
        uuid = self.provider(GPUS[0])
        server = self.host.boot(ONE, {uuid: {'resources': {CLASS: 1}}})
        self.assertHas(server, GPUS[0])
        self.host.kernel.set_fault(GPUS[0], attributes={'numa_node': '1'})
        self.host.inventory.scanner.scan()
        for _ in range(2):
            self.host.report()
        self.assertEqual([(1, 1, 0), (4, 0, 1)], self.amounts())
        self.host.reconcile()
        self.assertHas(server, GPUS[0])
        self.restart()
        self.host.report()
        self.assertEqual([(1, 0, 1), (3, 0, 0)], self.amounts())
        self.assertMoved()


class KilledTest(ReshapeTestCase):
    """Between any two steps of the first report."""

    def test_each_point(self):
        servers = self.boot(GPUS[0]), self.boot(GPUS[1], GPUS[2])
        compute = killed.Processes(
            self.directory, self.simulated.path, enabled_drivers=['gpu'],
            simulated_host=self.simulated.path,
            bitstream_cache=f'{self.directory}/cache',
            include_devices=conf.CONF.accel.include_devices, pools='host')
        self.addCleanup(compute.end)
        point = 0
        while True:
            self.host.end()
            try:
                compute.start(point)
            except killed.Killed:
                point += 1
            else:
                break
            self.pools('host')
            self.host.start()
            self.assertMoved()
            self.assertHas(servers[0], GPUS[0])
            self.assertHas(servers[1], *GPUS[1:3])
            self.host.report()
            self.assertEqual([(4, 0, 3)], self.amounts())
            self.assertEqual(
                3, len(self.host.store.claims()))
            # as it was before
            self.change('none')
            self.host.report()
            self.assertEqual([(1, 0, 0)] + [(1, 0, 1)] * 3, self.amounts())
        self.assertGreater(point, 3)
