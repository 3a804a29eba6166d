# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The demo as one HTML file: before and after of each step."""

import html
import pathlib

from tests.demo import screen

_HEAD = '''<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>nova_accel: the demo</title>
<style>
:root { color-scheme: light dark; --line: #8888; --soft: #8882;
        --new: #0a7d38; --use: #1f6feb; }
@media (prefers-color-scheme: dark) { :root { --new: #4cc38a; --use: #79b8ff } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem;
       padding: 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.1rem; margin: 0 0 .5rem }
section { border-top: 1px solid var(--line); padding: 1rem 0 }
.states { display: grid; gap: 1rem;
          grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)) }
figure { margin: 0 } figcaption { font-size: .85rem; opacity: .75 }
.hosts { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem }
.host { background: var(--soft); border-radius: .5rem; padding: .5rem }
.host > b { font-size: .8rem; font-weight: 600 }
.card { border: 1px solid var(--line); border-radius: .35rem;
        font-size: .85rem; margin-top: .35rem; padding: .2rem .5rem }
.card.changed { border-color: var(--new); box-shadow: 0 0 0 1px var(--new) }
.new { color: var(--new); font-weight: 600 }
.user { color: var(--use) } .free { opacity: .75 }
.user, .free { display: block }
pre { background: var(--soft); border-radius: .35rem; overflow-x: auto;
      padding: .5rem } p { margin: .5rem 0; overflow-wrap: anywhere }
</style></head><body>
<h1>nova_accel: FPGA functions and GPUs reach guests on real Nova</h1>
'''
_INTRODUCTION = '''Written by <code>make demo</code> from what nova-api,
Placement and the simulated cards answered. Real nova-api, conductor, scheduler,
two nova-computes, Placement and Glance; simulated cards and hypervisor. Each
statement was checked before it was written.'''


def write(steps, folder='build', introduction=_INTRODUCTION) -> pathlib.Path:
    """Write the page of these steps.

    :param introduction: HTML that says what is real in them.
    :returns: its path, relative to the current directory.
    """
    path = pathlib.Path(folder) / 'demo.html'
    path.parent.mkdir(exist_ok=True)
    parts = [_HEAD, f'<p>{introduction}</p>\n']
    for number, step in enumerate(steps, 1):
        parts.append(_section(number, step))
    path.write_text(''.join(parts) + '</body></html>\n')
    return path


def _section(number, step):
    text = html.escape
    parts = [f'<section><h2>{number}. {text(step.title)}</h2>']
    if step.commands:
        parts.append('<pre>' + text('\n'.join(step.commands)) + '</pre>')
    if step.before and step.before != step.after:
        parts.append('<div class="states">'
                     + _figure('before', step.before, step.before)
                     + _figure('after', step.after, step.before) + '</div>')
    elif step.after and not step.before:
        parts.append(_figure('', step.after, step.after))
    parts += [f'<p>{text(line)}</p>' for line in step.lines]
    return '\n'.join(parts) + '</section>\n'


def _figure(caption, cards, before):
    hosts: dict[str, list[str]] = {}
    for card, old in zip(cards, before):
        hosts.setdefault(card.host, []).append(_card(card, old))
    boxes = ''.join(f'<div class="host"><b>{host}</b>{"".join(found)}</div>'
                    for host, found in hosts.items())
    return (f'<figure><figcaption>{caption}</figcaption>'
            f'<div class="hosts">{boxes}</div></figure>')


def _card(card: screen.Card, old: screen.Card) -> str:
    user = (f'<span class="user">server {html.escape(card.server)}</span>'
            if card.server else '<span class="free">free</span>')
    new = ' class="new"' if card.function != old.function else ''
    return (f'<div class="card{" changed" if card != old else ""}">'
            f'{card.name} <span{new}>'
            f'{html.escape(card.function)}</span>{user}</div>')
