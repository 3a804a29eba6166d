# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Where a worker of stestr finds the tests of one suite."""

import importlib
import os
import pkgutil

from tests.nova import place
from tests.nova import suites

SUITE = suites.SUITES[os.environ[suites.SUITE]]

place.configure(SUITE.card)
if not os.environ.get(suites.STOCK):
    SUITE.put()


def _modules(name):
    module = importlib.import_module(name)
    if not hasattr(module, '__path__'):
        return [name]
    return [f'{name}.{m.name}' for m in pkgutil.iter_modules(module.__path__)
            if m.name.startswith('test_')]


def load_tests(loader, tests, pattern):
    return loader.loadTestsFromNames(_modules(SUITE.tests))
