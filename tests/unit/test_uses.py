# Licensed under the Apache License, Version 2.0. See LICENSE.
"""For how long servers had devices, whatever happens in between.

The everyday run has the same few random operations each time, ``make explore``
10,000.
"""

import collections
import dataclasses
import datetime
import itertools
import os
import random
import uuid

import fixtures
import testtools

from nova_accel import model
from nova_accel.store import claim_store
from nova_accel.store import uses
from nova_accel.store import values
from nova_accel import text
from tests.unit.claims import claim
from tests.unit.clock import Clock

_State = model.ClaimState
#: project, type and product of claim()
KEY = 'p', 'FPGA', 'PAC'


class UsesTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.clock = Clock(self)
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.numbers = itertools.count()
        self.store = self.opened()

    def opened(self, name='claims.sqlite'):
        return claim_store.ClaimStore(os.path.join(self.directory, name))

    def new(self, server='', **more):
        number = next(self.numbers)
        server = server or str(uuid.uuid4())
        return claim(server, model.AttachHandle(
            model.HandleType.PCI, f'0000:5e:{number >> 3:02x}.{number & 7}'),
            **{'project_id': 'p', 'product': 'PAC', 'flavor': 'f', **more})

    def add(self, server='', **more):
        one = self.new(server, **more)
        self.store.add([one])
        return one

    def end(self, one):
        self.store.update([one], state=_State.DELETING)

    def seconds(self):
        return [round(use.seconds, 3) for use in self.store.uses()]


class UsesTest(UsesTestCase):

    def test_to_the_release(self):
        """And not to the end of the cleaning."""
        one = self.add()
        self.clock.go(10)
        self.store.count_uses()
        self.clock.go(5.25)
        self.end(one)
        self.clock.go(600)
        self.store.count_uses()
        self.store.remove([one])
        self.store.count_uses()
        use, = self.store.uses()
        self.assertEqual(
            (15.25, '', 'p', 'f', 'FPGA', 'PAC', '0000:5e:00.0',
             '2026-11-22T00:00:00.000000+00:00',
             '2026-11-22T00:00:15.250000+00:00'),
            (use.seconds, use.counted, use.project, use.flavor, use.type,
             use.product, use.device, use.since, use.until))
        self.assertEqual({KEY: 15.25}, self.store.used())

    def test_no_row_at_a_build(self):
        """The first count, or the end, writes it."""
        one = self.add()
        self.assertEqual([], self.store.uses())
        self.clock.go(2)
        self.store.remove([one])
        self.assertEqual([2], self.seconds())

    def test_part(self):
        """A vGPU's type, or the function that the region has last."""
        one, two = self.add(created_type='nvidia-558'), self.add()
        self.store.count_uses()
        self.store.update([two], restore_function='a' * 32)
        self.store.count_uses()
        self.assertEqual(['nvidia-558', str(uuid.UUID('a' * 32))],
                         [use.part for use in self.store.uses()])
        self.assertEqual('nvidia-558', one.created_type)

    def test_moves_count_once(self):
        """The old devices of a resize count until it begins, and after it is
        reverted; those of a live migration from its arrival."""
        old, move = self.add('s'), 'm'
        self.clock.go(10)
        self.store.update([old], consumer_uuid=move)
        new = self.add('s')
        self.clock.go(20)
        self.store.count_uses()
        self.clock.go(2)
        self.store.change([([new], {'state': _State.DELETING}),
                           ([old], {'consumer_uuid': 's'})])
        self.clock.go(5)
        self.store.remove([new, old])
        self.assertEqual([10, 22, 5], self.seconds())
        self.assertEqual({KEY: 37}, self.store.used())
        comes = self.add('t', consumer_uuid='n')
        self.clock.go(30)
        self.store.count_uses()
        self.assertEqual(3, len(self.store.uses()))
        self.store.update([comes], consumer_uuid='t')
        self.clock.go(1)
        self.store.count_uses()
        self.assertEqual(1, self.seconds()[-1])

    def test_cards_that_move(self):
        """exchange() writes another address of the same claim."""
        one = self.add()
        self.clock.go(1)
        self.store.count_uses()
        self.store.exchange([one], [dataclasses.replace(
            one, device_address='0000:af:00.0')])
        self.clock.go(1)
        self.store.count_uses()
        self.assertEqual([2], self.seconds())

    def test_restart(self):
        """And a boot of the host with a clock that is behind."""
        self.add()
        self.clock.go(10)
        self.store.count_uses()
        self.clock.go(100)
        self.store = self.opened()
        self.store.count_uses()
        self.assertEqual([110], self.seconds())
        self.clock.boot, self.clock.seconds = 'next', 5.0
        self.clock.wall -= datetime.timedelta(days=9)
        self.store = self.opened()
        self.store.count_uses()
        self.clock.go(1)
        self.store.count_uses()
        self.assertEqual([111], self.seconds())

    def test_killed_before_the_first_count(self):
        one = self.add()
        self.clock.go(7.5)
        self.store = self.opened()
        self.store.remove([one])
        self.assertEqual([7.5], self.seconds())

    def test_servers_that_are_elsewhere(self):
        """They were evacuated or deleted while nova-compute did not run."""
        gone, here = self.add(), self.add()
        self.clock.go(10)
        self.store.count_uses()
        until = self.store.uses()[0].until
        self.clock.go(3600)
        self.store = self.opened()
        self.store.count_uses({gone.uuid})
        self.clock.go(60)
        self.store.count_uses()
        self.end(gone)
        self.assertEqual([10, 3670], self.seconds())
        self.assertEqual(until, self.store.uses()[0].until)
        self.assertEqual({KEY: 3680}, self.store.used())
        self.end(here)

    def test_clock_is_set(self):
        """Also in the minute in which a use begins."""
        self.store.count_uses()
        self.clock.go(30)
        one = self.add()
        for days in 3, -5:
            self.clock.wall += datetime.timedelta(days)
            self.clock.go(10)
            self.store.count_uses()
        self.clock.wall -= datetime.timedelta(7)
        self.end(one)
        # the clock jumped before the row was there: at most since the count
        self.assertEqual([50], self.seconds())

    def test_lost_store(self):
        """Each use is there once, and the sums go on where they were."""
        one, two = self.add(), self.add()
        self.clock.go(100)
        self.end(two)
        self.store.count_uses()
        published = self.store.used()
        guests = [c for c in self.store.claims() if c.uuid == one.uuid]
        self.store = self.opened('new.sqlite')
        self.store.restore(guests, [], [], [])
        self.store.raise_used(published)
        self.assertEqual([100], self.seconds())
        self.assertEqual(['exists'], [u.sent for u in self.store.uses()])
        self.clock.go(1)
        self.store.count_uses()
        self.assertEqual(([101], {KEY: 201}),
                         (self.seconds(), self.store.used()))
        # what is lower than the store has it changes nothing
        self.store.raise_used(published)
        self.assertEqual({KEY: 201}, self.store.used())

    def test_older_copy(self):
        """What ended after it was made ends with what it had counted."""
        stays, ended = self.add('s'), self.add('t')
        self.clock.go(10)
        self.store.count_uses()
        self.clock.go(100)
        new = self.new('t', since=text.now(to='microseconds'))
        self.clock.go(1)
        self.store.restore([stays, new], [stays, ended], [], [])
        self.store.count_uses()
        self.assertEqual([111, 10, 1], self.seconds())
        self.assertEqual([False, True, False], [
            use.counted == '' for use in self.store.uses()])

    def test_since_of_a_guest(self):
        """It is a text, whatever it says."""
        one = self.new(since='yesterday')
        self.store.restore([one], [], [], [])
        self.clock.go(1)
        self.store.count_uses()
        self.assertEqual([1], self.seconds())

    def test_reported(self):
        one = self.add()
        self.clock.go(60)
        use, = self.store.count_uses()
        self.store.note_reported([(use, 'begin')])
        self.clock.go(60)
        use, = self.store.count_uses()
        self.assertEqual(('begin', 60, 120),
                         (use.sent, use.reported, use.seconds))
        self.end(one)
        use, = self.store.count_uses()
        self.assertEqual('', use.counted)
        self.store.note_reported([(use, 'end')])
        self.assertEqual([], self.store.count_uses())

    def test_what_is_kept(self):
        """The sums do not shrink with it."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.store.uses.MOST_USES', 2))
        for _ in range(4):
            one = self.add()
            self.clock.go(1)
            self.store.remove([one])
        self.store.count_uses()
        self.assertEqual(2, len(self.store.uses()))
        self.clock.go((uses.DAYS_OF_USES + 1) * 86400)
        self.add()
        self.store.count_uses()
        self.assertEqual(1, len(self.store.uses()))
        self.assertEqual({KEY: 4}, self.store.used())

    def test_unknown_owner_is_no_use(self):
        self.store.settle(claims=[self.new(
            instance_uuid='', consumer_uuid='', state=_State.DELETING)])
        self.clock.go(9)
        self.store.count_uses()
        self.store.await_operator(self.store.claims()[0])
        self.store.count_uses()
        self.assertEqual([], self.store.uses())


class Oracle(UsesTestCase):
    """Random operations, beside what a bystander with a watch counts."""

    OPERATIONS = (10_000 if os.environ.get('NOVA_ACCEL_EXPLORE_MINUTES')
                  else 1_500)

    def setUp(self):
        super().setUp()
        self.random = random.Random(56)
        #: uuid of a claim -> seconds that it was its server's
        self.rows = collections.Counter()
        self.sums = collections.Counter()
        #: claims by what they are now, as the bystander sees it
        self.held, self.aside, self.dirty = {}, {}, {}

    def go(self, most=100.0, without=()):
        seconds = self.random.uniform(0, most)
        self.clock.go(seconds)
        for one in self.held.values():
            if one.uuid not in without:
                self.rows[one.uuid] += seconds
                self.sums[one.project_id, 'FPGA', one.product] += seconds

    def some(self, of):
        return self.random.choice(list(of.values())) if of else None

    def boot(self, server=''):
        one = self.add(server, project_id=self.random.choice('pqr'),
                       product=self.random.choice('XY'))
        self.held[one.uuid] = one

    def release(self):
        if one := self.some(self.held):
            self.end(one)
            self.dirty[one.uuid] = self.held.pop(one.uuid)

    def clean(self):
        if one := self.some(self.dirty):
            self.store.remove([one])
            del self.dirty[one.uuid]

    def resize(self):
        if one := self.some(self.held):
            self.store.update([one], consumer_uuid='m')
            self.aside[one.uuid] = self.held.pop(one.uuid)
            self.go(3)
            self.boot(one.instance_uuid)

    def arrive(self):
        one = self.add(consumer_uuid='m')
        self.aside[one.uuid] = one

    def confirm(self):
        if one := self.some(self.aside):
            self.end(one)
            self.dirty[one.uuid] = self.aside.pop(one.uuid)

    def revert(self):
        if one := self.some(self.aside):
            lost = [c for c in self.held.values()
                    if c.instance_uuid == one.instance_uuid]
            self.store.change([
                (lost, {'state': _State.DELETING}),
                ([one], {'consumer_uuid': one.instance_uuid})])
            for other in lost:
                self.dirty[other.uuid] = self.held.pop(other.uuid)
            self.held[one.uuid] = self.aside.pop(one.uuid)

    def count(self):
        self.store.count_uses()

    def set_clock(self):
        self.clock.wall += datetime.timedelta(
            seconds=self.random.uniform(-90000, 90000))

    def restart(self):
        """At once, after an hour, or without some of the servers."""
        self.count()
        gone = {one.uuid for one in self.held.values()
                if not self.random.randrange(5)}
        self.go(3600, gone)
        if self.random.random() < .3:
            self.clock.boot = str(uuid.uuid4())
            self.clock.seconds = 3.0
        self.store = self.opened(os.path.basename(self.store.path))
        self.store.count_uses(gone)
        for uuid_ in gone:
            self.end(self.held[uuid_])
            self.dirty[uuid_] = self.held.pop(uuid_)

    def kill(self):
        """At any time; the host goes on."""
        self.store = self.opened(os.path.basename(self.store.path))

    def lose(self):
        """The store is lost; guests and what was published are not."""
        self.count()
        published = self.store.used()
        guests = [c for c in self.store.claims() if c.is_use]
        self.store = self.opened(f'{next(self.numbers)}.sqlite')
        self.store.settle(done=[values.EVERYTHING])
        self.store.restore(guests, [], [], [])
        self.store.raise_used(published)
        self.aside.clear()
        self.dirty.clear()
        now = text.now(to='microseconds')
        self.rows = collections.Counter({
            c.uuid: uses._between(c.since, now) for c in guests})

    def test_sums(self):
        operations = {self.boot: 9, self.release: 6, self.clean: 6,
                      self.resize: 4, self.confirm: 3, self.revert: 2,
                      self.arrive: 2, self.count: 20, self.kill: 2,
                      self.restart: 2, self.lose: .2, self.set_clock: 1}
        for operation in self.random.choices(
                list(operations), operations.values(), k=self.OPERATIONS):
            if operation == self.set_clock:
                # before a use has a row, its beginning is the clock's
                self.count()
            operation()
            self.go()
            if operation == self.boot and len(self.held) > 8:
                self.release()
        self.count()
        found = collections.Counter()
        for use in self.store.uses():
            found[use.claim] += use.seconds
        self.assertGreater(len(found), 30)
        for uuid_, seconds in self.rows.items():
            self.assertLess(abs(found[uuid_] - seconds), .01, uuid_)
        self.assertLess(abs(found.total() - self.rows.total()), 1)
        sums = self.store.used()
        self.assertGreater(len(sums), 5)
        for key, seconds in self.sums.items():
            self.assertLess(abs(sums[key] - seconds), 1, key)
