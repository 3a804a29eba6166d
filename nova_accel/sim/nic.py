# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Network cards of the host, which an operator's rule may match by mistake.

Source of interface flags: include/uapi/linux/if.h of Linux.
"""

import dataclasses
from typing import ClassVar

from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs


@dataclasses.dataclass(frozen=True)
class NicCard(card.Card):
    """A network card with one port."""

    ids: tuple[str, str, str, str] = ('8086', '1572', '8086', '0000')
    class_code: str = '0x020000'
    driver: str | None = 'i40e'
    vf_driver: str | None = 'iavf'
    #: whether its interface is up
    up: bool = True

    KEYS: ClassVar[dict] = {'up': reader.boolean}

    def add_physical(self, tree, mine, function):
        self._add(tree, mine, function, self.address, self.driver, self.up)

    def add_virtual(self, tree, mine, n, function):
        self._add(tree, mine['vfs'][n], function, self.vf_address(n),
                  self.vf_driver, False)

    def _add(self, tree, mine, function, address, driver, up):
        if mine['driver'] != driver:
            return
        name = f'eth{mine["number"]}'
        function['net'] = {name: {
            # broadcast and multicast, running, and up
            'flags': '0x1043' if up else '0x1002',
            'operstate': 'up' if up else 'down'}}
        tree['class'].setdefault('net', {})[name] = sysfs.Link(
            f'{self.place(address)}/net/{name}')
