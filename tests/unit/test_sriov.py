# Licensed under the Apache License, Version 2.0. See LICENSE.
"""VFs that nova.conf asks for."""

import ddt

from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import pci
from tests.unit import configured
from tests.unit.host import A, B, SimulatedHost


@ddt.ddt
class VirtualFunctions(configured.TestCase):

    def start(self, *wanted, **card):
        self.config.config(group='accel', virtual_functions=list(wanted))
        host = self.useFixture(SimulatedHost(others=[{
            'address': A, 'driver': 'nvme', 'total_vfs': 4, **card}]))
        self.kernel = host.kernel

    def vfs(self):
        return pci.virtual_functions(self.kernel, A)

    def refused(self, error, said):
        before = self.vfs()
        found = self.assertRaises(error, sriov.make, self.kernel, A)
        self.assertIn(said, str(found))
        self.assertLessEqual(len(str(found)), 255)
        self.assertEqual(before, self.vfs())

    @ddt.data('', A, f'{A}=', f'{A}=x', f'{A}=-1', f'{A}=1.5', f'{A}=²',
              f'{A}=123456', '=4', '5e:00.0=4', f'{A}=2=2', f'{A}:4')
    def test_items_that_mean_nothing(self, item):
        self.start(item)
        self.refused(exception.ConfigurationError, f'has {item!r}')

    def test_function_that_is_there_twice(self):
        self.start(f'{A}=2', '00000000:5E:00.0=3')
        self.refused(exception.ConfigurationError, 'twice')

    @ddt.data(f'{A}=2', '00000000:5E:00.0 = 2')
    def test_made(self, item):
        self.start(item, f'{B}=1')
        self.assertEqual(2, sriov.missing(self.kernel, A))
        sriov.make(self.kernel, A)
        self.assertEqual([f'{A[:-1]}1', f'{A[:-1]}2'], self.vfs())
        self.assertEqual(0, sriov.missing(self.kernel, A))

    def test_made_again_after_a_reboot(self):
        self.start(f'{A}=2')
        sriov.make(self.kernel, A)
        self.kernel.reboot()
        self.assertEqual([], self.vfs())
        sriov.make(self.kernel, A)
        self.assertEqual(2, len(self.vfs()))

    def test_those_of_a_guest_are_left_alone(self):
        self.start(f'{A}=2')
        sriov.make(self.kernel, A)
        self.kernel.guest_takes(self.vfs()[0])
        sriov.make(self.kernel, A)
        self.assertEqual('vfio-pci', pci.driver(self.kernel, self.vfs()[0]))

    @ddt.data('0', '00')
    def test_none_are_wanted(self, count):
        self.start(f'{A}={count}', vfs=1)
        sriov.make(self.kernel, A)
        self.assertEqual(1, len(self.vfs()))

    def test_another_number_is_there(self):
        self.start(f'{A}=3', vfs=2)
        self.refused(exception.DeviceError, 'and it has 2')

    def test_more_than_there_can_be(self):
        self.start(f'{A}=5')
        self.refused(exception.ConfigurationError, 'it can have 4')

    def test_function_without_sriov(self):
        self.start(f'{A}=1', total_vfs=0)
        self.refused(exception.DeviceError, 'does not report how many')

    def test_attribute_that_makes_no_sense(self):
        self.start(f'{A}=1', faults={'attributes': {'sriov_numvfs': 'many'}})
        self.refused(exception.DeviceError, 'does not report how many')

    def test_kernel_that_refuses(self):
        # without a driver that supports it
        self.start(f'{A}=1', driver=None)
        self.refused(exception.DeviceError, 'the kernel refused')
