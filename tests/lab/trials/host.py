# Licensed under the Apache License, Version 2.0. See LICENSE.

import random
import time

from tests import lab
from tests.lab import machine
from tests.lab.trials import base
from tests.lab.trials import kinds

#: in which nova-compute is stopped again and again; of its work before the
#: first stop, and of its start before each other one, at most
STOPS_SECONDS, WORK_SECONDS, START_SECONDS = 240, 12, 120


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

    def assertStops(self):
        """systemd stops nova-compute, and does not have to kill it.

        :returns: the seconds that it took.
        """
        began = time.monotonic()
        self.compute.stop()
        took = time.monotonic() - began
        self.assertLess(took, 45)
        self.assertEqual('success', machine.check(
            'systemctl show -P Result nova-compute').strip())
        return took

    def begin_servers(self, function):
        """Servers that are being built, with an FPGA and with a disk."""
        return [self.cloud.create(self.cloud.fpga(function)),
                self.cloud.create(self.cloud.of_profile(
                    self.group('SSD', **kinds.OF_QEMU)))]

    def assertCanBeDeleted(self, servers):
        for server in servers:
            self.cloud.delete(server)
        self.assertNothingInUse()

    def test_5_stopped_while_servers_are_built(self):
        """systemd stops nova-compute at any moment: it ends within seconds.

        As at a reboot of the host, which would stop guests for good where
        systemd has to kill nova-compute.
        """
        function = self.cloud.bitstream()
        for seconds in (0, 1, 2, 4, 8):
            servers = self.begin_servers(function)
            time.sleep(seconds)
            self.assertStops()
            self.compute.start()
            self.assertCanBeDeleted(servers)

    def test_6_stopped_while_it_starts(self):
        """The same at random moments of its start, which makes threads."""
        seed = random.randrange(1 << 30)
        print(f'    seed {seed}', flush=True)
        moments, took = random.Random(seed), []
        servers = self.begin_servers(self.cloud.bitstream())
        most = WORK_SECONDS
        end = time.monotonic() + STOPS_SECONDS
        while not took or time.monotonic() < end:
            time.sleep(moments.uniform(0, most))
            took.append(self.assertStops())
            before, most = self.compute.reported(), START_SECONDS
            self.compute.begin()
        print(f'    {len(took)} stops, the longest took {max(took):.0f} s',
              flush=True)
        self.compute.wait_report(before)
        self.assertCanBeDeleted(servers)

    def test_4_guest_that_keeps_its_device(self):
        """A device stays open when its guest has ended: nova-compute goes on.

        The device is released when it is let go of.
        """
        def made():
            # the bus forgets it before it is gone
            return machine.check('ls /sys/class/mdev_bus/mtty | '
                                 'grep -E "^[0-9a-f]{8}-"; true')

        room = self.room()
        server = self.cloud.boot(self.cloud.of_profile(self.group(
            'VGPU', **{f'trait:{kinds.DUAL}': 'required'})))
        self.assertNotEqual('', made())
        machine.put(lab.LAB / 'keep_open.py', '/var/tmp/keep_open.py')
        machine.check('systemd-run -q --unit keep python3 '
                      '/var/tmp/keep_open.py; '
                      'until [ -e /run/kept ]; do sleep 0.2; done', 120)
        self.addCleanup(machine.run, 'systemctl stop keep')
        self.cloud.delete(server)
        self.assertNotEqual('', made())
        # meanwhile it does what it is asked for, and offers that no more
        other = self.cloud.boot(self.cloud.of_profile(
            self.group('SSD', **kinds.OF_QEMU)))
        self.assertEqual({kinds.NVME: {'CUSTOM_ACCELERATOR_SSD': 1}},
                         self.cloud.allocations(other))
        self.cloud.wait('less room', lambda: self.room() < room)
        machine.check('systemctl stop keep')
        self.cloud.wait('a release', lambda: not made())
        self.cloud.wait('all the room', lambda: self.room() == room)
