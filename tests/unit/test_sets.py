# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Sets of devices, as the operator writes them."""

import ddt

from nova_accel.drivers import rules
from nova_accel import exception
from tests.unit import configured

A, B, C, D = (f'0000:0{n}:00.0' for n in range(1, 5))


@ddt.ddt
class SetsTest(configured.TestCase):

    def sets(self, *lines):
        self.config.config(device_sets=list(lines), group='accel')

    def test_sets(self):
        self.assertEqual([], rules.sets())
        self.assertIsNone(rules.set_of(A))
        self.sets(f'{B} {A}', f'  {D.upper()}   0000{C} ')
        self.assertEqual([(A, B), (C, D)], rules.sets())
        self.assertEqual((C, D), rules.set_of(D))
        self.assertIsNone(rules.set_of('0000:05:00.0'))

    @ddt.data(
        ([f'{A} {B}', f'{C} {B}'],
         f"has {B} twice, in '{A} {B}' and in '{C} {B}': a device can be in "
         f"one set only."),
        ([f'{A} {A}'], f'has {A} twice'),
        ([A], f"has the set '{A}', which is not two or more PCI addresses "),
        ([''], "has the set '', which is not two or more"),
        ([f'{A},{B}'], f"'{A},{B}' is not a PCI address: write it like"))
    @ddt.unpack
    def test_malformed(self, lines, said):
        self.sets(*lines)
        error = str(self.assertRaises(exception.ConfigurationError,
                                      rules.sets))
        self.assertTrue(error.startswith('[accel] device_sets has '), error)
        self.assertIn(said, error)
