# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Hosts on which Nova has PCI devices of its own."""

import json

import fixtures
from nova.tests.fixtures import libvirt as fakelibvirt

from tests.functional import operations

ALIAS = {'vendor_id': fakelibvirt.PCI_VEND_ID,
         'product_id': fakelibvirt.PCI_PROD_ID}
NATIVE = f'CUSTOM_PCI_{fakelibvirt.PCI_VEND_ID}_{fakelibvirt.PCI_PROD_ID}'
NOVAS = {'address': '0000:81:00.0', 'numa_node': 1,
         'vendor': fakelibvirt.PCI_VEND_ID,
         'device': fakelibvirt.PCI_PROD_ID}


class BesideNovaTestBase(operations.OperationsTestBase):

    #: hosts on which libvirt shows Nova's device
    WITH_NOVAS = ('compute1',)

    def setUp(self):
        # of which Nova asks this machine's sysfs
        self.useFixture(fixtures.MockPatch(
            'nova.pci.utils.is_physical_function', return_value=False))
        self.useFixture(fixtures.MockPatch(
            'nova.pci.utils.get_function_by_ifname',
            return_value=(None, False)))
        super().setUp()

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(device_spec=[json.dumps(ALIAS)], report_in_placement=True,
                   alias=[json.dumps({**ALIAS, 'name': 'native'})],
                   group='pci')
        self.flags(pci_in_placement=True, enabled_filters=[
            'ComputeFilter', 'PciPassthroughFilter', 'AcceleratorFilter'],
            group='filter_scheduler')
        if not args:
            # at a restart libvirt is there already
            kwargs['pci_info'] = fakelibvirt.HostPCIDevicesInfo(
                num_pci=int(hostname in self.WITH_NOVAS), num_pfs=0,
                num_vfs=0)
        return super().start_compute(hostname, *args, **kwargs)
