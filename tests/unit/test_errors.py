# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the owner of a server reads where libvirt refuses to start it."""

import types

import fixtures
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.virt import errors


class Refused(Exception):
    """As libvirt.libvirtError."""


class RefusedTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = self.useFixture(config_fixture.Config(conf.CONF))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.libvirt',
            types.SimpleNamespace(libvirtError=Refused)))
        self.log = self.useFixture(fixtures.FakeLogger())

    def fault(self):
        """Of a server whose last host this is."""
        builds = errors.Builds()
        server = types.SimpleNamespace(uuid='one')

        def build(instance, host_list):
            with builds.translated(instance, lambda: True):
                raise Refused(
                    'Requested operation is not valid: PCI device '
                    '0000:5e:00.1 is in use by driver QEMU, domain '
                    'instance-0000002a; see /var/lib/nova/instances/x')
        manager = types.SimpleNamespace(_do_build_and_run_instance=build)
        builds.watch(manager)
        return str(self.assertRaises(
            errors.BuildRefused, manager._do_build_and_run_instance,
            server, []))

    def test_fault(self):
        fault = self.fault()
        for word in ('simulated', 'instance-0000002a', '/var/lib'):
            self.assertNotIn(word, fault)
        self.assertIn('the reason is in the log of nova-compute', fault)
        self.assertIn('instance-0000002a', self.log.output)
        self.config.config(group='accel', simulated_host='/a/host.yaml')
        fault = self.fault()
        for word in ('simulated host', 'remove [accel] simulated_host'):
            self.assertIn(word, fault)
        # Nova cuts faults off
        self.assertLess(len(fault) + 35, 256)

    def test_log(self):
        log = self.log
        errors.warn_of_simulation()
        self.assertEqual('', log.output)
        self.config.config(group='accel', simulated_host='/a/host.yaml')
        errors.warn_of_simulation()
        self.assertIn('/a/host.yaml', log.output)
