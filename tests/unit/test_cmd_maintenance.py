# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel clean, program and drill, as an operator starts them."""

import dataclasses
import threading
import time
from unittest import mock

import fixtures

from nova_accel.cmd import orders
from nova_accel.cmd import output
from nova_accel.store import values
from tests.unit import commands
from tests.unit.claims import DEVICE, handle

State = values.OrderState
A, VF = DEVICE.address, f'{DEVICE.address[:-1]}1'


class MaintenanceTest(commands.StoreCommandTestCase):

    COMMANDS = {'clean': orders.Clean, 'program': orders.Program,
                'drill': orders.Drill}

    def setUp(self):
        super().setUp()
        # no order is void because the machine is slow
        for name in ('store.journal.ORDER_SECONDS', 'cmd.orders._TAKEN_ON'):
            self.useFixture(fixtures.MonkeyPatch(f'nova_accel.{name}', 600))
        self.open_store().set_devices({A: dataclasses.replace(
            DEVICE, regions=(dataclasses.replace(
                DEVICE.regions[0], handles=(dataclasses.replace(
                    handle(0), address=VF),)),))})

    def answered(self, *arguments, state=State.DONE, answer='It is done.'):
        """(what nova-compute was ordered, the result of the command)."""
        taken, ends = [], threading.Event()

        def carry_out():
            while not (taken or ends.is_set()):
                self.store.refresh()
                for order in self.store.orders():
                    taken.append((order.verb, order.argument))
                    self.store.begin_order(order.number)
                    self.store.answer_order(order.number, state, answer)
                time.sleep(0.01)
        thread = threading.Thread(target=carry_out)
        thread.start()
        try:
            self.COMMAND, *arguments = arguments
            return taken, self.call(*arguments)
        finally:
            ends.set()
            thread.join()

    def test_entry_points(self):
        with open('setup.cfg') as file:
            text = file.read()
        for name in ('clean', 'program', 'drill'):
            self.assertRegex(text, f'\n    {name} = nova_accel.cmd.'
                                   f'orders:{name.title()}\n')

    def test_clean(self):
        for name, argument in (
                (A, A), (f'compute1_accel_{A}', A),
                (f'{A[5:]}_region0', f'{A}_region0'),
                (f'{A}_region0', f'{A}_region0'),
                (f'compute1_accel_{A}_region0', f'{A}_region0')):
            taken, result = self.answered('clean', name)
            self.assertEqual([('clean', argument)], taken)
            self.assertEqual((0, 'It is done.\n', ''), (
                result.returncode, result.stdout, result.stderr))

    def test_waiting(self):
        """A terminal shows what is waited for, and for how long."""
        terminal = commands.Terminal()
        with output.waiting(terminal, 'waiting for nova-compute', 600):
            for _ in range(1000):
                if terminal.getvalue():
                    break
                time.sleep(0.01)
        self.assertRegex(
            terminal.getvalue(), r'\A\r0 s of at most 600 s: waiting for '
            r'nova-compute\033\[K(\r[1-9]\d* s .*)?\r\033\[K\Z')

    def test_waiting_without_a_terminal(self):
        """A standard error that is closed, or a terminal that is gone, does
        not end what a command does."""
        terminal = commands.Terminal()
        with output.waiting(None, 'it'), output.waiting(terminal, 'it'):
            terminal.write = mock.Mock(side_effect=OSError)
        terminal.close()
        with output.waiting(terminal, 'it'):
            pass

    def test_program(self):
        for wanted in ('crypto', 'two words'):
            taken, result = self.answered('program', A, wanted)
            self.assertEqual([('program', f'{A} {wanted}')], taken)
            self.assertEqual((0, 'It is done.\n'), (
                result.returncode, result.stdout), result.stderr)

    def test_drill(self):
        for more, argument in ((), f'{A} 120'), (('--stay', '90'), f'{A} 90'):
            taken, result = self.answered('drill', A, *more)
            self.assertEqual([('drill', argument)], taken)
            self.assertEqual((0, 'It is done.\n'), (
                result.returncode, result.stdout), result.stderr)

    def test_drill_of_nonsense(self):
        self.COMMAND = 'drill'
        for stay in 'long', '-1', '3601', '1.5':
            self.assertRaises(SystemExit, self.call, A, f'--stay={stay}')
        self.store.refresh()
        self.assertEqual((), self.store.orders())

    def test_refused(self):
        _, result = self.answered('program', A, 'crypto',
                                  state=State.REFUSED, answer='It is not.')
        self.assertEqual((1, '', 'It is not.\n'), (
            result.returncode, result.stdout, result.stderr))

    def test_no_such_device(self):
        """nova-compute is not asked."""
        for self.COMMAND, *wanted in ('clean',), ('program', 'crypto'):
            for name, text in (
                    ('0000:99:00.0', f'name one of {A}.'),
                    (f'{A}_region7', f'name one of {A}.'),
                    (VF, f'name {A}.')):
                result = self.call(name, *wanted)
                self.assertEqual((1, ''), (result.returncode, result.stdout))
                self.assertIn(text, result.stderr)
        self.store.refresh()
        self.assertEqual((), self.store.orders())

    def test_nova_compute_does_not_run(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.orders._TAKEN_ON', 0.3))
        self.COMMAND = 'clean'
        result = self.call(A)
        self.assertEqual(1, result.returncode)
        self.assertIn('did not begin the order', result.stderr)
        self.assertIn('see that nova-compute runs', result.stderr)
        self.store.refresh()
        self.assertEqual((), self.store.orders())

    def test_order_that_is_not_taken_on_in_time(self):
        """It does not go on, whatever the time that was given."""
        for self.COMMAND, *wanted in ('clean',), ('program', 'crypto'):
            result = self.call(A, *wanted, '--timeout', '1')
            self.assertEqual(1, result.returncode)
            self.assertIn('did not begin the order within 1 s, and it is '
                          'withdrawn', result.stderr)
            self.assertNotIn('continues', result.stderr)
        self.store.refresh()
        self.assertEqual((), self.store.orders())
