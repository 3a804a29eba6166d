# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Servers of failed devices are migrated, by real Nova."""

import fixtures
from keystoneauth1 import loading

from nova_accel.admin import healing
from nova_accel import conf
from nova_accel import exception
from nova_accel import naming
from tests.functional import pools
from tests.functional import process

NOVA = 'nova-of-the-operator'


class HealingTest(pools.PoolsTestBase):
    """Two hosts with two GPUs each, of which one fails."""

    HOSTS = {name: {'gpus': pools.gpus(pools.GPUS[:2])}
             for name in ('compute1', 'compute2')}

    def setUp(self):
        super().setUp()
        conf.CONF.register_opts(loading.get_auth_plugin_conf_options(
            'admin_token'), group='service_user')
        self.become_operator()
        # a token of Keystone says whose it is
        self.useFixture(fixtures.MonkeyPatch(
            'keystoneauth1.adapter.Adapter.get_user_id', lambda _: 'admin'))
        self.flags(health=['act'], heal='observe', discovery_interval=1,
                   group='accel')
        self.use(NOVA)
        self.server = self.boot(pools.groups(1), host='compute1')

    def use(self, host):
        self.flags(auth_type='admin_token', token='any',
                   endpoint=f'http://{host}/v2.1', group='service_user')

    def door(self):
        return self.computes['compute1'].driver.cloud

    def look(self):
        self.parts('compute1').inventory.looks.run()

    def found(self):
        found = self.admin_api.get_server(self.server['id'])
        return found['OS-EXT-SRV-ATTR:host'], found['status']

    def events(self):
        return [n.payload['state'] for n in self.notifier.notifications
                if n.event_type == healing.EVENT]

    def until_events(self, *expected):
        def come():
            self.look()
            self.assertEqual([*expected], self.events()[:len(expected)])
        process.until(come)

    def test_cold(self):
        """Observed, then done."""
        address, = self.hostdevs(self.server)
        self.kernel('compute1').set_fault(address, dead=True)
        self.until_events('observed')
        self.assertEqual(('compute1', 'ACTIVE'), self.found())
        self.assertEqual(set(), self.door().known_traits(healing.SLOT))
        self.flags(heal='cold', group='accel')
        self.until_events('observed', 'start', 'end')
        process.until(lambda: self.assertEqual(
            ('compute2', 'ACTIVE'), self.found()))
        self.assertServer(self.server, 1)
        self.assertRegex(
            self.api.get_server(self.server['id'])['metadata'][
                naming.HEALING_KEY], '^migrated: ')
        self.assertEqual(['confirmed'], [
            row['status'] for row in self.door().migrations(
                server=self.server['id'])])
        self.assertEqual(1, len(self.door().known_traits(healing.SLOT)))
        self.assertFalse(self.door().make_trait(
            *self.door().known_traits(healing.SLOT)))

    def test_without_rights(self):
        """Nova's policy does not let the user migrate servers."""
        self.policy.set_rules(
            {'os_compute_api:os-migrate-server:migrate': '!'},
            overwrite=False)
        self.flags(heal='cold', group='accel')
        address, = self.hostdevs(self.server)
        self.kernel('compute1').set_fault(address, dead=True)
        self.until_events('start', 'error')
        self.look()
        self.assertEqual(('compute1', 'ACTIVE'), self.found())
        self.assertRegex(
            self.api.get_server(self.server['id'])['metadata'][
                naming.HEALING_KEY], '^not migrated')
        self.assertIn('compare the roles of the user of [service_user]',
                      self.parts('compute1').healing._refused)
        self.assertRaises(exception.NotThere, self.door().ask_nova,
                          f'/os-hypervisors/{self.server["id"]}')
        self.use('nowhere.invalid')
        del self.door()._nova
        self.assertRaises(exception.ServiceUnavailable,
                          self.door().migrations)
        self.flags(auth_type=None, group='service_user')
        del self.door()._nova
        self.assertRaises(exception.InvalidRequest, self.door().migrations)
