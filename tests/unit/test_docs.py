# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The table of operations says what the tests of operations test.

A docstring ``<operation>: <what happens>`` of such a test, or of a step_...()
of one, is a row of a table in one of TABLES, word for word.
``python -m tests.unit.test_docs`` prints the rows that the tables lack.

The glossary has the words of the code.

The pictures are those that docs/pictures.py draws. Each file of the tests that
is not Python has an origin.
"""

import ast
import importlib.util
import pathlib
import re

import testtools

from tests.nova import suites

ROOT = pathlib.Path(__file__).parents[2]
TABLES = [ROOT / 'docs/source' / f'{name}.rst'
          for name in ('operations', 'live-migration', 'programming')]
TESTS = [ROOT / 'tests' / tier / f'test_{name}.py' for tier, name in (
    ('functional', 'create'), ('functional', 'operations'),
    ('functional', 'guest'), ('functional', 'cells'),
    ('functional', 'live_migration'), ('functional', 'near'),
    ('functional', 'runtime'),
    ('host', 'runtime'))]


def rows_of_tests():
    """(operation, what happens) of each test and step with a docstring."""
    return [_words(docstring).partition(': ')[::2]
            for path in TESTS
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith(('test_', 'step_'))
            and (docstring := ast.get_docstring(node))]


def rows_of_table():
    return [(_words(operation), _words(result)) for table in TABLES
            for operation, result in re.findall(
                r'^   \* - (.*?)^     - (.*?)(?=^   \* -|^\S|\Z)',
                table.read_text(), re.MULTILINE | re.DOTALL)
            if operation.strip() != 'Operation']


def _words(text):
    return ' '.join(text.split())


class OperationsTableTest(testtools.TestCase):

    maxDiff = None

    def test_docstrings_are_rows(self):
        for operation, result in rows_of_tests():
            self.assertTrue(result, f'no result is given for: {operation}')

    def test_table_says_what_is_tested(self):
        self.assertEqual(sorted(rows_of_tests()), sorted(rows_of_table()))

    def test_outside_make_test(self):
        """Modules that make test leaves to .ci/run have no row, and no mutant.
        """
        rest = re.search(r'^REST = test_\((.+)\)',
                         (ROOT / 'Makefile').read_text(), re.M)[1].split('|')
        self.assertEqual(set(), set(rest) - {
            path.stem.removeprefix('test_')
            for path in (ROOT / 'tests/functional').glob('test_*.py')})
        self.assertEqual(set(), set(rest) & {
            *(path.stem.removeprefix('test_') for path in TESTS
              if path.parent.name == 'functional'),
            *re.findall(r'functional\.test_(\w+)', (
                ROOT / 'tests/mutants/mutants.txt').read_text())})


class OriginTest(testtools.TestCase):

    def test_origin_of_each_file_is_said(self):
        """Of each file of the tests that is not Python."""
        page = ROOT / 'docs' / 'source' / 'contributor' / 'testing.rst'
        table = page.read_text().split('Whose the data')[1]
        said = re.findall(r'``((?!tests\.)[a-z][^` ]*[/.][^` ]*)``', table)
        tests = ROOT / 'tests'
        here = [path.relative_to(tests) for path in tests.rglob('*')
                if path.is_file() and path.suffix != '.py'
                and '__pycache__' not in path.parts]
        self.assertEqual([], [
            str(path) for path in here
            if not any(path.match(pattern) for pattern in said)])
        self.assertEqual([], [
            pattern for pattern in said
            if not any(path.match(pattern) for path in here)])


class ExcludedTest(testtools.TestCase):

    def test_page_names_each(self):
        """Nothing is hidden from Nova's tests without a word on the page."""
        page = (ROOT / 'docs/source/contributor/nova-tests.rst').read_text()
        named = [
            f'{of or "LibvirtConnTestCase"}.{name}' for name, of in re.findall(
                r'``(test_\w+)``(?: of ``(\w+)``)?', page)]
        found: set[str] = set()
        for suite in suites.SUITES:
            for one in suites.exclusions(suite):
                these = {name for name in named if one.pattern.search(name)}
                self.assertNotEqual(set(), these, one.pattern.pattern)
                found |= these
        self.assertEqual({*named}, found)


class GlossaryTest(testtools.TestCase):

    PAGE = (ROOT / 'docs/source/glossary.rst').read_text()

    def test_each_word_is_of_several_rooms(self):
        """A word of one module is defined there."""
        rooms = [(path.relative_to(ROOT).parts[1], path.read_text().lower())
                 for path in (ROOT / 'nova_accel').rglob('*.py')]
        for word in re.findall(r'^   ([a-z-]+)$', self.PAGE, re.MULTILINE):
            self.assertLess(1, len({
                room for room, text in rooms
                if re.search(rf'(\b|_){word.replace("-", "-?")}', text)}), word)

    def test_record_is_of_a_device(self):
        """What Nova and Glance keep is an entry, and of hand-overs there is a
        journal."""
        self.assertEqual({
            'drivers/base.py', 'drivers/fabric.py', 'drivers/nvme.py',
            'drivers/timecard.py',
            'inventory/adoption.py', 'inventory/examination.py', 'model.py',
            'store/cards.py', 'store/rows.py', 'store/schema.py',
            'store/values.py', 'testing/base.py',
            # as others call what they have: logging, fcntl, and a recorder
            'log.py', 'store/file.py', 'cmd/capture.py'}, {
                str(path.relative_to(ROOT / 'nova_accel'))
                for path in (ROOT / 'nova_accel').rglob('*.py')
                if 'sim' not in path.parts
                and re.search(r'(?i)(\b|_)records?\b', path.read_text())})

    def test_a_page_of_words(self):
        """What comes beside them replaces others."""
        self.assertGreaterEqual(30, len(re.findall(
            r'^   [a-z-]+$', self.PAGE, re.MULTILINE)))


class RoomsTest(testtools.TestCase):

    def test_each_module_is_named(self):
        page = (ROOT / 'docs/source/contributor/architecture.rst').read_text()
        # the parts of devices.py are named beside it
        parts = 'reports', 'contents', 'adoption'
        self.assertEqual([], [
            f'{room}/{path.name}'
            for room in ('planning', 'scheduler', 'virt', 'admin', 'notify',
                         'attach', 'inventory', 'store')
            for path in sorted((ROOT / 'nova_accel' / room).glob('*.py'))
            if path.stem not in ('__init__', *parts)
            and f'``{room}/{path.name}``' not in page])


class PictureTest(testtools.TestCase):

    def test_drawn_by_the_program(self):
        found = importlib.util.spec_from_file_location(
            'pictures', ROOT / 'docs' / 'pictures.py')
        pictures = importlib.util.module_from_spec(found)
        found.loader.exec_module(pictures)
        for name, draw in pictures.PICTURES.items():
            self.assertEqual(
                draw().svg(),
                (ROOT / 'docs' / 'source' / f'{name}.svg').read_text(),
                'run: python docs/pictures.py')


if __name__ == '__main__':
    for row in rows_of_tests():
        if row not in rows_of_table():
            print('   * - {}\n     - {}'.format(*row))
