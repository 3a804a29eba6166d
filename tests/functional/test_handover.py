# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova gives a region to the next server while it is cleaned after another."""

import threading

import fixtures

from nova_accel import naming
from tests.functional import base
from tests.functional import operations
from tests.functional import process

CARD = '0000:5e:00.0'


class WarmTest(operations.OperationsTestBase):
    """A region that is programmed again after a server is not passed by."""

    HOSTS = {'compute1': {'cards': [base.card(CARD, [base.NLB0]),
                                    base.card('0000:af:00.0', [base.NLB3])]}}

    def test_next_server_waits(self):
        server = self.boot(self.specs)
        claim, = self.claims()
        region = f'compute1_accel_{claim.device_address}_region0'
        inventory = self.parts('compute1').inventory
        driver = inventory.driver_of(
            inventory.devices[claim.device_address])
        began, goes_on = threading.Event(), threading.Event()
        self.addCleanup(goes_on.set)
        programmed, program = [], driver.program

        def programs(device, *args):
            programmed.append(device.address)
            began.set()
            goes_on.wait(process.PATIENCE)
            return program(device, *args)
        self.useFixture(fixtures.MonkeyPatch(
            f'{type(driver).__module__}.{type(driver).__name__}.program',
            lambda driver, *args: programs(*args)))
        self._delete_server(server)
        self.assertTrue(began.wait(process.PATIENCE))
        # as Nova does after each delete
        self.report()
        self.assertEqual(set(), {
            naming.function_trait(self.function), naming.PROGRAMMABLE,
            naming.CLEANING} - self.traits(region))
        server = self.boot(self.specs, expected_state='BUILD')
        process.until(lambda: self.assertEqual(
            [claim.provider_uuid], self.allocated(server['id'])))
        goes_on.set()
        self._wait_for_state_change(server, 'ACTIVE')
        self.assertEqual([claim.device_address], programmed)
        self.assertHas(server)
        process.until(lambda: self.assertNotIn(
            naming.CLEANING, self.traits(region)))
