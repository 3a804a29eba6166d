# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel handovers, as an operator starts it."""

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
from nova_accel import model

A, B = '0000:5e:00.0', '0000:81:00.0'


def handover(number, **more):
    return model.Handover(**{
        'time': f'2026-11-22T02:17:{number:02}+00:00', 'device': A,
        'serial': '02:00:00:00:00:01', 'handle': A, 'server': f's{number}',
        'method': 'reset flr', 'result': 'clean', **more})


class HandoversTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.config = os.path.join(self.directory, 'nova.conf')
        with open(self.config, 'w') as file:
            file.write(f'[DEFAULT]\nhost = compute1\n'
                       f'state_path = {self.directory}\n')
        self.path = os.path.join(self.directory,
                                 'accel_claims_compute1.sqlite')

    def fill(self):
        """As nova-compute does, which goes on."""
        self.store = claims.ClaimStore(self.path)
        self.all = [handover(1), handover(2, device=B, handle='0000:81:00.2'),
                    handover(3, result='Failed.', method='none')]
        for one in self.all:
            self.store.add_handover(one)

    def start(self, *arguments):
        """The command as an operator starts it."""
        return subprocess.run(
            [sys.executable, '-W', 'ignore', '-m', 'nova_accel.cmd.main',
             'handovers', '--config-file', self.config, *arguments],
            capture_output=True, text=True, timeout=600)

    def handovers(self, *arguments):
        """The same in this process, which is a second quicker."""
        log = logging.getLogger()
        handlers, level = log.handlers[:], log.level
        with (contextlib.redirect_stdout(io.StringIO()) as stdout,
              contextlib.redirect_stderr(io.StringIO()) as stderr):
            try:
                status = main.main(
                    ['handovers', '--config-file', self.config, *arguments])
            finally:
                log.handlers[:], log.level = handlers, level
                conf.CONF.reset()
        return subprocess.CompletedProcess(
            arguments, status, stdout.getvalue(), stderr.getvalue())

    def test_json(self):
        self.fill()
        result = self.start('-f', 'json')
        self.assertEqual((0, ''), (result.returncode, result.stderr))
        found = json.loads(result.stdout)
        self.assertEqual(['s1', 's2', 's3'], [h['Server'] for h in found])
        self.assertEqual({
            'Time': '2026-11-22T02:17:01+00:00', 'Device': A, 'Handle': A,
            'Serial': '02:00:00:00:00:01', 'Server': 's1', 'Origin': '',
            'Method': 'reset flr', 'Before': '', 'After': '',
            'Result': 'clean'}, found[0])

    def test_table(self):
        self.fill()
        result = self.handovers()
        self.assertEqual(0, result.returncode)
        for text in ('Time', A, B, 'reset flr', 'clean', 'Failed.'):
            self.assertIn(text, result.stdout)

    def test_selection(self):
        self.fill()
        for arguments, servers in (
                (('--device', A), ['s1', 's3']),
                (('--device', '0000:81:00.2'), ['s2']),
                (('--server', 's3'), ['s3'])):
            found = json.loads(self.handovers(
                '-f', 'json', *arguments).stdout)
            self.assertEqual(servers, [h['Server'] for h in found])

    def test_store_that_nobody_has_open(self):
        self.fill()
        self.store._db.close()
        self.assertEqual(3, len(json.loads(
            self.handovers('-f', 'json').stdout)))
        copy = os.path.join(self.directory, 'a copy?')
        os.rename(self.path, copy)
        self.assertEqual(3, len(json.loads(
            self.handovers('-f', 'json', '--store', copy).stdout)))
        # and nothing has changed
        self.assertFalse(os.path.exists(self.path))

    def test_stores_that_cannot_be_read(self):
        def refused():
            result = self.handovers()
            self.assertEqual(1, result.returncode)
            self.assertIn(self.path, result.stderr)
            self.assertIn('--store', result.stderr)
        refused()
        self.assertFalse(os.path.exists(self.path))
        with open(self.path, 'w') as file:
            file.write('not a database, ' * 100)
        refused()
        self.assertNotIn('Traceback', self.handovers().stderr)
