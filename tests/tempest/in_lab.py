# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The first process in the room if the compute host is the lab's machine."""

import os

from tests.lab import first as lab_first
from tests.lab import machine
from tests.tempest import first, hosts

ENVIRONMENT = {
    **first.ENVIRONMENT,
    'OS_NOVA_CONFIG_FILES': ';'.join((
        lab_first.ENVIRONMENT['OS_NOVA_CONFIG_FILES'],
        f'{hosts.MACHINE_CONF}'))}


def start():
    os.environ.update(ENVIRONMENT)
    lab_first.prepare()
    lab_first.power_on()
    first.control()
    machine.wait_booted()
    machine.put(hosts.MACHINE_CONF,
                '/etc/nova/nova-compute.conf.d/tempest.conf')
    # ports are tap devices
    machine.check('modprobe tun')
    lab_first.start_compute()


if __name__ == '__main__':
    lab_first.main(start)
