# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The file of claims is moved away, or an older copy of it is put back, while
nova-compute is stopped."""

import os

from tests.functional import operations

DISKS = ('0000:02:00.0', '0000:03:00.0', '0000:04:00.0')
FLAVOR = {'resources1:CUSTOM_ACCELERATOR_SSD': '1'}


class LostStoreTest(operations.OperationsTestBase):

    HOSTS = {'compute1': {'nvmes': [{'address': a} for a in DISKS]}}

    def _setup_compute_service(self):
        super()._setup_compute_service()
        self.flags(enabled_drivers=['nvme'], group='accel')

    def test_older_copy(self):
        """Guests carry what the copy does not know."""
        disks = self.simulated('compute1')
        store = self.parts('compute1').store
        copy = f'{self.directory}/copy'
        self.boot(FLAVOR)
        store._db.execute('VACUUM INTO ?', (copy,))
        off = self.boot(FLAVOR)
        disk, = self.hostdevs(off)
        disks.write_disk(disk, 'a secret')
        self._stop_server(off)
        before = self.claims()
        self.computes['compute1'].stop()
        for suffix in ('', '-wal', '-shm'):
            if os.path.exists(store.path + suffix):
                os.unlink(store.path + suffix)
        os.rename(copy, store.path)
        self.restart_compute_service('compute1')
        self.assertEqual(before, [c for c in self.claims()
                                  if c.instance_uuid])
        parts = self.parts('compute1')
        self._wait_for_assert(lambda: self.assertEqual(
            (frozenset(), before),
            (parts.store.unsettled(), self.claims())))
        self.report()
        third = self.boot(FLAVOR)
        self.assertNotEqual([disk], self.hostdevs(third))
        self._start_server(off)
        self.assertEqual([disk], self.hostdevs(off))
        self.assertEqual('a secret', disks.data_of_disk(disk))
