# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Carry out orders of operators (nova-accel) in nova-compute."""
