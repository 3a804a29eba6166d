# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the operator or nova.conf has decided about a device is not called a
failure: the owner of its server reads nothing of it."""

import ddt

from nova_accel.inventory import holds
from tests.host import base
from tests.unit.host import A

NPU = {'vendor': '19e5', 'device': 'd801', 'class': '0x120000',
       'driver': 'davinci'}
XE = {'vendor': '8086', 'device': 'e211', 'driver': 'xe', 'types': [],
      'framework': 'sriov', 'total_vfs': 2}
#: name -> driver, key of the description, card, options, resource class
KINDS = {
    'pci': ('pci', 'others', NPU, {
        'pci_devices': ['vendor=19e5 type=AI']}, 'AI'),
    'gpu': ('gpu', 'gpus', {}, {}, 'GPU'),
    'nvme': ('nvme', 'nvmes', {}, {}, 'SSD'),
    'dfl': ('dfl', 'cards', {'vfs': 1}, {}, 'FPGA'),
    'qat': ('qat', 'qats', {'vfs': 16}, {
        'virtual_functions': [f'{A}=16']}, 'QAT'),
    'xe': ('vgpu', 'vgpus', XE, {
        'virtual_functions': [f'{A}=2']}, 'VGPU')}


@ddt.ddt
class LeftOutTest(base.HostTestCase):

    POOLS = 'none'

    def start(self, kind):
        driver, key, card, options, type_ = KINDS[kind]
        # looks are those of the test
        self.config.config(discovery_interval=3600, health=['act'],
                           group='accel')
        if key == 'cards':
            self.start_host({'address': A, **card})
        else:
            self.start_host(drivers=[driver], **{
                key: [{'address': A, **card}]})
        self.config.config(**options, group='accel')
        self.restart()
        resource_class = f'CUSTOM_ACCELERATOR_{type_}'
        self.server = self.host.boot(
            {f'resources1:{resource_class}': '1'},
            self.host.allocation(resource_class=resource_class))
        self.host.cloud.stop_guest(self.server, undefine=True)

    def change(self, **options):
        """The operator changes nova.conf, and nova-compute starts."""
        self.config.config(group='accel', **options)
        self.restart()
        self.look()

    def look(self):
        for _ in range(2):
            self.host.inventory.looks.run()

    def told(self):
        self.host.owners.run()
        return [*self.host.cloud.read()['servers'][self.server][
            'metadata'].values()]

    def holds(self):
        return {hold.kind: hold.reason
                for hold in self.host.inventory.table.holds_of(A)}

    def assertLeftOut(self, reason):
        self.assertEqual({holds.Kind.LEFT_OUT: reason}, self.holds())
        self.assertEqual([], self.told())
        # its server reads that it is the configuration
        error = self.assertRaises(Exception, self.host.start_guest,
                                  self.server)
        self.assertNotIn('put the card back', str(error))

    @ddt.data(*KINDS)
    def test_driver_that_is_disabled(self, kind):
        self.start(kind)
        driver = KINDS[kind][0]
        self.change(enabled_drivers=[])
        self.assertLeftOut(
            f'its driver {driver} is not in [accel] enabled_drivers')
        self.change(enabled_drivers=[driver])
        self.assertEqual({}, self.holds())
        self.host.start_guest(self.server)

    @ddt.data(*KINDS)
    def test_device_that_is_gone(self, kind):
        """Also where nova.conf left it out before."""
        self.start(kind)
        self.change(enabled_drivers=[])
        self.host.kernel.set_fault(A, vanish=True)
        self.change(enabled_drivers=[KINDS[kind][0]])
        self.assertEqual([holds.Kind.GONE], [*self.holds()])
        self.assertEqual(['gone: 1 of 1'], self.told())

    @ddt.data(*KINDS)
    def test_device_that_is_excluded(self, kind):
        self.start(kind)
        self.change(exclude_devices=[f'address={A}'])
        self.assertLeftOut('[accel] include_devices and [accel] '
                           'exclude_devices leave it out')
        self.change(exclude_devices=[])
        self.assertEqual({}, self.holds())

    def test_rule_that_was_removed(self):
        self.start('pci')
        self.change(pci_devices=['vendor=1234 type=AI'])
        self.assertLeftOut('no rule of [accel] pci_devices names it')
        self.host.kernel.set_fault(A, vanish=True)
        self.host.inventory.scanner.scan()
        self.assertEqual([holds.Kind.GONE], [*self.holds()])
        self.assertEqual(['gone: 1 of 1'], self.told())

    @ddt.data(('qat', 'it has no VFs, and is not given to a guest whole'),
              ('xe', 'it has neither VFs nor types of vGPUs now'))
    @ddt.unpack
    def test_vfs_that_are_not_wanted_any_more(self, kind, reason):
        self.start(kind)
        self.host.kernel.set_numvfs(A, 0)
        self.change(virtual_functions=[])
        self.assertIn(reason, ''.join(self.holds().values()))
        self.assertEqual([], self.told())

    def test_gpu_that_is_shared_out(self):
        self.start('gpu')
        self.simulated.describe(gpus=[{'address': A, 'mdev': True}])
        self.change()
        self.assertIn('it is shared out as mediated devices',
                      self.holds()[holds.Kind.UNUSABLE])
        self.assertEqual([], self.told())

    def test_gpu_that_fails(self):
        """The contract tells both apart."""
        self.start('gpu')
        self.host.kernel.set_fault(A, dead=True)
        self.look()
        self.assertEqual(['failed: 1 of 1'], self.told())
