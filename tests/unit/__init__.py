# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What needs no Nova that runs."""

import logging

import hypothesis

from tests import cheap_process
from tests import environment
from tests import limits
from tests import threads

environment.clear()
threads.choose()

# the log of a test that passes is no news; one that is asked for it has a
# handler of its own
logging.getLogger().addHandler(logging.NullHandler())
limits.apply()
cheap_process.collector()
cheap_process.files()

# the same examples each day and on each machine: a test that fails fails again
# when it is run again, by itself as well. Time is no reason to fail
hypothesis.settings.register_profile(
    'everyday', derandomize=True, deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile('everyday')
