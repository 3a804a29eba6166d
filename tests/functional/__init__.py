# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Real Nova, Placement and Glance; libvirt is Nova's own imitation of it."""

import os

# read when nova is first imported: native threads, as nova 34 runs
os.environ.setdefault('OS_NOVA_DISABLE_EVENTLET_PATCHING', 'true')

# before any other part of Nova: it decides about threads as it is imported
import nova.tests.functional  # noqa: E402,F401
