# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A simulated host, for tests, demonstrations and trials without hardware."""

from nova_accel.sim import captured
from nova_accel.sim.dfl import make_gbs
from nova_accel.sim.kernel import SimulatedKernel
from nova_accel.sim.xrt import make_xclbin

__all__ = ['SimulatedKernel', 'make_gbs', 'make_xclbin', 'open_host']


def open_host(path: str, writes: bool = True,
              ) -> SimulatedKernel | captured.CapturedKernel:
    """Return the simulated kernel of a host, from a description or a capture.

    :param path: file of the description or capture.
    :param writes: whether the state of a described host may be written.
    :raises InvalidSimulation: the file is malformed.
    """
    if captured.is_capture(path):
        return captured.CapturedKernel(path)
    return SimulatedKernel(path, writes)
