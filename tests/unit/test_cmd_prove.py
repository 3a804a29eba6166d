# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel prove, on simulated hosts."""

import json
import os

import ddt
import fixtures
from oslo_privsep import priv_context
import yaml

from nova_accel.cmd import main
from nova_accel.cmd import prove
from nova_accel import drivers
from nova_accel import model
from nova_accel import sim
from tests.unit import commands
from tests.unit.host import A, B, FUNCTION, OTHER, SHELL
from tests.unit.test_claims import claim

NEW = '2026-11-24T00:00:00+00:00'


class App(main.NovaAccel):

    def __init__(self):
        super().__init__()
        self.command_manager.add_command('prove', prove.Prove)


@ddt.ddt
class ProveTest(commands.StoreCommandTestCase):

    COMMAND = 'prove'

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.main.NovaAccel', App))
        self.addCleanup(priv_context.init, ['sudo'])
        self.report = os.path.join(self.directory, 'report')

    def host(self, driver, disabled=True, **kinds):
        path = os.path.join(self.directory, 'host.yaml')
        with open(path, 'w') as file:
            yaml.safe_dump(kinds, file)
        self.configure(simulated_host=path, enabled_drivers=driver,
                       include_devices='address=*',
                       bitstream_cache=f'{self.directory}/cache',
                       nvme_scrub='true')
        self.kernel = sim.SimulatedKernel(path)
        store = self.open_store()
        store.set_devices(self.found(driver))
        if disabled:
            store.disable(model.Disabled(A, '', 'to be tried', NEW), ())
        return store

    def found(self, name):
        from nova_accel import conf
        conf.CONF.set_override('include_devices', ['address=*'], 'accel')
        try:
            return drivers.load([name], self.kernel)[name].discover()
        finally:
            conf.CONF.clear_override('include_devices', 'accel')

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
        self.assertIn('reset flr', rows['reset of handle 0']['Found'])
        self.assertEqual(1, len(self.kernel.resets(A)))
        with open(self.report) as file:
            text = file.read()
        self.assertNotIn(A, text)
        report = json.loads(text)
        self.assertEqual(('10de', '26b9', 'gpu', 46), tuple(
            report[key] for key in ('vendor', 'product', 'driver',
                                    'address_bits')))
        self.assertEqual(len(rows), len(report['steps']))

    def test_reset_that_fails(self):
        self.host('gpu', gpus=[{'address': A, 'faults': {
            'reset': 'EIO'}}])
        rows = self.prove(failed=('reset of handle 0',))
        self.assertIn('see the kernel log', rows['reset of handle 0']['Found'])

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
        self.assertEqual('nvidia-558',
                         self.prove()['create and remove']['Found'])
        self.assertEqual([], self.kernel.listdir('bus/mdev/devices'))

    def test_not_free(self):
        store = self.host('gpu', disabled=False, gpus=[{'address': A}])
        self.assertIn(f'nova-accel disable {A} first', self.call(A).stderr)
        store.add([claim(device_address=A)])
        store.disable(model.Disabled(A, '', 'to be tried', NEW), ())
        self.assertIn(f'nova-accel drain {A}', self.call(A).stderr)
        self.assertEqual([], self.kernel.resets(A))
        self.assertIn('give --erase', self.call(
            A, '--bitstream', 'a.xclbin').stderr)
        self.assertEqual(1, self.call(B).returncode)
