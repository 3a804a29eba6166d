# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Who uses many providers: as Placement itself says, in few requests."""

import random
import uuid

import requests
import testtools

from nova_accel.virt import consumers
from tests.unit import placement

GPU = 'CUSTOM_ACCELERATOR_GPU'
MEMORY = 'CUSTOM_MEMORY'


class ConsumersTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.services = self.useFixture(placement.Services())
        self.root = self.services.provider('compute1')
        #: providers of which Nova's copy is older
        self.old = set()
        #: called when it was read what is allocated from a provider
        self.meanwhile = lambda provider: None
        self.consumers = consumers.Consumers(
            self.listed, self.allocations, self.copy_of)

    def request(self, method, path, version='1.36', **more):
        answer = requests.request(
            method, f'{self.services.url}{path}', headers={
                'X-Auth-Token': 'admin',
                'OpenStack-API-Version': f'placement {version}'}, **more)
        answer.raise_for_status()
        return answer

    def get(self, path, version='1.36'):
        self.asked.append(path)
        return self.request('GET', path, version).json()

    def listed(self, path, version):
        return {provider['uuid']: provider['generation'] for provider
                in self.get(path, version)['resource_providers']}

    def allocations(self, uuid_):
        found = self.get(f'/resource_providers/{uuid_}/allocations')
        self.meanwhile(uuid_)
        return found['allocations']

    def copy_of(self, uuid_):
        found = self.request(
            'GET', f'/resource_providers/{uuid_}/inventories').json()
        return (found['resource_provider_generation'] - (uuid_ in self.old),
                found['inventories'])

    def providers(self, count, **inventory):
        return [self.services.provider(str(uuid.uuid4()), self.root,
                                       {GPU: 1, **inventory})
                for _ in range(count)]

    def allocate(self, provider, amount=1, **more):
        server = str(uuid.uuid4())
        self.services.allocate(server, provider, **{GPU: amount, **more})
        return server

    def release(self, server):
        self.request('DELETE', f'/allocations/{server}')

    def look(self, providers):
        """:returns: how many requests that took."""
        self.asked = []
        found = self.consumers.of(providers)
        asked = len(self.asked)
        self.assertEqual({one: {
            consumer: has['resources'] for consumer, has in self.get(
                f'/resource_providers/{one}/allocations',
            )['allocations'].items()} for one in providers}, found)
        return asked

    def test_nothing_changed(self):
        providers = self.providers(5, **{MEMORY: 100})
        for provider in providers:
            self.allocate(provider, **{MEMORY: 1})
        # each, the generations, and where there is room
        self.assertEqual(7, self.look(providers))
        # the generations, and where there is room
        self.assertEqual(2, self.look(providers))
        # also after a call about a part of them
        self.assertEqual(2, self.look(providers[1:]))
        self.assertEqual(2, self.look(providers))

    def test_few_are_asked_each(self):
        providers = self.providers(3)
        self.assertEqual([3, 3], [self.look(providers) for _ in range(2)])

    def test_without_novas_copy(self):
        """Nothing says in which tree they are: each is asked."""
        providers = self.providers(5)
        self.consumers = consumers.Consumers(
            self.listed, self.allocations, lambda uuid: None)
        self.assertEqual([5, 5], [self.look(providers) for _ in range(2)])

    def test_provider_that_novas_copy_lacks(self):
        """It is asked each time, beside others of which the copy says more."""
        providers = self.providers(5)
        for provider in providers:
            self.allocate(provider)
        self.consumers = consumers.Consumers(
            self.listed, self.allocations, lambda uuid:
            None if uuid == providers[2] else self.copy_of(uuid))
        self.assertEqual([7, 3], [self.look(providers) for _ in range(2)])

    def test_allocation_that_is_deleted(self):
        """Of which the generation tells nothing."""
        providers = self.providers(5)
        servers = list(map(self.allocate, providers))
        self.look(providers)
        before = self.copy_of(providers[3])
        self.release(servers[3])
        self.assertEqual(before, self.copy_of(providers[3]))
        self.assertEqual(3, self.look(providers))
        self.assertEqual(2, self.look(providers))

    def test_nothing_is_allocated(self):
        """Nor can it be from the provider of a card with regions."""
        providers = [*self.providers(3), *self.providers(3, **{MEMORY: 100}),
                     self.root]
        self.assertEqual(3, self.look(providers))
        self.allocate(providers[0])
        self.allocate(providers[3], **{MEMORY: 1})
        self.assertEqual(3 + 2, self.look(providers))
        self.old = set(providers)
        self.assertEqual(3 + 5, self.look(providers))

    def test_another_consumer(self):
        providers = self.providers(5)
        servers = list(map(self.allocate, providers))
        self.look(providers)
        self.release(servers[3])
        self.allocate(providers[3])
        self.assertEqual(3, self.look(providers))
        self.assertEqual(2, self.look(providers))

    def test_change_while_it_is_read(self):
        providers = self.providers(5)
        servers = dict(zip(providers, map(self.allocate, providers)))

        def meanwhile(provider):
            self.release(servers.pop(provider))
            self.allocate(provider)
        self.meanwhile = meanwhile
        self.asked = []
        self.consumers.of(providers)
        self.meanwhile = lambda provider: None
        self.look(providers)

    def test_old_copy(self):
        """As after each allocation, for five minutes."""
        providers = self.providers(5)
        for provider in providers:
            self.allocate(provider)
        self.old.add(providers[0])
        self.look(providers)
        self.assertEqual(3, self.look(providers))
        self.old.clear()
        self.look(providers)
        self.assertEqual(2, self.look(providers))

    def test_copy_is_read_again_meanwhile(self):
        """Its generation is new, and what was asked for is of the old one."""
        grown, *others = self.providers(5)
        self.allocate(grown)
        generation, inventory = self.copy_of(grown)
        inventory[GPU].update(total=2, max_unit=2)
        self.request('PUT', f'/resource_providers/{grown}/inventories', json={
            'resource_provider_generation': generation,
            'inventories': inventory})
        self.asked = []
        self.consumers = consumers.Consumers(
            self.listed, self.allocations, lambda uuid: self.copy_of(uuid)
            if uuid != grown or self.asked else (
                generation, {GPU: {'total': 1}}))
        self.look([grown, *others])

    def test_what_shows_no_room(self):
        """Of all that is reserved, what cannot be given one by one, and what
        has one class that a server may leave to others."""
        reserved, = self.providers(1, **{GPU: 1})
        a_set, = self.providers(1, **{GPU: 2})
        partly, = self.providers(1, **{GPU: 3, MEMORY: 1})
        servers = [self.allocate(reserved), self.allocate(a_set, 2),
                   self.allocate(partly),
                   self.allocate(partly, **{MEMORY: 1})]
        for provider, changes in ((reserved, {'reserved': 1}),
                                  (a_set, {'min_unit': 2, 'step_size': 2})):
            generation, inventory = self.copy_of(provider)
            inventory[GPU].update(changes)
            self.request(
                'PUT', f'/resource_providers/{provider}/inventories', json={
                    'resource_provider_generation': generation,
                    'inventories': inventory})
        for server in servers:
            self.look([reserved, a_set, partly, self.root])
            self.release(server)
        self.look([reserved, a_set, partly, self.root])

    def test_provider_that_is_gone(self):
        providers = self.providers(5)
        servers = list(map(self.allocate, providers))
        self.look(providers)
        self.release(servers[0])
        self.request('DELETE', f'/resource_providers/{providers[0]}')
        del providers[0]
        self.assertEqual(2, self.look(providers))

    def test_at_random(self):
        chance = random.Random(7)
        providers = self.providers(3) + self.providers(3, **{GPU: 2})
        room = [*providers, *providers[3:]]
        servers = {}
        for _ in range(20):
            for _ in range(chance.randrange(3)):
                if room and chance.random() < .6:
                    provider = room.pop(chance.randrange(len(room)))
                    servers[self.allocate(provider)] = provider
                elif servers:
                    server = chance.choice(sorted(servers))
                    room.append(servers.pop(server))
                    self.release(server)
            self.look(providers)
