# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel usage: show for how long servers had devices."""

import argparse
import collections
from collections.abc import Iterator
import datetime
import json
import math
import re
import typing

from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel import conf
from nova_accel.store import values
from nova_accel import text

CONF = conf.CONF
_DAY = datetime.timedelta(days=1)
#: seconds by which the clock of a host may differ before a use is doubtful
_ADJUSTED = 60


class Use(typing.NamedTuple):
    """One use of a device by a server, a row of usage --by-claim."""

    host: str
    claim: str
    server: str
    project: str
    flavor: str
    type: str
    product: str
    part: str
    since: str
    until: str
    seconds: float

    def days(self) -> Iterator[tuple[str, float]]:
        """Yield (day in UTC, seconds of the use in it) for each day.

        :raises ValueError: since or until is not a time.
        """
        since, until = map(_time, (self.since, self.until))
        length = (until - since).total_seconds()
        if length <= 0:
            yield since.date().isoformat(), self.seconds
            return
        begin = since
        while begin < until:
            end = min(until, datetime.datetime.combine(
                begin.date(), datetime.time(), datetime.UTC) + _DAY)
            yield (begin.date().isoformat(), self.seconds * (
                end - begin).total_seconds() / length)
            begin = end

    @property
    def is_adjusted(self) -> bool:
        """Return whether the clock of the host was changed during the use."""
        return abs((_time(self.until) - _time(self.since)).total_seconds()
                   - self.seconds) > _ADJUSTED


#: columns of --by-claim
_CLAIM = tuple(name.capitalize() for name in Use._fields)


class Usage(output.Lister):
    """Show for how many hours servers had devices.

    One row for each day (UTC), project, product, part of a device and flavor.
    A part is a vGPU type, or the function of an FPGA region. nova-compute
    counts every minute, and keeps each use for 400 days. The use ends when the
    server releases the device, before cleaning. Reads the claim store of
    nova-compute, or files of many hosts, and changes nothing. If rows of a
    file are unreadable or doubtful, stderr names them, the exit status is 1,
    and the other rows are counted.
    """

    COLUMNS: tuple[str, ...] = (
        'Day', 'Project', 'Type', 'Product', 'Part', 'Flavor', 'Hours')
    STACKS = {
        'Day': ('{Day}',),
        'Project and flavor': ('{Project}', 'flavor {Flavor}'),
        'Device': ('{Type} {Product}', '{Part}'),
        'Hours': ('{Hours}',)}

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        parser.add_argument(
            '--journal', metavar='FILE', action='append', default=[],
            help='a file from nova-accel usage --by-claim -f json on a host, '
                 'in place of the claim store of this host; may be given many '
                 'times')
        parser.add_argument(
            '--by-claim', action='store_true',
            help='show a row for each time that a server had a device, with '
                 'its seconds')
        parser.add_argument('--project', metavar='ID',
                            help='only use by this project')
        for name, what in ('since', 'from'), ('until', 'up to'):
            parser.add_argument(
                f'--{name}', metavar='DAY', type=_day,
                help=f'only use {what} this day (UTC), for example 2026-11-22')
        return parser

    def take_action(self, parsed_args):
        self.nothing = 'No use of a device is recorded.'
        found = [use for use in self._uses(parsed_args)
                 if parsed_args.project in (None, use.project)]
        first, last = parsed_args.since or '', parsed_args.until or '~'
        if parsed_args.by_claim:
            self.STACKS = {
                'Since and until': ('{Since}', '{Until}', 'on {Host}'),
                'Server': ('{Server}', 'project {Project}',
                           'flavor {Flavor}', 'claim {Claim}'),
                'Device': ('{Type} {Product}', '{Part}'),
                'Seconds': ('{Seconds}',)}
            self.COLUMNS = _CLAIM
            return _CLAIM, [
                (*use[:-1], round(use.seconds, 6)) for use in found
                if first <= use.until and use.since[:10] <= last]
        sums: dict[tuple[str, ...], float] = collections.defaultdict(float)
        for use in found:
            for day, seconds in use.days():
                if first <= day <= last:
                    sums[day, use.project, use.type, use.product, use.part,
                         use.flavor] += seconds
        digits = 2 if self.for_people else 9
        return self.COLUMNS, [(*key, round(seconds / 3600, digits))
                              for key, seconds in sorted(sums.items())]

    def _uses(self, parsed_args) -> list[Use]:
        if not parsed_args.journal:
            return [_of_store(use) for use in store.read(parsed_args).uses()]
        found: dict[tuple[str, str], Use] = {}
        hosts: dict[str, str] = {}
        for path in parsed_args.journal:
            uses = [*self._read(path)]
            for host in sorted({use.host for use in uses}):
                if host in hosts:
                    self._warn(path, f'is of host {output.clean(host)}, as '
                               f'{hosts[host]} is: each claim counts once; '
                               f'if two hosts have this name, rename one')
                hosts[host] = path
            adjusted = sum(use.is_adjusted for use in uses)
            if adjusted:
                self._warn(path, f'has {adjusted} uses during which the '
                           f'clock of the host was set: their seconds count, '
                           f'and days may be wrong')
            for use in uses:
                # if a host was read twice, the later reading counts
                before = found.get((use.claim, use.since))
                if before is None or use.seconds > before.seconds:
                    found[use.claim, use.since] = use
        return [*found.values()]

    def _read(self, path: str) -> Iterator[Use]:
        """Yield the readable uses of a file."""
        try:
            with open(path, encoding='utf-8', errors='replace') as file:
                content = file.read()
        except OSError as error:
            self._warn(path, f'cannot be read: {error.strerror}')
            return
        rows, is_whole = _rows(content)
        odd = 0
        for row in rows:
            try:
                yield _of_row(row)
            except (ValueError, TypeError, KeyError, OverflowError):
                odd += 1
        if not is_whole:
            self._warn(path, f'is not complete: the {len(rows)} rows up to '
                       f'its damage count')
        if odd:
            self._warn(path, f'has {odd} rows that nova-accel usage '
                       f'--by-claim has not written: they are left out')

    def _warn(self, path, what):
        self.status = 1
        self.app.stderr.write(f'WARNING: --journal {path} {what}.\n')


def _rows(content: str) -> tuple[list[typing.Any], bool]:
    """Return the rows of a JSON list, and whether it is complete. If the list
    is cut off, return the rows before the cut."""
    try:
        found = json.loads(content)
        return (found, True) if isinstance(found, list) else ([], False)
    except (ValueError, RecursionError):
        pass
    rows, decoder, at = [], json.JSONDecoder(), 0
    while start := re.compile(r'[\s,\[]*(?=\{)').match(content, at):
        try:
            row, at = decoder.raw_decode(content, start.end())
        except (ValueError, RecursionError):
            break
        rows.append(row)
    return rows, False


def _of_row(row: typing.Any) -> Use:
    """Return the use in a row of a file.

    :raises ValueError, TypeError, KeyError, OverflowError: the row is
        malformed.
    """
    texts = {name.lower(): row[name] or '' for name in _CLAIM[:-1]}
    seconds = row['Seconds']
    if not all(isinstance(one, str) for one in texts.values()) or isinstance(
            seconds, bool):
        raise TypeError
    use = Use(**texts, seconds=float(seconds))
    if not math.isfinite(use.seconds) or use.seconds < 0 or (
            (_time(use.until) - _time(use.since)).days > 36500):
        raise ValueError
    return use


def _of_store(use: values.Use) -> Use:
    return Use(CONF.host, *(getattr(use, name) for name in Use._fields[1:]))


def _time(value: str) -> datetime.datetime:
    """Return a time that store.uses has written.

    :raises ValueError: the value is not such a time.
    """
    found = datetime.datetime.fromisoformat(value)
    if found.utcoffset() != datetime.timedelta():
        raise ValueError(f'{value!r} is not UTC')
    return found


def _day(value: str) -> str:
    try:
        return datetime.date.fromisoformat(value).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{text.printable(value)} is not a day: write it like 2026-11-22'
        ) from None
