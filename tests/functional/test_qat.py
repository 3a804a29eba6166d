# Licensed under the Apache License, Version 2.0. See LICENSE.
"""VFs of QAT cards reach guests by what their card does."""

import time

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

    def test_host_boot(self):
        """Services and VFs that the kernel forgot are there again before the
        guests start."""
        self.flags(resume_guests_state_on_host_boot=True)
        server = self.boot_for('dc')
        held = self.assertHas(server)
        self.host_reboots('compute1')
        self._wait_for_state_change(server, 'ACTIVE')
        self.assertEqual(held, self.assertHas(server))
        self.assertEqual('dc', self.kernel('compute1').read(SERVICES))
        self._reboot_server(server, hard=True)
        self.assertEqual(held, self.assertHas(server))

    def test_lost_heartbeat(self):
        """Nobody gets a VF of a card that does not respond; who has one
        keeps it."""
        server = self.boot_for('dc')
        held = self.assertHas(server)
        self.kernel('compute1').set_fault(COMPRESSION, heartbeat='silent')
        for _ in range(3):
            time.sleep(0.25)
            self.accelerators('compute1').inventory.scan()
        self.report()
        inventory, traits, _ = self.tree(COMPRESSION)
        # and one is allocated
        self.assertEqual({CLASS: (16, 15)}, inventory)
        self.assertIn(naming.FENCED, traits)
        self.boot_for('dc', expected_state='ERROR')
        self.assertEqual(held, self.assertHas(server))
        self.kernel('compute1').set_fault(COMPRESSION, heartbeat=None)
        self.accelerators('compute1').inventory.scan()
        self.report()
        self.assertEqual({CLASS: (16, 0)}, self.tree(COMPRESSION)[0])
        self._reboot_server(server, hard=True)
        self.assertEqual(held, self.assertHas(server))

    def test_services_that_were_changed(self):
        """A trait follows the card, and is taken away with the service."""
        kernel = self.kernel('compute1')
        kernel.write_attribute(CRYPTO, 'qat/state', 'down')
        kernel.write_attribute(CRYPTO, 'qat/cfg_services', 'asym')
        kernel.write_attribute(CRYPTO, 'qat/state', 'up')
        kernel.set_numvfs(CRYPTO, 16)
        self.accelerators('compute1').inventory.scan()
        self.report()
        traits = self.tree(CRYPTO)[1]
        self.assertIn(service('asym'), traits)
        self.assertNotIn(service('sym'), traits)
