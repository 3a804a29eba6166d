# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices that are alike share a provider: servers get one, some or all."""

from unittest import mock

from nova import exception as nova_exception
from nova import objects
from nova.scheduler.client import report

from tests.functional.pools import CLASS, gpus, GPUS, groups, PoolsTestBase


class PoolTest(PoolsTestBase):

    def test_all(self):
        for specs in (groups(8), {f'resources:{CLASS}': '8'}, groups(*[1] * 8),
                      groups(4, 4), groups(5, 2, 1)):
            server = self.boot(specs)
            self.assertEqual(GPUS, self.assertServer(server, 8))
            self.assertEqual([(8, 0, 8)], self.counts())
            self._delete_server(server)
            self.assertEqual([(8, 0, 0)], self.counts())

    def test_resize_on_the_host(self):
        """Both selves of the server have devices of the same pool."""
        self.flags(allow_resize_to_same_host=True)
        server = self.boot(groups(2))
        before = self.assertServer(server, 2)
        flavor = self._create_flavor(extra_spec=groups(5))
        for end in (self._revert_resize, self._confirm_resize):
            self._resize_server(server, flavor)
            self.assertEqual([(8, 0, 7)], self.counts())
            self.assertEqual(5, len(self.hostdevs(server)))
            self.report()
            end(server)
            # at the next start of a server this decides which self is its own
            cloud = self.computes['compute1'].driver.cloud
            migration = max(objects.MigrationList.get_by_filters(
                cloud.admin_context(), {'instance_uuid': server['id']}),
                key=lambda migration: migration.id)
            self.assertIs(end == self._revert_resize,
                          cloud.is_reverted(migration.uuid))
            if end == self._revert_resize:
                self.assertEqual(before, self.assertServer(server, 2))
                self.assertEqual([(8, 0, 2)], self.counts())
        self.assertServer(server, 5)
        self.assertEqual([(8, 0, 5)], self.counts())
        self._delete_server(server)


class ConfirmFailsTest(PoolsTestBase):
    """Neutron does not answer: Nova deletes the allocation of the old self,
    sets the migration to error, and its log says that the server may be hard
    rebooted. The old self is released at the next move at the latest: from
    then on the flavor does not tell that it must not come back."""

    HOSTS = {host: {'gpus': gpus()} for host in ('compute1', 'compute2')}

    def fail_to_confirm(self, server):
        has = self.hostdevs(server)
        with mock.patch('nova.network.neutron.API.setup_networks_on_host',
                        side_effect=nova_exception.PortNotFound(port_id='1')):
            self.api.post_server_action(server['id'], {'confirmResize': None})
            server = self._wait_for_state_change(server, 'ERROR')
        self._reboot_server(server, hard=True)
        self.assertEqual(has, self.hostdevs(server))

    def assertKeeps(self, server):
        """What it has after a move."""
        self._confirm_resize(server)
        has = self.assertServer(server, 2)
        self._reboot_server(server, hard=True)
        self.assertEqual(has, self.assertServer(server, 2))

    def test_on_the_host(self):
        self.flags(allow_resize_to_same_host=True)
        service, = self.admin_api.get_services(
            binary='nova-compute', host='compute2')
        self.admin_api.put_service(service['id'], {'status': 'disabled'})
        server = self.boot(groups(2))
        self._resize_server(
            server, self._create_flavor(extra_spec=groups(2)))
        self.fail_to_confirm(server)
        self._resize_server(server, self.flavor_of(groups(2)))
        self.assertKeeps(server)
        self.admin_api.put_service(service['id'], {'status': 'enabled'})

    def test_back_to_the_host(self):
        server = self.boot(groups(2))
        self._migrate_server(server)
        self.fail_to_confirm(server)
        self._migrate_server(server)
        self.assertKeeps(server)


class MovedTest(PoolsTestBase):
    """From one provider for each device to pools and back, while servers have
    devices."""

    HOSTS = {host: {'gpus': gpus()} for host in ('compute1', 'compute2')}
    POOLS = 'none'

    def pools(self, value, *hosts):
        """nova-compute starts with another [accel] pools."""
        self.flags(pools=value, group='accel')
        for host in hosts or self.HOSTS:
            self.restart_compute_service(host)

    def of(self, host):
        return sorted(value for name, value in self.amounts().items()
                      if name.startswith(f'{host}_'))

    def test_upgrade(self):
        one, two = self.boot(groups(1)), self.boot(groups(1, 1))
        moving = self.boot(groups(1))
        source = self.host_of(moving)
        self._migrate_server(moving)
        there = self.host_of(moving)
        before = {server['id']: self.hostdevs(server)
                  for server in (one, two, moving)}
        old = {c.handle.address: c.uuid for c in self.claims(source)}
        self.assertEqual([0, 1], sorted({u for *_, u in self.counts()}))

        self.pools('host')
        self.assertEqual(5, sum(used for *_, used in self.counts()))
        # Nova asks all hosts to report; the old providers go then
        self.report()
        for host in self.HOSTS:
            (total, reserved, used), = self.of(host)
            self.assertEqual((8, 0), (total, reserved))
            self.assertEqual(len(self.claims(host)), used)
        self.assertEqual(old, {c.handle.address: c.uuid
                               for c in self.claims(source)})
        for server, count in ((one, 1), (two, 2), (moving, 1)):
            self.assertEqual(before[server['id']],
                             self.assertServer(server, count))
            self._reboot_server(server, hard=True) if server != moving else 0
        self.assertEqual([there], [self.host_of(moving)])
        for compute in self.computes.values():
            compute.driver.parts.reconciler.run()
        self.assertEqual(5, len(self.claims()))
        self._confirm_resize(moving)
        self.assertEqual(4, len(self.claims()))
        self.assertEqual(4, sum(used for *_, used in self.counts()))

        # and one that moves over a change the other way
        self._migrate_server(moving)
        self.pools('none')
        self.report()
        self.assertEqual([1], sorted({t for t, *_ in self.counts()}))
        self.assertEqual(5, sum(used for *_, used in self.counts()))
        self._revert_resize(moving)
        self.assertEqual(before[moving['id']], self.assertServer(moving, 1))
        for server, count in ((one, 1), (two, 2)):
            self.assertEqual(before[server['id']],
                             self.assertServer(server, count))
        self.pools('numa_node')
        self.report()
        self.assertEqual([4] * 4, [t for t, *_ in self.counts()])
        for server, count in ((one, 1), (two, 2), (moving, 1)):
            self.assertEqual(before[server['id']],
                             self.assertServer(server, count))
            self._delete_server(server)
        self.assertEqual([(4, 0, 0)] * 4, self.counts())
        self.pools('none')
        self.report()
        self.assertEqual([(1, 0, 0)] * 16, self.counts())

    def test_placement_refuses(self):
        """Nothing has moved; with the old value nova-compute starts, and with
        the new one as soon as Placement takes it."""
        server = self.boot(groups(1))
        host, before = self.host_of(server), self.hostdevs(server)
        known = self.computes[host], self.compute_rp_uuids[host]
        post = report.SchedulerReportClient.post

        def too_much(client, url, data, *args, **kwargs):
            if url == '/reshaper':
                for consumer in data['allocations'].values():
                    for given in consumer['allocations'].values():
                        if CLASS in given['resources']:
                            given['resources'][CLASS] = 99
            return post(client, url, data, *args, **kwargs)
        with mock.patch.object(
                report.SchedulerReportClient, 'post', too_much):
            self.assertRaises(nova_exception.ReshapeFailed,
                              self.pools, 'host', host)
        self.assertRegex(
            self.stdlog.logger.output,
            'CRITICAL .* Allocations of servers must move to the providers '
            'that show their devices now, and Placement refused .*violate '
            'inventory constraints.*: nova-compute does not start before you')
        alone = [(1, 0, 0)] * 7 + [(1, 0, 1)]
        # the pool is there, with nothing in it
        self.assertEqual([(0, 0, 0), *alone], self.of(host))
        self.computes[host], self.compute_rp_uuids[host] = known
        self.pools('none', host)
        self.report()
        self.assertEqual(alone, self.of(host))
        self.assertEqual(before, self.assertServer(server, 1))
        self.pools('host', host)
        self.report()
        self.assertEqual([(8, 0, 1)], self.of(host))
        self.assertEqual(before, self.assertServer(server, 1))
        self._delete_server(server)
        self.pools('none', host)
        self.report()
        self.assertEqual([(1, 0, 0)] * 16, self.counts())
