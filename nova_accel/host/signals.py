# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Wake the main thread for signals while it waits in a lock.

Python runs the handlers of signals in the main thread only. Under native
threads the main thread of nova-compute waits in a lock without a time limit
(oslo_service.backend._threading.threadgroup, oslo.service 4.8). The kernel
delivers a signal of a process to any thread of the process that does not block
the signal. A thread that begins or ends may receive it, because glibc blocks
and unblocks signals there. Then nothing wakes the main thread, and the handler
of SIGTERM does not run. systemd kills nova-compute after TimeoutStopSec.
"""

import os
import signal
import sys
import threading
import time

from nova_accel import log as logging

LOG = logging.getLogger(__name__)

#: By default the kernel ignores this signal, and nova-compute and its
#: libraries do not use it.
_WAKES = signal.SIGURG
#: seconds between signals to the main thread: the first may arrive in the
#: moment before it waits
_PAUSES = (0, 0.1, 1)


class Waker:
    """A thread that wakes the main thread after each signal.

    cotyledon does the same in its main loop (cotyledon._utils); nova-compute
    does not run under cotyledon.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None

    def start(self) -> None:
        """Start the thread that wakes the main thread.

        Do nothing if another library has called signal.set_wakeup_fd(), or if
        the calling thread is not the main thread. Do nothing under eventlet
        either, because its hub in the main thread waits with a time limit.
        """
        patcher = sys.modules.get('eventlet.patcher')
        if (self._ends or threading.current_thread()
                is not threading.main_thread()
                or patcher and patcher.is_monkey_patched('thread')
                or signal.getsignal(_WAKES) is not signal.SIG_DFL):
            return
        reads, writes = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writes, False)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reads)
            os.close(writes)
            return
        # the kernel does not interrupt a wait for a signal that is ignored
        signal.signal(_WAKES, lambda number, frame: None)
        self._ends = reads, writes
        threading.Thread(target=self._wake, args=(reads,), daemon=True,
                         name='accel-signals').start()

    def close(self) -> None:
        """Stop the thread, and undo the changes of start()."""
        if not self._ends or (threading.current_thread()
                              is not threading.main_thread()):
            return
        _, writes = self._ends
        self._ends = None
        signal.set_wakeup_fd(-1)
        signal.signal(_WAKES, signal.SIG_DFL)
        # the reader closes the other end
        os.close(writes)

    @staticmethod
    def _wake(reads):
        main = threading.main_thread().ident or 0
        with open(reads, 'rb', buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == _WAKES:
                    continue
                for pause in _PAUSES:
                    time.sleep(pause)
                    signal.pthread_kill(main, _WAKES)
