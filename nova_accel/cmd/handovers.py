# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel handovers: show how devices were cleaned between servers; and
nova-accel history: show the servers of a device, or the devices of a server.
"""

import argparse
from collections.abc import Iterable, Mapping
import dataclasses
import datetime
import json
import os

from oslo_utils import uuidutils

from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel.store import values
from nova_accel import text

CONF = conf.CONF
#: fields of a hand-over that history reads from nova-accel handovers -f json
_READ = ('time', 'device', 'serial', 'handle', 'server', 'result', 'since')


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

    def take_action(self, parsed_args):
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


class History(output.Lister):
    """Show which servers had a device, or which devices a server had.

    One row for each time that a server had a device. Past uses come from the
    journal of hand-overs, and present uses from the claims. From is the time
    when the server got the device or, if that is not recorded, the time of the
    previous hand-over. Rows without a server are commands of the operator.
    Reports of owners have their own rows. An address selects all cards that
    were at this address, and the card that is there now, also at its earlier
    addresses. Reads the claim store of nova-compute, or files of many hosts,
    and changes nothing.
    """

    COLUMNS = ('Host', 'From', 'Until', 'Device', 'Serial', 'Handle', 'Server',
               'Result')
    STACKS = {
        'From and until': ('{From}', 'until {Until}', 'on {Host}'),
        'Device': ('{Device}', '{Handle}', '{Serial}'),
        'Server and result': ('{Server}', '{Result}')}
    is_search = True

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        parser.add_argument(
            'name', metavar='DEVICE|SERVER', type=pci.from_lspci,
            help='address or serial number of a device, address of a handle, '
                 'or UUID of a server')
        parser.add_argument(
            '--at', metavar='TIME', type=time,
            help='only uses at this time, UTC, for example 2026-11-22T02:17')
        parser.add_argument(
            '--journal', metavar='FILE', action='append', default=[],
            help='a file from nova-accel handovers -f json on another host, '
                 'named HOST.json, in place of the claim store of this host; '
                 'may be given many times')
        return parser

    def take_action(self, parsed_args):
        name, at = parsed_args.name, parsed_args.at or ''
        self.nothing = (
            f'Nothing is recorded of {output.clean(name)}: {output.NAMES}.')
        found = []
        for host, done, claims, reports, card in self._hosts(parsed_args):
            before: dict[str, str] = {}
            rows, of_card = [], set()
            for one in done:
                if one.is_key:
                    continue
                rows.append((host, one.since or before.get(one.handle, ''),
                             one.time, one.device, one.serial, one.handle,
                             one.server, one.result))
                if card and model.CardKey(
                        one.device, one.serial, '', one.ports).identifies(
                            card):
                    of_card.add(rows[-1])
                if not one.failed:
                    before[one.handle] = one.time
            rows += [(host, text.to_second(claim.since) or before.get(
                claim.handle.address, ''), '', claim.device_address,
                claim.serial, claim.handle.address, claim.instance_uuid, '')
                for claim in claims]
            for report in reports:
                rows.append((host, report.time, report.time, report.device,
                             report.serial, '', report.server,
                             f'reported by the owner: {report.category}: '
                             f'{report.words}'))
                if card and report.card.identifies(card):
                    of_card.add(rows[-1])
            found += [row for row in rows
                      if (name in row[3:7] or row in of_card) and (
                          not at or row[1] <= at <= (row[2] or at))]
        return self.COLUMNS, sorted(
            found, key=lambda row: (row[2] or '~', *row))

    def _hosts(self, parsed_args):
        """Yield (host, hand-overs, claims, reports of owners, key of the card
        at the address that the operator gave, or None) of each host."""
        for path in parsed_args.journal:
            host = os.path.basename(path).removesuffix('.json')
            yield host, read(path), (), (), None
        if not parsed_args.journal:
            known = store.read(parsed_args)
            yield CONF.host, known.handovers(), [
                claim for claim in known.claims()
                if uuidutils.is_uuid_like(claim.instance_uuid)
                ], known.owner_reports(), known.keys().get(parsed_args.name)


def read(path: str) -> list[values.Handover]:
    """Return the hand-overs in a file.

    :raises InvalidRequest: the file cannot be read, or has other content.
    """
    try:
        with open(path, encoding='utf-8') as file:
            rows = json.load(file)
        return [parsed(row, _READ) for row in rows]
    except OSError as error:
        why = error.strerror
    except exception.MALFORMED as error:
        why = f'{type(error).__name__}: {error}'
    raise exception.InvalidRequest(
        f'--journal names {path}, which is not what nova-accel handovers -f '
        f'json writes ({why}): name such a file.')
