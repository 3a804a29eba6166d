# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Orders of an operator to a nova-compute."""

import fixtures

from nova_accel.store import values
from tests.host import base

State = values.OrderState


class OrderTestCase(base.HostTestCase):

    def setUp(self):
        super().setUp()
        # no order is void because the machine is slow
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.store.journal.ORDER_SECONDS', 600))

    def begin(self, *words):
        """An order is given, and nova-compute has begun it."""
        verb, *words = words
        number = self.host.command().give_order(verb, ' '.join(words))
        self.host.orders.poll()
        return number

    def order(self, verb, *words):
        """What nova-compute, which runs, answers to an order: the state of
        the order, and one sentence."""
        number = self.begin(verb, *words)
        ended = (State.DONE, State.REFUSED)
        found = []

        def is_answered():
            order = self.host.command().withdraw_order(number, ended)
            found.append(order)
            return order.state in ended
        self.wait_for(is_answered)
        self.assertRegex(found[-1].answer, r'\A[^\n]*[^.]\.\Z')
        return found[-1].state, found[-1].answer

    def done(self, *order):
        state, answer = self.order(*order)
        self.assertIs(State.DONE, state, answer)
        return answer

    def refused(self, *order):
        state, answer = self.order(*order)
        self.assertIs(State.REFUSED, state, answer)
        return answer

    def record(self):
        return self.host.store.handovers()[-1]
