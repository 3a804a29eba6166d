# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the lab says on a machine that it does not fit, and after accidents."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
from unittest import mock

import fixtures
from oslotest import base
from packaging import requirements
from packaging import utils

from tests import lab
from tests.lab import __main__ as command
from tests.lab import build
from tests.lab import machine
from tests.lab import room

#: enough for everything, as root
ROOMY = {'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': 16 << 18}


class LabTestBase(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.home = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        self.useFixture(fixtures.EnvironmentVariable(
            'NOVA_ACCEL_LAB', str(self.home)))

    def replace(self, name, value):
        self.useFixture(fixtures.MonkeyPatch(name, value))

    def run_lab(self, *arguments):
        """(exit status, what it says) of the command, as make calls it."""
        done = subprocess.run(
            [sys.executable, '-m', 'tests.lab', *arguments], text=True,
            capture_output=True, cwd=lab.SOURCE)
        return done.returncode, done.stdout + done.stderr


class PackagesTest(base.BaseTestCase):
    """What the lab installs is enough for its second nova-compute, which dies
    without a word of an import."""

    def needed(self, names):
        todo, found = [(name, '') for name in names], set()
        while todo:
            name, extra = todo.pop()
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                lines = importlib.metadata.requires(name) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
            for line in lines:
                wanted = requirements.Requirement(line)
                if not wanted.marker or wanted.marker.evaluate(
                        {'extra': extra}):
                    todo += [(utils.canonicalize_name(wanted.name), more)
                             for more in ('', *wanted.extras)]
        return {utils.canonicalize_name(name) for name, _ in found}

    def test_all_that_is_imported(self):
        said = subprocess.check_output(
            [sys.executable, '-c', 'import os, sys\n'
             'from tests.lab import simulated_compute\n'
             'os.write(1, " ".join(sys.modules).encode())'],
            text=True, cwd=lab.SOURCE)
        of = importlib.metadata.packages_distributions()
        imported = {utils.canonicalize_name(distribution)
                    for name in said.split()
                    for distribution in of.get(name, ())}
        self.assertIn('nova', imported)
        self.assertEqual(set(), imported - {'nova-accel'}
                         - self.needed(build.PYTHON_PACKAGES))


class KvmTest(LabTestBase):

    def setUp(self):
        super().setUp()
        self.processor, self.node = self.home / 'cpuinfo', self.home / 'kvm'
        self.processor.write_text('model name\t: one\nflags\t\t: fpu vmx\n')
        self.node.touch()

    def why(self):
        return machine.without_kvm(self.processor, self.node)

    def test_kvm(self):
        for flag in 'vmx', 'svm':
            self.processor.write_text(f'flags\t\t: fpu {flag} sse\n')
            self.assertEqual('', self.why())
        command = machine.qemu('')
        self.assertEqual('kvm', command[command.index('-accel') + 1])
        self.assertIn('q35,kernel-irqchip=split', command)

    def test_processor_without_it(self):
        self.processor.write_text('vmx_flags : none\nflags\t\t: fpu vmxon\n')
        self.assertEqual('the processor has neither vmx nor svm', self.why())
        command = machine.qemu(self.why())
        self.assertIn('tcg', command[command.index('-accel') + 1])
        self.assertIn('q35', command)

    def test_node_that_does_not_open(self):
        self.node.unlink()
        self.assertEqual(f'{self.node} does not open (No such file or '
                         f'directory)', self.why())


class Machine(LabTestBase):
    """A machine that all would fit; then one thing is missing."""

    def setUp(self):
        super().setUp()
        self.replace('os.geteuid', lambda: 0)
        self.replace('os.sysconf', ROOMY.get)
        self.replace('shutil.which', lambda name: f'/usr/bin/{name}')
        self.replace('shutil.disk_usage',
                     lambda path: mock.Mock(free=100 << 30))
        self.replace('subprocess.run', lambda *a, **k: mock.Mock(
            returncode=0))

    def assertUnfit(self, *words):
        error = self.assertRaises(lab.Unfit, build.check_host, self.home)
        for word in words:
            self.assertIn(word, str(error))

    def test_all_there(self):
        self.assertIsNone(build.check_host(self.home))

    def test_no_root(self):
        self.replace('os.geteuid', lambda: 1000)
        self.assertUnfit('not root: run it as root')

    def test_other_architecture(self):
        self.replace('os.uname', lambda: mock.Mock(machine='aarch64'))
        self.assertUnfit('aarch64: run it on amd64')

    def test_not_debian(self):
        self.replace('shutil.which', lambda name: None)
        self.assertUnfit('apt-get is not here: run it on Debian')

    def test_little_memory(self):
        self.replace('os.sysconf', {**ROOMY, 'SC_PHYS_PAGES': 1 << 19}.get)
        self.assertUnfit('needs 8 GiB', '2048 MiB')

    def test_no_namespaces(self):
        self.replace('subprocess.run', lambda *a, **k: mock.Mock(
            returncode=1))
        self.assertUnfit('namespaces')

    def test_no_disk(self):
        self.replace('shutil.disk_usage',
                     lambda path: mock.Mock(free=3 << 30))
        self.assertUnfit('needs 8 GiB of disk', '3 free', 'NOVA_ACCEL_LAB')

    def test_no_disk_is_needed_once_it_is_built(self):
        self.replace('shutil.disk_usage', lambda path: mock.Mock(free=0))
        for name, digest in (('tree', build.tree_digest()),
                             ('image', build.image_digest())):
            (self.home / name).mkdir()
            (self.home / name / 'complete').write_text(digest)
        self.assertIsNone(build.check_host(self.home))

    def test_nothing_is_begun(self):
        self.replace('os.geteuid', lambda: 1000)
        for name in ('build', 'up', 'prove', 'down'):
            self.assertRaises(lab.Unfit, command.main, [name])
        self.assertEqual([], os.listdir(self.home))


class Sources(LabTestBase):

    def sources(self, name, text):
        top = self.home / 'apt'
        (top / 'sources.list.d').mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
        return build.apt_sources(top)

    def test_one_line_each(self):
        self.assertEqual(
            ('http://mirror/debian', 'http://mirror/security'),
            self.sources('sources.list', (
                '# deb http://old/debian buster main\n'
                'deb [signed-by=/k] http://mirror/debian bookworm main\n'
                'deb-src http://mirror/src bookworm main\n'
                'deb http://mirror/security bookworm-security main\n')))

    def test_stanzas(self):
        self.assertEqual(
            ('http://mirror/debian', None),
            self.sources('sources.list.d/debian.sources', (
                'Types: deb\nURIs: http://mirror/debian/\n'
                'Suites: trixie trixie-updates\nComponents: main\n')))

    def test_none(self):
        self.assertRaises(lab.Unfit, self.sources, 'sources.list',
                          'deb http://elsewhere/ubuntu noble main\n')


class Leftovers(LabTestBase):

    def keeper(self, text):
        (self.home / 'run').mkdir(exist_ok=True)
        (self.home / 'run/keeper').write_text(text)

    def test_process_that_has_ended(self):
        process = subprocess.Popen(['true'])
        began = room._stat(process.pid)[2]
        process.wait()
        self.keeper(f'{process.pid} {began}')
        self.assertIsNone(room.keeper(self.home))
        self.assertFalse(room.end(self.home))

    def test_number_that_another_process_has_by_now(self):
        self.keeper(f'{os.getpid()} 1')
        self.assertIsNone(room.keeper(self.home))
        # we go on
        self.assertFalse(room.end(self.home))

    def test_file_that_was_cut_short(self):
        self.keeper('')
        self.assertIsNone(room.keeper(self.home))

    def test_end_of_what_runs(self):
        process = subprocess.Popen(['sleep', '600'])
        self.addCleanup(process.wait)
        self.keeper(f'{process.pid} {room._stat(process.pid)[2]}')
        self.assertTrue(room.end(self.home))
        self.assertEqual('Z', room._stat(process.pid)[0])

    def test_build_that_was_cut_short(self):
        (self.home / 'tree').mkdir()
        self.assertFalse(build.ready(self.home))
        (self.home / 'tree/complete').write_text('of other ingredients')
        self.assertFalse(build.ready(self.home))


class Command(LabTestBase):

    def test_help(self):
        code, said = self.run_lab()
        self.assertEqual(2, code)
        self.assertIn('python3 -m tests.lab COMMAND', said)

    def test_status_of_none(self):
        self.assertEqual((0, f'{self.home}: down\n'), self.run_lab('status'))

    def test_shell_without_a_lab(self):
        self.assertEqual(
            (1, f'{self.home} is not up: make lab-up starts the lab, make '
                f'tempest-up the cloud of Tempest.\n'),
            self.run_lab('shell'))
