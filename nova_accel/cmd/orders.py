# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Send orders of commands to nova-compute.

nova-compute carries them out (nova_accel/admin/orders.py): only it judges
claims and touches devices. If it does not run, the command is refused.
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
#: verbs whose argument begins with a device
_OF_DEVICES = 'clean', 'program', signals.DRILL
#: seconds between two reads of the answer
_PAUSE = 0.2
_ENDED = _State.DONE, _State.REFUSED
#: seconds to wait for an answer by default
_PATIENCE = 600
#: seconds after which nova-compute does not begin an order any more
_TAKEN_ON = journal.ORDER_SECONDS + 1


def add_arguments(parser) -> None:
    """Give a command the argument --timeout."""
    parser.add_argument(
        '--timeout', metavar='SECONDS', type=int, default=_PATIENCE,
        help=f'how long to wait for the answer (default: {_PATIENCE}); '
             f'nova-compute goes on after it')


def check_idle(known: claim_store.ClaimStore, address: str) -> None:
    """Check that nova-compute carries out no order about a device.

    :raises InvalidRequest: it carries one out.
    """
    for order in known.orders():
        name, _, _ = order.argument.partition(' ')
        # orders about a region have its name
        if order.state is _State.BEGUN and order.verb in _OF_DEVICES and (
                name.partition('_')[0] == address):
            raise exception.InvalidRequest(
                f'{address} is not enabled, because nova-compute carries out '
                f'nova-accel {order.verb} {name}: wait for its end, or start '
                f'nova-compute if it does not run.')


def carry_out(known: claim_store.ClaimStore, verb: str, argument: str,
              seconds: int, stderr: typing.TextIO) -> str:
    """Send an order to nova-compute; return the answer.

    :param seconds: time limit for the answer.
    :param stderr: if a terminal, it shows the wait.
    :raises DeviceUnavailable: nova-compute refuses, or does not answer.
    """
    with output.waiting(
            stderr, f'waiting for nova-compute: {verb} {argument}', seconds):
        order = _answered(known, verb, argument, seconds)
    if order is None or order.state is _State.NEW:
        raise exception.DeviceUnavailable(
            f'nova-compute of this host has not taken the order on within '
            f'{min(seconds, _TAKEN_ON)} s, and it is withdrawn: see that '
            f'nova-compute runs, and is of the release of this command.')
    if order.state is _State.REFUSED:
        raise exception.DeviceUnavailable(order.answer)
    if order.state not in _ENDED:
        raise exception.DeviceUnavailable(
            f'nova-compute has not answered within {seconds} s, and goes on: '
            f'see nova-accel claims and its log.')
    return order.answer


def _answered(known, verb, argument, seconds):
    """Return the order when it has ended, or in its present state after the
    time limit; None if the store no longer has it."""
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
                # its present state, because nova-compute may have begun it
                # meanwhile
                order = known.withdraw_order(number, (_State.NEW, *_ENDED))
                break
            time.sleep(_PAUSE)
    finally:
        # also if the operator interrupts the command
        known.withdraw_order(number, (_State.NEW, *_ENDED))
    return order
