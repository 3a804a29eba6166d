# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Select the kernel interface for the drivers: real, simulated or captured."""

import os
import typing

from nova_accel import conf
from nova_accel.host import kernel as host_kernel

if typing.TYPE_CHECKING:
    from nova_accel import sim

CONF = conf.CONF


def open_kernel(host: str, writes: bool = True,
                ) -> ('host_kernel.Kernel | sim.SimulatedKernel '
                      '| sim.captured.CapturedKernel'):
    """Return the kernel interface that the drivers of this host use.

    :param host: [DEFAULT] host. It names the file if [accel] simulated_host is
        a directory.
    :param writes: whether the state of a simulated host is written. Read-only
        commands pass False.
    :returns: Kernel of this machine or, if [accel] simulated_host is set, a
        SimulatedKernel or CapturedKernel.
    :raises InvalidSimulation: the description cannot be used.
    """
    path = CONF.accel.simulated_host
    if not path:
        return host_kernel.Kernel()
    # imported only for simulated hosts
    from nova_accel import sim
    if os.path.isdir(path):
        path = os.path.join(path, f'{host}.yaml')
    return sim.open_host(path, writes)
