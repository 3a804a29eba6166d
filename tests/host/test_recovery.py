# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A device that has failed is brought back, step by step, and then on
probation."""

import threading
from unittest import mock

import ddt

from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel import naming
from tests.host import base
from tests.host import health
from tests.host.health import HALF, ONE, OF_LINK, TWO, WORN
from tests.unit.host import A

DISK = '0000:02:00.0'


@ddt.ddt
class LadderTest(health.HealthTestCase):
    """The driver pci: the resets of its hand-over."""

    POOLS = 'none'
    ALSO = {'reset_method': 'flr bus'}

    def setUp(self):
        super().setUp()
        self.start(ONE, TWO)

    def fails(self, address=ONE, **fault):
        self.host.kernel.set_fault(address, **fault)
        self.look()
        self.look()

    def recover(self):
        """What a comparison begins with."""
        self.host.inventory.recover()
        self.look()
        return self.host.inventory.recovery.steps.get(ONE)

    @ddt.data('function reset', 'card reset')
    def test_does_not_answer(self, step):
        self.fails(dead=True, ends_by=step)
        self.assertEqual('quarantined', self.states()[ONE])
        self.assertEqual(step, self.recover())
        resets = len(self.host.kernel.resets(ONE))
        self.assertEqual(1 if step == 'function reset' else 2, resets)
        self.assertEqual('flr bus', self.host.kernel.read(
            f'bus/pci/devices/{ONE}/reset_method'))
        # on probation: given last, and free
        self.assertEqual({ONE: 'suspect', TWO: 'ok'}, self.states())
        traits, amounts = self.shown()
        self.assertIn(naming.SUSPECT, traits)
        self.assertEqual((0, 1), amounts)
        # a server had it, however short, and it is as any other
        server = self.boot()
        self.host.delete(server)
        self.look()
        self.assertEqual({ONE: 'ok', TWO: 'ok'}, self.states())
        # and what fails now is recovered again
        self.recover()
        self.fails(dead=True, ends_by=step)
        self.recover()
        self.assertEqual('suspect', self.states()[ONE])

    def test_signal(self):
        """A level that a reset ends."""
        self.fails(attributes=HALF, ends_by='card reset')
        self.assertEqual('card reset', self.recover())
        self.assertEqual('suspect', self.states()[ONE])
        self.assertIn('had failed (its PCIe link has 4 lanes of 16), and has '
                      'recovered by: card reset', self.log.output)

    def test_reset_causes_errors(self):
        """They do not fence what it has brought back."""
        self.fails(attributes=HALF, ends_by='card reset')
        self.host.kernel.set_fault(ONE, port=OF_LINK)
        self.assertEqual('card reset', self.recover())
        self.assertEqual('suspect', self.states()[ONE])
        self.assertEqual((), self.host.store.disabled())

    def test_step_takes_long(self):
        """What its resets cause, and that it was recovered, is not lost."""
        self.config.config(group='accel', programming_timeout=1)
        goes_on = threading.Event()
        self.addCleanup(goes_on.set)
        release = self.driver.release

        def slow(*args):
            goes_on.wait(base.PATIENCE)
            self.host.kernel.set_fault(ONE, port=OF_LINK)
            return release(*args)
        self.fails(dead=True, ends_by='function reset')
        with mock.patch.object(self.driver, 'release', slow):
            self.host.inventory.recover()
            self.look()
            self.assertEqual('quarantined', self.states()[ONE])
            goes_on.set()
            self.wait_for(
                lambda: not self.host.inventory.cards.is_busy(ONE))
        self.look()
        self.look()
        self.assertEqual('suspect', self.states()[ONE])
        self.assertEqual((), self.host.store.disabled())

    def test_kernel_tells_of_resets(self):
        """A look meanwhile does not hold it against the device."""
        release = self.driver.release

        def told(*args):
            self.host.inventory.health.note(host_kernel.Change(
                'pci', ONE, 'WEDGED=bus-reset'), self.host.kernel)
            self.look()
            return release(*args)
        self.fails(dead=True, ends_by='function reset')
        with mock.patch.object(self.driver, 'release', told):
            self.recover()
        self.assertEqual('suspect', self.states()[ONE])
        self.assertEqual((), self.host.store.disabled())

    @ddt.data(False, True)
    def test_something_else_stays(self, helps):
        """What nova-compute or the operator has brought back is brought back
        again, although its slot is narrow for ever."""
        self.fails(dead=True, ends_by='function reset' if helps else None)
        self.recover()
        self.host.kernel.set_fault(ONE, dead=None)
        self.turn(**WORN)
        self.host.delete(self.boot())
        self.look()
        self.recover()
        resets = len(self.host.kernel.resets(ONE))
        self.fails(dead=True, ends_by='function reset')
        self.assertEqual('function reset', self.recover())
        self.assertEqual(resets + 1, len(self.host.kernel.resets(ONE)))

    def test_fails_again_before_the_next_comparison(self):
        for _ in range(3):
            self.fails(dead=True, ends_by='function reset')
            self.assertEqual('function reset', self.recover())
            self.host.delete(self.boot())

    def test_nothing_helps(self):
        """Once, and the operator is told what is left."""
        self.fails(dead=True)
        self.assertEqual('', self.recover())
        self.assertEqual('quarantined', self.states()[ONE])
        resets = self.host.kernel.resets(ONE)
        self.assertEqual(2, len(resets))
        self.recover()
        self.recover()
        self.assertEqual(resets, self.host.kernel.resets(ONE))
        self.assertEqual(1, self.log.output.count(
            'boot the host, or exchange the card'))

    @ddt.data(False, True)
    def test_fails_on_probation(self, restarts):
        """Also after a restart it is on probation, and stays as it is."""
        self.fails(dead=True, ends_by='function reset')
        self.recover()
        if restarts:
            self.restart()
            self.look()
            self.assertEqual({ONE: 'suspect', TWO: 'ok'}, self.states())
        self.fails(dead=True, ends_by='function reset')
        self.recover()
        self.assertEqual('quarantined', self.states()[ONE])
        self.assertEqual(1, len(self.host.kernel.resets(ONE)))

    def test_probation_ends_after_a_restart(self):
        self.fails(dead=True, ends_by='function reset')
        self.recover()
        server = self.boot()
        self.restart()
        self.look()
        self.assertEqual('suspect', self.states()[ONE])
        self.host.delete(server)
        self.look()
        self.assertEqual('ok', self.states()[ONE])
        self.restart()
        self.look()
        self.assertEqual('ok', self.states()[ONE])

    def test_while_it_is_looked_at(self):
        """A look begins at the same time, and recovery is after it."""
        self.fails(dead=True, ends_by='function reset')
        goes_on, begun = threading.Event(), threading.Event()
        self.addCleanup(goes_on.set)

        def look():
            begun.set()
            goes_on.wait(base.PATIENCE)
        cards = self.host.inventory.cards
        looking = threading.Thread(target=cards.call, args=(
            ONE, 'Looking', look), kwargs={'seconds': base.PATIENCE})
        looking.start()
        begun.wait(base.PATIENCE)
        threading.Timer(0.2, goes_on.set).start()
        self.assertEqual('function reset', self.recover())
        looking.join()

    def test_server_has_it(self):
        server = self.boot()
        self.fails(dead=True, ends_by='function reset')
        self.assertIsNone(self.recover())
        self.assertEqual([], self.host.kernel.resets(ONE))
        self.assertHas(server, ONE)

    def test_guest_has_it_without_a_claim(self):
        with self.host.cloud.state() as state:
            state['guests']['strange'] = {
                'running': True, 'devices': {ONE: True}}
        self.host.reconciler.run()
        self.fails(dead=True, ends_by='function reset')
        self.assertIsNone(self.recover())
        self.assertEqual([], self.host.kernel.resets(ONE))

    def test_guest_has_it_and_no_comparison_has_been(self):
        with self.host.cloud.state() as state:
            state['guests']['strange'] = {
                'running': True, 'devices': {ONE: True}}
        self.host.kernel.guest_takes(ONE)
        self.fails(attributes=HALF, ends_by='function reset')
        resets = self.host.kernel.resets(ONE)
        self.host.reconciler.run()
        self.assertEqual(resets, self.host.kernel.resets(ONE))
        with self.host.cloud.state() as state:
            del state['guests']['strange']
        self.host.kernel.guest_returns(ONE)
        self.host.reconciler.run()
        self.look()
        self.assertEqual('function reset', self.recover())

    def test_process_takes_it_after_a_step(self):
        """It is asked before each of them."""
        self.fails(dead=True, ends_by='card reset')
        kernel = self.host.kernel
        reset = kernel.reset_function

        def takes(function):
            reset(function)
            kernel.guest_takes(ONE)
        with mock.patch.object(kernel, 'reset_function', takes):
            self.assertIsNone(self.recover())
        self.assertEqual(1, len(kernel.resets(ONE)))
        kernel.guest_returns(ONE)
        self.assertEqual('card reset', self.recover())

    def test_operator_has_disabled_it(self):
        """He may be at work on it, as with new firmware."""
        self.host.disable(ONE)
        self.fails(dead=True, ends_by='function reset')
        self.assertIsNone(self.recover())
        self.assertEqual([], self.host.kernel.resets(ONE))
        self.host.enable()
        self.assertEqual('function reset', self.recover())

    def test_operator_cleans_it(self):
        """By the policy nova_accel does not reset it."""
        self.config.config(group='accel', handover=[f'{ONE}=none'])
        self.fails(dead=True, ends_by='function reset')
        self.assertEqual('', self.recover())
        self.assertEqual([], self.host.kernel.resets(ONE))

    def test_half_of_them(self):
        """It may be the host: nothing is reset."""
        for address in ONE, TWO:
            self.host.kernel.set_fault(address, attributes=HALF)
        self.look(**{ONE: HALF, TWO: HALF})
        self.assertIsNone(self.recover())
        self.assertEqual('suspect', self.states()[ONE])

    def test_what_the_operator_acknowledges(self):
        """No reset undoes what the link had."""
        self.turn(**OF_LINK)
        self.assertIsNone(self.recover())
        self.assertEqual('quarantined', self.states()[ONE])


class ObservedTest(health.HealthTestCase):

    MODE = 'observe'
    POOLS = 'none'

    def test_nothing_is_reset(self):
        self.start(ONE, TWO)
        self.host.kernel.set_fault(ONE, dead=True, ends_by='function reset')
        self.look()
        self.look()
        self.host.inventory.recover()
        self.assertEqual([], self.host.kernel.resets(ONE))


@ddt.ddt
class DiskTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.config.config(group='accel', health=['act'],
                           discovery_interval=3600)
        self.start_host(nvmes=[{'address': DISK}], drivers=('nvme',))
        self.kernel = self.host.kernel
        self.kernel.write_disk(DISK, 'what is on it')
        self.look()

    def look(self):
        self.host.inventory.looks.run()

    def fails(self, step):
        self.kernel.set_fault(DISK, controller='dead', ends_by=step)
        self.look()
        self.look()

    def state(self):
        return self.host.inventory.health.conditions()[DISK].state.value

    @ddt.data('controller reset', 'driver rebind')
    def test_controller(self, step):
        """Nothing is erased."""
        self.fails(step)
        self.assertEqual('quarantined', self.state())
        self.host.inventory.recover()
        self.look()
        self.assertEqual(step, self.host.inventory.recovery.steps.get(DISK))
        self.assertEqual('suspect', self.state())
        self.assertEqual('what is on it', self.kernel.data_of_disk(DISK))

    def test_process_of_the_host(self):
        """It has the disk's node open, which binding would take away."""
        self.fails('driver rebind')
        self.kernel.set_fault(DISK, in_use=True)
        self.host.inventory.recover()
        self.assertNotIn(DISK, self.host.inventory.recovery.steps)
        self.kernel.set_fault(DISK, in_use=None)
        self.host.inventory.recover()
        self.assertEqual('driver rebind',
                         self.host.inventory.recovery.steps[DISK])

    @ddt.data('act', 'observe')
    def test_between_two_servers(self, mode):
        """Its log page can be read before the next server gets it, and not
        while a guest has it."""
        self.config.config(group='accel', health=[mode])
        specs = {'resources1:CUSTOM_ACCELERATOR_SSD': '1'}
        allocation = self.host.allocation(DISK, 'CUSTOM_ACCELERATOR_SSD')
        server = self.host.boot(specs, allocation)
        self.kernel.set_fault(DISK, health={'warning': 4})
        self.look()
        self.assertEqual('unknown', self.state())
        self.host.delete(server)
        self.host.report()
        if mode == 'observe':
            self.host.boot(specs, allocation)
            return
        self.assertRaises(exception.DeviceUnavailable, self.host.boot, specs,
                          allocation)
        self.look()
        self.assertEqual('quarantined', self.state())
        self.kernel.set_fault(DISK, health=None)
        self.look()
        self.assertEqual('ok', self.state())

    def test_between_two_servers_while_it_is_looked_at(self):
        """It was read before the server was gone."""
        specs = {'resources1:CUSTOM_ACCELERATOR_SSD': '1'}
        allocation = self.host.allocation(DISK, 'CUSTOM_ACCELERATOR_SSD')
        server = self.host.boot(specs, allocation)
        self.kernel.set_fault(DISK, health={'warning': 4})
        health = self.host.inventory.health
        judge = health.round

        def late(readings):
            self.host.delete(server)
            judge(readings)
        with mock.patch.object(health, 'round', late):
            self.look()
        self.host.report()
        self.assertRaises(exception.DeviceUnavailable, self.host.boot, specs,
                          allocation)

    def test_disk_of_the_host(self):
        """One that no rule names any more is left alone."""
        self.config.config(group='accel', include_devices=[])
        self.kernel.set_fault(DISK, dead=True)
        self.look()
        self.look()
        self.host.inventory.recover()
        self.look()
        self.assertEqual('', self.host.inventory.recovery.steps.get(DISK))
        self.assertEqual([], self.kernel.resets(DISK))
        self.assertIn('has no step that helps', self.log.output)


@ddt.ddt
class FpgaTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.config.config(group='accel', health=['act'],
                           discovery_interval=3600)
        self.start_host({'address': A})
        self.host.inventory.looks.run()

    def fails(self):
        self.host.kernel.set_fault(
            A, attributes={'catfatal_errors': '0x4'}, ends_by='driver rebind')
        self.host.inventory.looks.run()

    def recover(self):
        self.host.inventory.recover()
        self.host.inventory.looks.run()
        return self.host.inventory.recovery.steps.get(A)

    @ddt.data('VFIO', 'node')
    def test_process_of_the_host(self, kind):
        """It has the VF, which binding would take from it."""
        kernel, vf = self.host.kernel, f'{A[:-1]}1'
        if kind == 'VFIO':
            kernel.guest_takes(vf)
        else:
            kernel.set_fault(A, in_use=True)
        self.fails()
        self.assertIsNone(self.recover())
        if kind == 'VFIO':
            kernel.guest_returns(vf)
        else:
            kernel.set_fault(A, in_use=None)
        self.assertEqual('driver rebind', self.recover())

    def test_fme(self):
        """The driver is bound again, with the VFs."""
        self.fails()
        self.assertEqual('driver rebind', self.recover())
        self.assertHas(self.host.boot(
            base.asks(), self.host.allocation(A)), f'{A[:-1]}1')
