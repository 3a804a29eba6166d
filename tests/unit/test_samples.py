# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is shipped in etc can be used as it is."""

import pathlib
import shutil

import fixtures
import testtools

from nova_accel import profiles
from nova_accel import request
from nova_accel import sim

ETC = pathlib.Path(__file__).parent.parent.parent / 'etc' / 'nova_accel'


class SamplesTest(testtools.TestCase):

    def test_device_profiles(self):
        files = profiles.load(str(ETC / 'device_profiles'))
        self.assertEqual({}, files.bad)
        loaded = {profile.name: profile for found in files.good.values()
                  for profile in found}
        self.assertEqual({'nlb', 'nlb-preprogrammed', 'fpga-developer',
                          'nlb-and-crypto'}, set(loaded))
        two = request.parse(profiles.expand(
            {request.PROFILE_KEY: 'nlb-and-crypto'}, loaded.__getitem__))
        self.assertEqual([None, 'crypto'], [r.function_name for r in two])

    def test_simulated_host(self):
        directory = self.useFixture(fixtures.TempDir()).path
        path = shutil.copy(ETC / 'simulated-host.yaml', directory)
        self.assertTrue(sim.SimulatedKernel(path).listdir('bus/pci/devices'))
