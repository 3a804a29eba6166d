# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel release: end a claim that no server needs."""

from cliff import command

from nova_accel.cmd import orders
from nova_accel.cmd import store
from nova_accel import exception
from nova_accel.host import pci


class Release(command.Command):
    """Release a claim whose server does not exist, or that waits for you.

    nova-compute must be running. It checks whether a guest, an allocation in
    Placement or a server in Nova needs the claim. If so, the command is
    refused, with exit status 1. Otherwise nova-compute cleans the device, and
    other servers can get it. With the policy operator of [accel] handover, the
    handle of a deleted server waits until you release it with this command,
    which does not clean it: clean the device first.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        orders.add_arguments(parser)
        parser.add_argument(
            'claim', metavar='CLAIM', type=pci.from_lspci,
            help='the handle, as nova-accel claims shows it')
        return parser

    def take_action(self, parsed_args):
        known = store.to_write(parsed_args)
        if not any(parsed_args.claim in (c.uuid, c.handle.address)
                   for c in known.all_claims()):
            raise exception.DeviceUnavailable(
                f'No claim on this host is called {parsed_args.claim!r}: name '
                f'a handle that nova-accel claims shows.')
        self.app.stdout.write(orders.carry_out(
            known, 'release', parsed_args.claim, parsed_args.timeout,
            self.app.stderr) + '\n')
