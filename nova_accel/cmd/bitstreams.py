# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel make-bitstream: bitstream files for trials."""

from collections.abc import Callable
import contextlib
import os
import shlex
import uuid

from cliff import command

from nova_accel.bitstream import glance
from nova_accel import exception
from nova_accel import sim

#: suffix of a file -> the function that writes it
_MAKERS: dict[str, Callable[[str, str, str], None]] = {
    '.gbs': sim.make_gbs, '.xclbin': sim.make_xclbin}


class MakeBitstream(command.Command):
    """Write a bitstream for simulated cards.

    The file has the format of the vendor's tools, GBS (Intel) or xclbin (AMD),
    and a payload that only simulated cards accept. An existing file is not
    overwritten. Prints the command that uploads the file to Glance.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'file', metavar='FILE',
            help='file to write; its suffix, .gbs or .xclbin, is the format')
        parser.add_argument(
            '--region-type', metavar='UUID', required=True,
            help='type of the regions that accept it: "interface" of the card '
                 'in the description of the simulated host')
        parser.add_argument(
            '--function', metavar='UUID', default=str(uuid.uuid4()),
            help='function that a region has after it is programmed with the '
                 'file (default: a new UUID)')
        return parser

    def take_action(self, parsed_args):
        path = parsed_args.file
        name, suffix = os.path.splitext(os.path.basename(path))
        if suffix not in _MAKERS:
            raise exception.BitstreamError(
                f'{path!r} is not a name for a bitstream, because its suffix '
                f'is {suffix!r}: use {" or ".join(_MAKERS)}.')
        function = _uuid('--function', parsed_args.function)
        region_type = _uuid('--region-type', parsed_args.region_type)
        try:
            # fails if the file exists, even as a link
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY,
                             0o644))
            try:
                _MAKERS[suffix](path, function, region_type)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        except OSError as error:
            raise exception.BitstreamError(
                f'{path!r} cannot be written as a bitstream '
                f'({error.strerror}): name a new file in a directory that you '
                f'may write.') from error
        self.app.stdout.write(shlex.join((
            'openstack', 'image', 'create', name, '--file', path,
            '--disk-format', 'raw', '--container-format', 'bare',
            '--property', f'{glance.FUNCTION_ID}={function}',
            '--property', f'{glance.REGION_TYPE_ID}={region_type}')) + '\n')


def _uuid(option: str, value: str) -> str:
    try:
        return str(uuid.UUID(value))
    except ValueError:
        raise exception.BitstreamError(
            f'{option} has {value!r}, which is not a UUID: write it like '
            f'{uuid.UUID(int=0)}.') from None
