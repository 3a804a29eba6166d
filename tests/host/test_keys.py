# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The key of a host: its first start, another key, and none."""

import os
import stat
from unittest import mock

import ddt

from nova_accel import exception
from nova_accel.store import chain
from nova_accel.store import claim_store
from nova_accel.store import keys
from tests.host import base
from tests.unit.host import A, B


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
