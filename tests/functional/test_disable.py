# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The operator disables a device, and Placement shows it at once."""

from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store
from tests.functional import base
from tests.functional import process

DEVICE, VF = '0000:5e:00.0', '0000:5e:00.1'
REGION = f'compute1_accel_{DEVICE}_region0'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'


class DisableTest(base.AcceleratorTestBase):

    HOSTS = {'compute1': {'cards': [base.card(DEVICE)]}}
    FLAVOR = base.fpga_flavor(function_id=base.NLB0)

    def shown(self):
        inventory, traits, _ = self.provider_tree()[REGION]
        return inventory[FPGA], naming.FENCED in traits

    def command(self):
        """As nova-accel opens the store."""
        return claim_store.existing(self.parts('compute1').store.path)

    def disable(self):
        self.command().disable(model.Disabled(DEVICE, '', 'hot', 'now'))

    def enable(self):
        known = self.command()
        known.enable(known.disabled())

    def until_shown(self, *expected):
        """Without a report of Nova."""
        process.until(lambda: self.assertEqual(expected, self.shown()))

    def test_while_nova_compute_runs(self):
        server = self.boot(self.FLAVOR)
        self.disable()
        self.until_shown((1, 1), True)
        self.assertEqual([VF], self.hostdevs(server))
        self._delete_server(server)
        self.assertEqual(((1, 1), True), self.shown())
        for _ in range(2):
            self.report()
            self.assertEqual(((1, 1), True), self.shown())
        failed = self.boot(self.FLAVOR, expected_state='ERROR')
        self.assertIn('No valid host', self.fault(failed))
        self._delete_server(failed)
        self.restart_compute_service('compute1')
        self.assertEqual(((1, 1), True), self.shown())
        self.enable()
        self.until_shown((1, 0), False)
        self.report()
        server = self.boot(self.FLAVOR)
        self.assertEqual([VF], self.hostdevs(server))
        self._delete_server(server)
