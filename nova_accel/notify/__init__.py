# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How devices are, reported to owners of servers, Nova and monitoring."""
