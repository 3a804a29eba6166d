# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Look at the built pages in a real browser, at three widths, light and dark.

    python -m tests.pages_in_browser docs/build/html [more.html ...]

Prints which page is wider than the screen, which stays bright in the dark, and
which has a picture that cannot be read; ends with 1 where there are some, and
with 69 where there is no browser.
"""

import contextlib
import functools
from http import server
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading

#: CSS pixels: a phone, a tablet, a desk
WIDTHS = 360, 768, 1280
#: CSS pixels that the smallest text of a picture has at least
LETTER = 10
#: seconds for all pages
LIMIT = 240
UNFIT = 69
_BROWSERS = 'chromium', 'chromium-browser', 'google-chrome'
#: it asks nobody outside, and has no profile from before
_OPTIONS = ('--headless', '--no-sandbox', '--disable-gpu', '--no-first-run',
            '--disable-background-networking', '--disable-component-update',
            '--disable-sync', '--disable-quic', '--dump-dom',
            # until the title says that all was seen, in the page's own time
            '--virtual-time-budget=600000')
#: loads each page into a frame of each width, and writes down what it saw
_LOOK = '''<!doctype html><title>looking</title><body><script>
const pages = %(pages)s, widths = %(widths)s, found = [], drawn = {};
const frame = document.createElement('iframe');
document.body.append(frame);
frame.style.height = '900px';
async function look(page, width) {
  frame.style.width = width + 'px';
  await new Promise(done => { frame.onload = done; frame.src = page; });
  const root = frame.contentDocument.documentElement;
  if (root.scrollWidth > width + 1)
    found.push(page + ' is ' + root.scrollWidth + ' pixels wide where the '
               + 'screen has ' + width);
  for (const image of frame.contentDocument.images) {
    if (!image.src.endsWith('.svg')) continue;
    drawn[image.src] ??= await (await fetch(image.src)).text();
    const box = drawn[image.src].match(/viewBox="0 0 ([\\d.]+)/),
      sizes = [...drawn[image.src].matchAll(/font(?:-size)?: ([\\d.]+)px/g)],
      letter = Math.min(...sizes.map(size => size[1]))
        * image.getBoundingClientRect().width / box[1];
    if (letter < %(letter)s)
      found.push(page + ' has a picture whose text has ' + letter.toFixed(1)
                 + ' pixels where the screen has ' + width);
  }
  const color = frame.contentWindow.getComputedStyle(
    frame.contentDocument.body).backgroundColor.match(/[\\d.]+/g).map(Number);
  const clear = color.length > 3 && color[3] === 0;
  if (%(dark)s && (clear ? !frame.contentWindow.getComputedStyle(root)
      .colorScheme.includes('dark') : color[0] + color[1] + color[2] > 384))
    found.push(page + ' is bright in the dark');
}
(async () => {
  for (const page of pages) for (const width of widths)
    await look(page, width);
  document.body.innerHTML = '<pre id="found"></pre>';
  document.getElementById('found').textContent = JSON.stringify(
    [...new Set(found)]);
})();
</script></body>'''


class _Quiet(server.SimpleHTTPRequestHandler):

    def log_message(self, *_):
        pass


def look(folder: pathlib.Path, pages: list[str], browser: str, dark: bool,
         ) -> list[str]:
    """Return what is wrong with pages of a folder, one line each."""
    harness = folder / '.look.html'
    harness.write_text(_LOOK % {
        'pages': json.dumps(pages), 'widths': json.dumps(WIDTHS),
        'letter': LETTER, 'dark': json.dumps(dark)})
    http = server.ThreadingHTTPServer(
        ('127.0.0.1', 0), functools.partial(_Quiet, directory=folder))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        with tempfile.TemporaryDirectory() as profile:
            shown = subprocess.run(
                [browser, *_OPTIONS, f'--user-data-dir={profile}',
                 f'--blink-settings=preferredColorScheme={0 if dark else 1}',
                 f'http://127.0.0.1:{http.server_port}/{harness.name}'],
                stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=LIMIT).stdout
    finally:
        http.shutdown()
        http.server_close()
        with contextlib.suppress(FileNotFoundError):
            harness.unlink()
    found = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    if not found:
        return [f'{browser} did not come to an end: {shown[-300:]!r}']
    return json.loads(found[1].replace('&gt;', '>').replace('&lt;', '<')
                      .replace('&amp;', '&'))


def find() -> str | None:
    """Return the path of a browser."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def main():
    browser = find()
    if not browser:
        print(f'No browser is installed: one of {", ".join(_BROWSERS)}.')
        sys.exit(UNFIT)
    found = []
    for argument in map(pathlib.Path, sys.argv[1:]):
        folder = argument if argument.is_dir() else argument.parent
        pages = [argument.name] if folder != argument else sorted(
            str(path.relative_to(folder)) for path in folder.rglob('*.html'))
        for dark in False, True:
            found += look(folder, pages, browser, dark)
    print('\n'.join(dict.fromkeys(found))
          or f'All pages fit {", ".join(map(str, WIDTHS))} pixels, in light '
             f'and dark.')
    sys.exit(bool(found))


if __name__ == '__main__':
    main()
