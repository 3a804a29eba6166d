# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The page of deviations names the sentence that each row departs from."""

import os
import pathlib
import re

import testtools
import yaml

ROOT = pathlib.Path(__file__).parents[2]
#: a directory with the texts of the specifications, for a comparison with
#: their own words
TEXTS = os.environ.get('NOVA_ACCEL_SPECIFICATIONS')


class DeviationsTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        page = (ROOT / 'docs/source/deviations.rst').read_text()
        cells = re.findall(r'^   \* - (.*?)\n     - (.*?)(?=^   \* - |^\S|\Z)',
                           page, re.MULTILINE | re.DOTALL)
        self.rows = [(' '.join(asked.split()), ' '.join(here.split()))
                     for asked, here in cells if asked != 'Asked for']
        with open(ROOT / 'tests/unit/data/specifications.yaml') as file:
            self.sentences = {
                (name, sentence) for name, sentences
                in yaml.safe_load(file).items() for sentence in sentences}

    def test_each_row_quotes_a_sentence(self):
        """And each sentence that is known to be departed from has a row."""
        found = set()
        for asked, here in self.rows:
            quoted = re.search(r'\(([^()]+): "(.+)"\)$', asked)
            self.assertIsNotNone(quoted, asked)
            found.add(quoted.groups())
            self.assertNotEqual('', here)
        self.assertEqual(self.sentences, found)
        self.assertEqual(len(found), len(self.rows), 'a sentence twice')

    def test_sentences_are_of_the_specifications(self):
        if not TEXTS:
            self.skipTest('NOVA_ACCEL_SPECIFICATIONS names no directory')
        texts = [' '.join(path.read_text().split())
                 for path in pathlib.Path(TEXTS).glob('*.txt')]
        for name, sentence in self.sentences:
            self.assertTrue(
                any(sentence in text for text in texts), f'{name}: {sentence}')
