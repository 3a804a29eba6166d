# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What tests do not take from the environment of who runs them.

* A proxy, as within a company: pip needs it to set up what tests run in. But
  the services that tests start are on this machine, requests would ask for them
  there, and wsgi_intercept refuses to begin.
* Credentials of a cloud, OS_*, which would be those of the commands that tests
  start.
"""

import os

#: of OS_* what is about Nova's threads, and about tests
_KEPT = ('OS_NOVA_', 'OS_DEBUG', 'OS_TEST_', 'OS_LOG_', 'OS_STD')


def clear() -> None:
    """Forget these, for this process and those that it starts."""
    for name in list(os.environ):
        if (name.lower().endswith('_proxy')
                or name.startswith('OS_') and not name.startswith(_KEPT)):
            del os.environ[name]
