# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The commands of nova-accel, as an operator starts them."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys

import fixtures
import testtools

from nova_accel.attach import claims
from nova_accel.cmd import main
from nova_accel import conf


class CommandTestCase(testtools.TestCase):

    COMMAND = ''

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
        log = logging.getLogger()
        handlers, level = log.handlers[:], log.level
        with (contextlib.redirect_stdout(io.StringIO()) as stdout,
              contextlib.redirect_stderr(io.StringIO()) as stderr):
            try:
                status = main.main([*arguments])
            finally:
                log.handlers[:], log.level = handlers, level
                conf.CONF.reset()
        return subprocess.CompletedProcess(
            arguments, status, stdout.getvalue(), stderr.getvalue())

    def rows(self, *arguments):
        result = self.call('-f', 'json', *arguments)
        self.assertEqual(0, result.returncode, result.stderr)
        return json.loads(result.stdout)


class StoreCommandTestCase(CommandTestCase):
    """A command that shows the claim store of a host."""

    def setUp(self):
        super().setUp()
        self.path = os.path.join(self.directory,
                                 'accel_claims_compute1.sqlite')

    def open_store(self):
        """As nova-compute does, which goes on."""
        self.store = claims.ClaimStore(self.path)
        return self.store
