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

    def lose(self):
        store = self.parts('compute1').store
        self.computes['compute1'].stop()
        for suffix in ('', '-wal', '-shm'):
            if os.path.exists(store.path + suffix):
                os.unlink(store.path + suffix)
        self.restart_compute_service('compute1')

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
            (parts.holdings.unsettled(), self.claims())))
        self.report()
        third = self.boot(FLAVOR)
        self.assertNotEqual([disk], self.hostdevs(third))
        self._start_server(off)
        self.assertEqual([disk], self.hostdevs(off))
        self.assertEqual('a secret', disks.data_of_disk(disk))

    def test_servers_keep_their_disks(self):
        disks = self.simulated('compute1')
        runs, off = self.boot(FLAVOR), self.boot(FLAVOR)
        (of_runs,), (of_off,) = self.hostdevs(runs), self.hostdevs(off)
        free, = set(DISKS) - {of_runs, of_off}
        for disk in DISKS:
            disks.write_disk(disk, f'secret on {disk}')
        self._stop_server(off)
        self.lose()
        self._wait_for_assert(lambda: self.assertEqual(
            {(runs['id'], of_runs), (off['id'], of_off)},
            {(c.instance_uuid, c.handle.address) for c in self.claims()}))
        self._wait_for_assert(
            lambda: self.assertEqual('', disks.data_of_disk(free)))
        self._start_server(off)
        self.assertEqual([of_off], self.hostdevs(off))
        self._reboot_server(runs, hard=True)
        self.assertEqual([of_runs], self.hostdevs(runs))
        for disk in (of_runs, of_off):
            self.assertEqual(f'secret on {disk}', disks.data_of_disk(disk))
        self.report()
        third = self.boot(FLAVOR)
        self.assertEqual([free], self.hostdevs(third))
        for server in (runs, off, third):
            self._delete_server(server)
        self._wait_for_assert(lambda: self.assertEqual([], self.claims()))
        self.assertEqual(['', '', ''], [disks.data_of_disk(d) for d in DISKS])
