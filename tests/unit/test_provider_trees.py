# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova's trees of providers are as without nova_accel."""

import copy
import random
import uuid

from nova.compute import provider_tree
import testtools

from nova_accel.virt import provider_trees

METHODS = ((provider_tree.ProviderTree, provider_trees._FIND),
           *((provider_tree._Provider, name)
             for name in provider_trees._PROVIDER))


class ProviderTreesTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        for owner, name in METHODS:
            self.addCleanup(_restore, owner, name, owner.__dict__.get(name))
        find = provider_tree.ProviderTree._find_with_lock
        if hasattr(find, provider_trees._MARK):
            provider_tree.ProviderTree._find_with_lock = getattr(
                find, provider_trees._MARK)
        self.before = provider_tree.ProviderTree._find_with_lock
        provider_trees.install()
        self.assertIsNot(
            self.before, provider_tree.ProviderTree._find_with_lock)

    def find(self, tree, name_or_uuid, return_root):
        """By the index, and as Nova does."""
        found = []
        for find in (tree._find_with_lock,
                     lambda *a, **k: self.before(tree, *a, **k)):
            try:
                found.append(find(name_or_uuid, return_root=return_root))
            except ValueError as error:
                found.append(str(error))
        ours, novas = found
        self.assertIs(type(novas), type(ours))
        if isinstance(novas, str):
            self.assertEqual(novas, ours)
        else:
            self.assertIs(novas, ours)

    def test_random_trees(self):
        rng = random.Random(4)
        trees, known = [provider_tree.ProviderTree()], []
        for number in range(600):
            tree = rng.choice(trees)
            there = tree.get_provider_uuids()
            step = rng.random()
            if step < .1 or not there:
                new = str(uuid.UUID(int=rng.getrandbits(128)))
                tree.new_root(f'host{number}', new)
                known += [new, f'host{number}']
            elif step < .6:
                new = tree.new_child(f'card{number}', rng.choice(there))
                known += [new, f'card{number}']
            elif step < .8:
                tree.remove(rng.choice(there))
            elif step < .85 and len(trees) < 4:
                trees.append(copy.deepcopy(tree))
            elif step < .9:
                # a provider that is read again is another object
                tree.populate_from_iterable([
                    {'uuid': item.uuid, 'name': item.name,
                     'generation': item.generation,
                     'parent_provider_uuid': item.parent_uuid}
                    for item in map(tree.data, tree.get_provider_uuids(
                        rng.choice(list(tree.roots)).uuid))])
            for _ in range(3):
                self.find(rng.choice(trees), rng.choice(known),
                          rng.random() < .5)

    def test_copies(self):
        tree = provider_tree.ProviderTree()
        root = tree.new_root('host', str(uuid.uuid4()), generation=3)
        card = tree.new_child('card', root, generation=1)
        tree.update_inventory(card, {'FPGA': {
            'total': 1, 'reserved': 0, 'allocation_ratio': 1.0}})
        tree.update_traits(card, ['ONE', 'TWO'])
        tree.update_aggregates(card, ['there'])
        tree.update_resources(card, {'FPGA': {('a', 'resource')}})
        copied = copy.deepcopy(tree)
        self.assertEqual(tree.data(card), copied.data(card))
        for data in (copied.data(card), tree.data(card)):
            data.inventory['FPGA']['total'] = 2
            data.traits.add('THREE')
            data.aggregates.clear()
            data.resources.clear()
        copied.update_inventory(card, {})
        copied.update_traits(card, [])
        copied.new_child('other', card)
        found = tree.data(card)
        self.assertEqual(
            ({'total': 1, 'reserved': 0, 'allocation_ratio': 1.0},
             {'ONE', 'TWO'}, {'there'}, {'FPGA': {('a', 'resource')}}),
            (found.inventory['FPGA'], found.traits, found.aggregates,
             found.resources))
        self.assertEqual([root, card], tree.get_provider_uuids())

    def test_what_novas_provider_has(self):
        """Fields that Nova adds are copied as well."""
        tree = provider_tree.ProviderTree()
        root = tree.new_root('host', str(uuid.uuid4()))
        tree._find_with_lock(root).later = {'a': [1]}
        copied = copy.deepcopy(tree)._find_with_lock(root)
        self.assertEqual({'a': [1]}, copied.later)
        self.assertIsNot(tree._find_with_lock(root).later['a'],
                         copied.later['a'])


def _restore(owner, name, value):
    if value is None:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
