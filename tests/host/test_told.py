# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the log of nova-compute tells at INFO: a line for each event."""

import logging
import os
from unittest import mock

import fixtures

from nova_accel import conf
from nova_accel import exception
from tests.host import base
from tests.unit.host import A, B, FUNCTION, vf


class ToldTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger(
            name='nova_accel', level=logging.INFO))
        self.seen = 0

    def told(self):
        """The lines since the last call."""
        lines = self.log.output.splitlines()
        new, self.seen = lines[self.seen:], len(lines)
        # said of the host of an earlier test, which is gone
        return [line for line in new
                if 'does not report which devices' not in line
                or self.directory in line]

    def test_server(self):
        self.start_host({'address': A})
        self.assertEqual(1, sum(f'Device {A} is here: FPGA' in line
                                for line in self.told()))
        self.host.upload(FUNCTION)
        server = self.host.boot(base.asks(FUNCTION), self.host.allocation())
        lines = [line for line in self.told() if A in line]
        self.assertEqual(2, len(lines), lines)
        self.assertIn('carries function', lines[0])
        self.assertEqual(f'Server {server} has {vf(A)} of {A}', lines[1])
        self.host.delete(server)
        self.assertEqual(
            [f'Server {server} releases {vf(A)} of {A}',
             f'{vf(A)} of {A}, which server {server} had, is free'],
            [line for line in self.told() if server in line])

    def test_restart(self):
        self.start_host({'address': A})
        server = self.host.boot(base.ONE, self.host.allocation())
        self.told()
        self.restart()
        lines = self.told()
        self.assertEqual(1, sum(f'Device {A} is here' in line
                                for line in lines), lines)
        self.assertFalse([line for line in lines if server in line])

    def test_idle(self):
        self.start_host({'address': A}, {'address': B})
        self.host.boot(base.ONE, self.host.allocation(A))
        self.told()
        for _ in range(3):
            self.host.inventory.scanner.scan()
            self.host.report()
            self.host.reconcile()
            self.host.run_runtime()
        self.assertEqual([], self.told())

    def test_card_that_fails_and_recovers(self):
        self.start_host({'address': A})
        self.told()
        self.host.kernel.set_fault(A, dead=True)
        for _ in range(2):
            self.host.inventory.scanner.scan()
        fenced, = self.told()
        self.assertIn(f'{A} is not given to servers, because', fenced)
        self.host.kernel.set_fault(A, dead=None)
        for _ in range(2):
            self.host.inventory.scanner.scan()
        self.assertEqual([f'{A} can be given to servers again'], self.told())

    def test_card_that_goes_and_comes_back(self):
        self.start_host({'address': A})
        self.told()
        self.host.kernel.set_fault(A, vanish=True)
        self.host.inventory.scanner.scan()
        self.assertEqual([f'Device {A} is not found any more'], self.told())
        self.host.kernel.set_fault(A, vanish=None)
        self.host.inventory.scanner.scan()
        self.assertEqual(1, sum(f'Device {A} is back' in line
                                for line in self.told()))

    def test_store_that_cannot_be_written(self):
        """Once, and again after it could be written."""
        self.start_host({'address': A})
        self.told()
        for vanish in (True, None):
            self.host.kernel.set_fault(A, vanish=vanish)
            with mock.patch.object(
                    self.host.store, 'set_devices',
                    side_effect=exception.AcceleratorsUnavailable('Full.')):
                for _ in range(2):
                    self.host.inventory.scanner.scan()
            self.assertEqual(
                ['Reports of drivers could not be stored: Full.'],
                [line for line in self.told() if 'Reports of' in line])
            self.host.inventory.scanner.scan()

    def test_misspelled_option(self):
        path = os.path.join(self.directory, 'nova.conf')
        with open(path, 'w') as file:
            file.write('[accel]\nenabled_driver = dfl\n')
        self.addCleanup(conf.CONF, [], default_config_files=[])
        conf.CONF(['--config-file', path])
        self.start_host({'address': A})
        line, = [line for line in self.told() if 'enabled_driver' in line]
        self.assertIn('write enabled_drivers', line)
