# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The first steps of each story as a picture, for README and the pages.

It has no width of its own above that of a phone, and follows the reader's
choice of light or dark.
"""

import html
import pathlib

from tests.demo import screen

#: pixels, before the picture is scaled
_WIDTH, _MARGIN, _GAP = 480, 12, 8
_CAPTION, _HOST, _CARD = 60, 24, 48
#: cards beside each other in a host
_COLUMNS = 4
_FRAME = _CAPTION + _HOST + _CARD + 16

_STYLE = '''\
svg { color-scheme: light dark; background: #fff }
text { font: 16px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 15.5px }
.caption { font-size: 18px; font-weight: 600 }
.host, .server { fill: #59636e }
.box { fill: #f6f8fa } .card { fill: #fff; stroke: #d1d9e0 }
.changed { stroke: #1a7f37; stroke-width: 2 }
.failed { stroke: #cf222e; stroke-width: 2 }
.new { fill: #1a7f37; font-weight: 600 }
.used { fill: #0969da }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117 } text { fill: #f0f6fc }
  .host, .server { fill: #9198a1 } .box { fill: #151b23 }
  .card { fill: #0d1117; stroke: #3d444d }
  .changed { stroke: #3fb950 } .new { fill: #3fb950 } .used { fill: #4493f8 }
  .failed { stroke: #f85149 }
}'''


def draw(steps: list[screen.Step]) -> str:
    """Return the picture as SVG, a frame for each step."""
    frame = _FRAME + (_CARD + _GAP) * (_rows(steps[0]) - 1)
    height = frame * len(steps) + _MARGIN
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} '
             f'{height}" role="img">',
             f'<title>{html.escape("; ".join(s.title for s in steps))}</title>',
             f'<style>{_STYLE}</style>']
    for number, step in enumerate(steps):
        parts += _frame(step, number * frame)
    return '\n'.join([*parts, '</svg>', ''])


def write(steps: list[screen.Step], name: str = 'demo') -> pathlib.Path:
    """Write the picture of the first four states of a story."""
    path = pathlib.Path('build') / f'{name}.svg'
    path.parent.mkdir(exist_ok=True)
    shown = [step for step in steps if step.after != step.before
             or step is steps[0]]
    path.write_text(draw(shown[:4]))
    return path


def _rows(step):
    hosts = [card.host for card in step.after]
    return -(-hosts.count(hosts[0]) // _COLUMNS)


def _frame(step, top):
    first, _, rest = step.title.partition('. ')
    parts = [_text(_MARGIN, top + 28, first, 'caption'),
             _text(_MARGIN, top + 50, rest, 'more')]
    before = {(card.host, card.name): card for card in step.before}
    hosts: dict[str, list[screen.Card]] = {}
    for card in step.after:
        hosts.setdefault(card.host, []).append(card)
    width = (_WIDTH - 2 * _MARGIN - _GAP) // len(hosts)
    height = _HOST + (_CARD + _GAP) * _rows(step)
    for column, (host, cards) in enumerate(hosts.items()):
        left = _MARGIN + column * (width + _GAP)
        parts += [_box(left, top + _CAPTION, width, height, 'box'),
                  _text(left + 8, top + _CAPTION + 18, host, 'host')]
        columns = min(len(cards), _COLUMNS)
        wide = (width - _GAP * (columns + 1)) // columns
        for n, card in enumerate(cards):
            row, column = divmod(n, columns)
            parts += _card(
                left + _GAP + column * (wide + _GAP),
                top + _CAPTION + _HOST + row * (_CARD + _GAP), wide, card,
                before.get((host, card.name), card))
    return parts


def _card(left, top, width, card, old):
    changed = ' changed' if card != old else ''
    new = 'new' if card.function != old.function else ''
    used = ' used' if card.server else ''
    if width < 100:
        kind = ' failed' if card.function else changed
        return [_box(left, top, width, _CARD, f'card{kind}'),
                _text(left + 5, top + 20, card.function or card.name,
                      'small'),
                _text(left + 5, top + 40, card.server or 'free',
                      f'small server{used}')]
    user = f'server {card.server}' if card.server else 'free'
    return [_box(left, top, width, _CARD, f'card{changed}'),
            _text(left + 8, top + 20, f'{card.name}  {card.function}', new),
            _text(left + 8, top + 40, user, f'server{used}')]


def _box(x, y, width, height, kind):
    return (f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
            f'class="{kind}"/>')


def _text(x, y, text, kind):
    named = f' class="{kind}"' if kind else ''
    return f'<text x="{x}" y="{y}"{named}>{html.escape(text)}</text>'
