# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What nova-accel providers purge refuses, and what it removes."""

import argparse
import os
import types

import fixtures
from keystoneauth1 import exceptions as keystone

from nova_accel.cmd import providers
from nova_accel import conf
from nova_accel import exception
from tests.unit import commands
from tests.unit import configured


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


class Placement:
    """The providers of a host; answers as cmd.cloud.Cloud does."""

    def __init__(self, *providers):
        self.root = types.SimpleNamespace(
            name='compute1', uuid='root', parent=None, traits=(),
            allocations={})
        self.providers = {p.uuid: p for p in providers}
        #: what deleting a provider raises, once
        self.error = None
        self.deleted = []

    def trees(self, hosts):
        return [[self.root, *self.providers.values()]]

    def read(self, found, what):
        return list(found)

    def adapter(self, service):
        return self

    def delete(self, url):
        uuid = url.rpartition('/')[2]
        error, self.error = self.error, None
        if error:
            raise error
        if uuid in {p.parent for p in self.providers.values()}:
            raise keystone.Conflict('it has children')
        self.deleted.append(self.providers.pop(uuid).name)

    def hypervisors(self):
        return {host: {'hypervisor_hostname': host, 'state': state}
                for host, state in (('compute1', 'down'), ('compute11', 'up'))}


def provider(name, parent='root', owned=True, **allocations):
    return types.SimpleNamespace(
        name=f'compute1_accel_{name}', uuid=name, parent=parent,
        traits=('OWNER_CYBORG',) if owned else (), allocations=allocations)


class RemoveTest(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.config.config(group='accel', owner_trait='OWNER_CYBORG')
        card = provider('0000:5e:00.0')
        self.region = provider('0000:5e:00.0_region0', parent=card.uuid)
        self.placement = Placement(card, self.region)

    def purge(self, **kwargs):
        return [p.name for p in providers.purge(
            self.placement, 'compute1', **kwargs)]

    def test_children_first(self):
        both = ['compute1_accel_0000:5e:00.0_region0',
                'compute1_accel_0000:5e:00.0']
        self.assertEqual(both, self.purge())
        self.assertEqual(both, self.placement.deleted)

    def test_dry_run(self):
        self.assertEqual(2, len(self.purge(dry_run=True)))
        self.assertEqual([], self.placement.deleted)

    def test_in_use(self):
        """Nothing is removed, also not what is free."""
        self.region.allocations['a server'] = {}
        for dry_run in True, False:
            error = self.assertRaises(exception.DeviceUnavailable,
                                      self.purge, dry_run=dry_run)
            self.assertIn(f'a server from {self.region.name}', str(error))
        self.assertEqual([], self.placement.deleted)

    def test_allocated_from_since(self):
        def conflict(url):
            self.region.allocations['a server'] = {}
            raise keystone.Conflict('in use')
        self.placement.delete = conflict
        self.assertRaises(exception.DeviceUnavailable, self.purge)

    def test_removed_by_another_one(self):
        self.placement.error = keystone.NotFound()
        self.placement.providers[self.region.uuid].parent = 'root'
        self.assertEqual(2, len(self.purge()))

    def test_provider_of_others(self):
        """Its name is as those of nova_accel, and it lacks the trait."""
        other = provider('0000:af:00.0', owned=False)
        self.placement.providers[other.uuid] = other
        self.purge()
        self.assertEqual({other.uuid}, self.placement.providers.keys())

    def test_running(self):
        """Of a host whose name is not the beginning of another one."""
        for host, runs in (('compute1', False), ('compute11', True)):
            self.assertIs(runs, providers.is_running(self.placement, host))
