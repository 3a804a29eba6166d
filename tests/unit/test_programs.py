# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the pages tell their readers to type to other programs.

Each command is read by the shell. Statements for sqlite3 are run on a claim
store, and modules of tests and programs of the venv have to exist. Commands of
OpenStack, nvme, virsh, docker and pip are only read: their services and
hardware are not here. tests/unit/test_pages.py is for nova-accel and make, and
for what commands of openstack say about flavors.
"""

import os
import re
import shlex
import shutil
import sqlite3
import subprocess

import ddt
import fixtures
import testtools

from nova_accel import model
from nova_accel.store import claim_store
from tests.unit import pages
from tests.unit.test_claims import claim, DEVICE, handle

_PLACEHOLDER = re.compile('<[a-z][^<>|&]*>')
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
        store.settle(done=[model.EVERYTHING])
        store.set_devices({DEVICE.address: DEVICE})
        store.add([claim('7d9fe0c3-1f3a-4a2b-9d0e-3a1f5c6b7d8e', handle(0))])
        return path

    def test_statements(self):
        """Each can be run; what is copied or written again is the same."""
        found = {statement for page in pages.pages() for text in (
            *page.blocks, *page.literals)
            for _, statement in _STATEMENT.findall(text)}
        self.assertGreater(len(found), 1)
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
