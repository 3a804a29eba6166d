import shutil
import tempfile
import unittest

from acme_accel import driver
from nova_accel import model
from nova_accel import sim


class AcmeDriverTest(unittest.TestCase):

    def setUp(self):
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        self.kernel = sim.SimulatedKernel(
            shutil.copy('host.yaml', directory))
        self.driver = driver.AcmeDriver(self.kernel)

    def addresses(self, device):
        return [handle.address for handle in device.handles]

    def test_cards(self):
        whole, shared = self.driver.discover().values()
        self.assertEqual(('CUSTOM_ACME_FIRMWARE_12',), whole.traits)
        self.assertEqual(['0000:3b:00.0'], self.addresses(whole))
        self.assertEqual(['0000:5e:00.1', '0000:5e:00.2'],
                         self.addresses(shared))

    def test_card_of_a_guest_is_as_known(self):
        before = self.driver.discover()
        self.kernel.guest_takes('0000:3b:00.0')
        self.assertEqual(before, self.driver.discover(before))

    def test_reset_between_two_servers(self):
        device = self.driver.discover()['0000:3b:00.0']
        self.kernel.guest_takes('0000:3b:00.0')
        self.kernel.guest_returns('0000:3b:00.0')
        self.assertEqual('reset flr', self.driver.release(
            device, device.handles[0], None))
        # the function, and the driver that it had meanwhile
        self.assertEqual([['0000:3b:00.0', None]],
                         self.kernel.resets('0000:3b:00.0'))

    def test_firmware_that_makes_no_sense(self):
        self.kernel.set_fault('0000:3b:00.0', attributes={'firmware': '?'})
        device = self.driver.discover()['0000:3b:00.0']
        self.assertEqual(model.Health.QUARANTINED, device.health)
        self.assertIn('acme-flash', device.reason)

    def test_attribute_that_cannot_be_read(self):
        self.kernel.set_fault('0000:3b:00.0', attributes={'firmware': 'EIO'})
        device = self.driver.discover()['0000:3b:00.0']
        self.assertIn('Input/output error', device.reason)


if __name__ == '__main__':
    unittest.main()
