# Licensed under the Apache License, Version 2.0. See LICENSE.

import unittest

from tests.lab import cloud
from tests.lab import machine
from tests.lab import processes

CARD = '0000:00:0c.0'
REGION = f'{CARD}_region0'
FPGA = '8086:09c4'


class Trial(unittest.TestCase):
    """Begins and ends with no server, and nothing in use in Placement."""

    longMessage = True

    def setUp(self):
        self.cloud = cloud.Cloud()
        self.compute = Compute(self.cloud)
        machine.card()
        machine.disk()
        machine.time_card()
        self.cloud.clear()
        self.assertNothingInUse()
        self.wait_clean()
        self.addCleanup(self._tidy)

    def restart(self, text):
        """Have nova-compute run with more configuration, without servers."""
        self.cloud.clear()
        self.wait_clean()
        self.compute.stop()
        self.compute.configure(text)
        self.compute.start()

    def wait_clean(self):
        """Until nothing is left of servers: the region of one that is gone is
        programmed again beside everything else."""
        machine.check(
            'until python3 -c "import sqlite3; '
            "assert not sqlite3.connect('/var/lib/nova/accel_claims_vm.sqlite'"
            ").execute('SELECT 1 FROM claims').fetchone()"
            '" 2> /dev/null; do sleep 1; done', cloud.PATIENCE)

    def _tidy(self):
        machine.card()
        machine.disk()
        machine.time_card()
        self.cloud.clear()
        self.assertNothingInUse()

    def assertNothingInUse(self):
        self.assertEqual([], [s.id for s in self.cloud.compute.servers()])
        self.assertEqual({}, self.cloud.in_use())

    @staticmethod
    def group(kind, **more):
        """A group of a device profile: one accelerator of that type."""
        return {f'resources:CUSTOM_ACCELERATOR_{kind}': 1, **more}

    def room(self):
        """How many mediated devices of mtty Placement offers, used or not."""
        inventory = self.cloud.providers()['mtty']['inventories'][
            'CUSTOM_ACCELERATOR_VGPU']
        return inventory['total'] - inventory['reserved']

    def assertGuestHas(self, server, function):
        """The guest read the function from the card by itself."""
        self.assertEqual([function], self.cloud.guest_function(server))

    def assertRegionHas(self, *functions):
        self.cloud.wait(
            f'{functions} in Placement',
            lambda: self.cloud.functions(REGION) == set(functions), 300)

    def reboot_host(self):
        """Reboot the machine, until nova-compute and a guest run again."""
        boot = machine.check('cat /proc/sys/kernel/random/boot_id')
        machine.reboot()
        self.assertNotEqual(
            boot, machine.check('cat /proc/sys/kernel/random/boot_id'))
        self.compute.wait_report(self.compute.reported())
        # before, the console log is that of the guest before
        self.wait_guest()

    def wait_guest(self):
        machine.check('until pgrep -f guest=instance > /dev/null; do '
                      'sleep 0.2; done', cloud.PATIENCE)

    def programmings(self):
        """What the card said of each programming since it was made."""
        return [line for line in self._card_log() if line != 'PR begins']

    def programmings_begun(self):
        return self._card_log().count('PR begins')

    def _card_log(self):
        text = (processes.LOG / 'fpga.log').read_text()
        return [line for line in text.splitlines() if line.startswith('PR ')]


class Compute:
    """nova-compute in the machine, as its administrator has it."""

    def __init__(self, cloud):
        self.cloud = cloud

    def reported(self):
        found, = self.cloud.compute.services(binary='nova-compute', host='vm')
        return found.updated_at

    def start(self):
        """Start it, and wait until it is up."""
        before = self.reported()
        self.begin()
        self.wait_report(before)

    def begin(self):
        """Start it, and do not wait."""
        machine.check('systemctl --no-block start nova-compute')

    def wait_report(self, before):
        # it reports itself when everything of its start is done; for how long
        # it was down is less than [DEFAULT] service_down_time
        def again():
            machine.check_compute()
            return self.reported() != before
        self.cloud.wait('nova-compute', again)
        self.cloud.wait_ready()

    def stop(self):
        machine.check('systemctl stop nova-compute', cloud.PATIENCE)

    def kill(self):
        """kill -9, and what it started ends as well."""
        machine.check('systemctl kill -s KILL nova-compute; '
                      'while systemctl -q is-active nova-compute; do '
                      'sleep 0.2; done; systemctl reset-failed nova-compute')

    def configure(self, text):
        """More configuration, as a file beside its own; none takes it away.

        It takes effect at the next start.
        """
        path = processes.RUN / 'trial.conf'
        path.write_text(text or '')
        machine.put(path, '/etc/nova/nova-compute.conf.d/trial.conf')

    def log(self, lines=60):
        return machine.run(f'tail -n {lines} /var/log/nova-compute.log')[1]
