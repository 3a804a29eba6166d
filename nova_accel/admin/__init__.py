# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What operators order by nova-accel, carried out in nova-compute."""
