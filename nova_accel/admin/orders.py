# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Carry out the commands of nova-accel that concern a running nova-compute.

``nova-accel disable`` and ``enable`` write the disabled devices into the claim
store. A thread polls the store each second, logs the change and shows it in
Placement. If that fails, the next periodic report shows it.

Other commands request a single action. Two processes must not use one card, or
decide about one claim, at once. Hence such a command writes an *order* into the
store and waits. nova-compute carries it out in a thread of its own and writes
the response. For example, ``nova-accel clean 0000:3b:00.0`` writes an order
that is NEW; within a second it is BEGUN, and when the card is clean it is DONE.
An order that is not begun within journal.ORDER_SECONDS expires, because its
command no longer waits. An order that was BEGUN when nova-compute ended is
answered at the next start.
"""

from collections.abc import Callable, Mapping
import threading

from nova_accel.attach import publishing
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel.inventory import holds
from nova_accel import locks
from nova_accel import log as logging
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text

LOG = logging.getLogger(__name__)

_State = values.OrderState
#: seconds between two reads of the store, each of some microseconds
INTERVAL = 1


class Orders:

    def __init__(self, store: claim_store.ClaimStore,
                 inventory: host_inventory.Inventory,
                 publisher: publishing.Publisher,
                 handlers: Mapping[str, Callable[[str], str]]):
        """:param handlers: verb of an order -> function that takes the order's
            argument and returns the response. If the function raises an error,
            the order is refused, and the error is the response."""
        self._store = store
        self._inventory = inventory
        self._publisher = publisher
        self._closed = threading.Event()
        #: address -> row, in the last log line
        self._shown: dict[str, tuple[values.Disabled, ...]] = {}
        #: held during poll()
        self._lock = locks.Lock('orders')
        self._handlers = handlers

    def start(self) -> None:
        """Start to poll the store in the background.

        Answers orders that an earlier nova-compute left unfinished.
        """
        self._log_changes(self._inventory.table.disabled())
        for order in self._store.orders():
            if order.state is _State.BEGUN:
                self._store.answer_order(order.number, _State.REFUSED, (
                    'nova-compute ended while it was carrying this out: see '
                    'nova-accel claims, and give the command again.'))
            elif order.state is not _State.NEW:
                self._store.withdraw_order(order.number, [order.state])
        limited.start(self._listen)

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()

    def _listen(self):
        background = limited.Background(
            self.poll, 'Commands of nova-accel cannot be received')
        while not self._closed.wait(INTERVAL):
            background.run()

    def poll(self) -> None:
        """Show the disabled devices in Placement, and begin new orders.

        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        with self._lock:
            self._store.refresh()
            changed = self._log_changes(self._inventory.table.disabled())
            if changed:
                self._publisher.show([
                    uuid for uuid, provider
                    in self._inventory.shown.providers().items()
                    if changed & {*provider.addresses}])
            for order in self._store.orders():
                if order.state is _State.NEW and self._store.begin_order(
                        order.number):
                    limited.start(self._carry_out, order)
            self._store.begin_planned()

    def _carry_out(self, order):
        try:
            self._store.answer_order(order.number, *self._carried_out(order))
        except exception.AcceleratorsUnavailable as error:
            LOG.error('The answer to an order of nova-accel cannot be stored: '
                      '%s', error)

    def _carried_out(self, order):
        LOG.info('The operator orders: %s %s', order.verb,
                 text.printable(order.argument))
        try:
            if order.verb not in self._handlers:
                raise exception.InvalidRequest(
                    f'This nova-compute does not know {order.verb}: give the '
                    f'command of its release.')
            state, answer = _State.DONE, self._handlers[order.verb](
                order.argument)
        except Exception as error:
            if not isinstance(error, exception.AcceleratorError):
                LOG.exception('An order of nova-accel failed')
            state, answer = _State.REFUSED, str(error) or repr(error)
        LOG.info('%s %s: %s', order.verb, text.printable(order.argument),
                 answer)
        return state, answer

    def _log_changes(self, now: dict[str, tuple[values.Disabled, ...]],
                     ) -> set[str]:
        """Log which devices have been disabled or enabled.

        :returns: the addresses of these devices.
        """
        before, self._shown = self._shown, now
        for address in sorted(now):
            for row in now[address]:
                if row not in before.get(address, ()):
                    LOG.info('Device %s is %s since %s (%s); no other server '
                             'gets it', address,
                             holds.of_disabled(row).value, row.since,
                             text.printable(row.reason, 200))
        for address in sorted(before.keys() - now.keys()):
            LOG.info('Device %s is enabled again', address)
        return before.keys() ^ now.keys()
