# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The operator disables devices while servers come and go.

His word is written as by nova-accel, beside nova-compute.
"""


import ddt

from nova_accel import exception
from nova_accel.inventory import holds
from nova_accel import naming
from nova_accel.store import values
from tests.host import base
from tests.host import killed
from tests.unit.host import A, B, FUNCTION, OTHER, plain, vf

Kind = holds.Kind
ONE, TWO = '0000:02:00.0', '0000:03:00.0'
SSD = 'CUSTOM_ACCELERATOR_SSD'


class DisableTestCase(base.HostTestCase):

    def shown(self, address, name=base.FPGA):
        """(reserved, total, whether it is marked) in Placement now."""
        uuid, = self.host.allocation(address, name)
        provider = self.host.cloud.read()['providers'][uuid]
        item = provider['inventory'][name]
        return (item['reserved'], item['total'],
                naming.FENCED in provider['traits'])


@ddt.ddt
class RegionTest(DisableTestCase):

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.host.upload(FUNCTION)
        self.specs = base.asks(FUNCTION)

    def boot(self, address=A):
        return self.host.boot(self.specs, self.host.allocation(address))

    def test_shown_while_nova_compute_runs(self):
        """Nothing asks for it: no report and no build."""
        self.assertEqual((0, 1, False), self.shown(A))
        self.host.write_disabled(A)
        self.wait_for(lambda: self.shown(A) == (1, 1, True))
        self.assertEqual((0, 1, False), self.shown(B))
        self.host.write_enabled()
        self.wait_for(lambda: self.shown(A) == (0, 1, False))
        self.host.report()
        self.assertEqual([], self.host.fenced())
        self.assertHas(self.boot(), vf(A))

    def test_given_to_no_server(self):
        self.host.disable(A)
        error = self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertIn('the operator has disabled it', str(error))
        # which is not for tenants
        self.assertNotIn('it is hot', str(error))
        self.assertEqual([], self.host.holdings.all())

    def test_said_just_before_a_build_claims(self):
        """nova-compute has not heard of it."""
        self.host.orders.close()
        self.host.write_disabled(A)
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertEqual([], self.host.holdings.all())

    @ddt.data('poll', 'choose')
    def test_said_while_a_build_claims(self, when):
        """Between the choice of a device and the claim on it."""
        self.host.orders.close()
        add = self.host.store.add

        def late(found):
            if not self.host.command().disabled():
                self.host.write_disabled(A)
            if when == 'poll':
                self.host.orders.poll()
            add(found)
        self.host.store.add = late
        error = self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertTrue(error.elsewhere)
        self.assertEqual([], self.host.holdings.all())

    def test_said_while_a_build_programs(self):
        """It goes to another host, as where the card fails meanwhile."""
        program = self.host.kernel.program_dfl_port

        def late(*args):
            self.host.disable(A)
            return program(*args)
        self.host.kernel.program_dfl_port = late
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertEqual([], self.host.holdings.all())
        self.host.report()
        self.assertEqual((1, 1, True), self.shown(A))

    def test_a_server_keeps_it(self):
        server = self.boot()
        self.host.disable(A)
        self.assertEqual((1, 1, True), self.shown(A))
        for restart in (lambda: self.host.reboot(server),
                        lambda: self.host.rebuild(server)):
            restart()
            self.assertHas(server, vf(A))
        self.host.cloud.lose_power()
        self.simulated.kernel.power_cycle()
        self.restart()
        self.host.start_guest(server)
        self.assertHas(server, vf(A))
        self.host.reconciler.run()
        self.assertHas(server, vf(A))

    def test_a_server_keeps_what_its_image_wants(self):
        wish, other = ({'accel:bitstream_id': self.host.upload(OTHER)}
                       for _ in range(2))
        server = self.host.boot(
            base.asks(FUNCTION, runtime_programming='true'),
            self.host.allocation(A), wish)
        self.host.disable(A)

        def doubted():
            self.host.holdings.doubt(self.host.holdings.of(server), 'killed')
            self.host.reboot(server)

        def power_cut():
            self.host.holdings.doubt(self.host.holdings.of(server), 'killed')
            self.host.power_cut()
            self.restart()
            self.host.start_guest(server)
        for restart in (lambda: self.host.rebuild(server, wish), doubted,
                        power_cut, lambda: self.host.rebuild(server, other)):
            restart()
            self.assertHas(server, vf(A))
            self.assertEqual(plain(OTHER), self.host.carries(A))
        claim, = self.host.holdings.of(server)
        self.assertEqual(other['accel:bitstream_id'], claim.restore_bitstream)
        self.assertEqual((1, 1, True), self.shown(A))

    def test_nothing_is_programmed_at_run_time(self):
        server = self.host.boot(
            base.asks(FUNCTION, runtime_programming='true'),
            self.host.allocation(A))
        self.host.disable(A)
        self.host.ask(server, self.host.upload(OTHER))
        self.host.run_runtime()
        self.assertEqual(plain(FUNCTION), self.host.carries(A))
        self.assertHas(server, vf(A))
        self.assertIn('it is withheld (the operator has disabled it)',
                      self.log.output)

    def test_its_server_is_deleted(self):
        """It is cleaned, and not offered."""
        server = self.boot()
        self.host.disable(A)
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
        self.assertIn((values.MEMORY_KEPT, vf(A)), [
            (h.result, h.handle)
            for h in self.host.store.handovers()])
        for _ in range(2):
            self.host.report()
            self.assertEqual((1, 1, True), self.shown(A))
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.host.enable()
        self.assertHas(self.boot(), vf(A))

    def test_nova_compute_does_not_run(self):
        self.host.parts.close()
        self.host.write_disabled(A)
        self.restart()
        self.assertEqual((1, 1, True), self.shown(A))
        self.host.parts.close()
        self.host.write_enabled()
        self.restart()
        self.host.report()
        self.assertEqual((0, 1, False), self.shown(A))
        self.assertHas(self.boot(), vf(A))

    def test_what_the_operator_reserves_himself(self):
        """In Placement; it is his also while he says more."""
        uuid, = self.host.allocation(A)
        with self.host.cloud.state() as state:
            state['providers'][uuid]['inventory'][base.FPGA]['reserved'] = 1
        self.host.report()
        self.host.disable(A)
        self.host.report()
        self.assertEqual((1, 1, True), self.shown(A))
        self.host.enable()
        for _ in range(3):
            self.host.report()
            self.assertEqual((1, 1, False), self.shown(A))

    def test_placement_does_not_answer(self):
        """The next report shows it."""
        show = self.host.cloud.show

        def fails(*args):
            raise exception.PlacementUnavailable('Placement answered 503.')
        self.host.cloud.show = fails
        self.host.disable(A)
        self.assertEqual((0, 1, False), self.shown(A))
        self.host.cloud.show = show
        self.host.report()
        self.assertEqual((1, 1, True), self.shown(A))

    def test_other_reasons_stay(self):
        self.simulated.kernel.set_fault(A, dead=True)
        self.host.inventory.scanner.scan()
        self.host.disable(A)
        self.assertEqual({Kind.UNUSABLE, Kind.DISABLED},
                         self.host.inventory.table.kinds(A))
        self.host.enable()
        self.assertEqual({Kind.UNUSABLE}, self.host.inventory.table.kinds(A))


class KilledTest(DisableTestCase):

    def test_killed_before_it_is_shown(self):
        """nova-compute has read the word, and ends before Placement has it."""
        self.start_host({'address': A})
        self.host.end()
        compute = killed.Processes(
            self.directory, self.simulated.path, enabled_drivers=['dfl'],
            simulated_host=self.simulated.path,
            bitstream_cache=f'{self.directory}/cache',
            virtual_functions=[f'{A}=1'])
        self.addCleanup(compute.end)
        for point in range(100):
            try:
                compute.run([['disable', A]], kill_at=point)
                break
            except killed.Killed as where:
                said = bool(self.host.command().disabled())
                # the next process shows it in its first report
                compute.run([])
                self.assertEqual((1, 1, True) if said else (0, 1, False),
                                 self.shown(A), str(where))
                compute.run([['enable'], ['report'], ['report']])
                self.assertEqual((0, 1, False), self.shown(A), str(where))
        # before and after the word, and after each write of what is shown
        self.assertGreater(point, 2)
        self.assertEqual((1, 1, True), self.shown(A))


class PoolTest(DisableTestCase):
    """Of devices that share a provider, one is disabled."""

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': a} for a in (ONE, TWO)],
                        drivers=('nvme',))

    def boot(self):
        return self.host.boot({f'resources1:{SSD}': '1'},
                              self.host.allocation(resource_class=SSD))

    def test_one_of_two(self):
        self.host.disable(ONE)
        self.assertEqual((0, 1, False), self.shown(ONE, SSD))
        self.assertHas(self.boot(), TWO)
        self.assertRaises(exception.DeviceUnavailable, self.boot)

    def test_another_one_is_chosen_at_once(self):
        """A build that nova-compute has begun before it heard of the word."""
        self.host.orders.close()
        self.host.write_disabled(ONE)
        self.assertHas(self.boot(), TWO)

    def test_a_server_has_it(self):
        server, other = self.boot(), self.boot()
        mine, = self.host.devices_of(server)
        self.host.disable(mine)
        # what is allocated counts
        self.assertEqual((0, 2, False), self.shown(ONE, SSD))
        self.host.delete(server)
        self.host.report()
        self.assertEqual((0, 1, False), self.shown(ONE, SSD))
        self.assertEqual('', self.simulated.kernel.data_of_disk(mine))
        self.host.delete(other)
        self.assertHas(self.boot(), {ONE: TWO, TWO: ONE}[mine])


class RenumberedTest(DisableTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': a} for a in (ONE, TWO)],
                        drivers=('nvme',))

    def exchange(self):
        self.host.parts.close()
        self.host.cloud.lose_power()
        self.simulated.kernel.exchange_cards(ONE, TWO)
        self.simulated.kernel.reboot()
        self.restart()
        self.host.report()

    def test_the_word_follows_the_device(self):
        self.host.disable(ONE)
        self.exchange()
        self.assertEqual((1, 1, True), self.shown(TWO, SSD))
        self.assertEqual((0, 1, False), self.shown(ONE, SSD))
        self.exchange()
        self.assertEqual((1, 1, True), self.shown(ONE, SSD))
        self.assertEqual((0, 1, False), self.shown(TWO, SSD))

    def test_it_is_taken_out_and_comes_back(self):
        self.host.disable(ONE)
        self.simulated.kernel.set_fault(ONE, vanish=True)
        self.restart()
        for _ in range(3):
            self.host.report()
        self.assertNotIn(ONE, self.host.inventory.devices)
        self.simulated.kernel.set_fault(ONE, vanish=None)
        self.restart()
        self.assertEqual((1, 1, True), self.shown(ONE, SSD))
