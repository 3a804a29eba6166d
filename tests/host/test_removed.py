# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A card is removed while a guest has it.

vfio-pci has QEMU ask the guest for the device, again each ten seconds, and the
removal waits until the guest lets go (vfio_unregister_group_dev() in
drivers/vfio/vfio_main.c of Linux 6.12; vfio_req_notifier_handler() in
hw/vfio/pci.c of QEMU). Then libvirt takes it out of the running guest, not out
of its definition (processDeviceDeletedEvent() in qemu_driver.c), and the kernel
forgets the function. A card that was pulled reads as all ones until then.
"""

from nova_accel import exception
from nova_accel import model
from tests.host import health
from tests.host.health import ONE, TWO


class RemovedTest(health.HealthTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        self.start(ONE, TWO)
        self.server = self.boot()
        self.look()

    def remove(self):
        """The guest lets go."""
        claim, = self.host.holdings.of(self.server)
        self.host.cloud.detach(self.server, [claim.handle])
        self.host.kernel.set_fault(ONE, vanish=True)
        self.look_twice()

    def rescan(self):
        self.host.kernel.set_fault(ONE, vanish=None)
        self.look_twice()

    def look_twice(self):
        """What is gone, or new, is found by a scan that the look begins."""
        self.look()
        self.look()

    def wait_told(self, *said):
        self.wait_for(lambda: [*self.host.cloud.read()['servers'][self.server][
            'metadata'].values()] == [*said])

    def resets(self):
        return len(self.host.kernel.resets(ONE))

    def test_pulled(self):
        """The guest does not let go, or has not yet."""
        self.host.kernel.set_fault(ONE, dead=True)
        self.look_twice()
        self.assertEqual('quarantined', self.states()[ONE])
        self.wait_told('failed: 1 of 1')
        self.assertHas(self.server, ONE)
        self.remove()
        self.assertEqual('gone', self.states()[ONE])
        self.wait_told('gone: 1 of 1')

    def test_comes_back(self):
        """Its server keeps its claim, gets the device back into its guest,
        with all that it had there, and no other server can get it."""
        self.remove()
        self.assertEqual({ONE: 'gone', TWO: 'ok'}, self.states())
        self.wait_told('gone: 1 of 1')
        self.assertEqual((1, 1), self.shown()[1])
        for _ in range(3):
            self.host.reconcile()
        self.assertEqual([], self.host.devices_of(self.server))
        self.assertEqual([model.ClaimState.BOUND],
                         self.host.states(self.server))
        self.assertEqual(1, self.log.output.count('is not found any more'))
        before = self.resets()
        self.rescan()
        self.host.reconcile()
        self.assertHas(self.server, ONE)
        self.assertEqual(before, self.resets())
        self.wait_told()

    def test_restart_of_nova_compute(self):
        self.remove()
        self.restart()
        self.look_twice()
        self.host.reconcile()
        self.assertEqual('gone', self.states()[ONE])
        self.wait_told('gone: 1 of 1')
        self.rescan()
        self.host.reconcile()
        self.assertHas(self.server, ONE)

    def test_start_of_the_server(self):
        """It is refused in words while the card is away."""
        self.remove()
        refused = self.assertRaises(
            exception.DeviceUnavailable, self.host.reboot, self.server)
        self.assertIn('is gone', str(refused))
        self.assertIn('put the card back, or delete the server', str(refused))
        self.rescan()
        self.host.reboot(self.server)
        self.assertHas(self.server, ONE)

    def test_deleted(self):
        """Nova deletes the server; the card is cleaned when it is back, before
        another server gets it."""
        self.remove()
        self.host.delete(self.server)
        claim, = self.host.holdings.all()
        self.assertIs(model.ClaimState.DELETING, claim.state)
        self.rescan()
        self.assertEqual((1, 1), self.shown()[1])
        before = self.resets()
        self.host.reconcile()
        self.host.settle()
        self.assertEqual(before + 1, self.resets())
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual((0, 1), self.shown()[1])
        self.assertHas(self.boot(), ONE)

    def test_migrated(self):
        """Cold, to another host: the claim that the move has set aside ends
        in the same way."""
        self.remove()
        self.host.confirm(self.server, self.host.migrate_away(self.server))
        self.rescan()
        self.host.reconcile()
        self.host.settle()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual((0, 1), self.shown()[1])
