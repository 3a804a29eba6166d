# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Servers of a job that get hosts near each other, on a real Placement.

The hosts are Nova's fake ones, each of one job's server (eight GPUs); their
domains are reported as nova-compute does it. As in test_operations, a docstring
``<operation>: <what happens>`` is a row in docs/source/operations.rst.
"""

import functools
import itertools
from unittest import mock
import uuid

import fixtures
from nova import exception
from nova.scheduler.client import report
from nova.scheduler.filters import compute_filter
from nova.scheduler import utils
from nova.virt import fake

from nova_accel import naming
from nova_accel.scheduler import filters
from nova_accel.scheduler import unseen
from tests.functional.scheduler import (
    FPGA, GPU, OTHER, WANTED, SchedulerTestBase)

REQUIRED, PREFERRED = 'rack=required', 'rack=preferred'


class NearTestBase(SchedulerTestBase):

    def setUp(self):
        super().setUp()
        # a machine under load takes longer
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.scheduler.fault.LIMIT', 600))
        self.flags(instances=-1, group='quota')
        #: name of a host -> its traits
        self.near = {}
        resources = fake.FakeDriver.get_available_resource
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.fake.FakeDriver.get_available_resource',
            lambda driver, nodename: {
                **(found := resources(driver, nodename)), 'stats': {
                    **found['stats'], naming.NEAR_STATISTIC: ' '.join(
                        self.near.get(nodename, ()))}}))

    def racks(self, **racks):
        """Hosts with eight GPUs, <rack><number>.

        :param racks: how many.
        """
        for rack, count in racks.items():
            for number in range(count):
                self.near_host(f'{rack}{number}', rack)

    def near_host(self, name, rack, gpus=8, **where):
        trait = naming.near_trait('rack', rack, 'test')
        self.near[name] = [trait]
        self.host(name, gpus=gpus, **where)
        self.near_traits(name, rack)

    def near_traits(self, name, rack, *also):
        root = self._get_provider_uuid_by_host(name)
        traits = naming.near_trait('rack', rack, 'test'), *also
        for trait in traits:
            self.placement.put(f'/traits/{trait}', {}, version='1.6')
        self._set_provider_traits(root, [
            *self._get_provider_traits(root), *traits])

    @functools.cache
    def near_flavor(self, near, gpus=8):
        return self._create_flavor(
            vcpu=1, memory_mb=64, disk=1, extra_spec={
                f'resources1:{GPU}': str(gpus), 'accel:near': near,
                'accel:live_migration': 'detach'})

    def job(self, near, count, expected_state='ACTIVE', group=None, gpus=8):
        """Return the servers of one request."""
        return self.request(self.near_flavor(near, gpus), count,
                            expected_state, group)

    def one(self, near, group=None, **kwargs):
        return self.job(near, 1, group=group, **kwargs)[0]

    def group(self, policy='soft-anti-affinity'):
        return self.api.post_server_groups(
            {'name': 'job', 'policy': policy})['id']

    @staticmethod
    def hosts(servers):
        return sorted(server['OS-EXT-SRV-ATTR:host'] for server in servers)

    def racks_of(self, servers):
        return {host[0] for host in self.hosts(servers)}

    def fault(self, server):
        return self.api.get_server(server['id'])['fault']['message']


class NearTest(NearTestBase):
    """Two racks with room for three and four servers."""

    def test_steps(self):
        self.racks(a=3, b=4)
        for step in (
                self.step_one_request, self.step_no_domain_has_room,
                self.step_server_group, self.step_apart_within_a_rack,
                self.step_forced_host, self.step_build_fails,
                self.step_migrate, self.step_live_migration,
                self.step_unshelve, self.step_rebuild, self.step_alone,
                # the last one: hosts are down after it
                self.step_evacuate):
            with self.subTest(step.__name__):
                step()
                self.delete_all()

    def delete_all(self):
        for server in self.api.get_servers():
            self._delete_server(server)

    def step_one_request(self):
        """Create several at once (``min_count``), with ``accel:near``: all in
        the fullest domain that has room for all of them."""
        self.gets.clear()
        self.assertEqual({'a'}, self.racks_of(self.job(REQUIRED, 2)))
        # Nova's request, and no other one
        self.assertEqual(1, len(self.gets), self.gets)
        self.assertEqual({'b'}, self.racks_of(self.job(PREFERRED, 3)))
        self.assertEqual(1, len(self.racks_of(self.job(PREFERRED, 1))))

    def step_no_domain_has_room(self):
        """Create several at once (``min_count``), if ``accel:near`` requires a
        domain and no domain has room for all of them: all of them are in
        ERROR; the fault shows how many fit into the largest domain."""
        for server in self.job(REQUIRED, 5, 'ERROR'):
            self.assertIn('the largest free part of a rack has 4 of 5: ',
                          self.fault(server))
        self.assertIn(
            'accel:near requires the level rail, and no suitable host reports '
            'a domain of it', self.fault(self.one(
                'rail=required', expected_state='ERROR')))
        hosts = self.hosts(self.job(PREFERRED, 5))
        self.assertEqual('abbbb', ''.join(host[0] for host in hosts))

    def step_server_group(self):
        """Create in a server group, with ``accel:near``: in the domain of the
        other members, on another host if their hosts are full; in ERROR if a
        required domain has no room."""
        group = self.group()
        self.assertEqual({'a'}, self.racks_of(
            self.job(REQUIRED, 3, group=group)))
        self.gets.clear()
        late = self.one(REQUIRED, group, expected_state='ERROR')
        self.assertIn('CUSTOM_NEAR_RACK_A', self.gets[0])
        self.assertIn('the free part of rack CUSTOM_NEAR_RACK_A of the first '
                      'member has 0 of 1: ', self.fault(late))
        self._delete_server(late)
        # preferred: the next domain, and one question
        self.gets.clear()
        self.assertEqual({'b'}, self.racks_of([self.one(PREFERRED, group)]))
        self.assertEqual(1, len(self.gets), self.gets)
        # its members are in two domains now
        self.assertIn(
            'the members of the server group are not in one rack',
            self.fault(self.one(REQUIRED, group, expected_state='ERROR')))

    def step_apart_within_a_rack(self):
        """Create several at once (``min_count``), if another request takes the
        room of the required domain first: scheduled again, up to three times,
        in any domain with room for all of them."""
        # in this case the members are on hosts of their own
        claims, claim = [], utils.claim_resources

        def claimed(context, client, spec, server, *args, **kwargs):
            claims.append(server)
            # for the third server two hosts are left
            return len(claims) not in (3, 4) and claim(
                context, client, spec, server, *args, **kwargs)
        with mock.patch.object(utils, 'claim_resources', claimed):
            servers = self.job(REQUIRED, 4, group=self.group('anti-affinity'),
                               gpus=2)
        self.assertEqual(['b0', 'b1', 'b2', 'b3'], self.hosts(servers))
        self.assertEqual(8, len(claims))

    def step_forced_host(self):
        """Create on a host that the operator names (``--availability-zone
        nova:<host>``), or migration to such a host: ``accel:near`` is
        ignored."""
        group = self.group()
        first = self.one(REQUIRED, group)
        self.assertEqual({'a'}, self.racks_of([first]))
        server = self._build_server(
            flavor_id=self.near_flavor(REQUIRED), networks='none',
            az='nova:b1')
        server = self._wait_for_state_change(self.api.post_server({
            'server': server, 'os:scheduler_hints': {'group': group}}),
            'ACTIVE')
        self.assertEqual(['b1'], self.hosts([server]))
        self.api.post_server_action(first['id'], {'migrate': {'host': 'b2'}})
        self._wait_for_state_change(first, 'VERIFY_RESIZE')
        self.assertEqual({'b'}, self.rack_now(first))
        self._confirm_resize(first)

    def step_build_fails(self):
        """Create, if the first host fails and ``accel:near`` requires a
        domain: built on another host of the domain."""
        failed = []
        spawn = fake.FakeDriver.spawn

        def fail_once(driver, context, instance, *args, **kwargs):
            if not failed:
                failed.append(instance.host)
                raise exception.ComputeResourcesUnavailable(reason='test')
            return spawn(driver, context, instance, *args, **kwargs)
        with mock.patch.object(fake.FakeDriver, 'spawn', fail_once):
            servers = self.job(REQUIRED, 2)
        self.assertEqual({'a'}, self.racks_of(servers))
        self.assertEqual(['a'], [host[0] for host in failed])

    # Operations that schedule again

    def group_of_two(self):
        """Two members in rack a, of which one host is left."""
        return self.job(REQUIRED, 2, group=self.group())

    def rack_now(self, server):
        return self.racks_of([self.api.get_server(server['id'])])

    def step_migrate(self):
        """Cold migration and resize in a server group, with ``accel:near``:
        within the required domain of the other members; refused if this domain
        has no room."""
        first, _ = self.group_of_two()
        self._migrate_server(first)
        self._confirm_resize(first)
        self.assertEqual({'a'}, self.rack_now(first))
        self._resize_server(first, self.near_flavor('rack = required'))
        self.assertEqual({'a'}, self.rack_now(first))
        self._confirm_resize(first)
        # now rack a is full
        self.assertEqual({'a'}, self.racks_of([self.one(REQUIRED)]))
        self.api.post_server_action(first['id'], {'migrate': None})
        self._wait_for_server_parameter(
            first, {'status': 'ACTIVE', 'OS-EXT-STS:task_state': None})
        self.assertEqual({'a'}, self.rack_now(first))

    def step_alone(self):
        """Cold migration of the only member of a server group: to any
        domain."""
        server = self.one(REQUIRED, self.group())
        others = self.job(REQUIRED, 2)
        self.assertEqual({'a'}, self.racks_of([server, *others]))
        self._migrate_server(server)
        self.assertEqual({'b'}, self.rack_now(server))
        self._confirm_resize(server)

    def step_live_migration(self):
        """Live migration in a server group, with ``accel:near``: as cold
        migration."""
        first, _ = self.group_of_two()
        self._live_migrate(first)
        self.assertEqual({'a'}, self.rack_now(first))

    def step_unshelve(self):
        """Unshelve in a server group, with ``accel:near``: in the domain of
        the other members."""
        first, _ = self.group_of_two()
        self._shelve_server(first)
        self._unshelve_server(first)
        self.assertEqual({'a'}, self.rack_now(first))

    def step_rebuild(self):
        """Rebuild, with ``accel:near``: on its host, even if this host is now
        in another domain."""
        first, _ = self.group_of_two()
        self._rebuild_server(first, '155d900f-4e14-4e4c-a73d-069cbf4541e6')
        self.assertEqual(self.hosts([first]), self.hosts([
            self.api.get_server(first['id'])]))

    def down(self, server):
        host, = self.hosts([self.api.get_server(server['id'])])
        self.computes[host].stop()
        service, = self.api.get_services(host=host, binary='nova-compute')
        self.api.put_service(service['id'], {'forced_down': True})

    def step_evacuate(self):
        """Evacuation in a server group, with ``accel:near``: in the required
        domain of the members whose hosts are up. If a whole rack is down, the
        first member may move to any other rack, and the others follow."""
        first, second = self.group_of_two()
        self.down(first)
        self._evacuate_server(first)
        self.assertEqual({'a'}, self.rack_now(first))
        self.down(first)
        self.down(second)
        for server in second, first:
            self._evacuate_server(server)
            self.assertEqual({'b'}, self.rack_now(server))


class CellsTest(NearTestBase):

    NUMBER_OF_CELLS = 2

    def test_members_in_another_cell(self):
        # the rack is in one cell, as the full host of the first member
        for name, cell in (('a0', 'cell2'), ('a1', 'cell2'), ('b0', 'cell1'),
                           ('b1', 'cell1'), ('b2', 'cell1')):
            self.near_host(name, name[0], cell_name=cell)
        group = self.group()
        self.one(REQUIRED, group)
        self.assertEqual({'a'}, self.racks_of([self.one(REQUIRED, group)]))


class CutTest(NearTestBase):

    def test_answer_is_cut_off(self):
        # it lacks one of the hosts
        self.flags(max_placement_results=8, group='scheduler')
        self.racks(a=2, b=4, c=3)
        self.gets.clear()
        self.assertEqual({'c'}, self.racks_of(self.job(REQUIRED, 3)))
        # Nova's question, and one for some domains
        self.assertEqual(2, len(self.gets), self.gets)
        self.assertIn('CUSTOM_NEAR_RACK', self.gets[1])

    def test_filters_drop_hosts_of_the_domain(self):
        # Nova gets the hosts of one domain, and then all hosts
        self.flags(max_placement_results=8, group='scheduler')
        self.racks(a=3, b=3, c=3)
        passes, seen = compute_filter.ComputeFilter.host_passes, []

        def dropped(filter_, host, spec):
            seen.append(host.host)
            return host.host[0] not in self.gets[-1].partition(
                'CUSTOM_NEAR_RACK_')[2][:1].lower() and passes(
                    filter_, host, spec)
        for near in REQUIRED, PREFERRED:
            with mock.patch.object(unseen, '_DOMAINS', (1,)), (
                    mock.patch.object(compute_filter.ComputeFilter,
                                      'host_passes', dropped)):
                self.gets.clear()
                seen.clear()
                servers = self.job(near, 2)
            self.assertEqual(2, len(self.gets), self.gets)
            asked, = {host[0] for host in seen[:3]}
            self.assertEqual(1, len(self.racks_of(servers) - {asked}))
            self.assertTrue(len(seen) > 8, seen)
            for server in servers:
                self._delete_server(server)

    def cut(self, kept):
        """Placement's first answer has only some hosts.

        :param kept: function that returns whether it has a host.
        """
        answer = report.SchedulerReportClient.get_allocation_candidates

        def some(client, context, resources):
            requests, summaries, version = answer(client, context, resources)
            roots = {self._get_provider_uuid_by_host(name)
                     for name in self.near if kept(name)}
            requests = [one for one in requests
                        if roots & one['allocations'].keys()]
            self.flags(max_placement_results=len(requests), group='scheduler')
            return requests, {
                provider: summary for provider, summary in summaries.items()
                if summary['root_provider_uuid'] in roots}, version
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.client.report.SchedulerReportClient.'
            'get_allocation_candidates', some))

    def test_policy_of_the_group(self):
        # one host has room for all servers, which must not share it
        self.racks(**dict.fromkeys('abcdefghij', 1), x=3, y=3)
        self.cut(lambda name: name[1] in '01')
        servers = self.job(
            REQUIRED, 3, group=self.group('anti-affinity'), gpus=2)
        self.assertEqual(3, len(set(self.hosts(servers))))
        self.assertEqual(1, len(self.racks_of(servers)))

    def test_function_is_elsewhere(self):
        # no region of the answer can get the function
        for rack in 'abcdefghijz':
            name = f'{rack}0'
            self.near[name] = [naming.near_trait('rack', rack, 'test')]
            self.host(name, WANTED if rack == 'z' else OTHER)
            self.near_traits(name, rack)
            region = self.regions[f'{name}/0']
            self._set_provider_traits(region, [
                trait for trait in self._get_provider_traits(region)
                if trait != naming.PROGRAMMABLE])
        self.cut(lambda name: name != 'z0')
        for near in REQUIRED, PREFERRED:
            server, = self.request(self._create_flavor(
                vcpu=1, memory_mb=64, disk=1, extra_spec={
                    f'resources_A:{FPGA}': '1', 'accel_A:function_id': WANTED,
                    'accel:near': near}), 1)
            self.assertEqual(['z0'], self.hosts([server]))
            self._delete_server(server)

    def test_forbidden_trait(self):
        # Placement returns no candidate for two hosts of the rack
        self.racks(a=4, b=1)
        for name in 'a0', 'a1':
            self.near_traits(name, 'a', 'CUSTOM_A')
        self.flags(max_placement_results=2, group='scheduler')
        flavor = self._create_flavor(vcpu=1, memory_mb=64, disk=1, extra_spec={
            f'resources1:{GPU}': '8', 'trait:CUSTOM_A': 'forbidden',
            'accel:near': REQUIRED})
        self.gets.clear()
        self.assertEqual(['a2', 'a3'], self.hosts(self.request(flavor, 2)))
        self.assertEqual(2, len(self.gets), self.gets)

    def test_one_group_less(self):
        # Placement has the same candidates for both questions
        for name, function in (('a0', WANTED), ('a1', OTHER), ('b0', None),
                               ('c0', WANTED)):
            self.host(name, function, OTHER, gpus=4)
            self.near_traits(name, name[0], *['CUSTOM_A'] * (name < 'b'))
        self._set_provider_traits(self.regions['b0/1'], ['CUSTOM_A'])
        zone, storage = str(uuid.uuid4()), str(uuid.uuid4())
        shared = self._post_resource_provider('storage')['uuid']
        self._set_inventory(shared, {'resource_class': 'DISK_GB',
                                     'total': 100})
        self._set_provider_traits(shared, ['MISC_SHARES_VIA_AGGREGATE'])
        roots = [self._get_provider_uuid_by_host(name)
                 for name in ('a0', 'a1', 'b0')]
        for provider, aggregates in ((shared, [zone, storage]),
                                     (roots[0], [zone, storage]),
                                     (roots[1], [storage]),
                                     (roots[2], [zone, storage])):
            self.placement.put(
                f'/resource_providers/{provider}/aggregates',
                {'aggregates': aggregates, 'resource_provider_generation': (
                    self._get_resource_provider_by_uuid(
                        provider)['generation'])}, version='1.19')
        wanted = naming.function_trait(WANTED)
        counts = set()
        for extra in itertools.product(
                ((), ('required', 'CUSTOM_A'), ('required', '!CUSTOM_A')),
                ((), ('required1', f'in:{wanted}'), ('required1', '!CUSTOM_A'),
                 ('required1', 'CUSTOM_A')),
                ((), ('member_of', zone)),
                ((), ('root_required', 'CUSTOM_A'))):
            query = [('resources', 'VCPU:1,DISK_GB:1'),
                     ('resources1', f'{FPGA}:1'), *filter(None, extra)]
            domains = [naming.near_trait('rack', rack, 'test')
                       for rack in 'ab']
            found = self.candidates(query, domains)
            with mock.patch.object(unseen.placement, 'merged',
                                   lambda query: None):
                self.assertEqual(self.candidates(query, domains), found)
            counts.add(len(found))
        self.assertTrue({0, 2, 4, 12} <= counts, counts)

    @staticmethod
    def candidates(query, domains):
        return sorted(str((sorted(
            (provider, sorted(given['resources'].items()))
            for provider, given in candidate['allocations'].items()),
            sorted((suffix, sorted(listed)) for suffix, listed
                   in candidate['mappings'].items())))
            for candidate in unseen._of_domains(filters._get, query, domains)[
                'allocation_requests'])
