# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the pages tell their readers to type to other programs.

Each command is read by the shell. Statements for sqlite3 are run on a claim
store, and modules of tests and programs of the venv have to exist. Commands of
openstack are read by their own parsers, also those in the messages of the
product. Those of nvme, virsh, docker and pip are only read by the shell: their
services and hardware are not here. tests/unit/test_pages.py is for nova-accel
and make, and for what commands of openstack say about flavors.
"""

import ast
import os
import re
import shlex
import shutil
import sqlite3
import subprocess

import ddt
import fixtures
from openstackclient import shell
from osc_lib.command import commandmanager
import testtools

from nova_accel.store import claim_store
from nova_accel.store import values
from tests.unit import pages
from tests.unit.claims import claim, DEVICE, handle

_PLACEHOLDER = re.compile('<[A-Za-z][^<>|&]*>')
#: what the shell replaces by the output of a command
_OUTPUT = re.compile(r'\$\(.+?\)', re.DOTALL)
#: groups of entry points of openstackclient, osc-placement and nova_accel
_GROUPS = (
    'openstack.cli', 'openstack.common', 'openstack.compute.v2',
    'openstack.image.v2', 'openstack.network.v2', 'openstack.identity.v3',
    'openstack.placement.v1', 'openstack.nova_accel.v2')
#: of Gnocchi's and CloudKitty's clients, which are not in the test packages
_OTHERS = ('metric', 'rating')
_STATEMENT = re.compile(r"""sqlite3 FILE (['"])(.+?)\1""", re.DOTALL)


def typed(block):
    """The commands of a block, behind their prompts, with the lines on which
    a quoted text or a here-document goes on."""
    found, lines = [], re.sub(r'\\\n\s*', '', block).splitlines()
    for number, line in enumerate(lines):
        if re.match(r'[$#] [a-z./]', line) and (
                line[0] == '$' or ' exec ' in line):
            command = line[2:]
            for more in lines[number + 1:]:
                if '<<' not in command and not _is_open(command):
                    break
                command += f'\n{more}'
            found.append(_PLACEHOLDER.sub('placeholder', command))
    return found


def _is_open(command):
    try:
        return not shlex.split(command)
    except ValueError:
        return True


@ddt.ddt
class ProgramsTest(testtools.TestCase):

    @ddt.data(*[page for page in pages.pages()
                if any(map(typed, page.blocks))])
    def test_shell_reads_them(self, page):
        for block in page.blocks:
            for command in typed(block):
                done = subprocess.run(
                    ['bash', '-n', '-c', command], text=True,
                    stderr=subprocess.PIPE)
                self.assertEqual((0, ''), (done.returncode, done.stderr),
                                 f'{page}: {command}')

    def store(self):
        path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'claims.sqlite')
        store = claim_store.ClaimStore(path)
        store.settle(done=[values.EVERYTHING])
        store.set_devices({DEVICE.address: DEVICE})
        store.add([claim('7d9fe0c3-1f3a-4a2b-9d0e-3a1f5c6b7d8e', handle(0))])
        return path

    def test_statements(self):
        """Each can be run; what is copied or written again is the same."""
        found = {statement for page in pages.pages() for text in (
            *page.blocks, *page.literals)
            for _, statement in _STATEMENT.findall(text)}
        self.assertTrue(found)
        for statement in found:
            path = self.store()
            if statement.startswith('.'):
                self.assertEqual('.backup COPY', statement)
                if shutil.which('sqlite3'):
                    copy = f'{path}.copy'
                    subprocess.run(['sqlite3', path, f'.backup {copy}'],
                                   check=True)
                    self.assertEqual(claim_store.existing(path).claims(),
                                     claim_store.existing(copy).claims())
                continue
            with sqlite3.connect(path) as database:
                database.executescript(statement)

    @ddt.data(*pages.pages())
    def test_modules_and_programs(self, page):
        for text in (*page.blocks, *page.literals):
            for module in re.findall(r'python3? -m (tests[\w.]*\w)', text):
                # not imported: the package of a tier chooses threads
                path = pages.ROOT / module.replace('.', '/')
                self.assertTrue(path.with_suffix('.py').exists()
                                or (path / '__init__.py').exists(), module)
            for path in re.findall(r'(?:^|\s)(tests/[\w/.]+\w)(?![*\w])', text):
                self.assertTrue((pages.ROOT / path).exists(),
                                f'{page}: {path}')


@ddt.ddt
class OpenStackTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.shell = shell.OpenStackShell()
        self.commands = commandmanager.CommandManager(_GROUPS[0])
        for group in _GROUPS[1:]:
            self.commands.add_command_group(group)

    def command(self, words):
        """(parser of the command, its arguments); None of another client"""
        if words[0].startswith('-'):
            _, words = self.shell.parser.parse_known_args(words)
        if words[0] in _OTHERS:
            return None
        try:
            command, name, rest = self.commands.find_command(words)
        except ValueError as error:
            self.fail(f'openstack {" ".join(words)}: {error}')
        return command(self.shell, None, cmd_name=name).get_parser(name), rest

    @ddt.data(*pages.pages())
    def test_blocks(self, page):
        for block in page.blocks:
            block = _OUTPUT.sub('output', _PLACEHOLDER.sub(
                'placeholder', block.replace(' ...', '')))
            for _, *words in pages.commands(block, 'openstack'):
                found = self.command(words)
                if found:
                    self.assertEqual('', pages.refused(*found), words)

    @ddt.data(*pages.pages())
    def test_sentences(self, page):
        """As far as a command is given there."""
        for text in page.literals:
            if text.startswith('openstack ') and text not in (
                    'openstack accelerator', 'openstack resource provider'):
                self.is_known(_PLACEHOLDER.sub('placeholder', text))

    def test_messages(self):
        found = {text for path in (pages.ROOT / 'nova_accel').rglob('*.py')
                 for text in _texts(path) if 'openstack ' in text}
        self.assertGreater(len(found), 5)
        for text in found:
            for command in re.findall(r'openstack ((?:[a-z]+ )+[^.,:;"`]*)',
                                      text):
                self.is_known(f'openstack {command}')

    def is_known(self, command):
        _, *words = shlex.split(command)
        self.assertEqual([], pages.unknown(*self.command(words)), command)


def _texts(path):
    """The texts of a module, with what is put into them at run time as one
    word, and without docstrings."""
    tree = ast.parse(path.read_text())
    inside = {id(part) for node in ast.walk(tree)
              if isinstance(node, ast.JoinedStr)
              for part in ast.walk(node) if part is not node}
    inside |= {id(node.value) for node in ast.walk(tree)
               if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            yield ''.join(part.value if isinstance(part, ast.Constant)
                          else 'value' for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
