# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A host with cards, whose health tests change."""

from collections.abc import Mapping
from typing import Any

from nova_accel.sim import tree
from tests.host import base

ONE, TWO, THREE, FOUR = (f'0000:{n:02x}:00.0' for n in (2, 3, 4, 5))
CARD = 'CUSTOM_ACCELERATOR_CARD'
HALF = {'current_link_width': '4'}
WORN = {'current_link_width': '8'}
FATAL = {'aer_dev_fatal': tree.errors('aer_dev_fatal', MalfTLP=1)}
OF_LINK = {'aer_dev_fatal': tree.errors('aer_dev_fatal', DLP=1)}


class HealthTestCase(base.HostTestCase):

    MODE = 'act'

    #: of the cards that start() makes
    ALSO: Mapping[str, Any] = {}

    def start(self, *addresses, **more):
        """Start nova-compute with a card at each address, below a port of its
        own."""
        self.start_with([
            {'address': address, 'bridges': ['pci0000:00', f'0000:00:{n}.0'],
             **self.ALSO} for n, address in enumerate(addresses, 10)], **more)

    def start_with(self, cards, **more):
        self.config.config(
            group='accel', health=[self.MODE], discovery_interval=3600,
            pci_devices=['vendor=8086 type=CARD'], **more)
        self.start_host(drivers=('pci',), others=cards)
        self.look()

    @property
    def driver(self):
        return self.host.inventory.driver_of(self.host.inventory.devices[ONE])

    def look(self, **attributes):
        """A look each interval, after attributes of a card have become so."""
        for address, found in attributes.items():
            self.host.kernel.set_fault(address, attributes=found)
        self.host.inventory.looks.run()

    def turn(self, address=ONE, **attributes):
        self.look(**{address: attributes})

    def states(self):
        return {address: condition.state.value for address, condition
                in self.host.inventory.health.conditions().items()}

    def shown(self, address=ONE, name=CARD):
        """Traits and (reserved, total) of its provider in Placement."""
        self.host.report()
        uuid, = self.host.allocation(address, name)
        provider = self.host.cloud.read()['providers'][uuid]
        item = provider['inventory'][name]
        return provider['traits'], (item['reserved'], item['total'])

    def boot(self, amount=1, address=ONE, **more):
        return self.host.boot(
            {f'resources1:{CARD}': str(amount), **more},
            self.host.allocation(address, CARD, amount))
