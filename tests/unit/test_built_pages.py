# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What tests.built_pages finds in pages, and what it leaves alone."""

import importlib.util
import json
import os
import pathlib
from unittest import mock

import ddt
import fixtures
import testtools

from tests import built_pages


@ddt.ddt
class BuiltPagesTest(testtools.TestCase):

    def errors(self, body, **others):
        directory = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        for name, text in {'page': body, **others}.items():
            (directory / f'{name}.html').write_text(
                f'<html><head><title>a_ `b`</title></head><body>{text}</body>'
                f'</html>')
        return built_pages.errors(directory)

    @ddt.data('failed.\n=================\n', '.. _capture: A host',
              'see :doc:`lab`', '``make lab``', 'as follows::',
              'It is **not** done', 'see Nova_ for it', ':header-rows: 1')
    def test_markup(self, text):
        found = self.errors(f'<p>One.<br>Two.</p>\n<p>{text}</p>')
        self.assertEqual(1, len(found), found)
        self.assertIn('page.html:', found[0])

    @ddt.data('a = b, 3 * 4 * 5 and -- two', 'a::b, 0000:5e:00.0 (:3)',
              '<pre>=====\n.. _x: `y`</pre>', '<code>``</code> is code',
              'snake_case and __init__', 'C++ -- :-)')
    def test_text(self, text):
        self.assertEqual([], self.errors(f'<p>{text}</p>'))

    def test_error_of_docutils(self):
        found = self.errors('<a class="problematic" href="#x" id="x">a</a>')
        self.assertEqual(1, len(found), found)

    def test_links(self):
        there = ('<a href="#here" id="here">a</a> <a href="other.html#a%20b">'
                 '</a> <a href="https://x/y#z"></a> <a href="mailto:a@b"></a>')
        self.assertEqual([], self.errors(there, other='<p id="a b">'))
        for link in ('#nowhere', 'none.html', 'other.html#none'):
            found = self.errors(f'<a href="{link}"></a>', other='')
            self.assertEqual(1, len(found), found)
            self.assertIn(link, found[0])

    def test_no_pages(self):
        self.assertEqual(1, len(built_pages.errors(pathlib.Path(os.devnull))))

    def test_searches(self):
        """A page is found by its words, its title, or an entry of the index;
        the error names the words and the page."""
        if not importlib.util.find_spec('snowballstemmer'):
            self.skipTest('sphinx is not installed')
        directory = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        (directory / 'searchindex.js').write_text('Search.setIndex(' + (
            json.dumps({
                'docnames': ['gpu', 'fpga'],
                'terms': {'nouveau': 0, 'reset': [0, 1]},
                'titleterms': {'driver': 0},
                'indexentries': {'code 43': [[1, 'index-0', False]]}})) + ')')
        with mock.patch.object(built_pages, 'SEARCHES', {
                'Nouveau drivers': 'gpu', 'resets': 'fpga', 'code 43': 'fpga',
                'nouveau': 'fpga', 'nouveau reset': 'fpga', 'wipe': 'gpu'}):
            self.assertEqual(
                [f'searching for "{words}" does not find {page}'
                 for words, page in (('nouveau', 'fpga'),
                                     ('nouveau reset', 'fpga'),
                                     ('wipe', 'gpu'))],
                built_pages.not_found(directory))
