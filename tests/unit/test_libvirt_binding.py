# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How libvirt-python is provided, and who imports it."""

import ast
import configparser
import pathlib

import testtools

ROOT = pathlib.Path(__file__).parents[2]


def _imports(path):
    """Names that a module imports, also by importlib."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.partition('.')[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition('.')[0]
        elif (isinstance(node, ast.Call) and node.args
              and ast.unparse(node.func).endswith('import_module')
              and isinstance(node.args[0], ast.Constant)):
            yield node.args[0].value.partition('.')[0]


class LibvirtBindingTest(testtools.TestCase):

    def test_one_module_imports_it(self):
        """The others take what Nova has imported."""
        self.assertEqual(['cmd/checks.py'], [
            str(path.relative_to(ROOT / 'nova_accel'))
            for path in sorted((ROOT / 'nova_accel').rglob('*.py'))
            if 'libvirt' in _imports(path)])

    def test_it_is_an_extra(self):
        """The page has the requirement of setup.cfg, which is optional."""
        setup = configparser.ConfigParser()
        setup.read(ROOT / 'setup.cfg')
        self.assertNotIn('libvirt', setup['options']['install_requires'])
        wanted = setup['options.extras_require']['libvirt'].strip()
        page = (ROOT / 'docs/source/installation.rst').read_text()
        self.assertIn(f"'{wanted}'", page)
