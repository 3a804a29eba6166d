# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova_accel on a real kernel, without accelerators: make lab.

The lab's room is a set of namespaces (mounts, processes, network) around a
Debian chroot. In it run keystone, glance, placement, nova, MariaDB, RabbitMQ
and a virtual machine, whose PCI devices are emulated and whose kernel,
drivers, libvirt, QEMU and nova-compute are real. Nothing of it is
installed on the host, no port of the host is used, and the room ends with its
first process.

    build     makes the chroot and the machine's disk, once
    room      on the host: starts, enters and ends the room
    first     the first process in the room: starts the services
    machine   in the room: the virtual machine
    cloud     in the room: the public APIs
    trials    in the room: what is proven
"""

import os
import pathlib

SOURCE = pathlib.Path(__file__).resolve().parents[2]
LAB = SOURCE / 'tests/lab'

#: exit status when the lab cannot run on this machine, or not now
UNFIT = 69


class Unfit(Exception):
    """This machine cannot run the lab, or not now; a sentence."""


class Failed(Exception):
    """The lab does not work; a sentence and perhaps the end of a log."""


def home() -> pathlib.Path:
    """Where everything that the lab makes is kept."""
    cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    path = os.environ.get('NOVA_ACCEL_LAB') or f'{cache}/nova_accel-lab'
    return pathlib.Path(path).expanduser().absolute()
