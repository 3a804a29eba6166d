# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The kernel that the drivers of this host work with: real or simulated."""

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
    """Return the kernel that the drivers of this host work with.

    :param host: [DEFAULT] host, which chooses the file if [accel]
        simulated_host is a directory.
    :param writes: False for a command that only shows: the state of a
        simulated host is read, and not written.
    :returns: a SimulatedKernel, or a CapturedKernel where the file is a
        capture, if [accel] simulated_host is set; otherwise the machine's own
        Kernel.
    :raises InvalidSimulation: the description cannot be used.
    """
    path = CONF.accel.simulated_host
    if not path:
        return host_kernel.Kernel()
    # loaded only where it is wanted
    from nova_accel import sim
    if os.path.isdir(path):
        path = os.path.join(path, f'{host}.yaml')
    return sim.open_host(path, writes)
