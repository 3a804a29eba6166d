# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel make-bitstream, as an operator starts it."""

import os
import shlex
import uuid

import fixtures
import testtools

from nova_accel.bitstream import gbs
from nova_accel.bitstream import xclbin
from nova_accel.cmd import bitstreams
from nova_accel.drivers import dfl
from nova_accel import model
from tests.unit import commands
from tests.unit.host import B, FUNCTION, INTERFACE, plain, SimulatedHost


class MakeBitstreamTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.directory = self.useFixture(fixtures.TempDir()).path

    def call(self, name, *arguments, status=0):
        path = os.path.join(self.directory, name)
        done = commands.run('make-bitstream', path, *arguments,
                            **{'make-bitstream': bitstreams.MakeBitstream})
        self.assertEqual(status, done.returncode, done.stderr)
        return path, done.stdout, done.stderr

    def test_simulated_card_takes_it(self):
        path, said, _ = self.call('nlb.gbs', '--region-type', INTERFACE,
                                  '--function', FUNCTION)
        host = self.useFixture(SimulatedHost(
            {'address': B, 'ports': 2, 'vfs': 2}))
        driver = dfl.DflDriver(host.kernel)
        device = driver.discover()[B]
        driver.program(device, device.region(1),
                       driver.read_bitstream(path, 'image 1'))
        self.assertEqual(plain(FUNCTION),
                         driver.discover()[B].region(1).function_uuid)
        words = shlex.split(said)
        self.assertEqual(['openstack', 'image', 'create', 'nlb', '--file',
                          path], words[:6])
        self.assertIn(f'accel:function_id={FUNCTION}', words)
        self.assertIn(f'accel:region_type_id={uuid.UUID(INTERFACE)}', words)

    def test_formats(self):
        for name, parse in (('a.gbs', gbs.parse), ('a.xclbin', xclbin.parse)):
            path, _, _ = self.call(name, '--region-type', INTERFACE)
            found = parse(path)
            self.assertEqual(plain(INTERFACE), found.region_type_uuid)
            model.uuid_hex(found.function_uuid)

    def test_refusals(self):
        """One sentence each; what exists stays as it is, and nothing is left
        of what failed."""
        path, _, _ = self.call('a.gbs', '--region-type', INTERFACE)
        with open(path, 'rb') as file:
            before = file.read()
        os.symlink('/nonexistent', os.path.join(self.directory, 'link.gbs'))
        for name, arguments, text in (
                ('a.gbs', (INTERFACE,), 'File exists'),
                ('link.gbs', (INTERFACE,), 'File exists'),
                ('none/b.gbs', (INTERFACE,), 'No such file or directory'),
                ('b.rbf', (INTERFACE,), "its suffix is '.rbf'"),
                ('b.gbs', ('nlb',), "--region-type has 'nlb'"),
                ('b.gbs', (INTERFACE, '--function', '1'),
                 "--function has '1'")):
            _, _, said = self.call(name, '--region-type', *arguments,
                                   status=1)
            self.assertIn(text, said)
            self.assertEqual(1, said.count('\n'), said)
        with open(path, 'rb') as file:
            self.assertEqual(before, file.read())
        self.assertEqual({'a.gbs', 'link.gbs'},
                         set(os.listdir(self.directory)))
