# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Holds of devices, and which card is at an address, without drivers."""

import dataclasses

import ddt
import testtools

from nova_accel.inventory import devices
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import values
from tests.unit import identities
from tests.unit.claims import serials
from tests.unit.host import A, B

Kind = holds.Kind
#: a function in the slot of A
A_OTHER = A[:-1] + '1'
QUARANTINED = model.Health.QUARANTINED


class TableTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(claim_store.MEMORY)
        self.table = devices.DeviceTable(self.store, ['first', 'nvme'])

    def adopt(self, address, serial='', **more):
        self.assertTrue(self.table.adoption.adopt(
            identities.device(address, serial, **more),
            self.table.reports.ticket()))
        self.table.reports.save()

    def kinds(self, address=A):
        return [hold.kind for hold in self.table.holds_of(address)]

    def goes(self, address):
        self.table.adoption.gone(address, 'nvme', self.table.reports.ticket())
        self.table.reports.save()


@ddt.ddt
class HoldTest(TableTestCase):

    def disable(self, reason='hot'):
        self.store.disable(values.Disabled(A, '', reason, 'now'))

    def unsettle(self):
        self.store.settle(todo=[values.Unsettled(A)])

    def claim(self, **of):
        self.store.add([identities.claim(**of)])

    def withhold(self):
        self.table.withheld.withhold(A, Kind.IN_GUEST, 'a guest has it')

    @ddt.unpack
    @ddt.data(
        ([], []),
        (['disable'], [Kind.DISABLED]),
        (['disable', 'withhold'], [Kind.IN_GUEST, Kind.DISABLED]),
        (['unsettle', 'disable'], [Kind.OWNER_UNKNOWN, Kind.DISABLED]))
    def test_kinds(self, steps, kinds):
        self.adopt(A)
        for step in steps:
            getattr(self, step)()
        self.assertEqual(kinds, self.kinds())
        self.assertEqual({*kinds}, self.table.kinds(A))

    def test_suspect(self):
        self.adopt(A)
        self.table.withheld.set_suspects({A: 'it is hot'})
        self.assertEqual([Kind.SUSPECT], self.kinds())
        self.assertEqual(set(), self.table.kinds(A))
        self.table.withheld.set_suspects({})
        self.assertEqual([], self.kinds())

    def test_before_it_comes(self):
        self.withhold()
        self.adopt(A)
        self.assertEqual([], self.kinds())

    def test_removed(self):
        self.adopt(A)
        self.withhold()
        self.goes(A)
        self.table.remove(A)
        self.adopt(A)
        self.assertEqual([], self.kinds())

    def test_a_function_in_the_slot_of_another_device(self):
        """It belongs to that device, although its driver comes later."""
        self.adopt(A, company=(A_OTHER,))
        device = dataclasses.replace(
            identities.device(B, '', company=(A_OTHER,)), driver='first')
        self.table.adoption.adopt(device, self.table.reports.ticket())
        self.assertEqual(([], [Kind.SHARED]), (self.kinds(), self.kinds(B)))

    def test_whose_it_is_comes_first(self):
        self.adopt(A, foreign='it has ext4')
        self.assertEqual((holds.Hold(Kind.FOREIGN, A, 'it has ext4'),),
                         self.table.holds_of(A))
        self.unsettle()
        self.assertEqual([Kind.OWNER_UNKNOWN], self.kinds())
        self.claim(serial='', ids='1234:5679')
        self.assertEqual([Kind.MISPLACED], self.kinds())

    def test_of_a_server(self):
        self.adopt(A, foreign='it has ext4')
        self.claim(serial='')
        self.assertEqual([], self.kinds())

    def test_nothing_is_said_of_what_is_not_there(self):
        self.disable()
        self.assertEqual([], self.kinds())

    def test_of_a_product(self):
        """The word stays with the device that was taken out."""
        self.adopt(A, ids='1234:0001')
        self.disable()
        for ids, kinds in (('1234:0001', [Kind.DISABLED]),
                           ('1234:0002', []),
                           ('1234:0001', [Kind.DISABLED])):
            self.adopt(A, ids=ids)
            self.assertEqual(kinds, self.kinds())
        self.store.enable(self.store.disabled())
        self.assertEqual([], self.kinds())

    def test_a_defect_beside_it(self):
        self.adopt(A, health=QUARANTINED, reason='it is hot')
        self.disable()
        self.assertEqual({Kind.UNUSABLE, Kind.DISABLED}, self.table.kinds(A))


class PlaceTest(TableTestCase):
    """Which card is at an address, by serial numbers."""

    CARD = (('firmware', '1'),)

    def setUp(self):
        super().setUp()
        self.adopt(A, 'a', record=self.CARD)

    def record_of(self, serial):
        return self.table.adoption.record_of(model.CardKey('', serial))

    def test_of_a_claim(self):
        claim = identities.claim('a')
        self.store.add([claim])
        where = identity.Where
        self.assertEqual((where.HERE, self.table.snapshot()[A]),
                         self.table.place(claim))
        self.assertFalse(self.table.is_misplaced(A))
        self.goes(A)
        self.adopt(B, 'a')
        self.assertEqual((where.MOVED, self.table.snapshot()[B]),
                         self.table.place(claim))
        self.assertEqual([True, True], [*map(self.table.is_misplaced, (A, B))])
        self.store.remove([claim])
        self.assertFalse(self.table.is_misplaced(B))

    def test_moved(self):
        self.goes(A)
        self.adopt(B, 'a')
        self.assertEqual({B: 'a'}, serials(self.store))
        self.goes(B)
        self.adopt(A, 'a')
        self.assertEqual({A: 'a'}, serials(self.store))

    def test_moved_before_it_is_gone(self):
        """Drivers are asked side by side."""
        self.adopt(B, 'a')
        self.goes(A)
        self.assertEqual({B: 'a'}, serials(self.store))

    def test_does_not_tell_its_number(self):
        self.goes(A)
        self.adopt(A)
        self.assertEqual({A: 'a'}, serials(self.store))
        self.assertEqual((), self.record_of('a'))
        again = devices.DeviceTable(self.store, ['nvme'])
        self.assertEqual((), again.adoption.record_of(model.CardKey('', 'a')))

    def test_does_not_tell_its_number_any_more(self):
        """What it may have of a server it has still."""
        self.store.settle(todo=[values.Unsettled(serial='a')])
        self.adopt(A)
        self.assertEqual([Kind.RETURNED], self.kinds())
        self.adopt(A, 'b')
        self.assertEqual([], self.kinds())
        self.adopt(B, 'a')
        self.assertEqual([Kind.RETURNED], self.kinds(B))
        self.adopt(B)
        self.store.settle(self.store.unsettled())
        self.assertEqual([], self.kinds(B))
        self.assertEqual(frozenset(), self.store.unsettled())

    def test_known_only_to_the_store(self):
        self.goes(A)
        self.table.remove(A)
        self.assertEqual(self.CARD, self.record_of('a'))
        self.adopt(B, 'a')
        self.assertEqual({B: 'a'}, serials(self.store))

    def test_another_card_came_meanwhile(self):
        self.goes(A)
        self.adopt(A, 'b')
        self.assertEqual(self.CARD, self.record_of('a'))
        self.assertEqual((), self.record_of('b'))

    def test_record_follows(self):
        self.store.settle(todo=[values.Unsettled(serial='a')])
        self.goes(A)
        self.adopt(B, 'a', record=(('firmware', '2'),))
        self.assertEqual(self.CARD, self.table.reports.reported(B).record)

    def test_two_with_one_number(self):
        self.adopt(B, 'a')
        self.adopt(B, 'a')
        self.assertEqual({}, serials(self.store))
        self.assertEqual({A, B}, self.table.snapshot().keys())
        self.goes(A)
        self.adopt(A, 'a')
        self.assertEqual({}, serials(self.store))
