# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The columns of the commands, which programs read by their names."""

import importlib.metadata
import pathlib

import testtools
import yaml

from nova_accel.cmd import output

GOLDEN = pathlib.Path(__file__).parent / 'data/columns.yaml'


class ColumnsTest(testtools.TestCase):

    def test_golden(self):
        """Columns are added; one that goes, or is renamed, breaks what reads
        it: a release note says so, under upgrade."""
        found = {}
        for point in importlib.metadata.entry_points(
                group='nova_accel.commands'):
            command = point.load()
            if issubclass(command, output.Table):
                found[point.name.replace('_', ' ')] = list(command.COLUMNS)
        self.assertEqual(yaml.safe_load(GOLDEN.read_text()), found)
