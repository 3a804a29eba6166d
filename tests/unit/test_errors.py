# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is said of a simulated host, which libvirt does not know."""

import types

import fixtures
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.virt import errors


class Refused(Exception):
    """As libvirt.libvirtError."""


class SimulatedHostTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = self.useFixture(config_fixture.Config(conf.CONF))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.libvirt',
            types.SimpleNamespace(libvirtError=Refused)))

    def fault(self):
        """Of a server whose last host this is."""
        builds = errors.Builds()
        server = types.SimpleNamespace(uuid='one')

        def build(instance, host_list):
            with builds.translated(instance, lambda: True):
                raise Refused("unsupported configuration: host doesn't "
                              'support passthrough of host PCI devices')
        manager = types.SimpleNamespace(_do_build_and_run_instance=build)
        builds.watch(manager)
        return str(self.assertRaises(
            errors.BuildRefused, manager._do_build_and_run_instance,
            server, []))

    def test_fault(self):
        self.assertNotIn('simulated', self.fault())
        self.config.config(group='accel', simulated_host='/a/host.yaml')
        fault = self.fault()
        for word in ('simulated host', 'passthrough',
                     'remove [accel] simulated_host'):
            self.assertIn(word, fault)
        # Nova cuts faults off
        self.assertLess(len(fault) + 35, 256)

    def test_log(self):
        log = self.useFixture(fixtures.FakeLogger())
        errors.warn_of_simulation()
        self.assertEqual('', log.output)
        self.config.config(group='accel', simulated_host='/a/host.yaml')
        errors.warn_of_simulation()
        self.assertIn('/a/host.yaml', log.output)
