# Licensed under the Apache License, Version 2.0. See LICENSE.
"""An operation that fails undoes what it did, and nothing else."""

import errno
from unittest import mock

from nova.tests.fixtures import libvirt as fakelibvirt

from nova_accel import model
from nova_accel import sim
from tests.functional import base
from tests.functional import restarts

DISK, FPGA = restarts.DISK, restarts.FPGA


class UndoTest(restarts.RestartTestBase):
    """What a server held before stays its own, with its data."""

    FLAVOR = {**restarts.RestartTestBase.FLAVOR,
              'accel1:runtime_programming': 'true'}

    def disk_is_busy(self):
        """Once, as when udev looks at a disk that has just come back."""
        check, busy = sim.SimulatedKernel.check_disks, [True]

        def once(kernel, function):
            if busy:
                busy.clear()
                raise OSError(errno.EBUSY, 'Device or resource busy')
            return check(kernel, function)
        return mock.patch.object(sim.SimulatedKernel, 'check_disks', once)

    def libvirt_refuses(self):
        return mock.patch.object(
            fakelibvirt.Domain, 'createWithFlags',
            side_effect=fakelibvirt.libvirtError('no memory'))

    def test_start(self):
        self._stop_server(self.server)
        self.leave(model.ClaimState.UNKNOWN)
        for fault in (self.disk_is_busy, self.libvirt_refuses):
            with fault():
                self.act('os-start')
            self.assertDown()
        self._start_server(self.server)
        self.assertUp()

    def test_hard_reboot(self):
        for state in (model.ClaimState.BOUND, model.ClaimState.UNKNOWN):
            for fault in (self.disk_is_busy, self.libvirt_refuses):
                self.leave(state)
                with fault():
                    self.act('reboot', type='HARD')
                self.assertDown()
            # else the disk has no driver of the host, and is not taken again
            self.mend()

    def test_rebuild(self):
        for fault in (self.disk_is_busy, self.libvirt_refuses):
            with fault():
                self.act('rebuild', imageRef=self.glance.guest_image)
            self._wait_for_state_change(self.server, 'ERROR')
            self.assertDown()
            self.mend()

    def test_rebuild_that_programs(self):
        """The function that the server had comes back."""
        image = self.glance.service.upload(
            self.glance.client, 'other', b'another', visibility='public',
            **{'accel:bitstream_id': self.bitstreams[base.NLB3]})['id']
        self.kernel('compute1').set_fault(FPGA, pr_error='crc')
        self.act('rebuild', imageRef=image)
        self._wait_for_state_change(self.server, 'ERROR')
        self.assertDown()
        self.kernel('compute1').set_fault(FPGA, pr_error=None)
        self.mend()
