# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Real Nova, Placement and Glance; libvirt is Nova's own imitation of it."""

import logging
import os
import sys
import unittest

from tests import environment
from tests.threads import NOVA

environment.clear()
# read when nova is first imported: native threads or eventlet, whichever its
# nova-compute has by default
os.environ.setdefault('OS_NOVA_DISABLE_EVENTLET_PATCHING',
                      'true' if NOVA >= 34 else 'false')

#: where a wheel of Nova puts it; Nova's harness looks into a source tree
API_PASTE = os.path.join(sys.prefix, 'etc', 'nova', 'api-paste.ini')

# before any other part of Nova: it decides about threads as it is imported
import nova.tests.functional  # noqa: E402,F401
# this one sends the log to standard output
import nova.test  # noqa: E402,F401

# a worker of stestr writes its results there, and a thread that outlives its
# test would write into the midst of one
logging.getLogger().handlers[:] = [logging.NullHandler()]
# that of oslo.log says there of what a process dies
sys.excepthook = sys.__excepthook__

if NOVA == 33:
    import contextlib
    import threading

    from nova import monkey_patch
    from nova.tests.fixtures import notifications
    from oslo_db.sqlalchemy import enginefacade

    if not monkey_patch.is_patched():
        # its harness is for green threads only: it looks for the test among
        # them, and lets all threads share one connection to a database
        notifications.FakeVersionedNotifier._get_sender_test_case_id = (
            lambda notifier: notifier.test_case_id)
        lock = threading.RLock()
        scope = enginefacade._TransactionContextManager._transaction_scope

        @contextlib.contextmanager
        def one_at_a_time(*args):
            with lock, scope(*args) as resource:
                yield resource
        enginefacade._TransactionContextManager._transaction_scope = (
            one_at_a_time)

# after the choice of threads
from tests import cheap  # noqa: E402
from tests.functional import cloud  # noqa: E402
from tests.functional import process  # noqa: E402
from tests import limits  # noqa: E402
from tests import threads  # noqa: E402

threads.parse_in_turn()
cheap.placement()
cheap.nova()
process.prepare()
limits.apply(shared=True)
unittest.TestLoader.getTestCaseNames = cloud.fresh_last(
    unittest.TestLoader.getTestCaseNames)
