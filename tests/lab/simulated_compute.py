# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A second nova-compute, on a simulated host; with nova-compute's arguments.

Nova's own imitation of libvirt is in the place of libvirt; all else is real.
"""

import io
import sys
from unittest import mock

import fixtures
# first: it decides about threads
from tests.functional import base
from nova.cmd import compute
from nova.tests import fixtures as nova_fixtures
from nova.tests.fixtures import libvirt as fakelibvirt

from nova_accel import sim

HOST = 'sim'
DESCRIPTION = '/lab/sim/host.yaml'


def main():
    driver = 'nova.virt.libvirt.driver.LibvirtDriver'
    for fixture in (
            nova_fixtures.LibvirtImageBackendFixture(),
            nova_fixtures.CGroupsFixture(), nova_fixtures.LibvirtFixture(),
            nova_fixtures.OSBrickFixture(),
            fixtures.MockPatch(f'{driver}._create_image',
                               return_value=(False, False)),
            fixtures.MockPatch(f'{driver}._get_local_gb_info', return_value={
                'total': 128, 'used': 44, 'free': 84}),
            fixtures.MockPatch(
                'nova.virt.libvirt.driver.libvirt_utils.file_open',
                side_effect=lambda *a, **k: io.BytesIO(b'')),
            fixtures.MockPatch('nova.privsep.utils.supports_direct_io',
                               return_value=True),
            fixtures.MockPatch('nova.virt.libvirt.host.Host.get_online_cpus',
                               return_value=set(range(16))),
            base.Hostdevs(lambda _name: sim.SimulatedKernel(
                DESCRIPTION))):
        fixture.setUp()
    connection = fakelibvirt.Connection(
        'qemu:///system', version=fakelibvirt.FAKE_LIBVIRT_VERSION,
        hv_version=fakelibvirt.FAKE_QEMU_VERSION, hostname=HOST,
        host_info=fakelibvirt.HostInfo(cpu_nodes=1, cpu_sockets=1,
                                       cpu_cores=2, cpu_threads=1))
    with mock.patch('nova.virt.libvirt.host.Host.get_connection',
                    return_value=connection):
        compute.main()


if __name__ == '__main__':
    sys.argv[0] = 'nova-compute'
    main()
