# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A simulated host, for tests, demonstrations and trials without hardware."""

import os

from nova_accel import conf
from nova_accel.host import kernel as host_kernel
from nova_accel.sim.gbs import make_gbs
from nova_accel.sim.kernel import SimulatedKernel
from nova_accel.sim.xclbin import make_xclbin

__all__ = ['SimulatedKernel', 'make_gbs', 'make_xclbin', 'open_kernel']

CONF = conf.CONF


def open_kernel(host: str):
    """The kernel that the drivers of this host work with.

    :param host: [DEFAULT] host, which chooses the file when [accel]
        simulated_host is a directory.
    :returns: a SimulatedKernel when [accel] simulated_host is set, otherwise
        the machine's own Kernel.
    :raises InvalidSimulation: when the description cannot be used.
    """
    path = CONF.accel.simulated_host
    if not path:
        return host_kernel.Kernel()
    if os.path.isdir(path):
        path = os.path.join(path, f'{host}.yaml')
    return SimulatedKernel(path)
