# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Draw a text of arrows between columns as SVG: draw.py TEXT > PICTURE.

The form of the text is explained in docs/source/request.txt.
"""

import html
import sys

#: of the picture, in pixels
COLUMN, ROW, TOP, LINE = 144, 40, 44, 14
STYLE = '''\
text { font: 12px sans-serif; fill: #222; text-anchor: middle; }
rect { fill: #eef3f8; stroke: #447; }
line { stroke: #447; }
.life { stroke: #bbb; stroke-dasharray: 3; }
.under { stroke: #fff; stroke-width: 4px; paint-order: stroke; }'''


def svg(text: str) -> str:
    """Return the picture.

    :raises KeyError: an arrow names a column that the first line lacks.
    """
    first, *rest = [line for line in text.splitlines()
                    if line.strip() and not line.startswith('#')]
    names = [name.strip() for name in first.split('|')]
    at = {name: COLUMN // 2 + COLUMN * i for i, name in enumerate(names)}
    width, height = COLUMN * len(names), TOP + ROW * (len(rest) + 1)
    drawn = [_line(x, TOP - 14, x, height - 10, 'class="life"')
             for x in at.values()]
    for x, name in zip(at.values(), names):
        drawn += _box(x, TOP // 2, COLUMN - 16, [name])
    for number, line in enumerate(rest):
        y = TOP + ROW * (number + 1) - LINE // 2
        who, _, what = line.partition(': ')
        source, arrow, target = who.partition(' -> ')
        if arrow:
            a, b = at[source], at[target]
            drawn += [_line(a, y, b, y, 'marker-end="url(#head)"'),
                      _text((a + b) // 2, y - 5, what)]
        else:
            lines = what.split(' / ')
            drawn += _box(at[who], y - 2,
                          7 * max(map(len, lines)) + 8, lines)
    return '\n'.join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
        f'{height}" width="{width}" height="{height}">',
        f'<style>{STYLE}</style>',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" '
        'markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#447"/></marker></defs>',
        f'<rect width="{width}" height="{height}" '
        'style="fill: white; stroke: none"/>',
        *drawn, '</svg>', ''])


def _line(x1, y1, x2, y2, more):
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {more}/>'


def _text(x, y, text):
    return f'<text class="under" x="{x}" y="{y}">{html.escape(text)}</text>'


def _box(x, y, width, lines):
    height = LINE * len(lines) + 8
    top = y - height // 2
    yield (f'<rect x="{x - width // 2}" y="{top}" width="{width}" '
           f'height="{height}" rx="4"/>')
    for number, line in enumerate(lines):
        yield (f'<text x="{x}" y="{top + LINE * (number + 1)}">'
               f'{html.escape(line)}</text>')


if __name__ == '__main__':
    with open(sys.argv[1]) as file:
        sys.stdout.write(svg(file.read()))
