# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The first process in the room: starts everything, then waits."""

import os

from tests.lab import databases
from tests.lab import first
from tests.lab import processes
from tests.tempest import build, COMPUTES, computes, CONF, cyborg, HERE, hosts

ENVIRONMENT = {
    **first.ENVIRONMENT,
    'OS_KEYSTONE_CONFIG_FILES': ';'.join((
        f'{databases.CONF}/keystone.conf', f'{CONF}/keystone.conf')),
    'OS_NOVA_CONFIG_FILES': ';'.join((
        first.ENVIRONMENT['OS_NOVA_CONFIG_FILES'], f'{CONF}/nova.conf')),
    'OS_NEUTRON_CONFIG_DIR': f'{CONF}',
    'OS_NEUTRON_CONFIG_FILES': 'neutron.conf'}
CINDER = ('--config-file', CONF / 'cinder.conf')


def more_content():
    import openstack
    databases.catalog((
        ('accelerator', 'cyborg', f'http://controller:{cyborg.PORT}/v2'),
        ('block-storage', 'cinder', 'http://controller:8776/v3')))
    databases.sql('CREATE DATABASE neutron', 'CREATE DATABASE cinder')
    processes.call('schema-cinder', databases.BIN / 'cinder-manage',
                   *CINDER, 'db', 'sync')
    processes.call('schema-neutron', databases.BIN / 'neutron-db-manage',
                   '--config-file', CONF / 'neutron.conf', 'upgrade', 'heads')
    # neutron lets only services delete ports of servers
    identity = openstack.connect().identity
    identity.assign_project_role_to_user(
        identity.find_project('admin'), identity.find_user('admin'),
        identity.find_role('service'))


def control():
    """Start the services of the controller, all but cinder."""
    (processes.RUN / 'neutron').mkdir()
    first.control(
        # neutron loads tests.tempest.ports by its entry point
        lambda: processes.serve(
            'network', 'tests.tempest.neutron_api:application', 9696,
            PYTHONPATH='/src'),
        hosts.controller(), more=more_content,
        ingredients=(HERE / 'first.py', CONF / 'neutron.conf',
                     CONF / 'cinder.conf',
                     build.CONSTRAINTS))
    processes.serve('cyborg', 'tests.tempest.cyborg:application', cyborg.PORT,
                    PYTHONPATH='/src')
    processes.wait('cyborg', lambda: processes.answers(cyborg.PORT))


def start():
    os.environ.update(ENVIRONMENT)
    first.prepare()
    (processes.RUN / 'cinder').mkdir()
    computes.make_network()
    for host in COMPUTES:
        computes.make_host(host)
    first.plugin()
    control()
    processes.serve('cinder', 'tests.tempest.cinder_api:application', 8776,
                    PYTHONPATH='/src')
    for name in ('cinder-scheduler', 'cinder-volume'):
        processes.start(name, databases.BIN / name, *CINDER, PYTHONPATH='/src')
    for host in COMPUTES:
        processes.wait(f'libvirtd-{host}', lambda: computes.answers(host))
    for host in COMPUTES:
        computes.start_compute(host)
    from tests.lab import cloud
    for host in COMPUTES:
        cloud.Cloud().wait_ready(host, *(
            f'{address}_region0' for address in computes.FPGAS))
    first.say('two nova-computes are up, their accelerators in Placement')


if __name__ == '__main__':
    first.main(start)
