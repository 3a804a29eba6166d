# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks: given whole, and given on only when they are erased."""

from nova_accel import model
from tests.functional import base

DISK, ROOT, PF = '0000:5e:00.0', '0000:01:00.0', '0000:81:00.0'
CLASS = 'CUSTOM_ACCELERATOR_SSD'
FLAVOR = {f'resources1:{CLASS}': '1',
          'trait1:CUSTOM_SSD_SAMSUNG_A824': 'required'}
VF_FLAVOR = {f'resources1:{CLASS}': '1',
             'trait1:CUSTOM_SSD_MICRON': 'required'}


class NvmeTest(base.AcceleratorTestBase):

    HOSTS = {'compute1': {'nvmes': [
        {'address': DISK},
        {'address': ROOT, 'use': 'mounted at /'},
        {'address': PF, 'vendor': '1344', 'device': '51c4', 'total_vfs': 8,
         'use': 'mounted at /srv'}]}}

    def setUp(self):
        super().setUp()
        self.start = self.provider_tree()
        self.disk = self.simulated('compute1')

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['nvme'], virtual_functions=[f'{PF}=2'],
                   group='accel')

    def inventory(self):
        return self.provider_tree()[
            self.provider_name('compute1', DISK)][0]

    def assertAsAtStart(self):
        self.assertEqual([], self.claims())
        self.report()
        self.assertEqual(self.start, self.provider_tree())

    def delete_unerased(self, server):
        """After which the disk is kept from everybody."""
        self._delete_server(server)
        claim, = self.claims()
        self.assertIs(model.ClaimState.DELETING, claim.state)
        self.report()
        self.assertEqual({CLASS: (1, 1)}, self.inventory())
        self.assertIn('CUSTOM_ACCELERATOR_FENCED', self.traits(
            self.provider_name('compute1', DISK)))
        self.assertEqual('a secret', self.disk.data_of_disk(DISK))
        other = self.boot(FLAVOR, expected_state='ERROR')
        self.assertIn('No valid host', self.fault(other))
        self._delete_server(other)

    def compare(self):
        self.computes['compute1'].driver.reconciler.run()

    def test_boot(self):
        # the disk of the host is of the same kind, and does not count
        self.assertEqual(
            [{CLASS: (1, 0)}, {CLASS: (1, 0)}, {CLASS: (2, 0)}],
            [self.start[self.provider_name('compute1', a)][0]
             for a in (DISK, ROOT, PF)])
        server = self.boot(FLAVOR)
        self.assertEqual([DISK], self.hostdevs(server))
        self.disk.write_disk(DISK, 'a secret')
        vfs = [self.boot(VF_FLAVOR) for _ in range(2)]
        self.assertEqual([['0000:81:00.1'], ['0000:81:00.2']],
                         sorted(self.hostdevs(s) for s in vfs))
        # a guest that is made anew finds what was on it
        self.kernel('compute1').guest_returns(DISK)
        self.kernel('compute1').guest_takes(DISK)
        self.assertEqual('a secret', self.disk.data_of_disk(DISK))
        self.disk.write_disk('0000:81:00.2', 'a secret')
        for each in (server, *vfs):
            self._delete_server(each)
        for each in (DISK, '0000:81:00.2'):
            self.assertEqual('', self.disk.data_of_disk(each))
        self.assertAsAtStart()

    def test_disk_that_cannot_be_erased(self):
        server = self.boot(FLAVOR)
        self.disk.write_disk(DISK, 'a secret')
        self.disk.set_fault(DISK, format='refused')
        self.delete_unerased(server)
        self.assertIn('Input/output error', self.claims()[0].error)
        self.compare()
        self.assertEqual(1, len(self.claims()))
        # and it is erased when that can be
        self.disk.set_fault(DISK, format=None)
        self.compare()
        self.assertEqual('', self.disk.data_of_disk(DISK))
        self.assertAsAtStart()
        self.assertEqual([DISK], self.hostdevs(self.boot(FLAVOR)))

    def test_server_that_deletes_its_namespaces(self):
        server = self.boot(FLAVOR)
        self.disk.write_disk(DISK, 'a secret')
        self.disk.change_disk(DISK, namespaces=[])
        self.disk.set_fault(DISK, namespaces='refused')
        self.delete_unerased(server)
        self.disk.set_fault(DISK, namespaces=None)
        self.compare()
        self.assertEqual([1 << 39], [
            n.blocks * n.block_size
            for n in self.disk.read_nvme(DISK).namespaces])
        self.assertEqual('', self.disk.data_of_disk(DISK))
        self.assertAsAtStart()
        self.assertEqual([DISK], self.hostdevs(self.boot(FLAVOR)))

    def test_erasing_that_takes_long(self):
        server = self.boot(FLAVOR)
        self.flags(device_timeout=1, group='accel')
        self.disk.write_disk(DISK, 'a secret')
        self.disk.set_fault(DISK, hang='format')
        self.delete_unerased(server)
        self.flags(device_timeout=30, group='accel')
        # nobody has to ask again when it ends
        self.disk.set_fault(DISK, hang=None)
        self._wait_for_assert(lambda: self.assertEqual([], self.claims()))
        self.assertEqual('', self.disk.data_of_disk(DISK))
        self.assertAsAtStart()
        self.assertEqual([DISK], self.hostdevs(self.boot(FLAVOR)))

    def test_disk_that_the_host_began_to_use(self):
        # just now, so that no report says it yet
        self.disk.write_disk(DISK, 'of the operator')
        self.disk.use_disk(DISK, 'zfs')
        server = self.boot(FLAVOR, expected_state='ERROR')
        self.assertIn(f'{DISK} was allocated, and the host uses it',
                      self.fault(server))
        # what it was not given is not its to erase, then or later
        self.assertEqual([], self.claims())
        self.disk.use_disk(DISK, None)
        self._delete_server(server)
        self.compare()
        self.assertEqual('of the operator', self.disk.data_of_disk(DISK))
        self.assertAsAtStart()
