# Licensed under the Apache License, Version 2.0. See LICENSE.

from tests.lab.trials import base


class Operations(base.Trial):

    def setUp(self):
        super().setUp()
        self.function = self.cloud.bitstream()
        self.server = self.cloud.boot(self.cloud.fpga(self.function))
        self.assertGuestHas(self.server, self.function)
        self.before = len(self.programmings())

    def assertStillThere(self, status='ACTIVE', programmed=0):
        """The server has its function. The guest has the whole card, and what
        it did to it is not known: each start programs it again."""
        self.cloud.settled(self.server, status)
        self.assertEqual({base.REGION: {'CUSTOM_ACCELERATOR_FPGA': 1}},
                         self.cloud.allocations(self.server))
        if status in ('ACTIVE', 'RESCUE'):
            self.assertGuestHas(self.server, self.function)
        self.assertEqual(programmed, len(self.programmings()) - self.before)

    def test_1_stop_start_reboot(self):
        """Stop and start, soft and hard reboot: the same device."""
        api = self.cloud.compute
        api.stop_server(self.server)
        self.assertStillThere('SHUTOFF')
        api.start_server(self.server)
        self.assertStillThere(programmed=1)
        api.reboot_server(self.server, 'HARD')
        self.assertStillThere(programmed=2)

    def test_2_rescue_rebuild(self):
        """Rescue and unrescue, rebuild: the same device."""
        api = self.cloud.compute
        api.rescue_server(self.server, image_ref=self.cloud.probe().id)
        self.assertStillThere('RESCUE', programmed=1)
        api.unrescue_server(self.server)
        self.assertStillThere(programmed=2)
        api.rebuild_server(self.server, self.cloud.probe().id)
        self.assertStillThere(programmed=3)

    def test_3_shelve(self):
        """Shelve gives the device back; unshelve programs it.

        After each server its function is programmed again.
        """
        api = self.cloud.compute
        api.shelve_server(self.server)
        self.cloud.wait('the server offloaded', lambda: api.get_server(
            self.server.id).status == 'SHELVED_OFFLOADED')
        self.assertEqual({}, self.cloud.allocations(self.server))
        self.assertEqual({}, self.cloud.in_use())
        other = self.cloud.bitstream()
        taken = self.cloud.boot(self.cloud.fpga(other))
        self.assertGuestHas(taken, other)
        self.cloud.delete(taken)
        api.unshelve_server(self.server)
        self.assertStillThere(programmed=4)

    def test_4_suspend(self):
        """Suspend of a guest that keeps its device: said, and it goes on."""
        self.cloud.compute.suspend_server(self.server)
        self.assertStillThere()
        said = self.cloud.wait('an end of suspend', lambda: [
            event for event in self.cloud.events(self.server, 'suspend')
            if event[1]])
        print(f'    {said}')
        self.assertIn('Error', [result for _e, result, _d in said])
        self.assertTrue(any(base.CARD in details
                            for _e, _r, details in said), said)
