# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What make buyer's stub answers for the sanitization of a device."""

import json
import pathlib

import fixtures
import testtools

from tests.buyer import stubs

GPU, DISK = '0000:5e:00.0', '0000:81:00.0'


class SanitizationTest(testtools.TestCase):

    def machines(self, *released, used=0, health='ok'):
        directory = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        for name, rows in (
                ('handovers', [{'Device': GPU, 'Server': server,
                                'Method': method, 'Result': result,
                                'Shown': json.dumps({'memory': memory})}
                               for server, method, result, memory in released]),
                ('discover', [{'Device': device, 'What': what, 'Total': 1,
                               'Used': used, 'Held by': used * 'a server',
                               'Health': health}
                              for device, what in ((GPU, 'GPU NVIDIA L40S'),
                                                   (DISK, 'SSD'))])):
            (directory / f'compute1.{name}.json').write_text(json.dumps(rows))
        return stubs.query_sanitization(directory)['machines']

    def test_clean(self):
        gpu, disk = self.machines(
            ('one', 'reset bus', 'clean', 'cleared'),
            ('', 'reset flr', 'clean', 'not shown'))
        self.assertEqual(
            [f'compute1 {GPU}', True, True, True, True,
             ['in_use', 'sanitizing', 'available']],
            [gpu[key] for key in ('machine_id', 'has_gpu', 'served_tenant',
                                  'sanitized', 'available', 'transitions')])
        self.assertEqual([False, False, []], [disk[key] for key in (
            'has_gpu', 'served_tenant', 'transitions')])

    def test_not_clean(self):
        """One of two servers is enough."""
        for last in (('none', 'not cleaned', ''), ('none', 'clean', 'cleared'),
                     ('reset flr', 'clean', 'not shown'),
                     ('reset bus', 'clean, memory kept', 'cleared'),
                     ('reset bus', 'reset only', 'cleared'),
                     ('reset bus', 'waits for the operator', 'cleared')):
            gpu, _ = self.machines(('one', 'reset bus', 'clean', 'cleared'),
                                   ('two', *last))
            self.assertFalse(gpu['sanitized'], last)

    def test_state(self):
        for expected, more in (('available', {}), ('in_use', {'used': 1}),
                               ('withheld', {'health': 'fenced'})):
            self.assertEqual(expected, self.machines(
                ('one', 'reset bus', 'clean', 'cleared'), **more)[0]['status'])

    def test_no_server_yet(self):
        self.assertRaises(LookupError, self.machines)
