# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The commands of nova-accel, as an operator starts them."""

import contextlib
import functools
import importlib.metadata
import io
import json
import logging
import os
import subprocess
import sys
from unittest import mock

import fixtures
import testtools

from nova_accel.cmd import main
from nova_accel.cmd import output
from nova_accel import conf
from nova_accel.store import claim_store

#: what [...] helper_command is here. A backslash goes before a space, because
#: oslo.config takes quotes around a whole value away
PRIVSEP_HELPER = os.path.join(os.path.dirname(sys.executable),
                              'privsep-helper').replace(' ', r'\ ')

_entry_points = importlib.metadata.entry_points


@functools.cache
def _known(path, parameters):
    return _entry_points(**dict(parameters))


def entry_points_once(**parameters):
    """importlib.metadata.entry_points(), for which all that is installed is
    searched."""
    return _known(tuple(sys.path), tuple(sorted(parameters.items())))


def run(*arguments, stdout=None, **commands):
    """The command nova-accel, in this process.

    :param stdout: where it writes; by default the answer has it.
    :param commands: name -> class of a command that the installation lacks,
        which may be of another tree.
    :returns: subprocess.CompletedProcess.
    """
    log = logging.getLogger()
    handlers = log.handlers[:]
    levels = {name: logging.getLogger(name).level
              for name in (None, 'oslo.privsep', 'keystoneauth')}
    stdout = stdout or io.StringIO()
    if importlib.metadata.entry_points is _entry_points:
        points = mock.patch.object(
            importlib.metadata, 'entry_points', entry_points_once)
    else:
        # a test has others
        points = contextlib.nullcontext()
    with (points, contextlib.redirect_stdout(stdout),
          contextlib.redirect_stderr(io.StringIO()) as stderr):
        # it writes to what are the streams of this process by now
        app = main.NovaAccel()
        for name, command in commands.items():
            app.command_manager.add_command(name, command)
        try:
            status = app.run(list(arguments))
        finally:
            log.handlers[:] = handlers
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
    return subprocess.CompletedProcess(
        arguments, status, stdout.getvalue(), stderr.getvalue())


class Terminal(io.StringIO):

    def isatty(self):
        return True


class CommandTestCase(testtools.TestCase):

    COMMAND = ''
    #: see run()
    COMMANDS: dict = {}

    def setUp(self):
        super().setUp()
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.config = os.path.join(self.directory, 'nova.conf')
        self.configure()

    def configure(self, **accel):
        with open(self.config, 'w') as file:
            file.write(f'[DEFAULT]\nhost = compute1\n'
                       f'state_path = {self.directory}\n[accel]\n')
            for name, value in accel.items():
                file.write(f'{name} = {value}\n')

    def start(self, *arguments):
        """The command as an operator starts it."""
        return subprocess.run(
            [sys.executable, '-W', 'ignore', '-m', 'nova_accel.cmd.main',
             *self.COMMAND.split(), '--config-file', self.config, *arguments],
            capture_output=True, text=True, timeout=600)

    def call(self, *arguments):
        """The same in this process, which is a second quicker."""
        return self.main(
            *self.COMMAND.split(), '--config-file', self.config, *arguments)

    def main(self, *arguments):
        """nova-accel in this process, with all of its arguments."""
        try:
            return run(*arguments, **self.COMMANDS)
        finally:
            conf.CONF.reset()

    def rows(self, *arguments):
        result = self.call('-f', 'json', *arguments)
        rows = json.loads(result.stdout)
        self.assertIn(result.returncode, (0,) if rows else (
            0, output.NOTHING), result.stderr)
        return rows


class StoreCommandTestCase(CommandTestCase):
    """A command that shows the claim store of a host."""

    def setUp(self):
        super().setUp()
        self.path = os.path.join(self.directory,
                                 'accel_claims_compute1.sqlite')

    def open_store(self):
        """As nova-compute does, which goes on."""
        self.store = claim_store.ClaimStore(self.path)
        return self.store
