# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A card is gone while a consumer without a claim has a part of it."""

from tests.host import base
from tests.unit.host import A


class GoneTest(base.HostTestCase):

    POOLS = 'none'

    def names(self):
        self.host.report()
        return sorted(provider['name'] for provider
                      in self.host.cloud.read()['providers'].values())

    def test_provider_is_not_made_again(self):
        """As of an allocation that a migration has left."""
        self.start_host({'address': A, 'ports': 2})
        uuid_, = [uuid_ for uuid_, provider
                  in self.host.inventory.shown.providers().items()
                  if provider.region_index == 0]
        self.host.cloud.allocate(
            'left', {uuid_: {'resources': {base.FPGA: 1}}})
        self.host.kernel.set_fault(A, vanish=True)
        self.host.inventory.scanner.scan()
        self.names()
        self.assertEqual(self.names(), self.names())

    def test_look_that_began_earlier(self):
        """It says nothing: a later one has found the card."""
        self.start_host({'address': A})
        table = self.host.inventory.table
        ticket = table.reports.ticket()
        self.host.inventory.scanner.scan()
        table.adoption.gone(A, 'dfl', ticket)
        self.assertEqual(set(), table.kinds(A))
