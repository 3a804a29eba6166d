# Licensed under the Apache License, Version 2.0. See LICENSE.

import re
import struct
import time

from nova_accel import naming
from tests.lab import machine
from tests.lab import processes
from tests.lab.trials import base
from tests.lab.trials import handover
from tests.lab.trials import kinds

METRICS = '/var/lib/nova/accel.prom'
PCI = '/sys/bus/pci/devices'
NVME = '/machine/peripheral/nvme0 smart_critical_warning'
#: seconds until others see a fault
LIMIT = 20


def inject(function, uncorrectable=0, corrected=0):
    """Have the kernel's aer_inject report errors of a function."""
    bus, device, number = (int(n, 16) for n in re.split(
        '[:.]', function.removeprefix('0000:')))
    path = processes.RUN / 'error'
    # struct aer_error_inj in drivers/pci/pcie/aer_inject.c
    path.write_bytes(struct.pack('=3Bx7I', bus, device, number, uncorrectable,
                                 corrected, 0, 0, 0, 0, 0))
    machine.put(path, '/run/error')
    machine.check('modprobe aer_inject; cat /run/error > /dev/aer_inject')


def remove(device):
    machine.check(f'echo 1 > {PCI}/{device}/remove &')


def rescan():
    machine.check('echo 1 > /sys/bus/pci/rescan')


class Health(base.Trial):
    """A fault that is injected, and what nova-compute makes of it: in the file
    of metrics, in Placement, for the owner."""

    def state(self, device):
        """What the file of metrics tells of a device."""
        found = re.findall(rf'^nova_accel_device_state{{device="{device}".*'
                           r'state="([a-z]+)"} 1$', machine.check(
                               f'cat {METRICS}; true'), re.MULTILINE)
        return found[0] if found else ''

    def wait_state(self, device, *states):
        def found():
            # nova-compute looks once in a minute, and when the kernel says
            # that something came
            machine.check(f'echo add > {PCI}/0000:00:00.0/uevent; sleep 4')
            state = self.state(device)
            return state if state in states else None
        print(f'    {device} is', self.cloud.wait(
            f'{device} {" or ".join(states)}', found, 150), flush=True)

    def assertFound(self, device, signal):
        self.assertRegex(
            machine.check(f'grep "^nova_accel_device_finding" {METRICS}'),
            rf'device="{device}".*signal="{signal}".*mode="act"}} 1')

    def wait_trait(self, provider, trait, there=True):
        self.cloud.wait(
            f'{trait} {"" if there else "not "}on {provider}',
            lambda: (trait in self.cloud.providers()[provider]['traits'])
            == there, 150)

    def wait_told(self, server, *told):
        """What the owner of the server reads of its only group."""
        self.cloud.wait(f'{told} for the owner', lambda: [
            value for key, value in self.cloud.compute.get_server(
                server.id).metadata.items()
            if key.endswith(':health')] == [*told], 150)

    def assertGoesOn(self, server):
        """The guest runs, and Nova says so."""
        self.assertEqual('running', machine.check(
            f'virsh domstate {server.id}').strip())
        self.assertEqual('ACTIVE', self.cloud.compute.get_server(
            server.id).status)

    def log(self, text, lines=400):
        return text in self.compute.log(lines)


class Link(Health):
    """The link of the time card, which a guest gets whole."""

    def test_1_guest_has_it(self):
        """Half of the lanes while a guest has the card: it goes on, its owner
        is told, and all is well when the lanes are."""
        server = self.cloud.boot(self.cloud.of_profile(
            self.group('TIMECARD')))
        self.wait_state(kinds.TIMECARD, 'unknown')
        machine.time_card(lanes=4)
        self.wait_state(kinds.TIMECARD, 'suspect')
        self.assertFound(kinds.TIMECARD, 'link_width')
        self.wait_trait(kinds.TIMECARD, naming.SUSPECT)
        self.wait_told(server, 'degraded: 1 of 1')
        machine.time_card(lanes=2)
        self.wait_state(kinds.TIMECARD, 'quarantined')
        self.wait_told(server, 'failed: 1 of 1')
        self.assertGoesOn(server)
        machine.time_card()
        self.wait_state(kinds.TIMECARD, 'unknown')
        self.wait_told(server)
        self.wait_trait(kinds.TIMECARD, naming.SUSPECT, False)
        self.assertIn(server.id, machine.check(
            f'/opt/openstack/bin/nova-accel history {kinds.TIMECARD}'))

    def test_2_free(self):
        """Less than half of the lanes of a free card: no server gets it, and
        what resets do not mend is said."""
        machine.time_card(lanes=2)
        self.wait_state(kinds.TIMECARD, 'quarantined')
        self.assertFound(kinds.TIMECARD, 'link_width_half')
        self.wait_trait(kinds.TIMECARD, naming.FENCED)
        self.cloud.wait('an end of the recovery', lambda: self.log(
            f'Device {kinds.TIMECARD} has failed'), 150)
        machine.time_card()
        self.wait_state(kinds.TIMECARD, 'ok')
        self.wait_trait(kinds.TIMECARD, naming.FENCED, False)


class Nvme(Health):

    def test_1_vf(self):
        """The log page of a disk warns while a guest has a VF of it: it goes
        on; a free one is given to no server until the page is clean."""
        server = self.cloud.boot(self.cloud.of_profile(
            self.group('SSD', **kinds.OF_QEMU)))
        self.addCleanup(machine.monitor, f'qom-set {NVME} 0')
        machine.monitor(f'qom-set {NVME} 8')
        self.wait_state(kinds.NVME, 'suspect')
        self.assertFound(kinds.NVME, 'card_failed')
        self.wait_told(server, 'degraded: 1 of 1')
        self.assertGoesOn(server)
        self.cloud.delete(server)
        self.wait_state(kinds.NVME, 'quarantined')
        self.wait_trait(kinds.NVME, naming.FENCED)
        machine.monitor(f'qom-set {NVME} 0')
        self.wait_state(kinds.NVME, 'ok')
        self.wait_trait(kinds.NVME, naming.FENCED, False)

    def test_2_recovered(self):
        """A disk that a reset of its controller mends is suspect until a
        server has had it, also after a restart of nova-compute."""
        disk = handover.DISK
        machine.disk(warning=4, warning_stays=False)
        self.wait_state(disk, 'quarantined', 'suspect')
        self.wait_state(disk, 'suspect')
        self.assertFound(disk, 'recovered')
        self.assertTrue(self.log('has recovered by: controller reset'))
        machine.disk()
        self.compute.kill()
        machine.check(f'rm {METRICS}')
        self.compute.start()
        self.wait_state(disk, 'suspect')
        self.cloud.delete(self.cloud.boot(self.cloud.of_profile(
            self.group('SSD', **{'trait:CUSTOM_SSD_SAMSUNG': 'required'}))))
        self.wait_state(disk, 'ok')


class Dfl(Health):

    def test_1_fme(self):
        """Errors that the kernel has the FME of a card inject: no server gets
        the card, whose driver is bound again."""
        self.addCleanup(self.inject, 0)
        self.inject(1)
        self.wait_state(base.CARD, 'quarantined')
        self.assertFound(base.CARD, 'card_failed')
        self.wait_trait(base.REGION, naming.FENCED)
        self.cloud.wait('an end of the recovery', lambda: self.log(
            f'Device {base.CARD} still reports problems after: driver '
            f'rebind'), 150)
        self.inject(0)
        self.wait_state(base.CARD, 'ok')

    def inject(self, bits):
        machine.check(f'echo {bits} > $(ls -d {PCI}/{base.CARD}/fpga_region/*/'
                      f'dfl-fme.*/errors/inject_errors)')


class Aer(Health):
    """Errors that the kernel's aer_inject has the network card tell, or the
    port above it."""

    PORT, SEVERITY = '0000:00:08.0', 'ECAP_AER+c.l'

    def test_1_guest_has_a_vf(self):
        """Corrected and uncorrectable errors of a card while a guest has a VF
        of it: suspect, until the server is gone; QEMU pauses the guest, and
        its owner reads what to do."""
        server = self.cloud.boot(self.cloud.of_profile(self.group('NIC')))
        inject(kinds.NIC, corrected=1)
        time.sleep(2)
        self.assertGoesOn(server)
        # a poisoned TLP
        inject(kinds.NIC, uncorrectable=1 << 12)
        self.wait_state(kinds.NIC, 'suspect')
        self.assertFound(kinds.NIC, 'nonfatal_errors')
        print('    the guest:', machine.check(
            f'virsh domstate --reason {server.id}').strip())
        self.wait_told(server, 'degraded: 1 of 1; paused by an error: hard '
                               'reboot the server')
        self.assertFound(kinds.NIC, 'guest_paused')
        self.cloud.compute.reboot_server(server, 'HARD')
        self.cloud.settled(server, 'ACTIVE')
        self.wait_told(server, 'degraded: 1 of 1')
        self.assertGoesOn(server)
        self.cloud.delete(server)
        self.wait_clean()
        self.wait_state(kinds.NIC, 'ok')

    def test_2_port(self):
        """An error of the link: no server gets the card until the operator
        enables it."""
        # Data Link Protocol. Not as a fatal one: QEMU's port does not say when
        # the link is up again after the reset, and the VFs are lost
        self.addCleanup(machine.check, f'setpci -s {self.PORT} '
                                       f'{self.SEVERITY}=10:10')
        machine.check(f'setpci -s {self.PORT} {self.SEVERITY}=0:10')
        inject(self.PORT, uncorrectable=1 << 4)
        self.wait_state(kinds.NIC, 'quarantined')
        print('   ', machine.check('/opt/openstack/bin/nova-accel enable '
                                   f'{kinds.NIC}'))
        self.wait_state(kinds.NIC, 'ok')
        self.assertTrue(self.log(f'(DLP at port {self.PORT})'))


class Removed(Health):

    def test_1_free(self):
        """A card is removed and comes back."""
        self.addCleanup(rescan)
        remove(kinds.TIMECARD)
        self.wait_state(kinds.TIMECARD, 'gone')
        self.wait_trait(kinds.TIMECARD, naming.FENCED)
        rescan()
        self.wait_state(kinds.TIMECARD, 'ok')
        self.wait_trait(kinds.TIMECARD, naming.FENCED, False)
        server = self.cloud.boot(self.cloud.of_profile(
            self.group('TIMECARD')))
        self.assertIn(' 1d9b:0400 ', self.cloud.console(server))

    def test_2_guest_keeps_it(self):
        """A card is removed while a guest has it, which does not let go.

        After the server it is clean.
        """
        self.assertFalse(self.removed_from_guest(hotplug=False))

    def test_3_guest_lets_go(self):
        """A card is removed while a guest has it, which lets go.

        Its server keeps its claim, and no other one gets the card. Back, it
        goes into the guest again; after the server it is clean.
        """
        self.assertTrue(self.removed_from_guest(hotplug=True))

    def removed_from_guest(self, hotplug):
        """Remove the card, and have it back; whether the guest let go."""
        server = self.cloud.boot(self.cloud.of_profile(
            self.group('TIMECARD')), hotplug=hotplug)
        self.addCleanup(rescan)
        self.wait_state(kinds.TIMECARD, 'unknown')
        remove(kinds.TIMECARD)
        bus, slot = kinds.TIMECARD.removesuffix('.0').split(':')[1:]

        def has_it():
            # beside its place in the guest, where others have the same numbers
            return f"<address domain='0x0000' bus='0x{bus}' slot='0x{slot}'" \
                in machine.check(f'virsh dumpxml {server.id}')
        ends = time.monotonic() + 60
        while has_it() and time.monotonic() < ends:
            time.sleep(5)
        lets_go = not has_it()
        print('    the guest', 'lets go' if lets_go else 'keeps it', flush=True)
        if lets_go:
            self.wait_state(kinds.TIMECARD, 'gone')
            self.wait_told(server, 'gone: 1 of 1')
            self.assertGoesOn(server)
            rescan()
            self.cloud.wait('the card in the guest', has_it, 150)
            self.wait_state(kinds.TIMECARD, 'unknown')
            self.wait_told(server)
        else:
            self.assertGoesOn(server)
        self.cloud.delete(server)
        rescan()
        self.wait_clean()
        self.wait_state(kinds.TIMECARD, 'ok')
        self.wait_trait(kinds.TIMECARD, naming.FENCED, False)
        return lets_go


class Clock(Health):
    """Seconds from a fault until others see it, with the [accel]
    discovery_interval that operators have."""

    def setUp(self):
        super().setUp()
        self.addCleanup(self.restart, '')
        self.restart('[accel]\ndiscovery_interval = 60\n')
        self.uuids = {name: provider['uuid'] for name, provider
                      in self.cloud.providers().items()}

    def assertSeen(self, device, state, trait, server=None):
        """The file of metrics, Placement and the owner show a fault in time
        from now on. The last reading was just before, in wait_state()."""
        began = time.monotonic()
        left = {
            'the metrics': lambda: self.state(device) == state,
            'Placement': lambda: trait in self.cloud.placement(
                f'/resource_providers/{self.uuids[device]}/traits')['traits']}
        if server:
            left['its owner'] = lambda: any(
                key.endswith(':health') for key in
                self.cloud.compute.get_server(server.id).metadata)
        while left and time.monotonic() < began + 150:
            for who in [who for who, sees in left.items() if sees()]:
                del left[who]
                seconds = time.monotonic() - began
                print(f'    {device} is {state} for {who} after '
                      f'{seconds:.1f} s', flush=True)
        self.assertEqual({}, left)
        self.assertLess(seconds, LIMIT)

    def test_1_polled(self):
        """No event reports the lanes of a card that a guest has: its owner,
        Placement and the metrics show them in 20 s."""
        server = self.cloud.boot(self.cloud.of_profile(
            self.group('TIMECARD')))
        self.wait_state(kinds.TIMECARD, 'unknown')
        machine.time_card(lanes=4)
        self.assertSeen(kinds.TIMECARD, 'suspect', naming.SUSPECT, server)

    def test_2_aer(self):
        """The same for a poisoned TLP of a card that no server has."""
        self.wait_state(kinds.NIC, 'ok')
        inject(kinds.NIC, uncorrectable=1 << 12)
        self.assertSeen(kinds.NIC, 'suspect', naming.SUSPECT)

    def test_3_removed(self):
        """The same for a card that is removed."""
        self.addCleanup(rescan)
        self.wait_state(kinds.TIMECARD, 'ok')
        remove(kinds.TIMECARD)
        self.assertSeen(kinds.TIMECARD, 'gone', naming.FENCED)
