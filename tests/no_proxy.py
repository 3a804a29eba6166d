# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The services that tests start are on this machine, and no proxy leads there.

Where the environment names one, as within a company, pip needs it to set up
what tests run in. But requests would send to it what is meant for 127.0.0.1,
and wsgi_intercept refuses to begin.
"""

import os


def apply() -> None:
    """Have this process and those that it starts use no proxy."""
    for name in [n for n in os.environ if n.lower().endswith('_proxy')]:
        del os.environ[name]
