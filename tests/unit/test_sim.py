# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The simulated host answers as a real kernel was seen to answer."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import ddt
import fixtures
from oslo_config import fixture as config_fixture
import testtools
import yaml

from nova_accel.bitstream import gbs
from nova_accel import conf
from nova_accel.drivers import dfl
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel import machine
from nova_accel import sim
from tests import limits
from tests.unit.host import (A, B, FIRST, FUNCTION, INTERFACE, OTHER, plain,
                             SimulatedHost)

A0, A1 = '0000:5e:00.1', '0000:5e:00.2'


class TestCase(limits.Waits, testtools.TestCase):

    def start(self, *cards, **more):
        self.host = self.useFixture(SimulatedHost(*cards, **more))
        self.kernel = self.host.kernel

    def fails(self, number, call, *args):
        error = self.assertRaises(OSError, call, *args)
        self.assertEqual(errno.errorcode[number],
                         errno.errorcode[error.errno])

    def children(self, address, kind):
        top = f'bus/pci/devices/{address}/fpga_region'
        return [f'{top}/{region}/{name}'
                for region in self.kernel.listdir(top)
                for name in self.kernel.listdir(f'{top}/{region}')
                if name.startswith(kind)]

    def port(self, address, number=0):
        return self.children(address, 'dfl-port')[number]

    def afu_id(self, address=A, number=0):
        return self.kernel.read(f'{self.port(address, number)}/afu_id')

    def manager(self, attribute, address=A):
        fme, = self.children(address, 'dfl-fme')
        name, = [n for n in self.kernel.listdir(fme) if 'mgr' in n]
        top = f'{fme}/{name}/fpga_manager'
        return self.kernel.read(
            f'{top}/{self.kernel.listdir(top)[0]}/{attribute}')

    def program(self, address=A, port=0, kernel=None, **more):
        parsed = gbs.parse(self.host.gbs(**more))
        (kernel or self.kernel).program_dfl_port(
            address, port, parsed.path, parsed.payload_offset,
            parsed.payload_size)

    def in_background(self, call, *args, **kwargs):
        thread = threading.Thread(target=call, args=args, kwargs=kwargs)
        thread.start()
        self.addCleanup(thread.join)
        return thread


@ddt.ddt
class Sysfs(TestCase):

    def test_paths_through_the_class_and_the_bus_are_one(self):
        self.start({'address': A, 'ports': 2})
        base, = self.kernel.listdir(f'bus/pci/devices/{A}/fpga_region')
        self.assertEqual(
            self.kernel.listdir(f'bus/pci/devices/{A}/fpga_region/{base}'),
            self.kernel.listdir(f'class/fpga_region/{base}'))
        self.assertEqual(3, len(self.kernel.listdir('class/fpga_region')))
        self.assertEqual(
            [A], self.kernel.listdir(
                f'bus/pci/devices/{A}/iommu_group/devices'))
        self.assertTrue(self.kernel.exists(
            f'bus/pci/drivers/dfl-pci/{A}/vendor'))

    def test_links_are_relative_as_in_sysfs(self):
        self.start({'address': A})
        self.assertEqual(f'../../../devices/pci0000:5e/{A}',
                         self.kernel.readlink(f'bus/pci/devices/{A}'))
        self.assertEqual('../../../bus/pci/drivers/dfl-pci',
                         self.kernel.readlink(f'bus/pci/devices/{A}/driver'))

    def test_bridges(self):
        """Ports are functions; what is below them has them in its path."""
        above = ['pci0000:5d', '0000:5d:00.0']
        self.start({'address': A, 'bridges': above, 'vfs': 1,
                    'numa_node': 1}, others=[
            {'address': B, 'bridges': [*above[:1], '0000:5d:02.0']},
            {'address': '0000:5f:00.0', 'bridges': above}])
        self.assertEqual(
            ['0000:5d:00.0', '0000:5d:02.0', A, f'{A[:-1]}1', '0000:5f:00.0',
             B], self.kernel.listdir('bus/pci/devices'))
        for address, place in (
                (A, f'pci0000:5d/0000:5d:00.0/{A}'),
                (f'{A[:-1]}1', f'pci0000:5d/0000:5d:00.0/{A[:-1]}1'),
                (B, f'pci0000:5d/0000:5d:02.0/{B}'),
                ('0000:5d:02.0', 'pci0000:5d/0000:5d:02.0')):
            self.assertEqual(f'../../../devices/{place}',
                             self.kernel.readlink(f'bus/pci/devices/{address}'))
        port = 'bus/pci/devices/0000:5d:00.0'
        self.assertEqual(('0x060400', '1', '../../../bus/pci/drivers/pcieport'),
                         (self.kernel.read(f'{port}/class'),
                          self.kernel.read(f'{port}/numa_node'),
                          self.kernel.readlink(
                              f'devices/{"/".join(above)}/driver').replace(
                                  '../../../../', '../../../')))
        # and what is below a function is found there
        self.assertEqual(1, len(self.kernel.listdir(
            f'devices/pci0000:5d/0000:5d:00.0/{A}/fpga_region')))

    def test_errors_of_reads(self):
        self.start({'address': A})
        for number, call, path in (
                (errno.ENOENT, self.kernel.read, 'bus/pci/devices/x/vendor'),
                (errno.ENOENT, self.kernel.listdir, 'class/none'),
                (errno.EISDIR, self.kernel.read, 'bus/pci'),
                (errno.ENOTDIR, self.kernel.listdir,
                 f'bus/pci/devices/{A}/vendor'),
                (errno.ENOTDIR, self.kernel.read,
                 f'bus/pci/devices/{A}/vendor/x'),
                (errno.EINVAL, self.kernel.readlink,
                 f'bus/pci/devices/{A}/vendor')):
            self.fails(number, call, path)
        self.assertFalse(self.kernel.exists('bus/pci/devices/x'))

    def test_compat_id_of_the_base_region(self):
        self.start({'address': A, 'ports': 2})
        base, = self.kernel.listdir(f'bus/pci/devices/{A}/fpga_region')
        path = f'class/fpga_region/{base}'
        self.assertIn('compat_id', self.kernel.listdir(path))
        self.fails(errno.ENOENT, self.kernel.read, f'{path}/compat_id')
        others = [self.kernel.read(f'class/fpga_region/{name}/compat_id')
                  for name in self.kernel.listdir('class/fpga_region')
                  if name != base]
        self.assertEqual([INTERFACE] * 2, others)

    def test_configuration_space(self):
        self.start({'address': A, 'vfs': 1})
        self.assertEqual(b'\x86\x80\xc4\x09', self.kernel.read_bytes(
            f'bus/pci/devices/{A}/config', 4))
        self.assertEqual(b'\xff\xff', self.kernel.read_bytes(
            f'bus/pci/devices/{A0}/config', 2))
        self.assertEqual('0x8086',
                         self.kernel.read(f'bus/pci/devices/{A0}/vendor'))
        self.kernel.set_fault(A, dead=True)
        self.assertEqual(b'\xff\xff', self.kernel.read_bytes(
            f'bus/pci/devices/{A}/config', 2))
        self.assertEqual('f' * 32, self.afu_id(A0))
        # as the kernel does, which read them when it found the card
        self.assertEqual('0x8086',
                         self.kernel.read(f'bus/pci/devices/{A}/vendor'))

    @ddt.data('vfio-pci', None)
    def test_function_without_dfl_pci_has_no_tree(self, driver):
        self.start({'address': A, 'driver': driver})
        self.assertFalse(self.kernel.exists(
            f'bus/pci/devices/{A}/fpga_region'))
        self.assertEqual([], self.kernel.listdir('class/fpga_region'))


@ddt.ddt
class Programming(TestCase):

    def test_afu_id_is_busy_meanwhile_and_time_passes(self):
        self.start({'address': A, 'ports': 2, 'programming_seconds': 0.4},
                   {'address': B})
        began = time.monotonic()
        worker = self.in_background(self.program)
        self.wait_for(lambda: self.manager('state') == 'write')
        self.fails(errno.EBUSY, self.afu_id)
        self.assertEqual(FIRST, self.afu_id(number=1))
        self.assertEqual(FIRST, self.afu_id(B))
        worker.join()
        self.assertTrue(time.monotonic() - began >= 0.4)
        self.assertEqual(plain(FUNCTION), self.afu_id())
        self.assertEqual('operating', self.manager('state'))

    def test_failure_leaves_the_port_disabled(self):
        self.start({'address': A, 'ports': 2})
        self.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.fails(errno.EIO, self.program)
        self.assertEqual('reconfig CRC error', self.manager('status'))
        self.assertEqual('write complete error', self.manager('state'))
        self.fails(errno.EBUSY, self.afu_id)
        self.assertEqual(FIRST, self.afu_id(number=1))
        # even after a programming that succeeds
        self.program()
        self.assertEqual('', self.manager('status'))
        self.fails(errno.EBUSY, self.afu_id)
        before = self.port(A)
        self.kernel.rebind(A, 'dfl-pci')
        self.assertNotEqual(before, self.port(A))
        self.assertEqual('unknown', self.manager('state'))
        self.assertEqual(plain(FUNCTION), self.afu_id())

    def test_vf_does_not_see_that_its_port_is_disabled(self):
        self.start({'address': A, 'vfs': 1})
        self.kernel.set_fault(A, pr_error='crc')
        self.fails(errno.EIO, self.program)
        self.assertEqual(FIRST, self.afu_id(A0))

    def test_faults_count(self):
        self.start({'address': A})
        self.kernel.set_fault(A, pr_error='fifo', pr_error_count=2)
        self.fails(errno.EIO, self.program)
        self.fails(errno.EIO, self.program)
        self.program()
        self.kernel.set_fault(A, pr_error='fifo', pr_error_count=1)
        self.fails(errno.EIO, self.program)
        self.program()

    def test_fault_of_the_description_is_taken_away(self):
        self.start({'address': A, 'faults': {'pr_error': 'crc'}})
        self.fails(errno.EIO, self.program)
        self.kernel.set_fault(A, pr_error=None)
        self.program()

    def test_timeout(self):
        self.start({'address': A, 'timeout_seconds': 0.3,
                    'faults': {'pr_error': 'timeout'}})
        began = time.monotonic()
        self.fails(errno.ETIMEDOUT, self.program)
        self.assertTrue(time.monotonic() - began >= 0.3)
        self.assertEqual('', self.manager('status'))
        self.fails(errno.EBUSY, self.afu_id)

    @ddt.data({'interface': OTHER}, {'payload_interface': OTHER})
    def test_payload_for_another_interface(self, made):
        self.start({'address': A})
        self.fails(errno.EIO, lambda: self.program(**made))
        self.assertEqual('reconfig incompatible image',
                         self.manager('status'))

    def test_file_with_its_header(self):
        self.start({'address': A})
        path = self.host.gbs()
        self.fails(errno.EIO, self.kernel.program_dfl_port, A, 0, path, 0,
                   os.path.getsize(path))
        self.assertEqual('reconfig incompatible image',
                         self.manager('status'))

    def test_arguments(self):
        self.start({'address': A})
        path = self.host.gbs()
        size = os.path.getsize(path)
        for number, *arguments in (
                (errno.EINVAL, A, 1, path, 0, size),
                (errno.EINVAL, A, 0, path, 0, size + 1),
                (errno.EINVAL, A, 0, path, 0, 0),
                (errno.ENODEV, B, 0, path, 0, size),
                (errno.ENOENT, A, 0, f'{path}.none', 0, size)):
            self.fails(number, self.kernel.program_dfl_port, *arguments)
        self.kernel.guest_takes(A)
        self.fails(errno.ENODEV, self.program)

    def test_one_port_of_a_card_at_a_time(self):
        self.start({'address': A, 'ports': 2, 'programming_seconds': 0.4})
        self.host.gbs()
        began = time.monotonic()
        for address, port in ((A, 0), (A, 1)):
            self.in_background(self.program, address, port)
        self.wait_for(lambda: self.manager('state') == 'operating'
                      and self._both())
        self.assertTrue(time.monotonic() - began >= 0.8)

    def _both(self):
        try:
            return [plain(FUNCTION)] * 2 == [self.afu_id(number=n)
                                             for n in range(2)]
        except OSError:
            return False

    def test_hang(self):
        self.start({'address': A, 'faults': {'hang': 'program'}},
                   {'address': B})
        worker = self.in_background(
            self.fails, errno.ETIMEDOUT, self.program)
        self.wait_for(lambda: self.manager('state') == 'write')
        self.program(B)
        time.sleep(0.2)
        self.assertTrue(worker.is_alive())
        self.kernel.set_fault(A, hang=None)
        worker.join(60)
        self.assertFalse(worker.is_alive())

    def test_read_that_hangs_costs_only_its_card(self):
        self.start({'address': A}, {'address': B})
        self.kernel.set_fault(A, hang='read')
        worker = self.in_background(self.afu_id)
        for _ in range(10):
            self.assertEqual(FIRST, self.afu_id(B))
        self.assertTrue(worker.is_alive())
        self.kernel.set_fault(A, hang=None)
        worker.join(5)
        self.assertFalse(worker.is_alive())

    def test_card_goes_on_when_the_process_is_killed(self):
        self.start({'address': A, 'programming_seconds': 1})
        parsed = gbs.parse(self.host.gbs())
        code = (f'from nova_accel import sim\n'
                f'sim.SimulatedKernel({self.host.path!r}).program_dfl_port('
                f'{A!r}, 0, {parsed.path!r}, {parsed.payload_offset}, '
                f'{parsed.payload_size})')
        process = subprocess.Popen([sys.executable, '-W', 'ignore', '-c',
                                    code])
        self.addCleanup(process.wait)
        self.wait_for(lambda: self.manager('state') == 'write')
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.fails(errno.EBUSY, self.afu_id)
        self.wait_for(lambda: self.manager('state') == 'operating')
        self.assertEqual(plain(FUNCTION), self.afu_id())


@ddt.ddt
class VirtualFunctions(TestCase):

    def numvfs(self):
        return self.kernel.read(f'bus/pci/devices/{A}/sriov_numvfs')

    def test_as_many_as_released(self):
        self.start({'address': A, 'ports': 2})
        self.fails(errno.EINVAL, self.kernel.set_numvfs, A, 1)
        self.fails(errno.ERANGE, self.kernel.set_numvfs, A, 3)
        self.kernel.release_dfl_port(A, 1)
        self.assertEqual(1, len(self.children(A, 'dfl-port')))
        self.fails(errno.EINVAL, self.kernel.set_numvfs, A, 2)
        self.assertEqual('0', self.numvfs())
        self.kernel.set_numvfs(A, 1)
        self.assertEqual('1', self.numvfs())
        self.assertEqual('1', self.kernel.read(f'{self.port(A0)}/id'))
        self.assertEqual(f'../{A0}', self.kernel.readlink(
            f'bus/pci/devices/{A}/virtfn0'))
        self.assertEqual(f'../{A}', self.kernel.readlink(
            f'bus/pci/devices/{A0}/physfn'))
        self.assertEqual([], self.children(A0, 'dfl-fme'))

    def test_only_from_none_to_some_and_back(self):
        self.start({'address': A, 'ports': 2, 'vfs': 2})
        self.fails(errno.EBUSY, self.kernel.set_numvfs, A, 1)
        self.kernel.set_numvfs(A, 2)
        self.kernel.set_numvfs(A, 0)
        self.assertFalse(self.kernel.exists(f'bus/pci/devices/{A0}'))
        # released they stay
        self.assertEqual([], self.children(A, 'dfl-port'))
        self.kernel.set_numvfs(A, 2)
        self.assertTrue(self.kernel.exists(f'bus/pci/devices/{A1}'))

    def test_errors_of_release_and_assign(self):
        self.start({'address': A, 'ports': 2})
        for call in (self.kernel.release_dfl_port,
                     self.kernel.assign_dfl_port):
            self.fails(errno.EINVAL, call, A, 2)
            self.fails(errno.ENODEV, call, B, 0)
        self.fails(errno.EBUSY, self.kernel.assign_dfl_port, A, 0)
        self.kernel.release_dfl_port(A, 0)
        self.fails(errno.EBUSY, self.kernel.release_dfl_port, A, 0)

    def test_port_assigned_again_has_no_driver(self):
        self.start({'address': A, 'ports': 2})
        self.kernel.release_dfl_port(A, 1)
        self.kernel.assign_dfl_port(A, 1)
        self.assertFalse(self.kernel.exists(f'{self.port(A, 1)}/id'))
        self.kernel.rebind(A, 'dfl-pci')
        self.assertEqual('1', self.kernel.read(f'{self.port(A, 1)}/id'))

    def test_programming_needs_no_function_that_has_the_port(self):
        self.start({'address': A, 'ports': 2})
        self.kernel.release_dfl_port(A, 1)
        self.program(port=1)
        self.kernel.assign_dfl_port(A, 1)
        self.program(port=1, function=OTHER)
        self.kernel.rebind(A, 'dfl-pci')
        self.assertEqual([FIRST, plain(OTHER)],
                         [self.afu_id(number=n) for n in range(2)])

    def test_card_without_vfs(self):
        self.start({'address': A, 'product': 'PAC_N3000'})
        self.assertFalse(self.kernel.exists(
            f'bus/pci/devices/{A}/sriov_numvfs'))
        self.fails(errno.ENOENT, self.kernel.set_numvfs, A, 1)

    def test_rebinding_takes_the_vfs_away(self):
        self.start({'address': A, 'ports': 2, 'vfs': 2})
        self.kernel.rebind(A, 'dfl-pci')
        self.assertEqual('0', self.numvfs())
        self.assertEqual(2, len(self.children(A, 'dfl-port')))

    @ddt.data('numvfs', 'rebind')
    def test_guest_with_a_vf_blocks(self, how):
        self.start({'address': A, 'vfs': 1})
        self.kernel.guest_takes(A0)
        call = ((self.kernel.set_numvfs, A, 0) if how == 'numvfs'
                else (self.kernel.rebind, A, 'dfl-pci'))
        worker = self.in_background(*call)
        time.sleep(0.2)
        self.assertTrue(worker.is_alive())
        self.assertTrue(self.kernel.exists(f'bus/pci/devices/{A0}'))
        self.kernel.guest_returns(A0)
        worker.join(5)
        self.assertFalse(self.kernel.exists(f'bus/pci/devices/{A0}'))


@ddt.ddt
class Life(TestCase):

    def test_guest(self):
        self.start({'address': A, 'vfs': 1}, {'address': B})
        for address in (A0, B):
            before = self.port(address)
            self.kernel.guest_takes(address)
            self.assertEqual('vfio-pci', os.path.basename(
                self.kernel.readlink(f'bus/pci/devices/{address}/driver')))
            self.assertFalse(self.kernel.exists(
                f'bus/pci/devices/{address}/fpga_region'))
            self.fails(errno.EBUSY, self.kernel.guest_takes, address)
            self.kernel.guest_returns(address)
            self.assertEqual(FIRST, self.afu_id(address))
            self.assertNotEqual(before, self.port(address))

    def test_group_that_is_not_viable(self):
        self.start({'address': A, 'iommu_group': 3}, others=[
            {'address': B, 'driver': 'ahci', 'iommu_group': 3}])
        self.fails(errno.EPERM, self.kernel.guest_takes, A)
        self.assertEqual(FIRST, self.afu_id())

    def start_group(self, driver='vfio-pci'):
        self.start(others=[{'address': address, 'driver': driver,
                            'iommu_group': 3} for address in (A, B)])

    def test_group_of_a_guest(self):
        """One process has all that is open of a group."""
        self.start_group()
        self.kernel.guest_takes(A, guest='one')
        self.fails(errno.EBUSY, self.kernel.guest_takes, B)
        self.assertTrue(self.kernel.is_group_open(B))
        self.kernel.guest_takes(B, guest='one')
        self.kernel.guest_returns(A)
        self.fails(errno.EBUSY, self.kernel.guest_takes, A)
        self.kernel.guest_returns(B)
        self.kernel.guest_takes(A)

    def test_driver_of_the_host_in_the_group_of_a_guest(self):
        self.start_group('ahci')
        for address in A, B:
            self.kernel.unbind(address)
        self.kernel.guest_takes(A)
        self.fails(errno.EBUSY, self.kernel.rebind, B, 'ahci')
        self.kernel.probe(B)
        self.assertFalse(self.kernel.exists(f'bus/pci/devices/{B}/driver'))
        self.kernel.guest_returns(A)
        self.kernel.probe(B)
        self.assertTrue(self.kernel.exists(f'bus/pci/devices/{B}/driver'))

    def test_what_is_open(self):
        """VFIO does not give it up, and it can be reset all the same."""
        self.start_group()
        self.kernel.guest_takes(A)
        self.kernel.reset_function(A)
        self.assertEqual([A], self.kernel.disturbed())
        worker = self.in_background(self.kernel.unbind, A)
        time.sleep(0.2)
        self.assertTrue(worker.is_alive())
        self.kernel.guest_returns(A)
        worker.join(5)
        self.assertFalse(self.kernel.exists(f'bus/pci/devices/{A}/driver'))

    def test_unbinding_that_hangs(self):
        """Its link is gone, its lock is held, also if the writer is killed."""
        self.start(gpus=[{'address': A}])
        link = f'bus/pci/devices/{A}/driver'
        self.kernel.set_fault(A, in_use=True)
        with mock.patch.object(time, 'sleep', side_effect=KeyboardInterrupt):
            for call in ((self.kernel.unbind, A), (self.kernel.unbind, A),
                         (self.kernel.probe, A), (self.kernel.guest_takes, A),
                         (self.kernel.rebind, A, 'vfio-pci'),
                         (self.kernel.reset_function, A)):
                self.assertRaises(KeyboardInterrupt, *call)
                self.assertFalse(self.kernel.exists(link))
                self.assertNotIn(A, self.kernel.listdir(
                    'bus/pci/drivers/nvidia'))
                self.assertEqual('1', self.kernel.read(
                    f'bus/pci/devices/{A}/enable'))
        self.kernel.set_fault(A, in_use=None)
        self.assertFalse(self.kernel.exists(link))
        self.kernel.reset_function(A)
        self.kernel.probe(A)
        self.assertTrue(self.kernel.exists(link))

    def test_what_a_reboot_forgets(self):
        self.start({'address': A, 'ports': 2, 'vfs': 2}, {'address': B})
        self.program(A, 1)
        self.kernel.guest_takes(B)
        self.kernel.reboot()
        self.assertEqual('0', self.kernel.read(
            f'bus/pci/devices/{A}/sriov_numvfs'))
        self.assertEqual([FIRST, plain(FUNCTION)],
                         [self.afu_id(A, n) for n in range(2)])
        self.assertEqual(FIRST, self.afu_id(B))
        self.kernel.guest_takes(B)

    def test_guest_gives_back_a_vf_without_driver(self):
        self.start(others=[{'address': A, 'driver': 'acme', 'total_vfs': 1,
                            'vfs': 1}])
        self.kernel.guest_takes(A0)
        self.assertTrue(self.kernel.exists(f'bus/pci/devices/{A0}/driver'))
        self.kernel.guest_returns(A0)
        self.assertFalse(self.kernel.exists(f'bus/pci/devices/{A0}/driver'))

    def test_coming_and_going_is_told(self):
        self.useFixture(fixtures.MockPatch(
            'nova_accel.sim.kernel._LOOK', 0.01))
        self.start({'address': A})
        changes = self.kernel.changes(threading.Event())
        self.assertIsNone(next(changes))
        self.kernel.set_fault(A, vanish=True)
        self.assertEqual(('pci', A, ''), next(changes))
        self.assertIsNone(next(changes))
        self.kernel.says('drm', A, 'WEDGED=none')
        self.assertEqual(('drm', A, 'WEDGED=none'), next(changes))
        self.assertIsNone(next(changes))

    def test_power_cycle(self):
        self.start({'address': A})
        self.program()
        self.kernel.set_fault(A, dead=True)
        self.kernel.power_cycle()
        self.assertEqual(FIRST, self.afu_id())

    def test_reboot_heals_a_disabled_port(self):
        self.start({'address': A})
        self.kernel.set_fault(A, pr_error='crc', pr_error_count=1)
        self.fails(errno.EIO, self.program)
        before = self.port(A)
        self.kernel.reboot()
        self.assertEqual(FIRST, self.afu_id())
        self.assertNotEqual(before, self.port(A))

    def test_another_process_sees_the_same_card(self):
        self.start({'address': A, 'ports': 2})
        other = sim.SimulatedKernel(self.host.path)
        self.kernel.release_dfl_port(A, 0)
        other.set_numvfs(A, 1)
        self.program(A, 0, kernel=other)
        self.assertEqual(plain(FUNCTION), self.afu_id(A0))
        other.set_fault(A, vanish=True)
        self.assertEqual([], self.kernel.listdir('bus/pci/devices'))
        again = sim.SimulatedKernel(self.host.path)
        self.assertEqual([], again.listdir('bus/pci/devices'))

    def test_many_threads_lose_no_change(self):
        self.start({'address': A, 'ports': 4}, {'address': B, 'ports': 4})
        threads = [threading.Thread(
            target=sim.SimulatedKernel(self.host.path).release_dfl_port,
            args=(address, port)) for address in (A, B) for port in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for address in (A, B):
            self.kernel.set_numvfs(address, 4)

    def test_description_that_changes_while_it_runs(self):
        self.start({'address': A})
        self.host.cards.append({'address': B})
        with open(self.host.path, 'w') as file:
            yaml.safe_dump(self.host.top, file)
        self.assertEqual([A, B], self.kernel.listdir('bus/pci/devices'))
        self.assertEqual(FIRST, self.afu_id(B))
        self.kernel.guest_takes(B)

    def test_faults_that_are_none(self):
        self.start({'address': A})
        for fault in ({'pr_error': 'x'}, {'nothing': 1}, {'dead': 'yes'},
                      {'pr_error_count': -1}, {'accept_id': 'x'},
                      {'hang': 'write'}, {'attributes': {'id': 1}}):
            self.assertRaises(ValueError, self.kernel.set_fault, A, **fault)
        self.assertRaises(KeyError, self.kernel.set_fault, B, dead=True)


@ddt.ddt
class Description(testtools.TestCase):

    # text, line, what the error names
    @ddt.data(
        ('cards:\n- {address: "0000:5e:00.0"}\nmemory: 1\n', 3, 'memory'),
        ('cards:\n- numa_node: 1\n', 2, 'address'),
        ('cards:\n- address: 5e:00.0\n', 2, 'address'),
        ('cards:\n- address: "0000:5e:00.0"\n  ports: 5\n', 3, 'ports'),
        ('cards:\n- address: "0000:5e:00.0"\n  ports: two\n', 3, 'ports'),
        ('cards:\n- address: "0000:5e:00.0"\n  vfs: 2\n', 3, 'vfs'),
        ('cards:\n- address: "0000:5e:00.0"\n  product: X\n', 3, 'product'),
        ('cards:\n- address: "0000:5e:00.0"\n  interface: 12\n', 3,
         'interface'),
        ('cards:\n- address: "0000:5e:00.0"\n  functions: []\n', 3,
         'functions'),
        ('cards:\n- address: "0000:5e:00.0"\n  functions:\n  - x\n', 4,
         'functions'),
        ('cards:\n- address: "0000:5e:00.0"\n  programming_seconds: -1\n', 3,
         'programming_seconds'),
        ('cards:\n- address: "0000:5e:00.0"\n  faults:\n    pr_error: x\n', 4,
         'pr_error'),
        ('cards:\n- address: "0000:5e:00.0"\n  faults:\n    x: 1\n', 4, 'x'),
        ('cards:\n- address: "0000:5e:00.0"\n  faults: x\n', 3, 'faults'),
        ('cards:\n- address: "0000:5e:00.0"\n  address: "0"\n', 3, 'address'),
        ('cards:\n- address: "0000:5e:00.0"\n'
         '- address: "0000:5e:00.0"\n', 3, 'address'),
        ('cards:\n- address: "0000:5e:00.0"\n  bridges: pci0000:5d\n', 3,
         'bridges'),
        ('cards:\n- address: "0000:5e:00.0"\n  bridges: ["0000:5d:00.0"]\n',
         3, 'bridges'),
        ('cards:\n- address: "0000:5e:00.0"\n'
         '  bridges: [pci0000:5e, "0000:5e:00.0"]\n', 2, '0000:5e:00.0'),
        # where the VF of the first would be
        ('cards:\n- address: "0000:5e:00.0"\n'
         'others:\n- address: "0000:5e:00.1"\n', 4, 'address'),
        ('cards: 1\n', 1, 'cards'), ('cards:\n- 1\n', 2, 'cards[0]'),
        ('iommu: 1\n', 1, 'iommu'), ('- 1\n', 1, 'the file'),
        ('others:\n- address: "0000:5e:00.0"\n  vendor: x\n', 3, 'vendor'),
        ('cards:\n- address: "0000\n', 3, 'YAML'), ('a: [\n', 2, 'YAML'))
    @ddt.unpack
    def test_error(self, text, line, named):
        path = os.path.join(self.useFixture(fixtures.TempDir()).path, 'h.yaml')
        with open(path, 'w') as file:
            file.write(text)
        said = str(self.assertRaises(exception.InvalidSimulation,
                                     sim.SimulatedKernel, path))
        self.assertIn(f'{path} line {line}', said)
        self.assertIn(named, said)

    def test_no_file(self):
        error = self.assertRaises(exception.InvalidSimulation,
                                  sim.SimulatedKernel, '/nonexistent')
        self.assertIn('/nonexistent', str(error))

    def test_state_of_something_else(self):
        host = self.useFixture(SimulatedHost({'address': A}))
        for text in ('{', '[]', '{"cards": {"0000:5e:00.0": 1}}'):
            with open(f'{host.path}.state', 'w') as file:
                file.write(text)
            error = self.assertRaises(exception.InvalidSimulation,
                                      sim.SimulatedKernel, host.path)
            self.assertIn(f'{host.path}.state', str(error))
            self.assertIn('remove it', str(error))

    def test_state_that_cannot_be_kept(self):
        host = self.useFixture(SimulatedHost({'address': A}))
        os.mkdir(f'{host.path}.state.new')
        os.unlink(f'{host.path}.state')
        error = self.assertRaises(exception.InvalidSimulation,
                                  sim.SimulatedKernel, host.path)
        self.assertIn('may write', str(error))

    def test_sample(self):
        directory = self.useFixture(fixtures.TempDir()).path
        root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        path = os.path.join(directory, 'sample.yaml')
        with open(os.path.join(root, 'etc', 'nova_accel',
                               'simulated-host.yaml')) as file:
            text = file.read()
        with open(path, 'w') as file:
            file.write(text)
        found = dfl.DflDriver(sim.SimulatedKernel(path)).discover()
        self.assertEqual([1, 2], [len(d.regions) for d in found.values()])
        self.assertEqual(3, sum(len(r.handles) for d in found.values()
                                for r in d.regions))
        # what is commented out is right as well
        with open(path, 'w') as file:
            file.write(re.sub('(?m)^    #(?! [^ ])', '    ', text))
        sim.SimulatedKernel(path)

    def test_open_kernel(self):
        config = self.useFixture(config_fixture.Config(conf.CONF))
        self.assertIsInstance(machine.open_kernel('compute1'),
                              host_kernel.Kernel)
        host = self.useFixture(SimulatedHost({'address': A}))
        config.config(group='accel', simulated_host=host.path)
        self.assertEqual(
            [A], machine.open_kernel('any').listdir('bus/pci/devices'))
        config.config(group='accel', simulated_host=host.directory)
        self.assertEqual(
            [A], machine.open_kernel('host').listdir('bus/pci/devices'))
        self.assertRaises(exception.InvalidSimulation, machine.open_kernel,
                          'compute1')

    def test_make_gbs(self):
        path = os.path.join(self.useFixture(fixtures.TempDir()).path, 'a.gbs')
        sim.make_gbs(path, FUNCTION, OTHER, size=100)
        parsed = gbs.parse(path)
        self.assertEqual((plain(FUNCTION), plain(OTHER), 100),
                         (parsed.function_uuid, parsed.region_type_uuid,
                          parsed.payload_size))
        self.assertEqual(os.path.getsize(path), parsed.payload_offset + 100)
        self.assertRaises(ValueError, sim.make_gbs, path, 'x', OTHER)
