# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel prove, on simulated hosts."""

import json
import os
import subprocess
import sys
from unittest import mock

import ddt
from oslo_privsep import priv_context
import yaml

from nova_accel.cmd import disable
from nova_accel.cmd import prove
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import gpu
from nova_accel.host import pci
from nova_accel import sim
from nova_accel.store import values
from tests import simulated
from tests.unit import commands
from tests.unit.host import A, B, FUNCTION, OTHER, SHELL
from tests.unit.claims import claim

#: works on a device until it is killed
_WORKS = """
import sys, time
from nova_accel.cmd import orders
with orders.proving(sys.argv[1], sys.argv[2]):
    print('works', flush=True)
    time.sleep(60)
"""
NEW = '2026-11-24T00:00:00+00:00'


@ddt.ddt
class ProveTest(commands.StoreCommandTestCase):

    COMMAND = 'prove'
    COMMANDS = {'prove': prove.Prove}

    def setUp(self):
        super().setUp()
        self.addCleanup(priv_context.init, ['sudo'])
        self.report = os.path.join(self.directory, 'report')

    def host(self, driver, disabled=True, options=None, **kinds):
        path = os.path.join(self.directory, 'host.yaml')
        with open(path, 'w') as file:
            yaml.safe_dump(kinds, file)
        self.configure(simulated_host=path, enabled_drivers=driver,
                       include_devices='address=*',
                       bitstream_cache=f'{self.directory}/cache',
                       **(options or {}))
        self.kernel = simulated.Kernel(path)
        store = self.open_store()
        # nova-compute has compared the host with Placement and libvirt
        store.settle([values.EVERYTHING])
        store.set_devices(self.found(driver, options or {}))
        if disabled:
            store.disable(values.Disabled(A, '', 'to be tried', NEW), ())
        return store

    def found(self, name, options):
        conf.CONF.set_override('include_devices', ['address=*'], 'accel')
        for option, value in options.items():
            conf.CONF.set_override(option, [value], 'accel')
        try:
            return drivers.load([name], self.kernel)[name].discover()
        finally:
            conf.CONF.clear_override('include_devices', 'accel')
            for option in options:
                conf.CONF.clear_override(option, 'accel')

    def prove(self, *arguments, failed=()):
        result = self.call(A, '-f', 'json', '--report', self.report,
                           *arguments)
        self.assertEqual(int(bool(failed)), result.returncode, result.stderr)
        rows = {row['Step']: row for row in json.loads(result.stdout)}
        self.assertEqual([*failed], [
            step for step, row in rows.items() if row['Result'] == 'failed'])
        return rows

    def test_gpu(self):
        self.host('gpu', gpus=[{'address': A}])
        rows = self.prove()
        self.assertEqual(
            ['find and read', 'read the serial number', 'answers',
             'reset of handle 0', 'find and read again'], list(rows))
        self.assertEqual('regions: 0, handles: 1, types: 0',
                         rows['find and read']['Found'])
        self.assertIn('reset flr', rows['reset of handle 0']['Found'])
        self.assertEqual(1, len(self.kernel.resets(A)))
        with open(self.report) as file:
            text = file.read()
        self.assertNotIn(A, text)
        report = json.loads(text)
        self.assertEqual(('10de', '26b9', 'gpu', 'nvidia', 46), tuple(
            report[key] for key in ('vendor', 'product', 'driver',
                                    'kernel_driver', 'address_bits')))
        self.assertEqual(len(rows), len(report['steps']))

    def test_memory_of_a_gpu(self):
        """Also without --erase: nothing that lasts is changed."""
        self.host('gpu', gpus=[{'address': A, 'reset_method': 'flr bus'}])
        found = self.prove()['reset of handle 0']['Found']
        for text in ('reset bus', '"memory": "cleared"', '"ECC": "off"'):
            self.assertIn(text, found)
        self.assertEqual('nvidia', pci.driver(self.kernel, A))

    def test_reset_that_fails(self):
        self.host('gpu', gpus=[{'address': A, 'faults': {
            'reset': 'EIO'}}])
        rows = self.prove(failed=('reset of handle 0',))
        found = rows['reset of handle 0']['Found']
        self.assertIn('see the kernel log', found)
        # the report is for others
        self.assertIn(A, found)
        with open(self.report) as file:
            text = file.read()
        self.assertNotIn(A, text)
        self.assertIn('<device> must be reset', text)

    def test_dead(self):
        self.host('gpu', gpus=[{'address': A}])
        self.kernel.set_fault(A, dead=True)
        rows = self.prove(failed=('find and read',))
        self.assertEqual(1, len(rows))

    def test_disk_is_erased_when_it_is_said(self):
        self.host('nvme', nvmes=[{'address': A, 'sanitize': ['crypto']}])
        before = self.kernel.read_nvme_sanitize(A)
        self.assertEqual('skipped', self.prove()['clean']['Result'])
        self.assertEqual(before, self.kernel.read_nvme_sanitize(A))
        self.assertNotIn('clean', self.prove('--erase'))
        self.assertNotEqual(before, self.kernel.read_nvme_sanitize(A))

    def test_region(self):
        self.host('xrt', alveos=[{'address': A, 'programming_seconds': 0}])
        rows = self.prove()
        self.assertEqual('reset of the dynamic region',
                         rows['reset of region0']['Found'])
        self.assertEqual('skipped', rows['program region0']['Result'])
        path = os.path.join(self.directory, 'a.xclbin')
        sim.make_xclbin(path, FUNCTION, SHELL)
        rows = self.prove('--erase', '--bitstream', path)
        self.assertIn(FUNCTION.replace('-', ''),
                      rows['program region0']['Found'])
        self.assertEqual([], os.listdir(f'{self.directory}/cache'))
        # of another shell
        sim.make_xclbin(path, FUNCTION, OTHER)
        self.prove('--erase', '--bitstream', path,
                   failed=('program region0',))

    def test_vgpu(self):
        self.host('vgpu', vgpus=[{
            'address': A, 'units': 8, 'types': [
                {'id': 'nvidia-558', 'name': 'NVIDIA A40-2Q', 'units': 1}]}])
        self.assertEqual('CUSTOM_NVIDIA_26B9_A40_2Q',
                         self.prove()['create and remove']['Found'])
        self.assertEqual([], self.kernel.listdir('bus/mdev/devices'))

    # driver, devices of the host, options -> the steps that tried something,
    # in one word each: what a handle or a region was reset by
    @ddt.data(
        ('dfl', {'cards': [{'address': A, 'vfs': 1}]}, {}, ['port']),
        ('dfl', {'cards': [{'address': A, 'product': 'N6001', 'vfs': 3,
                            'afu_vfs': 3}]}, {}, ['port']),
        ('qat', {'qats': [{'address': A, 'vfs': 16}]}, {}, ['flr'] * 16),
        ('timecard', {'timecards': [{'address': A}]}, {}, ['flr']),
        ('pci', {'others': [{'address': A, 'vendor': '19e5', 'vfs': 2,
                             'total_vfs': 2, 'driver': 'davinci'}]},
         {'pci_devices': 'vendor=19e5 type=AI'}, ['flr', 'flr']),
        ('pci', {'others': [{'address': A, 'vendor': '19e5', 'vfs': 2,
                             'total_vfs': 2, 'driver': 'davinci'}]},
         {'pci_devices': 'vendor=19e5 type=AI vfs=together'}, ['flr']),
        # VFs that are vGPUs as they are
        ('vgpu', {'vgpus': [{'address': A, 'framework': 'sriov', 'vfs': 2,
                             'vendor': '8086', 'device': 'e211',
                             'driver': 'xe', 'total_vfs': 2, 'types': []}]},
         {}, ['flr', 'flr']),
        ('nvme', {'nvmes': [{'address': A, 'vfs': 1, 'total_vfs': 1}]}, {},
         ['PF']))
    @ddt.unpack
    def test_kind(self, driver, devices, options, words):
        self.host(driver, options=options, **devices)
        rows = self.prove()
        said = [row['Found'] for step, row in rows.items()
                if step.startswith('reset of ')]
        self.assertEqual(len(words), len(said), said)
        for word, found in zip(words, said):
            self.assertIn(word, found)
        self.assertEqual('ok', rows['find and read again']['Result'])

    def test_vgpu_of_a_vf(self):
        """As NVIDIA's vGPU 17 and later have them."""
        self.host('vgpu', vgpus=[{
            'address': A, 'framework': 'vendor-vfio', 'vfs': 4,
            'total_vfs': 4, 'units': 8, 'types': [
                {'id': '558', 'name': 'NVIDIA A40-2Q', 'units': 1}]}])
        self.assertEqual('CUSTOM_NVIDIA_26B9_A40_2Q',
                         self.prove()['create and remove']['Found'])
        self.assertEqual('0', self.kernel.read(
            f'bus/pci/devices/{A[:-1]}1/nvidia/current_vgpu_type'))

    def test_enabled_meanwhile(self):
        """By other means than the command, and a guest has it then."""
        store = self.host('gpu', gpus=[{'address': A}])
        answers = gpu.GpuDriver.answers

        def enabled(driver, device):
            store.enable(store.disabled())
            store.add([claim(device_address=A)])
            return answers(driver, device)
        with mock.patch.object(gpu.GpuDriver, 'answers', enabled):
            rows = self.prove(failed=('reset of handle 0',))
        self.assertIn(f'run nova-accel disable {A} first',
                      rows['reset of handle 0']['Found'])
        self.assertEqual('reset of handle 0', list(rows)[-1])
        self.assertEqual([], self.kernel.resets(A))

    def enable(self):
        return commands.run(
            'enable', '--store', self.path, A, enable=disable.Enable)

    def test_enable_waits(self):
        store = self.host('gpu', gpus=[{'address': A}])
        refused = []

        def tries(driver, device):
            refused.extend((self.enable(), self.call(A)))
            return True
        with mock.patch.object(gpu.GpuDriver, 'answers', tries):
            self.prove()
        for answer in refused:
            self.assertEqual(1, answer.returncode)
            self.assertIn(f'while nova-accel prove (process {os.getpid()}) '
                          f'works on it', answer.stderr)
        self.assertEqual(1, len(store.disabled()))
        self.assertEqual([], self.left())
        self.assertEqual(0, self.enable().returncode)

    def left(self):
        return [name for name in os.listdir(os.path.dirname(self.path))
                if name.endswith('working')]

    def test_killed(self):
        self.host('gpu', gpus=[{'address': A}])
        with subprocess.Popen([sys.executable, '-c', _WORKS, self.path, A],
                              stdout=subprocess.PIPE, text=True) as process:
            self.assertEqual('works\n', process.stdout.readline())
            answer = self.enable()
            process.kill()
        self.assertIn(f'while nova-accel prove (process {process.pid})',
                      answer.stderr)
        self.assertEqual(1, len(self.left()))
        self.assertEqual(0, self.enable().returncode)
        self.assertEqual([], self.left())

    def test_file_cannot_be_written(self):
        self.host('gpu', gpus=[{'address': A}])
        os.symlink('/dev/null', f'{self.path}.{A}.working')
        self.assertIn('cannot be written', self.call(A).stderr)
        self.assertEqual([], self.kernel.resets(A))

    def test_not_free(self):
        store = self.host('gpu', disabled=False, gpus=[{'address': A}])
        self.assertIn(f'nova-accel disable {A} first', self.call(A).stderr)
        store.add([claim(device_address=A)])
        store.disable(values.Disabled(A, '', 'to be tried', NEW), ())
        self.assertIn(f'nova-accel drain {A}', self.call(A).stderr)
        self.assertEqual([], self.kernel.resets(A))
        self.assertIn('give --erase', self.call(
            A, '--bitstream', 'a.xclbin').stderr)
        self.assertEqual(1, self.call(B).returncode)

    def test_owner_unknown(self):
        """A guest may have it, although no claim says so."""
        store = self.host('gpu', gpus=[{'address': A}])
        for row in values.Unsettled(address=A), values.EVERYTHING:
            store.settle(store.unsettled(), [row])
            self.assertIn('may contain data of a server', self.call(A).stderr)
        self.assertEqual([], self.kernel.resets(A))
