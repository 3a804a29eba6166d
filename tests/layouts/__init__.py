# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova_accel beside Nova, in each way in which both are installed.

``make layouts`` runs all of them, and .ci/run two.
"""

from tests import limits

limits.apply()
