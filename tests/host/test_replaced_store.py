# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The file of claims is removed or replaced while nova-compute runs."""

import os
import shutil
import time

import ddt

from nova_accel.admin import orders
from nova_accel import exception
from nova_accel.store import claim_store
from tests.host import base
from tests.host import cloud as clouds

ONE, TWO = '0000:02:00.0', '0000:03:00.0'
SSD = 'CUSTOM_ACCELERATOR_SSD'
FLAVOR = {f'resources1:{SSD}': '1'}


@ddt.ddt
class ReplacedTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.start_host(nvmes=[{'address': a} for a in (ONE, TWO)],
                        drivers=('nvme',))
        self.path = os.path.join(
            self.directory, claim_store.file_name(clouds.NODE))

    def boot(self):
        return self.host.boot(FLAVOR, self.host.allocation(None, SSD))

    def move_away(self):
        os.mkdir(f'{self.directory}/aside')
        for suffix in '', '-wal', '-shm':
            shutil.move(f'{self.path}{suffix}', f'{self.directory}/aside')

    def removed(self):
        self.move_away()

    def replaced(self):
        copy = f'{self.directory}/copy'
        self.host.store._db.execute('VACUUM INTO ?', (copy,))
        self.move_away()
        os.rename(copy, self.path)

    @ddt.data('removed', 'replaced')
    def test_nothing_is_claimed_in_it(self, how):
        kept = self.boot()
        getattr(self, how)()
        error = self.assertRaises(
            exception.AcceleratorsUnavailable,
            self.host.store.refresh)
        self.assertIn('start nova-compute again', str(error))
        self.assertIn(self.path, str(error))
        self.assertRaises(exception.AcceleratorsUnavailable, self.boot)
        # a server that holds something goes on, and may be deleted
        self.host.reboot(kept)
        self.host.delete(kept, wait=False)

    @ddt.data('removed', 'replaced')
    def test_log(self, how):
        """Within a second or so, and once."""
        getattr(self, how)()
        ends = time.monotonic() + base.PATIENCE
        while 'start nova-compute again' not in self.log.output:
            self.assertLess(time.monotonic(), ends)
            time.sleep(orders.INTERVAL / 10)
        time.sleep(2 * orders.INTERVAL)
        self.assertEqual(1, self.log.output.count('start nova-compute again'))

    def test_disabled_in_the_other_file(self):
        """A command writes into the new file, which nova-compute does not
        read: nothing is given to a server until it has started again."""
        self.replaced()
        for address in ONE, TWO:
            self.host.write_disabled(address)
        self.assertRaises(exception.AcceleratorsUnavailable, self.boot)
        self.restart()
        self.assertRaises(exception.DeviceUnavailable, self.boot)

    def test_it_returns(self):
        server = self.boot()
        self.removed()
        self.assertRaises(exception.AcceleratorsUnavailable, self.boot)
        for name in os.listdir(f'{self.directory}/aside'):
            shutil.move(f'{self.directory}/aside/{name}', self.directory)
        self.host.delete(server)
        self.assertEqual([], self.host.holdings.all())
