# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The table of the page about style holds for all that is written."""

import pathlib
import re
import subprocess
import tempfile

import ddt
import testtools
import yaml

from tests import style


@ddt.ddt
class StyleTest(testtools.TestCase):

    def test_no_file_gets_worse(self):
        """Its number may only fall: ``python -m tests.style --lower``."""
        most = yaml.safe_load(style.CEILINGS.read_text())
        worse = [f'{name} has {number}, and {most.get(name, 0)} may be: '
                 f'python -m tests.style {name}'
                 for name, number in style.numbers().items()
                 if number > most.get(name, 0)]
        self.assertEqual([], worse)

    def test_subjects_of_commits(self):
        """The last commits name the room and the change, in a line that git
        log shows whole; see CONTRIBUTING.rst."""
        git = subprocess.run(
            ['git', 'log', '-20', '--no-merges', '--format=%s'],
            cwd=style.ROOT, capture_output=True, text=True)
        if git.returncode:
            self.skipTest('not a clone of the repository')
        self.assertEqual([], [
            subject for subject in git.stdout.splitlines()
            if len(subject) > 72 or not re.match(r'[\w., ]+: \w', subject)])

    def test_tests_are_not_imported(self):
        """What two modules of tests need has a module of its own."""
        self.assertEqual([], [
            f'{path.relative_to(style.ROOT)}: {line}'
            for path in (style.ROOT / 'tests').rglob('*.py')
            for line in path.read_text().splitlines()
            if re.match(r'(from tests\b.*\bimport test_|from tests\.\S*'
                        r'\btest_|import tests\.\S*\btest_)', line)])

    def test_each_row_has_a_pattern(self):
        rows = style.PAGE.read_text().split('Instead of')[1].split(
            '\n====')[1].split('\n')[1:]
        firsts = [row for row in rows if row[:1].strip()]
        for row in firsts:
            self.assertTrue(any(row.startswith(begin)
                                for begin in style.ROWS), row)
        self.assertEqual(len(style.ROWS), len(firsts))

    def test_functions_begin_with_a_verb(self):
        for room in style.ROOMS:
            for path in (style.ROOT / 'nova_accel' / room).rglob('*.py'):
                self.assertEqual(
                    [], style.without_verb(path.read_text()), path)
        self.assertEqual([(1, 'Cards')], style.without_verb(
            'def a():\n    """Cards of a host."""\n'
            'def b():\n    """Return it."""\n'
            'def c():\n    """:raises OSError: always."""\n'
            '@property\ndef d():\n    """The address."""\n'))

    @ddt.data(
        ('# it is no number\n', ['is no number']),
        ('# it is no longer there\n', []),
        ('x = f"{a} has to go" \\\n    f" elsewhere"\n', ['elsewhere']),
        ('# looked\n# at: look\n# at it\n', ['looked at', 'look at']),
        ('"""There is no card.\n\nNobody."""\n',
         ['There is no', 'Nobody']),
        ('anew = 1\n', []),
        ('# it is to\n# go\n', ['is to go']))
    @ddt.unpack
    def test_found(self, text, found):
        with tempfile.NamedTemporaryFile('w', suffix='.py') as file:
            file.write(text)
            file.flush()
            self.assertEqual(found, [words for _, words in style.breaches(
                pathlib.Path(file.name))])
