# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Draw the pictures of the pages: python docs/pictures.py writes docs/source.

Each is as wide as a phone, so that its text is as large there as the text of
the page, and has the colors of light and dark.
"""

import ast
import datetime
import html
import json
import pathlib
import re
import textwrap

from lxml import etree
from lxml import html as lxml_html

from nova_accel.cmd import page_html
from nova_accel.cmd import tree
from nova_accel import naming

#: of a picture, in pixels
WIDTH = 360
#: of a line of text; what a letter of a text of 13 pixels takes at most
LINE, LETTER = 17, 7.0
#: of two hosts in the picture of packing: the GPUs in use
PACKED = {'stack': (6, 0), 'spread': (3, 3)}

_STYLE = '''\
svg { color-scheme: light dark; background: #fff }
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.head { font-size: 15px; font-weight: 600 } .small { fill: #59636e }
.box { fill: #f6f8fa; stroke: #d1d9e0 }
.ours { fill: #ddf4ff; stroke: #0969da } .used { fill: #0969da }
.bad { fill: #ffebe9; stroke: #cf222e } .good { fill: #dafbe1; stroke: #1a7f37 }
path { fill: none; stroke: #59636e; stroke-width: 1.5 }
.tip { fill: #59636e; stroke: none }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117 } text { fill: #f0f6fc }
  .small { fill: #9198a1 } .box { fill: #151b23; stroke: #3d444d }
  .ours { fill: #121d2f; stroke: #4493f8 } .used { fill: #4493f8 }
  .bad { fill: #25171c; stroke: #f85149 }
  .good { fill: #12261e; stroke: #3fb950 }
  path { stroke: #9198a1 } .tip { fill: #9198a1 }
}'''


class Picture:
    """What is drawn, from the top to the bottom."""

    def __init__(self, title: str):
        self.title = title
        self.height = 0
        self._parts: list[str] = []

    def box(self, x, y, width, *lines, kind='box', height=0):
        """Draw a box; the first line is its name.

        :raises ValueError: a line is wider than the box.
        """
        height = height or LINE * len(lines) + 10
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
            f'class="{kind}"/>')
        first = y + (height - LINE * len(lines)) // 2 + 13
        for number, line in enumerate(lines):
            self.text(x + 8, first + LINE * number, line,
                      'small' if number else '', width - 10)
        self.height = max(self.height, y + height)
        return y + height

    def text(self, x, y, text, kind='', width=0):
        if len(text) * LETTER > (width or WIDTH - x):
            raise ValueError(f'{text!r} is too wide')
        named = f' class="{kind}"' if kind else ''
        self._parts.append(f'<text x="{x}" y="{y}"{named}>'
                           f'{html.escape(text)}</text>')
        self.height = max(self.height, y + 4)

    def paragraph(self, y, *lines):
        """Write lines below the drawing."""
        for number, line in enumerate(lines):
            self.text(8, y + number * LINE, line, 'small')

    def arrow(self, *points):
        """Draw an arrow along points, (x, y) each; the last part is upright
        or level."""
        way = ' L'.join(f'{x},{y}' for x, y in points)
        (a, b), (x, y) = points[-2:]
        across, down = (x > a) - (x < a), (y > b) - (y < b)
        left, right = ((x - 7 * across - 4 * down, y - 7 * down - 4 * across),
                       (x - 7 * across + 4 * down, y - 7 * down + 4 * across))
        self._parts += [
            f'<path d="M{way}"/>',
            f'<path class="tip" d="M{x},{y} L{left[0]},{left[1]} '
            f'L{right[0]},{right[1]} z"/>']

    def column(self, y, rows, width, height, x, gap=18, arrows=True):
        """Draw boxes below each other, with lines beside each.

        :param rows: (kind of box, its name, lines beside it) of each.
        :param x: of the lines.
        :returns: y of what comes next.
        """
        middle = 8 + width // 2
        for number, (kind, name, *lines) in enumerate(rows):
            if number and arrows:
                self.arrow((middle, y - gap), (middle, y))
            self.box(8, y, width, name, kind=kind, height=height)
            for row, line in enumerate(lines):
                self.text(x, y + height // 2 - 4 + LINE * row, line)
            y += height + gap
        return y

    def svg(self) -> str:
        """Return the picture as SVG."""
        return '\n'.join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
            f'{self.height + 12}" role="img">',
            f'<title>{html.escape(self.title)}</title>',
            f'<style>{_STYLE}</style>', *self._parts, '</svg>', ''])


def request() -> Picture:
    """What happens between the flavor and the guest."""
    picture = Picture('The way of a request from nova-api to the guest')
    rows = (
        ('box', 'user', 'creates a server with a', 'flavor'),
        ('ours', 'nova-api', 'reads the device profile:', 'request groups'),
        ('box', 'Placement', 'has candidates, and the',
         'traits of what is loaded'),
        ('ours', 'nova-scheduler', 'filter: best device first',
         'weigher: best host'),
        ('ours', 'nova-compute', 'claims the device', 'in the claim store'),
        ('box', 'Glance', 'gives the bitstream, if the',
         'cache does not have it'),
        ('ours', 'card', 'is programmed; the function', 'is read back'),
        ('box', 'Placement', 'gets the traits of what is', 'loaded now'),
        ('box', 'libvirt', 'starts the guest with its', 'device'))
    picture.column(10, rows, 124, 36, 142)
    return picture


def region() -> Picture:
    """The life of an FPGA region."""
    picture = Picture('The life of an FPGA region')
    x, width, right = 56, 172, 228
    free = picture.box(x, 10, width, 'free', 'carries a function', kind='good')
    picture.arrow((142, free), (142, free + 40))
    picture.text(150, free + 25, 'a server wants another one')
    made = picture.box(x, free + 40, width, 'being programmed',
                       'then read back', kind='ours')
    picture.arrow((142, made), (142, made + 30))
    used = picture.box(x, made + 30, width, 'in use', 'by a server',
                       kind='ours')
    picture.arrow((142, used), (142, used + 40))
    picture.text(150, used + 25, 'the server is gone')
    cleaned = picture.box(x, used + 40, width, 'being cleaned',
                          'a build for it waits', kind='ours')
    picture.arrow((142, cleaned), (142, cleaned + 40))
    picture.text(150, cleaned + 25, 'this fails')
    picture.box(x, cleaned + 40, width, 'fenced', 'reserved in Placement',
                kind='bad')
    # clean
    level = cleaned - 22
    picture.arrow((x, level), (20, level), (20, 32), (x, 32))
    # loaded already
    picture.arrow((right, 32), (344, 32), (344, used - 30), (right, used - 30))
    picture.text(right + 8, 26, 'wants this one')
    # a programming that failed
    picture.arrow((right, made - 12), (282, made - 12), (282, level),
                  (right, level))
    picture.text(288, level + 4, 'it failed')
    # tried again
    picture.arrow((x, cleaned + 62), (36, cleaned + 62), (36, level + 12),
                  (x, level + 12))
    y = cleaned + 112
    picture.paragraph(
        y, 'Left: clean, the function stays loaded.',
        'A fenced region is cleaned again each',
        '[accel] discovery_interval.')
    return picture


def hands() -> Picture:
    """Whose hand a device is in between two servers."""
    picture = Picture('A device between two servers')
    rows = (
        ('ours', 'server A', 'has the claim; Placement has', 'the allocation'),
        ('box', 'the host', 'libvirt returns the function', 'to the host'),
        ('box', 'reset', 'what the vendor has the reset', 'clear'),
        ('box', 'cleared', 'disk erased, region programmed,',
         'memory overwritten'),
        ('box', 'recorded', 'who had it and what was done:',
         'nova-accel handovers'),
        ('ours', 'server B', 'a build that came meanwhile', 'has waited'))
    y = picture.column(10, rows, 104, 40, 120)
    picture.column(y, (
        ('bad', 'a step fails', 'reserved; tried again each',
         'discovery_interval'),
        ('bad', 'operator', 'that policy: reserved until you',
         'lower it in Placement'),
        ('bad', 'disabled', 'nova-accel disable: no server',
         'until nova-accel enable')), 104, 40, 120, 10, False)
    return picture


def packing() -> Picture:
    """Where six servers of one GPU go."""
    picture = Picture('Six servers of one GPU each, on two hosts of eight')
    y = 8
    for policy, hosts in PACKED.items():
        default = ' (the default)' if policy == 'stack' else ''
        picture.text(8, y + 14, f'packing = {policy}{default}', 'head')
        for number, used in enumerate(hosts):
            left = 8 + 176 * number
            picture.box(left, y + 24, 168, height=82)
            picture.text(left + 8, y + 41, f'compute{number + 1}', 'small')
            for gpu in range(8):
                picture.box(left + 8 + gpu % 4 * 39, y + 48 + gpu // 4 * 27,
                            34, kind='used' if gpu < used else 'good',
                            height=22)
        y += 124
        picture.text(8, y, 'A server of eight GPUs still fits.' if 0 in hosts
                     else 'No server of eight GPUs fits any more.', 'small')
        y += 22
    return picture


def processes() -> Picture:
    """Where the plugin is in Nova's processes."""
    picture = Picture('nova_accel in the processes of Nova')
    y = 8
    for name, *lines in (
            ('nova-api', 'checks flavors, reads profiles',
             'by the entry point of validators'),
            ('nova-scheduler', 'AcceleratorFilter, AcceleratorWeigher',
             'by [filter_scheduler] in nova.conf'),
            ('nova-compute', "AccelLibvirtDriver: Nova's own, and",
             'the devices; by compute_driver')):
        picture.box(8, y, 344, height=84)
        picture.text(16, y + 18, name, 'head')
        picture.box(16, y + 28, 328, *lines, kind='ours')
        y += 94
    picture.arrow((60, y - 10), (60, y + 14))
    picture.arrow((210, y - 10), (210, y + 14))
    picture.box(8, y + 14, 148, 'claim store', 'a file of SQLite',
                kind='ours')
    picture.box(168, y + 14, 184, 'privileged process', 'root, a few functions',
                kind='ours')
    picture.arrow((260, y + 58), (260, y + 82))
    picture.box(168, y + 82, 184, 'kernel', 'sysfs, ioctls of drivers')
    picture.box(8, y + 82, 148, 'Placement, Glance', 'asked over HTTP')
    return picture


def hosts() -> Picture:
    """Which file is on which host."""
    picture = Picture('Which files of nova_accel are on which host')
    y = 8
    for name, *files in (
            ('each of these hosts', 'the package, in the environment of Nova'),
            ('nova-api', '/etc/nova/device_profiles/*.yaml'),
            ('nova-scheduler', 'nova.conf: [filter_scheduler], the filter',
             'and the weigher'),
            ('nova-compute', 'nova.conf: compute_driver, [accel]',
             'and [service_user], for bitstreams',
             'sudo for nova-rootwrap, rootwrap.d',
             'state_path: accel_claims_<host>.sqlite',
             'the udev rule for disks, if you give any')):
        height = 30 + LINE * len(files)
        picture.box(8, y, 344, height=height, kind='ours' if name.startswith(
            'each') else 'box')
        picture.text(16, y + 20, name, 'head')
        for number, line in enumerate(files):
            picture.text(16, y + 40 + LINE * number, line)
        y += height + 10
    return picture


def migration() -> Picture:
    """Who has which device in a live migration with detach."""
    picture = Picture('A live migration that detaches devices')
    rows = (
        ('box', 'scheduler', 'selects a host'),
        ('ours', 'new host', 'claims devices, programs them;',
         'a failure ends the migration here'),
        ('ours', 'old host', 'detaches the devices: the guest',
         'has 20 s to release them'),
        ('bad', 'guest moves', 'without devices, as long as its',
         'memory is copied'),
        ('ours', 'new host', 'attaches the new devices'),
        ('ours', 'old host', 'cleans the old devices'))
    y = picture.column(10, rows, 104, 40, 120)
    picture.paragraph(
        y, 'With accel:live_migration=transparent the guest',
        'keeps its devices: QEMU copies their state.')
    return picture


def groups() -> Picture:
    """Devices that go to one guest only together."""
    picture = Picture('An IOMMU group, and a set of GPUs')
    picture.text(8, 22, 'An IOMMU group', 'head')
    picture.box(8, 32, 344, height=74)
    picture.box(16, 40, 158, '3b:00.0  GPU', 'to the guest', kind='ours')
    picture.box(186, 40, 158, '3b:00.1  sound', 'to the same guest',
                kind='ours')
    picture.text(16, 98, 'A disk in this group: no guest gets any of it.',
                 'small')
    picture.text(8, 138, 'A set: GPUs behind NVSwitches', 'head')
    picture.box(8, 148, 344, height=92)
    for gpu in range(8):
        picture.box(16 + gpu % 4 * 83, 156 + gpu // 4 * 30, 78,
                    f'GPU {gpu}', kind='ours', height=25)
    picture.text(16, 232, 'One server gets all of them, or none.', 'small')
    return picture


def _holds() -> list[tuple[str, str]]:
    """Return (kind, who lifts it), from the table of inventory/holds.py."""
    path = pathlib.Path(__file__).parents[1] / 'nova_accel/inventory/holds.py'
    table = ast.get_docstring(ast.parse(path.read_text())).split('\n')
    border = [n for n, line in enumerate(table) if line.startswith('====')]
    starts = [found.start() for found in re.finditer('=+', table[border[0]])]
    rows: list[list[str]] = []
    for line in table[border[1] + 1:border[2]]:
        if line[:1] != ' ':
            rows.append([line[:starts[1]].rstrip(' *'), ''])
        rows[-1][1] += ' ' + line[starts[3]:].strip()
    return [(kind, lifted.strip()) for kind, lifted in rows]


def states() -> Picture:
    """The states of a handle, and what withholds it."""
    picture = Picture('The states of a device')
    x, width = 8, 200
    for number, (kind, name, line) in enumerate((
            ('good', 'free', 'a server can get it'),
            ('ours', 'held', 'a server has it'),
            ('ours', 'releasing', 'it is cleaned'))):
        y = 10 + 70 * number
        picture.box(x, y, width, name, line, kind=kind)
        if number:
            picture.arrow((60, y - 26), (60, y))
    picture.arrow((x + width, 172), (240, 172), (240, 32), (x + width, 32))
    picture.text(246, 96, 'clean')
    picture.arrow((60, 194), (60, 220))
    picture.text(70, 212, 'a hold begins, from each of these states')
    by_operator = [kind for kind, lifted in _holds()
                   if re.match('the operator|nova-accel', lifted)]
    # servers are sent to a region that is cleaned, and get suspect devices last
    others = [kind for kind, _ in _holds()
              if kind not in (*by_operator, 'cleaning', 'suspect')]
    y = 220
    for title, kinds in (
            ('withheld until you act', by_operator),
            ('withheld until the cause ends', others)):
        lines = textwrap.wrap(', '.join(kinds), 46)
        height = 30 + LINE * len(lines)
        picture.box(8, y, 344, kind='bad', height=height)
        picture.text(16, y + 20, title, 'head')
        for number, line in enumerate(lines):
            picture.text(16, y + 40 + LINE * number, line)
        y += height + 10
    return picture


class Screenshot:
    """A page as a browser shows it on a phone, of this height."""

    def __init__(self, title: str, page: str, height: int):
        self.title = title
        self.height = height
        self._page = lxml_html.fromstring(page)

    def svg(self) -> str:
        """Return the page inside of an SVG."""
        body = self._page.find('body')
        body.set('xmlns', 'http://www.w3.org/1999/xhtml')
        for link in body.iter('a'):
            # a picture has no links
            link.attrib.pop('href', None)
        background = '\n'.join(
            line for line in _STYLE.splitlines() if 'svg {' in line)
        light, dark = re.findall(r'background: (#\w+)', background)
        return '\n'.join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
            f'{self.height}" role="img">',
            f'<title>{html.escape(self.title)}</title>',
            f'<style>{self._page.findtext("head/style").strip()}',
            f'svg {{ background: {light} }} @media (prefers-color-scheme: '
            f'dark) {{ svg {{ background: {dark} }} }}</style>',
            f'<foreignObject width="{WIDTH}" height="{self.height}">',
            etree.tostring(body, encoding='unicode', with_tail=False),
            '</foreignObject>', '</svg>', ''])


def page() -> Screenshot:
    """The page of nova-accel page, for two hosts with GPUs and one FPGA."""
    gpu = frozenset(('CUSTOM_GPU_NVIDIA', 'CUSTOM_GPU_NVIDIA_L40S'))
    fpga = frozenset(('CUSTOM_FPGA_INTEL', 'CUSTOM_FPGA_INTEL_PAC_D5005'))

    def provider(host, part, traits, total, held, reserved=0):
        return tree.Provider(
            host, part, naming.device_provider_name(host, part), host, 1,
            'CUSTOM_ACCELERATOR_' + ('GPU' if traits is gpu else 'FPGA'), total,
            reserved, traits, held)

    hosts = {
        'gpu1': [provider('gpu1', 'pool', gpu, 8, {'train': 8})],
        'gpu2': [provider('gpu2', 'pool', gpu, 8, {
            'web1': 1, 'web2': 1, 'render': 2}, 1)],
        'fpga1': [provider('fpga1', f'region{number}', fpga, 1, held)
                  for number, held in enumerate(({'filter': 1}, {}))]}
    return Screenshot('Output of nova-accel page', page_html.draw(
        page_html.Facts(
            hosts, datetime.datetime(2026, 11, 24, 7, 0),
            {name: name for providers in hosts.values()
             for one in providers for name in one.held},
            {'region0': 'aes-gcm', 'region1': 'zip'},
            [(flavor, servers, 'CUSTOM_ACCELERATOR_GPU (on 2 of 2 hosts)')
             for flavor, servers in (('gpu1', 3), ('gpu8', 0))],
            findings=[(hosts['gpu2'][0].name,
                       'quarantined: fatal_errors')])), 1090)


def dashboard() -> Picture:
    """The panels of the dashboard for Grafana, without values."""
    board = json.loads((pathlib.Path(__file__).parents[1] / 'etc/nova_accel'
                        / 'grafana/nova_accel.json').read_text())
    picture = Picture('The panels of the dashboard')
    picture.text(8, 18, board['title'], 'head')
    top = below = 28
    row = 0
    kinds = {'stat': 'number', 'timeseries': 'graph'}
    for panel in board['panels']:
        place = panel['gridPos']
        if place['y'] != row:
            row, top = place['y'], below
        below = picture.box(
            8 + place['x'] * 14, top, place['w'] * 14 - 6, panel['title'],
            kinds.get(panel['type'], panel['type']), height=60) + 8
    return picture


PICTURES = {picture.__name__: picture for picture in (
    request, region, hands, packing, processes, hosts, migration, groups,
    states, dashboard, page)}


def main():
    for name, draw in PICTURES.items():
        path = pathlib.Path(__file__).parent / 'source' / f'{name}.svg'
        path.write_text(draw().svg())


if __name__ == '__main__':
    main()
