# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Contract tests for drivers of other packages.

A subclass of DriverTestCase names a driver and describes a simulated host with
its cards; ``python -m unittest`` runs it. Each failure names the method and the
sentence of nova_accel.drivers.base that the driver violates.
"""

from nova_accel.testing import servers


class DriverTestCase(servers.RegionTests):
    """The contract of drivers, as tests."""


__all__ = ['DriverTestCase']
