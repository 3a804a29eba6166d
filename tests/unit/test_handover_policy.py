# Licensed under the Apache License, Version 2.0. See LICENSE.

import ddt
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.drivers import handover
from nova_accel.drivers import options
from nova_accel import exception

Policy = handover.Policy
A, B = '0000:3b:00.0', '0000:3b:00.1'


@ddt.ddt
class PolicyTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = self.useFixture(config_fixture.Config(conf.CONF))

    @ddt.data(
        ([], Policy.CLEAR),
        (['none'], Policy.NONE),
        (['none', 'gpu = reset'], Policy.RESET),
        (['none', 'gpu=reset', f'{A}=operator'], Policy.OPERATOR),
        (['none', 'gpu=reset', f'{B}=operator'], Policy.OPERATOR),
        (['nvme=reset', '0000:5e:00.0=none'], Policy.CLEAR),
    )
    @ddt.unpack
    def test_the_most_particular_counts(self, items, expected):
        self.config.config(handover=items, group='accel')
        self.assertIs(expected, handover.policy('gpu', B, A))

    @ddt.data(['often'], ['gpu='], ['gpu=clear', 'gpu=none'], ['x:y=none'],
              ['none', 'clear'])
    def test_cannot_be_read(self, items):
        self.config.config(handover=items, group='accel')
        error = self.assertRaises(exception.ConfigurationError,
                                  handover.policy, 'gpu')
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
