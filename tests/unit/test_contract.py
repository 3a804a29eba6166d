# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What every driver promises of find(), examine(), state() and answers()."""

import dataclasses

import ddt
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.drivers import contract
from nova_accel.drivers import dfl
from nova_accel.drivers import gpu
from nova_accel.drivers import nvme
from nova_accel.drivers import pci_rule
from nova_accel.drivers import qat
from nova_accel.drivers import timecard
from nova_accel.drivers import vgpu
from nova_accel.drivers import xrt
from nova_accel.host import limited
from nova_accel import model
from tests.unit.host import A, B, SimulatedHost

DRIVERS = (
    (dfl.DflDriver, 'cards', {}),
    (xrt.XrtDriver, 'alveos', {}),
    (gpu.GpuDriver, 'gpus', {}),
    *((vgpu.VgpuDriver, 'vgpus', {
        'framework': framework, 'units': 4, 'types': [
            {'id': number, 'name': 'NVIDIA A40-1Q', 'units': 1}], **more})
      for framework, number, more in (
          ('mdev', 'nvidia-557', {}),
          ('vendor-vfio', '557', {'total_vfs': 4, 'vfs': 4}))),
    (qat.QatDriver, 'qats', {'vfs': 16}),
    (nvme.NvmeDriver, 'nvmes', {}),
    (timecard.TimecardDriver, 'timecards', {}),
    (pci_rule.PciRuleDriver, 'nvmes', {}),
)


class SerialTest(testtools.TestCase):

    def test_what_cannot_be_printed(self):
        for found, expected in (('7', '7'), ('', ''), (None, None), (
                '\x1b[2J\n\u2066', r'\x1b[2J\n\u2066')):
            self.assertEqual(expected, contract.serial('x', found))


@ddt.ddt
class ContractTest(testtools.TestCase):

    def start(self, driver, kind, more):
        self.useFixture(config_fixture.Config(conf.CONF)).config(
            group='accel', pci_devices=['class=010802 type=DISK'],
            include_devices=['address=*'], whole_cards=[A, B])
        two = [{'address': address, **more} for address in (A, B)]
        host = SimulatedHost(*two) if kind == 'cards' else SimulatedHost(
            **{kind: two})
        self.kernel = self.useFixture(host).kernel
        self.driver = driver(self.kernel)

    def in_time(self, function, *args):
        return limited.wait(limited.start(function, *args), 30, 'This')

    def fault(self, **fault):
        self.kernel.set_fault(A, **fault)
        self.addCleanup(self.kernel.set_fault, A, **dict.fromkeys(fault))

    @ddt.data(*DRIVERS)
    @ddt.unpack
    def test_card_that_hangs(self, *described):
        """Its siblings are found and examined all the same."""
        self.start(*described)
        known = self.driver.discover()
        self.assertEqual({A, B}, set(known))
        mark, state = self.driver.fingerprint(), self.driver.state(B)
        self.fault(hang='read')
        self.assertLessEqual({A, B}, set(self.in_time(self.driver.find)))
        self.assertEqual(mark, self.in_time(self.driver.fingerprint))
        self.in_time(self.driver.configure)
        self.assertEqual(known[B], self.in_time(
            self.driver.examine, B, known[B]))
        self.assertEqual(state[1:], self.in_time(self.driver.state, B)[1:])
        self.assertTrue(self.in_time(self.driver.answers, known[B]))
        hangs = limited.start(self.driver.examine, A, known[A])
        self.assertRaises(Exception, limited.wait, hangs, 0.1, 'This')

    @ddt.data(*DRIVERS)
    @ddt.unpack
    def test_card_that_dies(self, *described):
        self.start(*described)
        known, state = self.driver.discover(), self.driver.state(A)
        self.fault(dead=True)
        self.assertIn(A, self.driver.find())
        self.assertNotEqual(state[1:], self.driver.state(A)[1:])
        self.assertFalse(self.driver.answers(known[A]))
        device = self.driver.examine(A, known[A])
        self.assertEqual(model.Health.QUARANTINED, device.health)
        self.assertEqual(known[A].handles, device.handles)

    @ddt.data(*DRIVERS)
    @ddt.unpack
    def test_card_that_vanishes(self, *described):
        self.start(*described)
        known = self.driver.discover()
        self.fault(vanish=True)
        self.assertNotIn(A, self.driver.find())
        self.assertIsNone(self.driver.examine(A, known[A]))
        self.assertFalse(self.driver.answers(known[A]))
        # without an error: it is asked for until the next scan
        self.driver.state(A)

    @ddt.data(*DRIVERS)
    @ddt.unpack
    def test_device_of_another_driver_before(self, *described):
        self.start(*described)
        device = self.driver.examine(A, None)
        before = dataclasses.replace(device, driver='another', handles=(),
                                     regions=())
        self.assertEqual(device, self.driver.examine(A, before))
        self.assertIsNone(self.driver.examine('0000:ff:1f.7', None))
