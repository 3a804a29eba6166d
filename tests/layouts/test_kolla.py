# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova.conf as the roles of Kolla-Ansible write it from what the page says.

KOLLA_ANSIBLE is a virtual environment with kolla-ansible and ansible-core, both
from PyPI; without it the test is skipped. The tasks are the roles' own, with
their templates and merge_configs. No container is made, and nothing is fetched.
"""

import json
import os
import pathlib
import shutil
import sys
import textwrap

import fixtures
import testtools
import yaml

from tests.layouts import base
from tests.unit import pages

#: of roles/nova and roles/nova-cell
TASKS = ('Ensuring config directories exist', 'Copying over nova.conf',
         'Copying over config.json files for services')
SERVICES = 'nova-compute', 'nova-scheduler'


class KollaTest(testtools.TestCase):

    LIMIT = base.LayoutTestCase.LIMIT

    def setUp(self):
        super().setUp()
        self.kolla = pathlib.Path(os.environ.get('KOLLA_ANSIBLE', ''))
        shipped = self.kolla / 'share' / 'kolla-ansible'
        if not shipped.is_dir():
            self.skipTest('KOLLA_ANSIBLE does not name a virtual environment')
        self.directory = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path)
        self.ansible = self.directory / 'ansible'
        shutil.copytree(shipped / 'ansible', self.ansible)
        with open(shipped / 'etc_examples/kolla/passwords.yml') as file:
            self.passwords = dict.fromkeys(yaml.safe_load(file), 'secret')
        self.installation = pages.Page(
            base.ROOT / 'docs' / 'source' / 'installation.rst')
        self.configs = self.directory / 'config' / 'nova'
        self.configs.mkdir(parents=True)

    def block(self, service):
        """What the page has for nova-<service>.conf of Kolla."""
        text = self.installation.text.partition('Kolla-Ansible\n===')[2]
        text = text.partition(f'/{service}.conf``')[2].partition('::\n\n')[2]
        lines = iter(text.splitlines())
        found = []
        for line in lines:
            if line and not line.startswith(' '):
                break
            found.append(line)
        return textwrap.dedent('\n'.join(found))

    def play(self):
        for role in 'nova', 'nova-cell':
            tasks = self.ansible / 'roles' / role / 'tasks'
            with open(tasks / 'config.yml') as file:
                kept = [task for task in yaml.safe_load(file)
                        if task['name'] in TASKS]
            self.assertEqual(len(TASKS), len(kept))
            (tasks / 'only.yml').write_text(yaml.safe_dump(kept))
        play = self.ansible / 'play.yml'
        play.write_text(yaml.safe_dump([{
            'hosts': 'localhost', 'tasks': [
                {'include_role': {'name': role, 'tasks_from': 'only.yml'}}
                for role in ('nova', 'nova-cell')]}]))
        variables = {
            **self.passwords, 'kolla_internal_vip_address': '127.0.0.1',
            # otherwise by a filter of a collection
            'kolla_same_external_internal_vip': True,
            'network_interface': 'lo', 'config_owner_user': 'root',
            'config_owner_group': 'root',
            'node_custom_config': str(self.directory / 'config'),
            'node_config_directory': str(self.directory / 'out'),
            'ansible_become': False,
            'ansible_python_interpreter': str(self.kolla / 'bin' / 'python')}
        done = base.run(
            self.kolla / 'bin' / 'ansible-playbook', '-i',
            self.ansible / 'inventory' / 'all-in-one', '-e',
            json.dumps(variables), play, env={
                **os.environ, 'ANSIBLE_NOCOLOR': '1',
                'PATH': f'{self.kolla}/bin:{os.environ["PATH"]}',
                **{f'ANSIBLE_{name}': str(self.ansible / directory)
                   for name, directory in (
                       ('LIBRARY', 'library'),
                       ('ACTION_PLUGINS', 'action_plugins'),
                       ('FILTER_PLUGINS', 'filter_plugins'),
                       ('MODULE_UTILS', 'module_utils'))}})
        self.assertEqual(0, done.returncode, done.stdout[-4000:])

    def check(self, service):
        """nova-accel check of what came out, which no service answers."""
        done = base.run(
            sys.executable, '-W', 'ignore', '-m', 'nova_accel.cmd.main',
            'check', '-f', 'json', '--service', service.partition('-')[2],
            '--config-file',
            self.directory / 'out' / service / 'nova.conf')
        begin = done.stdout.index('[\n')
        return {line['Check']: line['Result']
                for line in json.loads(done.stdout[begin:])}

    def test_page(self):
        for service in SERVICES:
            (self.configs / f'{service}.conf').write_text(self.block(service))
        self.play()
        compute, scheduler = (
            (self.directory / 'out' / service / 'nova.conf').read_text()
            for service in SERVICES)
        for line in ('compute_driver = accel.AccelLibvirtDriver',
                     'enabled_drivers = dfl', 'state_path = /var/lib/nova'):
            self.assertIn(f'\n{line}\n', compute)
        self.assertEqual(1, compute.count('compute_driver ='))
        # as a user who reads bitstreams
        section = compute.partition('[service_user]')[2].partition('[')[0]
        self.assertIn('username = nova\n', section)
        self.assertEqual(2, scheduler.count('available_filters ='))
        said = self.check('nova-scheduler')
        self.assertEqual(('ok', 'ok'), (said['filter'], said['weigher']))
        # a warning: this machine has no such card
        self.assertEqual('warning', self.check('nova-compute')['options'])
