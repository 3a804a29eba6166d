# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova's own PCI devices on the same hosts, in Placement as well."""

from unittest import mock

from keystoneauth1 import exceptions as ks_exceptions

from tests.functional import base
from tests.functional.beside_nova import BesideNovaTestBase, NATIVE, NOVAS


class PciInPlacementTest(BesideNovaTestBase):

    HOSTS = {'compute1': {'cards': [base.card('0000:5e:00.0')],
                          'others': [NOVAS]}}

    def usages(self):
        """(provider name, class) of what is in use, without Nova's root."""
        return {
            (provider['name'], resource_class)
            for provider in self.placement.get(
                '/resource_providers', version='1.14',
            ).body['resource_providers']
            for resource_class, amount in self.placement.get(
                f'/resource_providers/{provider["uuid"]}/usages',
            ).body['usages'].items()
            if amount and resource_class.startswith('CUSTOM_')}

    def test_each_gets_its_own(self):
        native = {'pci_passthrough:alias': 'native:1'}
        of_nova, ours = self.boot(native), self.boot(base.fpga_flavor())
        both = {('compute1_0000:81:00.0', NATIVE),
                ('compute1_accel_0000:5e:00.0_region0',
                 'CUSTOM_ACCELERATOR_FPGA')}
        self.assertEqual(both, self.usages())
        self.assertEqual(['0000:81:00.0'], self.hostdevs(of_nova))
        self.assertEqual(['0000:5e:00.1'], self.hostdevs(ours))
        # what is left for one is not for the other
        for flavor in (native, base.fpga_flavor()):
            self.boot(flavor, expected_state='ERROR')
        self._delete_server(of_nova)
        self._delete_server(ours)
        self.assertEqual(set(), self.usages())
        # both in one server
        server = self.boot({**native, **base.fpga_flavor()})
        self.assertEqual(both, self.usages())
        self.assertEqual(['0000:5e:00.1', '0000:81:00.0'],
                         self.hostdevs(server))
        self._reboot_server(server, hard=True)
        self.assertEqual(['0000:5e:00.1', '0000:81:00.0'],
                         self.hostdevs(server))
        self.restart_compute_service('compute1')
        self.report()
        self.assertEqual(both, self.usages())
        self._delete_server(server)
        self.assertEqual([], self.claims())


class HealedTest(BesideNovaTestBase):
    """Nova itself allocates PCI devices in Placement: it reads there what is
    allocated on the host, adds its own, and sends all of that back."""

    HOSTS = {'compute1': {'cards': [base.card('0000:5e:00.0')],
                          'others': [NOVAS]}}
    NATIVE = {'pci_passthrough:alias': 'native:1'}

    def start_compute(self, hostname, *args, **kwargs):
        found = super().start_compute(hostname, *args, **kwargs)
        # the scheduler allocates nothing for Nova's devices
        self.flags(pci_in_placement=False, group='filter_scheduler')
        return found

    def allocated(self, server):
        return {name for given in self._get_allocations_by_server_uuid(
            server['id']).values() for name in given['resources']}

    def test_healed(self):
        ours = self.boot(base.fpga_flavor())
        server = self.boot(self.NATIVE)
        self.assertIn(NATIVE, self.allocated(server))
        self.assertIn('CUSTOM_ACCELERATOR_FPGA', self.allocated(ours))
        self.assertEqual(['0000:81:00.0'], self.hostdevs(server))

    def test_placement_is_away_just_then(self):
        client = self.computes['compute1'].manager.reportclient
        get = client.get

        def failing(url, *args, **kwargs):
            if url.endswith('/allocations'):
                raise ks_exceptions.ConnectFailure('Placement is away')
            return get(url, *args, **kwargs)
        with mock.patch.object(client, 'get', failing):
            server = self.boot(self.NATIVE, expected_state='ERROR')
        self._delete_server(server)
        # Nova releases the device of a claim that failed
        self.report()
        server = self.boot(self.NATIVE)
        self.assertIn(NATIVE, self.allocated(server))
