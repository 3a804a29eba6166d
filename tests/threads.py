# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Threads of a test process: those that nova-compute has by default."""

from importlib import metadata
import os

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
