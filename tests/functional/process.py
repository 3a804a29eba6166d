# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What makes functional tests cheap and patient, once for the whole process.

* The garbage collector and databases are cheap, as ``tests/cheap_services.py``
  says.
* nova-api's application is built once. It has some 400 controllers.
* Nova's client of nova-api has one session of requests, not one for each.
* Nova does not check the schema of each answer of nova-api, and does not
  format its messages of level DEBUG, which no test shows. Those of nova_accel
  are formatted.
* Idle threads, of which restarts leave hundreds, sleep until there is work or
  their end. Those of futurist would wake up all the time to look for it.
* The lock of Nova's fixture of cells lets readers in while a writer waits. A
  conductor that holds it to read and calls a nova-compute would wait for that,
  nova-compute for the writer, and the writer for the conductor, until the call
  ends after half an hour.
* The stack of a thread is one piece of memory. Python would map and unmap its
  last 16 KiB each time that a loop calls a function across their border.
* A service that ends does not close the thread pools of the process, for good.
  Nova's fixture of a service sees to that only as long as it lasts, and on a
  loaded machine the service may come to it later.
* Nova's helpers that wait look after 0.05 s, and then less and less often, for
  as long as a loaded machine may need. They would look every 0.5 s, and give
  up after 5 s.
"""

import contextlib
import functools
import logging
import os
import threading
import time
import types

import futurist
from nova.api import wsgi
import nova.image.glance
from nova.tests import fixtures as nova_fixtures
from nova.tests.fixtures import notifications
from nova.tests.functional import integrated_helpers
from oslo_utils import importutils
import requests

from tests import cheap_process
from tests import cheap_services
from tests import limits

#: seconds after which a wait fails; a loaded machine may need many of them
PATIENCE = 120
#: seconds between two looks: of the first ones, and of all later ones
FIRST, LAST = 0.05, 0.5
#: how much longer each pause is than the one before
GROWTH = 1.5
#: values on the stack of a thread's outermost frame. What holds them, a power
#: of two (512 KiB), has room for some 300 further frames
OUTERMOST = 40000

#: methods of Nova's test cases that sleep until they see something
WAITS = ('_wait_for_service_parameter', '_wait_for_server_parameter',
         '_wait_until_deleted', '_wait_for_instance_action_event',
         '_wait_for_volume_attach', '_wait_for_volume_detach',
         '_wait_for_migration_status', '_wait_for_log', '_wait_for_assert',
         '_wait_for_server_allocations')


def until(look, seconds=PATIENCE, error=AssertionError):
    """Call a function again and again until it does not raise.

    :param look: function without arguments.
    :param seconds: how long its errors are taken for "not yet".
    :param error: class of these errors; others are raised at once.
    :returns: what look() returned.
    """
    end, pause = time.monotonic() + seconds, FIRST
    while True:
        # what they do may be what is waited for
        _work.pause()
        began = time.monotonic()
        try:
            return look()
        except error:
            now = time.monotonic()
            if now > end:
                raise
        # looking takes at most a third of the time, also on a loaded machine
        time.sleep(max(pause, 2 * (now - began)))
        pause = min(GROWTH * pause, LAST)


class _Work:
    """How many calls the services of the cloud are answering."""

    def __init__(self):
        self.running = 0
        self._lock = threading.Lock()

    def counted(self, run):
        """run() of futurist's item of work; not of one that is a loop, as
        services report their state, because that goes on all the time."""
        @functools.wraps(run)
        def counted(item):
            if 'LoopingCall' in getattr(item.fn, '__qualname__', ''):
                return run(item)
            self._add(1)
            try:
                return run(item)
            finally:
                self._add(-1)
        return counted

    def pause(self):
        """Let the services end what they do, for as long as LAST."""
        end = time.monotonic() + LAST
        while self.running and time.monotonic() < end:
            time.sleep(FIRST)

    def _add(self, number):
        with self._lock:
            self.running += number


_work = _Work()


class _NotYet(Exception):
    """A helper of Nova looked once, saw nothing yet and wants to sleep."""


def _not_yet(_seconds):
    raise _NotYet


def _no_pause(_seconds):
    pass


def _patient(helper):
    """A waiting method of Nova's, with pauses and an end of our own."""
    @functools.wraps(helper)
    def wait(*args, **kwargs):
        clock = integrated_helpers.time
        before = clock.sleep
        try:
            clock.sleep = _not_yet
            with contextlib.suppress(_NotYet):
                return until(lambda: helper(*args, **kwargs), error=_NotYet)
            # its own error, which says what it saw
            clock.sleep = _no_pause
            return helper(*args, **kwargs)
        finally:
            clock.sleep = before
    return wait


def _built_once(load_app):
    built = {}

    @functools.wraps(load_app)
    def load(loader, name):
        if not isinstance(nova.image.glance.API, type):
            # Nova's imitation of Glance, of which controllers keep the one
            # that is there when they are made
            return load_app(loader, name)
        key = loader.config_path, name
        if key not in built:
            built[key] = load_app(loader, name)
        return built[key]
    return load


def _quieter(start):
    """setUp() of Nova's fixture of the log."""
    @functools.wraps(start)
    def started(fixture):
        start(fixture)
        if not os.environ.get('OS_DEBUG'):
            logging.getLogger().setLevel(logging.INFO)
            ours = logging.getLogger('nova_accel')
            fixture.addCleanup(ours.setLevel, ours.level)
            ours.setLevel(logging.DEBUG)
    return started


def _unchecked(start):
    """setUp() of Nova's fixture of the configuration."""
    @functools.wraps(start)
    def started(fixture):
        start(fixture)
        if 'response_validation' in fixture.conf.api:
            fixture.conf.set_default(
                'response_validation', 'ignore', group='api')
    return started


def _for_itself(start):
    """__init__() of a session of requests: without proxies and passwords of
    the environment, which are looked for with each request."""
    @functools.wraps(start)
    def started(session):
        start(session)
        session.trust_env = False
    return started


def _sleep_until_work(worker):
    """Of futurist's thread: wait for the next item of its queue."""
    worker.idle = True
    while (work := worker.work_queue.get()) is None:
        worker.work_queue.task_done()
        if worker._is_dying():
            raise futurist._thread._Stopping
        # the end of another thread of the same queue
        worker.work_queue.put(None)
        time.sleep(FIRST)
    worker.idle = False
    return work


def _with_room(outermost):
    """Let a function have a large frame, of which it touches nothing."""
    outermost.__code__ = outermost.__code__.replace(co_stacksize=OUTERMOST)


def _wake_and_stop(worker):
    worker.should_stop = True
    worker.work_queue.put(None)


def prepare():
    """Apply all of this to the process. Call it once."""
    cheap_process.collector()
    cheap_process.files()
    _with_room(threading.Thread._bootstrap_inner)
    _with_room(limits.Limited._run_core)
    cheap_services.databases(lambda: bool(limits.green_thread()))
    requests.Session.__init__ = _for_itself(requests.Session.__init__)
    requests.request = requests.Session().request
    wsgi.Loader.load_app = _built_once(wsgi.Loader.load_app)
    nova_fixtures.StandardLogging.setUp = _quieter(
        nova_fixtures.StandardLogging.setUp)
    nova_fixtures.ConfFixture.setUp = _unchecked(
        nova_fixtures.ConfFixture.setUp)
    nova_fixtures.ReaderWriterLock.has_pending_writers = False
    futurist._thread.ThreadWorker._wait_for_work = _sleep_until_work
    futurist._utils.WorkItem.run = _work.counted(
        futurist._utils.WorkItem.run)
    futurist._thread.ThreadWorker.stop = _wake_and_stop
    # of Nova 34
    pools = importutils.try_import('nova.thread_pool_factory')
    if pools:
        pools.shutdown_all_executors = lambda: None
    integrated_helpers.time = types.SimpleNamespace(
        **{**vars(time), 'sleep': time.sleep})
    for owner in (integrated_helpers.InstanceHelperMixin,
                  integrated_helpers.PlacementInstanceHelperMixin):
        for name in WAITS:
            if name in vars(owner):
                setattr(owner, name, _patient(getattr(owner, name)))
    notified = notifications.NotificationFixture
    notified.wait_for_versioned_notifications = functools.partialmethod(
        notified.wait_for_versioned_notifications, timeout=PATIENCE)
