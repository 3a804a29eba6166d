# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A fence goes together with its mark: when it is not needed any more,
nothing of it is left, and what the operator has reserved stays reserved."""

from nova_accel import naming
from tests.functional import base
from tests.functional import cloud

DEVICE, VF = '0000:5e:00.0', '0000:5e:00.1'
REGION = f'compute1_accel_{DEVICE}_region0'
FPGA = 'CUSTOM_ACCELERATOR_FPGA'


class FenceTest(base.AcceleratorTestBase):
    """The card vanishes while a server has it, and comes back."""

    HOSTS = {'compute1': {'cards': [base.card(DEVICE)]}}
    FLAVOR = base.fpga_flavor(function_id=base.NLB0)

    def setUp(self):
        super().setUp()
        # each report sees what others did to Placement since the last
        self.flags(resource_provider_association_refresh=1, group='compute')

    def shown(self):
        """(total, reserved), and whether it is marked as fenced."""
        inventory, traits, _ = self.provider_tree()[REGION]
        return inventory[FPGA], naming.FENCED in traits

    def report_afresh(self):
        self.computes['compute1'].driver.virtapi.reportclient \
            .clear_provider_cache()
        self.report()

    def vanishes(self, vanish):
        self.kernel('compute1').set_fault(DEVICE, vanish=vanish)
        self.parts('compute1').inventory.scanner.scan()

    def fenced_server(self):
        server = self.boot(self.FLAVOR)
        self.vanishes(True)
        self.report_afresh()
        self.assertEqual(((1, 1), True), self.shown())
        return server

    def assertUsable(self):
        for _ in range(2):
            self.report_afresh()
            self.assertEqual(((1, 0), False), self.shown())
        self.assertEqual([VF], self.hostdevs(self.boot(self.FLAVOR)))

    def test_deleted_after_it_came_back(self):
        """No report in between: what the deletion shows is the first."""
        server = self.fenced_server()
        self.vanishes(None)
        self._delete_server(server)
        self.assertUsable()


class OldCopyTest(base.AcceleratorTestBase):
    """Nova's copy of a provider is not read again here, as it is within five
    minutes by default."""

    HOSTS = {'compute1': {'cards': [base.card(DEVICE)]}}
    FLAVOR = base.fpga_flavor(function_id=base.NLB0)

    def inventory(self):
        return self.provider_tree()[REGION][0]

    @cloud.fresh
    def test_class_of_provider_yaml(self):
        """Nova adds it to what our driver reports, and refuses to find it
        there."""
        self.computes['compute1'].manager.rt.provider_configs = {REGION: {
            '__source_file': 'provider.yaml', 'inventories': {'additional': [{
                'CUSTOM_LICENSES': {
                    'total': 5, 'reserved': 0, 'min_unit': 1, 'max_unit': 5,
                    'step_size': 1, 'allocation_ratio': 1.0}}]}}}
        for _ in range(2):
            self.report()
        expected = {FPGA: (1, 0), 'CUSTOM_LICENSES': (5, 0)}
        self.assertLessEqual(expected.items(), self.inventory().items())
        server = self.boot(self.FLAVOR)
        self.assertLessEqual(expected.items(), self.inventory().items())
        self.report()
        self._delete_server(server)
        self.report()
        self.assertLessEqual(expected.items(), self.inventory().items())
