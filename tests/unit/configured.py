# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Tests that set options."""

from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf


class TestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = self.useFixture(config_fixture.Config(conf.CONF))
