# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Send orders of commands to nova-compute.

Only nova-compute changes claims and devices. Hence it carries out the orders
(admin/orders.py), and the commands are refused if it does not run.
"""

import time
import typing

from nova_accel.cmd import output
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.store import claim_store
from nova_accel.store import journal
from nova_accel.store import values

_State = values.OrderState
#: verbs of orders whose argument begins with a device
_OF_DEVICES = 'clean', 'program', signals.DRILL
#: seconds between two reads of the response
_PAUSE = 0.2
_ENDED = _State.DONE, _State.REFUSED
#: default seconds to wait for the response
_PATIENCE = 600
#: seconds after which nova-compute no longer begins an order
_TAKEN_ON = journal.ORDER_SECONDS + 1


def add_arguments(parser) -> None:
    """Give a command the argument --timeout."""
    parser.add_argument(
        '--timeout', metavar='SECONDS', type=int, default=_PATIENCE,
        help=f'how long to wait for the response (default: {_PATIENCE}); '
             f'nova-compute continues its work after this time')


def check_idle(known: claim_store.ClaimStore, address: str) -> None:
    """Check that nova-compute is not carrying out an order about a device.

    :raises InvalidRequest: it is.
    """
    for order in known.orders():
        name, _, _ = order.argument.partition(' ')
        # an order about a region contains the region's name
        if order.state is _State.BEGUN and order.verb in _OF_DEVICES and (
                name.partition('_')[0] == address):
            raise exception.InvalidRequest(
                f'{address} is not enabled, because nova-compute carries out '
                f'nova-accel {order.verb} {name}: wait for its end, or start '
                f'nova-compute if it does not run.')


def carry_out(known: claim_store.ClaimStore, verb: str, argument: str,
              seconds: int, stderr: typing.TextIO) -> str:
    """Send an order to nova-compute, and return the response.

    :param seconds: time limit for the response.
    :param stderr: stream that shows the wait, if it is a terminal.
    :raises DeviceUnavailable: nova-compute refuses, or does not respond.
    """
    with output.waiting(
            stderr, f'waiting for nova-compute: {verb} {argument}', seconds):
        order = _answered(known, verb, argument, seconds)
    if order is None or order.state is _State.NEW:
        raise exception.DeviceUnavailable(
            f'nova-compute of this host did not begin the order within '
            f'{min(seconds, _TAKEN_ON)} s, and it is withdrawn: see that '
            f'nova-compute runs, and is of the release of this command.')
    if order.state is _State.REFUSED:
        raise exception.DeviceUnavailable(order.answer)
    if order.state not in _ENDED:
        raise exception.DeviceUnavailable(
            f'nova-compute has not finished within {seconds} s, and continues: '
            f'see nova-accel claims and its log.')
    return order.answer


def _answered(known, verb, argument, seconds):
    """Give an order, and wait until nova-compute has ended it. Return the
    order, also after the time limit, or None if the store no longer has it."""
    began = time.monotonic()
    number = known.give_order(verb, argument)
    try:
        while True:
            known.refresh()
            order = next((o for o in known.orders() if o.number == number),
                         None)
            if order is None or order.state in _ENDED:
                break
            limit = (min(seconds, _TAKEN_ON) if order.state is _State.NEW
                     else seconds)
            if time.monotonic() - began > limit:
                # nova-compute may have begun the order meanwhile: read its
                # state
                order = known.withdraw_order(number, (_State.NEW, *_ENDED))
                break
            time.sleep(_PAUSE)
    finally:
        # also if the operator interrupts the command
        known.withdraw_order(number, (_State.NEW, *_ENDED))
    return order
