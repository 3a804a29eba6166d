# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is recorded of the memory of a GPU after a server, and when no other
server gets it."""

import json

from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.host import pci
from tests.host import handovers
from tests.host import killed_operations
from tests.unit.host import A

GPU = handovers.HandoverTestCase.CLASS
CARD = {'address': A, 'reset_method': 'flr bus', 'iommu_group': 7}


class TestCase(handovers.HandoverTestCase):

    POOLS = 'none'

    def start(self, *policy, **more):
        self.config.config(group='accel', handover=list(policy),
                           device_timeout=4)
        self.start_host(gpus=[{**CARD, **more}], drivers=('gpu',))

    def policy(self, *policy):
        self.config.config(group='accel', handover=list(policy))
        self.restart()

    def shown(self):
        return [json.loads(h.shown or '{}') for h in self.handovers()]

    def assertWithheld(self, *said):
        claim, = self.host.holdings.all()
        for text in said:
            self.assertIn(text, claim.error)
        self.assertRaises(exception.AcceleratorError, self.boot)

    def pauses(self):
        return self.host.releases._handles._pauses

    def pauses_end(self):
        for uuid, (times, _) in self.pauses().items():
            self.pauses()[uuid] = times, 0


class RecordTest(TestCase):

    def test_of_a_gpu_that_was_cleared(self):
        self.start()
        self.host.delete(self.boot())
        self.assertEqual([(A, 'reset bus', 'clean')], self.results())
        shown, = self.shown()
        self.assertEqual((handover.CLEARED, 'VFIO'),
                         (shown['memory'], shown['read_by']))
        self.assertEqual('nvidia', pci.driver(self.simulated.kernel, A))
        # nothing of the host or of a server, for the next owner reads it
        record, = self.handovers()
        for secret in A, record.server:
            self.assertNotIn(secret, record.shown)
        self.assertEqual(frozenset(), self.host.store.unclean())

    def test_of_a_function_reset(self):
        self.start('gpu=reset')
        self.host.delete(self.boot())
        self.assertEqual([(A, 'reset flr', 'clean')], self.results())
        shown, = self.shown()
        self.assertEqual(handover.NOT_SHOWN, shown['memory'])

    def test_without_a_reset(self):
        self.start('gpu=none')
        self.host.delete(self.boot())
        self.assertEqual([{}], self.shown())


class WithheldTest(TestCase):

    def test_until_it_has_cleared_its_memory(self):
        """It is tried again after pauses that grow, one record for each
        reason."""
        self.start()
        server = self.boot()
        self.fault(memory_clear='never')
        self.host.delete(server)
        self.assertWithheld('"memory clear finished" did not change')
        attempts = len(self.resets())
        self.host.reconcile()
        self.assertEqual(attempts, len(self.resets()))
        uuid, = self.pauses()
        for times in range(2, 4):
            self.pauses_end()
            self.host.reconcile()
            self.assertEqual(times, self.pauses()[uuid][0])
        self.assertEqual(1, len(self.results()))
        self.fault(memory_clear=None)
        self.host.reconcile()
        self.assertWithheld()
        self.pauses_end()
        self.host.reconcile()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual({}, self.pauses())
        self.assertEqual(handover.CLEARED, self.shown()[-1]['memory'])
        self.assertHas(self.boot(), A)

    def test_start_does_not_wait_for_the_pause(self):
        self.start()
        server = self.boot()
        self.fault(memory_clear='ones')
        self.host.delete(server)
        self.assertWithheld('reads as 0xffffffff')
        self.fault(memory_clear=None)
        self.restart()
        self.host.reconcile()
        self.assertEqual([], self.host.holdings.all())

    def test_until_it_was_shown(self):
        self.start('gpu=shown', faults={'vfio': 'EPERM', 'lockdown': True})
        self.host.delete(self.boot())
        self.assertWithheld('demands that its memory is shown')
        self.policy('gpu=clear')
        self.host.reconcile()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual(handover.NOT_SHOWN, self.shown()[-1]['memory'])

    def test_released_before_it_was_demanded(self):
        """Once the policy is shown, it is cleared again, and shown to be."""
        self.start('gpu=reset')
        self.host.delete(self.boot())
        self.policy('gpu=clear')
        self.host.delete(self.boot())
        self.fault(vfio='EPERM', lockdown=True)
        self.host.delete(self.boot())
        self.policy('gpu=shown')
        self.assertRaises(exception.AcceleratorError, self.boot)
        self.fault(vfio=None, lockdown=None)
        for _ in range(3):
            self.pauses_end()
            self.host.reconcile()
            self.host.settle()
        self.assertEqual(handover.CLEARED, self.shown()[-1]['memory'])
        self.assertHas(self.boot(), A)

    def test_mode_that_a_server_has_left(self):
        """Until it is restored, or the operator takes it as it is."""
        self.start(device='20b5')
        self.host.delete(self.boot())
        for way in 'restored', 'taken':
            server = self.boot()
            self.fault(modes={'MIG': 'on'})
            self.host.delete(server)
            self.assertWithheld('has left MIG on in place of off')
            if way == 'restored':
                self.fault(modes=None)
                self.pauses_end()
                self.host.reconcile()
            else:
                self.policy('gpu=none')
                self.host.reconcile()
                self.policy()
                self.host.reconcile()
                self.host.settle()
            self.assertEqual([], self.host.holdings.all())
        self.host.delete(self.boot())
        self.assertEqual('on', self.shown()[-1]['modes']['MIG'])


class KilledTest(killed_operations.KilledTestCase):
    """nova-compute is killed between the reset, the reading and the record."""

    DEVICES = {'gpus': [CARD]}
    DRIVER, CLASS = 'gpu', GPU
    SPECS = {f'resources1:{GPU}': '1'}
    OPTIONS = {'handover': ['gpu=shown']}

    def begin(self):
        self.booted()
        self.simulated.kernel.guest_writes(A, memory='a secret')
        self.records = len(self.host.store.handovers())

    def check_clean(self):
        kernel = self.simulated.kernel
        self.assertEqual('nvidia', pci.driver(kernel, A))
        self.assertEqual('flr bus', kernel.read(pci.path(A, 'reset_method')))
        kernel.guest_takes(A)
        self.assertEqual({}, kernel.guest_reads(A))
        kernel.guest_returns(A)
        found = self.host.store.handovers()[self.records:]
        self.assertEqual({handover.CLEARED}, {
            json.loads(record.shown)['memory'] for record in found})

    def test_release(self):
        self.at_each_point(
            self.begin, lambda: [['delete', killed_operations.SERVER]],
            self.delete)
