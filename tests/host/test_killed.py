# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute is killed (SIGKILL) at the points of each operation.

After its next start nothing is lost, nothing is shared, no guest runs without
its device, and nothing of one server reaches the next one.
"""

from tests.host import killed_kinds

globals().update(killed_kinds.tests_of(__name__))
