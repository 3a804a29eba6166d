# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel import profiles: Cyborg's answer, as files that nova-api reads."""

import io
import json
import os
import types

from nova_accel.cmd import imports
from nova_accel import conf
from nova_accel import exception
from nova_accel import profiles
from tests.unit import commands

GROUP = {'resources:FPGA': '1', 'trait:CUSTOM_FPGA_INTEL': 'required',
         'accel:function_id': 'd8424dc4-a4a3-c413-f89e-433683f9040b'}


class ImportProfilesTest(commands.CommandTestCase):

    def setUp(self):
        super().setUp()
        self.profiles = os.path.join(self.directory, 'profiles')
        os.mkdir(self.profiles)
        self.configure(device_profiles=self.profiles)

    def run_import(self, answer, *arguments):
        """:returns: (exit status, stdout, stderr)."""
        path = os.path.join(self.directory, 'answer.json')
        with open(path, 'w') as file:
            file.write(answer if isinstance(answer, str)
                       else json.dumps(answer))
        app = types.SimpleNamespace(stdout=io.StringIO(), stderr=io.StringIO())
        command = imports.ImportProfiles(app, None)
        try:
            status = command.run(command.get_parser('import').parse_args(
                ['--config-file', self.config, path, *arguments]))
        finally:
            conf.CONF.reset()
        return status, app.stdout.getvalue(), app.stderr.getvalue()

    @staticmethod
    def answer(**by_name):
        """As of Cyborg's API, with what it adds."""
        return {'device_profiles': [
            {'name': name, 'uuid': 'e8b1a2f4-0000-4000-8000-000000000001',
             'description': 'of Cyborg', 'groups': groups,
             'created_at': '2024-05-01 10:00:00+00:00', 'updated_at': None,
             'links': []} for name, groups in by_name.items()]}

    def test_diff_then_written(self):
        answer = self.answer(nlb=[GROUP], two=[GROUP, GROUP])
        status, diff, errors = self.run_import(answer)
        self.assertEqual((0, ''), (status, errors))
        self.assertEqual([], os.listdir(self.profiles))
        self.assertIn(f'--- /dev/null\n+++ {self.profiles}/nlb.yaml', diff)
        self.assertEqual((0, diff, ''), self.run_import(answer, '--write'))
        self.assertEqual(['nlb.yaml', 'two.yaml'],
                         sorted(os.listdir(self.profiles)))
        found = profiles.load(self.profiles)
        self.assertEqual({}, dict(found.bad))
        self.assertEqual(
            {'nlb': 1, 'two': 2}, {p.name: len(p.groups) for known
                                   in found.good.values() for p in known})
        # and again, where nothing is to be done
        self.assertEqual((0, '', ''), self.run_import(answer, '--write'))

    def test_against_what_exists(self):
        self.run_import(self.answer(nlb=[GROUP]), '--write')
        _, diff, _ = self.run_import(self.answer(nlb=[
            {**GROUP, 'resources:FPGA': '2'}]))
        self.assertIn("-- resources:FPGA: '1'\n+- resources:FPGA: '2'", diff)

    def test_what_cannot_be_carried_over(self):
        status, diff, errors = self.run_import(self.answer(**{
            'good': [GROUP], '../evil': [GROUP], 'none': [],
            'other': [{**GROUP, 'accel:attached_to': 'x'}]}), '--write')
        self.assertEqual(1, status)
        self.assertEqual(['good.yaml'], os.listdir(self.profiles))
        self.assertNotIn('evil', diff)
        lines = errors.splitlines()
        self.assertEqual(3, len(lines))
        for line, text in zip(lines, ("'../evil' is not carried over",
                                      'groups', 'attached_to')):
            self.assertIn(text, line)
        self.assertNotIn(os.path.dirname(self.profiles), errors)

    def test_one_profile(self):
        for answer in ({'device_profile': {'name': 'a', 'groups': [GROUP]}},
                       {'name': 'a', 'groups': [GROUP]},
                       [{'name': 'a', 'groups': [GROUP]}]):
            self.assertIn('a.yaml', self.run_import(answer)[1])

    def test_what_is_no_answer(self):
        for text in ('{', '[]', 'null', '{"device_profiles": []}',
                     '{"error": 1}'):
            error = self.assertRaises(exception.ConfigurationError,
                                      self.run_import, text)
            self.assertIn('GET /v2/device_profiles', str(error))
            self.assertNotIn('\n', str(error))
