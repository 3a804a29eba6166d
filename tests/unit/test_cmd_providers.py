# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What nova-accel providers purge refuses before it asks a service."""

import argparse
import os
import types

import fixtures

from nova_accel.cmd import providers
from nova_accel import conf
from nova_accel import exception
from tests.unit import commands


class PurgeTest(commands.CommandTestCase):

    def setUp(self):
        super().setUp()
        self.addCleanup(conf.CONF.reset)
        self.useFixture(fixtures.EnvironmentVariable(
            'OS_CLIENT_CONFIG_FILE', os.path.join(self.directory, 'none')))

    def refused(self, host, driver):
        with open(self.config, 'a') as file:
            file.write(f'[DEFAULT]\ncompute_driver = {driver}\n')
        command = providers.PurgeProviders(types.SimpleNamespace(), None)
        return str(self.assertRaises(
            exception.ConfigurationError, command.take_action,
            argparse.Namespace(config_file=[self.config], host=host,
                               os_cloud=None, dry_run=False, columns=[])))

    def test_own_host_that_would_create_them_again(self):
        self.assertIn('compute_driver = accel.AccelLibvirtDriver',
                      self.refused('compute1', 'accel.AccelLibvirtDriver'))

    def test_without_credentials(self):
        for host, driver in (('compute1', 'libvirt.LibvirtDriver'),
                             ('compute2', 'accel.AccelLibvirtDriver')):
            error = self.refused(host, driver)
            self.assertIn('Credentials were read from the environment', error)
            self.assertIn('OS_CLOUD', error)
            self.assertNotIn('\n', error)
