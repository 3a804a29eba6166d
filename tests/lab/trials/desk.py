# Licensed under the Apache License, Version 2.0. See LICENSE.

import json
import subprocess

from tests.lab import machine
from tests.lab.trials import base
from tests.lab.trials import handover
from tests.lab.trials import kinds

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

    def disable(self, name=base.CARD, provider=base.REGION):
        """A device is given to no other server; the trial ends that."""
        self.addCleanup(machine.run,
                        f'/opt/openstack/bin/nova-accel enable {name}')
        self.command('disable', name, '--reason maintenance')
        self.cloud.wait('a fence', lambda: self.is_fenced(provider))

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
            ['nova-accel', 'providers', 'purge', 'vm'],
            capture_output=True, text=True)
        try:
            self.assertEqual(0, done.returncode, done.stderr)
            self.assertEqual({}, self.cloud.providers())
        finally:
            self.compute.start()
        self.assertEqual(before, set(self.cloud.providers()))

    def test_5_prove(self):
        """What each driver relies on is tried on a device that is disabled:
        nothing fails, and the report has no address of the host.

        Not on the disk with VFs: QEMU's have no resources, without which none
        is reset.
        """
        for name, provider, steps in (
                (base.CARD, base.REGION, {'reset of region0'}),
                (handover.DISK, handover.DISK, {'clean'}),
                (kinds.NIC, kinds.NIC, {'reset of handle 0'}),
                (kinds.TIMECARD, kinds.TIMECARD, {'reset of handle 0'}),
                ('mtty', 'mtty', {'create and remove'})):
            self.disable(name, provider)
            print(self.command('prove', name, '--report', '/root/report'))
            text = machine.check('cat /root/report')
            report = json.loads(text)
            found = {step['step'] for step in report['steps']}
            print(f'    {name}: {sorted(found)}')
            self.command('enable', name)
            self.assertLessEqual(
                {'find and read', 'find and read again', *steps}, found)
            if name.startswith('0000:'):
                self.assertNotIn(name, text)
