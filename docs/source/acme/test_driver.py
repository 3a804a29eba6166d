import errno
import shutil
import tempfile
import unittest

from acme_accel import driver
from acme_accel import dpu
from acme_accel import fpga
from acme_accel import privileged
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import sim
from nova_accel import testing

CARD = '0000:3b:00.0'


class AcmeTestCase(unittest.TestCase):

    def setUp(self):
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        self.kernel = sim.SimulatedKernel(
            shutil.copy('host.yaml', directory))
        self.driver = driver.AcmeDriver(self.kernel)

    def attribute(self, name):
        return self.kernel.read(pci.path(CARD, f'acme/{name}'))


class DiscoveryTest(AcmeTestCase):

    def test_cards(self):
        one, other = self.driver.discover().values()
        self.assertEqual(('CUSTOM_ACME_FIRMWARE_12',), one.traits)
        self.assertEqual(('CUSTOM_ACME_FIRMWARE_7',), other.traits)
        self.assertEqual([CARD], [handle.address for handle in one.handles])

    def test_card_of_a_guest_is_as_known(self):
        before = self.driver.discover()
        self.kernel.guest_takes(CARD)
        self.assertEqual(before, self.driver.discover(before))

    def test_firmware_that_makes_no_sense(self):
        self.kernel.set_fault(CARD, attributes={'firmware': '?'})
        device = self.driver.discover()[CARD]
        self.assertEqual(model.Health.QUARANTINED, device.health)
        self.assertIn('acme-flash', device.reason)

    def test_attribute_that_cannot_be_read(self):
        self.kernel.set_fault(CARD, attributes={'firmware': 'EIO'})
        device = self.driver.discover()[CARD]
        self.assertIn('Input/output error', device.reason)

    def test_another_function(self):
        with self.assertRaises(OSError) as caught:
            self.kernel.call(privileged.scrub, '0000:00:01.0')
        self.assertEqual(errno.ENODEV, caught.exception.errno)


class BetweenServersTest(AcmeTestCase):

    def setUp(self):
        super().setUp()
        self.device = self.driver.discover()[CARD]
        self.memory = None

    def remember(self, value):
        self.memory = value

    def use(self, **keys):
        return base.Use(keys=keys, memory=self.memory, remember=self.remember)

    def prepare(self, **keys):
        self.driver.prepare(self.device, self.device.handles[0], None, True,
                            self.use(**keys))

    def release(self):
        return self.driver.release(self.device, self.device.handles[0], None,
                                   self.use())

    def test_power_limit(self):
        self.prepare(power_limit='100')
        self.assertEqual('100', self.attribute('power_limit'))
        # the server starts again
        self.prepare(power_limit='100')
        self.release()
        self.assertEqual('250', self.attribute('power_limit'))

    def test_power_limit_that_is_none(self):
        with self.assertRaises(exception.InvalidRequest):
            self.prepare(power_limit='../x')
        with self.assertRaises(OSError):
            self.prepare(power_limit='999')
        self.assertEqual('250', self.attribute('power_limit'))

    def test_scrub(self):
        self.assertEqual('reset flr, scrubbed', self.release())
        self.assertEqual('1', self.attribute('scrubs'))

    def test_scrub_of_a_card_that_the_operator_keeps_for_guests(self):
        self.kernel.rebind(CARD, base.VFIO)
        self.release()
        self.assertEqual(base.VFIO, pci.driver(self.kernel, CARD))

    def test_scrub_that_fails(self):
        self.kernel.set_fault(CARD, scrub='EIO')
        with self.assertRaisesRegex(exception.DeviceError, 'Input/output'):
            self.release()


class FpgaTest(unittest.TestCase):

    CARD = '0000:af:00.0'
    FUNCTION = '5f' * 16

    def setUp(self):
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        self.kernel = sim.SimulatedKernel(
            shutil.copy('host.yaml', directory))
        self.driver = fpga.AcmeFpgaDriver(self.kernel)
        self.path = f'{directory}/bits'

    def write(self, region_type):
        with open(self.path, 'wb') as file:
            file.write(fpga.HEADER.pack(
                fpga.MAGIC, bytes.fromhex(region_type),
                bytes.fromhex(self.FUNCTION), 4) + b'bits')

    def look(self):
        device = self.driver.discover()[self.CARD]
        return device, device.regions[0]

    def test_program(self):
        device, region = self.look()
        self.assertIsNone(region.function_uuid)
        self.assertEqual(['0000:af:00.1'], [h.address for h in region.handles])
        self.write(region.region_type_uuid)
        bitstream = self.driver.read_bitstream(self.path)
        self.assertEqual(region.region_type_uuid, bitstream.region_type_uuid)
        self.assertEqual(self.FUNCTION, self.driver.program(
            device, region, bitstream))
        self.assertEqual(self.FUNCTION, self.look()[1].function_uuid)
        self.kernel.set_fault(self.CARD, program='EIO')
        with self.assertRaises(exception.ProgrammingFailed):
            self.driver.program(device, region, bitstream)

    def test_file_of_another_vendor(self):
        with open(self.path, 'wb') as file:
            file.write(b'xclbin2')
        with self.assertRaises(exception.IncompatibleBitstream):
            self.driver.read_bitstream(self.path)

    def test_reset(self):
        device, region = self.look()
        self.assertEqual('region reset',
                         self.driver.reset_region(device, region))
        self.kernel.set_fault(self.CARD, reset_region='EIO')
        with self.assertRaises(exception.DeviceError):
            self.driver.reset_region(device, region)

    def test_check(self):
        device, _ = self.look()
        self.assertEqual([], list(self.driver.check(device)))
        self.kernel.set_fault(self.CARD, temperature='hot')
        finding, = self.driver.check(device)
        self.assertFalse(finding.is_failure)


class AcmeContractTest(testing.DriverTestCase):

    DRIVER = driver.AcmeDriver
    HOST = {'acmes': [{'address': CARD}, {'address': '0000:5e:00.0'}]}
    KEYS = {'power_limit': '100'}
    FAULTS = {'scrub': ('EIO', 'hang'), 'attributes': {'firmware': '?'}}
    LEAVES = ('registers', 'memory')


class AcmeDpuContractTest(testing.DriverTestCase):

    DRIVER = dpu.AcmeDpuDriver
    HOST = {'acme_dpus': [{'address': '0000:17:00.0'},
                          {'address': '0000:18:00.0'}]}
    FAULTS = {'reset_dpu': ('EIO', 'hang'), 'state': 'booting'}
    LEAVES = ('registers', 'memory')


class AcmeFpgaContractTest(testing.DriverTestCase):

    DRIVER = fpga.AcmeFpgaDriver
    HOST = {'acme_fpgas': [
        {'address': address, 'total_vfs': 1, 'vfs': 1}
        for address in ('0000:af:00.0', '0000:b1:00.0')]}
    OPTIONS = {'virtual_functions': ['0000:af:00.0=1', '0000:b1:00.0=1']}
    FAULTS = {'program': 'EIO', 'reset_region': 'EIO'}

    def bitstream(self, region):
        path = f'{self.directory}/bits'
        with open(path, 'wb') as file:
            file.write(fpga.HEADER.pack(
                fpga.MAGIC, bytes.fromhex(region.region_type_uuid),
                bytes.fromhex(FpgaTest.FUNCTION), 4) + b'bits')
        return path


if __name__ == '__main__':
    unittest.main()
