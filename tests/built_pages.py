# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find what went wrong in pages that were built without a warning.

    python -m tests.built_pages docs/build/html

Prints markup that readers would see as text, and links within the pages that
lead nowhere; ends with 1 where there are some.
"""

from html import parser
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


def main():
    found = errors(pathlib.Path(sys.argv[1]).resolve())
    print('\n'.join(found) or 'No page shows markup or leads nowhere.')
    sys.exit(bool(found))


if __name__ == '__main__':
    main()
