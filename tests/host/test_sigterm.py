# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute hears SIGTERM while it has much to do."""

import subprocess
import sys

import testtools

from tests.host import sigterm


class SigtermTest(testtools.TestCase):

    def test_some(self):
        """A few; tests.host.sigterm does hundreds."""
        if not sigterm.is_possible():
            self.skipTest('Nova before 34 has another launcher.')
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', '-m', 'tests.host.sigterm', '3'],
            capture_output=True, text=True, timeout=240)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
