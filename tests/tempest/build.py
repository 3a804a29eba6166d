# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The chroot of the cloud: the lab's tree, with libvirt, neutron and Tempest.

The lab's tree is copied if it is complete, and made here otherwise.
"""

import pathlib
import shutil

from tests import lab
from tests.lab import build
from tests.tempest import COMPUTES, HERE

CONSTRAINTS = HERE / 'constraints.txt'
DEBIAN_PACKAGES = ['libvirt-daemon', 'libvirt-daemon-driver-qemu',
                   'libvirt-clients', 'python3-libvirt', 'genisoimage']
PYTHON_PACKAGES = ['neutron', 'cinder', 'tempest', 'cyborg-tempest-plugin',
                   'whitebox-tempest-plugin', 'stestr']
#: of the modules in this directory that neutron and Tempest load by name
ENTRY_POINTS = '''\
[neutron.ml2.mechanism_drivers]
tap = tests.tempest.ports:Tap
[tempest.test_plugins]
hosts = tests.tempest.plugin:Plugin
'''
DIST_INFO = 'tests_of_nova_accel-1.dist-info'


def digest():
    return build.digest(*build.CONSTRAINTS, CONSTRAINTS, pathlib.Path(__file__))


def make(home: pathlib.Path) -> None:
    """Make the tree in home, unless it is complete.

    :raises Unfit: if the machine, the mirrors or the index do not allow it.
    """
    build.check_host(home)
    if build.complete(home / 'tree', digest()):
        return
    with build.alone(home):
        build.host_packages()
        shutil.rmtree(home / 'work', ignore_errors=True)
        (home / 'work').mkdir()
        work = build.Build(home)
        print('building the cloud for Tempest, once; minutes', flush=True)
        base = lab.home() / 'tree'
        if build.complete(base, build.tree_digest()):
            work.call('Copying the tree of the lab', 'cp', '-a', base,
                      work.tree)
        else:
            work.make_tree()
        extend(work)
        (work.tree / 'complete').write_text(digest())
        build.replace(work.tree, home / 'tree')
        shutil.rmtree(work.work)
        for name in ('image', 'seed'):
            (home / name).mkdir(exist_ok=True)
        work.say('built')


def extend(work: build.Build) -> None:
    tree = work.tree
    hosts = (tree / 'etc/hosts').read_text()
    # dpkg starts no daemon
    policy = tree / 'usr/sbin/policy-rc.d'
    policy.write_text('#!/bin/sh\nexit 101\n')
    # cinder runs "sudo cinder-rootwrap FILE COMMAND", and is root
    sudo = tree / 'usr/local/bin/sudo'
    sudo.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    for program in (policy, sudo):
        program.chmod(0o755)
    work.install(PYTHON_PACKAGES, (*build.CONSTRAINTS, CONSTRAINTS), f'''
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -q
        apt-get install -y -q --no-install-recommends \\
            {' '.join(DEBIAN_PACKAGES)}
        apt-get clean
        ''')
    packages, = (tree / 'opt/openstack/lib').glob('python3*/site-packages')
    info = packages / DIST_INFO
    info.mkdir()
    (info / 'METADATA').write_text(
        'Metadata-Version: 2.1\nName: tests-of-nova-accel\nVersion: 1\n')
    (info / 'entry_points.txt').write_text(ENTRY_POINTS)
    # a guest moves to a host by its name
    (tree / 'etc/hosts').write_text(hosts + ''.join(
        f'{address} {name}\n' for name, address in COMPUTES.items()))
    work.say('libvirt, neutron, Tempest')
