# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute in a process of its own, which is killed where a test says.

A real SIGKILL: no except, no finally, no thread runs on. ``python -m
tests.host.killed`` forks a process for each nova-compute, which saves the
second that imports take. That one reads what it has to do and answers, a line
of JSON each, until it is killed or told to end. It does many jobs, because what
its memory has between two of them counts; one of
tests.functional.compute_process does one.

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
from tests.host import faults
from tests.host import outside
from tests.host import steps
from tests import limits


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
        self._runs = False

    def start(self, kill_at: int):
        """Start nova-compute, and kill it at a point of that.

        :raises Killed: it was.
        """
        return self.run([], kill_at, of_the_start=True)

    def run(self, steps, kill_at: int | None = None,
            of_the_start: bool = False):
        """Do steps in the nova-compute that runs; one is started if need be.

        :param steps: [[name of a method of Steps, argument ...] ...]
        :param kill_at: the point at which the process is killed.
        :param of_the_start: another one is started, and points count from
            its start, not from the steps.
        :returns: the result of each step.
        :raises Killed: it was.
        :raises AssertionError: a step failed; the process has ended.
        """
        if of_the_start:
            self.end()
            return self._do([['start'], *steps], kill_at)[1:]
        if not self._runs:
            self._do([['start']], None)
        return self._do(steps, kill_at)

    def fail(self, steps, fault: faults.Fault | None):
        """Do steps in the nova-compute that runs while a call fails.

        :param fault: None for none.
        :returns: the sentence of each step that was refused, or None; and how
            many calls of which name there were.
        """
        self.run([])
        return self._do([['attempt', *step] for step in steps], None,
                        fault=fault or ['', 0, ''])

    def _do(self, steps, kill_at, **more):
        answer = self._ask(
            {**self._job, 'steps': steps, 'kill_at': kill_at, **more})
        self._runs = 'results' in answer
        if not self._runs:
            self._forker.stdout.readline()
        if 'killed' in answer:
            raise Killed(answer['killed'])
        if 'error' in answer:
            raise AssertionError(answer['error'])
        return answer['results']

    def end(self):
        """End nova-compute, if one runs, between two steps: what only its
        memory has is lost."""
        if self._runs:
            self._ask({})
            self._runs = False

    def _ask(self, said):
        try:
            self._forker.stdin.write(f'{json.dumps(said)}\n')
            self._forker.stdin.flush()
            return json.loads(self._forker.stdout.readline())
        except BaseException:
            # a test that may not go on: its answer would be the next one's
            self._runs = False
            _end(self._forker)
            _forker.cache_clear()
            raise


@functools.cache
def _forker(path: str | None) -> subprocess.Popen:
    """The process that forks, for all tests of this one.

    :param path: PYTHONPATH, which says what it can import.
    """
    forker = subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-m', 'tests.host.killed'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True)
    limits.PROCESSES.add(forker.pid)
    atexit.register(_end, forker)
    return forker


def _end(forker: subprocess.Popen) -> None:
    """Kill it, and a nova-compute that hangs with it: that would keep it."""
    if forker.poll() is None:
        os.killpg(forker.pid, signal.SIGKILL)
        forker.wait()
    with contextlib.suppress(BrokenPipeError):
        forker.stdin.close()
    forker.stdout.close()


class Points:
    """Counts the points of a process, and ends it at one of them."""

    def __init__(self):
        self._kill_at = None
        #: of the calls that end, one after another
        self._numbers = itertools.count(1)
        self._counts = False
        outside.watch(outside.CHANGES, self._around)

    @contextlib.contextmanager
    def counted(self, kill_at):
        """Points count meanwhile, from 0."""
        self._kill_at, self._numbers = kill_at, itertools.count(1)
        self._counts = True
        yield
        self._counts = False

    def _around(self, kind, name, method):
        def call(*args, **kwargs):
            if self._counts and self._kill_at == 0:
                self._kill(f'before {name}')
            try:
                return method(*args, **kwargs)
            finally:
                if self._counts and next(self._numbers) == self._kill_at:
                    self._kill(f'after {name}')
        return call

    def _kill(self, where):
        _tell({'killed': f'{where}, at point {self._kill_at}'}, last=True)
        os.kill(os.getpid(), signal.SIGKILL)


_telling = threading.Lock()


def _tell(answer, last=False):
    """:param last: no other thread says anything after it."""
    _telling.acquire()
    # steps may return objects
    print(json.dumps(answer, default=lambda _: None), flush=True)
    if not last:
        _telling.release()


def _heard():
    # the buffer takes one line: the test awaits an answer before the next
    return json.loads(sys.stdin.readline())


def _work(asked, points):
    """One nova-compute, until it is told to end."""
    for name, value in asked['options'].items():
        conf.CONF.set_override(name, value, group='accel')
    host, failing = steps.Steps(asked['directory'], asked['path']), None
    while asked:
        if 'fault' in asked:
            failing = failing or faults.Faults(
                asked['options']['bitstream_cache'], host.store._db)
            failing.begin(faults.Fault(*asked['fault']))
        with points.counted(asked['kill_at']):
            results = [getattr(host, name)(*args)
                       for name, *args in asked['steps']]
        if 'fault' in asked:
            results = results, failing.end()
        _tell({'results': results})
        asked = _heard()


def _main():
    conf.CONF([], project='nova')
    # what is imported and read here, no process has to
    extension.ExtensionManager(drivers.NAMESPACE)
    naming.is_trait('')
    logging.getLogger(None).logger.setLevel(logging.CRITICAL)
    points = Points()
    # no process copies memory that it only reads
    gc.freeze()
    for line in iter(sys.stdin.readline, ''):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            # nothing of it runs any more
            _tell({})
            continue
        try:
            _work(json.loads(line), points)
        except BaseException:
            _tell({'error': traceback.format_exc()}, last=True)
        os._exit(0)


if __name__ == '__main__':
    _main()
