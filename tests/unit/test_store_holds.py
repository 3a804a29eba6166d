# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Durable holds: they follow their card from row to row."""

import dataclasses
import os
import pathlib

import fixtures
import testtools

from nova_accel.inventory import holds
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import rows
from nova_accel.store import values
from tests.unit import identities
from tests.unit.host import A, B

C = '0000:5f:00.0'
IDS = identities.device(A, '').ids


class HoldsTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(claim_store.MEMORY)

    def test_in_memory(self):
        """Files of that name in the working directory do not matter."""
        directory = self.useFixture(fixtures.TempDir()).path
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(directory)
        for _ in range(2):
            pathlib.Path(claim_store.MEMORY).write_text('')
            self.disable(A, 'work')
            self.assertEqual([A], [d.device_address
                                   for d in self.store.disabled()])
            os.rename(claim_store.MEMORY, 'another')

    def put(self, **serials):
        self.store.set_devices({
            address: identities.device(address, serials[name])
            for name, address in (('a', A), ('b', B), ('c', C))
            if name in serials})

    def unclean(self, *handles, serial='', address=A):
        rows = [values.Unclean(handle, address, serial, IDS, 'none')
                for handle in handles]
        self.store.change_unclean((), rows)
        return rows

    def disable(self, address, reason, serial=''):
        self.store.disable(values.Disabled(address, serial, reason, 'now'))

    def test_kinds_are_those_of_the_table(self):
        for kind in (rows.DISABLED, rows.DEFECTIVE, rows.OWNER_UNKNOWN,
                     rows.RETURNED, rows.UNCLEAN):
            self.assertTrue(holds.Kind(kind).is_durable)

    def test_card_without_a_number_returns_to_its_address(self):
        """The next card in the slot is not the one with the data of a server,
        and that one is when it is back."""
        card = identities.device(A, '')
        other = dataclasses.replace(card, product_id='0001')
        self.store.set_devices({A: card})
        self.store.settle(todo=[values.Unsettled(A, ids=card.ids)])
        for there, found in (other, False), (card, True), (other, False):
            self.store.place(there, False, {})
            self.store.set_devices({A: there})
            self.assertEqual([found], [
                row.means(there) for row in self.store.unsettled()])
            # with all that the store has of it
            self.assertEqual(not found, card.ids in [
                away.key.ids for away in self.store.away()])

    def test_reports_its_number_again(self):
        """A row of the number that was away is of this card, too."""
        self.put(a='x')
        self.disable(A, 'hot', 'x')
        one, = self.unclean('0000:3b:00.1', serial='x')
        self.store.settle(todo=[values.Unsettled(
            serial='x', settled=frozenset(['0000:3b:00.2']))])
        self.put()
        self.put(a='')
        other, = self.unclean('0000:3b:00.3')
        self.put(a='x')
        self.assertEqual(
            {one, dataclasses.replace(other, serial='x')},
            self.store.unclean())
        self.assertEqual([('x', 'hot')], [
            (row.serial, row.reason) for row in self.store.disabled()])
        self.assertEqual({frozenset(['0000:3b:00.2'])}, {
            row.settled for row in self.store.unsettled()})

    def test_of_the_operator_and_of_health(self):
        self.put(a='')
        for of_health in False, True:
            self.store.disable(values.Disabled(
                A, '', 'hot', 'now', of_health=of_health))
        mine, of_health = self.store.disabled()
        self.assertEqual((False, True), (mine.of_health, of_health.of_health))
        self.store.enable([of_health])
        self.assertEqual((mine,), self.store.disabled())

    def test_own_reason_stays(self):
        """Nothing of the row that is removed falls to a new card, which gets
        its number."""
        self.put(a='', b='', c='x')
        self.store.set_loaded(C, 0, model.Loaded(
            'f' * 32, None, None, '', model.SOME_PROJECT))
        self.put(a='', b='')
        self.disable(A, 'worn')
        self.disable(C, 'of the other', 'x')
        self.store.settle(
            todo=[values.Unsettled(A, ids=IDS), values.Unsettled(serial='x')])
        self.put(a='x', b='', c='')
        self.assertEqual([(A, 'worn')], [
            (row.device_address, row.reason)
            for row in self.store.disabled()])
        self.assertEqual([A], [
            row.address for row in self.store.unsettled()])
        self.assertEqual({}, dict(self.store.loaded()))

    def test_two_with_one_number(self):
        """What is known of one is known of both."""
        self.put(a='x')
        self.disable(A, 'hot', 'x')
        self.unclean('0000:3b:00.1', serial='x')
        self.store.settle(todo=[values.Unsettled(
            serial='x', settled=frozenset(['0000:3b:00.2']))])
        self.store.place(identities.device(B, 'x'), False, {})
        self.assertEqual([A, B], [
            row.device_address for row in self.store.disabled()])
        self.assertEqual(2, len(self.store.unclean()))
        self.assertEqual([frozenset(['0000:3b:00.2'])] * 2, [
            row.settled for row in self.store.unsettled()])

    def test_settled_parts(self):
        """A part that one row has and another has not may have data."""
        one, other = '0000:3b:00.1', '0000:3b:00.2'
        self.put(a='')
        for parts, left in (((one, other), {one, other}), ((one,), {one}),
                            ((other,), set())):
            self.store.settle(todo=[values.Unsettled(
                A, ids=IDS, settled=frozenset(parts))])
            row, = self.store.unsettled()
            self.assertEqual(left, row.settled)
        self.store.settle(done=self.store.unsettled())
        self.store.settle(todo=[values.Unsettled(A)])
        row, = self.store.unsettled()
        self.assertEqual((frozenset(), True), (row.settled, row.by_address))

    def test_lost_counts_more(self):
        self.put(a='')
        self.store.settle(todo=[values.Unsettled(A, ids=IDS)])
        self.assertEqual([False], [
            row.by_address for row in self.store.unsettled()])
        for row in (values.Unsettled(A), values.Unsettled(A, ids=IDS)):
            self.store.settle(todo=[row])
            self.assertEqual([True], [
                row.by_address for row in self.store.unsettled()])
