# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The key of a host."""

import base64
import os
import stat
from unittest import mock

import ddt
import fixtures
import testtools

from nova_accel import exception
from nova_accel.store import keys

#: of another kind: openssl genpkey -algorithm x25519
X25519 = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VuBCIEIFh3CaP2SrXx2YXLb2Gzu5sbgXf3bVZEq0mUQRxXJ29f
-----END PRIVATE KEY-----
"""


@ddt.ddt
class KeysTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'store.key')

    def refused(self, *words):
        said = str(self.assertRaises(
            exception.AcceleratorsUnavailable, keys.load, self.path))
        for word in (self.path, *words):
            self.assertIn(word, said)
        self.assertEqual(said.rstrip('.'), said[:-1])
        self.assertNotIn('PRIVATE', said)

    def test_round_trip(self):
        self.assertIsNone(keys.load(self.path))
        old = os.umask(0)
        self.addCleanup(os.umask, old)
        key = keys.create(self.path)
        self.assertEqual(0o600, stat.S_IMODE(os.stat(self.path).st_mode))
        again = keys.load(self.path)
        self.assertEqual(key.public, again.public)
        self.assertEqual(key.sign(b'a'), again.sign(b'a'))
        self.assertEqual(['store.key'], os.listdir(os.path.dirname(self.path)))

    @ddt.data(0o640, 0o604, 0o620, 0o644)
    def test_others_can_read_it(self, mode):
        keys.create(self.path)
        os.chmod(self.path, mode)
        self.refused(f'{mode:04o}', 'others can read it', 'set mode 0600')

    def test_power_failed_meanwhile(self):
        """No signature was made, and the next start creates another one."""
        with open(self.path, 'w'):
            pass
        self.assertIsNone(keys.load(self.path))
        synced = []
        with mock.patch('os.fsync', lambda fd: synced.append(
                os.readlink(f'/proc/self/fd/{fd}'))):
            keys.create(self.path)
        self.assertEqual([self.path, os.path.dirname(self.path)], synced)

    @ddt.data('nonsense', X25519)
    def test_not_a_key(self, content):
        with open(self.path, 'w') as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
        self.refused('not an Ed25519 key', 'restore it')

    def test_not_a_file(self):
        os.mkdir(self.path)
        self.refused('cannot be read', 'Is a directory')

    def test_cannot_be_written(self):
        self.assertIn('cannot be written', str(self.assertRaises(
            exception.AcceleratorsUnavailable, keys.create,
            os.path.join(self.path, 'nowhere'))))

    def test_signature(self):
        key, other = keys.create(self.path), keys.create(self.path)
        signature = key.sign(b'a')
        self.assertTrue(keys.is_signed(key.public, b'a', signature))
        for public, message, found in (
                (other.public, b'a', signature), (key.public, b'b', signature),
                (key.public, b'a', other.sign(b'a')), ('', b'a', ''),
                (key.public, b'a', signature[:-4]),
                (f' {key.public}', b'a', signature), ('ä', b'a', 'ä')):
            self.assertFalse(keys.is_signed(public, message, found))

    def test_one_spelling(self):
        """The last character before the padding has bits that say nothing."""
        signature = (key := keys.create(self.path)).sign(b'a')
        letters = ('ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz'
                   '0123456789+/')
        other = signature[:-3] + letters[
            letters.index(signature[-3]) ^ 1] + '=='
        self.assertEqual(*map(base64.b64decode, (signature, other)))
        self.assertFalse(keys.is_signed(key.public, b'a', other))
