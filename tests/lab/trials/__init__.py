# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the lab proves, each time from nothing in use to nothing in use."""
