# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whether a GPU has cleared its memory after a server, on simulated hosts."""

import itertools
import json
import types

import ddt
import fixtures

from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.host import nvidia
from nova_accel.host import pci
from nova_accel import model
from tests.unit import gpus
from tests.unit.host import A

#: a product of each family
PRODUCTS = {'turing': '1eb8', 'ga100': '20b5', 'ampere': '2236',
            'ada': '26b9', 'hopper': '2331', 'gb100': '2901', 'gb202': '2bb5'}


class TestCase(gpus.TestCase):

    def start(self, *others, policy='gpu=clear', **more):
        self.config.config(
            group='accel', handover=[policy], device_timeout=1,
            include_devices=[f'address={A}'])
        self.device = super().start({
            'address': A, 'reset_method': 'flr bus', 'iommu_group': 7,
            **more}, others=others)[A]
        return self.device

    def release(self, last_shown=''):
        return self.driver.release(
            self.device, self.device.handles[0], None,
            base.Use(last_shown=lambda: last_shown))

    def facts(self, **more):
        return base.facts_of(self.release(**more))

    def refused(self, *said, **more):
        error = str(self.assertRaises(
            exception.NotCleared, self.release, **more))
        for text in (A, *said):
            self.assertIn(text, error)
        return error

    def assertNotShown(self, facts, *why):
        self.assertEqual(handover.NOT_SHOWN, facts['memory'])
        for text in why:
            self.assertIn(text, facts['why'])


@ddt.ddt
class ReleaseTest(TestCase):

    @ddt.data(*PRODUCTS)
    def test_cleared(self, family):
        self.start(device=PRODUCTS[family])
        done = self.release()
        self.assertEqual('reset bus', done)
        facts = base.facts_of(done)
        self.assertEqual((handover.CLEARED, 'VFIO', '16.0 GT/s PCIe x16'),
                         (facts['memory'], facts['read_by'], facts['link']))
        for word in nvidia.REGISTERS[family].words:
            self.assertEqual(
                [hex(word.value), '0x0', hex(word.value)],
                facts['words'][f'{word.name} at {word.offset:#x}'])
        self.assertEqual(
            dict.fromkeys(nvidia.REGISTERS[family].modes, 'off'),
            facts['modes'])
        self.assertEqual('nvidia', pci.driver(self.kernel, A))
        self.assertEqual('flr bus', self.kernel.read(
            pci.path(A, 'reset_method')))
        # the next owner may read it
        self.assertNotIn(A, done.shown)

    def test_memory_of_the_server(self):
        """What the guest wrote is gone, which a reset of the function leaves.
        """
        for policy, left in ('gpu=reset', {'memory': 'a secret'}), (
                'gpu=clear', {}):
            self.start(policy=policy)
            self.kernel.guest_takes(A)
            self.kernel.guest_writes(A, memory='a secret')
            self.kernel.guest_returns(A)
            self.release()
            self.kernel.guest_takes(A)
            self.assertEqual(left, self.kernel.guest_reads(A))

    @ddt.data(
        ({'policy': 'gpu=reset'}, 'reset flr', 'and not its bus'),
        ({'reset_method': 'flr'}, 'reset flr', 'and not its bus'),
        ({'device': '1234'}, 'reset flr', 'where this product'),
        ({'device': '1db6'}, 'reset flr', 'where this product'),
        ({'vendor': '1002', 'device': '744c'}, 'reset flr', 'AMD'),
        ({'vendor': '1002', 'device': '744c', 'policy': 'gpu=bus'},
         'reset bus', 'AMD'),
        ({'vendor': '8086', 'device': '56c0'}, 'reset flr', 'Intel'),
        ({'bar0_mib': 1}, 'reset bus', 'its BAR0 has 1048576 bytes'),
        ({'faults': {'memory_clear': 'stale'}}, 'reset bus',
         'may be that of the boot before'),
        ({'faults': {'lockdown': True, 'vfio': 'ENOENT'}}, 'reset bus',
         'VFIO: No such file or directory; sysfs: Operation not permitted'))
    @ddt.unpack
    def test_not_shown(self, more, done, why):
        self.start(**more)
        found = self.release()
        self.assertEqual(done, found)
        self.assertNotShown(base.facts_of(found), why)
        self.assertEqual('nvidia', pci.driver(self.kernel, A))

    def test_slot_with_another_function(self):
        self.start(*gpus.COMPANY)
        done = self.release()
        self.assertIn('reset flr', done)
        self.assertNotShown(base.facts_of(done), 'not its bus')

    def test_by_sysfs(self):
        for bound in 'nvidia', 'vfio-pci', None:
            self.start(faults={'vfio': 'EPERM'}, driver=bound)
            facts = self.facts()
            self.assertEqual((handover.CLEARED, 'sysfs'),
                             (facts['memory'], facts['read_by']))
            self.assertEqual(bound, pci.driver(self.kernel, A))
            self.assertEqual('flr bus', self.kernel.read(
                pci.path(A, 'reset_method')))

    def test_a_process_has_it_open(self):
        self.start(faults={'vfio': 'EBUSY'})
        error = str(self.assertRaises(exception.DeviceError, self.release))
        self.assertIn('Device or resource busy', error)
        self.assertEqual([], self.kernel.resets(A))

    @ddt.data(
        ('never', '"memory clear finished" did not change as expected (0x0 in '
         'place of 0x1)'),
        ('ones', '"boot complete" reads as 0xffffffff'))
    @ddt.unpack
    def test_not_cleared(self, fault, why):
        """Under any policy that resets the bus; it is tried again."""
        for policy in 'clear', 'gpu=bus', 'gpu=shown':
            self.start(policy=policy)
            self.kernel.set_fault(A, memory_clear=fault)
            self.assertLessEqual(len(self.refused(why)), 255)
            # no driver of the host gets what the server left
            self.assertEqual('vfio-pci', pci.driver(self.kernel, A))
            self.kernel.set_fault(A, memory_clear=None)
            self.assertEqual(handover.CLEARED, self.facts()['memory'])

    def test_clear_that_takes_longer_than_the_limit(self):
        self.start(clear_seconds=30)
        self.refused('did not change as expected')

    def test_bus_that_cannot_be_reset(self):
        self.start()
        self.kernel.set_fault(A, reset='EIO')
        error = str(self.assertRaises(exception.DeviceError, self.release))
        self.assertIn('Input/output error', error)

    # Demanded

    def test_demanded(self):
        self.start(policy='gpu=shown')
        self.assertEqual(handover.CLEARED, self.facts()['memory'])

    @ddt.data(({'bar0_mib': 1}, 'no word at'),
              ({'faults': {'memory_clear': 'stale'}}, 'boot before'),
              ({'faults': {'lockdown': True, 'vfio': 'EPERM'}},
               'registers cannot be read'))
    @ddt.unpack
    def test_demanded_and_not_shown(self, more, why):
        self.start(policy='gpu=shown', **more)
        self.refused('handover demands', why)

    @ddt.data(({'reset_method': 'flr'}, 'by its bus'),
              ({'device': '1234'}, 'where this product'),
              ({'vendor': '1002', 'device': '744c'}, 'AMD'))
    @ddt.unpack
    def test_demanded_of_what_cannot_show_it(self, more, why):
        device = self.start(policy='gpu=shown', **more)
        self.assertEqual((model.Health.QUARANTINED, ()),
                         (device.health, device.handles))
        self.assertIn(why, device.reason)

    # Modes

    def shown(self, **modes):
        return json.dumps({'memory': handover.CLEARED, 'modes': modes})

    def test_mode_that_a_server_has_left(self):
        self.start(device='20b5')
        self.kernel.set_fault(A, modes={'MIG': 'on'})
        error = self.refused(
            'left MIG on in place of off', f'nvidia-smi -i {A} -mig 0',
            last_shown=self.shown(MIG='off', ECC='off'))
        self.assertLessEqual(len(error), 255)
        # the host's driver has it again, which can restore it
        self.assertEqual('nvidia', pci.driver(self.kernel, A))
        self.kernel.set_fault(A, modes=None)
        self.facts(last_shown=self.shown(MIG='off', ECC='off'))

    def test_mode_that_was_so(self):
        """Also where nothing is known of the last hand-over, or of a mode."""
        self.start(device='20b5')
        self.kernel.set_fault(A, modes={'MIG': 'on'})
        for known in self.shown(MIG='on'), self.shown(), '', '{}':
            self.assertEqual({'MIG': 'on', 'ECC': 'off'},
                             self.facts(last_shown=known)['modes'])

    def test_ecc_of_a_confidential_gpu(self):
        """It is not readable there, so it has not changed."""
        self.start(device='2331')
        self.kernel.set_fault(A, modes={'CC': 'on', 'ECC': 'on'})
        self.assertEqual({'CC': 'on'}, self.facts(
            last_shown=self.shown(CC='on', ECC='off'))['modes'])


class WatchedTest(TestCase):
    """What is concluded from readings."""

    def judge(self, *seen):
        watched = nvidia.Watched(
            [0x3ff, 1], [[0, *values] for values in seen], [])
        return (nvidia.failure('ada', watched), nvidia.doubt('ada', watched))

    def test_readings(self):
        ones, bad = 0xffffffff, 0xbadf5620
        for seen, failed, doubted in (
                ([(0, 0), (0x3ff, 0), (0x3ff, 1)], False, False),
                ([(ones, ones), (0, 0), (0x3ff, 1)], False, False),
                ([(ones, ones), (0x3ff, 1)], False, True),
                ([(bad, bad), (0x3ff, 1)], False, True),
                ([(0x3ff, 1)], False, True),
                ([(0, 1), (0x3ff, 1)], False, True),
                ([(0x3ff, 0), (0x3ff, 1)], False, True),
                ([(0, 0), (0x3ff, bad)], True, False),
                ([(0, 0), (ones, ones)], True, False),
                ([(0, 0), (0x1ff, 1)], True, False),
                ([(0, 0), (0x3ff, 3)], True, False)):
            self.assertEqual((failed, doubted),
                             tuple(map(bool, self.judge(*seen))), seen)

    def test_readings_that_change_for_ever(self):
        numbers, clock = iter(range(10 ** 9)), itertools.count()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.nvidia.time', types.SimpleNamespace(
                monotonic=lambda: next(clock) / 200, sleep=lambda _: None)))
        watched = nvidia.watch(lambda offset: next(numbers), lambda: None,
                               'ada', 0.5)
        self.assertEqual(64, len(watched.seen))
        self.assertGreater(watched.seen[-1][1], 150)
