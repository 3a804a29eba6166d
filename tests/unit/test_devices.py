# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Fences of devices, and which card is at an address, without drivers."""

import ddt
import testtools

from nova_accel.inventory import devices
from nova_accel.inventory import fences
from nova_accel.inventory import identity
from nova_accel import model
from nova_accel.store import claim_store
from tests.unit import test_identity
from tests.unit.host import A, B

Fence = fences.Fence
OK, QUARANTINED = model.Health.OK, model.Health.QUARANTINED


class TableTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.store = claim_store.ClaimStore(claim_store.MEMORY)
        self.table = devices.DeviceTable(self.store, ['nvme'])

    def adopt(self, address, serial='', **more):
        self.assertTrue(self.table.adopt(
            test_identity.device(address, serial, **more),
            self.table.ticket()))
        self.table.save()

    def goes(self, address):
        self.table.gone(address, 'nvme', self.table.ticket())
        self.table.save()


@ddt.ddt
class FenceTest(TableTestCase):

    def disable(self, reason='hot'):
        self.store.disable(model.Disabled(A, '', reason, 'now'))

    def unsettle(self):
        self.store.settle(todo=[model.Unsettled(A)])

    def claim(self, **of):
        self.store.add([test_identity.claim(**of)])

    def fence(self):
        self.table.fence(A, Fence.GUEST, 'a guest has it')

    @ddt.unpack
    @ddt.data(
        ([], []),
        (['disable'], [Fence.DISABLED]),
        (['disable', 'fence'], [Fence.GUEST, Fence.DISABLED]),
        (['unsettle', 'disable'], [Fence.UNSETTLED, Fence.DISABLED]))
    def test_causes(self, steps, causes):
        self.adopt(A)
        for step in steps:
            getattr(self, step)()
        self.assertEqual(causes, [*self.table.fences(A)])
        self.assertEqual(causes == [Fence.DISABLED],
                         self.table.is_only_disabled(A))
        found = self.table.snapshot()[A]
        self.assertEqual(QUARANTINED if causes else OK, found.health)
        self.assertEqual('; '.join(self.table.fences(A).values()),
                         found.reason)

    def test_whose_it_is_comes_first(self):
        self.adopt(A, foreign='it has ext4')
        self.assertEqual({Fence.FOREIGN: 'it has ext4'}, self.table.fences(A))
        self.unsettle()
        self.assertEqual([Fence.UNSETTLED], [*self.table.fences(A)])
        self.claim(serial='', ids='1234:5679')
        self.assertEqual([Fence.MISPLACED], [*self.table.fences(A)])

    def test_of_a_server(self):
        self.adopt(A, foreign='it has ext4')
        self.claim(serial='')
        self.assertEqual({}, self.table.fences(A))
        self.assertIs(OK, self.table.snapshot()[A].health)

    def test_nothing_is_said_of_what_is_not_there(self):
        self.disable()
        self.assertEqual({}, self.table.fences(A))
        self.assertFalse(self.table.is_only_disabled(A))

    def test_of_a_product(self):
        """The word stays with the device that was taken out."""
        self.adopt(A, ids='1234:0001')
        self.disable()
        for ids, causes in (('1234:0001', [Fence.DISABLED]),
                            ('1234:0002', []),
                            ('1234:0001', [Fence.DISABLED])):
            self.adopt(A, ids=ids)
            self.assertEqual(causes, [*self.table.fences(A)])
        self.store.enable(self.store.disabled())
        self.assertEqual({}, self.table.fences(A))

    def test_a_defect_beside_it(self):
        self.adopt(A, health=QUARANTINED, reason='it is hot')
        self.disable()
        self.assertFalse(self.table.is_only_disabled(A))
        self.assertEqual('it is hot; the operator has disabled it',
                         self.table.snapshot()[A].reason)


class PlaceTest(TableTestCase):
    """Which card is at an address, by serial numbers."""

    CARD = (('firmware', '1'),)

    def setUp(self):
        super().setUp()
        self.adopt(A, 'a', record=self.CARD)

    def test_of_a_claim(self):
        claim = test_identity.claim('a')
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
        self.assertEqual({B: 'a'}, dict(self.store.serials()))
        self.goes(B)
        self.adopt(A, 'a')
        self.assertEqual({A: 'a'}, dict(self.store.serials()))

    def test_moved_before_it_is_gone(self):
        """Drivers are asked side by side."""
        self.adopt(B, 'a')
        self.goes(A)
        self.assertEqual({B: 'a'}, dict(self.store.serials()))

    def test_does_not_tell_its_number(self):
        self.goes(A)
        self.adopt(A)
        self.assertEqual({A: 'a'}, dict(self.store.serials()))
        self.assertEqual((), self.table.record_of('a'))
        again = devices.DeviceTable(self.store, ['nvme'])
        self.assertEqual((), again.record_of('a'))

    def test_does_not_tell_its_number_any_more(self):
        """What it may have of a server it has still."""
        self.store.settle(todo=[model.Unsettled(serial='a')])
        self.adopt(A)
        self.assertEqual([Fence.UNSETTLED], [*self.table.fences(A)])
        self.adopt(A, 'b')
        self.assertEqual({}, self.table.fences(A))
        self.adopt(B, 'a')
        self.assertEqual([Fence.UNSETTLED], [*self.table.fences(B)])
        self.adopt(B)
        self.store.settle(self.store.unsettled())
        self.assertEqual({}, self.table.fences(B))
        self.assertEqual(frozenset(), self.store.unsettled())

    def test_known_only_to_the_store(self):
        self.goes(A)
        self.table.remove(A)
        self.assertEqual(self.CARD, self.table.record_of('a'))
        self.adopt(B, 'a')
        self.assertEqual({B: 'a'}, dict(self.store.serials()))

    def test_another_card_came_meanwhile(self):
        self.goes(A)
        self.adopt(A, 'b')
        self.assertEqual(self.CARD, self.table.record_of('a'))
        self.assertEqual((), self.table.record_of('b'))

    def test_record_follows(self):
        self.store.settle(todo=[model.Unsettled(serial='a')])
        self.goes(A)
        self.adopt(B, 'a', record=(('firmware', '2'),))
        self.assertEqual(self.CARD, self.table.reported(B).record)

    def test_two_with_one_number(self):
        self.adopt(B, 'a')
        self.adopt(B, 'a')
        self.assertEqual({}, dict(self.store.serials()))
        self.assertEqual({A, B}, self.table.snapshot().keys())
        self.goes(A)
        self.adopt(A, 'a')
        self.assertEqual({}, dict(self.store.serials()))
