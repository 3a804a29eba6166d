# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find what went wrong in pages that were built without a warning.

    python -m tests.built_pages docs/build/html

Prints markup that readers would see as text, links within the pages that lead
nowhere, and words for which the search of the site does not find the page that
has the answer; ends with 1 if there are some.
"""

from html import parser
import json
import pathlib
import re
import sys
from urllib import parse

#: what the text of a page does not have, outside of code
MARKUP = {
    'a row of punctuation': re.compile(r'([=~^"*+#-])\1{3,}'),
    'a directive or a label': re.compile(r'(^|\s)\.\. [\w|\[]'),
    'backticks': re.compile(r'`'),
    'a colon that makes a block': re.compile(r'(^|[^:\w])::(\s|$)|\w::\s*$'),
    'emphasis': re.compile(r'(^|\s)\*{1,2}\w[^*]*\w\*{1,2}(\W|$)'),
    'a reference': re.compile(r'[A-Za-z0-9]_(\s|$)'),
    'a directive\'s option': re.compile(r'^\s*:[\w-]+:(\s|$)'),
}
#: what operators search for -> the page with the answer
SEARCHES = {
    'nouveau': 'gpu-hosts', 'blacklist': 'gpu-hosts', 'audio': 'questions',
    'driverctl': 'gpu-hosts', 'nvidia-smi': 'gpu-hosts',
    'above 4G decoding': 'gpu-hosts', 'q35': 'gpu-hosts',
    'simulate host': 'simulate', 'capture': 'simulate',
    'hot plug': 'questions', 'permissions': 'questions',
    'SELinux': 'questions', 'AppArmor': 'questions', 'Horizon': 'questions',
    'Terraform': 'questions', 'RDMA': 'questions', 'billing': 'questions',
    'monitoring': 'questions', 'DCGM': 'questions', 'exporter': 'questions',
    'backup': 'operate/host', 'wipe': 'questions', 'erase': 'questions',
    'windows': 'questions', 'code 43': 'questions', 'license': 'questions',
    'kayobe': 'questions', 'audit': 'operate/handover',
    'resize': 'operations', 'quota': 'quotas', 'MIG': 'devices/vgpu',
    'NVSwitch': 'devices/gpu', 'alias': 'migration',
    'No valid host': 'troubleshooting', 'uninstall': 'upgrade',
    'isolate': 'questions', 'NUMA': 'operate/choice',
    'prometheus': 'operate/health', 'live migration': 'live-migration',
    'cyborg': 'migration', 'sudo': 'installation',
    'dashboard': 'questions', 'grafana': 'operate/health',
    'alert': 'operate/health', 'ECC': 'operate/health',
    'replace card': 'operate/watch', 'maintenance': 'operate/watch',
    'evacuate': 'operations', 'shelve': 'operations',
    'downgrade': 'upgrade', 'rollback': 'upgrade',
    'Ansible': 'installation', 'Kolla': 'installation',
    'DevStack': 'installation', 'DRA': 'comparison',
    'KubeVirt': 'comparison', 'Blazar': 'quotas',
    'fence': 'glossary', 'NVLink': 'devices/gpu',
    'GPUDirect': 'questions', 'huge pages': 'devices/index',
    'IOMMU group': 'devices/index', 'SR-IOV': 'devices/index',
    'vfio-pci': 'gpu-hosts', 'one-time-use': 'operate/handover',
    'format disk': 'devices/nvme', 'OVMF': 'devices/index',
    'bash completion': 'operate/commands', 'colors': 'operate/commands',
    'man page': 'reference', 'first server': 'quickstart',
    'broken card': 'troubleshooting', 'broken GPU': 'troubleshooting',
    'Xid': 'troubleshooting', 'fallen off the bus': 'troubleshooting',
    'fenced': 'troubleshooting', 'Deleting': 'troubleshooting',
    'paused server': 'troubleshooting', 'hanging': 'troubleshooting',
    'quarantined': 'operate/withheld', 'in-use': 'operate/withheld',
    'does not start': 'troubleshooting', 'exchanged': 'troubleshooting',
    'Xid 79': 'troubleshooting', 'GPU lost': 'troubleshooting',
    'dead card': 'troubleshooting', 'card gone': 'troubleshooting',
    'failed GPU': 'troubleshooting', 'ECC errors': 'troubleshooting',
    'disk has data': 'troubleshooting', 'reset failed': 'troubleshooting',
    'GPU not in guest': 'troubleshooting', 'error 802': 'troubleshooting',
    'server ERROR': 'troubleshooting', 'stuck': 'troubleshooting'}
#: elements whose text is as it stands
_CODE = {'pre', 'code', 'tt', 'kbd', 'script', 'style', 'title'}
_VOID = {'area', 'base', 'br', 'col', 'hr', 'img', 'input', 'link', 'meta',
         'source', 'wbr'}


class Page(parser.HTMLParser):

    def __init__(self, text: str):
        super().__init__()
        #: where links may lead
        self.anchors: set[str] = set()
        self.links: list[str] = []
        #: (line, text) outside of code
        self.texts: list[tuple[int, str]] = []
        self.errors: list[str] = []
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ('id', 'name')
                         if given.get(name)}
        if tag in ('a', 'link') and given.get('href'):
            self.links.append(given['href'])
        if given.get('src'):
            self.links.append(given['src'])
        for name in ('problematic', 'system-message'):
            if name in (given.get('class') or '').split():
                self.errors.append(f'{self.getpos()[0]}: docutils marks an '
                                   f'error here')
        if tag not in _VOID:
            self._inside.append(tag)

    def handle_endtag(self, tag):
        # an end that is left out ends with what is around it
        while tag in self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not _CODE & set(self._inside):
            for number, line in enumerate(data.splitlines()):
                if line.strip():
                    self.texts.append((self.getpos()[0] + number, line))


def errors(directory: pathlib.Path) -> list[str]:
    """Return what is wrong in the pages below a directory, one line each."""
    pages = {path: Page(path.read_text())
             for path in sorted(directory.rglob('*.html'))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(directory)
        found += [f'{name}:{error}' for error in page.errors]
        found += [f'{name}:{line}: shows {what} as text: {text.strip()}'
                  for line, text in page.texts
                  for what, pattern in MARKUP.items() if pattern.search(text)]
        for link in page.links:
            target, fragment = parse.urldefrag(link)
            if parse.urlsplit(target).scheme or target.startswith('//'):
                continue
            there = (path.parent / parse.unquote(
                target.partition('?')[0])).resolve() if target else path
            if not there.exists():
                found.append(f'{name}: leads to {link}, which is not there')
            elif fragment and there in pages and (
                    parse.unquote(fragment) not in pages[there].anchors):
                found.append(f'{name}: leads to {link}, and that page has no '
                             f'such place')
    return found if pages else [f'{directory} has no page']


def not_found(directory: pathlib.Path) -> list[str]:
    """Return what of SEARCHES the site does not find, one line each.

    As Sphinx' searchtools.js: a page is found if an index entry has the words,
    or if it has the stem of each word in its text or its titles.
    """
    # of sphinx, which not every environment of the tests has
    import snowballstemmer
    script = (directory / 'searchindex.js').read_text()
    index = json.loads(script[script.index('(') + 1:script.rindex(')')])
    stemmer = snowballstemmer.stemmer('english')

    def having(word):
        stem = stemmer.stemWord(word.lower())
        pages = set()
        for kind in 'terms', 'titleterms':
            found = index[kind].get(stem, [])
            pages |= {found} if isinstance(found, int) else {*found}
        return {index['docnames'][page] for page in pages}

    def indexed(words):
        return {index['docnames'][page]
                for entry, places in index['indexentries'].items()
                if words.lower() in entry for page, *_ in places}
    return [f'searching for "{words}" does not find {page}'
            for words, page in SEARCHES.items()
            if page not in indexed(words) | set.intersection(*(
                having(word) for word in re.findall(r'\w+', words)))]


def main():
    directory = pathlib.Path(sys.argv[1]).resolve()
    found = errors(directory) + not_found(directory)
    print('\n'.join(found) or 'No page shows markup or leads nowhere, and the '
                              'search finds what readers look for.')
    sys.exit(bool(found))


if __name__ == '__main__':
    main()
