# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How nova-accel starts, and what bash completes."""

import subprocess
import sys

from cliff import command
from oslo_privsep import daemon
import testtools

from nova_accel.cmd import bitstreams
from nova_accel.cmd import main
from tests.unit import commands
from tests.unit.host import A, SimulatedHost

#: of the package bash-completion, as far as cliff's script needs it
_BASH_COMPLETION = """
_get_comp_words_by_ref() {
  cur="${COMP_WORDS[COMP_CWORD]}"
  prev="${COMP_WORDS[COMP_CWORD-1]}"
  words=("${COMP_WORDS[@]}")
}
"""


class StartTest(commands.CommandTestCase):

    def start(self, *arguments):
        """(stdout, stderr, imported modules), with all warnings that Python
        shows."""
        done = subprocess.run(
            [sys.executable, '-X', 'importtime', '-m', main.__name__,
             *arguments], capture_output=True, text=True, timeout=600)
        self.assertEqual(0, done.returncode, done.stderr)
        lines = done.stderr.splitlines()
        imports = {line.rpartition('|')[2].strip() for line in lines
                   if line.startswith('import time:')}
        return done.stdout, [line for line in lines if not line.startswith(
            'import time:')], imports

    def test_no_warning(self):
        """oslo.privsep would import eventlet, which warns in nine lines."""
        host = self.useFixture(SimulatedHost({'address': A}))
        stdout, stderr, imports = self.start(
            'discover', '--config-file', self.config, '--driver', 'dfl',
            '--simulated-host', host.path)
        self.assertIn('oslo_privsep.daemon', imports)
        if not main._privsep_needs_eventlet():
            # the name alone is also listed of an import that fails
            self.assertNotIn('eventlet.hubs', imports)
        self.assertEqual([], stderr)
        self.assertIn('FPGA INTEL', stdout)
        self.assertEqual(set(), imports & {
            'oslo_utils.strutils', 'openstack', 'requests', 'nova'})

    def test_help(self):
        """It imports no command, and shows the first lines of all."""
        stdout, _, imports = self.start('--help')
        self.assertEqual({'nova_accel', 'nova_accel.cmd'}, {
            name for name in imports if name.startswith('nova_accel')})
        self.assertEqual([
            ' '.join([name, found.load().__doc__.partition('\n')[0].rstrip(
                '.')]) for name, found in sorted(main.Commands(
                    'nova_accel.commands'))],
            [' '.join(line.split()) for line in
             stdout.partition('Commands:\n')[2].splitlines()
             if line.split()[0] not in ('help', 'complete')])

    def test_imports(self):
        """A command does not pay for what others need."""
        for arguments in (('--version',), ('handovers', '--help')):
            _, stderr, imports = self.start(*arguments)
            self.assertEqual([], stderr)
            self.assertEqual(set(), imports & {
                'nova_accel.drivers.dfl', 'oslo_privsep', 'openstack',
                'requests', 'nova'})


class PrivilegedProcess(command.Command):
    """Says what oslo.privsep does when it starts its process."""

    def take_action(self, parsed_args):
        log = daemon.LOG
        log.info('Running privsep helper')
        log.warning('privsep helper failed')


class LogTest(testtools.TestCase):

    def test_privileged_process(self):
        """That it starts is told only on request."""
        told = commands.run('start', start=PrivilegedProcess)
        self.assertEqual('privsep helper failed\n', told.stderr)
        told = commands.run('-v', 'start', start=PrivilegedProcess)
        self.assertIn('Running privsep helper', told.stderr)


class MalformedOptionTest(commands.CommandTestCase):

    COMMAND = 'discover'

    def test_sentence(self):
        """Each of them is named, and no object of oslo.config is shown."""
        self.configure(enabled_drivers='dfl', discovery_timeout='soon',
                       pools='odd')
        self.assertEqual(
            "[accel] pools cannot be read (Valid values are [host, numa_node, "
            "none], but found 'odd'): correct it. [accel] discovery_timeout "
            "cannot be read (invalid literal for int() with base 10: 'soon'): "
            "correct it.\n", self.call().stderr)


class CompletionTest(commands.CommandTestCase):

    def setUp(self):
        super().setUp()
        done = commands.run('complete', '--name', 'nova-accel',
                            **{'make-bitstream': bitstreams.MakeBitstream})
        self.assertEqual(0, done.returncode, done.stderr)
        self.script = done.stdout

    def completed(self, *words):
        found = subprocess.run(
            ['bash', '-c', f'{_BASH_COMPLETION}{self.script}\n'
             'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _nova_accel; '
             'printf "%s\\n" "${COMPREPLY[@]}"', 'bash', 'nova-accel',
             *words], capture_output=True, text=True, timeout=60)
        self.assertEqual('', found.stderr)
        return set(found.stdout.split())

    def test_completion(self):
        self.assertEqual({'disable', 'discover'}, self.completed('dis'))
        self.assertEqual({'check', 'describe', 'list', 'show'},
                         self.completed('profile', ''))
        self.assertEqual({'--long'}, self.completed('discover', '--l'))
        self.assertEqual({'--region-type'},
                         self.completed('make-bitstream', '--reg'))
