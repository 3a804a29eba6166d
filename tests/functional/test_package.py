# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the package has is what the code says."""

import pathlib
import subprocess
import sys

import fixtures
import testtools

ROOT = pathlib.Path(__file__).parent.parent.parent


class PackageTest(testtools.TestCase):

    def test_sample_configuration_is_current(self):
        configuration = ROOT / 'etc' / 'nova_accel'
        sample = self.useFixture(fixtures.TempDir()).join('sample')
        done = subprocess.run(
            [sys.executable, '-m', 'oslo_config.generator', '--config-file',
             str(configuration / 'config-generator.conf'),
             '--output-file', sample], capture_output=True, text=True)
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertEqual(
            (configuration / 'nova_accel.conf.sample').read_text(),
            pathlib.Path(sample).read_text(), 'run tox -e genconfig')
