# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Changes of nova.conf that leave all else as it is."""

import os

import fixtures
import testtools

from nova_accel.cmd import ini
from nova_accel import exception

TEXT = """\
# of ours
[pci]
device_spec = {"a": 1,
    "b": 2}
# the alias
alias: x
[MDEV_a]
max_instances=1
[DEFAULT]
debug = true"""


class FileTest(testtools.TestCase):

    def open(self, text):
        path = os.path.join(self.useFixture(fixtures.TempDir()).path,
                            'nova.conf')
        with open(path, 'w') as file:
            file.write(text)
        return ini.File(path)

    def test_entries(self):
        file = self.open(TEXT)
        self.assertEqual(
            [('pci', 'device_spec', '{"a": 1,\n"b": 2}'), ('pci', 'alias', 'x'),
             ('mdev_a', 'max_instances', '1'), ('DEFAULT', 'debug', 'true')],
            [entry[:3] for entry in file.entries])
        self.assertEqual(f'{TEXT}\n', file.text())
        self.assertEqual([], list(file.diff()))

    def test_changes(self):
        file = self.open(TEXT)
        spec, alias, most, debug = file.entries
        file.drop(spec)
        file.drop(most)
        # behind an option that is replaced afterwards
        file.add('pci', 'new', ['1', '2'])
        file.put(alias, 'y')
        for name in ('enabled_drivers', 'vgpu_types'):
            file.add('accel', name, ['gpu'])
        self.assertEqual(
            '# of ours\n[pci]\n# the alias\nalias = y\nnew = 1\nnew = 2\n'
            '[DEFAULT]\ndebug = true\n\n[accel]\nenabled_drivers = gpu\n'
            'vgpu_types = gpu\n', file.text())
        self.assertEqual(
            ['@@ -3,2 +2,0 @@ [pci]\n', '@@ -6,3 +4,3 @@ [pci]\n',
             '@@ -10,0 +9,4 @@ [DEFAULT]\n'],
            [line for line in file.diff() if line.startswith('@@ ')])
        self.assertNotIn('debug', ''.join(file.diff()))

    def test_what_is_no_file(self):
        for text in ('[pci', 'x'):
            error = self.assertRaises(exception.ConfigurationError, self.open,
                                      text)
            self.assertIn('cannot be read', str(error))
        self.assertRaises(exception.ConfigurationError, ini.File, '/')
