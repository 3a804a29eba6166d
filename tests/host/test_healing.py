# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Servers are migrated away from failed devices, within a budget."""

import datetime
import random
import types

import fixtures
import greenlet

from nova_accel.admin import healing
from nova_accel import exception
from nova_accel import naming

from tests.host.health import FOUR, HealthTestCase, ONE, THREE, TWO

OTHER = 'a2d4f2b0-0000-4000-8000-000000000002'
REMOVED = 'a2d4f2b0-0000-4000-8000-000000000001'
ALL = ONE, TWO, THREE, FOUR


class HealingTestCase(HealthTestCase):

    POOLS = 'none'
    CARDS = ALL

    def setUp(self):
        super().setUp()
        self.now = 0
        self.useFixture(fixtures.MockPatchObject(
            healing, 'time', types.SimpleNamespace(
                monotonic=lambda: self.now)))
        self.start(*self.CARDS, heal='cold', heal_per_day=2)
        self.servers = {address: self.boot(address=address)
                        for address in self.CARDS}
        for server in self.servers.values():
            self.cloud.set_server(server, vm_state='active')
        self.cloud.hosts = {OTHER: 'up'}
        self.sent = []
        self.useFixture(fixtures.MockPatchObject(
            self.cloud, 'notify', lambda event, payload: self.sent.append(
                payload['state']) if event == healing.EVENT else None))

    @property
    def cloud(self):
        return self.host.cloud

    def fail(self, *addresses, seconds=3601):
        for address in addresses:
            self.host.kernel.set_fault(address, dead=True)
        self.look()
        self.quiet()
        self.heal()
        self.now += seconds

    def quiet(self):
        self.wait_for(lambda: not any(
            background.runs for background in self.host.after_look))

    def heal(self):
        self.host.healing.run()

    def rows(self):
        return self.cloud.read().get('migrations', [])

    def ends(self, status, **fields):
        """Nova ends the migration that goes on."""
        with self.cloud.state() as state:
            row = state['migrations'][-1]
            row['status'] = status
            state['servers'][row['instance_uuid']].update(
                task_state=None, **fields)

    def told(self, address):
        return self.cloud.read()['servers'][self.servers[address]][
            'metadata'].get(naming.HEALING_KEY, '')


class HealingTest(HealingTestCase):

    def assertKept(self, *words):
        """Nothing is begun, and the log says why."""
        self.heal()
        self.assertEqual([], self.rows())
        self.assertEqual(set(), self.cloud.known_traits(healing.SLOT))
        for word in words:
            self.assertIn(word, self.log.output)

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger('nova_accel'))

    def test_all_the_way(self):
        self.fail(ONE, seconds=1)
        self.heal()
        # it may be well again in a moment
        self.assertEqual([], self.rows())
        self.now += 3600
        self.cloud.first_status = 'accepted'
        self.heal()
        self.heal()
        self.assertEqual(['start'], self.sent)
        self.assertEqual(
            [(self.servers[ONE], 'accepted', 'migration')],
            [(row['instance_uuid'], row['status'], row['migration_type'])
             for row in self.rows()])
        self.assertRegex(self.told(ONE), 'migrates .cold.')
        self.heal()
        self.ends('finished', vm_state='resized')
        self.heal()
        self.assertEqual('confirmed', self.rows()[0]['status'])
        self.heal()
        self.assertRegex(self.told(ONE), '^migrated: ')
        self.heal()
        self.assertEqual(['start', 'end'], self.sent)
        self.assertEqual(1, len(self.cloud.known_traits(healing.SLOT)))

    def test_once_for_one_cause(self):
        """A device that is still bad, after Nova went back."""
        self.fail(ONE)
        self.heal()
        self.ends('reverted')
        for _ in range(3):
            self.heal()
        self.assertEqual(1, len(self.rows()))
        self.assertIn('it was tried before', self.log.output)

    def test_first_failure(self):
        """Of any host; and no more are begun."""
        self.fail(ONE)
        self.heal()
        self.ends('error')
        self.host.kernel.set_fault(ONE, dead=False)
        self.fail(TWO)
        self.heal()
        self.assertEqual(1, len(self.rows()))
        self.assertRegex(self.told(ONE), '^not migrated')
        self.assertEqual(['start', 'error', 'kept'], self.sent)
        self.assertIn(f'the migration of server {self.servers[ONE]} has '
                      f'failed', self.log.output)

    def test_refused(self):
        """A user without rights: the reason is in the log, and nothing more is
        begun."""
        ask = self.cloud.ask_nova

        def refuse(path, body=None):
            if body:
                raise exception.InvalidRequest('It is forbidden.')
            return ask(path)
        self.useFixture(fixtures.MockPatchObject(
            self.cloud, 'ask_nova', refuse))
        self.fail(ONE)
        self.heal()
        self.assertRegex(self.told(ONE), '^not migrated')
        self.fail(TWO)
        self.heal()
        self.assertEqual(1, len(self.cloud.known_traits(healing.SLOT)))
        self.assertIn('it is forbidden', self.log.output.lower())

    def test_accepted_and_not_begun(self):
        """As by a nova-conductor that fails before it writes an entry, which
        resets the task."""
        asked, ask = [], self.cloud.ask_nova

        def accept(path, body=None):
            return asked.append(path) if body else ask(path)
        self.useFixture(fixtures.MockPatchObject(
            self.cloud, 'ask_nova', accept))
        self.fail(ONE)
        for _ in range(3):
            self.heal()
        self.assertEqual(1, len(asked))
        self.assertEqual(1, len(self.cloud.known_traits(healing.SLOT)))
        self.assertRegex(self.told(ONE), '^not migrated')
        self.assertEqual(['start', 'error', 'kept'], self.sent)
        self.assertIn('that it has accepted', self.log.output)

    def test_owner_removes_the_key(self):
        """The operator is informed all the same."""
        self.fail(ONE)
        self.heal()
        self.cloud.set_metadata(self.servers[ONE], naming.HEALING_KEY, None)
        self.ends('error')
        self.heal()
        self.assertEqual(['start', 'error', 'kept'], self.sent)
        self.assertRegex(self.told(ONE), '^not migrated')

    def test_server_is_deleted(self):
        """While it is migrated: healing goes on."""
        self.fail(ONE)
        self.heal()
        self.ends('confirmed')
        with self.cloud.state() as state:
            del state['servers'][self.servers[ONE]]
        self.host.kernel.set_fault(ONE, dead=False)
        self.fail(TWO)
        self.heal()
        self.assertEqual(2, len(self.rows()))

    def test_server_is_deleted_before_its_entry(self):
        """Nova has accepted the migration: healing forgets the server."""
        ask = self.cloud.ask_nova
        self.useFixture(fixtures.MockPatchObject(
            self.cloud, 'ask_nova',
            lambda path, body=None: None if body else ask(path)))
        self.fail(ONE)
        self.heal()
        self.assertEqual({self.servers[ONE]}, self.host.healing._begun)
        with self.cloud.state() as state:
            del state['servers'][self.servers[ONE]]
        self.heal()
        self.assertEqual(set(), self.host.healing._begun)

    def test_removed_device(self):
        self.host.kernel.set_fault(ONE, vanish=True)
        self.fail()
        self.heal()
        self.assertEqual([self.servers[ONE]], [
            row['instance_uuid'] for row in self.rows()])

    def test_killed_before_nova_is_asked(self):
        """The owner does not wait for what does not come."""
        self.config.config(group='accel', heal_per_day=1)
        self.cloud.make_trait(healing.SLOT + datetime.datetime.now(
            datetime.UTC).strftime('%Y%m%d_1'))
        self.cloud.set_metadata(
            self.servers[ONE], naming.HEALING_KEY, 'migrates (cold): 2126')
        self.fail(ONE)
        self.heal()
        self.assertEqual([], self.rows())
        self.assertRegex(self.told(ONE), '^not migrated')

    def test_does_not_answer(self):
        self.fail(ONE)
        self.cloud.nova_error = exception.ServiceUnavailable('No answer.')
        self.assertRaises(exception.ServiceUnavailable, self.heal)
        self.cloud.nova_error = None
        self.heal()
        self.assertEqual(1, len(self.rows()))

    def test_no_room(self):
        self.fail(ONE)
        self.cloud.hosts = {}
        self.assertKept('no other host has room')
        self.cloud.hosts = {OTHER: 'down'}
        self.assertKept()
        # only its provider is left
        self.cloud.hosts = {REMOVED: 'removed'}
        self.assertKept()
        self.cloud.hosts = {REMOVED: 'removed', OTHER: 'up'}
        self.heal()
        self.assertEqual(1, len(self.rows()))

    def test_breaker(self):
        self.fail(ONE, TWO)
        self.heal()
        self.assertKept('it may be the host')

    def test_budget(self):
        self.config.config(group='accel', heal_per_day=1)
        self.fail(ONE)
        self.heal()
        self.ends('completed', is_here=False)
        self.host.kernel.set_fault(ONE, dead=False)
        self.fail(TWO)
        self.heal()
        self.assertEqual(1, len(self.rows()))
        self.assertIn('as many as [accel] heal_per_day allows',
                      self.log.output)
        # of another day
        with self.cloud.state() as state:
            state['traits'] = [f'{healing.SLOT}20200101_1']
        self.heal()
        self.assertEqual(2, len(self.rows()))
        self.assertNotIn(f'{healing.SLOT}20200101_1',
                         self.cloud.known_traits(healing.SLOT))

    def test_observe(self):
        self.config.config(group='accel', heal='observe')
        self.fail(ONE)
        self.assertKept('would be migrated now')
        self.heal()
        self.assertEqual(['observed'], self.sent)
        self.assertEqual('', self.told(ONE))

    def test_off(self):
        """Nova is not asked."""
        self.config.config(group='accel', heal='off')
        self.host.healing._follows = None
        self.cloud.nova_error = exception.ServiceUnavailable('No answer.')
        self.fail(ONE)
        self.assertKept()

    def test_live(self):
        self.config.config(group='accel', heal='live')
        self.fail(ONE)
        self.assertKept('its flavor has no accel:live_migration')
        with self.cloud.state() as state:
            state['servers'][self.servers[ONE]]['extra_specs'][
                'accel:live_migration'] = 'detach'
        self.heal()
        self.assertEqual(['live-migration'], [
            row['migration_type'] for row in self.rows()])

    def test_of_the_owner(self):
        """A locked server, and one that is paused, stay."""
        self.cloud.set_server(self.servers[ONE], locked=True)
        self.fail(ONE)
        self.assertKept('it is locked')
        self.cloud.set_server(self.servers[ONE], locked=False,
                              vm_state='paused')
        self.assertKept('it is paused, and not active or stopped')


class Killed(BaseException):
    pass


class View:
    """The cloud as one of several hosts sees it: each call lets the others
    run, and may be the last one of its process."""

    def __init__(self, cloud, host, servers):
        self._cloud, self.host, self._servers = cloud, host, servers

    def servers(self, uuids):
        switch()
        return [server for server in self._cloud.servers(uuids)
                if server.uuid in self._servers]

    def __getattr__(self, name):
        method = getattr(self._cloud, name)

        def call(*args, **kwargs):
            switch()
            self._cloud.host = self.host
            found = method(*args, **kwargs)
            switch()
            return found
        return call


def switch():
    greenlet.getcurrent().parent.switch()


class CrashTest(HealingTestCase):
    """Three hosts, of which any may be killed between any two calls, in a
    random order: the budget holds, and no server is migrated twice."""

    ROUNDS = 12
    # so many that four of them are less than half
    CARDS = tuple(f'0000:{n:02x}:00.0' for n in range(2, 11))

    def setUp(self):
        super().setUp()
        self.fail(*ALL)
        self.cloud.first_status = 'accepted'
        self.start_state = self.cloud.read()

    def test_budget(self):
        begun = set()
        for seed in range(self.ROUNDS):
            with self.cloud.state() as state:
                state.clear()
                state.update(self.start_state)
            self.play(random.Random(seed), seed)
            begun.add(len(self.rows()))
        # it is reached, and less where processes were killed
        self.assertEqual(2, max(begun))
        self.assertLess(min(begun), 2)

    def play(self, chance, seed):
        servers = [self.servers[address] for address in ALL]
        views = [View(self.cloud, f'host{n}', part) for n, part in enumerate(
            (servers[:2], servers[2:3], servers[3:]))]
        parts = [self.process(view) for view in views]
        runs = [None] * 3
        for _ in range(200):
            n = chance.randrange(3)
            if runs[n] is None or runs[n].dead:
                runs[n] = greenlet.greenlet(parts[n].run)
            if chance.random() < 0.03:
                try:
                    runs[n].throw(Killed)
                except Killed:
                    pass
                runs[n], parts[n] = None, self.process(views[n])
            else:
                runs[n].switch()
            if chance.random() < 0.1:
                self.nova_goes_on(chance)
            self.check(seed)

    def process(self, view):
        """Begin a nova-compute, which sees that the devices are bad."""
        found = healing.Healing(
            view, self.host.inventory, self.host.holdings)
        found._concerned()
        self.now += 3601
        return found

    def nova_goes_on(self, chance):
        with self.cloud.state() as state:
            for row in state.get('migrations', ()):
                if row['status'] == 'accepted':
                    row['status'] = 'migrating'
                elif row['status'] == 'migrating' and chance.random() < 0.5:
                    row['status'] = 'finished'
                    state['servers'][row['instance_uuid']].update(
                        task_state=None)

    def check(self, seed):
        rows = self.rows()
        self.assertLessEqual(len(rows), 2, seed)
        uuids = [row['instance_uuid'] for row in rows]
        self.assertEqual(len({*uuids}), len(uuids), seed)
        for host in {row['source_compute'] for row in rows}:
            self.assertLessEqual(sum(
                row['source_compute'] == host
                and row['status'] in ('accepted', 'migrating')
                for row in rows), 1, seed)
        self.assertLessEqual(
            len(rows), len(self.cloud.known_traits(healing.SLOT)), seed)
