# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel page: the accelerators of a cloud as one HTML file."""

import collections
from collections.abc import Iterable, Mapping
import datetime
import html

from cliff import command

from nova_accel.cmd import cloud
from nova_accel.cmd import tree
from nova_accel import exception
from nova_accel import files
from nova_accel import naming

#: class of a cell -> its meaning
_STATES = {'used': 'in use', 'free': 'free',
           'suspect': 'free, and not well: servers get it last',
           'fenced': 'no server gets it'}
#: no script, font or picture of another server: it can be sent and kept
_HEAD = '''<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Accelerators of {hosts} hosts</title>
<style>
:root {{ color-scheme: light dark; --line: #8886; --soft: #8881;
  --used: #0969da; --free: #1a7f37; --suspect: #bf8700; --fenced: #cf222e }}
@media (prefers-color-scheme: dark) {{ :root {{
  --used: #4493f8; --free: #3fb950; --suspect: #d29922; --fenced: #f85149 }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 0 auto;
  max-width: 80rem; padding: 1rem }}
h1 {{ font-size: 1.4rem; margin: 0 }} p {{ margin: .3rem 0 1rem }}
.key, .cells {{ display: flex; flex-wrap: wrap; gap: .3rem }}
.sum {{ overflow-x: auto }} table {{ border-collapse: collapse }}
td, th {{ border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0;
  text-align: left }} td.n {{ text-align: right }}
section {{ border-top: 1px solid var(--line); padding: .6rem 0;
  content-visibility: auto }}
h2 {{ font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere }}
h3 {{ font-size: .8rem; font-weight: 400; margin: .3rem 0; opacity: .75 }}
.c {{ border: 1px solid var(--line); border-left: .3rem solid;
  border-radius: .25rem; background: var(--soft); box-sizing: border-box;
  font-size: .8rem; max-width: 100%; min-width: 1.6rem; min-height: 1.6rem;
  overflow-wrap: anywhere; padding: .1rem .4rem }}
.used {{ border-left-color: var(--used) }}
.free {{ border-left-color: var(--free) }}
.suspect {{ border-left-color: var(--suspect) }}
.fenced {{ border-left-color: var(--fenced) }}
small {{ opacity: .75 }}
</style></head><body>
'''


class Page(cloud.Asks, command.Command):
    """Write the accelerators of the cloud as one HTML file.

    Hosts with a cell for each accelerator: whether it is free, in use or
    fenced, who holds it, and which function an FPGA region carries. The file
    needs nothing else to be shown, and is replaced in one step. Uses the
    credentials of the openstack command. Changes nothing.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        self.add_cloud_arguments(parser)
        parser.add_argument('file', metavar='FILE', help='file to write')
        parser.add_argument(
            'hosts', metavar='HOST', nargs='*',
            help='name of a compute node, as Placement has it (default: all)')
        return parser

    def take_action(self, parsed_args):
        known = self.cloud(parsed_args)
        found = tree.providers(known, dict.fromkeys(parsed_args.hosts))
        shown = [p for providers in found.values() for p in providers]
        servers = tree.server_names(known, {
            host for host, providers in found.items()
            if any(p.held for p in providers)})
        text = draw(found, servers, tree.function_names(known, shown),
                    datetime.datetime.now(datetime.timezone.utc))
        try:
            files.replace(parsed_args.file, text)
        except OSError as error:
            raise exception.ConfigurationError(
                f'The page cannot be written to {parsed_args.file}: '
                f'{error.strerror}: name another file.')
        self.app.stdout.write(
            f'{parsed_args.file}: {len(found)} '
            f'host{"" if len(found) == 1 else "s"}.\n')


def draw(found: Mapping[str, list[tree.Provider]], servers: Mapping[str, str],
         functions: Mapping[str, str], when: datetime.datetime) -> str:
    """Return the page.

    :param found: host -> its providers, parents before children.
    :param servers: UUID -> name.
    :param functions: UUID of a provider -> name of its function.
    :param when: the time at which the cloud answered.
    """
    parts = [_HEAD.format(hosts=len(found)), '<h1>Accelerators</h1>',
             f'<p>{when:%Y-%m-%d %H:%M} UTC, as Placement has them. '
             f'{len(found)} hosts.</p>', '<div class="key">',
             *(f'<span class="c {name}">{meaning}</span>'
               for name, meaning in _STATES.items()), '</div>']
    parts += _sums(found)
    for host, providers in found.items():
        parts.append(f'<section><h2>{html.escape(host)}</h2>')
        for provider in providers:
            if provider.resource_class:
                parts.append(_cells(provider, providers, servers, functions))
        parts.append('</section>')
    return '\n'.join([*parts, '</body></html>', ''])


def _sums(found) -> Iterable[str]:
    """How many of each product there are, and are free."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for providers in found.values():
        for provider in providers:
            if provider.resource_class:
                count = sums[tree.what_is(provider, providers)]
                for position, amount in enumerate(_amounts(provider)):
                    count[position] += amount
    yield ('<p></p><div class="sum"><table><tr><th>Product<th>In use<th>Free'
           '<th>No server gets</tr>')
    for product, counts in sorted(sums.items()):
        yield (f'<tr><td>{html.escape(product)}'
               + ''.join(f'<td class="n">{n}' for n in counts) + '</tr>')
    yield '</table></div><p></p>'


def _amounts(provider: tree.Provider) -> tuple[int, int, int]:
    """Return how many are in use, free, and fenced.

    What is in use may be fenced, too: then no other server gets it.
    """
    used = sum(provider.held.values())
    if naming.FENCED in provider.traits:
        return used, 0, provider.total - used
    fenced = min(provider.reserved, provider.total - used)
    return used, provider.total - used - fenced, fenced


def _cells(provider, providers, servers, functions):
    _, free, fenced = _amounts(provider)
    function = functions.get(provider.uuid, provider.function or '')
    told = f'<small>{html.escape(function)}</small>' if function else ''
    suspect = naming.SUSPECT in provider.traits
    cells = []
    for consumer, amount in sorted(provider.held.items()):
        name = html.escape(servers.get(consumer, consumer))
        cells += [_cell('used', f'{name} {told}', consumer)] * amount
    cells += [_cell('suspect', told, 'not well') if suspect
              else _cell('free', told, 'free')] * free
    cells += [_cell('fenced', told, 'fenced')] * fenced
    return (f'<h3>{html.escape(tree.what_is(provider, providers))} '
            f'<small>{html.escape(provider.name)}</small></h3>'
            f'<div class="cells">{"".join(cells)}</div>')


def _cell(state, text, title):
    return f'<span class="c {state}" title="{html.escape(title)}">{text}</span>'
