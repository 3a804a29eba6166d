# Licensed under the Apache License, Version 2.0. See LICENSE.

import os
import re
import signal
import sys
import time

import yaml

from nova_accel import naming
from tests.lab import cloud
from tests.lab import databases
from tests.lab import machine
from tests.lab import processes
from tests.lab.trials import base
from tests.lab.trials import kinds

SIM = processes.RUN / 'sim'
EDU = '0000:00:0a.0'
CARD = '0000:5e:00.0'
OTHER = f'{CARD}_region0'
ONE = {'CUSTOM_ACCELERATOR_FPGA': 1}
#: of the second compute host of the machine
OTHER_EDU, OTHER_FPGA, OTHER_MTTY = '0000:00:0b.0', '0000:00:12.0', 'mtty2'
OTHER_REGION = f'{OTHER_FPGA}_region0'
ONE_EDU = {'CUSTOM_ACCELERATOR_TEST': 1}
EDU_READ = 'EDU id=010000ed inv=edcba987'
VIRSH = 'virsh -c "qemu+unix:///system?socket=/run/hosts/$host/libvirt-sock"'
#: of the first nova-compute, for tests/lab/vm/host2
BESIDE_VM2 = f"""
[accel]
pci_devices = vendor=1234 product=11e8 type=TEST
exclude_devices = address={OTHER_EDU}
handover = 0000:02:00.0=none,{EDU}=none
[libvirt]
live_migration_uri = qemu+unix:///system?socket=/run/hosts/%s/libvirt-sock
[workarounds]
skip_cpu_compare_on_dest = true
"""


class TwoComputes(base.Trial):

    def setUp(self):
        super().setUp()
        (SIM / 'locks').mkdir(parents=True, exist_ok=True)
        (SIM / 'host.yaml').write_text(yaml.safe_dump({'cards': [{
            'address': CARD, 'product': 'PAC_ARRIA10',
            'interface': cloud.INTERFACE, 'programming_seconds': 1,
            'functions': ['f7df405c-bd7a-cf72-22f1-44b0b93acd18']}]}))
        self.start()
        self.addCleanup(self.forget)
        self.cloud.wait_ready('sim', OTHER)

    def start(self):
        processes.start(
            'nova-compute-sim', 'sh', '-c', 'cd /src; exec "$@"', 'sh',
            sys.executable, '-m', 'tests.lab.simulated_compute',
            '--config-file', databases.CONF / 'nova.conf',
            '--config-file', databases.CONF / 'nova-compute-sim.conf')

    def forget(self):
        """End the second nova-compute, and remove it from the cloud."""
        try:
            self.cloud.clear()
        finally:
            processes.stop('nova-compute-sim')
        for service in self.cloud.compute.services(
                binary='nova-compute', host='sim'):
            self.cloud.compute.delete_service(service)

    def host_of(self, server):
        return self.cloud.compute.get_server(server.id).compute_host

    def test_1_scheduling_by_function(self):
        """Servers go where their function is loaded, one of two hosts."""
        places = {}
        for host in ('vm', 'sim'):
            function = self.cloud.bitstream()
            places[host] = self.cloud.fpga(function), function
            self.cloud.delete(self.cloud.boot(places[host][0], host=host))
        self.wait_clean()
        before = len(self.programmings())
        servers = {}
        for host, (flavor, function) in places.items():
            servers[host] = self.cloud.boot(flavor, host=None)
            self.assertEqual(host, self.host_of(servers[host]))
        self.assertGuestHas(servers['vm'], places['vm'][1])
        self.assertEqual(before, len(self.programmings()))

    def assertHas(self, server, host, region, status='ACTIVE'):
        """The server is there, with that region in Placement."""
        self.cloud.settled(server, status)
        self.assertEqual(host, self.host_of(server))
        self.assertEqual({region: ONE}, self.cloud.allocations(server, host))

    def confirm(self, server):
        api = self.cloud.compute
        api.confirm_server_resize(server)
        # no task is shown meanwhile
        self.cloud.wait('a confirmed server', lambda: api.get_server(
            server.id).status == 'ACTIVE')

    def test_2_cold_migration(self):
        """Cold migration to another host: back again, and for good."""
        api, function = self.cloud.compute, self.cloud.bitstream()
        server = self.cloud.boot(self.cloud.fpga(function))
        self.assertGuestHas(server, function)
        before = len(self.programmings())
        api.migrate_server(server, host='sim')
        self.assertHas(server, 'sim', OTHER, 'VERIFY_RESIZE')
        self.assertEqual({base.REGION: ONE}, self.cloud.in_use())
        self.assertEqual({function}, self.cloud.functions(OTHER, 'sim'))
        api.revert_server_resize(server)
        self.assertHas(server, 'vm', base.REGION)
        self.assertEqual({}, self.cloud.in_use('sim'))
        self.assertGuestHas(server, function)
        # what a guest with the whole card did to it is not known
        self.assertEqual(before + 1, len(self.programmings()))

        api.migrate_server(server, host='sim')
        self.assertHas(server, 'sim', OTHER, 'VERIFY_RESIZE')
        self.confirm(server)
        self.assertHas(server, 'sim', OTHER)
        self.cloud.wait('release', lambda: not self.cloud.in_use())
        # and from there, where the next one left it free
        api.migrate_server(server, host='vm')
        self.assertHas(server, 'vm', base.REGION, 'VERIFY_RESIZE')
        self.assertGuestHas(server, function)
        self.confirm(server)
        self.assertHas(server, 'vm', base.REGION)
        self.cloud.wait('release', lambda: not self.cloud.in_use('sim'))

    def test_3_evacuation(self):
        """The other host dies: its server goes on here, with its function.

        When the host comes back it gives up what it had.
        """
        api, function = self.cloud.compute, self.cloud.bitstream()
        server = self.cloud.boot(self.cloud.fpga(function), host='sim')
        self.assertHas(server, 'sim', OTHER)
        os.kill(processes.running('nova-compute-sim'), signal.SIGKILL)
        service, = api.services(binary='nova-compute', host='sim')
        api.update_service_forced_down(service, forced=True)
        api.evacuate_server(server, host='vm')
        # Nova ends the task before it says where the server is; and that it
        # is stopped then is so since 2.95
        self.cloud.wait('evacuation', lambda: self.host_of(server) == 'vm')
        self.assertHas(server, 'vm', base.REGION, 'SHUTOFF')
        api.start_server(server)
        self.assertHas(server, 'vm', base.REGION)
        self.assertGuestHas(server, function)
        self.assertEqual({OTHER: ONE}, self.cloud.in_use('sim'))
        self.start()
        self.cloud.wait('release', lambda: not self.cloud.in_use('sim'))
        api.update_service_forced_down(service, forced=False)
        self.assertHas(server, 'vm', base.REGION)


class LiveMigration(base.Trial):
    """Between the two libvirtds of the machine, by Nova's API."""

    def setUp(self):
        super().setUp()
        self.compute.stop()
        self.compute.configure(BESIDE_VM2)
        self.addCleanup(self.usual)
        machine.check('/mnt/lab/host2', 300)
        self.compute.start()
        self.cloud.wait_ready('vm2', OTHER_EDU, OTHER_REGION, OTHER_MTTY)
        self.cloud.wait('a device of vm', lambda: EDU in
                        self.cloud.providers())

    def usual(self):
        """End the second host, and remove it from the cloud."""
        try:
            self.cloud.clear()
        finally:
            machine.check('systemctl stop nova-compute-vm2 vm2-libvirtd', 400)
            machine.check(f'echo 1 > /sys/bus/pci/devices/{OTHER_FPGA}/remove')
            self.compute.stop()
            self.compute.configure('')
            self.compute.start()
        for service in self.cloud.compute.services(
                binary='nova-compute', host='vm2'):
            self.cloud.compute.delete_service(service)

    def flavor(self, how, *groups):
        flavor = self.cloud.of_profile(*groups)
        self.cloud.compute.create_flavor_extra_specs(
            flavor, {'accel:live_migration': how})
        return flavor

    def assertHas(self, server, host, devices):
        """The server is there, runs, and has these devices and no others."""
        self.cloud.wait(f'the server on {host}', lambda: (
            self.cloud.settled(server, 'ACTIVE').compute_host == host))
        self.assertEqual(devices, self.cloud.allocations(server, host))
        other = 'vm2' if host == 'vm' else 'vm'
        self.cloud.wait('release', lambda: not self.cloud.in_use(other))
        self.assertEqual(devices, self.cloud.in_use(host))

    def migrate(self, server, host):
        """Let it go there, and show when libvirt took devices out of the guest
        and put others in, and for how long it stood still."""
        machine.check(f'cd /run; for host in vm vm2; do {VIRSH} event --all '
                      f'--timestamp --loop > events.$host 2>&1 & '
                      f'echo $! > events.$host.pid; done')
        began = time.monotonic()
        self.cloud.compute.live_migrate_server(
            server, host=host, block_migration=False)
        self.cloud.wait(f'the server on {host}', lambda: (
            self.cloud.settled(server, 'ACTIVE').compute_host == host))
        print(f'    to {host} in {time.monotonic() - began:.0f} s')
        print(machine.run(
            'cd /run; kill $(cat events.*.pid); grep -E "device-|Suspended|'
            'Resumed|downtime:|vfio_data" events.vm events.vm2')[1],
            flush=True)

    def test_1_detach(self):
        """A guest moves while it runs, and lets go of its devices.

        It reads those of the other host, and goes back: the function of one
        was programmed there before.
        """
        function = self.cloud.bitstream()
        server = self.cloud.boot(self.flavor(
            'detach', self.group('TEST'),
            self.group('FPGA', **{'accel:function_id': function})),
            hotplug=True)
        here = {EDU: ONE_EDU, base.REGION: ONE}
        there = {OTHER_EDU: ONE_EDU, OTHER_REGION: ONE}
        self.assertHas(server, 'vm', here)
        self.assertGuestHas(server, function)
        self.assertIn(EDU_READ, self.cloud.console(server))
        for host, devices in (('vm2', there), ('vm', here)):
            self.migrate(server, host)
            self.assertHas(server, host, devices)
            self.cloud.wait('both devices in the guest', lambda: all(
                word in self.cloud.console(server)
                for word in ('DFL ', EDU_READ)))
            # the log of a guest that came begins with what came
            text = self.cloud.console(server)
            self.assertIn('SOMETHING CAME', text)
            self.assertNotIn('PROBE UP', text)
            self.assertEqual({function}, {*self.cloud.guest_function(server)})

    def test_2_guest_that_keeps_its_device(self):
        """A guest that does not let go stays, and keeps its device."""
        server = self.cloud.boot(self.flavor('detach', self.group('TEST')))
        self.assertHas(server, 'vm', {EDU: ONE_EDU})
        self.cloud.compute.live_migrate_server(
            server, host='vm2', block_migration=False)
        self.cloud.wait('an end of the migration', lambda: [
            m.status for m in self.cloud.compute.migrations()
            if m.server_id == server.id and m.status in ('failed', 'error')])
        self.assertHas(server, 'vm', {EDU: ONE_EDU})

    def test_3_transparent(self):
        """A guest moves while it runs, and takes a mediated device along.

        What it has written into that once it reads on the other host, and back
        on the first.
        """
        server = self.cloud.boot(self.flavor('transparent', self.group(
            'VGPU', **{f'trait:{kinds.SINGLE}': 'required',
                       f'trait:{naming.MIGRATABLE}': 'required'})),
            hotplug=True)
        one = {'CUSTOM_ACCELERATOR_VGPU': 1}
        self.assertHas(server, 'vm', {'mtty': one})
        self.assertIn('MTTY scratch=5a lsr=60 before=00',
                      self.cloud.console(server))
        made = self.mediated()
        self.assertEqual(['mtty'], [*made])
        self.reads(server, 0)
        for host, parent in (('vm2', OTHER_MTTY), ('vm', 'mtty')):
            self.migrate(server, host)
            self.assertHas(server, host, {parent: one})
            now = self.mediated()
            self.assertEqual([parent], [*now])
            if host == 'vm2':
                self.assertNotEqual(made['mtty'], now[parent])
            self.reads(server, self.reads(server, 0))
            text = self.cloud.console(server, 'MTTY still')
            self.assertNotIn('MTTY scratch', text)
            self.assertNotIn('SOMETHING CAME', text)

    @staticmethod
    def mediated():
        """Parent of each mediated device of the kernel -> its UUID."""
        found = machine.check('for d in /sys/bus/mdev/devices/*; do [ -e $d ] '
                              '&& readlink -f $d; done; true').splitlines()
        return {path.split('/')[-2]: path.split('/')[-1] for path in found}

    def reads(self, server, after):
        """Until the guest has read its register once more.

        :param after: which time it was before.
        :returns: which time it was.
        """
        def look():
            found = re.findall('MTTY still ([0-9a-f]{4}) scratch=(..)',
                               self.cloud.console(server, 'MTTY still'))
            self.assertEqual({'5a'}, {value for _, value in found})
            newest = max(int(number, 16) for number, _ in found)
            return newest if newest > after else None
        return self.cloud.wait('the guest at its register', look)


class OwnPci(base.Trial):

    def setUp(self):
        super().setUp()
        self.addCleanup(self.usual)

    def usual(self):
        self.compute.stop()
        self.compute.configure('')
        self.compute.start()

    def test_1_beside_ours(self):
        """A device of Nova's [pci] device_spec and one of ours in one server.

        A device that is in both is refused when nova-compute starts.
        """
        self.compute.stop()
        self.compute.configure(
            f'[pci]\ndevice_spec = {{"address": "{EDU}"}}\n')
        self.compute.start()
        function = self.cloud.bitstream()
        flavor = self.cloud.fpga(function)
        self.cloud.compute.create_flavor_extra_specs(
            flavor, {'pci_passthrough:alias': 'edu:1'})
        server = self.cloud.boot(flavor)
        self.assertGuestHas(server, function)
        self.assertIn(EDU_READ, self.cloud.console(server))
        self.cloud.delete(server)

        self.compute.stop()
        self.compute.configure(
            f'[pci]\ndevice_spec = {{"address": "{base.CARD}"}}\n')
        machine.check('systemctl --no-block start nova-compute')
        self.cloud.wait('an end of nova-compute', lambda: machine.run(
            'systemctl is-active nova-compute')[1] in ('failed', 'inactive'))
        said = machine.check('grep "CRITICAL\\|ERROR" '
                             '/var/log/nova-compute.log | tail -n 40')
        self.assertIn(base.CARD, said)
        self.assertIn('device_spec', said)
        machine.run('systemctl reset-failed nova-compute')
