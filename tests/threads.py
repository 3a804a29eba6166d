# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Threads of a test process: those that nova-compute has by default."""

import ast
from importlib import metadata
import os
import threading

#: the release of Nova that is installed
NOVA = int(metadata.version('nova').split('.')[0])

if NOVA >= 34:
    # oslo.service imports eventlet, of which nothing is used; that makes it
    # import a name server as well, a fifth of a second in each process
    os.environ.setdefault('EVENTLET_NO_GREENDNS', 'yes')


def choose() -> None:
    """Make threads green under a Nova whose nova-compute has green ones.

    A module of Nova may do so when it is imported, in the middle of the tests.
    Locks and servers that exist then stop working.
    """
    if NOVA >= 34:
        return
    from nova import monkey_patch
    # Nova 31 and 32 patch when this is imported
    if hasattr(monkey_patch, 'patch'):
        monkey_patch.patch()


def parse_in_turn() -> None:
    """Have one thread at a time parse: Python 3.11 and 3.12 count the depth of
    all of them together, and raise SystemError where one of two has ended.
    mock.create_autospec() parses, by inspect.signature()."""
    parse, one = ast.parse, threading.RLock()

    def in_turn(*args, **kwargs):
        with one:
            return parse(*args, **kwargs)
    ast.parse = in_turn
