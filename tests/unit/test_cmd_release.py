# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel release, as an operator starts it."""

import threading
import time

import fixtures

from nova_accel.cmd import orders
from nova_accel.store import values
from tests.unit import commands
from tests.unit.claims import claim, HANDLE

State = values.OrderState


class ReleaseTest(commands.StoreCommandTestCase):

    COMMAND = 'release'
    COMMANDS = {'release': orders.Release}

    def setUp(self):
        super().setUp()
        self.open_store().add([claim('s1')])

    def nova_compute(self, state=None, answer=''):
        """It takes an order on; with a state, it answers."""
        def carry_out():
            ends = time.monotonic() + 60
            while time.monotonic() < ends and not self.store.orders():
                self.store.refresh()
                time.sleep(0.01)
            for order in self.store.orders():
                self.orders = [(order.verb, order.argument)]
                self.store.begin_order(order.number)
                if state:
                    self.store.answer_order(order.number, state, answer)
        thread = threading.Thread(target=carry_out)
        thread.start()
        self.addCleanup(thread.join)

    def left(self):
        self.store.refresh()
        return self.store.orders()

    def test_released(self):
        self.nova_compute(State.DONE, 'Nothing has it.\nIt is free.')
        result = self.call(HANDLE.address)
        self.assertEqual((0, 'Nothing has it.\nIt is free.\n'),
                         (result.returncode, result.stdout), result.stderr)
        self.assertEqual([('release', HANDLE.address)], self.orders)
        self.assertEqual((), self.left())

    def test_refused(self):
        self.nova_compute(State.REFUSED, 'Placement has it allocated.')
        result = self.call(HANDLE.address)
        self.assertEqual((1, '', 'Placement has it allocated.\n'), (
            result.returncode, result.stdout, result.stderr))
        self.assertEqual((), self.left())

    def test_nova_compute_does_not_run(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.orders._TAKEN_ON', 0.3))
        result = self.call(HANDLE.address)
        self.assertEqual(1, result.returncode)
        self.assertIn('did not begin the order', result.stderr)
        # nor is it found at the next start
        self.assertEqual((), self.left())

    def test_takes_long(self):
        self.nova_compute()
        result = self.call(HANDLE.address, '--timeout', '1')
        self.assertEqual(1, result.returncode)
        self.assertIn('has not finished within 1 s, and continues',
                      result.stderr)
        self.assertEqual([State.BEGUN], [o.state for o in self.left()])

    def test_no_such_claim(self):
        result = self.call('0000:99:00.0')
        self.assertEqual(1, result.returncode)
        self.assertIn("'0000:99:00.0'", result.stderr)
        self.assertEqual((), self.left())
