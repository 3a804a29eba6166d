# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Partitions of NVSwitches are activated, and deactivated again."""

import os
import threading

import ddt
import fixtures

from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel.drivers import gpu
from nova_accel import exception
from tests.unit import configured
from tests.unit.host import A, B, SimulatedHost
from tests.unit.nvfm_library import NvfmLibrary

SWITCH = {'address': '0000:07:00.0', 'driver': None, 'vendor': '10de',
          'class': '0x068000'}


class FabricTestCase(configured.TestCase):

    def setUp(self):
        super().setUp()
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.log = os.path.join(self.directory, 'log')
        self.config.config(
            group='accel', include_devices=['vendor=10de'],
            device_sets=[f'{B} {A}'], fabric_command=self.command())
        self.start()

    def start(self, others=(SWITCH,)):
        self.kernel = self.useFixture(SimulatedHost(
            gpus=[{'address': address, 'device': '2330'}
                  for address in (A, B)], others=list(others))).kernel
        self.driver = gpu.GpuDriver(self.kernel)
        self.devices = self.driver.discover()

    def command(self, then='exit 0'):
        path = os.path.join(self.directory, 'fabric')
        with open(path, 'w') as file:
            file.write(f'#!/bin/sh\necho "$@" >> {self.log}\n{then}\n')
        os.chmod(path, 0o700)
        return path

    def prepare(self, address=A, fresh=True):
        device = self.devices[address]
        self.driver.prepare(device, device.handles[0], None, fresh,
                            base.Use())

    def release(self, address=A):
        device = self.devices[address]
        return self.driver.release(device, device.handles[0], None,
                                   base.Use())

    def said(self):
        if not os.path.exists(self.log):
            return []
        with open(self.log) as file:
            lines = file.read().splitlines()
        os.unlink(self.log)
        return lines


@ddt.ddt
class CommandTest(FabricTestCase):
    """The operator's command does it."""

    def test_around_a_guest(self):
        self.prepare()
        self.assertEqual([f'activate {A} {B}'], self.said())
        # and again where the host has booted
        self.prepare(fresh=False)
        self.assertEqual([f'activate {A} {B}'], self.said())
        self.assertEqual('reset flr', self.release())
        self.assertEqual([f'deactivate {A} {B}'], self.said())

    def test_devices_that_are_only_not_reset(self):
        self.config.config(handover=['none'], group='accel')
        self.release()
        self.assertEqual([f'deactivate {A} {B}'], self.said())

    @ddt.data('prepare', 'release')
    def test_fails(self, method):
        self.command('echo the switch is broken >&2; exit 3')
        log = self.useFixture(fixtures.FakeLogger())
        error = str(self.assertRaises(
            exception.DeviceError, getattr(self, method)))
        self.assertIn('ended with 3 (the switch is broken)', log.output)
        self.assertNotIn('broken', error)
        self.assertLessEqual(len(error), 255)
        # nothing is given on that the guest may still reach
        self.assertEqual([], self.kernel.resets(A))

    @ddt.data('/nowhere/fabric', '/dev/null')
    def test_cannot_be_run(self, command):
        self.config.config(fabric_command=command, group='accel')
        self.assertRaises(exception.DeviceError, self.prepare)

    def test_does_not_end(self):
        self.config.config(device_timeout=1, group='accel')
        self.command('exec sleep 60')
        log = self.useFixture(fixtures.FakeLogger())
        self.assertRaises(exception.DeviceError, self.prepare)
        self.assertIn('does not end in 1 s', log.output)

    def test_one_at_a_time(self):
        self.command('sleep 0.1; echo done >> ' + self.log)
        threads = [threading.Thread(target=self.prepare, args=(address,))
                   for address in (A, B)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([f'activate {A} {B}', 'done'] * 2, self.said())

    def test_nothing_to_do(self):
        self.config.config(fabric_command='static', group='accel')
        self.prepare()
        self.config.config(fabric_command=self.command(), device_sets=[],
                           include_devices=[f'address={A}'], group='accel')
        self.prepare()
        self.config.config(device_sets=[f'{B} {A}'], group='accel')
        self.start(others=())
        self.prepare()
        self.assertEqual([], self.said())


@ddt.ddt
class LibraryTest(FabricTestCase):
    """Fabric Manager is asked, here a library with two partitions."""

    def setUp(self):
        super().setUp()
        self.manager = self.useFixture(NvfmLibrary())
        self.ask()

    def ask(self, modules=(f'{A}=4', f'{B}=2'), address=':192.0.2.1:6666'):
        self.config.config(fabric_command=f'libnvfm{address}',
                           gpu_modules=modules, group='accel')
        self.devices = self.driver.discover()

    def test_around_a_guest(self):
        self.prepare()
        self.assertEqual([], self.manager.active(5))
        self.prepare(B)
        self.prepare(fresh=False)
        self.assertEqual([], self.manager.active(5))
        self.assertEqual('reset flr', self.release())
        self.assertIsNone(self.manager.active(5))
        self.release(B)

    def test_no_answer(self):
        self.prepare()
        self.ask(address='')
        log = self.useFixture(fixtures.FakeLogger())
        for method in (self.prepare, self.release):
            self.assertRaises(exception.DeviceError, method)
        self.assertIn('fmConnect(127.0.0.1:6666) answered '
                      'FM_ST_CONNECTION_NOT_VALID', log.output)
        # nothing is given on that the guest may still reach
        self.assertEqual([], self.kernel.resets(A))

    def test_other_modules(self):
        self.ask([f'{A}=4', f'{B}=1'])
        log = self.useFixture(fixtures.FakeLogger())
        self.assertRaises(exception.DeviceError, self.prepare)
        self.assertIn('no partitions of exactly the modules 1 4', log.output)

    def test_module_that_is_not_known(self):
        self.ask([f'{A}=4'])
        self.assertEqual('', self.devices[A].reason)
        self.assertIn('[accel] gpu_modules does not say which module',
                      self.devices[B].reason)
        self.assertRaises(exception.DeviceError, self.prepare)
        self.assertIsNone(self.manager.active(5))

    @ddt.data([f'{A}=4', f'{B}=4'], [A], [f'{A}=x'], [f'{A}=1', f'{A}=2'])
    def test_option_that_cannot_be_read(self, modules):
        self.config.config(gpu_modules=modules, group='accel')
        error = self.assertRaises(
            exception.ConfigurationError, fabric.modules)
        self.assertIn('[accel] gpu_modules', str(error))

    def test_check(self):
        def check(address):
            return list(self.driver.check(self.devices[address]))

        self.assertEqual([[], []], [check(A), check(B)])
        self.assertIsNone(self.manager.active(5))
        self.ask([f'{A}=4', f'{B}=1'])
        found, = check(A)
        self.assertIn('exactly the modules 1 4', found.found)
        # once for the set
        self.assertEqual([], check(B))
