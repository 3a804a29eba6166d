# Licensed under the Apache License, Version 2.0. See LICENSE.

import dataclasses

import ddt

from nova_accel.drivers import handover
from nova_accel.drivers import options
from nova_accel import exception
from nova_accel.inventory import examination
from nova_accel import model
from nova_accel import naming
from tests.unit import configured

Policy = handover.Policy
A, B = '0000:3b:00.0', '0000:3b:00.1'
GPU = model.Device(address=A, type='GPU', vendor='NVIDIA', product='L40S',
                   vendor_id='10de', product_id='26b9', driver='gpu')


@ddt.ddt
class PolicyTest(configured.TestCase):

    @ddt.data(
        ([], Policy.CLEAR),
        (['none'], Policy.NONE),
        (['none', 'gpu = reset'], Policy.RESET),
        (['none', 'gpu=reset', f'{A}=operator'], Policy.OPERATOR),
        (['none', 'gpu=reset', f'{B}=operator'], Policy.OPERATOR),
        (['nvme=reset', '0000:5e:00.0=none'], Policy.CLEAR),
        (['gpu=reset', 'vendor=10de product=26*=none'], Policy.NONE),
        (['gpu=reset', 'vendor=10de product=20*=none'], Policy.RESET),
        (['address=0000:3b:*=none', 'gpu=reset'], Policy.NONE),
        # of two rules the first
        (['product=26b9=operator', 'vendor=10de=none'], Policy.OPERATOR),
        (['none', 'gpu=bus'], Policy.CLEAR),
        ([f'{A}=reset', 'vendor=10de=none'], Policy.RESET),
        ([f'{B}=reset', 'vendor=10de=none'], Policy.RESET),
    )
    @ddt.unpack
    def test_the_most_particular_counts(self, items, expected):
        self.config.config(handover=items, group='accel')
        self.assertIs(expected, handover.policy(GPU, B))

    def test_subsystem(self):
        self.config.config(group='accel', handover=[
            'product=26b9 subsystem=10de:1533=none'])
        for subsystem, expected in (('10de:1533', Policy.NONE),
                                    ('10de:1642', Policy.CLEAR)):
            self.assertIs(expected, handover.policy(
                dataclasses.replace(GPU, subsystem=subsystem)))

    def test_trait_ends_with_the_policy(self):
        """Also of a device that is not well, whose traits are those of its
        last report."""
        before = dataclasses.replace(
            GPU, traits=('CUSTOM_GPU', naming.ONE_TIME_USE),
            health=model.Health.QUARANTINED, reason='it is hot')
        self.assertEqual(('CUSTOM_GPU',), examination._with_policy(
            before).traits)

    def test_domain_of_five_digits(self):
        self.config.config(handover=['10000:01:00.0=none'], group='accel')
        self.assertIs(Policy.NONE, handover.policy(GPU, '10000:01:00.0'))

    @ddt.data(['often'], ['gpu='], ['gpu=clear', 'gpu=none'], ['x:y=none'],
              ['none', 'clear'], ['vendor=none=none'], ['model=L40S=none'],
              ['vendor=10de=often'], ['vendor=10de vendor=1002=none'],
              ['vendor=10de=none', 'vendor=10de=reset'])
    def test_cannot_be_read(self, items):
        self.config.config(handover=items, group='accel')
        error = self.assertRaises(exception.ConfigurationError,
                                  handover.policy, GPU)
        self.assertIn('[accel] handover has', str(error))

    def test_driver_that_does_not_exist(self):
        """The devices that it means would be given on as if it were not
        there."""
        # the default names an option of Nova
        self.config.config(bitstream_cache='/a', group='accel')
        self.config.config(handover=['nvme=operator', 'gpu=reset'],
                           group='accel')
        self.assertEqual([], options.malformed())
        self.config.config(handover=['nvem=operator', 'gpu=reset'],
                           group='accel')
        sentence, = options.malformed()
        self.assertIn("[accel] handover names 'nvem', and installed are",
                      sentence)
        self.assertIn('nvme', sentence)
        self.assertRaises(exception.ConfigurationError, options.check)
