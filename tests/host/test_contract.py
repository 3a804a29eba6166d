# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whether the devices of a driver are cleaned, whatever its class has.

The driver is that of docs/source/drivers.rst with another end.
"""

import itertools
import pathlib

import ddt

from nova_accel import drivers
from nova_accel import exception
from nova_accel.host import pci
from tests import acme
from tests.host import base
from tests.unit.host import A

AI = 'CUSTOM_ACCELERATOR_AI'
PLAIN = {f'resources1:{AI}': '1'}
PREPARE = '''
    def prepare(self, device, handle, created_type, fresh, use):
        self.kernel.write_attribute(device.address, POWER_LIMIT, '100',
                                    by=privileged.write_attribute)
'''
RELEASE = '''
    def release(self, device, handle, created_type, use):
        self.kernel.call(privileged.scrub, device.address)
        return 'scrubbed'
'''
RESET_REGION = '''
    def reset_region(self, device, region):
        return 'reset'
'''
CREATABLE = ("traits=(f'CUSTOM_ACME_FIRMWARE_{firmware}',)",
             "creatable=(model.CreatableType('small', 'CUSTOM_SMALL', 1),)")
LINES = {'RESETS': '    RESETS = True\n', 'POOLED': '    POOLED = True\n'}
YES_NO = False, True
#: prepare(), release(), RESETS, POOLED, creatable types; of the last two, which
#: cleaning does not depend on, one pair after another
COMBINATIONS = tuple(of_cleaning + of_providers for of_cleaning, of_providers
                     in zip(itertools.product(
                         YES_NO, YES_NO, YES_NO),
                         itertools.cycle(itertools.product(YES_NO, YES_NO))))


def is_loaded(_, release, resets, *more):
    return release or resets


class ContractTestCase(base.HostTestCase):

    POOLS = 'none'

    def setUp(self):
        super().setUp()
        package = self.useFixture(acme.Installed())
        self.path = pathlib.Path(package.path, acme.NAME, 'driver.py')

    def write(self, prepare, release, resets, pooled, creatable, end=''):
        text, _, _ = self.path.read_text().partition('    # What servers get')
        lines = resets * LINES['RESETS'] + pooled * LINES['POOLED']
        text = text.replace(LINES['RESETS'], lines)
        if creatable:
            text = text.replace(*CREATABLE)
        self.path.write_text(
            text + prepare * PREPARE + release * RELEASE + end)

    def refused(self, *words):
        error = str(self.assertRaises(
            exception.UnusableDriver, drivers.load, ['acme'], None))
        self.assertRegex(error, r'\A[^.]*(\.\w[^.]*)*\.\Z')
        for word in ("'acme'", 'acme_accel.driver.AcmeDriver', *words):
            self.assertIn(word, error)

    def start(self):
        self.start_host(acmes=[{'address': A}], drivers=('acme',))

    def boot_and_delete(self):
        self.host.delete(
            self.host.boot(PLAIN, self.host.allocation(A, AI)))

    def method(self):
        handover, = self.host.store.handovers()
        return handover.method, handover.result

    def attribute(self, name):
        return self.simulated.kernel.read(pci.path(A, f'acme/{name}'))


@ddt.ddt
class CombinationsTest(ContractTestCase):

    @ddt.data(*itertools.filterfalse(
        lambda combination: is_loaded(*combination), COMBINATIONS))
    def test_refused(self, combination):
        prepare, *_ = combination
        self.write(*combination)
        self.refused(
            'has prepare() and no release()' if prepare
            else 'has no release()', 'RESETS = True', 'write release()')

    @ddt.data(*(c for c in COMBINATIONS if is_loaded(*c)))
    def test_cleaned(self, combination):
        prepare, release, _, _, creatable = combination
        self.write(*combination)
        self.start()
        if creatable and not prepare:
            error = self.assertRaises(
                exception.DeviceError, self.boot_and_delete)
            self.assertIn('creates nothing of', str(error))
        else:
            self.boot_and_delete()
        self.assertEqual([], self.host.holdings.all())
        self.assertEqual('1' if release else '0', self.attribute('scrubs'))
        self.assertEqual('100' if prepare else '250',
                         self.attribute('power_limit'))
        self.assertEqual(('scrubbed' if release else 'reset flr', 'clean'),
                         self.method())


class AmbiguousTest(ContractTestCase):

    NOTHING = False, False, False, False, False

    def test_resets_without_pci_driver(self):
        self.write(False, True, True, False, False)
        text = self.path.read_text()
        start = text.index('class AcmeDriver')
        self.path.write_text(text[:start] + '''
class AcmeDriver(base.AcceleratorDriver):

    CONTRACT = 2
    RESETS = True

    def find(self):
        return ()

    def examine(self, address, before):
        return None

    def fingerprint(self):
        return ()
''' + RELEASE)
        self.refused('RESETS, which only a PciDriver has',
                     'derive it from PciDriver')

    def test_regions(self):
        """Their devices are cleaned by reset_region()."""
        self.write(*self.NOTHING, end=RESET_REGION)
        self.assertIn('acme', drivers.load(['acme'], None))

    def test_device_without_region(self):
        """Of a driver that can clean regions alone."""
        self.write(*self.NOTHING, end=RESET_REGION)
        self.start()
        self.boot_and_delete()
        self.assertNotCleaned()

    def test_release_that_does_nothing(self):
        self.write(*self.NOTHING, end='''
    def release(self, device, handle, created_type, use):
        """Forget to return what was done."""
''')
        self.start()
        self.boot_and_delete()
        self.assertNotCleaned()

    def assertNotCleaned(self):
        self.assertEqual(('none', 'not cleaned'), self.method())
        self.assertIn('is not cleaned for the next server: the driver acme has '
                      'cleaned nothing, and the policy is clear',
                      self.log.output)

    def test_policy_none(self):
        """The operator wants it so: not a word."""
        self.config.config(handover=['none'], group='accel')
        self.write(False, False, True, False, False)
        self.start()
        self.boot_and_delete()
        self.assertEqual(('none', 'not cleaned'), self.method())
        self.assertNotIn('as it is', self.log.output)
