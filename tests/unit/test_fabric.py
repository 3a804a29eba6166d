# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The operator's command for partitions of NVSwitches."""

import os
import threading

import ddt
import fixtures
from oslo_config import fixture as config_fixture
import testtools

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import gpu
from nova_accel import exception
from tests.unit.host import A, B, SimulatedHost

SWITCH = {'address': '0000:07:00.0', 'driver': None, 'vendor': '10de',
          'class': '0x068000'}


@ddt.ddt
class FabricTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.config = self.useFixture(config_fixture.Config(conf.CONF))
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
        error = str(self.assertRaises(
            exception.DeviceError, getattr(self, method)))
        self.assertIn('it ended with 3', error)
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
        error = self.assertRaises(exception.DeviceError, self.prepare)
        self.assertIn('does not end in 1 s', str(error))

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
