# Licensed under the Apache License, Version 2.0. See LICENSE.

import time

from tests.lab import cloud
from tests.lab import machine
from tests.lab.trials import base

OTHER = '69528db6-eb31-577a-8c36-68f9faa081f6'


class Refusals(base.Trial):

    def assertRefused(self, function, *words):
        """The fault has the words, and nobody has anything."""
        server, fault = self.cloud.refused(self.cloud.fpga(function))
        for word in words:
            self.assertIn(word, fault)
        self.assertTrue(fault.endswith('.'), fault)
        self.assertEqual({}, self.cloud.allocations(server))
        self.assertEqual({}, self.cloud.in_use())
        self.assertNotIn(function, self.cloud.functions(base.REGION))
        print(f'    {fault}')

    def assertUsable(self):
        """The next server gets what it asks for."""
        function = self.cloud.bitstream()
        self.assertGuestHas(
            self.cloud.boot(self.cloud.fpga(function)), function)

    def test_1_bitstream_for_another_card(self):
        """A bitstream for another card, and one cut short, are refused.

        The card is not touched.
        """
        before = self.programmings()
        self.assertRefused(self.cloud.bitstream(interface=OTHER), OTHER,
                           cloud.INTERFACE)
        self.assertRefused(self.cloud.bitstream(cut=100), 'bitstream')
        self.assertEqual(before, self.programmings())

    def test_2_card_refuses(self):
        """The card refuses a bitstream; it is recovered and usable."""
        before = len(self.programmings())
        self.assertRefused(self.cloud.bitstream(payload_interface=OTHER),
                           'EIO', 'incompatible')
        self.assertEqual(['PR of port 0, 4096 bytes: incompatible'],
                         self.programmings()[before:])
        self.assertUsable()

    def test_3_card_fails_once(self):
        """The card fails with a CRC error; it is recovered and usable."""
        machine.card(pr_error='crc', pr_error_count=1)
        self.assertRefused(self.cloud.bitstream(), 'EIO', 'CRC')
        self.assertUsable()

    def test_4_slow_card(self):
        """A card that takes 6 s is waited for; one that never ends, is not."""
        machine.card(pr_seconds=6)
        function = self.cloud.bitstream()
        began = time.monotonic()
        server = self.cloud.boot(self.cloud.fpga(function))
        self.assertGreater(time.monotonic() - began, 6)
        self.assertGuestHas(server, function)
        self.cloud.delete(server)
        self.wait_clean()
        machine.card(pr_error='timeout', pr_error_count=1)
        self.assertRefused(self.cloud.bitstream(), 'ETIMEDOUT')
        self.assertUsable()
