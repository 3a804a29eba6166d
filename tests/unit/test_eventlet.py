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
    assert limited.wait(hung, 60, 'The read') == ''
    ticks = 0
    assert limited.run(['sh', '-c', 'sleep 0.5; echo end'], 60) == 'end'
    assert ticks > 10, ticks
''')

#: more cards that hang than eventlet's pool has threads
POOL = textwrap.dedent('''
    import eventlet
    eventlet.monkey_patch()
    from eventlet import tpool
    from nova_accel import exception
    from nova_accel.host import kernel
    from nova_accel.host import limited
    from nova_accel.inventory import cards

    limited._POOL_SECONDS = 0.5
    kernel, calls = kernel.Kernel('.'), cards.Cards()
    batch = calls.batch(1)
    for number in range(30):
        batch.add(str(number), f'Reading {number}', kernel.read, 'hangs')
    failed = 0
    for call in batch:
        try:
            call.outcome()
        except exception.DeviceTimeout as error:
            failed += 1
    assert failed == 30, failed
    hanging = sum(bool(calls.hanging(str(n))) for n in range(30))
    assert hanging == 10, hanging
    # as a call of libvirt does
    with eventlet.Timeout(60):
        assert tpool.execute(lambda: 'runs') == 'runs'
    try:
        kernel.read('attribute')
    except exception.DeviceTimeout as error:
        print(error, flush=True)
    with open('hangs', 'w') as fifo:
        fifo.write('value')
    with eventlet.Timeout(60):
        while any(calls.is_busy(str(n)) for n in range(30)):
            eventlet.sleep(0.01)
    assert kernel.read('attribute') == 'value'
''')

#: another process writes into the claim store until green threads have run for
#: a while: a wait inside of SQLite would stop them, and would end by an error
STORE = textwrap.dedent('''
    import contextlib
    import eventlet
    eventlet.monkey_patch()
    import sqlite3
    import time
    from nova_accel.store import claim_store
    from nova_accel import exception

    @contextlib.contextmanager
    def locked(path, mode, begin):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute(f'PRAGMA journal_mode = {mode}')
        other.execute(f'BEGIN {begin}')
        ticks = 0

        def tick():
            nonlocal ticks
            while ticks < 10:
                began = time.monotonic()
                time.sleep(0.01)
                gaps.append(time.monotonic() - began)
                ticks += 1
            other.execute('ROLLBACK')
            other.close()

        ticker = eventlet.spawn(tick)
        yield
        assert ticks == 10, ticks
        ticker.wait()

    gaps = []
    store = claim_store.ClaimStore('store', timeout=30)
    with locked('store', 'WAL', 'IMMEDIATE'):
        store.withdraw_order(1, [])
    with locked('store', 'WAL', 'IMMEDIATE'):
        claim_store.ClaimStore('store', timeout=30)
    # one that no release has opened yet, or that has another journal
    for begin in 'IMMEDIATE', 'EXCLUSIVE':
        with locked(begin, 'DELETE', begin):
            claim_store.ClaimStore(begin, timeout=30)

    # other threads are stopped for 100 ms at most; a loaded machine adds to
    # some gaps, and a store that waits for the lock to 30 s
    assert sorted(gaps)[len(gaps) // 2] < 0.1 and max(gaps) < 10, gaps
    store = claim_store.ClaimStore('store', timeout=0.1)
    other = sqlite3.connect('store', isolation_level=None)
    other.execute('BEGIN IMMEDIATE')
    try:
        store.withdraw_order(1, [])
    except exception.AcceleratorsUnavailable as error:
        print(error, flush=True)
    other.execute('ROLLBACK')
    store.withdraw_order(1, [])
''')


class EventletTest(testtools.TestCase):

    def test_read_that_hangs(self):
        self.run_program(PROGRAM, 'did not end within')

    def test_many_reads_that_hang(self):
        """They leave half of eventlet's pool to others."""
        self.run_program(POOL, '10 calls into the kernel hang')

    def test_store_that_is_locked(self):
        self.run_program(STORE, 'see which other process has it open')

    def run_program(self, program, said):
        directory = self.useFixture(fixtures.TempDir())
        with open(directory.join('attribute'), 'w') as file:
            file.write('value\n')
        # its reader waits in open() until somebody writes
        os.mkfifo(directory.join('hangs'))
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', program],
            cwd=directory.path, capture_output=True, text=True, timeout=600,
            env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn(said, done.stdout)
