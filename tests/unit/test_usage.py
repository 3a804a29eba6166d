# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the host does with a function: of a recorded kernel, and of this one."""

import glob
import os
import stat

import fixtures
import testtools

from nova_accel.host import kernel as host_kernel
from nova_accel.host import usage

DISK, NIC = '0000:5e:00.0', '0000:5f:00.0'


class RecordedTest(testtools.TestCase):
    """As Linux 6.12 shows a disk with two paths and an LVM volume."""

    def setUp(self):
        super().setUp()
        self.root = self.useFixture(fixtures.TempDir()).path
        self.mounts()
        self.write('proc/swaps', 'Filename Type Size Used Priority\n')
        self.path = f'sys/devices/pci0000:5e/{DISK}/nvme/nvme3/nvme3c3n1'
        self.head = 'sys/devices/virtual/nvme-subsystem/nvme-subsys3/nvme3n1'
        self.write(f'{self.path}/hidden', '1')
        self.write(f'{self.head}/dev', '259:2')
        self.write(f'{self.head}/nvme3n1p1/dev', '259:3')
        self.write('sys/devices/virtual/block/dm-0/dev', '253:0')
        for place in (self.path, self.head, f'{self.head}/nvme3n1p1'):
            os.makedirs(self.at(f'{place}/holders'), exist_ok=True)
            self.link('block', place)
        self.link('block', 'sys/devices/virtual/block/dm-0')
        self.kernel = host_kernel.Kernel(self.at('sys'), self.at('proc'))

    def at(self, path):
        return os.path.join(self.root, path)

    def write(self, path, text):
        os.makedirs(os.path.dirname(self.at(path)), exist_ok=True)
        with open(self.at(path), 'w') as file:
            file.write(text)

    def link(self, kind, place):
        directory = self.at(f'sys/class/{kind}')
        os.makedirs(directory, exist_ok=True)
        os.symlink(os.path.relpath(self.at(place), directory),
                   os.path.join(directory, os.path.basename(place)))

    def mounts(self, *mounts, process='self'):
        self.write(f'proc/{process}/mountinfo', ''.join(
            f'{20 + n} 1 {number} / {where} rw,relatime shared:1 - {kind} '
            f'{source} rw\n' for n, (number, where, kind, source)
            in enumerate(mounts)))

    def test_unused(self):
        self.mounts(('253:0', '/', 'ext4', '/dev/mapper/root'),
                    ('0:21', '/proc', 'proc', 'proc'))
        self.assertEqual('', usage.usage(self.kernel, DISK))
        self.assertEqual('', usage.usage(self.kernel, NIC))

    def test_mounted(self):
        self.mounts(('253:0', '/', 'ext4', '/dev/mapper/root'),
                    ('259:3', '/srv/my\\040files', 'xfs', '/dev/nvme3n1p1'))
        self.assertEqual(
            'its disk nvme3n1p1 is mounted at /srv/my\\040files',
            usage.usage(self.kernel, DISK))

    def test_mounted_outside_of_the_container(self):
        self.mounts(('259:2', '/srv', 'xfs', '/dev/nvme3n1'), process='1')
        self.assertEqual('its disk nvme3n1 is mounted at /srv',
                         usage.usage(self.kernel, DISK))

    def test_held(self):
        os.symlink('../../../../block/dm-0', self.at(
            f'{self.head}/nvme3n1p1/holders/dm-0'))
        self.assertEqual('its disk nvme3n1p1 is used by dm-0',
                         usage.usage(self.kernel, DISK))

    def test_in_btrfs(self):
        directory = 'sys/fs/btrfs/8c1f3b7e-5a2d-4904-8aaa-0123456789ab/devices'
        os.makedirs(self.at(directory))
        os.symlink(self.at(f'{self.head}/nvme3n1p1'),
                   self.at(f'{directory}/nvme3n1p1'))
        self.assertEqual('its disk nvme3n1p1 is in a mounted btrfs',
                         usage.usage(self.kernel, DISK))

    def test_fingerprint(self):
        before = usage.fingerprint(self.kernel)
        self.assertEqual(before, usage.fingerprint(self.kernel))
        self.mounts(('259:2', '/srv', 'xfs', '/dev/nvme3n1'))
        self.assertNotEqual(before, usage.fingerprint(self.kernel))

    def test_kernel_without_swap(self):
        os.unlink(self.at('proc/swaps'))
        self.assertEqual({}, self.kernel.mounted_devices())

    def test_node_of_swap_and_of_a_mount_with_a_number_of_its_own(self):
        nodes = [path for path in glob.glob('/dev/*')
                 if os.path.exists(path)
                 and stat.S_ISBLK(os.stat(path).st_mode)]
        if not nodes:
            self.skipTest('no block device has a node here')
        node = os.stat(nodes[0]).st_rdev
        number = f'{os.major(node)}:{os.minor(node)}'
        self.mounts(('0:44', '/btrfs', 'btrfs', nodes[0]))
        self.assertEqual({number: 'mounted at /btrfs'},
                         self.kernel.mounted_devices())
        self.mounts()
        self.write('proc/swaps', 'Filename Type Size Used Priority\n'
                                 f'{nodes[0]} partition 8 0 -2\n'
                                 '/swapfile file 8 0 -3\n'
                                 '/gone\\040(deleted) file 8 0 -4\n')
        self.assertEqual({number: 'used as swap'},
                         self.kernel.mounted_devices())

    def test_interface(self):
        place = f'sys/devices/pci0000:5e/{NIC}/net/eth0'
        self.write(f'{place}/flags', '0x1003\n')
        os.makedirs(self.at('sys/bus/pci/devices'))
        os.symlink(self.at(f'sys/devices/pci0000:5e/{NIC}'),
                   self.at(f'sys/bus/pci/devices/{NIC}'))
        self.link('net', place)
        self.assertEqual('its network interface eth0 is up',
                         usage.usage(self.kernel, NIC))
        self.assertEqual('', usage.usage(self.kernel, DISK))
        self.write(f'{place}/flags', '0x1002\n')
        self.assertEqual('', usage.usage(self.kernel, NIC))
        self.write(f'{place}/flags', '0x1003\n')
        os.symlink('../whatever', self.at(
            f'sys/devices/pci0000:5e/{NIC}/physfn'))
        self.assertEqual('', usage.usage(self.kernel, NIC))


class ThisMachineTest(testtools.TestCase):

    def test_function_that_has_the_root(self):
        kernel = host_kernel.Kernel()
        numbers = set(kernel.mounted_devices())
        self.assertNotIn(None, numbers)
        functions = [name for name in (
            kernel.listdir('bus/pci/devices')
            if kernel.exists('bus/pci/devices') else ())
            if 'mounted at' in usage.usage(kernel, name)]
        disks = [name for name in os.listdir('/sys/class/block')
                 if 'pci' in os.readlink(f'/sys/class/block/{name}')
                 and kernel.read(f'class/block/{name}/dev') in numbers]
        self.assertEqual(bool(disks), bool(functions))
