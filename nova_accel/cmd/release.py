# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel release: end a claim behind which nothing stands."""

from cliff import command

from nova_accel.cmd import orders
from nova_accel.cmd import store
from nova_accel import exception


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
        orders.add_arguments(parser)
        parser.add_argument(
            'claim', metavar='CLAIM',
            help='the handle, as nova-accel claims shows it')
        return parser

    def take_action(self, parsed_args):
        known = store.to_write(parsed_args)
        if not any(parsed_args.claim in (c.uuid, c.handle.address)
                   for c in known.claims()):
            raise exception.DeviceUnavailable(
                f'No claim on this host is called {parsed_args.claim!r}: name '
                f'a handle of a server that nova-accel claims shows.')
        self.app.stdout.write(orders.carry_out(
            known, 'release', parsed_args.claim, parsed_args.timeout) + '\n')
