# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Nova's own tests of its libvirt driver, run with our driver in its place.

The wheel of Nova contains them. The command is `python -m tests.nova`.
"""
