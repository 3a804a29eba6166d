# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices that the operator gives back in Placement, as Nova's own devices of
one-time use."""

from tests.functional import openstack
from tests.functional import operations

NPU = '0000:5e:00.0'
FIRST, SECOND = '0000:5e:00.1', '0000:5e:00.2'
CLASS = 'CUSTOM_ACCELERATOR_AI'
FLAVOR = {f'resources1:{CLASS}': '1',
          'trait1:HW_PCI_ONE_TIME_USE': 'required'}


class OneTimeUseTest(operations.OperationsTestBase):

    HOSTS = {'compute1': {'others': [
        {'address': NPU, 'vendor': '19e5', 'device': 'd801',
         'class': '0x120000', 'driver': 'davinci', 'total_vfs': 2,
         'vfs': 2}]}}

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['pci'], handover=['pci=operator'],
                   pci_devices=['vendor=19e5 type=AI'], group='accel')

    def reserved(self):
        return self.provider_tree()[self.name][0][CLASS]

    @property
    def name(self):
        return self.provider_name('compute1', NPU)

    def report_afresh(self):
        """As after [compute] resource_provider_association_refresh."""
        self.computes['compute1'].driver.virtapi.reportclient \
            .clear_provider_cache()
        self.report()

    def lower(self, reserved):
        done = openstack.run(
            'resource', 'provider', 'inventory', 'set', '--amend',
            '--resource', f'{CLASS}:reserved={reserved}',
            self.provider(self.name)['uuid'])
        self.assertEqual((0, ''), (done[0], done[2]))

    def test_given_back(self):
        self.become_operator()
        servers = [self.boot(FLAVOR) for _ in range(2)]
        self.assertEqual([[FIRST], [SECOND]],
                         sorted(map(self.hostdevs, servers)))
        first, = [s for s in servers if self.hostdevs(s) == [FIRST]]
        second, = [s for s in servers if s != first]
        self._delete_server(first)
        # at once
        self.assertEqual((1, 0), self.reserved())
        self.report_afresh()
        self._delete_server(second)
        self.assertEqual((2, 2), self.reserved())
        self.report_afresh()
        self.restart_compute_service('compute1')
        self.report_afresh()
        self.assertEqual((2, 2), self.reserved())
        failed = self.boot(FLAVOR, expected_state='ERROR')
        self.assertIn('No valid host', self.fault(failed))
        self._delete_server(failed)
        self.lower(1)
        self.report_afresh()
        self.assertEqual((1, 0), self.reserved())
        server = self.boot(FLAVOR)
        self.assertEqual([FIRST], self.hostdevs(server))
        self._delete_server(server)
        self.report_afresh()
        self.lower(0)
        self.report_afresh()
        self.assertEqual((2, 0), self.reserved())
        self.assertEqual([], self.claims())
