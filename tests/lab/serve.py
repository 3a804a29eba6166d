# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Serve a WSGI application: python -P serve.py MODULE:ATTRIBUTE PORT"""

import importlib
import sys

import waitress

module, _, attribute = sys.argv[1].partition(':')
port = int(sys.argv[2])
# nova, keystone and glance read the arguments when they are imported
del sys.argv[1:]
waitress.serve(getattr(importlib.import_module(module), attribute),
               listen=f'0.0.0.0:{port}', threads=8, ident=None,
               channel_timeout=300)
