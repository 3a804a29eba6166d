# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Tests that every driver has to pass, for packages with drivers.

A subclass of DriverTestCase names a driver and describes a simulated host with
its cards; ``python -m unittest`` runs it. Each failure names the method and the
sentence of nova_accel.drivers.base that it breaks.
"""

from nova_accel.testing import regions


class DriverTestCase(regions.RegionTests):
    """The contract of drivers, as tests."""


__all__ = ['DriverTestCase']
