# Licensed under the Apache License, Version 2.0. See LICENSE.

from tests import lab
from tests.lab import machine
from tests.lab import processes
from tests.lab.trials import base
from tests.lab.trials import computes
from tests.lab.trials import handover
from tests.lab.trials import kinds

A = '11111111-2222-4333-8444-555555555555'
B = 'aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee'
C = 'cccccccc-0000-4ccc-8ddd-eeeeeeeeeeee'
OTHER = '00000000-1111-4222-8333-444444444444'


class OnKernel(base.Trial):

    def put(self, name):
        machine.put(lab.LAB / name, f'/var/tmp/{name}')
        return f'/opt/openstack/bin/python -W ignore /var/tmp/{name} '

    def check(self, command):
        print('    ' + machine.check(command).replace('\n', '\n    '))


class Unbinding(OnKernel):

    def test_1_without_nova(self):
        """A device that a process has open: unbinding it hangs, its link is
        gone, and the error comes in time, also in another process."""
        self.check(self.put('unbind_on_kernel.py') + computes.EDU)


class Nvme(OnKernel):

    def test_1_without_nova(self):
        """The driver nvme by itself, with a disk: each use, and erasing."""
        self.compute.stop()
        self.addCleanup(self.compute.start)
        machine.check(f'echo 0 > /sys/bus/pci/devices/{kinds.NVME}/'
                      f'sriov_numvfs')
        self.check(self.put('nvme_on_kernel.py') + kinds.NVME)

    def test_2_sanitize(self):
        """The same with a disk that has Sanitize, and not Format."""
        self.compute.stop()
        self.addCleanup(self.compute.start)
        self.check(self.put('nvme_on_kernel.py') + handover.DISK)


class Dfl(OnKernel):

    def setUp(self):
        super().setUp()
        self.addCleanup(self.power_cycle)
        self.power_cycle(ports=2)
        self.compute.stop()
        self.command = self.put('dfl_on_kernel.py')

    def power_cycle(self, **card):
        machine.check('sync; systemctl stop nova-compute', 900)
        for name in ('vm', 'fpga'):
            processes.stop(name)
        machine.card(**card)
        machine.connect()
        machine.wait_booted()
        self.compute.wait_report(self.compute.reported())

    def step(self, *arguments):
        self.check(self.command + ' '.join(arguments))

    def test_1_without_nova(self):
        """The driver dfl by itself, with a card of two ports and its faults.

        Discovery, programming of either port, every failure of the card,
        recovery, a reset of a port, a trip to VFIO, what the privileged
        process refuses, ports that are released.
        """
        self.step('discover')
        self.step('program 0', A, '--expect', A.replace('-', ''))
        self.step('program 1', B, '--expect', B.replace('-', ''))
        self.step('program 0', C, '--interface', OTHER,
                  '--expect IncompatibleBitstream')
        self.step('program 0', C, '--payload-interface', OTHER,
                  '--expect ProgrammingFailed')
        for error in ('operation', 'crc', 'protocol', 'fifo', 'timeout'):
            machine.card(ports=2, pr_error=error, pr_error_count=1)
            self.step('program 0', C, '--expect ProgrammingFailed')
        self.step('program 0', C, '--expect', C.replace('-', ''))
        machine.card(ports=2, pr_error='crc', pr_error_count=1)
        self.step('stuck 0', B)
        machine.card(ports=2, pr_seconds=3)
        self.step('program 0', A, '--size 300001 --expect',
                  A.replace('-', ''))
        machine.card(ports=2)
        self.step('reset 1')
        self.step('guest')
        self.step('privileged')
        self.step('release 1', C)
