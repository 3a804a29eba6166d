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
        api.rescue_server(self.server, image=self.cloud.probe().id)
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


class GuestsThatLetGo(base.Trial):

    def setUp(self):
        super().setUp()
        self.function = self.cloud.bitstream()
        self.flavor = self.cloud.fpga(
            self.function, **{'accel:runtime_programming': 'true'})

    def assertReads(self, server, *functions):
        """What the guest has read from cards, one after the other."""
        self.cloud.wait(
            f'functions {functions} in the guest',
            lambda: self.cloud.guest_function(server) == list(functions))

    def test_1_suspend(self):
        """Suspend takes the device out of the guest, which reads its function
        again after resume."""
        server = self.cloud.boot(self.flavor, hotplug=True)
        self.assertReads(server, self.function)
        api = self.cloud.compute
        api.suspend_server(server)
        self.cloud.settled(server, 'SUSPENDED')
        api.resume_server(server)
        self.cloud.settled(server, 'ACTIVE')
        self.cloud.wait('a log that begins again', lambda: (
            'PROBE UP' not in self.cloud.console(server)))
        self.assertReads(server, self.function)
        self.assertEqual({base.REGION: {'CUSTOM_ACCELERATOR_FPGA': 1}},
                         self.cloud.allocations(server))

    def test_2_run_time(self):
        """The owner has the card of a server that runs programmed, and the
        guest reads the new function."""
        server = self.cloud.boot(self.flavor, hotplug=True)
        self.assertReads(server, self.function)
        other = self.cloud.bitstream()
        image = self.cloud.api.image.find_image(f'bitstream-{other[:8]}')
        self.cloud.compute.set_server_metadata(
            server, **{'accel:bitstream_id': image.id})
        self.assertReads(server, self.function, other)
        status = self.cloud.wait('a status', lambda: [
            text for text in [self.cloud.compute.get_server(
                server.id).metadata.get('accel:status', '')]
            if text.startswith('programmed')])
        print(f'    {status}')
        self.assertRegionHas(other)
