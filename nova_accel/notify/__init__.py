# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Report the health of devices to owners of servers, Nova and monitoring."""
