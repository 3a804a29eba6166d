# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Two nova-computes do not use one claim store."""

import os
import subprocess
import sys

import fixtures
import testtools

from nova_accel import conf
from nova_accel import exception
from nova_accel import service
from nova_accel.store import claim_store
from tests.host import base

OTHER = """
import resource
import sys
from nova_accel import service
from nova_accel.store import file
if sys.argv[2:]:
    # as on a full file system, nothing can be written
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    file.use_alone(sys.argv[1])
else:
    service._open_store(sys.argv[1])
print('open', flush=True)
sys.stdin.read()
"""


class SoleTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.path = os.path.join(
            self.useFixture(fixtures.TempDir()).path, 'state', 'store')
        self.other = self.start()
        conf.CONF.set_override('enabled_drivers', ['dfl'], 'accel')
        self.addCleanup(conf.CONF.clear_override, 'enabled_drivers', 'accel')

    def start(self, *arguments):
        """Return a process that has the store open."""
        other = subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-c', OTHER, self.path,
             *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})
        self.addCleanup(other.communicate)
        self.assertEqual('open\n', other.stdout.readline())
        return other

    def test_second_one(self):
        for _ in range(2):
            error = self.assertRaises(
                exception.AcceleratorsUnavailable,
                service._open_store, self.path)
            self.assertIn(f'another nova-compute on this host (process '
                          f'{self.other.pid}): stop that one', str(error))
        # commands go on
        claim_store.existing(self.path)

    def test_after_the_first_was_killed(self):
        self.other.kill()
        self.other.wait()
        service._open_store(self.path)
        # the service of this process starts again
        service._open_store(self.path)

    def test_first_one_on_a_full_file_system(self):
        """It cannot write its number, and is the only one all the same."""
        self.other.kill()
        self.other.wait()
        os.remove(f'{self.path}.lock')
        other = self.start('full')
        for _ in range(2):
            error = self.assertRaises(
                exception.AcceleratorsUnavailable,
                service._open_store, self.path)
            self.assertIn('another nova-compute on this host (process '
                          'unknown)', str(error))
        other.kill()
        other.wait()
        service._open_store(self.path)

    def test_host_without_drivers(self):
        """Nova's own work goes on, with an error in the log."""
        log = self.useFixture(fixtures.FakeLogger())
        conf.CONF.set_override('enabled_drivers', [], 'accel')
        service._open_store(self.path)
        self.assertIn('another nova-compute', log.output)


class StoppedTest(base.HostTestCase):

    def test_threads_may_still_write(self):
        """What cleans or programs a device goes on after close(): until the
        process has ended, another one does not clean it, too."""
        self.start_host({'address': '0000:5e:00.0'})
        store = self.host.store.path
        self.host.parts.close()
        self.refused(store)

    def test_child(self):
        """The lock is of this process: a child that ends, and closes what it
        has got from it, does not release it."""
        self.start_host({'address': '0000:5e:00.0'})
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        self.refused(self.host.store.path)

    def refused(self, store):
        other = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c',
             'import sys; from nova_accel.store import file; '
             'file.use_alone(sys.argv[1])', store], capture_output=True,
            text=True,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})
        self.assertIn(f'used by another nova-compute on this host (process '
                      f'{os.getpid()})', other.stderr)
