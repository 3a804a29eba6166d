# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A device is drained at a time that the operator has planned."""

from unittest import mock

import fixtures

from nova_accel import exception
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel import naming
from nova_accel.notify import notices
from nova_accel.store import values
from nova_accel import text
from tests.host import health
from tests.host.health import HealthTestCase, ONE, THREE, TWO

WHY = 'new firmware <b>'


class PlannedTestCase(HealthTestCase):

    def setUp(self):
        super().setUp()
        self.passed = 0
        now = text.now
        self.useFixture(fixtures.MockPatchObject(
            text, 'now', lambda days=0, to='seconds': now(
                days - self.passed, to)))
        self.start(ONE, TWO, THREE)

    def plan(self, hours, address=ONE, why=WHY):
        """As nova-accel drain --at; the time."""
        known, at = self.host.command(), text.now(-hours / 24)
        devices = known.devices()
        known.disable(values.Disabled(
            identity.named(address, devices), identity.serial_for_claim(
                address, devices, known.gone()), why, text.now(), at=at),
            known.planned())
        self.host.orders.poll()
        return at

    def undrain(self):
        known = self.host.command()
        known.enable(known.planned())
        self.host.orders.poll()

    def hours_pass(self, hours):
        self.passed += hours / 24
        self.host.orders.poll()

    def kinds(self, address=ONE):
        return {hold.kind for hold
                in self.host.inventory.table.holds_of(address)}

    def owner_reads(self, server, group='1'):
        self.host.owners.run()
        return self.host.cloud.read()['servers'][server]['metadata'].get(
            naming.maintenance_key(group))

    def events(self):
        self.host.notices.run()
        return [(payload['device'], payload['state'], payload['servers'])
                for event, payload in self.host.cloud.read().get('notices', ())
                if event == notices.WORK]


class PlannedTest(PlannedTestCase):

    POOLS = 'none'

    def in_placement(self):
        """Without a report."""
        uuid, = self.host.allocation(ONE, health.CARD)
        return self.host.cloud.read()['providers'][uuid]['inventory'][
            health.CARD]['reserved']

    def test_time_comes(self):
        """It becomes today's drain; its server keeps it."""
        server = self.boot()
        at = self.plan(2)
        self.assertEqual({holds.Kind.PLANNED}, self.kinds())
        self.assertEqual(0, self.in_placement())
        said = f'{at}, 1 of 1: {WHY}'
        self.assertEqual(said, self.owner_reads(server))
        self.hours_pass(1.9)
        self.assertEqual({holds.Kind.PLANNED}, self.kinds())
        self.hours_pass(0.2)
        self.assertEqual({holds.Kind.DISABLED}, self.kinds())
        self.assertEqual(1, self.in_placement())
        self.assertEqual(said, self.owner_reads(server))
        self.host.reboot(server)
        self.host.delete(server)
        self.assertRaisesRegex(
            exception.DeviceUnavailable, 'has disabled it', self.boot)
        self.host.enable()
        self.boot()

    def test_restart(self):
        """Before the time, and after it."""
        server = self.boot()
        self.plan(2)
        self.restart()
        self.assertEqual({holds.Kind.PLANNED}, self.kinds())
        self.assertIsNotNone(self.owner_reads(server))
        self.host.parts.close()
        self.passed += 3 / 24
        self.restart()
        self.assertEqual({holds.Kind.DISABLED}, self.kinds())
        self.assertEqual(1, self.in_placement())

    def test_clock_is_set_back(self):
        """As by a host whose clock has lost the time when it boots."""
        self.plan(2)
        self.hours_pass(3)
        self.hours_pass(-24)
        self.assertEqual({holds.Kind.DISABLED}, self.kinds())
        self.restart()
        self.host.orders.poll()
        self.assertEqual({holds.Kind.DISABLED}, self.kinds())
        self.assertEqual(1, self.in_placement())
        self.assertRaises(exception.DeviceUnavailable, self.boot)
        self.assertEqual((), self.host.command().planned())
        self.host.enable()
        self.assertEqual(set(), self.kinds())
        self.boot()

    def test_begins_while_it_is_enabled(self):
        """What the command has read is of before."""
        self.plan(2)
        self.passed += 3 / 24
        command = self.host.command()
        rows = command.disabled()
        self.host.orders.poll()
        command.enable(rows)
        self.host.orders.poll()
        self.assertEqual(set(), self.kinds())

    def test_store_is_full_when_its_time_comes(self):
        """It is disabled all the same, and written later."""
        self.plan(2)
        with mock.patch.object(
                self.host.store, 'begin_planned',
                side_effect=exception.AcceleratorsUnavailable('full')):
            self.assertRaises(exception.AcceleratorsUnavailable,
                              self.hours_pass, 3)
        self.assertEqual({holds.Kind.DISABLED}, self.kinds())
        self.assertEqual(1, self.in_placement())
        self.host.orders.poll()
        self.hours_pass(-24)
        self.assertEqual({holds.Kind.DISABLED}, self.kinds())

    def test_claimed_in_the_second_before_it_is_noticed(self):
        """The store takes no claim, whatever memory has."""
        self.plan(2)
        self.passed += 3 / 24
        self.assertRaises(exception.DeviceUnavailable, self.boot)

    def test_cancelled(self):
        server = self.boot()
        self.plan(2)
        self.assertIsNotNone(self.owner_reads(server))
        self.undrain()
        self.assertEqual(set(), self.kinds())
        self.assertIsNone(self.owner_reads(server))
        self.hours_pass(3)
        self.assertEqual(set(), self.kinds())

    def test_another_time(self):
        server = self.boot()
        self.plan(2)
        later = self.plan(4, why='later')
        self.assertEqual(f'{later}, 1 of 1: later', self.owner_reads(server))
        self.hours_pass(3)
        self.assertEqual({holds.Kind.PLANNED}, self.kinds())

    def test_notifications(self):
        server = self.boot()
        self.plan(2)
        self.assertEqual([(ONE, 'planned', [server])], self.events())
        self.events()
        self.hours_pass(3)
        self.events()
        self.host.enable()
        self.assertEqual(
            [(ONE, state, [server]) for state in (
                'planned', 'due', 'cancelled')], self.events())

    def test_owner_removes_the_key(self):
        server = self.boot()
        self.plan(2)
        self.owner_reads(server)
        self.host.cloud.set_metadata(server, naming.maintenance_key('1'), None)
        self.assertIsNotNone(self.owner_reads(server))

    def test_who_gets_it_later_reads_it(self):
        self.plan(2)
        self.assertIsNotNone(self.owner_reads(self.boot()))

    def test_would_outlast(self):
        """By its flavor; the operator reads why."""
        at = self.plan(2)
        error = self.assertRaises(
            exception.DeviceUnavailable, self.boot, **{'accel:max_hours': '3'})
        self.assertIn(f'(the operator will disable it at {at}): the build is '
                      f'retried on another host', str(error))
        self.assertHas(self.boot(**{'accel:max_hours': '1'}), ONE)

    def test_no_lifetime(self):
        self.plan(2)
        self.assertHas(self.boot(), ONE)


class PoolTest(PlannedTestCase):

    def test_others_first(self):
        """Also for servers without a lifetime; one that is longer gets none of
        those that are planned."""
        self.plan(2, ONE)
        self.assertHas(self.boot(address=None), TWO)
        self.assertHas(self.boot(
            address=None, **{'accel:max_hours': '3'}), THREE)
        self.assertRaises(exception.DeviceUnavailable, self.boot,
                          address=None, **{'accel:max_hours': '3'})
        self.assertHas(self.boot(
            address=None, **{'accel:max_hours': '1'}), ONE)

    def test_several_of_a_group(self):
        server = self.boot(2, address=None)
        first, _ = self.host.devices_of(server)
        at = self.plan(2, first)
        self.assertEqual(f'{at}, 1 of 2: {WHY}', self.owner_reads(server))
