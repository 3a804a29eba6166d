# Licensed under the Apache License, Version 2.0. See LICENSE.

from tests.lab.trials import base


class Boot(base.Trial):

    def test_1_function_reaches_the_guest(self):
        """A device profile's function is programmed, and the guest reads it.

        The region is programmed again after the server, so that the next boot
        finds it warm; then another function.
        """
        first, second = self.cloud.bitstream(), self.cloud.bitstream()
        flavor = self.cloud.fpga(first)
        before = len(self.programmings())
        server = self.cloud.boot(flavor)
        self.assertGuestHas(server, first)
        self.assertEqual(['PR of port 0, 4096 bytes: ok'],
                         self.programmings()[before:])
        self.assertEqual({base.REGION: {'CUSTOM_ACCELERATOR_FPGA': 1}},
                         self.cloud.allocations(server))
        self.assertRegionHas(first)
        self.assertNotIn('CUSTOM_PROGRAMMABLE', self.cloud.providers()[
            base.REGION]['traits'])
        self.cloud.delete(server)
        self.assertNothingInUse()

        server = self.cloud.boot(flavor)
        self.assertGuestHas(server, first)
        self.assertEqual(2, len(self.programmings()) - before)
        self.cloud.delete(server)

        server = self.cloud.boot(self.cloud.fpga(second))
        self.assertGuestHas(server, second)
        self.assertEqual(4, len(self.programmings()) - before)
        self.assertRegionHas(second)

    def test_2_second_server_waits_for_none(self):
        """While a server has the card, a second one finds no host."""
        function = self.cloud.bitstream()
        flavor = self.cloud.fpga(function)
        server = self.cloud.boot(flavor)
        other, fault = self.cloud.refused(flavor, host=None)
        self.assertIn('No valid host', fault)
        self.assertEqual({}, self.cloud.allocations(other))
        self.assertGuestHas(server, function)
