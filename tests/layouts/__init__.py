# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova_accel beside Nova, in each way in which both are installed.

``make layouts`` runs all of them; tests/functional/test_layouts.py has the one
that each change has to pass, and .ci/run more.
"""
