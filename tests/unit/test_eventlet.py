# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Under eventlet a hung card stops its own caller, and nobody else."""

import os
import subprocess
import sys
import textwrap

import fixtures
import testtools

#: as nova-compute is, of Nova 31 to 33 or where it is configured so
PROGRAM = textwrap.dedent('''
    import eventlet
    eventlet.monkey_patch()
    import time
    from nova_accel import exception
    from nova_accel.host import kernel
    from nova_accel.host import limited

    ticks = 0

    def tick():
        global ticks
        while True:
            time.sleep(0.01)
            ticks += 1

    eventlet.spawn(tick)
    kernel = kernel.Kernel('.')
    assert kernel.read('attribute') == 'value'
    try:
        kernel.read('missing')
    except FileNotFoundError:
        ticks = 0
    hung = limited.start(kernel.read, 'hangs')
    try:
        limited.wait(hung, 0.5, 'The read')
    except exception.DeviceTimeout as error:
        print(error, flush=True)
    assert ticks > 10, ticks
    open('hangs', 'w').close()
    assert limited.wait(hung, 5, 'The read') == ''
''')


class EventletTest(testtools.TestCase):

    def test_read_that_hangs(self):
        directory = self.useFixture(fixtures.TempDir())
        with open(directory.join('attribute'), 'w') as file:
            file.write('value\n')
        # its reader waits in open() until somebody writes
        os.mkfifo(directory.join('hangs'))
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', PROGRAM],
            cwd=directory.path, capture_output=True, text=True, timeout=60,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn('did not end within', done.stdout)
