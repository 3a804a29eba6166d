# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A guest that starts again: with all of its devices, or not at all.

Nothing releases a device on the way, whatever Placement answers and whatever
a crash left in the claims.
"""

import time

from nova_accel import conf
from nova_accel import model
from nova_accel import naming
from tests.functional import base
from tests.functional import cloud
from tests.functional import faults
from tests.functional import process
from tests.functional.restarts import FPGA, HALF_DONE, RestartTestBase, VF
from tests.functional import vgpus
from tests.host import base as host_base
from tests import limits


class PlacementTest(RestartTestBase):
    """Placement does not say what the server is allocated."""

    def test_start(self):
        self._stop_server(self.server)
        for answer, state in zip(faults.ANSWERS, HALF_DONE, strict=True):
            self.leave(state)
            with faults.allocations_answered(answer) as spoilt:
                self.act('os-start')
                self.assertNotEqual([], spoilt)
            self.assertDown()
        self._start_server(self.server)
        self.assertUp()

    def test_what_the_owner_reads(self):
        for answer, word in (('error', 'Placement'), ('timeout', 'Placement'),
                             ('empty', 'allocat')):
            self.leave(model.ClaimState.UNKNOWN)
            with faults.allocations_answered(answer):
                self.act('reboot', type='HARD')
            self.assertDown()
            self._wait_for_state_change(self.server, 'ERROR')
            text = self.fault(self.server)
            self.assertIn(word, text)
            self.assertIn(self.server['id'], text)
            self.assertTrue(text.endswith('.'), text)
        self.mend()

    def test_rescue_and_unrescue(self):
        self.leave(model.ClaimState.UNKNOWN)
        with faults.allocations_answered('error'):
            self.act('rescue')
        self.assertDown()
        self.mend()
        self._rescue_server(self.server)
        self.assertUp()
        self.domain(self.server).destroy()
        self.leave(model.ClaimState.UNKNOWN)
        with faults.allocations_answered('empty'):
            self.act('unrescue')
        self.assertDown()

    def test_rebuild(self):
        """Nothing is asked of what is whole."""
        for answer in faults.ANSWERS:
            with faults.allocations_answered(answer):
                self.act('rebuild', imageRef=self.glance.guest_image)
            self.assertUp()

    def test_host_boot(self):
        self.flags(resume_guests_state_on_host_boot=True)
        self.leave(model.ClaimState.PROVISIONING)
        with faults.allocations_answered('error'):
            self.host_reboots('compute1')
            self._wait_for_server_parameter(
                self.server, {'OS-EXT-STS:task_state': None})
        self.assertDown()
        self.mend()
        self.leave(model.ClaimState.PROVISIONING)
        self.host_reboots('compute1')
        self._wait_for_state_change(self.server, 'ACTIVE')
        self.assertUp()


class FailedRebuildTest(RestartTestBase):
    """After a rebuild that failed Nova would remove the server's allocations,
    and the server keeps its devices: so it keeps the allocations."""

    def setUp(self):
        super().setUp()
        kernel = self.kernel('compute1')
        kernel.set_fault(FPGA, vanish=True)
        self.allocations = self.allocated(self.server['id'])
        self.act('rebuild', imageRef=self.glance.guest_image)
        self._wait_for_state_change(self.server, 'ERROR')
        self.assertEqual(self.allocations, self.allocated(self.server['id']))
        self.assertDown()

    def test_device_comes_back(self):
        kernel = self.kernel('compute1')
        self.act('reboot', type='HARD')
        self.assertDown()
        kernel.set_fault(FPGA, vanish=None)
        kernel.rebind(VF, 'dfl-pci')
        self.parts('compute1').inventory.scanner.scan()
        self.mend()


class StandardClassesTest(vgpus.NativeTestBase):
    """A vGPU of Nova's own beside a device of ours, both by the standard
    classes, so that no claim of ours tells of the vGPU."""

    CLASSES = 'standard'
    HOSTS = {'compute1': {**vgpus.NativeTestBase.HOSTS['compute1'],
                          'cards': [base.card(FPGA)]}}

    DRIVERS = ('vgpu', 'dfl')

    def setUp(self):
        super().setUp()
        self.server = self.boot({
            'resources1:FPGA': '1', 'resources2:VGPU': '1',
            'trait2:CUSTOM_VGPU_NVIDIA': 'forbidden', 'group_policy': 'none'})
        self.before = self.held(self.server)
        self.assertEqual([('compute1', VF)], self.before)
        self.devices = self.hostdevs(self.server)
        self.assertEqual(2, len(self.devices))

    def hard_reboot(self):
        self.api.post_server_action(
            self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None})

    def test_hard_reboot(self):
        store = self.parts('compute1').store
        for state in (model.ClaimState.BOUND, model.ClaimState.UNKNOWN):
            for answer in ('error', 'empty'):
                store.update(store.claims(), state=state)
                with faults.allocations_answered(answer):
                    self.hard_reboot()
                self.assertEqual(self.before, self.held(self.server))
                if state is model.ClaimState.BOUND:
                    self.assertEqual(self.devices, self.hostdevs(self.server))
                self.hard_reboot()
                self._wait_for_state_change(self.server, 'ACTIVE')
                # its own vGPU Nova knows by the guest that was there
                self.assertIn(VF, self.hostdevs(self.server))


class StopTest(base.AcceleratorTestBase):
    """nova-compute is stopped, as Nova does it after a SIGTERM."""

    HOSTS = {'compute1': {'cards': [base.card(FPGA, [base.NLB0])]}}

    @cloud.fresh
    def test_while_a_card_is_programmed(self):
        """It ends in order, long before the programming, which hangs."""
        self.upload_bitstream(base.CRYPTO, properties={
            'accel:function_id': base.CRYPTO})
        self.flags(programming_timeout=10 * process.PATIENCE, group='accel')
        if 'manager_shutdown_timeout' in conf.CONF:
            # Nova 34: 20 s of it are for cleanup_host(), and as long as the
            # rest it waits for builds before
            self.flags(manager_shutdown_timeout=21)
        kernel = self.kernel('compute1')
        kernel.set_fault(FPGA, hang='program')
        # also where the test fails: its threads would wait for the card
        self.addCleanup(kernel.set_fault, FPGA, hang=None)
        flavor = base.fpga_flavor(function_id=base.CRYPTO)
        server = self.api.post_server({'server': self._build_server(
            networks='none', image_uuid=self.glance.guest_image,
            flavor_id=self._create_flavor(extra_spec=flavor))})
        host_base.wait_until_programmed(kernel, FPGA)
        began = time.monotonic()
        self.computes['compute1'].stop()
        self._wait_for_state_change(server, 'ERROR')
        self.assertLess(time.monotonic() - began, process.PATIENCE)
        self.assertIn('was abandoned, because nova-compute stops',
                      self.fault(server))
        # the claim ended with the build; what the region carries is not known
        self.assertEqual([], self.claims())
        loaded, = self.parts('compute1').store.loaded().values()
        self.assertIsNone(loaded.content)
        kernel.set_fault(FPGA, hang=None)
        # the process that has ended does nothing to the card any more
        process.until(lambda: self.assertEqual(set(), limits.at_work()))
        self.restart_compute_service('compute1')
        self.report()
        self.assertFalse({naming.function_trait(function) for function in (
            base.NLB0, base.CRYPTO)} & self.traits(
                f'compute1_accel_{FPGA}_region0'))
        self._delete_server(server)
        again = self.boot(flavor)
        self.assertEqual([VF], self.hostdevs(again))
        self._delete_server(again)
