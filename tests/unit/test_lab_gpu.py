# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The lab's GPU, by what a hand-over reads of it."""

import json
import pathlib
import sys
from unittest import mock

import fixtures
from oslotest import base

from nova_accel.host import nvidia
from tests import lab

FLR = (0x48, b'\0\x80')


class GpuTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        with mock.patch.object(sys, 'path', [
                str(lab.LAB / 'emulators'), *sys.path]):
            import gpu
        self.faults = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path) / 'gpu.json'
        self.fault()
        self.gpu = gpu.Gpu(self.faults)

    def fault(self, **faults):
        self.faults.write_text(json.dumps(
            {'boot_seconds': 0.05, 'clear_seconds': 0.05, **faults}))

    def watch(self, reset):
        return nvidia.watch(
            lambda offset: int.from_bytes(self.gpu.bar_read(offset, 4),
                                          'little'), reset, 'ada', 1)

    def judged(self, reset):
        watched = self.watch(reset)
        return (nvidia.failure('ada', watched), nvidia.doubt('ada', watched),
                nvidia.modes('ada', watched))

    def test_reset_of_the_bus(self):
        for _ in range(2):
            self.assertEqual(('', '', {'ECC': 'off'}),
                             self.judged(self.gpu.reset))

    def test_reset_of_the_function(self):
        """The words are those of the boot before."""
        failure, doubt, _ = self.judged(
            lambda: self.gpu.config_write(*FLR))
        self.assertEqual('', failure)
        self.assertIn('boot before', doubt)

    def test_faults(self):
        self.fault(mode=1)
        self.assertEqual({'ECC': 'on'}, self.judged(self.gpu.reset)[2])
        self.fault(clears=False)
        self.assertIn('did not change as', self.judged(self.gpu.reset)[0])
