# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Every driver of nova_accel passes the tests of nova_accel.testing."""

import importlib
import inspect
import unittest
from unittest import mock

import ddt
import testtools

from nova_accel.drivers import base
from nova_accel.drivers import dfl
from nova_accel.drivers import gpu
from nova_accel.drivers import nvme
from nova_accel.drivers import pci_rule
from nova_accel.drivers import qat
from nova_accel.drivers import timecard
from nova_accel.drivers import vgpu
from nova_accel.drivers import xrt
from nova_accel import sim
from nova_accel import testing
from nova_accel.testing import promises
from tests import acme
from tests import simulated
from tests.unit.host import A, B, FUNCTION, INTERFACE, OTHER, SHELL


class GpuTest(testing.DriverTestCase):

    DRIVER = gpu.GpuDriver
    # with the function of its sound
    HOST = {'gpus': [{'address': A, 'iommu_group': 7},
                     {'address': B, 'iommu_group': 8}],
            'others': [{'address': f'{address[:-1]}1', 'vendor': '10de',
                        'device': '22ba', 'class': '0x040300',
                        'driver': 'snd_hda_intel', 'iommu_group': group}
                       for address, group in ((A, 7), (B, 8))]}
    FAULTS = {'bind': 'EBUSY', 'reset': ('EIO', 'dead'),
              'attributes': ({'class': '0x020000'}, {'config': 'EIO'})}


class PciRuleTest(testing.DriverTestCase):

    DRIVER = pci_rule.PciRuleDriver
    HOST = {'others': [
        {'address': address, 'vendor': '1da3', 'device': '1020',
         'class': '0x120000'} for address in (A, B)]}
    OPTIONS = {'pci_devices': ['vendor=1da3 type=AI']}
    FAULTS = {'reset': ('EIO', 'dead')}


@mock.patch('nova_accel.sim.qat._TIMER', 0)
@mock.patch('nova_accel.drivers.qat.HEARTBEAT_SECONDS', 0)
class QatTest(testing.DriverTestCase):

    DRIVER = qat.QatDriver
    HOST = {'qats': [{'address': address} for address in (A, B)]}
    OPTIONS = {'virtual_functions': [f'{A}=16', f'{B}=16']}
    FAULTS = {'errors_fatal': 3, 'lost_vfs': True,
              'reset': 'EIO', 'attributes': {'state': 'down'}}


class TimecardTest(testing.DriverTestCase):

    DRIVER = timecard.TimecardDriver
    HOST = {'timecards': [{'address': A}, {'address': B}]}
    FAULTS = {'write': ('EINVAL', 'EIO'), 'reset': ('EIO', 'dead')}


@mock.patch('nova_accel.drivers.nvme._READY_SECONDS', 0.3)
@mock.patch('nova_accel.drivers.nvme._LIVE_SECONDS', 0.3)
class NvmeTest(testing.DriverTestCase):

    DRIVER = nvme.NvmeDriver
    HOST = {'nvmes': [{'address': A}, {'address': B}]}

    LEAVES = ('data',)
    FAULTS = {'format': 'refused', 'controller': ('dead', 'resetting'),
              'identify': 'refused', 'reset': 'refused',
              'health': {'warning': 4}, 'attributes': {'state': 'EIO'}}

    def soil(self, handle):
        simulated.Kernel.write_disk(
            self.kernel, handle.address, 'of a server')

    def remains(self, handle):
        return self.LEAVES if simulated.Kernel.data_of_disk(
            self.kernel, handle.address) else ()


class VgpuTest(testing.DriverTestCase):

    DRIVER = vgpu.VgpuDriver
    HOST = {'vgpus': [{
        'address': address, 'vendor': '10de', 'device': '2235', 'units': 4,
        'framework': 'mdev', 'types': [
            {'id': 'nvidia-557', 'name': 'NVIDIA A40-1Q', 'units': 1}]}
        for address in (A, B)]}
    FAULTS = {'create': ('EIO', 'ENOSPC'), 'busy': True,
              'attributes': {'available_instances': 'x y'}}


@mock.patch('nova_accel.drivers.dfl.BUSY_SECONDS', 0)
class DflTest(testing.DriverTestCase):

    DRIVER = dfl.DflDriver
    HOST = {'cards': [{'address': address, 'ports': 1, 'vfs': 1,
                       'programming_seconds': 0, 'timeout_seconds': 0}
                      for address in (A, B)]}
    OPTIONS = {'virtual_functions': [f'{A}=1', f'{B}=1']}
    FAULTS = {'busy': True, 'port_reset': 'EBUSY',
              'pr_error': ('crc', 'timeout', 'incompatible'),
              'accept_id': OTHER, 'lost_vfs': True,
              'attributes': ({'compat_id': 'EIO'}, {'afu_id': 'EIO'})}

    def bitstream(self, region):
        path = f'{self.directory}/one.gbs'
        sim.make_gbs(path, FUNCTION, INTERFACE)
        return path


class XrtTest(testing.DriverTestCase):

    DRIVER = xrt.XrtDriver
    HOST = {'alveos': [{'address': address, 'programming_seconds': 0}
                       for address in (A, B)]}
    FAULTS = {'program_error': ('EIO', 'EBUSY'),
              'reset_kills': True,
              'attributes': ({'ready': '0'}, {'dev_offline': '1'})}

    def bitstream(self, region):
        path = f'{self.directory}/one.xclbin'
        sim.make_xclbin(path, FUNCTION, SHELL)
        return path


class AcmeTestCase(testtools.TestCase):
    """The kit on the example of docs/source/drivers.rst."""

    #: what test_driver.py of the example states
    STATED = {
        'HOST': {'acmes': [{'address': A}, {'address': B}]},
        'KEYS': {'power_limit': '100'},
        'FAULTS': {'scrub': 'EIO', 'attributes': {'firmware': '?'}},
    }

    def setUp(self):
        super().setUp()
        self.package = self.useFixture(acme.Installed())

    def play(self, only='', **stated):
        """Run the kit; its failures and errors as texts."""
        driver = importlib.import_module('acme_accel.driver').AcmeDriver
        case = type('VendorsTest', (testing.DriverTestCase,), {
            '__module__': 'acme_accel.test_driver', 'DRIVER': driver,
            **self.STATED, **stated})
        names = [name for name in unittest.TestLoader().getTestCaseNames(case)
                 if only in name]
        result = unittest.TestResult()
        unittest.TestSuite(map(case, names)).run(result)
        return [text for _, text in (*result.failures, *result.errors)]


class ExampleTest(AcmeTestCase):

    def test_passes(self):
        self.assertEqual([], self.play())


@ddt.ddt
class MistakeTest(AcmeTestCase):
    """Each mistake of a driver is found, and the failure says where."""

    #: mistake: method, part of the failure, test, text, what it becomes
    MISTAKES = {
        'find_reads': (
            'find', 'it reads /sys/', 'test_find',
            "ids = (pci.identifier", 'self.kernel.read(pci.path(address, '
            "'acme/firmware'))\n        ids = (pci.identifier"),
        'keeps_state': (
            'examine', 'it is another one', 'test_examine',
            "traits=(f'CUSTOM_ACME_FIRMWARE_{firmware}',)",
            "traits=(f'CUSTOM_ACME_{id(self)}',)"),
        'changes': (
            'examine', 'it changed the device', 'test_examine',
            '        firmware = ', '        self.kernel.write_attribute('
            "device.address, POWER_LIMIT, '99')\n        firmware = "),
        'trait': (
            'examine', 'is not a name for Placement', 'test_names',
            'CUSTOM_ACME_FIRMWARE_{firmware}', 'Firmware_{firmware}'),
        'no_defect': (
            'examine', 'KeyError', 'test_nonsense',
            '        if not re.fullmatch', "        {'12': 0}[firmware]\n"
            '        if not re.fullmatch'),
        'health': (
            'health', 'not a signal', 'test_health',
            '    # What servers get', "    def health(self, device):\n"
            "        return ['hot']\n\n    # What servers get"),
        'health_raises': (
            'health', 'KeyError', 'test_faults',
            '    # What servers get', "    def health(self, device):\n"
            "        raise KeyError('temp')\n\n    # What servers get"),
        'health_of_another': (
            'health', 'acme/temp', 'test_card_that_hangs',
            '    # What servers get', "    def health(self, device):\n"
            "        yield self.kernel.read(pci.path(device.address, "
            "'acme/temp'))\n\n    # What servers get"),
        'serial': (
            'serial', 'two cards have', 'test_serial',
            '    # What servers get', "    def serial(self, address):\n"
            "        return '0'\n\n    # What servers get"),
        'fingerprint': (
            'fingerprint', 'it is the same without', 'test_fingerprint',
            '    # What servers get', '    def fingerprint(self):\n'
            '        return 0\n\n    # What servers get'),
        'fingerprint_that_changes': (
            'fingerprint', 'the host did not', 'test_fingerprint',
            '    # What servers get', '    def fingerprint(self):\n'
            '        return object()\n\n    # What servers get'),
        'not_cleaned': (
            'release', 'the next server finds registers', 'test_policy_clear',
            'done = super().release(device, handle, created_type, use)',
            "done = 'cleaned'"),
        'not_undone': (
            'release', 'prepare() changed /sys/', 'test_undone',
            'if use.memory:', 'if False:'),
        'no_policy': (
            'release', 'is not None', 'test_policy_none',
            'done = super().release(device, handle, created_type, use)',
            'done = self.reset(device, handle)'),
        'no_word': (
            'release', 'None', 'test_policy_clear',
            '        return done\n', '        return None\n'),
        'hidden_failure': (
            'examine', 'no method notices the fault scrub', 'test_faults',
            "                self.kernel.call(privileged.scrub, address)\n",
            '                try:\n                    self.kernel.call('
            'privileged.scrub, address)\n                except OSError:\n'
            '                    pass\n'),
        'remembered_late': (
            'release', 'stays so', 'test_killed',
            'use.remember', '(lambda value: None)'),
        'guest': (
            'examine', 'No such file', 'test_device_of_a_guest',
            'if pci.driver(self.kernel, device.address) == base.VFIO and '
            'before:', 'if False:'),
    }

    @ddt.data(*MISTAKES)
    def test_found(self, name):
        method, part, test, old, new = self.MISTAKES[name]
        self.package.change('driver', old, new)
        failures = ''.join(self.play(test))
        self.assertIn(f'AcmeDriver, {method}()', failures)
        self.assertIn(part, failures)
        self.assertIn('The contract (nova_accel.drivers.base) says: "',
                      failures)

    def test_health_that_makes_no_sense(self):
        self.package.change(
            'driver', '    # What servers get',
            '    def health(self, device):\n        int(self.kernel.read('
            'pci.path(device.address, POWER_LIMIT)))\n        return ()\n\n'
            '    # What servers get')
        self.assertEqual([], self.play('test_faults', FAULTS={
            'attributes': {'power_limit': '?'}}))

    def test_second_function_that_host_lacks(self):
        self.package.change(
            'driver', 'self.function_handles(device.address)',
            "self.function_handles(device.address, ('0000:3b:00.1',))")
        self.assertIn('a second one of a card in others',
                      ''.join(self.play('test_policy_clear')))


@ddt.ddt
class MisuseTest(AcmeTestCase):
    """A subclass that is not one says how to write it."""

    @ddt.data(
        ({'DRIVER': None}, 'DRIVER = None: set it to the class'),
        ({'HOST': {}}, 'HOST = {}: set it to the lists'),
        ({'KEYS': {}}, "add KEYS = {'power_limit'"),
        ({'soil': lambda self, handle: None}, 'write both, or neither'),
        ({'DRIVER': base.PciDriver}, 'lacks identify, look'),
        ({'DRIVER': dfl.DflDriver, 'KEYS': {}}, 'has no bitstream()'))
    @ddt.unpack
    def test_stated(self, stated, part):
        failure, = self.play(**stated)
        self.assertIn(part, failure)
        self.assertIn('class VendorsTest(testing.DriverTestCase):', failure)

    @ddt.data(
        ({'HOST': {'acmes': [{'address': A}]}}, 'describe two cards'),
        ({'HOST': {'acme': [{'address': A}]}}, 'acme of the file is an '
                                               'unknown key'),
        ({'HOST': {'acmes': [{'address': A, 'firmware': '?'},
                             {'address': B}]}}, 'is quarantined'),
        ({'FAULTS': {'scrap': 'EIO'}}, 'scrap is an unknown fault'))
    @ddt.unpack
    def test_host(self, stated, part):
        failures = self.play('test_faults', **stated)
        self.assertIn(part, ''.join(failures))

    def test_promises(self):
        """Each is a sentence of the contract, in the docstring named."""
        for name, promise in vars(promises).items():
            if isinstance(promise, promises.Promise):
                text = inspect.getdoc(
                    getattr(base.AcceleratorDriver, promise.method))
                self.assertIn(promise.sentence, ' '.join(text.split()), name)
