# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Parts of errors."""

import ddt
import testtools

from nova_accel import text


@ddt.ddt
class PrintableTest(testtools.TestCase):

    @ddt.data(
        ('a name', "'a name'"),
        ('', "''"),
        (None, "''"),
        (7, '7'),
        ('line\nbreak\x1b[2J', r"'line\nbreak\x1b[2J'"),
        ('Gerät', r"'Ger\xe4t'"),
        ("it's", '"it\'s"'))
    @ddt.unpack
    def test_in_quotes_and_ascii(self, value, expected):
        self.assertEqual(expected, text.printable(value))

    @ddt.data(('x' * 58, "'" + 'x' * 58 + "'"),
              ('x' * 59, "'" + 'x' * 59 + "...'"),
              (int('9' * 61), '9' * 60 + '...'))
    @ddt.unpack
    def test_long_values_are_cut_off(self, value, expected):
        self.assertEqual(expected, text.printable(value))


@ddt.ddt
class OneLineTest(testtools.TestCase):

    @ddt.data('a name', 'Ger\xe4t \u4e2d', "it's")
    def test_as_it_is(self, value):
        self.assertEqual(value, text.one_line(value))

    @ddt.data('\n', '\r', '\x1b', '\x85', '\u2028', '\u202e', '\u2066',
              '\u200f', '\u061c', '\ufeff', '\U000e0041', '\ud800')
    def test_escaped(self, character):
        """Also what turns the direction of the text (UAX 9)."""
        shown = text.one_line(f'a{character}b')
        self.assertTrue(shown.isprintable(), ascii(shown))
        shown.encode()
        self.assertEqual(f'a{character}b', eval(f"'{shown}'"))


@ddt.ddt
class ShortenedTest(testtools.TestCase):

    @ddt.data(
        ('It is broken: look at it.', 25, 'It is broken: look at it.'),
        ('The card A was to work, and is broken: look.', 36,
         'The card A was to work ...: look.'),
        # a sentence without a remedy, and a remedy that does not fit
        ('It is broken and nobody knows why.', 20, 'It is broken ...'),
        ('It is broken: look at it as long as you can.', 24,
         'It is broken: look ...'),
        ('x' * 30, 20, ' ...'))
    @ddt.unpack
    def test_middle_is_left_out(self, sentence, room, expected):
        self.assertEqual(expected, text.shortened(sentence, room))
        self.assertLessEqual(len(expected), room)
