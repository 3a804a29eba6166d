# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Cinder's API, for tests/lab/serve.py."""

import sys

from tests.tempest import CONF

# it reads them when it is imported
sys.argv[1:] = ['--config-file', f'{CONF}/cinder.conf']

from cinder.wsgi.api import application  # noqa: E402

__all__ = ['application']
