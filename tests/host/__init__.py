# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The middle tier: what a compute host decides, without Nova.

Real accelerators, a real claim store and the simulated kernel; Nova, Placement,
Glance and libvirt are tests.host.cloud, which has just what attach.cloud
names. A test takes tenths of a second.
"""

import logging

from tests import cheap_process
from tests import environment
from tests import limits
from tests import threads

environment.clear()
threads.choose()
threads.parse_in_turn()

# the log of a test that passes is no news
logging.getLogger().addHandler(logging.NullHandler())
limits.apply()
cheap_process.collector()
cheap_process.files()
