# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The type of holds, and the table of their kinds."""

import pathlib

import ddt
import testtools

from nova_accel.inventory import holds
from nova_accel import model
from tests.unit import tables

PAGE = pathlib.Path(__file__).parents[2] / 'docs/source/operate/withheld.rst'
A, B = '0000:3b:00.0', '0000:5e:00.0'
ONE, OTHER = (model.AttachHandle(model.HandleType.PCI, f'0000:3b:00.{n}')
              for n in (1, 2))
Kind, Scope = holds.Kind, holds.Scope


class TableTest(testtools.TestCase):

    def test_the_docstring_has_each_kind(self):
        self.assertEqual(
            [[kind.value + ' *' * kind.is_durable, kind.scope.value,
              kind.lifted_by] for kind in Kind],
            [[name, scope, by] for name, scope, _, by
             in tables.rows(holds.__doc__, 'Kind')])

    def test_the_page_has_the_same_table(self):
        self.assertEqual(tables.rows(holds.__doc__, 'Kind'),
                         tables.rows(PAGE.read_text(), 'Kind'))

    def test_kinds_that_placement_counts(self):
        self.assertEqual(
            [Kind.CLEANING, Kind.SUSPECT, Kind.PLANNED],
            [kind for kind in Kind if not kind.withholds])

    def test_by_name(self):
        self.assertIs(Kind.DISABLED, Kind('disabled'))


@ddt.ddt
class HoldTest(testtools.TestCase):

    @ddt.unpack
    @ddt.data(
        ({}, Scope.CARD, [True, True, True, True]),
        ({'region': 1}, Scope.PART, [False, True, True, True]),
        ({'region': 1, 'handle': ONE}, Scope.HANDLE,
         [False, False, True, False]))
    def test_scope(self, what, scope, applies):
        hold = holds.Hold(Kind.UNUSABLE, A, 'it is broken', **what)
        self.assertIs(scope, hold.scope)
        self.assertEqual(applies, [hold.applies_to(*about) for about in (
            ((A, 0), ONE), ((A, 1),), ((A, 1), ONE), ((A, 1), OTHER))])
        self.assertFalse(hold.applies_to((B, 1), ONE))

    def test_of_a_device_without_regions(self):
        hold = holds.Hold(Kind.WAITING, A, '', handle=ONE)
        self.assertTrue(hold.applies_to((A, None), ONE))
        self.assertFalse(hold.applies_to((A, None)))
