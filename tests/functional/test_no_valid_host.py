# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the owner of a server reads whose accelerators no host has."""

import threading

import fixtures
from keystoneauth1 import exceptions as ks_exc
from nova import policy
from nova.scheduler.client import report
from oslo_policy import policy as oslo_policy

from nova_accel import naming
from tests.functional import base
from tests.functional import process

NO_HOST = 'No valid host was found. '
NONE = f'{NO_HOST}Accelerators: no host for this server '
LATER = 'try again later, or choose another flavor.'
DETAILS = 'os_compute_api:os-instance-actions:events:details'


def function(group, uuid):
    """Extra specs of a group that wants a loaded function."""
    return {**base.fpga_flavor(group), 'group_policy': 'none',
            f'trait{group}:{naming.function_trait(uuid)}': 'required'}


class NoValidHostTest(base.AcceleratorTestBase):
    """compute1 carries NLB0 and compute2 NLB3, each on its only region."""

    def setUp(self):
        super().setUp()
        self.limit(600)

    def limit(self, seconds):
        # a machine under load takes longer, and no test fails for that
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.scheduler.fault.LIMIT', seconds))

    def refused(self, specs, **kwargs):
        """The fault of a server of a flavor."""
        server = self.boot(specs, expected_state='ERROR', **kwargs)
        return self.fault(server)

    def test_all_are_taken(self):
        for _ in self.HOSTS:
            self.boot(base.fpga_flavor())
        for specs in (base.fpga_flavor(), function('1', base.NLB3)):
            self.assertEqual(f'{NONE}has a free FPGA: {LATER}',
                             self.refused(specs))

    def test_only_the_hosts_to_which_it_may_go(self):
        self.boot(base.fpga_flavor(), host='compute1')
        self.assertEqual(f'{NONE}has a free FPGA: {LATER}',
                         self.refused(base.fpga_flavor(), host='compute1'))

    def test_rest_of_the_flavor(self):
        flavor = self._create_flavor(
            disk=10 ** 6, extra_spec=base.fpga_flavor())
        server = self._create_server(
            flavor_id=flavor, networks='none', expected_state='ERROR',
            image_uuid=self.glance.guest_image)
        self.assertEqual(
            f'{NO_HOST}Accelerators: a host has them free, but it is out of '
            f'service, or lacks something else that the server asks for '
            f'(processors, memory, disk, zone, networks): {LATER}',
            self.fault(server))

    def test_several_servers(self):
        body = self._build_server(
            flavor_id=self._create_flavor(extra_spec=base.fpga_flavor()),
            networks='none', image_uuid=self.glance.guest_image)
        body.update(min_count=3, max_count=3, return_reservation_id=True)
        reservation = self.api.post_server({'server': body})['reservation_id']
        servers = self.api.get_servers(
            search_opts={'reservation_id': reservation})
        self.assertEqual(3, len(servers))
        for server in servers:
            server = self._wait_for_state_change(server, 'ERROR')
            self.assertEqual(
                f'{NO_HOST}Accelerators: a host has those of one server free, '
                f'and not all 3 servers of the request find a host: request '
                f'fewer at a time.', self.fault(server))

    def test_without_accelerators(self):
        flavor = self._create_flavor(disk=10 ** 6)
        urls = self.watched()
        server = self._create_server(
            flavor_id=flavor, networks='none', expected_state='ERROR',
            image_uuid=self.glance.guest_image)
        self.assertEqual(NO_HOST, self.fault(server))
        self.assertEqual(1, len(urls), urls)

    def watched(self, answer=None):
        """The questions for candidates and for what is free, from here on.

        :param answer: called in place of Placement from the second on.
        """
        get, urls = report.SchedulerReportClient.get, []

        def watching(client, url, *args, **kwargs):
            if url.startswith(('/allocation_candidates?',
                               '/resource_providers?resources=')):
                urls.append(url)
                if answer and len(urls) > 1:
                    return answer()
            return get(client, url, *args, **kwargs)
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.client.report.SchedulerReportClient.get',
            watching))
        return urls

    def test_nothing_more_is_asked_where_a_host_is_found(self):
        urls = self.watched()
        self.boot(base.fpga_flavor())
        self.assertEqual(1, len(urls), urls)

    def test_placement_does_not_answer(self):
        def dead():
            raise ks_exc.ConnectFailure('no route to host')
        urls = self.watched(dead)
        self.assertEqual(
            NO_HOST, self.refused(function('1', base.CRYPTO)))
        self.assertEqual(2, len(urls), urls)

    def test_placement_hangs(self):
        answered, threads = threading.Event(), []

        def hang():
            threads.append(threading.current_thread())
            answered.wait()
            raise ks_exc.ConnectFailure('no answer in time')
        self.watched(hang)
        self.addCleanup(lambda: [t.join() for t in threads])
        self.addCleanup(answered.set)
        self.limit(0.1)
        self.assertEqual(
            NO_HOST, self.refused(function('1', base.CRYPTO)))
        self.assertIn('Placement did not answer within 0.1 seconds',
                      self.stdlog.logger.output)

    def test_unshelve(self):
        """The server stays as it was, without a fault. The action event of
        the scheduling has the sentence: for the operator, and for the owner
        where the operator's policy lets him see it."""
        server = self.boot(base.fpga_flavor(), host='compute1')
        self._shelve_server(server)
        for host in self.HOSTS:
            self.boot(base.fpga_flavor(), host=host)
        self.api.post_server_action(server['id'], {'unshelve': None})
        told = f'{NONE}has a free FPGA: {LATER}'
        self.assertEqual(told, process.until(
            lambda: self.details(self.admin_api, server)))
        owner = self.api_fixture.api
        shown = owner.get_server(server['id'])
        self.assertEqual('SHELVED_OFFLOADED', shown['status'])
        self.assertNotIn('fault', shown)
        self.assertIsNone(self.details(owner, server, None))
        before = policy.get_rules()[DETAILS]
        self.addCleanup(policy.set_rules, {DETAILS: before}, overwrite=False)
        policy.set_rules(oslo_policy.Rules.from_dict(
            {DETAILS: 'role:admin or project_id:%(project_id)s'}),
            overwrite=False)
        self.assertEqual(told, self.details(owner, server))

    def details(self, api, server, *default):
        """openstack --os-compute-api-version 2.84 server event show"""
        before, api.microversion = api.microversion, '2.84'
        try:
            action = api.get_instance_actions(server['id'])[0]
            self.assertEqual('unshelve', action['action'])
            events = {
                event['event']: event for event
                in api.get_instance_action_details(
                    server['id'], action['request_id'])['events']}
        finally:
            api.microversion = before
        # an event may be seen before it has begun, or ended
        self.assertIn('schedule_instances', events)
        event = events['schedule_instances']
        self.assertEqual('Error', event['result'])
        return event.get('details', *default) if default else event['details']

    def test_operations(self):
        """Nova shows the fault of a server in ERROR only; the operator finds
        it in the log of nova-scheduler."""
        server = self.boot(base.fpga_flavor(), host='compute1')
        other = self.boot(base.fpga_flavor(), host='compute2')
        told = (f'No host for server {server["id"]}: Accelerators: no host '
                f'for this server has a free FPGA: {LATER}')
        flavor = self._create_flavor(extra_spec=function('1', base.NLB3))
        self.api.post_server_action(
            server['id'], {'resize': {'flavorRef': flavor}})
        event = self._wait_for_action_fail_completion(
            server, 'resize', 'conductor_migrate_server')
        # nova-conductor puts its own words there
        self.assertEqual(f'{NO_HOST}No valid host found for resize',
                         event['details'])
        self.assertIn(told, self.stdlog.logger.output)
        self.computes['compute1'].stop()
        service = self.admin_api.get_services(
            host='compute1', binary='nova-compute')[0]['id']
        self.admin_api.put_service(service, {'forced_down': 'true'})
        self._evacuate_server(
            server, expected_state='ERROR', expected_host='compute1',
            expected_task_state=None, expected_migration_status='error')
        self.assertIn(f'{NONE}has a free FPGA', self.fault(server))
        self.assertNotIn(other['id'], self.fault(server))
