# Licensed under the Apache License, Version 2.0. See LICENSE.
"""OpenStack's integration suites, with a device in every server: make tempest.

The cloud lives in a room like the lab's (tests/lab/room.py), without its
virtual machine: keystone, glance, placement, neutron, cinder, nova-api,
conductor and scheduler, and two compute hosts, which are network namespaces
with a libvirtd, QEMU and nova-compute each. nova_accel is installed from its
wheel. Not real are the devices: the simulated kernel has them, and hostdevs.py
keeps the <hostdev> elements of guests away from QEMU.

    build      makes the chroot, once
    first      the first process in the room: starts the services
    computes   in the room: the compute hosts
    domains    hides <hostdev> elements in the metadata of a domain, and makes
               its volumes files
    ports      a mechanism driver of neutron
    volumes    a driver of cinder
    in_lab     the first process if the compute host is the lab's machine
    hosts      the compute hosts, whichever they are
    hostdevs   nova-compute, whose libvirt knows simulated devices
    suites     which tests run, with which flavors
    judge      in the room: runs them, and returns the verdict
    verdict    which results are wrong: permitted.txt
    leftovers  what a run left in the cloud
    cyborg     answers Cyborg's API
    plugin     answers Tempest's questions to hosts and guests
"""

import pathlib

from tests import lab

HERE = pathlib.Path(__file__).parent
CONF = HERE / 'conf'
#: of the compute hosts
COMPUTES = {'compute1': '10.0.3.1', 'compute2': '10.0.3.2'}


def home() -> pathlib.Path:
    """Return the directory of the cloud's files."""
    return lab.home() / 'tempest'
