# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel release: end a claim behind which nothing stands.

nova-compute carries it out (nova_accel/attach/words.py): it alone judges claims
and touches devices, and where it does not run the command is refused.
"""

import time

from cliff import command

from nova_accel.attach import claims
from nova_accel.cmd import store
from nova_accel import exception
from nova_accel import model

_State = model.OrderState
#: seconds between two looks at the answer
_PAUSE = 0.2
#: seconds after which nova-compute takes an order on no more
_TAKEN_ON = claims.ORDER_SECONDS + 1


class Release(command.Command):
    """Release the claim of a server that does not exist any more.

    nova-compute, which has to run, looks whether a guest, an allocation in
    Placement or a server in Nova stands behind the claim. Where one does, the
    command is refused, with exit status 1. Else the device is cleaned and free,
    and what was found is printed.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        parser.add_argument(
            'claim', metavar='CLAIM',
            help='the handle, as nova-accel claims shows it')
        parser.add_argument(
            '--timeout', metavar='SECONDS', type=int, default=600,
            help='how long to wait for the answer (default: %(default)s); '
                 'nova-compute goes on after it')
        return parser

    def take_action(self, parsed_args):
        known = store.to_write(parsed_args)
        if not any(parsed_args.claim in (c.uuid, c.handle.address)
                   for c in known.claims()):
            raise exception.DeviceUnavailable(
                f'No claim on this host is called {parsed_args.claim!r}: name '
                f'a handle that nova-accel claims shows.')
        self.app.stdout.write(_ordered(
            known, 'release', parsed_args.claim, parsed_args.timeout) + '\n')


def _ordered(known: claims.ClaimStore, verb: str, argument: str,
             seconds: int) -> str:
    """Have nova-compute do something; returns its answer.

    :param seconds: to wait for its end.
    :raises DeviceUnavailable: nova-compute refuses, or does not answer.
    """
    began = time.monotonic()
    number = known.give_order(verb, argument)
    ended = (_State.DONE, _State.REFUSED)
    try:
        while True:
            known.look()
            order = next((o for o in known.orders() if o.number == number),
                         None)
            waited = time.monotonic() - began
            if order is None or order.state is _State.NEW and (
                    waited > _TAKEN_ON):
                raise exception.DeviceUnavailable(
                    f'nova-compute of this host has not taken the order on '
                    f'within {_TAKEN_ON} s: see that it runs, and is of the '
                    f'release of this command; when it starts, it releases by '
                    f'itself what no server has.')
            if order.state in ended:
                break
            if waited > seconds:
                raise exception.DeviceUnavailable(
                    f'nova-compute has not answered within {seconds} s, and '
                    f'goes on: see nova-accel claims and its log.')
            time.sleep(_PAUSE)
    finally:
        # also where the operator interrupts the command
        known.withdraw_order(number, (_State.NEW, *ended))
    if order.state is _State.REFUSED:
        raise exception.DeviceUnavailable(order.answer)
    return order.answer
