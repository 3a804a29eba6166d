# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute that cannot start because of us, as a process of its own.

Nova's main() with its launcher and its loader of drivers. What is left out is
the service before init_host(), which needs a conductor; in its place stands a
thread that does not end, as Nova's of libvirt's events.
"""

import os
import subprocess
import sys

import fixtures
import testtools

PROGRAM = '''
import sys
import threading
import time
# first: it decides about threads
from nova.cmd import compute
from unittest import mock
from nova.tests.fixtures import libvirt
from nova.virt import driver
from oslo_service import service
from nova_accel.virt import door

door.open_door()
sys.modules['libvirt'] = libvirt


class Service(service.Service):

    def start(self):
        threading.Thread(target=time.sleep, args=(3600,)).start()
        driver.load_compute_driver(None).init_host('compute1')


with mock.patch('nova.service.Service.create', lambda **kwargs: Service()):
    compute.main()
'''


class StartRefusedTest(testtools.TestCase):

    def refused(self, says, *lines, **environment):
        directory = self.useFixture(fixtures.TempDir())
        path = directory.join('nova.conf')
        with open(path, 'w') as file:
            file.write('\n'.join((
                '[DEFAULT]', 'host = compute1', 'transport_url = fake:/',
                'compute_driver = accel.AccelLibvirtDriver',
                f'state_path = {directory.path}', '[accel]', *lines, '')))
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', PROGRAM,
             '--config-file', path],
            capture_output=True, text=True, timeout=900,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path),
                 **environment})
        log = done.stdout + done.stderr
        self.assertEqual(1, done.returncode, log)
        self.assertNotIn('Traceback', log)
        line, = [line for line in log.splitlines() if 'nova_accel' in line
                 and ('ERROR' in line or 'CRITICAL' in line)]
        self.assertIn('nova-compute does not start: ', line)
        self.assertIn(says, line)

    def test_native_threads(self):
        self.refused("'vendr'", 'enabled_drivers = dfl',
                     'exclude_devices = vendr=8086',
                     OS_NOVA_DISABLE_EVENTLET_PATCHING='true')

    def test_eventlet(self):
        self.refused("'vendr'", 'enabled_drivers = dfl',
                     'exclude_devices = vendr=8086',
                     OS_NOVA_DISABLE_EVENTLET_PATCHING='false')
