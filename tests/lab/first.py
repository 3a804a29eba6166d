# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The first process in the room: starts everything, then waits."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import time

from tests import lab
from tests.lab import databases
from tests.lab import machine
from tests.lab import processes
from tests.lab.processes import RUN

CONF = databases.CONF
BIN = databases.BIN
ENVIRONMENT = {
    'OS_KEYSTONE_CONFIG_DIR': f'{CONF}', 'OS_GLANCE_CONFIG_DIR': f'{CONF}',
    'OS_PLACEMENT_CONFIG_DIR': f'{CONF}', 'OS_NOVA_CONFIG_DIR': f'{CONF}',
    # the first is loaded as the paste file as well
    'OS_NOVA_CONFIG_FILES': ';'.join((
        '/opt/openstack/etc/nova/api-paste.ini', f'{CONF}/nova.conf',
        f'{CONF}/nova-controller.conf'))}
CONTROLLER = databases.CONTROLLER
BEGAN = time.monotonic()


def say(text):
    print(f'{time.monotonic() - BEGAN:6.1f} s  {text}', flush=True)


# the services

def start_rabbit():
    home = RUN / 'rabbit'
    home.mkdir()
    processes.start('epmd', 'epmd')
    processes.wait('epmd', lambda: processes.listens(4369))
    (home / 'plugins').write_text('[].\n')
    processes.start(
        'rabbit', '/usr/lib/rabbitmq/bin/rabbitmq-server', HOME=f'{home}',
        RABBITMQ_NODENAME='lab@localhost', RABBITMQ_CONF_ENV_FILE='/dev/null',
        RABBITMQ_CONFIG_FILE=f'{CONF}/rabbitmq.conf',
        RABBITMQ_MNESIA_BASE=f'{home}/mnesia', RABBITMQ_LOG_BASE=f'{home}',
        RABBITMQ_PID_FILE=f'{home}/pid',
        RABBITMQ_ENABLED_PLUGINS_FILE=f'{home}/plugins',
        RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='+sbwt none +S 2:2')


def plugin():
    """Install a wheel of the working tree here; the wheel.

    pip writes into the directory that it builds from, hence the copy.
    """
    source = RUN / 'source'
    shutil.copytree(
        lab.SOURCE, source, ignore=lambda top, names: [
            n for n in names if top == str(lab.SOURCE) and n not in (
                'nova_accel', 'etc', 'setup.cfg', 'pyproject.toml',
                'README.rst', 'LICENSE')])
    pip = (BIN / 'pip', '--disable-pip-version-check')
    processes.call('plugin', *pip, 'wheel', '-q', '--no-deps', '--no-index',
                   '--no-build-isolation', '-w', RUN / 'wheel', source)
    wheel, = (RUN / 'wheel').glob('*.whl')
    # pip cannot undo an installation that was cut short
    packages = pathlib.Path(sysconfig.get_path('purelib'))
    for path in (*packages.glob('nova_accel*'), packages / 'nova/virt/accel'):
        shutil.rmtree(path, ignore_errors=True)
    processes.call('plugin', *pip, 'install', '-q', '--no-deps', '--no-index',
                   '--root-user-action', 'ignore', wheel)
    say('nova_accel installed')
    return wheel


def prepare():
    """The network, the directories and RabbitMQ of the controller."""
    for command in ('ip link set lo up', 'ip addr add 10.0.2.2/32 dev lo',
                    'hostname controller'):
        subprocess.run(command.split(), check=True)
    for name in ('glance/images', 'glance/staging', 'glance/tasks', 'nova',
                 'device_profiles', 'instances'):
        (RUN / name).mkdir(parents=True)
    start_rabbit()


def control(network, controller=CONTROLLER, **more):
    """Start the services of the controller.

    :param network: starts what answers for neutron.
    :param controller: arguments of the services of Nova.
    :param more: of databases.start_with_content().
    """
    if not databases.start_with_content(**more):
        say('databases made, once')
    databases.keystone()
    processes.serve('glance', 'glance.wsgi.api:application', 9292)
    processes.serve('placement', 'placement.wsgi.api:application', 8778)
    network()
    # nova-scheduler looks for placement when it starts, and gives up
    for name, port in (('keystone', 5000), ('placement', 8778)):
        processes.wait(name, lambda: processes.answers(port))
    processes.wait('rabbit', lambda: processes.listens(5672))
    say('MariaDB, RabbitMQ, keystone, placement')
    processes.start('nova-conductor', BIN / 'nova-conductor', *controller)
    processes.start('nova-scheduler', BIN / 'nova-scheduler', *controller)
    processes.serve('nova-api', 'nova.wsgi.osapi_compute:application', 8774)
    for name, port in (('glance', 9292), ('network', 9696),
                       ('nova-api', 8774)):
        processes.wait(name, lambda: processes.answers(port))
    say('glance, nova-api, nova-scheduler, nova-conductor')


def power_on():
    """Start the virtual machine, which boots beside everything else."""
    subprocess.run('ip addr add 10.0.2.15/32 dev lo'.split(), check=True)
    (RUN / 'ssh').mkdir()
    processes.call('ssh', 'ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f',
                   '/lab/ssh/key')
    pathlib.Path('/run/sshd').mkdir(exist_ok=True)
    processes.start('ssh', '/usr/sbin/sshd', '-D', '-e')
    why = machine.without_kvm()
    say(f'the virtual machine begins, '
        f'{f"interpreted, because {why}" if why else "by KVM"}')
    machine.power_on()
    shutil.copy(plugin(), machine.SHARE)


def start_compute():
    """Install nova_accel in the machine, and start nova-compute."""
    machine.wait_booted()
    say(f'the virtual machine: {machine.check("uname -sr")}, all drivers')
    machine.check('/mnt/lab/compute', 900)
    say('nova_accel installed in it; nova-compute starts')
    from tests.lab import cloud
    cloud.Cloud().wait_ready()
    say('nova-compute is up, its accelerators are in Placement')


def start():
    os.environ.update(ENVIRONMENT)
    prepare()
    power_on()
    control(lambda: processes.start('network', sys.executable,
                                    lab.LAB / 'no_network.py', 9696))
    start_compute()


def main(start=start):
    """Start everything by a child, and reap the orphans of the room."""
    child = os.fork()
    if not child:
        try:
            start()
        except (lab.Failed, subprocess.CalledProcessError) as e:
            sys.exit(f'{e}')
        (RUN / 'ready').touch()
        sys.exit()
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            time.sleep(1)
        else:
            if ended == child and status:
                sys.exit(1)


if __name__ == '__main__':
    main()
