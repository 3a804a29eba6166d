# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The compute hosts, each with a network namespace, libvirtd, nova-compute."""

import os
import pathlib
import shutil
import subprocess
import sys

import yaml

from tests.lab import databases
from tests.lab import processes
from tests.tempest import COMPUTES, CONF, HERE

PYTHON = databases.BIN / 'python'
NOVA = (*databases.CONTROLLER[:2], '--config-file', CONF / 'nova.conf')
CONTROLLER = (*databases.CONTROLLER, '--config-file', CONF / 'nova.conf')
GATEWAY = '10.0.3.254'
#: $0 is the host, and a command follows; hosts share what is not mounted
ON_HOST = '''
hostname "$0"
cd "/lab/$0"
mount --bind run /run/libvirt
mount --bind etc /etc/libvirt
for d in lib cache log; do mount --bind $d /var/$d/libvirt; done
exec "$@"
'''
QEMU_CONF = '''
user = "root"
group = "root"
security_driver = "none"
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
remember_owner = 0
shared_filesystems = [ "/lab/instances" ]
'''
FPGAS = [f'0000:{bus:02x}:00.0' for bus in range(0x10, 0x20)]
DEVICES = {
    'cards': [{'address': address, 'product': 'PAC_ARRIA10',
               'numa_node': n % 2, 'programming_seconds': 0.3}
              for n, address in enumerate(FPGAS)],
    'gpus': [{'address': f'0000:{0x30 + n:02x}:00.0', 'numa_node': n % 2,
              'iommu_group': 170 + n} for n in range(8)],
    'vgpus': [{'address': f'0000:{0x40 + n:02x}:00.0', 'vendor': '10de',
               'device': '2235', 'framework': 'mdev', 'units': 16, 'types': [
                   {'id': 'nvidia-557', 'name': 'NVIDIA A40-1Q', 'units': 1},
                   {'id': 'nvidia-558', 'name': 'NVIDIA A40-2Q', 'units': 2}]}
              for n in range(2)]}


def home(host) -> pathlib.Path:
    return processes.RUN / host


def devices(host) -> pathlib.Path:
    """Return the path of the description of the host's devices."""
    return processes.RUN / f'devices/{host}.yaml'


def configuration(host):
    """Return the arguments of nova-compute and of nova-accel on this host."""
    return (*NOVA, '--config-file', home(host) / 'host.conf',
            '--config-file', CONF / 'nova-compute.conf')


def make_network():
    def ip(command):
        subprocess.run(['ip', *command.split()], check=True)
    # the chroot keeps the names of the last room
    shutil.rmtree('/run/netns', ignore_errors=True)
    ip('link add hosts type bridge')
    ip(f'addr add {GATEWAY}/24 dev hosts')
    ip('link set hosts up')
    for host, address in COMPUTES.items():
        ip(f'netns add {host}')
        ip(f'link add {host} type veth peer name eth0 netns {host}')
        ip(f'link set {host} master hosts up')
        for command in (f'addr add {address}/24 dev eth0', 'link set eth0 up',
                        'link set lo up', f'route add default via {GATEWAY}'):
            ip(f'-n {host} {command}')


def make_host(host):
    """Write the files of a host, and start its libvirtd."""
    top = home(host)
    for name in ('run', 'lib', 'cache', 'log', 'locks'):
        (top / name).mkdir(parents=True)
    shutil.copytree('/etc/libvirt', top / 'etc')
    (top / 'etc/qemu.conf').write_text(QEMU_CONF)
    for path in ('/run/libvirt', '/var/cache/libvirt', '/var/log/libvirt'):
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    (top / 'host.conf').write_text(
        f'[DEFAULT]\nhost = {host}\n[accel]\nvirtual_functions = '
        + ','.join(f'{address}=1' for address in FPGAS) + '\n')
    helper = top / 'privsep-helper'
    helper.write_text('#!/bin/sh\nexec ' + ' '.join(map(str, (
        databases.BIN / 'privsep-helper', *configuration(host)))) + ' "$@"\n')
    helper.chmod(0o755)
    devices(host).parent.mkdir(exist_ok=True)
    devices(host).write_text(yaml.safe_dump(DEVICES))
    start(host, 'libvirtd', 'libvirtd', '-p', top / 'libvirtd.pid')


def start(host, service, *command):
    processes.start(f'{service}-{host}', 'ip', 'netns', 'exec', host,
                    'unshare', '--uts', 'sh', '-ec', ON_HOST, host, *command,
                    # the wheel, also if Tempest starts it
                    PYTHONPATH='')


def start_compute(host):
    start(host, 'nova-compute', PYTHON, '-P', HERE / 'hostdevs.py',
          devices(host), *configuration(host))


def stop_compute(host):
    processes.stop(f'nova-compute-{host}')


def uri(host):
    return f'qemu+unix:///system?socket={home(host)}/run/libvirt-sock'


def virsh(host, *arguments):
    return subprocess.run(['virsh', '-q', '-c', uri(host), *arguments],
                          capture_output=True, text=True)


def answers(host):
    return virsh(host, 'version').returncode == 0


def kernel(host):
    from nova_accel import sim
    return sim.SimulatedKernel(str(devices(host)), writes=False)


def pci_id(host, address):
    """Return the ids that lspci -n shows."""
    return ':'.join(
        kernel(host).read(f'bus/pci/devices/{address}/{name}').strip()
        .removeprefix('0x') for name in ('vendor', 'device'))


def mdev_type(host, uuid):
    return os.path.basename(
        kernel(host).readlink(f'bus/mdev/devices/{uuid}/mdev_type'))


if __name__ == '__main__':
    command = {'start': start_compute, 'stop': stop_compute, 'pci_id': pci_id,
               'mdev_type': mdev_type}[sys.argv[1]]
    print(command(*sys.argv[2:]) or '')
