# Licensed under the Apache License, Version 2.0. See LICENSE.

from tests.lab import machine
from tests.lab.trials import base

NIC, NVME, QAT, TIMECARD = ('0000:01:00.0', '0000:02:00.0', '0000:03:00.0',
                            '0000:04:00.0')
SINGLE = 'CUSTOM_LINUX_MTTY_SINGLE_PORT_SERIAL'
DUAL = 'CUSTOM_LINUX_MTTY_DUAL_PORT_SERIAL'
#: the disk with VFs; the other one is trials/handover.py's
OF_QEMU = {'trait:CUSTOM_SSD_QEMU': 'required'}


class Kinds(base.Trial):

    def assertServerHas(self, groups, expected, *guest):
        """Boot with a device profile of these groups; the server.

        :param expected: {provider: resources} in Placement.
        :param guest: vendor and product that the guest sees, or a line of
            its console.
        """
        server = self.cloud.boot(self.cloud.of_profile(*groups))
        self.assertEqual(expected, self.cloud.allocations(server))
        console = self.cloud.console(server)
        for what in guest:
            self.assertIn(what, console)
        return server

    def test_1_nvme(self):
        """A VF of an NVMe disk; and again in the next server."""
        expected = {NVME: {'CUSTOM_ACCELERATOR_SSD': 1}}
        for _ in range(2):
            server = self.assertServerHas(
                [self.group('SSD', **OF_QEMU)], expected,
                ' 1b36:0010 class=010802')
            self.cloud.delete(server)

    def test_2_network_card_by_rule(self):
        """A VF of a network card that a rule of the operator names."""
        self.assertServerHas(
            [self.group('NIC')], {NIC: {'CUSTOM_ACCELERATOR_NIC': 1}},
            ' 8086:10ca class=020000')

    def test_3_time_card(self):
        """A time card, which comes back to its driver afterwards."""
        server = self.assertServerHas(
            [self.group('TIMECARD')],
            {TIMECARD: {'CUSTOM_ACCELERATOR_TIMECARD': 1}},
            ' 1d9b:0400 class=088000')
        self.cloud.delete(server)
        self.assertIn('ptp_ocp', machine.check(
            f'readlink /sys/bus/pci/devices/{TIMECARD}/driver'))

    def test_4_mediated_devices(self):
        """Mediated devices, whose types share the room of their parent."""
        # ports of mtty: a type "single" takes one, a type "dual" two
        ports = self.room()
        dual = self.assertServerHas(
            [self.group('VGPU', **{f'trait:{DUAL}': 'required'})],
            {'mtty': {'CUSTOM_ACCELERATOR_VGPU': 1}},
            ' 4348:3253 ', 'MTTY scratch=5a')
        self.cloud.wait('less room', lambda: self.room() == ports - 1)
        single = self.assertServerHas(
            [self.group('VGPU', **{f'trait:{SINGLE}': 'required'})],
            {'mtty': {'CUSTOM_ACCELERATOR_VGPU': 1}}, 'MTTY scratch=5a')
        self.assertEqual(['mtty-1', 'mtty-2'], sorted(self.made().split()))
        self.cloud.delete(dual, single)
        self.assertEqual('', self.made())
        self.cloud.wait('all the room', lambda: self.room() == ports)

    def made(self):
        """Types of the mediated devices that the kernel has."""
        return machine.check('for d in /sys/bus/mdev/devices/*/mdev_type; do '
                             '[ -e $d ] && basename $(readlink $d); done; '
                             'true')

    def test_5_qat(self):
        """A VF that is on VFIO's deny-list: only when that is lifted."""
        flavor = self.cloud.of_profile(self.group('QAT'))
        _server, fault = self.cloud.refused(flavor, host=None)
        self.assertIn('No valid host', fault)
        self.assertIn('deny-list', machine.check(
            '/opt/openstack/bin/nova-accel discover --driver qat'))
        self.addCleanup(machine.check,
                        'modprobe -r vfio-pci && modprobe vfio-pci')
        machine.check('modprobe -r vfio-pci && '
                      'modprobe vfio-pci disable_denylist=1')
        self.cloud.wait('an offer of the QAT card', lambda: (
            'CUSTOM_ACCELERATOR_FENCED' not in
            self.cloud.providers()[QAT]['traits']))
        server = self.assertServerHas(
            [self.group('QAT')], {QAT: {'CUSTOM_ACCELERATOR_QAT': 1}},
            ' 8086:37c9 ')
        # vfio-pci cannot be unloaded before
        self.cloud.delete(server)

    def test_6_three_kinds(self):
        """A function, a mediated device and an NVMe VF in one server.

        The compute host reboots under it, where the kernel forgets VFs and
        mediated devices: it has all of them again.
        """
        function = self.cloud.bitstream()
        guest = [' 8086:09c4 ', 'MTTY scratch=5a', ' 1b36:0010 class=010802']
        held = {base.REGION: {'CUSTOM_ACCELERATOR_FPGA': 1},
                'mtty': {'CUSTOM_ACCELERATOR_VGPU': 1},
                NVME: {'CUSTOM_ACCELERATOR_SSD': 1}}
        server = self.assertServerHas(
            [self.group('FPGA', **{'accel:function_id': function}),
             self.group('VGPU', **{f'trait:{SINGLE}': 'required'}),
             self.group('SSD', **OF_QEMU)], held, *guest)
        self.assertGuestHas(server, function)
        self.reboot_host()
        server = self.cloud.settled(server, 'ACTIVE')
        self.assertGuestHas(server, function)
        for what in guest:
            self.assertIn(what, self.cloud.console(server))
        self.assertEqual(held, self.cloud.allocations(server))
