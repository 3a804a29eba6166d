# Licensed under the Apache License, Version 2.0. See LICENSE.

from tests.lab import machine
from tests.lab.trials import base


class Host(base.Trial):

    def test_1_reboot_of_the_host(self):
        """The compute host reboots under a server: it has its device again.

        With resume_guests_state_on_host_boot.
        """
        function = self.cloud.bitstream()
        server = self.cloud.boot(self.cloud.fpga(function))
        self.assertGuestHas(server, function)
        self.reboot_host()
        server = self.cloud.settled(server, 'ACTIVE')
        self.assertGuestHas(server, function)
        self.assertEqual({base.REGION: {'CUSTOM_ACCELERATOR_FPGA': 1}},
                         self.cloud.allocations(server))

    def assertNothingLeaked(self, server):
        """After a restart and a delete: nothing, and the next one works."""
        self.compute.start()
        self.cloud.settled(server, 'ERROR')
        self.cloud.delete(server)
        self.assertNothingInUse()
        function = self.cloud.bitstream()
        server = self.cloud.boot(self.cloud.fpga(function))
        self.assertGuestHas(server, function)

    def test_2_killed_while_it_programs(self):
        """nova-compute is killed while it programs: nothing is leaked."""
        machine.card(pr_seconds=6)
        before = self.programmings_begun()
        server = self.cloud.create(self.cloud.fpga(self.cloud.bitstream()))
        self.cloud.wait('programming',
                        lambda: self.programmings_begun() > before)
        self.compute.kill()
        machine.card()
        self.assertNothingLeaked(server)

    def test_3_killed_while_the_guest_starts(self):
        """nova-compute is killed while a guest starts: nothing is leaked."""
        server = self.cloud.create(self.cloud.fpga(self.cloud.bitstream()))
        self.wait_guest()
        self.compute.kill()
        self.assertNothingLeaked(server)
