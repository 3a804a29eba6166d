# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The health of devices: signals that are read, and findings from them."""
