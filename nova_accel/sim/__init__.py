# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A simulated host, for tests, demonstrations and trials without hardware."""

from nova_accel.sim.gbs import make_gbs
from nova_accel.sim.kernel import SimulatedKernel
from nova_accel.sim.xclbin import make_xclbin

__all__ = ['SimulatedKernel', 'make_gbs', 'make_xclbin']
