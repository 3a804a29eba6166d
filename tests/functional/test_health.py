# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A device of a server is not well: who is told, by real Nova."""

from unittest import mock

from nova_accel import naming
from tests.functional import base
from tests.functional import process

DEVICE, VF = '0000:5e:00.0', '0000:5e:00.1'
REGION = f'compute1_accel_{DEVICE}_region0'


class HealthTest(base.AcceleratorTestBase):

    HOSTS = {'compute1': {'cards': [base.card(DEVICE)]}}
    FLAVOR = base.fpga_flavor(function_id=base.NLB0)

    def look(self, **attributes):
        self.kernel('compute1').set_fault(DEVICE, attributes=attributes)
        self.parts('compute1').inventory.looks.run()

    def until_owner_reads(self, server, **expected):
        process.until(lambda: self.assertEqual(expected, {
            key.replace(':', '_'): value for key, value
            in self.api.get_server(server['id'])['metadata'].items()
            if key.endswith(':health')}))

    def events(self):
        return [(n.publisher_id, n.payload['host'], n.payload['state'],
                 n.payload['servers']) for n in self.notifier.notifications
                if n.event_type == 'accel.device.state']

    def test_suspect(self):
        self.flags(health=['act'], group='accel')
        server = self.boot(self.FLAVOR)
        self.look()
        self.look(current_link_width='8')
        self.until_owner_reads(server, accel1_health='degraded: 1 of 1')
        process.until(lambda: self.assertEqual(
            [('compute.compute1', 'compute1', 'suspect', [server['id']])],
            self.events()))
        self.report()
        self.assertIn(naming.SUSPECT, self.traits(REGION))
        # it can be had, and its server stays
        self.assertEqual([VF], self.hostdevs(server))
        self.look()
        self.until_owner_reads(server)
        self.report()
        self.assertNotIn(naming.SUSPECT, self.traits(REGION))
        self._delete_server(server)

    def test_guest_is_paused_by_an_error(self):
        """Nova shows the server ACTIVE; what its owner pauses is not told."""
        self.flags(health=['act'], group='accel')
        server = self.boot(self.FLAVOR)
        self.api.post_server_action(server['id'], {'pause': {}})
        self._wait_for_state_change(server, 'PAUSED')
        self.look()
        self.api.post_server_action(server['id'], {'unpause': {}})
        self._wait_for_state_change(server, 'ACTIVE')
        self.assertEqual([], self.events())
        domain = self.domain(server)
        domain.suspend()
        domain.reason = 0
        self.look()
        self.until_owner_reads(server, accel1_health=(
            'paused by an error: hard reboot the server'))
        self.assertEqual('ACTIVE', self.api.get_server(server['id'])['status'])
        with mock.patch.object(
                self.computes['compute1'].driver,
                '_get_instance_disk_info_from_config', return_value=[]):
            self._reboot_server(server, hard=True)
        self.look()
        self.until_owner_reads(server)
        self.assertEqual([VF], self.hostdevs(server))
        self._delete_server(server)


class UseTest(base.AcceleratorTestBase):
    """For how long a server had a device, on Nova's notifier."""

    HOSTS = {'compute1': {'cards': [base.card(DEVICE)]}}
    FLAVOR = base.fpga_flavor(function_id=base.NLB0)

    def sent(self, server):
        return {n.event_type.removeprefix('accel.claim.'): n.payload
                for n in self.notifier.notifications
                if n.event_type.startswith('accel.claim.')
                and n.payload['server'] == server['id']}

    def look(self):
        self.parts('compute1').inventory.looks.run()

    def test_begin_and_end(self):
        server = self.boot(self.FLAVOR)
        self.look()
        begin, = process.until(lambda: self.assertEqual(
            {'begin'}, self.sent(server).keys()) or self.sent(server).values())
        found = self.admin_api.get_server(server['id'])
        flavor, = [f for f in self.admin_api.get_flavors()
                   if f['name'] == found['flavor']['original_name']]
        self.assertEqual(
            (found['tenant_id'], flavor['id'], 'FPGA', DEVICE, base.NLB0),
            tuple(begin[name] for name in (
                'project', 'flavor', 'type', 'device', 'part')))
        self._delete_server(server)
        self.look()
        process.until(lambda: self.assertEqual(
            {'begin', 'end'}, self.sent(server).keys()))
        end = self.sent(server)['end']
        self.assertEqual(begin['claim'], end['claim'])
        self.assertGreater(end['seconds'], begin['seconds'])
