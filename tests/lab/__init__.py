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

from collections.abc import Callable
import os
import pathlib
import signal
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]
LAB = SOURCE / 'tests/lab'

#: exit status when the lab cannot run on this machine, or not now
UNFIT = 69


class Unfit(Exception):
    """This machine cannot run the lab, or not now; a sentence."""


class Failed(Exception):
    """The lab does not work; a sentence and perhaps the end of a log."""


def run(main: Callable[[list[str]], int]) -> None:
    """Run a command with the arguments of this process, and end it."""
    # what was started is ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except (Unfit, Failed) as e:
        print(e, file=sys.stderr)
        sys.exit(UNFIT if isinstance(e, Unfit) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def home() -> pathlib.Path:
    """Where everything that the lab makes is kept."""
    cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    path = os.environ.get('NOVA_ACCEL_LAB') or f'{cache}/nova_accel-lab'
    return pathlib.Path(path).expanduser().absolute()
