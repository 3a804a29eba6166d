# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova's report client, wrapped, before a real Placement."""

import copy
import json
import time
import uuid

from keystoneauth1 import adapter
from keystoneauth1 import exceptions as ks_exceptions
from keystoneauth1 import session
from keystoneauth1 import token_endpoint
from nova import context
from nova import exception as nova_exception
from nova.scheduler.client import report
import testtools

from nova_accel.virt import report_client
from tests.unit import placement
from tests.unit import replaced

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
OPERATORS = 'CUSTOM_ROW_7'


class Client(report.SchedulerReportClient):
    """Counts what it asks Placement."""

    def __init__(self, url):
        super().__init__(adapter.Adapter(
            session.Session(auth=token_endpoint.Token(url, 'admin')),
            service_type='placement', endpoint_override=url,
            raise_exc=False))
        self.asked = []
        self.away = False

    def get(self, url, *args, **kwargs):
        self.asked.append(url)
        if self.away:
            raise ks_exceptions.ConnectFailure('Placement is away')
        return super().get(url, *args, **kwargs)

    def put(self, url, *args, **kwargs):
        self.asked.append(f'PUT {url}')
        return super().put(url, *args, **kwargs)


class ReportClientTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(replaced.Trees())
        self.services = self.useFixture(placement.Services())
        self.context = context.get_admin_context()
        self.root = self.services.provider('compute1', inventory={'VCPU': 8})
        self.cards = [self.services.provider(
            f'compute1_accel_0000:{number:02x}:00.0', self.root, {FPGA: 1},
            ['CUSTOM_CARD'])
            for number in range(4)]
        self.novas = self.client()
        self.ours = self.client()
        report_client.watch(self.ours)

    def client(self):
        client = Client(self.services.url)
        client._ensure_resource_provider(self.context, self.root)
        client.asked.clear()
        return client

    def allocate(self):
        server = str(uuid.uuid4())
        self.services.allocate(server, self.cards[0], **{FPGA: 1})
        self.services.allocate(str(uuid.uuid4()), self.root, VCPU=2)
        return server

    # What is allocated

    def allocations(self, client=None, node='compute1'):
        return (client or self.ours).get_allocations_for_provider_tree(
            self.context, node)

    def test_answer_is_novas(self):
        server = self.allocate()
        found = self.allocations()
        self.assertEqual([], self.ours.asked)
        self.assertEqual({self.cards[0]: {'resources': {FPGA: 1}}},
                         {provider: {'resources': given['resources']}
                          for provider, given in found[server][
                              'allocations'].items()})
        asked = self.ours.asked[:]
        self.assertEqual(self.allocations(self.novas), found)
        self.assertCountEqual(self.novas.asked, asked)
        self.assertEqual(asked, self.ours.asked)

    def test_placement_is_away(self):
        server = self.allocate()
        found = self.allocations()
        self.ours.away = True
        self.assertRaises(ks_exceptions.ConnectFailure, found.get, server)
        self.assertRaises(ks_exceptions.ConnectFailure, copy.deepcopy, found)
        self.ours.away = False
        self.assertIn(server, found)

    def test_no_such_host(self):
        for client in (self.novas, self.ours):
            self.assertRaises(ValueError, self.allocations, client, 'other')

    def test_host_without_providers_of_ours(self):
        root = self.services.provider('compute2', inventory={'VCPU': 8})
        self.services.provider('compute2_0000:81:00.0', root, {'PGPU': 1})
        self.ours._ensure_resource_provider(self.context, root)
        self.assertIs(dict, type(self.allocations(node='compute2')))

    # Nova's copy of the providers

    def ensure(self, client):
        """What it asks when all of its copy is old, and the copy then."""
        client._association_refresh_time = {
            name: time.time() - 1000
            for name in client._association_refresh_time}
        client.asked.clear()
        client._ensure_resource_provider(self.context, self.root)
        return len(client.asked), self.copy_of(client)

    @staticmethod
    def copy_of(client):
        tree = client._provider_tree
        return {provider: tree.data(provider)
                for provider in tree.get_provider_uuids()}

    def check(self, requests):
        """Both clients know the same; the wrapped one asks so often."""
        asked, known = self.ensure(self.ours)
        novas, wanted = self.ensure(self.novas)
        self.assertEqual(wanted, known)
        self.assertEqual(requests, asked)
        # until it is old again
        self.ours.asked.clear()
        self.ours._ensure_resource_provider(self.context, self.root)
        self.assertEqual([], self.ours.asked)
        return novas

    def test_nothing_has_changed(self):
        # the tree, and three of the host
        self.assertEqual(1 + 3 * 5, self.check(1 + 3))
        self.check(1 + 3)

    def test_allocated(self):
        self.allocate()
        self.check(1 + 3 + 3)

    def test_trait_of_the_operator(self):
        self.services._put(f'/traits/{OPERATORS}', None)
        self.services._put(f'/resource_providers/{self.cards[2]}/traits', {
            'resource_provider_generation': 2,
            'traits': [OPERATORS, 'CUSTOM_CARD']})
        self.check(1 + 3 + 3)
        self.assertEqual(
            {OPERATORS, 'CUSTOM_CARD'},
            self.copy_of(self.ours)[self.cards[2]].traits)

    def test_aggregate_of_the_operator(self):
        aggregate = str(uuid.uuid4())
        self.services._put(f'/resource_providers/{self.cards[2]}/aggregates', {
            'resource_provider_generation': 2, 'aggregates': [aggregate]})
        # and who shares with the aggregate
        self.check(1 + 3 + 3 + 1)
        self.assertEqual({aggregate}, self.copy_of(self.ours)[
            self.cards[2]].aggregates)

    def test_reserved_by_the_operator(self):
        self.services._put(f'/resource_providers/{self.cards[2]}/inventories', {
            'resource_provider_generation': 2,
            'inventories': {FPGA: {'total': 1, 'reserved': 1}}})
        self.check(1 + 3 + 3)

    def test_provider_of_another_program(self):
        self.services.provider('compute1_0000:81:00.0', self.root,
                               {'PGPU': 1})
        # Nova reads the whole tree
        self.check(1 + 1 + 3 * 6)
        # what it has may change without its generation
        self.check(1 + 3 + 3)

    def test_provider_is_deleted(self):
        self.ours.delete(f'/resource_providers/{self.cards[3]}')
        self.check(1 + 1 + 3 * 4)
        self.assertNotIn(self.cards[3], self.copy_of(self.ours))

    def test_placement_is_away_then(self):
        before = self.copy_of(self.ours)
        for client in (self.novas, self.ours):
            client.away = True
            self.assertRaises(ks_exceptions.ConnectFailure, self.ensure,
                              client)
            self.assertEqual(before, self.copy_of(client))
            client.away = False
        self.check(1 + 3)

    def test_one_is_old(self):
        """Nova has not read it for its inventory yet."""
        for client in (self.ours, self.novas):
            client._association_refresh_time[self.cards[2]] = (
                time.time() - 1000)
            client._ensure_resource_provider(self.context, self.root)
            self.assertEqual(3, len(client.asked))
        for client in (self.ours, self.novas):
            del client._association_refresh_time[self.cards[3]]
            client._ensure_resource_provider(self.context, self.root)
            self.assertEqual(3 + 3, len(client.asked))

    # What is written

    def report(self, change, client=None):
        """What a client asks where a report changes its copy of a tree."""
        client = client or self.ours
        tree = client.get_provider_tree_and_ensure_root(
            self.context, self.root)
        change(tree)
        client.asked.clear()
        client.update_from_provider_tree(self.context, tree)
        self.assertEqual(*(sorted(
            (data.name, data.traits, data.aggregates,
             *[item['total'] for item in data.inventory.values()])
            for data in found) for found in (
                map(tree.data, tree.get_provider_uuids()),
                self.copy_of(client).values())))
        return client.asked[:]

    def check_written(self, change, back):
        """Both write the same.

        :param back: undoes the change.
        """
        asked = self.report(change)
        self.report(back)
        self.novas.clear_provider_cache()
        self.assertEqual(self.report(change, self.novas), asked)
        return [url for url in asked if url.startswith('PUT /resource_prov')]

    def test_nothing_is_written(self):
        compared = []
        self.patch(self.ours, 'set_inventory_for_provider',
                   lambda *args: compared.append(args))
        self.assertEqual([], self.report(lambda tree: None))
        self.assertEqual([], compared)

    def test_what_has_changed_is_written(self):
        def change(tree):
            tree.update_inventory(self.root, {'VCPU': {'total': 4}})
            tree.update_traits(self.cards[1], [])
            tree.update_aggregates(self.cards[2], [self.root])

        def back(tree):
            tree.update_inventory(self.root, {'VCPU': {'total': 8}})
            tree.update_traits(self.cards[1], ['CUSTOM_CARD'])
            tree.update_aggregates(self.cards[2], [])
        self.assertEqual(3, len(self.check_written(change, back)))

    def test_providers_come_and_go(self):
        new = str(uuid.uuid4())

        def change(tree):
            tree.remove(self.cards[1])
            tree.new_child('compute1_accel_0000:81:00.0', self.root, new)
            tree.update_inventory(new, {FPGA: {'total': 2}})

        def back(tree):
            tree.remove(new)
            tree.new_child('compute1_accel_0000:01:00.0', self.root,
                           self.cards[1])
        self.assertEqual(1, len(self.check_written(change, back)))

    def test_written_by_another(self):
        """Nova makes the report again."""
        def change(tree):
            self.services._put(
                f'/resource_providers/{self.cards[1]}/traits',
                {'resource_provider_generation': 2, 'traits': []})
            tree.update_inventory(self.cards[1], {FPGA: {'total': 2}})
        self.assertRaises(nova_exception.ResourceProviderUpdateConflict,
                          self.report, change)
        self.assertFalse(self.ours._provider_tree.exists(self.root))

    def test_reshape(self):
        """Nova reads all that it has written by another request."""
        tree = self.ours.get_provider_tree_and_ensure_root(
            self.context, self.root)
        tree.update_inventory(self.cards[1], {FPGA: {'total': 2}})
        self.ours.asked.clear()
        self.ours.update_from_provider_tree(self.context, tree, {})
        self.assertEqual(5, sum(url.endswith('/inventories')
                                for url in self.ours.asked))
        self.assertEqual(2, self.copy_of(self.ours)[
            self.cards[1]].inventory[FPGA]['total'])

    def test_cleared(self):
        """SIGHUP, a refused report"""
        self.ours.clear_provider_cache()
        self.assertEqual(1 + 3 * 5, self.ensure(self.ours)[0])

    def test_once(self):
        before = self.ours.get_allocations_for_provider_tree
        report_client.watch(self.ours)
        report_client.watch(None)
        self.assertIs(before, self.ours.get_allocations_for_provider_tree)


class UnreadTest(testtools.TestCase):

    CONTENT = {'server': {'allocations': {'card': {'resources': {FPGA: 1}}}}}

    def test_every_way_of_reading(self):
        for read in (
                dict, list, len, bool, repr, str, sorted, reversed, json_of,
                copy.copy, copy.deepcopy, lambda d: d['server'],
                lambda d: d.get('server'), lambda d: 'server' in d,
                lambda d: d.items(), lambda d: d.values(), lambda d: d.keys(),
                lambda d: d == self.CONTENT, lambda d: self.CONTENT == d,
                lambda d: d != self.CONTENT, lambda d: {**d},
                lambda d: d | {'other': 1}, lambda d: {'other': 1} | d,
                lambda d: {}.update(d) or d, lambda d: d.copy(),
                lambda d: d.pop('server'), lambda d: d.popitem(),
                lambda d: d.setdefault('server', 2), lambda d: d.clear()):
            plain = copy.deepcopy(self.CONTENT)
            unread = report_client.Unread(
                lambda: copy.deepcopy(self.CONTENT))
            wanted, found = read(plain), read(unread)
            if hasattr(wanted, '__next__') or not isinstance(
                    wanted, (dict, str, int, list)):
                wanted, found = (wanted and list(wanted),
                                 found and list(found))
            self.assertEqual(wanted, found)
            self.assertEqual(plain, unread)

    def test_every_way_of_writing(self):
        def delete(content):
            del content['server']

        def put(content):
            content['other'] = 1

        def join(content):
            content |= {'other': 1}
        for write in (delete, put, join, lambda d: d.update(other=1)):
            plain = copy.deepcopy(self.CONTENT)
            unread = report_client.Unread(
                lambda: copy.deepcopy(self.CONTENT))
            write(plain)
            write(unread)
            self.assertEqual(plain, unread)

    def test_fetched_once(self):
        calls = []
        unread = report_client.Unread(
            lambda: calls.append(1) or {'server': {}})
        self.assertEqual(0, len(calls))
        self.assertEqual([['server'], {}], [list(unread), unread['server']])
        self.assertEqual(1, len(calls))

    def test_copy_is_plain(self):
        unread = report_client.Unread(lambda: dict(self.CONTENT))
        copied = copy.deepcopy(unread)
        self.assertIs(dict, type(copied))
        self.assertIsNot(copied['server'], unread['server'])


def json_of(content):
    """As of a reshape, which has read it."""
    len(content)
    return json.dumps(content)
