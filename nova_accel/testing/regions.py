# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Tests of programming."""

import os

from nova_accel.drivers import contract
from nova_accel import exception
from nova_accel import model
from nova_accel.testing import promises
from nova_accel.testing import servers


class RegionTests(servers.ServerTests):

    def each_region(self):
        """Yield (programmable region, bitstream) for the first device."""
        if not contract._has(self.DRIVER, 'program'):
            self.skipTest(f'{self.DRIVER.__name__} programs nothing.')
        for region in self.one.regions:
            if region.programmable:
                path = self.bitstream(region) or ''
                with self.promise(promises.READ_BITSTREAM, path):
                    found = self.driver.read_bitstream(path)
                    self.assertIsInstance(found, model.Bitstream)
                    self.assertEqual(region.region_type_uuid,
                                     found.region_type_uuid)
                yield region, found

    def test_program(self):
        """examine() reports the function that program() returned."""
        for region, bitstream in self.each_region():
            self.program(region, bitstream)

    def program(self, region, bitstream):
        with self.promise(promises.PROGRAM, region.name):
            self.assertEqual(
                bitstream.function_uuid,
                self.driver.program(self.one, region, bitstream))
            self.assertCarries(region, bitstream)

    def assertCarries(self, region, bitstream):
        device = self.look_again(self.one.address)
        found = device and device.region(region.index).function_uuid
        # None: only a guest can read the function
        self.assertIn(found, (bitstream.function_uuid, None),
                      'examine() finds another function')

    def test_program_is_interrupted(self):
        """The region can be programmed again after any change at which
        nova-compute was killed or the operation failed."""
        for region, bitstream in self.each_region():
            with self.kernel.watch() as watched:
                self.program(region, bitstream)
            for number in range(1, watched.steps + 1):
                self.killed(number, lambda: self.driver.program(
                    self.one, region, bitstream))
                self.program(region, bitstream)
                with self.promise(promises.PROGRAM_FAILS, region.name):
                    self._program_that_fails(number, region, bitstream)
                self.program(region, bitstream)

    def _program_that_fails(self, number, region, bitstream):
        try:
            with self.kernel.watch(fail_at=number):
                self.driver.program(self.one, region, bitstream)
        except exception.ProgrammingFailed:
            return
        self.assertCarries(region, bitstream)

    def test_function_stays(self):
        """reset_region() does not change the function."""
        for region, bitstream in self.each_region():
            self.program(region, bitstream)
            with self.promise(promises.RESET_REGION, region.name):
                self.driver.reset_region(self.one, region)
                self.assertCarries(region, bitstream)

    def test_file_that_is_not_a_bitstream(self):
        for _, bitstream in self.each_region():
            with open(bitstream.path, 'rb') as file:
                good = file.read()
            path = os.path.join(self.directory, 'bad')
            for bad in (b'', b'nonsense', good[:8], good[:len(good) // 2],
                        b'\0' * len(good), b'\xff' * len(good)):
                with open(path, 'wb') as file:
                    file.write(bad)
                with self.promise(promises.READ_BITSTREAM,
                                  f'{len(bad)} bytes of {bad[:8]!r}'):
                    try:
                        self.driver.read_bitstream(path)
                    except (exception.BitstreamError,
                            exception.IncompatibleBitstream) as error:
                        self.assertTrue(str(error))
