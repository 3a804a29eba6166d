# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whose bitstream a card carries, and cards with a mailbox."""

import tempfile

from nova_accel import sim
from tests.host import base
from tests.unit.host import A, FUNCTION, SHELL

#: an attacker and a victim
EVE, BOB = 'eve', 'bob'
#: a flavor whose owner chooses the bitstream
FREE = base.asks(runtime_programming='true')


def private(owner, **properties):
    return {'owner': owner, 'visibility': 'private', **properties}


class HandoverTestCase(base.HostTestCase):

    CLASS = 'CUSTOM_ACCELERATOR_GPU'

    def boot(self, address=A):
        return self.host.boot(
            {f'resources1:{self.CLASS}': '1'},
            self.host.allocation(address, self.CLASS))

    def handovers(self):
        return self.host.store.handovers()

    def results(self):
        return [(h.handle, h.method, h.result) for h in self.handovers()]

    def fault(self, **fault):
        self.simulated.kernel.set_fault(A, **fault)

    def resets(self):
        return self.simulated.kernel.resets(A)

    def provider(self, address=A):
        provider, = self.providers(self.host.cloud.read(), address)
        return provider

    def providers(self, state, address):
        """Those that show a device, by its address or the end of a name."""
        shown = self.host.inventory.shown.providers()
        return [p for uuid, p in state['providers'].items()
                if p['inventory'] and (
                    p['name'].endswith(address)
                    or uuid in shown and shown[uuid].pool
                    and address in shown[uuid].addresses)]

    def reserved(self, address=A):
        item = self.provider(address)['inventory'][self.CLASS]
        return item['reserved'], item['total']

    def report(self):
        # what one pass takes away from Placement is forgotten in the next
        for _ in range(3):
            self.host.report()


class MailboxTestCase(base.HostTestCase):
    """A card under XRT."""

    MANAGEMENT, USER = '0000:81:00.0', '0000:81:00.1'
    WHOLE = True

    def setUp(self):
        super().setUp()
        self.config.config(
            whole_cards=[self.MANAGEMENT] * self.WHOLE, group='accel')
        self.start_host(alveos=[{'address': self.MANAGEMENT,
                                 'programming_seconds': 0}], drivers=('xrt',))
        self.image = self.upload(FUNCTION)

    def upload(self, function, **image):
        with tempfile.NamedTemporaryFile() as file:
            sim.make_xclbin(file.name, function, SHELL)
            return self.host.cloud.upload(file.read(), **{
                'accel:function_id': function, **image})

    def boot(self, project):
        return self.host.boot(base.asks(FUNCTION), self.host.allocation(),
                              project=project)

    def region(self):
        return self.host.inventory.devices[self.MANAGEMENT].region(0)

    def guest_loads(self, function):
        with tempfile.NamedTemporaryFile() as file:
            sim.make_xclbin(file.name, function, SHELL)
            self.host.kernel.guest_programs(self.USER, file.name)
