# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel history: show the servers of a device, or the devices of a
server.
"""

import json
import os

from oslo_utils import uuidutils

from nova_accel.cmd import handovers
from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel.store import values
from nova_accel import text

CONF = conf.CONF
#: fields of a hand-over that are read from nova-accel handovers -f json
_READ = ('time', 'device', 'serial', 'handle', 'server', 'result', 'since')


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
            '--at', metavar='TIME', type=handovers.time,
            help='only uses at this time, UTC, for example 2026-11-22T02:17')
        parser.add_argument(
            '--journal', metavar='FILE', action='append', default=[],
            help='a file from nova-accel handovers -f json on another host, '
                 'named HOST.json, in place of the claim store of this host; '
                 'may be given many times')
        return parser

    def table(self, parsed_args):
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
        return [handovers.parsed(row, _READ) for row in rows]
    except OSError as error:
        why = error.strerror
    except exception.MALFORMED as error:
        why = f'{type(error).__name__}: {error}'
    raise exception.InvalidRequest(
        f'--journal names {path}, which is not what nova-accel handovers -f '
        f'json writes ({why}): name such a file.')
