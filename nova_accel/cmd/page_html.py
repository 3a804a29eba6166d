# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Draw the accelerators of a cloud as one HTML file.

The file loads no script, font or picture from a server, so it can be sent and
stored.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import datetime
import html
import itertools

from nova_accel.cmd import tree
from nova_accel import naming
from nova_accel import near
from nova_accel import text

#: class of a cell -> its meaning
_STATES = {'used': 'in use', 'free': 'free',
           'suspect': 'degraded: free, and servers get it last',
           'fenced': 'unavailable: no server gets it'}
#: maximum number of hosts without an overview of tiles at the top
_FEW = 8
_DAYS = 30
_HEAD = '''<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{every}">
<title>Accelerators of {hosts} hosts</title>
<style>
:root {{ color-scheme: light dark; --line: #8886; --soft: #8881;
  --used: #0969da; --free: #2da44e; --suspect: #bf8700; --fenced: #cf222e }}
@media (prefers-color-scheme: dark) {{ :root {{
  --used: #4493f8; --free: #2ea043; --suspect: #d29922; --fenced: #f85149 }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 0 auto;
  max-width: 80rem; padding: 1rem }}
h1 {{ font-size: 1.4rem; margin: 0 }} p {{ margin: .3rem 0 1rem }}
.map + p {{ margin-top: 1rem }} p.list {{ margin-bottom: .3rem }}
h2 {{ font-size: 1.05rem; margin: 1.4rem 0 .5rem }}
.used {{ --c: var(--used) }} .free {{ --c: var(--free) }}
.suspect {{ --c: var(--suspect) }} .fenced {{ --c: var(--fenced) }}
.key, .cells, .map {{ display: flex; flex-wrap: wrap; gap: .3rem }}
.key {{ margin-bottom: 1rem }}
.sum {{ overflow-x: auto }} table {{ border-collapse: collapse; width: 100% }}
td, th {{ border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0;
  text-align: left; vertical-align: top }}
.list td, p.list {{ overflow-wrap: anywhere }}
td a {{ display: inline-block; min-height: 24px; min-width: 24px }}
td.n, th.n {{ text-align: right; width: 1% }} td.bar {{ min-width: 5rem }}
.bar div {{ display: flex; height: 1rem; margin-top: .15rem }}
.bar i, .t, .day i {{ background: var(--c) }}
.map {{ gap: 3px }} .map a {{ border-radius: 2px; height: 24px; width: 24px;
  background: linear-gradient(to top, var(--fenced) calc(var(--x) * 1%),
    var(--suspect) 0 calc(var(--s) * 1%), var(--used) 0 calc(var(--u) * 1%),
    #2da44e50 0) }}
.days {{ align-items: end; border-bottom: 1px solid var(--line); display: flex;
  gap: 2px; height: 6rem }}
.day {{ display: flex; flex: 1; flex-direction: column; height: 100%;
  justify-content: end }}
.ends {{ display: flex; justify-content: space-between }}
section {{ border-top: 1px solid var(--line); display: grid; gap: .1rem 1rem;
  grid-template-columns: 14rem 1fr; padding: .5rem 0;
  content-visibility: auto; contain-intrinsic-size: auto 4rem }}
section > b {{ font-size: .9rem; overflow-wrap: anywhere }}
section:target {{ background: var(--soft) }}
.part {{ display: grid; gap: 0 1rem; grid-template-columns: 11rem 1fr;
  margin-bottom: .3rem }}
.part > span {{ font-size: .8rem; opacity: .75; overflow-wrap: anywhere;
  padding-top: .2rem }}
@media (max-width: 50rem) {{ section, .part {{ grid-template-columns: 1fr }}
  .bar, th:empty {{ display: none }}
  td, th {{ font-size: .85rem; padding-right: .4rem }}
  th {{ font-size: .75rem }} td:first-child {{ overflow-wrap: anywhere }}
  .list td:nth-child(2) {{ overflow-wrap: normal }} }}
@media (min-width: 50rem) {{ th {{ white-space: nowrap }}
  td:first-child {{ width: 14rem }} }}
.c {{ border: 1px solid var(--line); border-left: .3rem solid var(--c);
  border-radius: .25rem; background: var(--soft); box-sizing: border-box;
  font-size: .8rem; max-width: 100%; overflow-wrap: anywhere;
  min-width: min(100%, calc(var(--n, 1) * 1.1rem)); padding: .1rem .4rem }}
small {{ opacity: .75 }}
</style></head><body>
'''
#: state, a key of _STATES -> number of accelerators
_Amounts = collections.Counter[str]


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that the page shows."""

    #: host -> its providers, parents before children
    hosts: Mapping[str, list[tree.Provider]]
    #: the time when the cloud was queried
    when: datetime.datetime
    #: UUID of a server -> its name
    servers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: UUID of a provider -> name of its function
    functions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: (flavor, how many servers of it fit, the limit)
    fits: Iterable[tuple[str, int, str]] = ()
    #: (day as 2026-11-24, whether it failed) of each hand-over
    handovers: Iterable[tuple[str, bool]] = ()
    #: provider of a device, and a finding about it
    findings: Iterable[tuple[str, str]] = ()
    #: seconds until the page is written again
    every: int = 300
    #: (project, product, how many are delivered, healthy, held, idle; withheld)
    projects: Iterable[tuple[str, ...]] = ()
    #: host -> its domains
    domains: Mapping[str, near.Domains] = dataclasses.field(
        default_factory=dict)


def draw(facts: Facts) -> str:
    """Return the HTML of the page."""
    found = {host: [p for p in providers if p.resource_class]
             for host, providers in facts.hosts.items()}
    number = len(found)
    stale = facts.when + datetime.timedelta(seconds=2 * facts.every)
    parts = [_HEAD.format(hosts=number, every=facts.every),
             '<h1>Accelerators</h1>',
             f'<p>{facts.when:%Y-%m-%d %H:%M} UTC, as Placement has them; '
             f'stale after {stale:%Y-%m-%d %H:%M} UTC. '
             f'{number} host{"" if number == 1 else "s"}.</p>']
    parts += _attention(found, facts)
    parts += ['<h2>Legend</h2><div class="key">', *(
        f'<span class="c {name}">{meaning}</span>'
        for name, meaning in _STATES.items()), '</div>']
    parts += _sums(found, facts.hosts)
    parts += _table('Projects', (
        'Project', 'Product', 'Delivered', 'Healthy', 'Held', 'Idle',
        'Withheld'), facts.projects)
    parts += _table('What fits', ('Flavor', 'Servers', 'Limit'), facts.fits)
    parts += _days(collections.Counter(facts.handovers))
    levels = sorted({level for host in found
                     for level in facts.domains.get(host, ())})
    for level in levels:
        parts += _by_domain(found, facts.domains, level)
    if number > _FEW and not levels:
        parts += ['<h2>A tile for each host</h2>', *_map(found, found)]
    parts.append('<h2>Hosts</h2>')
    for position, (host, providers) in enumerate(found.items()):
        name = _text(host).replace('.', '.<wbr>')
        parts.append(f'<section id="h{position}"><b>{name}</b><div>')
        for product, alike in itertools.groupby(
                providers, lambda p: tree.what_is(p, providers)):
            parts.append(_part(host, product, [*alike], facts))
        parts.append('</div></section>')
    return '\n'.join([*parts, '</body></html>', ''])


def _word(state: str) -> str:
    return _STATES[state].partition(':')[0]


def _said(amounts: _Amounts, states: Iterable[str] = _STATES) -> str:
    return ', '.join(f'{amounts[state]} {_word(state)}'
                     for state in states if amounts[state])


def _attention(found, facts) -> Iterator[str]:
    """Yield HTML of a table of providers that need attention: those with
    findings, or with unavailable or degraded accelerators."""
    findings = collections.defaultdict(list)
    for name, finding in facts.findings:
        findings[name].append(finding)
    rows: list[tuple] = []
    for position, providers in enumerate(found.values()):
        for provider in providers:
            said = _said(_amounts(provider), ('suspect', 'fenced'))
            if said or provider.name in findings:
                rows.append((position, provider.name, said,
                             findings.pop(provider.name, ())))
    rows += [(None, name, '', said) for name, said in findings.items()]
    yield '<h2>Needs attention</h2>'
    if not rows:
        yield '<p>Nothing.</p>'
        return
    yield ('<div class="sum list"><table><tr><th>Device<th>State<th>Why'
           '</tr>')
    for position, name, said, why in rows:
        shown = _text(name)
        if position is not None:
            shown = f'<a href="#h{position}">{shown}</a>'
        yield (f'<tr><td>{shown}<td>{said}'
               f'<td>{"<br>".join(map(_text, why))}</tr>')
    yield '</table></div>'


def _text(value: str) -> str:
    return html.escape(text.one_line(value))


def _amounts(provider: tree.Provider) -> _Amounts:
    """Return the numbers of a provider's accelerators by state. Accelerators
    of servers count as used, even if they are fenced from other servers."""
    used = sum(provider.held.values())
    # an inventory may be smaller than its allocations
    left = max(0, provider.total - used)
    fenced = (left if naming.FENCED in provider.traits
              else min(provider.reserved, left))
    free = 'suspect' if naming.SUSPECT in provider.traits else 'free'
    return _Amounts({'used': used, free: left - fenced, 'fenced': fenced})


def _of(providers: Iterable[tree.Provider]) -> _Amounts:
    return sum(map(_amounts, providers), _Amounts())


def _sums(found, hosts) -> Iterator[str]:
    """Yield HTML of a table with the numbers of accelerators of each product
    by state."""
    sums: dict[str, _Amounts] = collections.defaultdict(_Amounts)
    for host, providers in found.items():
        for provider in providers:
            sums[tree.what_is(provider, hosts[host])] += _amounts(provider)
    yield ('<div class="sum"><table><tr><th>Product<th class="n">In use'
           '<th class="n">Free<th class="n">Degraded<th class="n">Unavailable'
           '<th></tr>')
    for product, amounts in sorted(sums.items()):
        numbers = {state: amounts[state] for state in _STATES}
        yield (f'<tr><td>{_text(product)}'
               + ''.join(f'<td class="n">{n}' for n in numbers.values())
               + '<td class="bar"><div>' + ''.join(
                   f'<i class="{state}" style="flex:{n}"></i>'
                   for state, n in numbers.items() if n) + '</div></tr>')
    yield '</table></div>'


def _table(title, columns, rows) -> Iterator[str]:
    rows = [*rows]
    if rows:
        yield (f'<h2>{title}</h2><div class="sum list"><table><tr>'
               + ''.join(f'<th>{column}' for column in columns) + '</tr>')
        for row in rows:
            yield '<tr>' + ''.join(f'<td>{_text(str(cell))}'
                                   for cell in row) + '</tr>'
        yield '</table></div>'


def _days(counts: Mapping[tuple[str, bool], int]) -> Iterator[str]:
    if not counts:
        return
    last = datetime.date.fromisoformat(max(day for day, _ in counts))
    days = [str(last - datetime.timedelta(back))
            for back in reversed(range(_DAYS))]
    most = max(1, *(counts[day, False] + counts[day, True] for day in days))
    yield ('<h2>Hand-overs</h2><div class="key"><span class="c used">clean'
           '</span><span class="c fenced">failed</span></div>'
           '<div class="days">')
    for day in days:
        ended, failed = counts[day, False], counts[day, True]
        yield (f'<span class="day" title="{day}: {ended} clean, {failed} '
               f'failed"><i class="fenced" style="height:'
               f'{100 * failed / most:.1f}%"></i><i class="used" style="'
               f'height:{100 * ended / most:.1f}%"></i></span>')
    yield (f'</div><p class="ends"><small>{days[0]}</small><small>at most '
           f'{most} a day</small><small>{days[-1]}</small></p>')


def _by_domain(found, domains, level) -> Iterator[str]:
    """Yield HTML of the hosts by domain of a level, with the number of
    accelerators in each domain."""
    hosts = collections.defaultdict(set)
    for host in found:
        hosts[domains.get(host, {}).get(level, '')].add(host)
    yield f'<h2>Hosts by {_text(level)}</h2>'
    for domain in sorted(hosts, key=lambda domain: (not domain, domain)):
        there = hosts[domain]
        amounts = _of(p for host in there for p in found[host])
        yield (f'<p class="list">{_text(domain) or "without"}: {len(there)} '
               f'host{"s" * (len(there) > 1)}, {_said(amounts)}</p>')
        yield from _map(found, there)


def _map(found, shown) -> Iterator[str]:
    """Yield HTML with a tile for each host in ``shown``."""
    yield '<div class="map">'
    for position, (host, providers) in enumerate(found.items()):
        if host not in shown:
            continue
        amounts = _of(providers)
        # even a few failures among many devices must be visible
        fenced, suspect = (
            max(20, 100 * number / amounts.total()) if number else 0
            for number in (amounts['fenced'], amounts['suspect']))
        suspect += fenced
        used = suspect + (100 - suspect) * amounts['used'] / max(
            1, amounts['used'] + amounts['free'])
        yield (f'<a href="#h{position}" title="{_text(host)}: '
               f'{_said(amounts)}" aria-label="{_text(host)}" '
               f'style="--x:{fenced:.0f};--s:{suspect:.0f};'
               f'--u:{used:.0f}"></a>')
    yield '</div>'


def _part(host: str, product: str, alike: list[tree.Provider],
          facts: Facts) -> str:
    return (f'<div class="part"><span>{_text(product)}</span>'
            f'<div class="cells">'
            + ''.join(cell for provider in alike for cell in _cells(
                host, provider, len(alike) > 1, facts))
            + '</div></div>')


def _cells(host, provider: tree.Provider, is_one_of_several, facts,
           ) -> Iterator[str]:
    function = facts.functions.get(provider.uuid, provider.function or '')
    part = provider.name.removeprefix(naming.device_provider_name(host, ''))
    told = ' '.join(f'<small>{_text(one)}</small>' for one in (
        function, part if is_one_of_several else '') if one)
    amounts = _amounts(provider)
    for consumer, number in sorted(provider.held.items()):
        # Nova accepts an empty name
        name = _text(facts.servers.get(consumer) or consumer)
        yield _cell('used', number, name, told,
                    f'{provider.name}: server {consumer}')
    for state in 'free', 'suspect', 'fenced':
        if amounts[state]:
            yield _cell(state, amounts[state], '', told,
                        f'{provider.name}: {_STATES[state]}')


def _cell(state: str, number: int, name: str, told: str, title: str) -> str:
    if not name:
        name = (f'{number} ' if number > 1 else '') + _word(state)
    elif number > 1:
        name = f'{name} × {number}'
    size = f' style="--n:{number}"' if number > 1 else ''
    return (f'<span class="c {state}"{size} title="{_text(title)}">{name} '
            f'{told}</span>')
