# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova's trees of providers are as without nova_accel."""

import copy
import importlib.util
import random
import threading
import uuid

from nova.compute import pci_placement_translator
from nova.compute import provider_tree
from nova import exception as nova_exception
import os_traits
import testtools

from nova_accel.virt import provider_trees
from nova_accel import wrapping
from tests.unit import replaced

CLASSES = 'FPGA', 'GPU', 'DISK_GB'
TRAITS = ('CUSTOM_ONE', 'CUSTOM_TWO', os_traits.MISC_SHARES_VIA_AGGREGATE,
          os_traits.COMPUTE_MANAGED_PCI_DEVICE)


def _novas():
    """Nova's module once more, in which nothing is replaced."""
    spec = importlib.util.spec_from_file_location(
        'novas_provider_tree', provider_tree.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ProviderTreesTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(replaced.Trees())
        self.novas = _novas()

    def test_random_steps(self):
        for seed in range(5):
            Steps(self, random.Random(seed)).run(120)

    def test_once(self):
        before = provider_tree.ProviderTree.data
        provider_trees.install()
        self.assertIs(before, provider_tree.ProviderTree.data)

    def tree(self):
        tree = provider_tree.ProviderTree()
        root = tree.new_root('host', str(uuid.uuid4()), generation=3)
        card = tree.new_child('card', root, generation=1)
        tree.update_inventory(card, {'FPGA': {'total': 1, 'reserved': 0}})
        tree.update_traits(card, ['ONE', 'TWO'])
        return tree, root, card

    def test_who_receives_data_may_change_them(self):
        tree, root, card = self.tree()
        tree.update_aggregates(card, ['there'])
        tree.update_resources(card, {'FPGA': {('a', 'resource')}})
        copied = copy.deepcopy(tree)
        for of in copied, tree:
            data = of.data(card)
            data.inventory['FPGA']['total'] = 2
            data.traits.add('THREE')
            data.aggregates.clear()
            data.resources['FPGA'].clear()
        found = tree.data(card)
        self.assertEqual(found, copied.data(card))
        self.assertEqual(
            ({'total': 1, 'reserved': 0}, {'ONE', 'TWO'}, {'there'},
             {('a', 'resource')}),
            (found.inventory['FPGA'], found.traits, found.aggregates,
             found.resources['FPGA']))

    def test_what_novas_provider_has(self):
        """Fields that Nova adds are copied as well."""
        tree, root, _ = self.tree()
        tree._find_with_lock(root).later = {'a': [1]}
        copied = copy.deepcopy(tree)
        copied._find_with_lock(root).later['a'].append(2)
        self.assertEqual({'a': [1]}, tree._find_with_lock(root).later)

    def test_part_of_a_tree(self):
        tree, root, card = self.tree()
        region = tree.new_child('region', card)
        copied = copy.deepcopy(tree._find_with_lock(card))
        tree.update_traits(region, ['THREE'])
        self.assertEqual(set(), copied.children[region].traits)

    def test_copy_of_a_tree_that_is_being_changed(self):
        """A copy has the same root by its name and by its UUID."""
        tree, root, card = self.tree()
        copied = []
        thread = threading.Thread(
            target=lambda: copied.append(copy.deepcopy(tree)))
        with tree.lock:
            thread.start()
            thread.join(0.1)
            tree._find_with_lock(card).traits.add('THREE')
        thread.join()
        self.assertEqual({'ONE', 'TWO', 'THREE'}, copied[0].data(card).traits)
        tree.update_traits(card, ['ONE'])
        self.assertEqual({'ONE', 'TWO', 'THREE'}, copied[0].data(card).traits)

    def test_tree_from_before(self):
        """nova-compute has one when the driver is initialized."""
        tree, root, card = self.tree()
        region = tree.new_child('region', card)
        provider_trees._parents.clear()
        copied = copy.deepcopy(tree)
        tree.update_traits(region, ['THREE'])
        self.assertEqual({'THREE'}, tree.data(region).traits)
        self.assertEqual(set(), copied.data(region).traits)

    def test_what_is_below(self):
        tree, root, card = self.tree()
        edition = provider_trees.below(tree, 'host')
        copied = copy.deepcopy(tree)
        copied.update_traits(root, ['THREE'])
        tree.update_inventory(root, {'VCPU': {'total': 1}})
        for of in tree, copied:
            self.assertIs(edition, provider_trees.below(of, root))
        self.assertEqual({root}, provider_trees.differing(copied, tree))
        copied.update_traits(card, ['ONE'])
        tree.update_traits(root, ['THREE'])
        copied.update_inventory(root, {'VCPU': {'total': 1}})
        self.assertIs(edition, provider_trees.below(tree, root))
        self.assertIsNot(edition, provider_trees.below(copied, root))
        self.assertEqual({card}, provider_trees.differing(copied, tree))
        copied.update_traits(card, ['TWO', 'ONE'])
        self.assertEqual(set(), provider_trees.differing(copied, tree))
        new = copied.new_child('region', card)
        self.assertEqual({new}, provider_trees.differing(copied, tree))
        self.assertRaises(KeyError, provider_trees.below, tree, 'other')

    def test_other_novas(self):
        """Where Nova's providers have other fields, they stay Nova's."""
        for owner, name in provider_trees.REPLACED:
            replaced.restore(owner, name, getattr(
                vars(owner)[name], wrapping.ORIGINAL))
        self.patch(provider_trees, '_FIELDS', ('uuid',))
        provider_trees.install()
        tree, root, card = self.tree()
        self.assertFalse(hasattr(tree.data, wrapping.ORIGINAL))
        edition = provider_trees.below(tree, root)
        tree.update_traits(card, ['ONE'])
        self.assertIsNot(edition, provider_trees.below(tree, root))


class Steps:
    """The same random changes of trees of Nova and of trees as replaced."""

    def __init__(self, test, rng):
        self.test, self.rng = test, rng
        self.pairs = [(test.novas.ProviderTree(),
                       provider_tree.ProviderTree())]
        self.known = ['none']

    def run(self, number):
        for _ in range(number):
            pair = self.rng.choice(self.pairs)
            getattr(self, self.rng.choices(
                ('root', 'child', 'change', 'remove', 'copied', 'part',
                 'again'), (1, 6, 12, 1, 2, 1, 1))[0])(pair)
            self.rng.choice((lambda: None, self.same))()
        self.same()

    def both(self, pair, call, *args):
        """Call a method of both, which return or raise the same."""
        results = []
        for tree in pair:
            try:
                results.append(getattr(tree, call)(*copy.deepcopy(args)))
            except ValueError as error:
                results.append(str(error))
        self.test.assertEqual(*results)

    def new(self):
        found = str(uuid.UUID(int=self.rng.getrandbits(128)))
        self.known += [found, f'name-{found}']
        return found

    def root(self, pair):
        new = self.new()
        self.both(pair, 'new_root', f'name-{new}', new, 1)

    def child(self, pair):
        new = self.new()
        self.both(pair, 'new_child', f'name-{new}',
                  self.rng.choice(self.known), new, 1)

    def some(self, of):
        return self.rng.sample(of, self.rng.randrange(len(of)))

    def change(self, pair):
        provider = self.rng.choice(self.known)
        name, value = self.rng.choice([
            ('update_traits', self.some(TRAITS)),
            ('update_aggregates', self.some(TRAITS)),
            ('update_inventory', {name: {'total': self.rng.randrange(3)}
                                  for name in self.some(CLASSES)}),
            ('update_resources', {name: {1} for name in self.some(CLASSES)}),
            ('add_traits', self.rng.choice(TRAITS)),
            ('remove_traits', self.rng.choice(TRAITS))])
        self.both(pair, name, provider, value)

    def remove(self, pair):
        self.both(pair, 'remove', self.rng.choice(self.known))

    def copied(self, pair):
        if len(self.pairs) < 4:
            self.pairs.append(tuple(map(copy.deepcopy, pair)))

    def part(self, pair):
        roots = [root.uuid for root in pair[0].roots]
        # Nova 34
        if roots and len(self.pairs) < 5 and hasattr(pair[0], 'subtree'):
            root = self.rng.choice(roots)
            self.pairs.append(tuple(tree.subtree(root) for tree in pair))

    def again(self, pair):
        """A host is read again: all of its providers are other objects."""
        roots = [root.uuid for root in pair[0].roots]
        if roots:
            tree = pair[0]
            self.both(pair, 'populate_from_iterable', [
                {'uuid': item.uuid, 'name': item.name, 'generation': 5,
                 'parent_provider_uuid': item.parent_uuid}
                for item in map(tree.data, tree.get_provider_uuids(
                    self.rng.choice(roots)))])

    def same(self):
        for pair in self.pairs:
            self.both(pair, 'get_provider_uuids')
            for provider in self.rng.sample(self.known,
                                            min(9, len(self.known))):
                for question in ('data', 'exists', 'get_provider_uuids',
                                 'get_provider_uuids_in_tree',
                                 'has_inventory'):
                    self.both(pair, question, provider)
            for name in CLASSES:
                self.both(pair, 'has_sharing_provider', name)
            self.tracked(*pair)

    def tracked(self, novas, ours):
        is_tracked = any(
            os_traits.COMPUTE_MANAGED_PCI_DEVICE in novas.data(u).traits
            for u in novas.get_provider_uuids())
        check = pci_placement_translator.ensure_tracking_was_not_enabled_before
        if is_tracked:
            self.test.assertRaises(
                nova_exception.PlacementPciException, check, ours)
        else:
            check(ours)
