# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel handovers: show how devices were cleaned between servers."""

import argparse
from collections.abc import Iterable, Mapping
import dataclasses
import datetime

from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.store import values


def time(value: str) -> str:
    """Convert a time of an option to the form in the journal, UTC."""
    try:
        found = datetime.datetime.fromisoformat(value)
        # the last hours of the year 9999 may be none in UTC
        return found.replace(
            tzinfo=found.tzinfo or datetime.UTC).astimezone(
                datetime.UTC).isoformat(timespec='seconds')
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f'{value!r} is not a time: write it like 2026-11-22T02:17'
        ) from None


def parsed(row: Mapping[str, str | None], fields: Iterable[str],
           ) -> values.Handover:
    """Return a hand-over from a row of nova-accel handovers -f json.

    :param fields: fields of values.Handover to read.
    :raises TypeError: a value is not a text.
    :raises KeyError: the row lacks a field.
    """
    return values.Handover(**{
        field: _text(row[field.capitalize()]) for field in fields})


def _text(value) -> str:
    if not isinstance(value, str | None):
        raise TypeError(f'{value!r} is not a text')
    return value or ''


class Handovers(output.Lister):
    """Show the journal of hand-overs of this host, the newest last.

    One row for each release of a device: how it was cleaned for the next
    server, and the result. The journal keeps 90 days, and at most the newest
    1000 hand-overs of each device. -f json exports them for nova-accel history
    and nova-accel verify. Reads the claim store of nova-compute and changes
    nothing.
    """

    COLUMNS = tuple(field.name.capitalize()
                    for field in dataclasses.fields(values.Handover))
    STACKS = {
        'Time and device': ('{Time}', '{Device}', '{Handle}', '{Serial}'),
        'Server and functions': (
            '{Server}', 'before {Before}', 'after  {After}',
            'programmed by {Origin}'),
        'Result': ('{Method}', '{Result}', '{Shown}')}

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        parser.add_argument(
            '--key', action='store_true',
            help='print only the public key that signs the hand-overs of this '
                 'host, for nova-accel verify')
        parser.add_argument(
            '--device', metavar='ADDRESS', type=pci.from_lspci,
            help='only hand-overs of this device, or of this handle')
        parser.add_argument(
            '--server', metavar='UUID', type=store.server,
            help='only hand-overs after this server')
        parser.add_argument(
            '--since', metavar='TIME', type=time,
            help='only hand-overs from this time on, UTC, for example '
                 '2026-11-22 or 2026-11-22T02:17')
        return parser

    def run(self, parsed_args):
        if not parsed_args.key:
            return super().run(parsed_args)
        # imported here because most commands do not need it
        from nova_accel.store import keys
        path = store.path_of(parsed_args) + keys.SUFFIX
        key = keys.load(path)
        if key is None:
            raise exception.AcceleratorsUnavailable(
                f'The key {path}, which signs hand-overs, does not exist: '
                f'nova-compute creates it at its first start; else name the '
                f'claim store of this host by --store.')
        self.app.stdout.write(f'{key.public}\n')
        return 0

    def table(self, parsed_args):
        self.is_search = bool(parsed_args.device or parsed_args.server
                              or parsed_args.since)
        self.nothing = (
            f'No hand-over matches: {output.NAMES}.' if self.is_search
            else 'No hand-over is recorded.')
        return self.COLUMNS, [
            dataclasses.astuple(dataclasses.replace(
                h, before=output.identifier(h.before),
                after=output.identifier(h.after)))
            for h in store.read(parsed_args).handovers()
            if parsed_args.device in (None, h.device, h.handle)
            and parsed_args.server in (None, h.server)
            and h.time >= (parsed_args.since or '')]
