# Licensed under the Apache License, Version 2.0. See LICENSE.
"""VFs of QAT cards reach guests by what their card does."""

from nova_accel import naming
from tests.functional import operations

CRYPTO, COMPRESSION = '0000:6b:00.0', '0000:70:00.0'
CLASS = 'CUSTOM_ACCELERATOR_QAT'
SERVICES = f'bus/pci/devices/{COMPRESSION}/qat/cfg_services'


def service(name):
    return naming.property_trait('QAT', 'SERVICE', name)


class QatTest(operations.OperationsTestBase):

    HOSTS = {'compute1': {'qats': [{'address': CRYPTO, 'numa_node': 0},
                                   {'address': COMPRESSION}]}}
    RESOURCE_CLASS = CLASS

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_drivers=['qat'],
                   qat_services=['sym;asym', f'{COMPRESSION}=dc'],
                   virtual_functions=[f'{CRYPTO}=16', f'{COMPRESSION}=16'],
                   group='accel')
        return super().start_compute(hostname, *args, **kwargs)

    def boot_for(self, *services, **kwargs):
        return self.boot({f'resources1:{CLASS}': '1', **{
            f'trait1:{service(name)}': 'required' for name in services}},
            **kwargs)

    def tree(self, address):
        return self.provider_tree()[self.provider_name('compute1', address)]

    def test_service_by_trait(self):
        self.assertEqual(
            ({CLASS: (16, 0)},
             {'CUSTOM_QAT_INTEL', 'CUSTOM_QAT_INTEL_4XXX',
              'CUSTOM_QAT_INTEL_GEN4', 'OWNER_CYBORG', service('dc'),
              'CUSTOM_ACCELERATOR_PCIE_ROOT_0000_70'}),
            self.tree(COMPRESSION)[:2])
        for services, bus in ((['dc'], '70'), (['sym', 'asym'], '6b')):
            server = self.boot_for(*services)
            (_, address), = self.assertHas(server)
            self.assertEqual(bus, address[5:7])
        self.assertEqual([1, 1], [self.tree(a)[2][CLASS]
                                  for a in (CRYPTO, COMPRESSION)])
        failed = self.boot_for('sym', 'dc', expected_state='ERROR')
        self.assertIn('No valid host', self.fault(failed))
        self.delete_servers()
        self.assertEqual([0, 0], [self.tree(a)[2][CLASS]
                                  for a in (CRYPTO, COMPRESSION)])
