# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The health of devices: what is read of them, and what that means."""
