# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A simulated host in a temporary directory, for tests."""

import json
import os
import uuid

import fixtures
import yaml

from nova_accel import sim
from nova_accel.sim import dfl
from nova_accel.sim import xrt
from tests import simulated

A = '0000:5e:00.0'
B = '0000:81:00.0'
FUNCTION = '11111111-2222-4333-8444-555555555555'
OTHER = 'aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee'
INTERFACE = dfl.DEFAULT_INTERFACE
FIRST = dfl.DEFAULT_FUNCTION
#: of a card under XRT, exported by its shell
SHELL = xrt.DEFAULT_INTERFACES[-1]


def plain(text):
    return text.replace('-', '')


def vf(address, number=0):
    """The address of a VF of a simulated card."""
    return f'{address[:-1]}{number + 1}'


def pf(address):
    """The address of the card that has a VF."""
    return f'{address[:-1]}0'


def with_vfs(card):
    """A DFL card that has a VF for each port."""
    return {'vfs': card.get('ports', 1), **card}


class SimulatedHost(fixtures.Fixture):
    """card is what the description has of one; programming takes no time.

    Other kinds are lists by their key in the description.
    """

    def __init__(self, *cards, iommu=True, **kinds):
        self.cards = [{'programming_seconds': 0, 'timeout_seconds': 0, **card}
                      for card in cards]
        self.top = {'iommu': iommu, 'cards': self.cards, **kinds}

    def _setUp(self):
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.path = os.path.join(self.directory, 'host.yaml')
        self.describe()
        self.kernel = simulated.Kernel(self.path)

    def describe(self, **kinds):
        """Change what the description has, as with another kernel."""
        self.top.update(kinds)
        with open(self.path, 'w') as file:
            yaml.safe_dump(self.top, file)

    def renumber(self, moved, **added):
        """The host boots, and the firmware numbers the buses otherwise. All
        cards stay at their ports.

        :param moved: address of a card before -> now; others go.
        :param added: new cards, lists by their key in the description.
        """
        state = f'{self.path}.state'
        with open(state) as file:
            before = json.load(file)
        before['cards'] = {now: before['cards'][was]
                           for was, now in moved.items()}
        with open(state, 'w') as file:
            json.dump(before, file)
        for kind, cards in self.top.items():
            if isinstance(cards, list):
                self.top[kind] = [
                    {**card, 'address': moved[card['address']]}
                    for card in cards if card['address'] in moved]
        for kind, cards in added.items():
            self.top.setdefault(kind, []).extend(cards)
        self.describe()
        self.kernel.reboot()

    def xclbin(self, function=FUNCTION, interface=SHELL, **more):
        path = os.path.join(self.directory, f'{uuid.uuid4()}.xclbin')
        sim.make_xclbin(path, function, interface, **more)
        return path

    def gbs(self, function=FUNCTION, interface=INTERFACE, **more):
        path = os.path.join(self.directory, f'{uuid.uuid4()}.gbs')
        sim.make_gbs(path, function, interface, **more)
        return path
