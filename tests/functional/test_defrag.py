# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel defrag --do: Nova migrates what the plan says, and the room that
fits promised is there."""

import json

import fixtures

from nova_accel.cmd import defrag
from nova_accel.cmd import fits
from tests.functional import pools
from tests.unit import commands


class DefragTest(pools.PoolsTestBase):
    """Two hosts with four GPUs, and a server with one on each."""

    HOSTS = {name: {'gpus': pools.gpus(pools.GPUS[:4])}
             for name in ('compute1', 'compute2')}

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            # that of this process is the one of the cloud
            'nova_accel.cmd.configuration.read', lambda *arguments: None))
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.defrag._PAUSE', 0.1))
        self.become_operator()
        self.servers = {host: self.boot(pools.groups(1), host=host)
                        for host in self.HOSTS}
        self.flavor = self._create_flavor(
            name='four', extra_spec=pools.groups(4))
        self.addCleanup(self.api.delete_flavor, self.flavor)

    def run_command(self, *arguments):
        if '--group' not in arguments:
            arguments = '--for', 'four', *arguments
        done = commands.run('defrag', '-f', 'json', *arguments,
                            defrag=defrag.Defrag)
        return done.returncode, done.stdout, done.stderr

    def fitting(self):
        done = commands.run('fits', 'four', '-f', 'json', fits=fits.Fits)
        return json.loads(done.stdout)[0]['Servers']

    def test_carried_out(self):
        self.assertEqual(0, self.fitting())
        status, stdout, stderr = self.run_command()
        self.assertEqual(0, status, stderr)
        [planned] = json.loads(stdout)
        plan = stderr.split()[-1]
        status, stdout, stderr = self.run_command('--do', plan)
        self.assertEqual(0, status, stderr)
        self.assertEqual([{**planned, 'Result': 'done'}], json.loads(stdout))
        server = self.servers[planned['From']]
        self.assertEqual(planned['Server ID'], server['id'])
        self.assertEqual('ACTIVE', self.api.get_server(server['id'])['status'])
        self.assertEqual(planned['To'], self.host_of(server))
        self.assertServer(server, 1)
        self.assertEqual(1, self.fitting())
        self.boot(pools.groups(4))
        # what was shown before is no plan any more
        status, stdout, stderr = self.run_command('--do', plan)
        self.assertEqual((1, ''), (status, stdout))
        self.assertIn('nothing was moved', stderr)

    def test_server_group(self):
        """The members, which are in two racks, come together in one."""
        # all hosts of a test have one nova.conf
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.domains.Domains.look', lambda domains: None))
        for host, rack in zip(self.HOSTS, 'AB'):
            domains = self.parts(host).domains
            self.addCleanup(setattr, domains, 'found', domains.found)
            domains.found = {'rack': f'CUSTOM_NEAR_RACK_{rack}'}
        self.report()
        group = self.api.post_server_groups(
            {'name': 'job', 'policy': 'soft-affinity'})['id']
        members = {}
        for host in self.HOSTS:
            server = self._build_server(
                flavor_id=self.flavor_of(pools.groups(1)), networks='none',
                image_uuid=self.glance.guest_image, host=host)
            members[host] = self._wait_for_state_change(self.api.post_server({
                'server': server, 'os:scheduler_hints': {'group': group}}),
                'ACTIVE')
        arguments = '--group', group, '--near', 'rack'
        status, stdout, stderr = self.run_command(*arguments)
        self.assertEqual(0, status, stderr)
        [planned] = json.loads(stdout)
        self.assertIn(planned['Server ID'],
                      {server['id'] for server in members.values()})
        status, stdout, stderr = self.run_command(
            *arguments, '--do', stderr.split()[-1])
        self.assertEqual([{**planned, 'Result': 'done'}], json.loads(stdout))
        self.assertEqual({planned['To']},
                         set(map(self.host_of, members.values())))
        for server in members.values():
            self.assertServer(server, 1)

    def test_migration_that_fails(self):
        """Nova does not let it go there, and nothing more is begun."""
        _, _, stderr = self.run_command()
        plan = stderr.split()[-1]
        # of what only Nova knows
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.filters.compute_filter.ComputeFilter.host_passes',
            lambda *arguments: False))
        status, stdout, stderr = self.run_command('--do', plan)
        self.assertEqual(1, status)
        [row] = json.loads(stdout)
        server = self.servers[row['From']]
        self.assertIn('Nova was asked for the migration of server', stderr)
        self.assertIn('0 of 1 migrations are done, and no more are begun',
                      stderr)
        self.assertEqual(row['From'], self.host_of(server))
        self.assertServer(server, 1)

    def test_room_that_is_taken_meanwhile(self):
        """After the first of two migrations another server takes a GPU of the
        target: the second is not begun, and what is done is said."""
        for host in self.HOSTS:
            self.boot(pools.groups(1), host=host)
        _, stdout, stderr = self.run_command()
        first, second = json.loads(stdout)
        migrate = defrag._migrate

        def migrated(cloud, move, host):
            migrate(cloud, move, host)
            self.boot(pools.groups(1), host=host)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.defrag._migrate', migrated))
        status, stdout, stderr = self.run_command(
            '--do', stderr.split()[-1])
        self.assertEqual(1, status)
        results = [row['Result'] for row in json.loads(stdout)]
        self.assertEqual('done', results[0])
        self.assertIn('is not migrated, because it is not where it was, or the '
                      'room for it is taken', results[1])
        self.assertIn('1 of 2 migrations are done, and no more are begun',
                      stderr)
        server = self.api.get_server(second['Server ID'])
        self.assertEqual(second['From'], self.host_of(server))
