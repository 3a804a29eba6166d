# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Each mutant of tests/mutants can be made, and names tests that exist."""

import ast

import testtools

from tests import mutants


class MutantsTest(testtools.TestCase):

    def test_each_applies(self):
        """Where the code has changed, the list follows."""
        for mutant in mutants.read():
            compile(mutant.apply(), mutant.file, 'exec')

    def test_each_names_its_tests(self):
        found = mutants.read()
        self.assertEqual(len(found), len(set(map(str, found))))
        for mutant in found:
            self.assertTrue(mutant.tests or mutant.survives, mutant)
        for name in {name for m in found for name in m.tests}:
            tier, module, *inside = name.split('.')
            path = mutants.ROOT / 'tests' / tier / f'{module}.py'
            # read, because functional tests import Nova in their own way
            there = ast.parse(path.read_text())
            for part in inside:
                there, = (node for node in there.body
                          if getattr(node, 'name', None) == part)
