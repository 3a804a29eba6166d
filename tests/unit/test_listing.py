# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is withheld and since when, as commands read it."""

from unittest import mock

import fixtures
import testtools

from nova_accel import exception
from nova_accel.inventory import holds
from nova_accel.inventory import shown
from nova_accel import model
from nova_accel.store import claim_store
from tests.unit.host import A, B

HANDLE = model.AttachHandle(model.HandleType.MDEV, 'an mdev')
Kind = holds.Kind


class ListingTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(claim_store.MEMORY)
        self.log = self.useFixture(fixtures.FakeLogger())
        self.listing = shown.Listing(self.store)

    def write(self, now, *found):
        with mock.patch('nova_accel.text.now', return_value=now):
            self.listing.write(found)

    def read(self):
        return [(hold.kind, hold.device, hold.region, hold.handle,
                 hold.reason, hold.since)
                for hold in shown.listed(self.store)]

    def test_what_is_written_is_read(self):
        self.write('now', holds.Hold(Kind.IN_USE, A, 'busy', 1, HANDLE),
                   holds.Hold(Kind.DISABLED, B, 'hot', since='earlier'))
        self.assertEqual(
            [(Kind.IN_USE, A, 1, HANDLE, 'busy', 'now'),
             (Kind.DISABLED, B, None, None, 'hot', 'earlier')], self.read())
        self.write('later')
        self.assertEqual([], self.read())

    def test_it_began_when_it_was_seen_first(self):
        """Also if its reason changes, or nova-compute starts again."""
        self.write('first', holds.Hold(Kind.UNUSABLE, A, 'hot'))
        self.listing = shown.Listing(self.store)
        self.write('later', holds.Hold(Kind.UNUSABLE, A, 'very hot'))
        (*_, reason, since), = self.read()
        self.assertEqual(('very hot', 'first'), (reason, since))

    def test_kind_of_another_release(self):
        self.write('now', holds.Hold(Kind.GONE, A, 'away'))
        row, = self.store.withheld()
        self.store.set_withheld([row._replace(kind='haunted')])
        self.assertEqual([], self.read())

    def test_store_fails(self):
        """What was not written is written the next time."""
        hold = holds.Hold(Kind.GONE, A, 'away')
        with mock.patch.object(
                self.store, 'set_withheld',
                side_effect=exception.AcceleratorsUnavailable('Full.')):
            for _ in range(2):
                self.write('first', hold)
        self.assertEqual(1, self.log.output.count('Full.'))
        self.write('later', hold)
        self.assertEqual(['later'], [since for *_, since in self.read()])
