# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute in a process of its own, which is killed where a test says.

A real SIGKILL: no except, no finally, no thread runs on. ``python -m
tests.host.killed`` forks a process for each job that it reads, a line of JSON
each, and answers how it ended: forking saves the second that imports take.

A point is a moment at which something outside of the process has just changed:
a row of the claim store, the card, Placement, a guest. Point 0 is before the
first such call, point n is after the end of n calls, whether they failed or
not. Between two calls memory alone changes, which a kill takes anyway.
"""

import atexit
import contextlib
import functools
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import traceback

from oslo_log import log as logging
from stevedore import extension

from nova_accel import conf
from nova_accel import drivers
from nova_accel import naming
from nova_accel import sim
from nova_accel.store import claim_store
from tests.host import base
from tests.host import cloud as clouds

#: what changes something outside of the process
CALLS = {
    claim_store.ClaimStore: (
        'add', 'change', 'remove', 'set_loaded', 'place', 'set_reserved',
        'await_operator', 'add_handover', 'settle', 'disable', 'enable'),
    sim.SimulatedKernel: (
        'program_dfl_port', 'reset_dfl_port', 'create_mdev', 'remove_mdev',
        'reset_nvme', 'start_nvme_sanitize', 'format_nvme',
        'restore_nvme_namespaces', 'format_nvme_vf', 'reset_nvme_vf',
        'unbind', 'reset_function', 'probe',
        'write_attribute', 'write_timecard', 'program_xclbin',
        'close_mailbox', 'offer_xclbin', 'withdraw_xclbin', 'call'),
    clouds.Cloud: ('show', 'attach', 'detach', 'start_guest', 'reshape'),
}


class Killed(Exception):
    """The process was killed; where, in words."""


class Processes:
    """One nova-compute after another on the same simulated host."""

    def __init__(self, directory: str, path: str, **options):
        """
        :param directory: of the claim store and of the cloud.
        :param path: description of the simulated host.
        :param options: of [accel].
        """
        #: of [accel], for the processes from now on
        self.options = options
        self._job = {'directory': directory, 'path': path,
                     'options': options}
        self._forker = _forker(os.environ.get('PYTHONPATH'))

    def start(self, kill_at: int):
        """Start nova-compute, and kill it at a point of that.

        :raises Killed: it was.
        """
        return self.run([], kill_at, of_the_start=True)

    def run(self, steps, kill_at: int | None = None,
            of_the_start: bool = False):
        """Start nova-compute, and do steps.

        :param steps: [[name of a method of Host, argument ...] ...]
        :param kill_at: the point at which the process is killed.
        :param of_the_start: points count from the start, not from the steps.
        :returns: the result of each step.
        :raises Killed: it was.
        :raises AssertionError: a step failed.
        """
        self._forker.stdin.write(json.dumps(
            {**self._job, 'steps': steps, 'kill_at': kill_at,
             'of_the_start': of_the_start}) + '\n')
        self._forker.stdin.flush()
        answer = json.loads(self._forker.stdout.readline())
        if 'killed' in answer:
            raise Killed(answer['killed'])
        if 'error' in answer:
            raise AssertionError(answer['error'])
        return answer['results']


@functools.cache
def _forker(path: str | None) -> subprocess.Popen:
    """The process that forks, for all tests of this one.

    :param path: PYTHONPATH, which says what it can import.
    """
    forker = subprocess.Popen(
        [sys.executable, '-m', 'tests.host.killed'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close():
        forker.stdin.close()
        forker.wait()
        forker.stdout.close()
    atexit.register(close)
    return forker


class Points:
    """Counts the points of a process, and ends it at one of them."""

    def __init__(self, kill_at, tell):
        self._kill_at, self._tell = kill_at, tell
        #: of the calls that end, one after another
        self._numbers = itertools.count(1)
        self.counts = False

    def watch(self):
        for kind, names in CALLS.items():
            for name in names:
                setattr(kind, name, self._around(name, getattr(kind, name)))

    def _around(self, name, method):
        def call(*args, **kwargs):
            if self.counts and self._kill_at == 0:
                self._kill(f'before {name}')
            try:
                return method(*args, **kwargs)
            finally:
                if self.counts and next(self._numbers) == self._kill_at:
                    self._kill(f'after {name}')
        return call

    def _kill(self, where):
        self._tell({'killed': f'{where}, at point {self._kill_at}'})
        os.kill(os.getpid(), signal.SIGKILL)


def _work(job, tell):
    points = Points(job['kill_at'], tell)
    points.watch()
    for name, value in job['options'].items():
        conf.CONF.set_override(name, value, group='accel')
    points.counts = job['of_the_start']
    host = base.Host(job['directory'], job['path']).start()
    points.counts = True
    tell({'results': [getattr(host, name)(*args)
                      for name, *args in job['steps']]})


def _main():
    conf.CONF([], project='nova')
    # what is imported and read here, no process has to
    extension.ExtensionManager(drivers.NAMESPACE)
    naming.is_trait('')
    logging.getLogger(None).logger.setLevel(logging.CRITICAL)
    # no process copies the memory of what it only looks at
    gc.freeze()
    for line in sys.stdin:
        reader, writer = os.pipe()
        if not os.fork():
            telling = threading.Lock()

            def tell(answer):
                # once: nothing comes after it
                telling.acquire()
                os.write(writer, json.dumps(answer).encode())
            try:
                _work(json.loads(line), tell)
            except BaseException:
                tell({'error': traceback.format_exc()})
            os._exit(0)
        os.close(writer)
        with open(reader) as file:
            said = file.read()
        with contextlib.suppress(ChildProcessError):
            os.wait()
        print(said, flush=True)


if __name__ == '__main__':
    _main()
