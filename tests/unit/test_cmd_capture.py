# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel capture: what is played is what the host had, less its names."""

import errno
import io
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import types

import fixtures
import yaml

from nova_accel.cmd import capture
from nova_accel import conf
from nova_accel.drivers import dfl
from nova_accel.drivers import xrt
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel import sim
from nova_accel.sim import captured
from nova_accel.sim import tree as sysfs
from tests.unit import commands
from tests.unit.host import A, B, SimulatedHost

SAMPLE = pathlib.Path(__file__).parents[2] / 'etc/nova_accel'
#: by nova-accel capture on the virtual machine of docs/source/lab.rst, as it
#: came; the machine had other work, and 0000:00:0f.0 did not answer in time
LAB = pathlib.Path(__file__).parent / 'data/lab-capture.yaml'
#: the same of a virtual machine with a real NVIDIA H200, a module of a board
#: with NVLink, and without an IOMMU
H200 = LAB.with_name('h200-capture.yaml')
#: for which the sample has devices
DRIVERS = ('dfl', 'xrt', 'gpu', 'vgpu', 'qat', 'timecard', 'nvme', 'pci')
OPTIONS = {
    'enabled_drivers': ', '.join(DRIVERS), 'whole_cards': '0000:5e:00.0',
    'include_devices': 'address=*', 'pci_devices': 'class=0106?? type=SATA'}


class CaptureTestCase(commands.CommandTestCase):

    COMMAND = 'capture'

    def describe(self, **host):
        self.host = self.useFixture(SimulatedHost(**host))
        return self.host.path

    def call(self, *arguments):
        if self.COMMAND != 'capture':
            return super().call(*arguments)
        app = types.SimpleNamespace(stdout=io.StringIO(), stderr=io.StringIO())
        command = capture.Capture(app, None)
        parsed = command.get_parser('capture').parse_args(
            ['--config-file', self.config, *arguments])
        try:
            status = command.run(parsed)
        except exception.AcceleratorError as error:
            status = 1
            app.stderr.write(f'{error}\n')
        finally:
            conf.CONF.reset()
        return subprocess.CompletedProcess(
            arguments, status, app.stdout.getvalue(), app.stderr.getvalue())

    def capture(self, status=0):
        self.file = os.path.join(self.directory, 'capture.yaml')
        result = self.call(self.file)
        self.assertEqual(status, result.returncode, result.stderr)
        self.text = pathlib.Path(self.file).read_text()
        return result.stderr

    def discover(self, *arguments):
        self.COMMAND = 'discover'
        try:
            return self.call(*arguments).stdout
        finally:
            self.COMMAND = 'capture'

    def both(self):
        """What discover shows of the host, and of the capture, without serial
        numbers and mount points."""
        for shown in ('json', 'csv'):
            yield (re.sub('_SERIAL(_[0-9A-F]{2}){6}|(?<=mounted at )/[^" ,;]*',
                          '', text) for text in (
                self.discover('--long', '-f', shown), self.discover(
                    '--long', '-f', shown, '--simulated-host', self.file)))


class PlayTest(CaptureTestCase):

    maxDiff = None

    def test_every_kind_of_the_sample(self):
        path = os.path.join(self.directory, 'host.yaml')
        shutil.copy(SAMPLE / 'simulated-host.yaml', path)
        self.configure(simulated_host=path, **OPTIONS)
        # nova-compute closes mailboxes, and a look does not
        xrt.XrtDriver(sim.SimulatedKernel(path)).discover()
        self.assertEqual('', self.capture())
        self.assertEqual({'/mnt'}, {*re.findall('mounted at (.*)',
                                                self.text)})
        for number, (there, here) in enumerate(self.both()):
            if not number:
                self.assertEqual(set(DRIVERS), {
                    d['driver'] for d in json.loads(there).values()})
            self.assertEqual(there, here)

    def test_options_of_the_capture(self):
        """Those of the host on which it is played do not count."""
        gpu = '0000:3b:00.0'
        self.configure(
            enabled_drivers='dfl, gpu', include_devices='vendor=10de',
            handover=f'{gpu}=operator', simulated_host=self.describe(
                cards=[{'address': A, 'vfs': 1}], gpus=[{'address': gpu}]))
        self.capture()
        there = self.discover('-f', 'json')
        self.assertIn(gpu, there)
        for accel in ({}, {'enabled_drivers': 'xrt', 'pools': 'none',
                           'include_devices': f'address={A}'}):
            self.configure(**accel)
            self.assertEqual(there, self.discover(
                '-f', 'json', '--simulated-host', self.file))
        self.assertNotIn(gpu, self.discover(
            '-f', 'json', '--simulated-host', self.file, '--driver', 'dfl'))

    def test_options_that_cannot_be_used(self):
        self.configure()
        path = os.path.join(self.directory, 'capture.yaml')
        for options, said in (('[dfl]', 'options is not a mapping'),
                              ('{pools: some}', 'has a value of pools')):
            pathlib.Path(path).write_text(
                f'capture: 1\nsysfs: {{}}\nanswers: []\noptions: {options}')
            self.COMMAND = 'discover'
            result = self.call('--simulated-host', path)
            self.assertEqual(1, result.returncode)
            self.assertIn(said, result.stderr)

    def test_devices_that_are_not_well(self):
        """Errors of attributes are played, too."""
        self.configure(enabled_drivers='dfl', simulated_host=self.describe(
            cards=[{'address': A, 'faults': {'dead': True}},
                   {'address': B, 'vfs': 1, 'faults': {'attributes': {
                       'afu_id': 'EIO', 'numa_node': 'missing'}}},
                   {'address': '0000:82:00.0', 'driver': 'vfio-pci'}]))
        self.capture()
        for there, here in self.both():
            self.assertEqual(there, here)
        self.assertIn('afu_id: !error EIO', self.text)

    def test_sysfs_of_this_machine(self):
        """A tree of files, with relative links, as the kernel has it."""
        self.describe(cards=[{'address': A, 'vfs': 1, 'bridges': [
            'pci0000:5d', '0000:5d:00.0']}])
        root = os.path.join(self.directory, 'sys')
        _write(self.host.kernel._tree(), root)
        kernel = host_kernel.Kernel(root)
        recorded = captured.Recorder(kernel)
        there = dfl.DflDriver(recorded).discover()
        path = os.path.join(self.directory, 'played.yaml')
        with open(path, 'w') as file:
            capture.write(recorded, ['dfl'], file)
        self.assertEqual(there, dfl.DflDriver(
            sim.open_host(path)).discover())
        self.assertEqual([A], list(there))
        self.assertEqual(dfl.DflDriver(self.host.kernel).discover(), there)

    def test_machine_of_the_lab(self):
        """What nova-accel discover showed there, under Linux 6.12."""
        options = yaml.load(LAB.read_text(), captured._Loader)['options']
        self.configure(**{
            name: ', '.join(value) if isinstance(value, list) else value
            for name, value in options.items()})
        shown = {row['Device']: row for row in json.loads(self.discover(
            '-f', 'json', '--simulated-host', str(LAB)))}
        self.assertEqual({
            '0000:00:0c.0': ('FPGA INTEL PAC_ARRIA10', None, 'ok'),
            '0000:00:0c.0_region0': (None, 1, 'ok'),
            '0000:00:0d.0': ('TIMECARD META TIMECARD', 1, 'ok'),
            '0000:00:0f.0': ('SSD SAMSUNG a824', 0, 'unusable'),
            '0000:01:00.0': ('NIC INTEL 10c9', 2, 'ok'),
            '0000:02:00.0': ('SSD QEMU 0010', 2, 'ok'),
            '0000:03:00.0': ('QAT INTEL C62X', 0, 'unusable'),
            'mdpy': ('VGPU LINUX MDPY', 4, 'ok'),
            'mtty': ('VGPU LINUX MTTY', 24, 'ok')},
            {name: (row['What'], row['Total'],
                    row['Health'].partition(':')[0])
             for name, row in shown.items()})
        self.assertIn('vfio-pci refuses 0000:03:10.0, whose kind is on its '
                      'deny-list', shown['0000:03:00.0']['Health'])

    def test_of_a_real_gpu(self):
        """What nova-accel discover showed there, under Linux 6.18."""
        self.configure()
        path = pathlib.Path(self.directory, 'h200.yaml')
        for rule, why in (
                ('vendor=10de', 'NVLink joins it with the other GPUs'),
                ('address=0000:00:06.0', '0000:00:06.0 has no IOMMU group')):
            path.write_text(H200.read_text().replace('vendor=10de', rule))
            gpu, = json.loads(self.discover(
                '-f', 'json', '--simulated-host', str(path)))
            self.assertEqual(('0000:00:06.0', 'GPU NVIDIA H200', 0),
                             (gpu['Device'], gpu['What'], gpu['Total']))
            self.assertIn(f'unusable: {why}', gpu['Health'])

    def test_capture_of_a_capture(self):
        self.configure(enabled_drivers='dfl',
                       simulated_host=self.describe(cards=[{'address': A}]))
        self.capture()
        first = os.path.join(self.directory, 'first.yaml')
        os.rename(self.file, first)
        self.configure(enabled_drivers='dfl', simulated_host=first)
        again = self.call()
        self.assertEqual(yaml.load(self.text, captured._Loader)['sysfs'],
                         yaml.load(again.stdout, captured._Loader)['sysfs'])

    def test_nothing_is_written(self):
        self.configure(enabled_drivers='dfl', virtual_functions=f'{A}=1',
                       simulated_host=self.describe(cards=[{'address': A}]))
        before = set(os.listdir(self.host.directory))
        self.capture()
        kernel = sim.open_host(self.file)
        for kernel in (captured.Recorder(self.host.kernel), kernel):
            for refused in (lambda: kernel.set_numvfs(A, 1),
                            lambda: kernel.rebind(A, 'vfio-pci')):
                error = self.assertRaises(OSError, refused)
                self.assertEqual(errno.EROFS, error.errno)
        self.assertEqual('0', self.host.kernel.read(
            f'bus/pci/devices/{A}/sriov_numvfs'))
        self.assertEqual(before, set(os.listdir(self.host.directory)))


class RedactionTest(CaptureTestCase):

    SERIALS = ('S0000d1000', 'S0000d2000', '00:15:5d:aa:bb:cc',
               '525400123456', '0015e3ffff7a9b01')

    def test_nothing_is_left(self):
        self.useFixture(fixtures.MockPatch(
            'socket.gethostname', return_value='rack7.example.org'))
        path = self.describe(
            # the simulator makes their serial numbers of the addresses
            nvmes=[{'address': f'0000:d{n}:00.0'} for n in (1, 2)],
            timecards=[{'address': '0000:04:00.0',
                        'serial': self.SERIALS[2]}],
            clocks=[{'address': '0000:05:00.0', 'driver': 'igc',
                     'net': f'enx{self.SERIALS[3]}'}],
            cards=[{'address': A, 'device_serial': self.SERIALS[4],
                    'faults': {'attributes': {
                        'bitstream_id': 'built on rack7 of S0000d1000'}}}])
        self.configure(enabled_drivers='nvme, timecard, dfl',
                       include_devices='address=*', ptp_devices='0000:05:00.0',
                       simulated_host=path)
        there = self.discover('--long', '-f', 'json')
        self.capture()
        for secret in (*self.SERIALS, '00_15_5d_aa_bb_cc', 'rack7', 'compute1',
                       socket.gethostname()):
            self.assertNotIn(secret.lower(), self.text.lower())
        here = self.discover(
            '--long', '-f', 'json', '--simulated-host', self.file)
        self.assertIn('built on host of 00000000', here)
        self.assertEqual(*(re.sub(
            'of s?[0-9d]+|on (rack7|host)|_SERIAL_[0-9A-F_]+', '', text)
            for text in (there, here)))
        self.assertNotEqual(there, here)

    def test_stand_ins(self):
        stand_ins = captured.Redaction(['compute1.example.org'])
        stand_ins.learn({'b': {'serial': ' AB-12345 ', 'serialnum': '0000'},
                         'a': {'serial': '7', 'serial_num': 'unknown'},
                         'c': {'serial': 'AB-12345', 'unique_id': '0x12ab9'},
                         }, [])
        self.assertEqual({
            'a': {'serial': '1', 'serial_num': 'unknown', 'id': '7'},
            'b': {'serial': ' 00-00002 ', 'serialnum': '0000',
                  'text': 'of 00-00002 at host, not compute12'},
            'enx000000000004': sysfs.Link('x/00-00002/y')},
            stand_ins.tree({
                'a': {'serial': '7', 'serial_num': 'unknown', 'id': '7'},
                'b': {'serial': ' AB-12345 ', 'serialnum': '0000',
                      'text': 'of AB-12345 at compute1, not compute12'},
                'enx020000000009': sysfs.Link('x/AB-12345/y')}))


class RefusedTest(CaptureTestCase):

    def test_without_permission(self):
        self.configure(enabled_drivers='dfl', simulated_host=self.describe(
            cards=[{'address': A, 'faults': {'attributes': {
                'bitstream_id': 'EACCES'}}}, {'address': B}]))
        line, = self.capture(status=1).splitlines()
        self.assertIn('run this as the user of nova-compute', line)
        self.assertRegex(line, f'/sys/devices/.*/{A}/.*/bitstream_id[.]$')
        self.assertEqual(1, len(yaml.load(
            self.text, captured._Loader)['denied']))
        for there, here in self.both():
            self.assertEqual(there, here)

    def test_operation_without_privileged_process(self):
        """Which is no OSError."""
        def fails(function):
            raise RuntimeError('no privileged process')
        self.describe(nvmes=[{'address': '0000:01:00.0'}])
        self.host.kernel.read_signatures = fails
        recorded = captured.Recorder(self.host.kernel)
        self.assertRaises(RuntimeError, recorded.read_signatures, A)
        self.assertEqual({f'read_signatures {A}'}, recorded.denied)

    def test_files(self):
        self.configure(enabled_drivers='dfl',
                       simulated_host=self.describe(cards=[{'address': A}]))
        self.capture()
        for path, said in ((self.file, 'which exists'),
                           ('/nonexistent/c', 'No such file')):
            result = self.call(path)
            self.assertEqual(1, result.returncode)
            self.assertIn(said, result.stderr)
        self.configure()
        self.assertIn('No driver is enabled', self.call().stderr)

    def test_no_driver_that_can_be_loaded(self):
        """No file stands in the way of the next try."""
        self.configure(simulated_host=self.describe(cards=[{'address': A}]))
        path = os.path.join(self.directory, 'capture.yaml')
        result = self.call('--driver', 'foo', path)
        self.assertEqual(1, result.returncode)
        self.assertIn("'foo'", result.stderr)
        self.assertIn('Nothing was captured', result.stderr)
        self.assertFalse(os.path.exists(path))
        self.assertEqual(0, self.call('--driver', 'dfl', path).returncode)

    def test_malformed(self):
        path = os.path.join(self.directory, 'bad.yaml')
        for text, said in (
                ('capture: 2\nsysfs: {}\nanswers: []', 'has the version 2'),
                ('capture: 1\nanswers: []', "'sysfs'"),
                ('capture: 1\nanswers: []\nsysfs: []', 'is not a mapping'),
                ('capture: 1\nsysfs: {a: !error EWHAT}', "'EWHAT'"),
                ('capture: [', 'cannot be used')):
            pathlib.Path(path).write_text(text)
            error = self.assertRaises(exception.InvalidSimulation,
                                      sim.open_host, path)
            self.assertIn(said, str(error))
            self.assertNotIn('\n', str(error))

    def test_what_is_no_capture(self):
        path = os.path.join(self.directory, 'host.yaml')
        for text, expected in (('# capture: 1\ncards: []', False), ('', False),
                               ('# x\n---\ncapture: 1', True)):
            pathlib.Path(path).write_text(text)
            self.assertEqual(expected, captured.is_capture(path))


def _write(node, path, root=None):
    """Write a tree as files, with links as the kernel has them."""
    root = root or path
    os.mkdir(path)
    for name, value in node.items():
        place = os.path.join(path, name)
        if isinstance(value, dict):
            _write(value, place, root)
        elif isinstance(value, sysfs.Link):
            os.symlink(os.path.relpath(os.path.join(root, value), path), place)
        elif isinstance(value, bytes):
            pathlib.Path(place).write_bytes(value)
        elif isinstance(value, str):
            pathlib.Path(place).write_text(f'{value}\n')
