# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova's scheduler with our filter and weigher, on a real Placement.

The hosts are Nova's fake ones; their regions are put into Placement by hand.
"""

import uuid

import fixtures
from nova.scheduler import manager
from nova.scheduler import utils

from nova_accel import naming
from nova_accel.scheduler import filters
from tests.functional.scheduler import (
    FPGA, OTHER, SchedulerTestBase, THIRD, WANTED)


class SchedulerTest(SchedulerTestBase):

    def test_burst(self):
        """A function that comes to regions while servers are created."""
        self.host('host1', None, None, OTHER, OTHER)
        self.host('host2', OTHER, OTHER, THIRD, THIRD)
        self.fill('host2')
        # no card has the function: Nova's request, and no other one
        self.gets.clear()
        first = self.boot(WANTED)
        self.assertEqual(1, len(self.gets), self.gets)
        self.program(first[0], WANTED)
        for region in ('host2/0', 'host2/3'):
            self.program(region, WANTED)
        self.assertEqual([['host2/0'], ['host2/3']],
                         sorted(self.boot(WANTED) for _ in range(2)))

    def test_function_that_placement_cuts_off(self):
        self.flags(max_placement_results=1, group='scheduler')
        self.host('host1', OTHER, WANTED, None, THIRD)
        self.host('host2', THIRD, None, WANTED, None)
        self.assertEqual([['host1/1'], ['host2/2']],
                         sorted(self.boot(WANTED) for _ in range(2)))
        # of two groups those of the host that has both
        self.host('host3', OTHER, WANTED, None, None)
        self.assertEqual(['host3/0', 'host3/1'], self.boot(OTHER, WANTED))
        # with what is not there, Nova's answer stays: one question more
        self.gets.clear()
        self.assertEqual(1, len(self.boot(WANTED)))
        self.assertEqual(2, len(self.gets), self.gets)

    def test_hosts_that_share_their_disk(self):
        """The provider of disk is in none of their trees."""
        self.flags(max_placement_results=1, group='scheduler')
        self.host('host1', OTHER, WANTED, None, THIRD)
        self.host('host2', THIRD, None, WANTED, None)
        shared = self.placement.post(
            '/resource_providers', version='1.20', body={'name': 'nfs'}
        ).body['uuid']
        self._set_inventory(shared, {
            'resource_class': 'DISK_GB', 'total': 1000})
        self._set_provider_traits(shared, ['MISC_SHARES_VIA_AGGREGATE'])
        aggregate = str(uuid.uuid4())
        self._set_aggregate(shared, aggregate)
        for host in 'host1', 'host2':
            root = self._get_provider_uuid_by_host(host)
            self.placement.delete(
                f'/resource_providers/{root}/inventories/DISK_GB')
            self._set_aggregate(root, aggregate)
        server = self._create_server(
            flavor_id=self.flavor(WANTED), networks='none')
        self.assertIn(self.regions_of(server), (['host1/1'], ['host2/2']))
        self.assertIn(shared, self._get_allocations_by_server_uuid(
            server['id']))

    def test_best_of_a_forced_host(self):
        self.host('host1', OTHER, None, WANTED, OTHER, WANTED)
        for _ in range(2):
            server = self._create_server(
                flavor_id=self.flavor(WANTED), networks='none',
                az='nova:host1')
            self.assertIn(self.regions_of(server)[0], ('host1/2', 'host1/4'))

    def test_functions_and_devices(self):
        """The host whose regions carry it, then the one that is fullest,
        whatever Nova's own weighers like."""
        self.host('host1', WANTED, WANTED, WANTED, None, gpus=8)
        self.host('host2', WANTED, WANTED, WANTED, WANTED, gpus=8)
        self.host('host3', None, None, None, None, gpus=2)
        self.boot(gpus=4, az='nova:host2')
        self.fill('host2')
        chosen = self.selections()
        self.assertEqual('host2', self.host_of(self.boot(WANTED, gpus=1)))
        # one of each host, the best one first
        self.assertEqual(['host2', 'host1', 'host3'], chosen[-1])
        self.assertEqual({'host2'}, {
            self.host_of(got)
            for got in self.boot_many(2, WANTED, gpus=1)})
        group = self.api.post_server_groups(
            {'name': 'apart', 'policy': 'anti-affinity'})
        self.assertEqual(['host1', 'host2'], [
            self.host_of(got) for got in self.boot_many(
                2, WANTED, gpus=1, group=group['id'])])
        # no GPU is left there, and a function on one host more
        self.assertEqual(['host1', 'host1', 'host3'], [
            self.host_of(self.boot(WANTED, gpus=1)) for _ in range(3)])

    def test_devices_and_none(self):
        """Servers without accelerators are kept from what is free."""
        self.host('host1', gpus=8)
        self.host('host2', gpus=8)
        self._start_compute('host3')
        self.fill('host3')
        for _ in range(2):
            server = self._create_server(flavor_id=self._create_flavor(
                vcpu=1, memory_mb=64, disk=1), networks='none')
            self.assertEqual('host3', server['OS-EXT-SRV-ATTR:host'])
        first = self.host_of(self.boot(gpus=2))
        self.assertEqual([first] * 3, [
            self.host_of(self.boot(gpus=2)) for _ in range(3)])

    def host_of(self, providers):
        host, = {name.split('/')[0] for name in providers}
        return host

    def selections(self):
        """The hosts that are selected for each server from now on, with the
        alternates."""
        found = []
        select = manager.SchedulerManager._select_destinations

        def selected(*args, **kwargs):
            result = select(*args, **kwargs)
            found.extend([one.service_host for one in listed]
                         for listed in result)
            return result
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.manager.SchedulerManager._select_destinations',
            selected))
        return found

    # Several servers in one request

    def test_many_servers_fill_all_hosts(self):
        self.host('host1', WANTED, WANTED)
        self.host('host2', None, WANTED, OTHER)
        self.gets.clear()
        self.assertEqual([['host1/0'], ['host1/1'], ['host2/0'], ['host2/1'],
                          ['host2/2']], self.boot_many(5, WANTED))
        # as many as for one
        self.assertEqual(1, len(self.gets), self.gets)

    def lose_first_claim(self):
        """Another server takes the region of the first claim just before it.

        :returns: list that gets the UUID of that region.
        """
        claim = utils.claim_resources
        stolen = []

        def claim_late(context, client, spec, instance, candidate, **kwargs):
            if not stolen:
                stolen.extend(set(candidate['allocations'])
                              & set(self.regions.values()))
                self.placement.put(f'/allocations/{uuid.uuid4()}', {
                    'allocations': {
                        stolen[0]: {'resources': {FPGA: 1}}},
                    'project_id': 'p', 'user_id': 'u',
                    'consumer_generation': None}, version='1.28')
            return claim(context, client, spec, instance, candidate, **kwargs)
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.utils.claim_resources', claim_late))
        return stolen

    def test_claim_lost_to_another_request(self):
        self.host('host1', WANTED, WANTED)
        self.host('host2', None)
        stolen = self.lose_first_claim()
        self.gets.clear()
        got = self.boot_many(2, WANTED)
        self.assertEqual(sorted([name] for name, rp in self.regions.items()
                                if rp not in stolen), got)
        self.assertEqual(2, len(got))
        # it is asked again of one host only
        self.assertEqual(2, len(self.gets), self.gets)
        self.assertIn('in_tree', self.gets[1])

    def test_claim_lost_and_taken_host_dropped(self):
        # the second server may not go to host2, and another filter says so
        # before that of nova_accel sees that it was taken
        self.host('host1', WANTED, WANTED)
        self.host('host2', None, None)
        stolen = self.lose_first_claim()
        group = self.api.post_server_groups(
            {'name': 'apart', 'policy': 'anti-affinity'})
        got = self.boot_many(2, WANTED, group=group['id'])
        self.assertEqual(1, len(stolen))
        self.assertEqual({'host1', 'host2'},
                         {region.split('/')[0] for region, in got})

    def test_candidate_dropped_by_another_filter(self):
        self.host('host1', WANTED, WANTED, WANTED)
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.filters.compute_filter.ComputeFilter.host_passes',
            drop_first))
        self.assertEqual(2, len({region for region, in self.boot_many(
            2, WANTED)}))

    def test_alternates_count_once(self):
        self.host('host1', WANTED, WANTED)
        self.host('host2', WANTED, WANTED)
        self.boot_many(2, WANTED)
        trait = naming.function_trait(WANTED)
        counts = filters.SCHEDULINGS._demand.counts([trait])
        self.assertEqual(2, round(counts[trait]))


def drop_first(self, host_state, spec_obj):
    """A filter that finds one of three candidates unfit."""
    if len(host_state.allocation_candidates) == 3:
        del host_state.allocation_candidates[0]
    return True


class CellsTest(SchedulerTestBase):
    """Hosts in several cells, of all of which Placement has one answer."""

    NUMBER_OF_CELLS = 2

    def test_function_that_placement_cuts_off(self):
        self.flags(max_placement_results=1, group='scheduler')
        for name, cell in (('host1', 'cell1'), ('host2', 'cell2')):
            self.host(name, OTHER, WANTED, None, THIRD, cell_name=cell)
        self.assertEqual([['host1/1'], ['host2/1']],
                         sorted(self.boot(WANTED) for _ in range(2)))
