# Licensed under the Apache License, Version 2.0. See LICENSE.

import subprocess

from tests.lab import machine
from tests.lab.trials import base
from tests.lab.trials import handover

HELD, FREE = 3, 0


class Desk(base.Trial):
    """The operator's commands, on the compute host."""

    def command(self, *words, status=0):
        """nova-accel with these words; what it prints."""
        found, text = machine.run(
            f'/opt/openstack/bin/nova-accel {" ".join(words)}')
        self.assertEqual(status, found, text)
        return text

    def is_fenced(self, name=base.REGION):
        return 'CUSTOM_ACCELERATOR_FENCED' in self.cloud.providers()[name][
            'traits']

    def disable(self):
        """The card is given to no other server; the trial ends that."""
        self.addCleanup(machine.run,
                        f'/opt/openstack/bin/nova-accel enable {base.CARD}')
        self.command('disable', base.CARD, '--reason maintenance')
        self.cloud.wait('a fence', self.is_fenced)

    def enable(self):
        self.command('enable', base.CARD)
        self.cloud.wait('an offer', lambda: not self.is_fenced())

    def test_1_program(self):
        """A card that is disabled is programmed; the next server need not."""
        function = self.cloud.bitstream()
        self.disable()
        self.command('program', base.CARD, function)
        self.assertRegionHas(function)
        self.enable()
        before = len(self.programmings())
        server = self.cloud.boot(self.cloud.fpga(function))
        self.assertGuestHas(server, function)
        self.assertEqual(before, len(self.programmings()))

    def test_2_clean(self):
        """A disk that no server has is erased."""
        self.command('clean', handover.DISK)
        self.assertEqual(
            ('sanitize crypto', 'clean'), tuple(map(
                handover.newest_record().get, ('Method', 'Result'))))

    def test_3_drain(self):
        """A card is drained: the server that has it is named until it is
        gone, and no other one gets the card."""
        function = self.cloud.bitstream()
        flavor = self.cloud.fpga(function)
        server = self.cloud.boot(flavor)
        self.addCleanup(machine.run,
                        f'/opt/openstack/bin/nova-accel enable {base.CARD}')
        self.assertIn(server.id, self.command('drain', base.CARD, status=HELD))
        self.cloud.delete(server)
        self.wait_clean()
        self.command('drain', base.CARD, status=FREE)
        _server, fault = self.cloud.refused(flavor, host=None)
        self.assertIn('No valid host', fault)
        self.enable()
        self.assertGuestHas(self.cloud.boot(flavor), function)

    def test_4_purge(self):
        """The providers of a host are removed, and come back with
        nova-compute."""
        before = set(self.cloud.providers())
        self.compute.stop()
        done = subprocess.run(
            ['nova-accel', 'providers', 'purge', machine.NAME],
            capture_output=True, text=True)
        try:
            self.assertEqual(0, done.returncode, done.stderr)
            self.assertEqual({}, self.cloud.providers())
        finally:
            self.compute.start()
        self.assertEqual(before, set(self.cloud.providers()))
