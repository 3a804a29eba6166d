# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is done for one server of a card keeps no other server of it down."""

import threading
import time

from nova_accel import exception
from nova_accel import model
from tests.host import base
from tests.unit.host import A, FUNCTION, OTHER, plain

SSD = 'CUSTOM_ACCELERATOR_SSD'
QAT = 'CUSTOM_ACCELERATOR_QAT'


class VfsBase:
    """The VF of a server that was deleted takes long to be clean."""

    CLASS, KEY, VALUE = SSD, 'hang', 'format'

    def start(self):
        self.start_host(nvmes=[{'address': A, 'total_vfs': 4, 'vfs': 4}],
                        drivers=('nvme',))

    def setUp(self):
        super().setUp()
        self.start()
        self.eve, self.mine = self.boot(), self.boot()
        self.handle, = self.host.devices_of(self.eve)

    def boot(self):
        return self.host.boot({f'resources1:{self.CLASS}': '1'},
                              self.host.allocation(A, self.CLASS))

    def fault(self, value):
        self.simulated.kernel.set_fault(A, **{self.KEY: value})

    def assertStarts(self):
        devices = self.host.devices_of(self.mine)
        self.host.reboot(self.mine)
        self.assertHas(self.mine, *devices)
        # Nova's resume, and its start after a boot of the host, as well
        self.host.cloud.stop_guest(self.mine)
        self.host.start_guest(self.mine)
        self.assertHas(self.mine, *devices)

    def test_others_start(self):
        self.fault(self.VALUE)
        deleting = threading.Thread(
            target=self.host.delete, args=(self.eve,))
        deleting.start()
        self.addCleanup(deleting.join)
        self.addCleanup(self.fault, None)
        self.wait_for(self.host.holdings.being_released)
        began = time.monotonic()
        self.assertStarts()
        self.assertLess(time.monotonic() - began, 20)
        # and a new server gets another VF
        new, = self.host.devices_of(self.boot())
        self.assertNotEqual(self.handle, new)

    def test_beyond_the_limit(self):
        """The VF that is not clean goes to nobody, and the others are as
        before; nova-compute may start again meanwhile."""
        self.fault(self.VALUE)
        self.addCleanup(self.fault, None)
        self.config.config(device_timeout=1, group='accel')
        self.host.delete(self.eve)
        claim, = self.host.holdings.being_released()
        self.assertEqual(self.handle, claim.handle.address)
        self.host.inventory.scanner.scan()
        self.host.report()
        self.assertStarts()
        self.config.config(device_timeout=60, group='accel')
        given = {*self.host.devices_of(self.mine)}
        for _ in range(2):
            new, = self.host.devices_of(self.boot())
            given.add(new)
        self.assertEqual(3, len(given - {self.handle}))
        self.fault(None)
        self.wait_for(lambda: not self.host.holdings.being_released())
        # it is offered again, whatever a scan saw of it meanwhile
        self.assertIn(self.handle, {
            h.address for h in self.host.inventory.devices[A].handles})
        self.host.report()
        self.assertEqual([], self.host.fenced())


class DiskTest(VfsBase, base.HostTestCase):

    pass


class QatTest(VfsBase, base.HostTestCase):

    CLASS, KEY, VALUE = QAT, 'reset', 'hang'

    def start(self):
        self.start_host(qats=[{'address': A, 'vfs': 16}],
                        drivers=('qat',))


class RegionTest(base.HostTestCase):
    """One region of a card is programmed, and another one's server starts."""

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.config.config(programming_timeout=60, group='accel')
        self.start_host({'address': A, 'ports': 3})
        self.image = self.host.upload(FUNCTION)
        self.other = self.host.upload(OTHER)

    def boot(self, index, specs=None):
        uuid, = [p.uuid for p in self.host.inventory.shown.providers().values()
                 if (p.region_index, p.addresses) == (index, (A,))]
        return self.host.boot(
            base.ONE if specs is None else specs,
            {uuid: {'resources': {base.FPGA: 1}}})

    def fault(self, value):
        self.simulated.kernel.set_fault(A, hang=value)

    def hang(self):
        """Eve's bitstream does not come to its end."""
        self.fault('program')
        self.addCleanup(self.fault, None)
        self.config.config(programming_timeout=1, group='accel')
        self.assertRaises(exception.DeviceTimeout, self.boot, 0,
                          base.asks(OTHER))
        self.config.config(programming_timeout=60, group='accel')
        self.assertTrue(self.host.inventory.cards.hanging(A))

    def test_card_that_hangs(self):
        """Nothing is asked of the card for a server whose region is as it
        was."""
        plain_one, mine = self.boot(1), self.boot(2, base.asks(FUNCTION))
        self.hang()
        for server in plain_one, mine:
            devices = self.host.devices_of(server)
            self.host.reboot(server)
            self.assertHas(server, *devices)

    def test_who_needs_something_of_a_card_that_hangs(self):
        """Its region has lost its function: that is said, at once."""
        mine = self.boot(2, base.asks(FUNCTION))
        self.host.cloud.stop_guest(mine, undefine=True)
        self.hang()
        self.host.inventory.contents.forget(A, 2, model.OPERATOR)
        began = time.monotonic()
        error = self.assertRaises(exception.DeviceTimeout,
                                  self.host.start_guest, mine)
        self.assertIn('region2 by the driver dfl cannot begin', str(error))
        self.assertLess(time.monotonic() - began, 20)

    def test_region_that_is_programmed_itself(self):
        """Its own server does not start under the programming."""
        mine = self.boot(0, base.asks(runtime_programming='true'))
        self.fault('program')
        self.addCleanup(self.fault, None)
        self.config.config(programming_timeout=1, group='accel')
        self.host.ask(mine, self.other)
        self.host.run_runtime()
        self.assertRaises(exception.AcceleratorError, self.host.reboot, mine)
        self.assertIsNone(self.host.devices_of(mine))
        self.fault(None)
        while self.host.inventory.cards.hanging(A):
            time.sleep(0.01)

    def test_each_has_its_own_limit(self):
        """After a power cut all regions are programmed again, one after the
        other; each of them within its limit."""
        servers = [self.boot(index, base.asks(FUNCTION))
                   for index in range(3)]
        self.host.power_cut()
        program = self.host.kernel.program_dfl_port

        def slowly(*args):
            time.sleep(1.2)
            return program(*args)
        self.host.kernel.program_dfl_port = slowly
        self.config.config(programming_timeout=2, group='accel')
        self.restart()
        said = []

        def start(server):
            try:
                self.host.start_guest(server)
            except exception.AcceleratorError as error:
                said.append(str(error))
        threads = [threading.Thread(target=start, args=(server,))
                   for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([], said)
        for index in range(3):
            self.assertEqual(plain(FUNCTION), self.host.carries(A, index))
