# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel clean, program and drill: orders to nova-compute about a device.

See admin/{maintenance,drill}.py for the work of nova-compute.
"""

import argparse

from cliff import command

from nova_accel.cmd import orders
from nova_accel.cmd import store
from nova_accel.health import signals
from nova_accel.inventory import identity

#: seconds that a drill lasts: default and maximum
_STAY, _LONGEST_STAY = 120, 3600


def _seconds(value: str) -> int:
    if not value.isdecimal() or int(value) > _LONGEST_STAY:
        raise argparse.ArgumentTypeError(
            f'{value!r} is not a number of seconds up to {_LONGEST_STAY}: '
            f'write it like 300')
    return int(value)


class _OfDevice(command.Command):

    VERB = ''

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        orders.add_arguments(parser)
        parser.add_argument(
            'device', metavar='DEVICE',
            help='address, serial number, or name of its resource provider; '
                 'for one region of an FPGA, the name of its provider')
        return parser

    def _order(self, parsed_args, *words):
        known = store.to_write(parsed_args)
        part = identity.named_part(parsed_args.device, known.devices())
        self.app.stdout.write(orders.carry_out(
            known, self.VERB, ' '.join((part, *words)),
            parsed_args.timeout,
            self.app.stderr) + '\n')


class Clean(_OfDevice):
    """Clean a device that no server has, as after a server.

    nova-compute, which must run, follows the policy of [accel] handover: by
    default it resets the device and erases data that a server may have left.
    No server gets the device before it is clean. If a server has the device,
    the command refuses, with exit status 1.
    """

    VERB = 'clean'

    def take_action(self, parsed_args):
        self._order(parsed_args)


class Program(_OfDevice):
    """Program a free region of an FPGA with an image of the operator.

    nova-compute, which must run, downloads the image from Glance. The image
    must be public or belong to a project of [accel] bitstream_owners. Disable
    the device first (nova-accel disable); otherwise the command is refused,
    with exit status 1. A region of [accel] fixed_devices is not programmed. If
    such a region carries the function of the image already, nova-compute only
    stores the name of the function.
    """

    VERB = 'program'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'wanted', metavar='FUNCTION-OR-IMAGE',
            help='id of the image, or id or name of the function in it '
                 '(accel:function_id, accel:function_name)')
        return parser

    def take_action(self, parsed_args):
        self._order(parsed_args, parsed_args.wanted)


class Drill(_OfDevice):
    """Simulate a fault of a device, to test your alerts.

    nova-compute treats the finding like any other: it logs, notifies and
    writes metrics. With [accel] health = act it also changes Placement. If
    servers have the device, it changes their metadata, otherwise it resets the
    device. Check that your alert arrives. Disable the device first (nova-accel
    disable); nova-compute must run. Otherwise the exit status is 1.
    """

    VERB = signals.DRILL

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--stay', metavar='SECONDS', type=_seconds, default=_STAY,
            help=f'how long the finding lasts, up to an hour (default: '
                 f'{_STAY}); long enough that Prometheus reads it and an '
                 f'alert reaches you')
        return parser

    def take_action(self, parsed_args):
        parsed_args.timeout += parsed_args.stay
        self._order(parsed_args, str(parsed_args.stay))
