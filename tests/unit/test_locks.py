# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Locks have names, an order and a limit."""

import ast
import pathlib
import threading

import fixtures
import testtools

import nova_accel
from nova_accel import exception
from nova_accel import locks
from tests import lock_order

ROOT = pathlib.Path(nova_accel.__file__).parent
PAGE = ROOT.parent / 'docs/source/contributor/architecture.rst'
#: files that may have locks of other kinds, and why
OTHERS = {
    'host/limited.py': 'a thread with nothing to run waits for work',
    'locks.py': 'the one place',
    'scheduler/fault.py': 'a semaphore, which is taken with a time limit',
    'sim/kernel.py': 'its lock also locks a file for other processes',
    'sim/captured.py': 'a command records alone',
    'virt/cloud.py': "Nova's lock, of which Nova decides",
}
#: methods that wait for as long as no limit is given
WAITS = ('wait', 'join', 'result', 'get', 'acquire', 'accept', 'communicate')
#: functions that do, unless an argument tells otherwise
OTHER_WAITS = ('run', 'check_output', 'check_call', 'call', 'flock', 'lockf',
               'as_completed', 'wait_for', 'select', 'waitpid', 'recv')
#: what looks like one, or waits and may
MAY_WAIT = {
    ('api/expansion.py', '_resizing.get()'): 'a variable of the request',
    ('api/expansion.py', '_rebuilding.get()'): 'a variable of the request',
    ('cmd/output.py', 'shows.join()'): 'its event is set',
    ('host/limited.py', 'self._given.acquire()'):
        'a thread with nothing to run waits for work',
    ('host/devlink.py', 'kernel.recv(1 << 16)'): 'has that of its socket',
    ('host/kernel.py', 'events.recv(1 << 16)'): 'has that of its socket',
    ('locks.py', 'self.acquire()'): 'has the limit of the lock',
}


class LockTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger())
        self.goes_on = threading.Event()
        self.addCleanup(self.goes_on.set)

    def hold(self, context):
        held = threading.Event()

        def run():
            with context:
                held.set()
                self.goes_on.wait(60)
        thread = threading.Thread(target=run, name='the-other')
        thread.start()
        self.addCleanup(thread.join, 60)
        self.addCleanup(self.goes_on.set)
        self.assertTrue(held.wait(60))

    def test_limit(self):
        lock = locks.Lock('store', 'The claims', lambda: 0.05)
        self.hold(lock)
        error = self.assertRaises(exception.LockTimeout, lock.acquire)
        self.assertEqual(
            'The claims were waited for 0.05 s, and another operation still '
            'works on them, in the thread the-other: see in the log of '
            'nova-compute what it does, and repeat the operation when that '
            'has ended.', str(error))
        self.assertNotIn('the-other', exception.for_owner(error))
        self.assertIn('self.goes_on.wait(60)', self.log.output)
        self.assertFalse(lock.acquire(blocking=False))

    def test_another_error(self):
        lock = locks.Lock('store', 'The claims', lambda: 0.05,
                          exception.AcceleratorsUnavailable)
        self.hold(lock)
        self.assertRaises(exception.AcceleratorsUnavailable, lock.acquire)

    def test_by_key(self):
        servers = locks.Locks('server', 'The devices of {}', lambda: 0.05)
        self.hold(servers.held('a'))
        with servers.held('b'):
            error = self.assertRaises(
                exception.LockTimeout, servers.held('a').__enter__)
        self.assertIn('The devices of a were waited for', str(error))
        self.goes_on.set()
        # and none is kept that is not in use
        end = 600
        while servers._locks and end:
            threading.Event().wait(0.1)
            end -= 1
        self.assertEqual({}, servers._locks)

    def test_condition(self):
        """One that waits gives the lock to the others."""
        condition = locks.condition('cards')
        with condition:
            self.assertFalse(condition.wait(0.01))
            # as in the handler of a signal
            with condition:
                condition.notify_all()
        self.assertRaises(RuntimeError, condition.notify_all)

    def test_unknown_name(self):
        self.assertRaises(ValueError, locks.Lock, 'mine')


def calls():
    """Yield each call in the code by the name of its file."""
    for path in ROOT.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(
                    node.func, ast.Attribute):
                yield str(path.relative_to(ROOT)), node


class OrderTest(testtools.TestCase):

    def test_inversion_is_noticed(self):
        order = lock_order.LockOrder()
        order.setUp()
        first, last = locks.Lock('server'), locks.Lock('store')
        with first, last:
            pass
        self.assertEqual([], order.inversions)
        with last, first:
            pass
        error = self.assertRaises(AssertionError, order.cleanUp)
        self.assertIn('took "server" and held "store"', str(error))

    def test_reentrant(self):
        order = self.useFixture(lock_order.LockOrder())
        lock = locks.Lock('changes', reentrant=True)
        with lock, locks.Lock('devices'), lock:
            pass
        self.assertEqual({('changes', 'devices')}, order.edges)

    def test_two_of_one_name(self):
        """Two threads would take them in two orders."""
        order = lock_order.LockOrder()
        order.setUp()
        with locks.Lock('server'), locks.Lock('server'):
            pass
        self.assertRaises(AssertionError, order.cleanUp)

    def test_no_other_locks(self):
        """A lock that is not in the list has no limit and no place."""
        found = {name for name, node in calls() if ast.unparse(node.func) in (
            'threading.Lock', 'threading.RLock', 'threading.Semaphore',
            'threading.BoundedSemaphore', 'lockutils.lock')
            or ast.unparse(node) == 'threading.Condition()'}
        self.assertEqual(set(OTHERS), found)

    def test_waits_have_a_limit(self):
        """The simulator apart, which no nova-compute runs."""
        self.assertEqual(set(MAY_WAIT), {
            (name, ast.unparse(node)) for name, node in calls()
            if not name.startswith('sim/') and self.is_endless(node)})

    @staticmethod
    def is_endless(call):
        """Whether a call waits without a limit, as far as its text shows."""
        if (not isinstance(call.func, ast.Attribute)
                or call.func.attr not in WAITS + OTHER_WAITS):
            return False
        text = ast.unparse(call)
        name = ast.unparse(call.func)
        if name in ('subprocess.run', 'subprocess.check_output',
                    'subprocess.check_call', 'subprocess.call'):
            return 'timeout=' not in text
        if name in ('fcntl.flock', 'fcntl.lockf'):
            return not ('LOCK_NB' in text or 'LOCK_UN' in text)
        if name.endswith(('futures.wait', '.as_completed', '.wait_for')):
            return len(call.args) < 2 and not call.keywords
        if name == 'select.select':
            return len(call.args) < 4
        if name == 'os.waitpid':
            return 'WNOHANG' not in text
        if name.endswith('.recv'):
            return True
        return (call.func.attr in WAITS
                and not (call.args or call.keywords))

    def test_waits_without_a_limit_are_seen(self):
        for text in ('event.wait()', 'futures.wait(started)',
                     'thread.join()', 'future.result()', 'queue.get()',
                     'condition.wait_for(fits)', 'subprocess.run(["a"])',
                     'fcntl.flock(fd, fcntl.LOCK_EX)', 'lock.acquire()',
                     'fcntl.lockf(fd, fcntl.LOCK_EX)', 'server.accept()',
                     'select.select([fd], [], [])', 'os.waitpid(pid, 0)',
                     'futures.as_completed(started)', 'peer.recv(1)'):
            self.assertTrue(self.is_endless(
                ast.parse(text, mode='eval').body), text)

    def test_page(self):
        """The page for contributors has each lock, in this order."""
        part = PAGE.read_text().split('\nLocks\n=====\n')[1]
        table = part.split('\n====')[2].split('\n')
        self.assertEqual(list(locks.ORDER), [
            line.split('``')[1] for line in table if line.startswith('``')])
