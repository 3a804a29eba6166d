# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks: given whole, and given on only when they are erased."""

from unittest import mock

from placement import db_api
from placement.objects import trait

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
        self.computes['compute1'].driver.parts.reconciler.run()

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


class OlderPlacementTest(base.AcceleratorTestBase):
    """Placement's os-traits lacks traits of the compute hosts."""

    FRESH_CLOUD = True
    HOSTS = {}

    def setUp(self):
        super().setUp()
        with db_api.get_placement_engine().begin() as db:
            db.execute(trait._TRAIT_TBL.delete().where(
                trait._TRAIT_TBL.c.name.like('HW_NVME_%')
                | (trait._TRAIT_TBL.c.name == 'HW_PCI_ONE_TIME_USE')))
        self.describe_host('compute1', {'nvmes': [
            {'address': DISK, 'sanitize': ['crypto', 'block']},
            {'address': ROOT}]})
        self.start_compute('compute1')

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['nvme'], group='accel',
                   handover=[f'{ROOT}=operator'])

    def standard(self):
        return {name: {t for t in traits if t.startswith('HW_')}
                for name, (_, traits, _) in self.provider_tree().items()}

    def test_upgrade_of_placement(self):
        disk, other = (self.provider_name('compute1', address)
                       for address in (DISK, ROOT))
        self.assertEqual({disk: set(), other: set()}, self.standard())
        self._delete_server(self.boot(FLAVOR))
        client = self.computes['compute1'].manager.reportclient
        with mock.patch.object(client, 'get', wraps=client.get) as get:
            for _ in range(2):
                self.report()
        self.assertEqual([], [call for call in get.call_args_list
                              if call.args[0].startswith('/traits')])
        self.assertEqual(sorted(
            ('HW_NVME_BES', 'HW_NVME_CES', 'HW_PCI_ONE_TIME_USE')), sorted(
            line.partition('have the trait ')[2].partition(',')[0]
            for line in self.stdlog.logger.output.splitlines()
            if 'Placement does not have the trait' in line))
        trait._trait_sync(db_api.DbContext())
        self.restart_compute_service('compute1')
        now = self.standard()
        self.assertEqual({'HW_NVME_BES', 'HW_NVME_CES'}, now[disk])
        self.assertIn('HW_PCI_ONE_TIME_USE', now[other])
