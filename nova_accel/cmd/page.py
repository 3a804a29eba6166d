# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel page: the accelerators of the cloud in a browser."""

import collections
from collections.abc import Iterable, Iterator
import datetime
import itertools
import os
import typing

from cliff import command

from nova_accel.cmd import cloud
from nova_accel.cmd import configuration
from nova_accel.cmd import fits
from nova_accel.cmd import handovers
from nova_accel.cmd import page_html
from nova_accel.cmd import tree
from nova_accel import exception
from nova_accel import files
from nova_accel import text

_FINDINGS = 'nova_accel_device_finding{', 'nova_accel_holds{'
_DEVICES = 'nova_accel_devices{'
_FIRST_DAY = datetime.date(2000, 1, 1)


class Page(cloud.Asks, command.Command):
    """Write the accelerators of the cloud as one HTML file.

    Devices that need attention come first: unavailable devices, which no
    server gets, and degraded devices, which servers get last. Then follow the
    numbers of each product. If hosts report domains ([accel] near), the hosts
    of each rack or other domain follow. Then each host has a cell for each
    server that holds accelerators, and the function of each FPGA region. The
    file needs no other files, and is replaced atomically. Uses the credentials
    of the openstack command. Changes nothing else.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser, configuration.API)
        self.add_cloud_arguments(parser)
        parser.add_argument('file', metavar='FILE', help='file to write')
        parser.add_argument(
            'hosts', metavar='HOST', nargs='*',
            help='name of a compute node, as Placement has it (default: all)')
        parser.add_argument(
            '--fits', action='store_true',
            help='also show how many servers of each flavor fit, as nova-accel '
                 'fits; run it on a host with the device profiles of nova-api')
        parser.add_argument(
            '--journal', metavar='FILE', action='append', default=[],
            help='a file from nova-accel handovers -f json on a host: also '
                 'show the hand-overs of the last 30 days, and how many '
                 'failed; may be given many times')
        parser.add_argument(
            '--metrics', metavar='FILE', action='append', default=[],
            help='a file of [accel] metrics_file of a host: also show why its '
                 'devices are withheld, findings about them, and how many '
                 'each project holds, if the file has projects; may be given '
                 'many times')
        parser.add_argument(
            '--every', metavar='SECONDS', type=int, default=300,
            help='interval at which the file is written and browsers load it '
                 'again; after twice that time the page is stale (default: '
                 '300)')
        return parser

    def take_action(self, parsed_args):
        # checked before the cloud is queried
        metrics = {path: _metrics(path) for path in parsed_args.metrics}
        findings = [finding for path, lines in metrics.items()
                    for finding in _findings(lines, path)]
        ended = [handover for path in parsed_args.journal
                 for handover in _handovers(path, self.app.stderr)]
        if parsed_args.fits:
            configuration.read(parsed_args.config_file, configuration.API)
        known = self.cloud(parsed_args)
        found = tree.providers(known, dict.fromkeys(parsed_args.hosts))
        shown = [p for providers in found.values() for p in providers]
        servers = tree.server_names(known, {
            host for host, providers in found.items()
            if any(p.held for p in providers)})
        page = page_html.draw(page_html.Facts(
            found, datetime.datetime.now(datetime.timezone.utc), servers,
            tree.function_names(known, shown),
            [(name, number, limit) for name, _, number, limit
             in fits.rows(known, names=parsed_args.hosts)]
            if parsed_args.fits else (), ended, findings,
            max(1, parsed_args.every),
            [*_by_project(itertools.chain(*metrics.values()))],
            tree.domains(known)))
        try:
            files.replace(parsed_args.file, page)
        except OSError as error:
            raise exception.ConfigurationError(
                f'The page cannot be written to {parsed_args.file}: '
                f'{error.strerror}: name another file.')
        self.app.stdout.write(
            f'{parsed_args.file}: {len(found)} '
            f'host{"" if len(found) == 1 else "s"}.\n')


def _handovers(path: str, stderr: typing.TextIO) -> Iterator[tuple[str, bool]]:
    """Yield (day, whether cleaning failed) for each hand-over in a journal.

    :param stderr: stream for a line about hand-overs without a valid time.
    :raises InvalidRequest: the file cannot be read.
    """
    odd = []
    for one in handovers.read(path):
        try:
            day = datetime.date.fromisoformat(one.time[:10])
        except ValueError:
            day = datetime.date.min
        if day < _FIRST_DAY:
            odd.append(text.printable(one.time))
        else:
            yield day.isoformat(), one.failed
    if odd:
        stderr.write(
            f'WARNING: --journal names {path}, where {text.some(odd)} is not '
            f'the time of a hand-over: {len(odd)} of them are left out.\n')


def _metrics(path: str) -> list[str]:
    """Return the lines of a metrics file that the page shows.

    :raises InvalidRequest: the file cannot be read.
    """
    try:
        # a label may contain carriage returns
        with open(path, encoding='utf-8', newline='\n') as file:
            return [line for line in file
                    if line.startswith((*_FINDINGS, _DEVICES))]
    except (OSError, ValueError) as error:
        raise exception.InvalidRequest(
            f'--metrics names {path}, which cannot be read ({error}): name a '
            f'file that [accel] metrics_file names on a host.') from None


def _by_project(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield (project, product, number of delivered, of healthy, of held, of
    idle accelerators, text with numbers of withheld ones by reason)."""
    found: dict[tuple[str, str], collections.Counter[str]] = (
        collections.defaultdict(collections.Counter))
    for line in lines:
        if line.startswith(_DEVICES):
            labels, number = text.labels(line), line.rpartition(' ')[2].strip()
            state = ' '.join(filter(None, map(labels.get, ('state', 'kind'))))
            found[labels.get('project', ''), ' '.join(filter(None, map(
                labels.get, ('type', 'product'))))][state] += (
                    int(number) if number.isdecimal() else 0)
    for (project, product), count in sorted(found.items()):
        withheld = [f'{number} {state.partition(" ")[2]}'
                    for state, number in sorted(count.items())
                    if state.startswith('withheld')]
        yield (project or '(none)', product, *(str(count[state]) for state in (
            'delivered', 'healthy', 'held', 'idle')), ', '.join(withheld))


def _findings(lines: Iterable[str], path: str) -> Iterator[tuple[str, str]]:
    """Yield (provider, text) for each finding and hold in a metrics file.

    If a line of the file names no provider, "<address> in <file>" replaces it.
    """
    for line in lines:
        if not line.startswith(_FINDINGS):
            continue
        labels = text.labels(line)
        # Placement has no provider for an unreported device
        provider = labels.get('provider') or (
            f'{labels.get("device", "")} in {os.path.basename(path)}')
        if 'kind' in labels:
            yield provider, _hold(labels['kind'])
            continue
        about = f', {labels["about"]}' if labels.get('about') else ''
        observed = (' (observed only)' if labels.get('mode') == 'observe'
                    else '')
        yield (provider, f'{labels.get("state", "")}: '
               f'{labels.get("signal", "")}{about}{observed}')


def _hold(name: str) -> str:
    """Return the name of a kind of holds, and who lifts such holds."""
    # imported late: it loads modules of nova-compute, most of a second
    from nova_accel.inventory import holds
    # a host of another release may report other kinds
    return next((f'{name}; lifted by {kind.lifted_by}' for kind in holds.Kind
                 if kind.value == name), name)
