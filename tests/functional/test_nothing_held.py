# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A server without accelerators, on a host that has some: Nova's path.

The same is done with two servers, one on a host with our driver and a card,
one on a host with Nova's own driver. Each step takes the same calls of libvirt
and of Placement on both, but for the question of what is allocated from each
provider: Nova does not read the answer, and nova_accel does not let it ask.
"""

import collections
import contextlib
import functools
import inspect
import os
import re
import sqlite3
import threading

import fixtures
import nova.conf
from nova.scheduler.client import report
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.virt.libvirt import driver as libvirt_driver

from tests.functional import base
from tests.functional import guests
from tests.functional import operations

_UUID = re.compile('[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
#: nova_accel.virt.report_client
UNASKED = 'get_allocations_for_provider_tree'


class Calls(fixtures.Fixture):
    """Calls of libvirt's API and of Placement's, while they are counted."""

    def _setUp(self):
        self._counted = None
        self._inside = threading.local()
        for owner in (fakelibvirt.Domain, fakelibvirt.Connection):
            for name, method in inspect.getmembers(owner, inspect.isfunction):
                if not name.startswith('_'):
                    self._count(owner, name, f'{owner.__name__}.{name}')
        for name in ('get', 'put', 'post', 'delete'):
            self._count(report.SchedulerReportClient, name)
        self._count(report.SchedulerReportClient, UNASKED, UNASKED)

    def _count(self, owner, name, label=None):
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(this, *args, **kwargs):
            counted = self._counted
            # the imitation of libvirt calls itself
            if counted is None or getattr(self._inside, 'call', False):
                return method(this, *args, **kwargs)
            counted[label or f'{name} {_UUID.sub("UUID", args[0])}'] += 1
            self._inside.call = True
            try:
                return method(this, *args, **kwargs)
            finally:
                self._inside.call = False
        self.useFixture(fixtures.MonkeyPatch(
            f'{owner.__module__}.{owner.__name__}.{name}', call))

    @contextlib.contextmanager
    def counted(self):
        self._counted = collections.Counter()
        try:
            yield self._counted
        finally:
            self._counted = None


class NothingHeldTest(operations.OperationsTestBase):

    # one of its hosts has Nova's driver
    FRESH_CLOUD = True
    HOSTS = {'compute1': {'cards': [base.card('0000:5e:00.0')]}}

    def setUp(self):
        super().setUp()
        # once at start, and not again here
        self.flags(discovery_interval=3600, group='accel')
        self.restart_compute_service('compute1')
        self.flags(compute_driver='libvirt.LibvirtDriver')
        self.describe_host('compute2', {'cards': []})
        self.start_compute('compute2')
        self.assertIs(libvirt_driver.LibvirtDriver,
                      type(self.computes['compute2'].driver))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.LibvirtDriver._live_snapshot',
            guests.live_snapshot))
        self.report()
        self.report()
        self.calls = self.useFixture(Calls())

    def assertSame(self, what, do):
        """A step takes the same calls with our driver and with Nova's."""
        counts = []
        for host in ('compute1', 'compute2'):
            with self.calls.counted() as counted:
                self.servers[host] = do(self.servers.get(host) or host)
            counts.append(counted)
        self.assertTrue(counts[1])
        ours, novas = counts
        del novas[UNASKED]
        self.assertEqual(({}, {}), (dict(ours - novas), dict(novas - ours)),
                         f'{what}: what ours calls more, and less')

    def act(self, action, argument=None):
        def do(server):
            self.api.post_server_action(server['id'], {action: argument})
            return self._wait_for_server_parameter(
                server, {'OS-EXT-STS:task_state': None})
        return do

    def boot_on(self, host):
        server = self.boot({}, host=host)
        os.makedirs(os.path.join(
            nova.conf.CONF.instances_path, server['id']), exist_ok=True)
        return server

    def delete(self, server):
        self.api.delete_server(server['id'])
        self._wait_until_deleted(server)

    def test_life_of_a_server(self):
        self.servers = {}
        for what, do in (
                ('create', self.boot_on),
                ('reboot', self.act('reboot', {'type': 'SOFT'})),
                ('hard reboot', self.act('reboot', {'type': 'HARD'})),
                ('stop', self.act('os-stop')),
                ('start', self.act('os-start')),
                ('pause', self.act('pause')),
                ('unpause', self.act('unpause')),
                ('suspend', self.act('suspend')),
                ('resume', self.act('resume')),
                ('snapshot', self.act('createImage', {'name': 'snapshot'})),
                ('rescue', self.act('rescue')),
                ('unrescue', self.act('unrescue')),
                ('rebuild', self.act('rebuild', {
                    'imageRef': self.glance.guest_image})),
                ('delete', self.delete)):
            self.assertSame(what, do)

    def test_cold_snapshot(self):
        self.flags(disable_libvirt_livesnapshot=True, group='workarounds')
        self.servers = {}
        self.assertSame('create', self.boot_on)
        self.assertSame('cold snapshot', self.act(
            'createImage', {'name': 'snapshot'}))


class StoreLockedTest(operations.OperationsTestBase):
    """The claim stores of both hosts cannot be written."""

    def setUp(self):
        super().setUp()
        self.server = self.boot({})
        for host in self.HOSTS:
            store = self.parts(host).store
            # ten, else, in each of seven operations
            store._timeout = 1
            other = self.enterContext(contextlib.closing(
                sqlite3.connect(store.path)))
            other.execute('BEGIN IMMEDIATE')

    def test_moves(self):
        host = self.host_of(self.server)
        self._migrate_server(self.server)
        self._revert_resize(self.server)
        self.assertEqual(host, self.host_of(self.server))
        flavor = self._create_flavor(extra_spec={}, vcpu=3)
        self._resize_server(self.server, flavor)
        self._revert_resize(self.server)
        self.assertEqual(host, self.host_of(self.server))
        self._resize_server(self.server, flavor)
        self._confirm_resize(self.server)
        self.assertNotEqual(host, self.host_of(self.server))
