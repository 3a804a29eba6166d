# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The compute hosts of the cloud that is up: those of computes.py, or the
virtual machine of the lab."""

import json
import subprocess

from tests.lab import databases
from tests.lab import machine
from tests.tempest import COMPUTES, computes, CONF

#: for the services of the controller and for nova-compute in the machine
MACHINE_CONF = CONF / 'machine.conf'


def is_machine() -> bool:
    """Return whether the only host is the virtual machine."""
    return machine.SHARE.is_dir()


def names() -> list[str]:
    return ['vm'] if is_machine() else list(COMPUTES)


def controller() -> tuple:
    """Return the arguments of the services of Nova on the controller."""
    return ((*databases.CONTROLLER, '--config-file', MACHINE_CONF)
            if is_machine() else computes.CONTROLLER)


def claims(host: str) -> list[dict]:
    """Return what "nova-accel claims" prints on a host."""
    if is_machine():
        text = machine.check(f'{databases.BIN}/nova-accel claims -f json '
                             '2> /dev/null')
    else:
        text = subprocess.run(
            [str(word) for word in (databases.BIN / 'nova-accel', 'claims',
                                    '-f', 'json',
                                    *computes.configuration(host))],
            stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(text)


def guests(host: str) -> list[str]:
    """Return the names of the guests of a host."""
    return (machine.check('virsh -q list --all --name') if is_machine() else
            computes.virsh(host, 'list', '--all', '--name').stdout).split()
