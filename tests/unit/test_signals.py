# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The main thread hears of every signal."""

import signal
import subprocess
import sys
import textwrap
import threading

import testtools

from nova_accel.host import signals
from tests import limits

#: The main thread waits as that of nova-compute. The signal goes to another
#: thread, as the kernel may give it: the handler has to run all the same.
PROGRAM = textwrap.dedent('''
    import os
    import signal
    import sys
    import threading
    import time
    from nova_accel.host import signals

    if sys.argv[1] == 'with':
        signals.Waker().start()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))

    def other():
        main = threading.main_thread().ident
        while sys._current_frames()[main].f_code.co_name != 'wait':
            time.sleep(0.01)
        time.sleep(0.5)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        time.sleep(4)
        os._exit(1)
    threading.Thread(target=other, daemon=True).start()
    threading.Event().wait()
''')


class WakerTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.waker = signals.Waker()
        self.addCleanup(self.waker.close)

    def state(self):
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return fd, signal.getsignal(signal.SIGURG)

    def run_program(self, argument):
        return subprocess.run([sys.executable, '-c', PROGRAM, argument],
                              timeout=120).returncode

    def test_signal_that_another_thread_takes(self):
        self.assertEqual(7, self.run_program('with'))

    def test_without(self):
        """What is mended: Python and the kernel are still so."""
        self.assertEqual(1, self.run_program('without'))

    def test_all_as_before(self):
        if limits.green_thread():
            self.skipTest('Under eventlet it does nothing.')
        before = self.state()
        self.waker.start()
        self.waker.start()
        self.assertNotEqual(before, self.state())
        self.waker.close()
        self.waker.close()
        self.assertEqual(before, self.state())

    def test_not_in_the_main_thread(self):
        """Where Python would refuse it."""
        before = self.state()
        thread = threading.Thread(target=self.waker.start)
        thread.start()
        thread.join(60)
        self.assertEqual(before, self.state())

    def test_another_has_it(self):
        other = signals.Waker()
        other.start()
        self.addCleanup(other.close)
        before = self.state()
        self.waker.start()
        self.waker.close()
        self.assertEqual(before, self.state())
