# Licensed under the Apache License, Version 2.0. See LICENSE.

import json
import re

from tests.lab import cloud
from tests.lab import machine
from tests.lab.trials import base

NOTHING = [('00000000', '00000000')]
CLEARING = {'accel:clears': 'memory',
            'accel:region_type_id': cloud.INTERFACE}


class Handover(base.Trial):
    """The guest leaves a secret in a register of its function and in the
    memory of the card."""

    def setUp(self):
        super().setUp()
        self.function = self.cloud.bitstream()
        self.flavor = self.cloud.fpga(self.function)

    def boot(self):
        server = self.cloud.boot(self.flavor)
        self.assertGuestHas(server, self.function)
        return server

    def found(self, server):
        """(register, memory) that the guest found, as it printed them."""
        return re.findall(r'^AFU register=([0-9a-f]{8}) memory=([0-9a-f]{8})$',
                          self.cloud.console(server), re.MULTILINE)

    def clearing_image(self):
        self.cloud.bitstream(clears_memory=True, properties=CLEARING)

    def record(self):
        """The newest hand-over."""
        return json.loads(machine.check(
            '/opt/openstack/bin/nova-accel handovers -f json'))[-1]

    def test_1_registers_and_memory(self):
        """The next guest finds neither registers nor memory of the last one.

        The memory without a clearing image of the operator is found.
        """
        self.cloud.delete(self.boot())
        server = self.boot()
        register, memory = self.found(server)[0]
        self.assertEqual('00000000', register)
        self.assertNotEqual('00000000', memory)
        self.cloud.delete(server)
        self.wait_clean()
        self.clearing_image()
        self.cloud.delete(self.boot())
        self.assertEqual(NOTHING, self.found(self.boot()))
        record = self.record()
        print(f'    {record}')
        self.assertIn('cleared with image', str(record))

    def test_2_clearing_that_fails(self):
        """A card that cannot be cleared is offered to no server until it is.

        The reason is in the log, and it is tried again.
        """
        self.clearing_image()
        server = self.boot()
        machine.card(pr_error='crc')
        self.cloud.delete(server)
        self.cloud.wait('a fence', lambda: 'CUSTOM_ACCELERATOR_FENCED' in
                        self.cloud.providers()[base.REGION]['traits'])
        self.assertIn('not given to another server', self.compute.log(200))
        _server, fault = self.cloud.refused(self.flavor, host=None)
        self.assertIn('No valid host', fault)
        machine.card()
        self.wait_clean()
        self.cloud.wait('an offer', lambda: 'CUSTOM_ACCELERATOR_FENCED' not in
                        self.cloud.providers()[base.REGION]['traits'])
        self.assertEqual(NOTHING, self.found(self.boot()))

    def test_3_killed_while_it_clears(self):
        """nova-compute is killed while the region is cleared: it goes on when
        it starts."""
        self.clearing_image()
        server = self.boot()
        machine.card(pr_seconds=6)
        before = self.programmings_begun()
        self.cloud.delete(server)
        self.cloud.wait('programming',
                        lambda: self.programmings_begun() > before)
        self.compute.kill()
        machine.card()
        self.compute.start()
        self.wait_clean()
        self.assertEqual(NOTHING, self.found(self.boot()))
