# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The key of a host, and the hand-overs that owners of servers are shown."""

import dataclasses
import json
import os
import stat
from unittest import mock

import ddt

from nova_accel import exception
from nova_accel.store import chain
from nova_accel.store import claim_store
from nova_accel.store import keys
from nova_accel.store import values
from tests.host import base
from tests.unit.host import A, B


PREFIX = 'accel1:handover:'


class CertificatesTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.server = self.boot()

    def boot(self, address=A):
        return self.host.boot(base.ONE, self.host.allocation(address))

    def again(self, address=A):
        """The next server gets the device."""
        self.host.delete(self.server)
        self.server = self.boot(address)

    def changes(self, metadata=()):
        return self.host.descriptions.certificates(
            self.host.cloud.server(self.server), dict(metadata))

    def shown(self, changes, device=1):
        """The hash of a certificate."""
        return json.loads(''.join(
            changes[f'{PREFIX}{device}:{part}'] for part in (1, 2)))['hash']

    def test_first_server_of_a_device(self):
        self.assertEqual({}, self.changes())

    def test_next_server(self):
        self.again()
        found = self.changes({'own': 'kept'})
        self.assertEqual({f'{PREFIX}1:1', f'{PREFIX}1:2'}, found.keys())
        self.assertGreaterEqual(255, max(map(len, found.values())))
        one, = self.host.store.handovers()
        self.assertEqual(chain.digest(one), self.shown(found))
        self.assertEqual({}, self.changes(found))
        self.restart()
        self.assertEqual({}, self.changes(found))

    def test_another_device(self):
        """What vouches for the first one does not stay."""
        self.again()
        before = self.changes()
        self.again(B)
        other = {f'{PREFIX}1:1:1': 'the own', 'accel:handover': 'the own'}
        self.assertEqual(dict.fromkeys(before),
                         self.changes({**before, **other}))

    def test_newest_of_the_device(self):
        self.again()
        first = self.changes()
        self.again()
        second = self.changes(first)
        self.assertNotEqual(*map(self.shown, (first, second)))
        self.assertEqual(chain.digest(self.host.store.handovers()[-1]),
                         self.shown(second))

    def test_what_does_not_vouch(self):
        """Failed attempts, another card, and an order of the operator."""
        self.again()
        one, = self.host.store.handovers()
        before = self.changes()
        for result in ('It is busy.', values.EXCHANGED, 'ordered'):
            self.host.store.add_handover(dataclasses.replace(
                one, result=result, server=one.server * (result != 'ordered')))
        self.host.store.add_handover(dataclasses.replace(one, serial='1'))
        self.host.store.add_handover(dataclasses.replace(one, handle=B))
        self.assertEqual({}, self.changes(before))
        self.host.store.add_handover(one)
        self.assertNotEqual({}, self.changes(before))

    def test_many_devices(self):
        """The owner has room for keys of his own."""
        self.again()
        claim, = self.host.holdings.of(self.server)
        with mock.patch.object(self.host.holdings, 'of',
                               lambda uuid: [claim] * 64):
            self.assertEqual(2 * 16, len(self.changes()))


class Killed(BaseException):
    pass


@ddt.ddt
class KeysTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.start_host({'address': A}, {'address': B})
        self.path = self.host.store.path + keys.SUFFIX
        self.first = keys.load(self.path)
        for address in A, B:
            self.host.delete(self.host.boot(
                base.ONE, self.host.allocation(address)))

    def announced(self):
        """(key that signs, key that is announced) of each card."""
        return [(one.key, chain.key_after(one))
                for one in self.host.store.handovers() if one.is_key]

    def test_first_start(self):
        self.assertEqual(0o600, stat.S_IMODE(os.stat(self.path).st_mode))
        self.restart()
        self.assertEqual(self.first.public, keys.load(self.path).public)
        records = self.host.store.handovers()
        self.assertEqual([self.first.public] * 2, [one.key for one in records])
        self.assertEqual(['1', '1'], [one.place for one in records])
        self.assertEqual([], self.announced())

    def test_others_can_read_it(self):
        os.chmod(self.path, 0o640)
        error = self.assertRaises(exception.AcceleratorsUnavailable,
                                  self.restart)
        self.assertIn('has mode 0640, and others can read it', str(error))

    def test_lost(self):
        os.remove(self.path)
        self.restart()
        new = keys.load(self.path).public
        self.assertNotEqual(self.first.public, new)
        self.assertEqual([(new, new)] * 2, self.announced())
        self.assertIn('no former key has announced', self.log.output)

    @ddt.data(None, (keys, 'create'), (claim_store.ClaimStore, 'sign_with'),
              (os, 'unlink'))
    def test_replaced_by_the_operator(self, killed):
        """:param killed: call after which nova-compute is killed."""
        former = self.host.store.path + keys.FORMER
        os.rename(self.path, former)
        if killed:
            call = getattr(*killed)

            def kills(*args, **kwargs):
                call(*args, **kwargs)
                raise Killed
            with mock.patch.object(*killed, kills):
                self.assertRaises(Killed, self.restart)
        self.restart()
        new = keys.load(self.path).public
        self.assertEqual([(self.first.public, new)] * 2, self.announced())
        self.assertFalse(os.path.exists(former))
