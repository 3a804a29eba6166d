# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices that only a rule of the operator knows reach guests."""

from tests.functional import guests
from tests.functional import operations

NPU, GAUDI, NIC = '0000:5e:00.0', '0000:81:00.0', '0000:3d:00.0'
#: a card of which all VFs are one accelerator
BOARD, FUNCTIONS = '0000:b1:00.0', ['0000:b1:00.1', '0000:b1:00.2']
CLASS = 'CUSTOM_ACCELERATOR_AI'


def flavor(trait):
    return {f'resources1:{CLASS}': '1', f'trait1:{trait}': 'required'}


class PciRuleTest(guests.Reads, operations.OperationsTestBase):

    HOSTS = {'compute1': {
        'others': [
            {'address': NPU, 'vendor': '19e5', 'device': 'd801',
             'class': '0x120000', 'driver': 'davinci', 'total_vfs': 4},
            {'address': GAUDI, 'vendor': '1da3', 'device': '1020',
             'class': '0x120000', 'driver': 'habanalabs'},
            {'address': BOARD, 'vendor': '8086', 'device': 'bcce',
             'class': '0x120000', 'driver': 'dfl-pci', 'total_vfs': 2}],
        'nics': [{'address': NIC}]}}

    def setUp(self):
        super().setUp()
        self.start = self.provider_tree()

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(
            enabled_drivers=['pci'],
            virtual_functions=[f'{NPU}=2', f'{BOARD}=2'],
            pci_devices=['vendor=19e5 type=AI traits=CUSTOM_NPU_ASCEND '
                         'name=ASCEND_310',
                         'driver=habanalabs type=AI name=GAUDI2',
                         f'address={BOARD} type=AI name=BOARD vfs=together',
                         'class=0200* type=NIC'], group='accel')

    def test_boot(self):
        self.assertEqual(
            [{CLASS: (2, 0)}, {CLASS: (1, 0)}, {CLASS: (1, 0)}, {}],
            [self.start[self.provider_name('compute1', a)][0]
             for a in (NPU, GAUDI, BOARD, NIC)])
        self.assertLessEqual(
            {'CUSTOM_AI_HUAWEI', 'CUSTOM_AI_HUAWEI_ASCEND_310',
             'CUSTOM_NPU_ASCEND'},
            self.traits(self.provider_name('compute1', NPU)))
        # the host's network is shown, and given to nobody
        self.assertIn('CUSTOM_ACCELERATOR_FENCED',
                      self.traits(self.provider_name('compute1', NIC)))
        servers = [self.boot(flavor(trait)) for trait in (
            'CUSTOM_NPU_ASCEND', 'CUSTOM_NPU_ASCEND',
            'CUSTOM_AI_HABANA_GAUDI2', 'CUSTOM_AI_INTEL_BOARD')]
        self.assertEqual(
            [['0000:5e:00.1'], ['0000:5e:00.2'], [GAUDI], FUNCTIONS],
            sorted(self.hostdevs(s) for s in servers))
        self.assertEqual(4, len(self.claims()))
        # its guest knows each function
        places = self.places(servers[3])
        self.assertEqual(
            {places[function]: ['accelerator', 'accel1', 'AI']
             for function in FUNCTIONS},
            {device['address']: device['tags']
             for device in self.devices(servers[3])})
        # a rule by the driver knows it also while a guest has it
        self.parts('compute1').inventory.scanner.scan()
        self.report()
        self.assertEqual({name: there[:2] for name, there
                          in self.start.items()},
                         {name: there[:2] for name, there
                          in self.provider_tree().items()})
        for server in servers:
            self._delete_server(server)
        self.assertEqual([], self.claims())
        self.assertEqual(self.start, self.provider_tree())
