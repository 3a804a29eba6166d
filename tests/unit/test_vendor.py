# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a driver of another package declares: its contract, its privileged
process, its simulated devices.

The package is that of docs/source/drivers.rst.
"""

import errno
import importlib
import os
import sys

import ddt
import fixtures
from oslo_config import fixture as config_fixture
import testtools
import yaml

from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel import model
from nova_accel import request
from nova_accel import sim
from tests import acme
from tests.unit import commands
from tests.unit.host import A

SECTION = 'acme_accel_privileged'


class VendorTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.package = self.useFixture(acme.Installed())
        self.config = self.useFixture(config_fixture.Config(conf.CONF))
        # a process that is started reads the files of this one
        conf.CONF([], project='nova', default_config_files=[],
                  default_config_dirs=[])


@ddt.ddt
class ContractTest(VendorTestCase):

    def load(self):
        return drivers.load(['acme'], None)['acme']

    def refused(self, *words):
        error = str(self.assertRaises(exception.UnusableDriver, self.load))
        self.assertRegex(error, r'\A[^.]*(\.\w[^.]*)*\.\Z')
        for word in ("'acme'", *words):
            self.assertIn(word, error)

    def test_example(self):
        """The page's driver declares the present version."""
        self.assertEqual(base.CONTRACT, self.load().CONTRACT)

    @ddt.data('CONTRACT = 3', 'CONTRACT = 99')
    def test_newer(self, line):
        self.package.change('driver', 'CONTRACT = 2', line)
        self.refused(f'is for version {line[11:]} of', 'has version 2:',
                     'install a later release of nova_accel',
                     'earlier one of acme_accel')

    @ddt.data('CONTRACT = 1', 'CONTRACT = 0', "CONTRACT = '2'",
              'CONTRACT = True')
    def test_too_old(self, line):
        self.package.change('driver', 'CONTRACT = 2', line)
        self.refused(f'is for version {line[11:]} of', 'has version 2:',
                     'install a later release of acme_accel')

    def test_without_a_version(self):
        """As drivers were written before contracts had one; inherited from
        another driver it says nothing."""
        self.package.change('driver', '    CONTRACT = 2\n', '')
        self.package.change('driver', 'class AcmeDriver(base.PciDriver)', '''
class Before(base.PciDriver):
    CONTRACT = 2


class AcmeDriver(Before)''')
        self.refused('is for version 1 of', 'has version 2:')

    def test_range(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.drivers.base.CONTRACT', 4))
        self.load()
        self.package.change('driver', 'CONTRACT = 2', 'CONTRACT = 1')
        sys.modules.pop('acme_accel.driver')
        self.refused('has versions 2 to 4:')

    def test_that_cannot_be_imported(self):
        """As one that needs what a later contract has."""
        self.package.change('driver', 'from nova_accel.drivers import base\n',
                            'from nova_accel.drivers import nothing_yet\n')
        self.refused('acme_accel.driver:AcmeDriver', 'nothing_yet')

    def test_that_cannot_be_made(self):
        self.package.change('driver', '    # Discovery\n', '''
    def __init__(self, kernel):
        raise RuntimeError('no licence')
''')
        self.refused('RuntimeError: no licence')


class KeysTest(testtools.TestCase):

    def parse(self, **keys):
        wanted, = request.parse({'resources1:CUSTOM_ACCELERATOR_AI': '1', **{
            f'accel1:{name}': value for name, value in keys.items()}})
        return wanted

    def test_keys_of_a_driver(self):
        self.assertEqual({'power_limit': '100', 'x': 'y'}, self.parse(
            driver_power_limit='100', driver_x='y').driver_keys)
        self.assertEqual({}, self.parse().driver_keys)

    def test_name_that_is_none(self):
        for name in ('driver_', 'driver_A', 'driver_a/b', 'driver_' + 65 * 'a',
                     'drivr_a'):
            self.assertRaises(exception.InvalidRequest, self.parse,
                              **{name: '1'})


class PrivilegedTest(VendorTestCase):
    """sysfs is a directory here; the process is this one where none is
    started."""

    def setUp(self):
        super().setUp()
        self.module = importlib.import_module('acme_accel.privileged')
        self.root = self.useFixture(fixtures.TempDir()).path
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.host.privileged.SYS', self.root))
        self.kernel = host_kernel.Kernel(self.root)
        for path in (f'bus/pci/devices/{A}/acme/power_limit',
                     f'bus/pci/devices/{A}/driver_override',
                     f'bus/pci/devices/{A}/sriov_numvfs',
                     'bus/pci/drivers/acme/bind',
                     'bus/pci/drivers/nvme/bind'):
            os.makedirs(os.path.join(self.root, os.path.dirname(path)),
                        exist_ok=True)
            with open(os.path.join(self.root, path), 'w') as file:
                file.write('as it was')

    def in_this_process(self):
        self.module.ctx.set_client_mode(False)

    def refused(self, number, call, *args, **kwargs):
        error = self.assertRaises(OSError, call, *args, **kwargs)
        self.assertEqual(number, error.errno)

    def test_attribute(self):
        self.in_this_process()
        path = f'bus/pci/devices/{A}/acme/power_limit'
        write, by = self.kernel.write_attribute, self.module.write_attribute
        write(A, 'acme/power_limit', '100', by=by)
        # a file is not shortened, as an attribute is
        self.assertEqual('100', self.kernel.read(path)[:3])
        for args in ((A, 'acme/power_limit', '1e3'),
                     (A, 'acme/power_limit', 100),
                     (A, 'sriov_numvfs', '10'),
                     (A, '../../acme/power_limit', '10'),
                     (f'../{A}', 'acme/power_limit', '10')):
            self.refused(errno.EINVAL, write, *args, by=by)
        # ours knows nothing of it
        self.assertNotIn('acme/power_limit',
                         host_kernel.privileged.WRITABLE)

    def test_driver(self):
        self.in_this_process()
        self.kernel.rebind(A, 'acme', by=self.module.rebind)
        self.assertEqual(A, self.kernel.read('bus/pci/drivers/acme/bind'))
        self.refused(errno.EINVAL, self.kernel.rebind, A, 'nvme',
                     by=self.module.rebind)
        self.assertEqual('as it was',
                         self.kernel.read('bus/pci/drivers/nvme/bind'))

    def test_operation(self):
        self.in_this_process()
        self.refused(errno.EINVAL, self.kernel.call, self.module.scrub, '/')
        # the function shows no node
        self.refused(errno.ENODEV, self.kernel.call, self.module.scrub, A)

    def test_process(self):
        """What the operation raises there arrives here."""
        self.config.config(group=SECTION,
                           helper_command=commands.PRIVSEP_HELPER)
        self.addCleanup(self.module.ctx.stop)
        self.assertEqual((os.geteuid(), 0), tuple(self.module.credentials()))
        self.refused(errno.EINVAL, self.kernel.call, self.module.scrub, '/')

    def test_process_that_does_not_start(self):
        self.config.config(group=SECTION, helper_command='/nonexistent')
        error = self.assertRaises(
            OSError, self.kernel.call, self.module.scrub, A)
        self.assertIn(f'the privileged process of [{SECTION}] does not start',
                      error.strerror)


class SimulatedTest(VendorTestCase):

    def host(self, **kinds):
        path = os.path.join(self.useFixture(fixtures.TempDir()).path,
                            'host.yaml')
        with open(path, 'w') as file:
            yaml.safe_dump(kinds, file)
        return sim.SimulatedKernel(path)

    def test_devices_of_the_package(self):
        kernel = self.host(acmes=[{'address': A, 'firmware': '7'}])
        device, = drivers.load(['acme'], kernel)['acme'].discover().values()
        self.assertEqual((A, model.Health.OK),
                         (device.address, device.health))

    def test_unknown_kind(self):
        error = self.assertRaises(exception.InvalidSimulation, self.host,
                                  acmee=[{'address': A}])
        self.assertIn('acmee of the file is an unknown key', str(error))

    def test_key_that_it_does_not_know(self):
        error = self.assertRaises(exception.InvalidSimulation, self.host,
                                  acmes=[{'address': A, 'firmwar': '7'}])
        self.assertIn('firmwar of acmes[0] is an unknown key', str(error))

    def test_package_that_is_broken(self):
        self.package.change('simulated', 'import errno\n', 'import nothing\n')
        error = str(self.assertRaises(
            exception.InvalidSimulation, self.host, acmes=[{'address': A}]))
        self.assertIn("The simulated devices 'acmes' cannot be loaded from "
                      'acme_accel.simulated:AcmeCard (', error)

    def test_operation_that_the_device_does_not_have(self):
        kernel = self.host(gpus=[{'address': A}])
        scrub = importlib.import_module('acme_accel.privileged').scrub
        error = self.assertRaises(OSError, kernel.call, scrub, A)
        self.assertEqual(errno.ENOTTY, error.errno)
