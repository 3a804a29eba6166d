# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the privileged process accepts, and what it then does.

sysfs and /dev are directories here, and the process is this one.
"""

import ctypes
import errno
import os
import pathlib
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
from unittest import mock
import uuid

import ddt
import fixtures
from oslo_config import fixture as config_fixture
from oslo_privsep import capabilities
from oslo_rootwrap import wrapper
import testtools

from nova_accel import conf
from nova_accel.host import firmware
from nova_accel.host import kernel as host_kernel
from nova_accel.host import nvme_admin
from nova_accel.host import privileged
from nova_accel import privsep
from nova_accel import sim
from tests.unit import configured

PF = '0000:5e:00.0'
#: as in the configuration space, the lower half first
SERIAL = struct.pack('<II', 0xfe123456, 0x000a3501)


def _io(direction, number, size):
    """An ioctl number as asm-generic/ioctl.h makes it, of the DFL magic."""
    return direction << 30 | size << 16 | 0xb6 << 8 | number


@ddt.ddt
class Privileged(configured.TestCase):

    def setUp(self):
        super().setUp()
        for context in (privsep.ctx, privsep.disks, privsep.processes):
            context.set_client_mode(False)
            self.addCleanup(context.set_client_mode, True)
        self.root = self.useFixture(fixtures.TempDir()).path
        for name in ('SYS', 'DEV', 'PROC'):
            self.useFixture(fixtures.MonkeyPatch(
                f'nova_accel.host.privileged.{name}',
                os.path.join(self.root, name.lower())))
        self.device = f'bus/pci/devices/{PF}'
        self.base = f'{self.device}/fpga_region/region3'
        for name, text in (
                (f'{self.device}/driver_override', '(null)'),
                (f'{self.device}/sriov_numvfs', '0'),
                (f'{self.base}/dfl-fme.4/dev', '1:3'),
                (f'{self.device}/xrt_mgmt/xclmgmt24064/dev', '1:3'),
                (f'{self.base}/dfl-port.5/id', '1'),
                (f'{self.base}/dfl-port.5/errors/errors', '0x40'),
                (f'{self.base}/dfl-port.6/id', '0'),
                ('bus/pci/drivers/dfl-pci/unbind', ''),
                ('bus/pci/drivers/dfl-pci/bind', ''),
                ('bus/pci/drivers/vfio-pci/bind', ''),
                ('bus/pci/drivers/igb/bind', '')):
            self.write(os.path.join(self.root, 'sys', name), text)
        os.makedirs(f'{self.root}/sys/{self.base}/dfl-port.6/errors')
        os.makedirs(f'{self.root}/dev')
        self.config.config(bitstream_cache=self.root, group='accel')
        self.file = os.path.join(self.root, 'a.gbs')
        self.write(self.file, 'head' + 'payload!')
        self.xclbin = os.path.join(self.root, 'a.xclbin')
        sim.make_xclbin(self.xclbin, str(uuid.uuid4()), str(uuid.uuid4()))
        self.xclbin_size = os.path.getsize(self.xclbin)
        self.kernel = host_kernel.Kernel(os.path.join(self.root, 'sys'))

    def write(self, path, text):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w') as file:
            file.write(text)

    def bound_to(self, driver):
        os.symlink(f'../../drivers/{driver}',
                   f'{self.root}/sys/{self.device}/driver')

    def snapshot(self):
        return {os.path.join(top, name): self.kernel.read(
                    os.path.join(top, name))
                for top, _, names in os.walk(self.root) for name in names}

    def fails(self, number, call, *args):
        before = self.snapshot()
        error = self.assertRaises(OSError, call, *args)
        self.assertEqual(errno.errorcode[number],
                         errno.errorcode[error.errno], error)
        self.assertEqual(before, self.snapshot())

    def test_numbers(self):
        self.assertEqual(
            (_io(0, 0x80, 0), _io(1, 0x81, 4), _io(1, 0x82, 4)),
            (privileged._FME_PORT_PR, privileged._FME_PORT_RELEASE,
             privileged._FME_PORT_ASSIGN))
        self.assertEqual(24, struct.calcsize('=IIIIQ'))
        # of the magic 'X', with a pointer as its argument
        self.assertEqual(1 << 30 | 8 << 16 | ord('X') << 8 | 6,
                         privileged._ICAP_DOWNLOAD_AXLF)

    @ddt.data('', 'a', '5e:00.0', '0000:5E:00.0', '0000:5e:00.8',
              '0000:5e:20.0', f'{PF}\n', f'../{PF}', f'{PF}/..', None, 7,
              b'0000:5e:00.0')
    def test_addresses(self, address):
        for call in ((self.kernel.rebind, address, 'vfio-pci'),
                     (self.kernel.unbind, address),
                     (self.kernel.probe, address),
                     (self.kernel.reset_function, address),
                     (self.kernel.reset_gpu, address, 'VFIO', 'ada', 1),
                     (self.kernel.reset_gpu, address, 'sysfs', 'ada', 1),
                     (self.kernel.is_group_open, address),
                     (self.kernel.write_timecard, address, 'sma1', 'OUT:'),
                     (self.kernel.set_numvfs, address, 0),
                     (self.kernel.clear_dfl_port_errors, address, 0),
                     (self.kernel.check_disks, address),
                     (self.kernel.read_signatures, address),
                     (self.kernel.close_mailbox, address, 1),
                     (self.kernel.withdraw_xclbin, address),
                     (self.kernel.format_nvme, address),
                     (self.kernel.release_dfl_port, address, 0),
                     (self.kernel.assign_dfl_port, address, 0),
                     (self.kernel.program_xclbin, address, self.xclbin,
                      self.xclbin_size),
                     (self.kernel.read_qat_heartbeat, address),
                     (self.kernel.read_device_serial, address),
                     (self.kernel.read_acs, address),
                     (self.kernel.read_afu, address),
                     (self.kernel.write_attribute, address, 'qat/state',
                      'up'),
                     (self.kernel.program_dfl_port, address, 0, self.file,
                      4, 8)):
            self.fails(errno.EINVAL, *call)

    @ddt.data(-1, 4, '0', 0.0, None, True)
    def test_ports(self, port):
        for call in ((self.kernel.clear_dfl_port_errors, PF, port),
                     (self.kernel.release_dfl_port, PF, port),
                     (self.kernel.assign_dfl_port, PF, port),
                     (self.kernel.program_dfl_port, PF, port, self.file, 4,
                      8)):
            self.fails(errno.EINVAL, *call)

    @ddt.data('igb', '', '../igb', 'dfl-pci/', None)
    def test_drivers(self, driver):
        self.fails(errno.EINVAL, self.kernel.rebind, PF, driver)

    @ddt.data(-1, 0x10000, '1', None, False)
    def test_counts(self, count):
        self.fails(errno.EINVAL, self.kernel.set_numvfs, PF, count)

    def test_vfs_without_drivers(self):
        for name in ('sriov_numvfs', 'sriov_drivers_autoprobe'):
            self.write(f'{self.root}/sys/{self.device}/{name}', '1\n')
        for count, probe, after in ((2, False, '0'), (0, True, '0'),
                                    (2, True, '1')):
            self.kernel.set_numvfs(PF, count, probe)
            self.assertEqual((str(count), after), tuple(
                self.kernel.read(f'{self.device}/{name}') for name in (
                    'sriov_numvfs', 'sriov_drivers_autoprobe')))

    # offset, size
    @ddt.data((-1, 8), (4, 9), (4, 0), (4, -1), (13, 1), ('4', 8), (4, 8.0),
              (1 << 40, 1), (0, 1 << 33))
    @ddt.unpack
    def test_parts_of_files(self, offset, size):
        self.fails(errno.EINVAL, self.kernel.program_dfl_port, PF, 0,
                   self.file, offset, size)

    @ddt.data(-1, 0, 1, 311, '8', None, 1 << 40)
    def test_length_of_an_xclbin(self, size):
        self.fails(errno.EINVAL, self.kernel.program_xclbin, PF, self.xclbin,
                   size)

    def test_xclbin_that_is_longer_than_it_is_said(self):
        # the driver would copy what comes after it
        for size in (self.xclbin_size - 1, self.xclbin_size + 1):
            with open(self.xclbin, 'r+b') as file:
                file.seek(304)
                file.write(struct.pack('<Q', size))
            self.fails(errno.EINVAL, self.kernel.program_xclbin, PF,
                       self.xclbin, self.xclbin_size)

    def test_limit_of_the_configuration(self):
        with open(self.file, 'wb') as file:
            file.truncate(3 << 20)
        self.config.config(group='accel', bitstream_max_size=2)
        self.fails(errno.EINVAL, self.kernel.program_dfl_port, PF, 0,
                   self.file, 0, 3 << 20)

    def test_files(self):
        os.symlink(self.file, f'{self.root}/link')
        os.mkfifo(f'{self.root}/fifo')
        for path, number in (
                (f'{self.root}/link', errno.ELOOP),
                (f'{self.root}/fifo', errno.EINVAL),
                (self.root, errno.EINVAL), ('/dev/null', errno.EINVAL),
                (f'{self.root}/none', errno.ENOENT),
                # of the cache alone
                ('/etc/hostname', errno.EINVAL),
                (f'{self.root}/sys/../a.gbs', errno.EINVAL),
                (f'{self.root}/../{os.path.basename(self.root)}/a.gbs',
                 errno.EINVAL),
                ('a.gbs', errno.EINVAL), (None, errno.EINVAL)):
            error = self.assertRaises(OSError, self.kernel.program_dfl_port,
                                      PF, 0, path, 0, 8)
            self.assertEqual(number, error.errno, path)
            error = self.assertRaises(OSError, self.kernel.program_xclbin,
                                      PF, path, 8)
            self.assertEqual(number, error.errno, path)

    @ddt.data((0, 1), (4, 8), (4095, 5000), (4096, 4096), (4097, 1),
              (8191, 70000))
    @ddt.unpack
    def test_what_the_kernel_is_given(self, offset, size):
        content = os.urandom(offset + size)
        with open(self.file, 'wb') as file:
            file.write(content)
        with privileged.mapped(self.file, offset, size) as start:
            self.assertEqual(content[offset:], ctypes.string_at(start, size))
        # nothing may stay mapped or open
        with open('/proc/self/maps') as maps:
            self.assertNotIn(self.file, maps.read())
        self.assertNotIn(self.file, [
            os.readlink(f'/proc/self/fd/{fd}')
            for fd in os.listdir('/proc/self/fd')
            if os.path.exists(f'/proc/self/fd/{fd}')])

    def ioctls(self):
        return ((self.kernel.program_dfl_port, PF, 0, self.file, 4, 8),
                (self.kernel.release_dfl_port, PF, 0),
                (self.kernel.assign_dfl_port, PF, 0))

    def xrt_ioctls(self):
        return ((self.kernel.program_xclbin, PF, self.xclbin,
                 self.xclbin_size),)

    def test_node_of_the_fme(self):
        self.check_node('dfl-fme.4', f'{self.base}/dfl-fme.4', self.ioctls)

    def test_node_of_the_management_function(self):
        self.check_node('xclmgmt24064',
                        f'{self.device}/xrt_mgmt/xclmgmt24064',
                        self.xrt_ioctls)

    def check_node(self, name, directory, ioctls):
        node = f'{self.root}/dev/{name}'
        for call in ioctls():
            self.assertEqual(errno.ENOENT,
                             self.assertRaises(OSError, *call).errno)
        self.write(node, '')
        for call in ioctls():
            self.assertEqual(errno.ENODEV,
                             self.assertRaises(OSError, *call).errno)
        os.unlink(node)
        os.symlink('/dev/null', node)
        for call in ioctls():
            self.assertEqual(errno.ELOOP,
                             self.assertRaises(OSError, *call).errno)
        os.unlink(node)
        try:
            os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            self.skipTest('making a device node needs privileges')
        # the node of /dev/null, which knows no ioctl
        for call in ioctls():
            self.assertEqual(errno.ENOTTY,
                             self.assertRaises(OSError, *call).errno)
        self.write(f'{self.root}/sys/{directory}/dev', '245:0')
        for call in ioctls():
            self.assertEqual(errno.ENODEV,
                             self.assertRaises(OSError, *call).errno)

    def test_function_without_xclmgmt(self):
        top = f'{self.root}/sys/{self.device}/xrt_mgmt'
        for name in ('xclmgmt1', 'xclmgmt-1', 'xclmgmt'):
            # two of them, then one of another name
            os.mkdir(f'{top}/{name}')
            for call in self.xrt_ioctls():
                self.assertEqual(errno.ENODEV,
                                 self.assertRaises(OSError, *call).errno)
            if os.path.exists(f'{top}/xclmgmt24064'):
                os.rename(f'{top}/xclmgmt24064', f'{self.root}/gone')
            os.rmdir(f'{top}/{name}')

    def test_function_without_fme(self):
        os.rename(f'{self.root}/sys/{self.base}/dfl-fme.4',
                  f'{self.root}/gone')
        for call in self.ioctls():
            self.assertEqual(errno.ENODEV,
                             self.assertRaises(OSError, *call).errno)

    def test_rebind(self):
        self.bound_to('dfl-pci')
        self.kernel.rebind(PF, 'vfio-pci')
        self.assertEqual(
            (PF, 'vfio-pci', PF, ''),
            tuple(self.kernel.read(path) for path in (
                'bus/pci/drivers/dfl-pci/unbind',
                f'{self.device}/driver_override',
                'bus/pci/drivers/vfio-pci/bind',
                'bus/pci/drivers/dfl-pci/bind')))

    def test_bind_clears_the_override(self):
        # a file keeps what a longer write left behind; sysfs does not
        self.write(f'{self.root}/sys/{self.device}/driver_override', '')
        self.kernel.rebind(PF, 'dfl-pci')
        with open(f'{self.root}/sys/{self.device}/driver_override') as file:
            self.assertEqual('\n', file.read())
        self.assertEqual(PF, self.kernel.read('bus/pci/drivers/dfl-pci/bind'))
        self.assertEqual('',
                         self.kernel.read('bus/pci/drivers/dfl-pci/unbind'))

    def test_unbind_and_probe(self):
        # without CONFIG_PM
        self.kernel.unbind(PF)
        # waits for the lock of a device without a driver
        control = f'{self.device}/power/control'
        self.write(f'{self.root}/sys/{control}', '')
        self.kernel.unbind(PF)
        self.assertEqual('wait', self.kernel.read(control))
        self.write(f'{self.root}/sys/{control}', '')
        self.bound_to('dfl-pci')
        self.kernel.unbind(PF)
        self.assertEqual((PF, ''), (self.kernel.read(
            'bus/pci/drivers/dfl-pci/unbind'), self.kernel.read(control)))
        self.write(f'{self.root}/sys/{self.device}/driver_override', '')
        self.write(f'{self.root}/sys/bus/pci/drivers_probe', '')
        self.kernel.probe(PF)
        with open(f'{self.root}/sys/{self.device}/driver_override') as file:
            self.assertEqual('\n', file.read())
        self.assertEqual(PF, self.kernel.read('bus/pci/drivers_probe'))

    def test_group(self):
        at = f'{self.root}/sys/{self.device}'
        self.fails(errno.ENOENT, self.kernel.is_group_open, PF)
        os.makedirs(f'{self.root}/sys/kernel/iommu_groups/12')
        os.symlink('../../../../kernel/iommu_groups/12', f'{at}/iommu_group')
        self.fails(errno.ENOENT, self.kernel.is_group_open, PF)
        self.write(f'{self.root}/dev/vfio/12', '')
        self.assertFalse(self.kernel.is_group_open(PF))
        with mock.patch('os.open', side_effect=OSError(
                errno.EBUSY, 'Device or resource busy')) as opens:
            self.assertTrue(self.kernel.is_group_open(PF))
        opens.assert_called_once_with(
            f'{self.root}/dev/vfio/12', os.O_RDONLY)

    def test_processes(self):
        """Nodes below a function, of its VFIO group, and of NVIDIA's driver,
        which has none in sysfs."""
        self.fails(errno.EINVAL, self.kernel.processes, ['../etc'])
        sys_, proc = f'{self.root}/sys', f'{self.root}/proc'
        device = f'{sys_}/{self.device}'
        null, zero, full = (os.stat(f'/dev/{name}').st_rdev
                            for name in ('null', 'zero', 'full'))

        def number(node):
            return f'{os.major(node)}:{os.minor(node)}'
        self.write(f'{device}/drm/renderD128/dev', number(null))
        self.write(f'{device}/drm/renderD128/subsystem', '')
        self.write(f'{device}/block/nvme0n1/dev', number(full))
        os.makedirs(f'{sys_}/class/block')
        os.symlink(f'{sys_}/class/block',
                   f'{device}/block/nvme0n1/subsystem')
        os.makedirs(f'{sys_}/kernel/iommu_groups/12')
        os.symlink('../../../../kernel/iommu_groups/12',
                   f'{device}/iommu_group')
        self.write(f'{sys_}/class/vfio/12/dev', number(zero))
        self.write(f'{proc}/driver/nvidia/gpus/{PF}/information',
                   'Model: \t\t NVIDIA L40S\nDevice Minor: \t 3\n')
        for pid, command, *opened in (
                (7, 'exporter', '/dev/null', '/dev/full', '/etc/hostname'),
                (8, 'testpmd', '/dev/zero'), (9, 'idle', '/dev/tty')):
            self.write(f'{proc}/{pid}/comm', command)
            for number_, path in enumerate(opened):
                os.makedirs(f'{proc}/{pid}/fd', exist_ok=True)
                os.symlink(path, f'{proc}/{pid}/fd/{number_}')
        # they have ended
        os.makedirs(f'{proc}/10')
        os.makedirs(f'{proc}/11/fd')
        os.symlink('/dev/null', f'{proc}/11/fd/0')
        self.assertEqual(
            [(PF, 7, 'exporter', '/dev/null'), (PF, 8, 'testpmd', '/dev/zero')],
            sorted(self.kernel.processes([PF])))
        with mock.patch.object(privileged, '_NVIDIA_MAJOR', os.major(null)):
            self.write(f'{proc}/driver/nvidia/gpus/{PF}/information',
                       f'Device Minor: \t {os.minor(full)}\n')
            self.assertIn((PF, 7, 'exporter', '/dev/full'),
                          self.kernel.processes([PF]))
        self.assertEqual([], self.kernel.processes([]))

    def test_reset(self):
        self.fails(errno.ENOENT, self.kernel.reset_function, PF)
        self.write(f'{self.root}/sys/{self.device}/reset', '')
        self.kernel.reset_function(PF)
        self.assertEqual('1', self.kernel.read(f'{self.device}/reset'))

    @ddt.data(('sma1', 'OUT: PHC', True), ('sma4', 'IN: 10Mhz PPS1', True),
              ('utc_tai_offset', '37', True), ('clock_source', 'PPS', True),
              ('tod_correction', '-37', True), ('freq4/seconds', '1', True),
              ('gen1/signal', '0', True), ('gen1/signal', '1000', False),
              ('irig_b_mode', '8', False), ('sma5', 'IN:', False),
              ('sma1', 'OUT: PHC\n', False), ('../reset', '1', False),
              ('clock_source', 'A/B', False), ('utc_tai_offset', 37, False))
    @ddt.unpack
    def test_time_cards(self, attribute, value, accepted):
        self.fails(errno.ENODEV if accepted else errno.EINVAL,
                   self.kernel.write_timecard, PF, attribute, value)
        path = f'{self.device}/timecard/ocp7/{attribute}'
        if accepted:
            self.write(f'{self.root}/sys/{path}', '')
            self.kernel.write_timecard(PF, attribute, value)
            self.assertEqual(value, self.kernel.read(path))

    def test_absent_function(self):
        other = '0000:5e:00.1'
        for call in ((self.kernel.rebind, other, 'dfl-pci'),
                     (self.kernel.set_numvfs, other, 1)):
            self.fails(errno.ENOENT, *call)

    def test_numvfs(self):
        self.kernel.set_numvfs(PF, 4)
        self.assertEqual('4', self.kernel.read(f'{self.device}/sriov_numvfs'))

    @ddt.data(('qat/state', 'up'), ('qat/state', 'down'),
              ('qat/cfg_services', 'sym;asym'), ('qat/cfg_services', 'dc'))
    @ddt.unpack
    def test_attributes(self, attribute, value):
        self.write(f'{self.root}/sys/{self.device}/{attribute}', '')
        self.kernel.write_attribute(PF, attribute, value)
        self.assertEqual(value, self.kernel.read(
            f'{self.device}/{attribute}'))

    @ddt.data(('qat/state', 'reset'), ('qat/state', 'up\n'),
              ('qat/state', None), ('qat/cfg_services', 'sym asym'),
              ('qat/cfg_services', ';'), ('qat/cfg_services', 'a;b;c;d;e'),
              ('remove', '1'), ('qat/../remove', '1'), ('', 'up'),
              (None, 'up'))
    @ddt.unpack
    def test_other_attributes(self, attribute, value):
        self.fails(errno.EINVAL, self.kernel.write_attribute, PF, attribute,
                   value)

    def test_heartbeat(self):
        self.fails(errno.ENOENT, self.kernel.read_qat_heartbeat, PF)
        status = (f'{self.root}/sys/kernel/debug/qat_4xxx_{PF}/heartbeat/'
                  f'status')
        for text, value in (('0\n\0', 0), ('-1\n\0', -1), ('0\n', 0)):
            self.write(status, text)
            self.assertEqual(value, self.kernel.read_qat_heartbeat(PF))
        self.fails(errno.ENOENT, self.kernel.read_qat_heartbeat,
                   '0000:5e:00.1')

    def test_port_errors(self):
        errors = f'{self.root}/sys/{self.base}/dfl-port.5/errors/errors'
        before = os.stat(errors).st_mtime_ns
        os.utime(errors, ns=(before - 10**9, before - 10**9))
        old = os.stat(errors).st_mtime_ns
        # port 0 has no error feature, and port 2 is not there
        for port in (0, 2):
            self.kernel.clear_dfl_port_errors(PF, port)
        self.assertEqual(old, os.stat(errors).st_mtime_ns)
        self.kernel.clear_dfl_port_errors(PF, 1)
        self.assertNotEqual(old, os.stat(errors).st_mtime_ns)
        self.assertEqual('0x40', self.kernel.read(
            f'{self.base}/dfl-port.5/errors/errors'))

    def disk(self, name, place, number='7:0', partition=False):
        """A block device of PF in sysfs; its node is somebody else's."""
        self.write(f'{self.root}/sys/{place}/{name}/dev', number)
        if partition:
            self.write(f'{self.root}/sys/{place}/{name}/partition', '1')
        os.makedirs(f'{self.root}/sys/class/block', exist_ok=True)
        os.symlink(f'{self.root}/sys/{place}/{name}',
                   f'{self.root}/sys/class/block/{name}')

    def test_disks_that_are_opened(self):
        controller = f'{self.device}/nvme/nvme0'
        self.disk('nvme0c0n1', controller)
        self.disk('nvme0n1', 'devices/virtual/nvme-subsystem')
        self.disk('nvme0n2', controller)
        self.disk('nvme0n2p1', f'{controller}/nvme0n2', partition=True)
        self.disk('sda', 'devices/pci0000:00/0000:00:17.0/block')
        for name in ('nvme0n1', 'nvme0n2'):
            error = self.assertRaises(OSError, self.kernel.check_disks, PF)
            self.assertEqual((errno.ENOENT, f'{self.root}/dev/{name}'),
                             (error.errno, error.filename))
            # no node of a device that can be made without privileges
            self.write(f'{self.root}/dev/{name}', '')
            error = self.assertRaises(OSError, self.kernel.check_disks, PF)
            self.assertEqual(errno.ENODEV, error.errno)
            os.unlink(f'{self.root}/sys/class/block/{name}')
            for path in ('nvme0c0n1',) if name == 'nvme0n1' else ():
                os.unlink(f'{self.root}/sys/class/block/{path}')
        # the partition goes with its disk, and the other disk is another's
        self.kernel.check_disks(PF)
        self.kernel.check_disks('0000:00:18.0')

    def blank(self):
        """A file in place of a disk."""
        file = self.useFixture(fixtures.TempDir()).join('disk')
        with open(file, 'wb') as disk:
            disk.truncate(1 << 20)
        return file

    def signatures(self, file):
        fd = os.open(file, os.O_RDONLY)
        try:
            return privileged._signatures(fd)
        finally:
            os.close(fd)

    def test_signatures(self):
        """By the tool itself, where this machine has it."""
        if not shutil.which('wipefs', path='/usr/sbin:/usr/bin:/sbin:/bin'):
            self.skipTest('no wipefs')
        file = self.blank()
        self.assertEqual([], self.signatures(file))
        with open(file, 'r+b') as disk:
            # struct swap_header_v1_2 of util-linux: version, last page
            disk.seek(1024)
            disk.write(struct.pack('<II', 1, 255))
            disk.seek(4086)
            disk.write(b'SWAPSPACE2')
        before = pathlib.Path(file).read_bytes()
        self.assertEqual(['swap'], self.signatures(file))
        self.assertEqual(before, pathlib.Path(file).read_bytes())

    @ddt.data((b'', 0, False), (b'\0' * 4096, 0, False),
              (b'\xff' * 4096, 0, True), (b'\0' * 9 + b'\1', 0, True),
              (b'x', 8191, True), (b'x', (64 << 20) - 1, True),
              # between the samples
              (b'x', (1 << 20) + 1, False),
              (b'x', (64 << 20) * 127 // 255 // 4096 * 4096 + 7, True))
    @ddt.unpack
    def test_samples(self, data, offset, found):
        with tempfile.TemporaryFile() as disk:
            disk.truncate(64 << 20)
            disk.seek(offset)
            disk.write(data)
            disk.flush()
            self.assertIs(found, privileged._has_data(disk.fileno()))

    def test_small_disk(self):
        with tempfile.TemporaryFile() as disk:
            self.assertFalse(privileged._has_data(disk.fileno()))
            # as well as zeros what is erased
            disk.write(b'\xff' * (3 << 20))
            disk.flush()
            self.assertFalse(privileged._has_data(disk.fileno()))
            disk.seek(0)
            disk.write(b'x' * 10)
            disk.flush()
            self.assertTrue(privileged._has_data(disk.fileno()))

    @ddt.data((FileNotFoundError(2, 'wipefs'), errno.ENOENT),
              (subprocess.TimeoutExpired('wipefs', 60), errno.ETIMEDOUT))
    @ddt.unpack
    def test_signatures_without_the_tool(self, error, number):
        with mock.patch('subprocess.run', side_effect=error):
            raised = self.assertRaises(OSError, self.signatures, self.blank())
        self.assertEqual(number, raised.errno)

    def test_signatures_that_cannot_be_read(self):
        # a directory can be opened, and not read
        raised = self.assertRaises(
            OSError, self.signatures, self.useFixture(fixtures.TempDir()).path)
        self.assertEqual(errno.EIO, raised.errno)

    def test_signatures_of_the_disks_of_a_function(self):
        self.disk('sda', 'devices/pci0000:00/0000:00:17.0/block')
        self.assertEqual([], self.kernel.read_signatures(PF))
        self.disk('nvme0n1', f'{self.device}/nvme/nvme0')
        self.write(f'{self.root}/dev/nvme0n1', '')
        self.fails(errno.ENODEV, self.kernel.read_signatures, PF)

    def test_xclbin_for_a_guest(self):
        place = f'{self.root}/xclbins'
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.firmware.XCLBINS', place))
        wanted = ('6250ec803f384be0ac9068bfd3c140a8', 'ab' * 16)
        self.kernel.offer_xclbin(PF, self.xclbin, self.xclbin_size, *wanted,
                                 b'layout')
        with open(self.xclbin, 'rb') as file, open(
                f'{place}/{firmware.file_name(*wanted)}', 'rb') as placed:
            self.assertEqual(file.read(), placed.read())
        self.assertTrue(self.kernel.offers_xclbin(*wanted))
        self.assertEqual(b'layout', self.kernel.xclbin_layout(PF))
        self.kernel.withdraw_xclbin(PF)
        self.assertFalse(self.kernel.offers_xclbin(*wanted))
        for name, path, layout in (
                ('../x.xclbin', self.xclbin, b''),
                (firmware.file_name(*wanted), '/etc/hostname', b''),
                (firmware.file_name(*wanted), self.xclbin, 'text'),
                (firmware.file_name(*wanted), self.xclbin, b'x' * 5000)):
            self.fails(errno.EINVAL, privileged.offer_xclbin, PF, path,
                       self.xclbin_size, name, layout)

    def test_firmware_of_a_card_that_is_absent(self):
        """No directory of the host is made for it."""
        self.fails(errno.ENODEV, self.kernel.offer_xclbin, '0000:5e:00.7',
                   self.xclbin, self.xclbin_size, '6250ec803f384be0ac9068bfd3'
                   'c140a8', 'ab' * 16, b'')

    def test_mailbox(self):
        path = f'{self.device}/config_mailbox_channel_disable'
        for before, after in (('0x0', '0x2c2a0'), ('0x11', '0x2c2b1')):
            self.write(f'{self.root}/sys/{path}', f'{before}\n')
            self.kernel.close_mailbox(PF, 0x2c2a0)
            self.assertEqual(after, self.kernel.read(path))
        for requests in (-1, 1 << 64, '0x1', None, True):
            self.fails(errno.EINVAL, self.kernel.close_mailbox, PF, requests)

    @ddt.data(('0x1002', 'ada', 1), ('0x10de', 'volta', 1),
              ('0x10de', None, 1), ('0x10de', 'ada', 3_600_001),
              ('0x10de', 'ada', -1), ('0x10de', 'ada', 0.5))
    @ddt.unpack
    def test_arguments_of_a_gpu(self, vendor, family, milliseconds):
        self.write(f'{self.root}/sys/{self.device}/vendor', f'{vendor}\n')
        for by in 'VFIO', 'sysfs':
            self.fails(errno.EINVAL, self.kernel.reset_gpu, PF, by, family,
                       milliseconds)

    def nvme_calls(self):
        """Those by the node of a controller."""
        blocks = (nvme_admin.Namespace(1, 512, 0),)
        return ((self.kernel.read_nvme, PF),
                (self.kernel.read_nvme_sanitize, PF),
                (self.kernel.read_nvme_health, PF),
                (self.kernel.start_nvme_sanitize, PF, 'crypto'),
                (self.kernel.exit_nvme_sanitize_failure, PF),
                (self.kernel.format_nvme, PF),
                (self.kernel.format_nvme, PF, blocks),
                (self.kernel.restore_nvme_namespaces, PF, blocks),
                (self.kernel.restore_nvme_namespaces, PF, ()),
                (self.kernel.read_nvme_vfs, PF),
                (self.kernel.format_nvme_vf, PF, 1),
                (self.kernel.reset_nvme_vf, PF, 1, 3, 2))

    def test_nvme_without_controller(self):
        for call in (*self.nvme_calls(), (self.kernel.reset_nvme, PF)):
            self.fails(errno.ENODEV, *call)

    def test_node_of_the_nvme_controller(self):
        directory = f'{self.device}/nvme/nvme3'
        self.write(f'{self.root}/sys/{directory}/dev', '1:3')
        self.check_node('nvme3', directory, self.nvme_calls)

    def test_domain_of_five_digits(self):
        for call, _, *more in self.nvme_calls():
            self.fails(errno.ENODEV, call, '10000:01:00.0', *more)

    @ddt.data('5e:00.0', '00010000:01:00.0', f'{PF}/..', None)
    def test_nvme_addresses(self, address):
        for call, _, *more in (*self.nvme_calls(),
                               (self.kernel.reset_nvme, PF)):
            self.fails(errno.EINVAL, call, address, *more)

    def test_nvme_arguments(self):
        for method in ('', 'exit', 'crypto\n', None, 4):
            self.fails(errno.EINVAL, self.kernel.start_nvme_sanitize, PF,
                       method)
        for vf in (-1, 1 << 16, True, '1', None):
            self.fails(errno.EINVAL, self.kernel.format_nvme_vf, PF, vf)
            for numbers in ((vf, 3, 2), (1, vf, 2), (1, 3, vf)):
                self.fails(errno.EINVAL, self.kernel.reset_nvme_vf, PF,
                           *numbers)
        for call in (privileged.format_nvme,
                     privileged.restore_nvme_namespaces):
            for namespaces in (None, '1x512', ['1x512+'], ['1x512\n'], [None],
                               ['-1x512'], ['1x512'] * 1025, {'1x512': 1}):
                self.fails(errno.EINVAL, call, PF, namespaces)

    def test_disks_are_held(self):
        """What erases opens them before it sends a command."""
        controller = f'{self.device}/nvme/nvme0'
        self.write(f'{self.root}/sys/{controller}/dev', '1:3')
        self.write(f'{self.root}/dev/nvme0', '')
        self.disk('nvme0n1', controller)
        for call in ((self.kernel.start_nvme_sanitize, PF, 'crypto'),
                     (self.kernel.format_nvme, PF),
                     (self.kernel.restore_nvme_namespaces, PF, ())):
            error = self.assertRaises(OSError, *call)
            self.assertEqual((errno.ENOENT, f'{self.root}/dev/nvme0n1'),
                             (error.errno, error.filename))

    def test_disks_are_held_exclusively(self):
        """The kernel refuses a disk that is mounted only where it is opened
        with O_EXCL (open(2), blkdev_get_by_dev)."""
        self.disk('nvme0n1', f'{self.device}/nvme/nvme0')
        opened = []

        def refuse(path, flags, *args, **kwargs):
            opened.append(path)
            if flags & os.O_EXCL:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            return os.dup(0)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.privileged.os.open', refuse))
        error = self.assertRaises(OSError, self.kernel.check_disks, PF)
        self.assertEqual(errno.EBUSY, error.errno)
        self.assertEqual([f'{self.root}/dev/nvme0n1'], opened)

    def open_disk(self, number):
        """Have the disk of PF refuse to be opened, with this error."""
        vf = '0000:5e:00.1'
        for function, disk in ((PF, 'nvme0n1'), (vf, 'nvme1n1')):
            self.disk(disk, f'bus/pci/devices/{function}/nvme/nvme0')
        self.write(f'{self.root}/sys/{self.device}/nvme/nvme0'
                   f'/reset_controller', '')
        self.write(f'{self.root}/sys/{self.device}/reset', '')
        self.write(f'{self.root}/sys/bus/pci/drivers_probe', '')
        os.symlink(f'../{vf}', f'{self.root}/sys/{self.device}/virtfn0')
        self.bound_to('dfl-pci')
        real = os.open

        def refuse(path, flags, *args, **kwargs):
            if '/dev/nvme' in path:
                self.assertTrue(flags & os.O_EXCL)
                raise OSError(number, os.strerror(number), path)
            return real(path, flags, *args, **kwargs)
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.privileged.os.open', refuse))

    CALLS = (('rebind', 'vfio-pci'), ('unbind',), ('probe',),
             ('reset_function',), ('reset_nvme',), ('set_numvfs', 1))

    @ddt.data(*CALLS)
    def test_disk_of_the_host_keeps_its_driver(self, call):
        """No bug of nova-compute takes a disk from under its file system."""
        self.open_disk(errno.EBUSY)
        name, *args = call
        self.fails(errno.EBUSY, getattr(self.kernel, name), PF, *args)

    @ddt.data(*CALLS)
    def test_dead_disk_can_be_reset(self, call):
        self.open_disk(errno.ENXIO)
        name, *args = call
        before = self.snapshot()
        getattr(self.kernel, name)(PF, *args)
        self.assertNotEqual(before, self.snapshot())

    def test_disks_that_are_held_by_number(self):
        for number in (1, 2):
            place = f'{self.device}/nvme/nvme0'
            self.disk(f'nvme0n{number}', place)
            self.write(f'{self.root}/sys/{place}/nvme0n{number}/nsid',
                       f'{number}\n')
        for number in (1, 2):
            held = privileged._disks_held(PF, namespaces={str(number)})
            error = self.assertRaises(OSError, held.__enter__)
            self.assertEqual(f'{self.root}/dev/nvme0n{number}',
                             error.filename)
        with privileged._disks_held(PF, namespaces={'3'}):
            pass

    def test_reset_of_an_nvme_controller(self):
        reset = f'{self.device}/nvme/nvme3/reset_controller'
        self.write(f'{self.root}/sys/{reset}', '')
        self.kernel.reset_nvme(PF)
        self.assertEqual('1', self.kernel.read(reset))

    # extended capabilities as (offset, id, next, eight bytes)
    @ddt.unpack
    @ddt.data(
        (((0x100, 1, 0x148, b''), (0x148, 3, 0, SERIAL)), '000a3501fe123456'),
        (((0x100, 3, 0x148, SERIAL),), '000a3501fe123456'),
        (((0x100, 1, 0, b''),), ''),
        (((0x100, 1, 0x148, b''), (0x148, 2, 0x100, b'')), ''),
        (((0x100, 3, 0, b'\0' * 8),), ''),
        (((0x100, 3, 0, b'\xff' * 8),), ''),
        (((0x100, 1, 0xffc, b''), (0xffc, 3, 0, b'')), ''),
        ((), ''))
    def test_device_serial(self, capabilities, expected):
        self.has(capabilities)
        self.assertEqual(expected, self.kernel.read_device_serial(PF))

    @ddt.unpack
    @ddt.data(
        # what it is able to, then what it does
        (((0x100, 1, 0x148, b''), (0x148, 13, 0, b'\x5f\0\x1d\0')), 0x1d),
        (((0x100, 13, 0x148, b'\x5f'), (0x148, 3, 0, SERIAL)), 0),
        (((0x100, 3, 0, SERIAL),), None), ((), None))
    def test_acs(self, capabilities, expected):
        self.has(capabilities)
        self.assertEqual(expected, self.kernel.read_acs(PF))

    def has(self, capabilities):
        config = bytearray(4096)
        for offset, number, after, value in capabilities:
            struct.pack_into('<I', config, offset,
                             number | 1 << 16 | after << 20)
            config[offset + 4:offset + 4 + len(value)] = value
        with open(f'{self.root}/sys/{self.device}/config', 'wb') as file:
            file.write(config[:4096])

    # type of the feature header (drivers/fpga/dfl.h of Linux), the low and the
    # high half of the id -> the id, or the number of an error
    @ddt.data((1, 0xf89e433683f9040b, 0xd8424dc4a4a3c413,
               'd8424dc4a4a3c413f89e433683f9040b'),
              (4, 1, 2, errno.ENODEV),
              (15, (1 << 64) - 1, (1 << 64) - 1, errno.ENODEV))
    @ddt.unpack
    def test_afu(self, kind, low, high, expected):
        with open(f'{self.root}/sys/{self.device}/resource0', 'wb') as file:
            file.write(struct.pack('<QQQ', kind << 60 | 1 << 40, low, high
                                   ).ljust(1 << 20, b'\0'))
        if isinstance(expected, int):
            self.fails(expected, self.kernel.read_afu, PF)
        else:
            self.assertEqual(expected, self.kernel.read_afu(PF))

    def test_afu_of_a_function_without_memory(self):
        self.fails(errno.ENOENT, self.kernel.read_afu, PF)

    @ddt.data(b'\xff' * 4096, b'\x86\x80' * 32, b'')
    def test_no_device_serial(self, config):
        """Of a dead card, and of one without extended capabilities."""
        with open(f'{self.root}/sys/{self.device}/config', 'wb') as file:
            file.write(config)
        self.assertEqual('', self.kernel.read_device_serial(PF))
        self.assertIsNone(self.kernel.read_acs(PF))

    def test_context(self):
        entry_points = [getattr(privileged, name) for name in (
            'program_dfl_port', 'release_dfl_port', 'assign_dfl_port',
            'clear_dfl_port_errors', 'program_xclbin', 'rebind',
            'set_numvfs', 'write_attribute', 'read_qat_heartbeat',
            'create_mdev', 'remove_mdev', 'check_disks', 'reset_nvme',
            'unbind', 'probe', 'reset_function', 'is_group_open',
            'write_timecard',
            'reset_gpu_by_vfio',
            'reset_dfl_port', 'close_mailbox', 'read_signatures', 'read_afu',
            'offer_xclbin', 'withdraw_xclbin')]
        for entry_point in entry_points:
            self.assertTrue(privsep.ctx.is_entrypoint(entry_point))
        for name in ('read_nvme', 'read_nvme_health', 'read_nvme_sanitize',
                     'start_nvme_sanitize', 'exit_nvme_sanitize_failure',
                     'format_nvme', 'restore_nvme_namespaces', 'read_nvme_vfs',
                     'format_nvme_vf', 'reset_nvme_vf',
                     'reset_gpu_by_sysfs',
                     'read_device_serial', 'read_acs'):
            self.assertTrue(privsep.disks.is_entrypoint(
                getattr(privileged, name)))
        self.assertTrue(privsep.processes.is_entrypoint(
            privileged.processes))
        self.assertEqual('nova_accel.privsep.processes',
                         privsep.processes.pypath)
        self.assertEqual('nova_accel.privsep.ctx', privsep.ctx.pypath)
        self.assertEqual('nova_accel.privsep.disks', privsep.disks.pypath)
        # in a fresh process: other tests clear the defaults of options
        result = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', textwrap.dedent('''
                from oslo_config import cfg
                from nova_accel import privsep
                cfg.CONF([], project='nova', default_config_files=[])
                print(*privsep.ctx.conf.capabilities,
                      *privsep.disks.conf.capabilities,
                      *privsep.processes.conf.capabilities)
                ''')], capture_output=True, text=True)
        self.assertEqual(f'{int(capabilities.CAP_DAC_READ_SEARCH)} '
                         f'{int(capabilities.CAP_SYS_ADMIN)} '
                         f'{int(capabilities.CAP_DAC_READ_SEARCH)} '
                         f'{int(capabilities.CAP_SYS_PTRACE)}\n',
                         result.stdout, result.stderr)

    def test_calls_that_hang(self):
        """As many as the host has processors, or cards, leave room for the
        next call. In a fresh process, as above."""
        result = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', textwrap.dedent('''
                import os, threading
                from oslo_config import cfg
                from oslo_privsep import daemon
                from nova_accel import privsep
                cfg.CONF([], project='nova', default_config_files=[])
                for context in (privsep.ctx, privsep.disks, privsep.processes):
                    pool = daemon.Daemon(None, context).thread_pool
                    ends = threading.Event()
                    for _ in range(max(64, os.cpu_count() + 1)):
                        pool.submit(ends.wait)
                    try:
                        print(pool.submit(str, 'done').result(10), flush=True)
                    finally:
                        ends.set()
                ''')], capture_output=True, text=True)
        self.assertEqual(3 * 'done\n', result.stdout, result.stderr)


class StartTest(testtools.TestCase):

    def test_helper_that_is_missing_or_fails(self):
        """It is said of which section, and not taken for the device's."""
        config = self.useFixture(config_fixture.Config(conf.CONF))
        for helper, words in (('/nonexistent', "'/nonexistent'"),
                              ('/bin/false', 'exited non-zero (1)')):
            config.config(group='nova_accel_privileged_disks',
                          helper_command=helper)
            error = self.assertRaises(OSError, privsep.disks.start)
            self.assertEqual(errno.ENOEXEC, error.errno)
            self.assertIn('[nova_accel_privileged_disks] does not start',
                          error.strerror)
            self.assertIn(words, error.strerror)


@ddt.ddt
class Rootwrap(testtools.TestCase):
    """The filter lets one command through, and nothing that looks like it."""

    HELPER = ['privsep-helper', '--config-file', '/etc/nova/nova.conf']
    CONTEXT = ['--privsep_context', 'nova_accel.privsep.ctx',
               '--privsep_sock_path', '/tmp/tmpab_12/privsep.sock']

    def setUp(self):
        super().setUp()
        # a command that ran before in this process has set it for good
        self.useFixture(fixtures.MonkeyPatch(
            'oslo_privsep.priv_context._HELPER_COMMAND_PREFIX', ['sudo']))

    def allowed(self, command):
        root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        # rootwrap adds filters of its own
        found = [f for f in wrapper.load_filters(
                     [os.path.join(root, 'etc/nova_accel/rootwrap.d')])
                 if f.name.startswith('privsep-rootwrap')]
        self.assertEqual(2, len(found))
        return any(f.match(command) for f in found)

    def test_command_of_privsep(self):
        for files in (['nova.conf'], ['nova.conf', 'nova-compute.conf']):
            files = [f'/etc/nova/{name}' for name in files]
            self.useFixture(fixtures.MonkeyPatch(
                'oslo_config.cfg.ConfigOpts.config_file', files))
            for context in (privsep.ctx, privsep.disks, privsep.processes):
                command = context.helper_command('/tmp/tmpab_12/privsep.sock')
                self.assertEqual('sudo', command[0])
                self.assertTrue(self.allowed(command[1:]), command)

    @ddt.data(
        HELPER[:1] + CONTEXT,
        HELPER + ['--privsep_context', 'os_brick.privileged.default'],
        HELPER + CONTEXT + ['--privsep_context', 'os_brick.privileged.ctx'],
        HELPER[:2] + ['/etc/nova/../../tmp/nova.conf'] + CONTEXT,
        HELPER[:2] + ['/tmp/nova.conf'] + CONTEXT,
        HELPER + CONTEXT[:3] + ['/tmp/tmpab_12/../../etc/privsep.sock'],
        HELPER + ['--privsep_context', 'nova_accel_privsep.ctx'] + CONTEXT[2:],
        ['sh'] + HELPER[1:] + CONTEXT)
    def test_other_commands(self, command):
        self.assertFalse(self.allowed(command), command)


class CacheTest(testtools.TestCase):

    def test_default(self):
        """The privileged process does not load Nova, whose state_path the
        default of [accel] bitstream_cache refers to."""
        with tempfile.NamedTemporaryFile('w', suffix='.conf') as file:
            file.write('[DEFAULT]\nstate_path = /var/lib/nova\n')
            file.flush()
            found = subprocess.run(
                [sys.executable, '-W', 'ignore', '-c',
                 'import sys\n'
                 'from nova_accel.host import privileged\n'
                 'privileged.CONF(["--config-file", sys.argv[1]])\n'
                 'print(privileged._cache())', file.name],
                stdout=subprocess.PIPE, text=True, check=True).stdout
        self.assertEqual('/var/lib/nova/accel_bitstreams\n', found)
