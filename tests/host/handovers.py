# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whose bitstream a card carries, and cards with a mailbox."""

import tempfile

from nova_accel import sim
from tests.host import base
from tests.unit.host import FUNCTION, SHELL

#: an attacker and a victim
EVE, BOB = 'eve', 'bob'
#: a flavor whose owner chooses the bitstream
FREE = base.asks(runtime_programming='true')


def private(owner, **properties):
    return {'owner': owner, 'visibility': 'private', **properties}


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
