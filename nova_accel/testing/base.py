# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The base of the contract tests: a simulated host, and failures that quote the
contract."""

import contextlib
import dataclasses
import errno
import inspect
import json
import os
import shutil
import tempfile
import typing
import unittest

import yaml

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel import exception
from nova_accel.inventory import offers
from nova_accel.inventory import providers
from nova_accel import model
from nova_accel.testing import kernel as kernels
from nova_accel.testing import promises

CONF = conf.CONF

_EXAMPLE = '''
class {name}(testing.DriverTestCase):

    DRIVER = driver.AcmeDriver
    HOST = {{'acmes': [{{'address': '0000:3b:00.0'}},
                      {{'address': '0000:5e:00.0'}}]}}
'''


class Case(unittest.TestCase):
    """The attributes, the simulated host and the helpers of DriverTestCase."""

    # Attributes and methods that a driver's author provides

    #: the class of the driver
    DRIVER: typing.Any = None
    #: description of a simulated host with at least two healthy cards of one
    #: product: list -> items, as in the sample
    #: etc/nova_accel/simulated-host.yaml
    HOST: typing.Any = None
    #: options of [accel] beside enabled_drivers and include_devices
    OPTIONS: typing.Mapping[str, typing.Any] = {}
    #: a value that prepare() accepts for each name of DRIVER.KEYS
    KEYS: typing.Mapping[str, str] = {}
    #: fault of the simulated card -> value, or values. A method of the driver
    #: has to detect each of them
    FAULTS: typing.Mapping[str, typing.Any] = {}
    #: kinds of data that a server can leave on a simulated card; card.forget()
    #: removes them
    LEAVES: tuple[str, ...] = ('registers',)

    def bitstream(self, region: model.Region) -> str | None:
        """Return the path of a file that can be programmed into a region, or
        None if the driver programs no regions."""
        return None

    def soil(self, handle: model.AttachHandle) -> None:
        """Write data to a handle, as the guest of a server does."""
        if handle.type is model.HandleType.PCI:
            for function in handle.addresses:
                self.kernel.guest_writes(
                    function, **dict.fromkeys(self.LEAVES, 'of a server'))

    def remains(self, handle: model.AttachHandle) -> typing.Collection[str]:
        """Return the data of earlier servers that a guest can read in a
        handle."""
        return {left for function in handle.addresses
                for left in self.kernel.guest_reads(function)
                } if handle.type is model.HandleType.PCI else ()

    # The host

    @classmethod
    def setUpClass(cls):
        if cls.__module__.startswith('nova_accel.testing'):
            raise unittest.SkipTest('Subclass it for a driver.')
        super().setUpClass()
        wrong = cls._is_incorrect()
        if wrong:
            raise TypeError(
                f'{cls.__qualname__} {wrong}. A subclass of '
                f'nova_accel.testing.DriverTestCase is like this one:\n'
                + _EXAMPLE.format(name=cls.__name__))

    @classmethod
    def _is_incorrect(cls) -> str:
        """Return the error in the attributes of the class, or ''."""
        driver = cls.DRIVER
        if not (isinstance(driver, type)
                and issubclass(driver, base.AcceleratorDriver)):
            return (f'has DRIVER = {driver!r}: set it to the class of your '
                    f'driver')
        if inspect.isabstract(driver):
            return (f'tests {driver.__name__}, which lacks '
                    f'{", ".join(sorted(driver.__abstractmethods__))}: write '
                    f'the method')
        if not isinstance(cls.HOST, dict) or not cls.HOST:
            return (f'has HOST = {cls.HOST!r}: set it to the lists of a '
                    f'simulated host, with two of your cards')
        missing = driver.KEYS - set(cls.KEYS)
        if missing:
            return (f'has no value of {min(missing)}, which is in '
                    f'{driver.__name__}.KEYS: add KEYS = '
                    f'{{{min(missing)!r}: <a value that prepare() takes>}}')
        if (contract._has(driver, 'program')
                and cls.bitstream in (Case.bitstream,)):
            return (f'has no bitstream(), and {driver.__name__} has '
                    f'program(): return from it the path of a file that a '
                    f'region takes')
        if bool(cls.soil is Case.soil) is not bool(
                cls.remains is Case.remains):
            return ('has one of soil() and remains(): write both, or neither')
        return ''

    def setUp(self):
        super().setUp()
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        self._path = os.path.join(self.directory, 'host.yaml')
        with open(self._path, 'w', encoding='utf-8') as file:
            yaml.safe_dump(self.HOST, file)
        self.name = getattr(self.DRIVER, 'NAME', self.DRIVER.__name__)
        self.set_options(
            enabled_drivers=[self.name], include_devices=['address=*'],
            bitstream_cache=os.path.join(self.directory, 'cache'),
            **self.OPTIONS)
        contract.check_class(self.name, self.DRIVER)
        self.boot_new_host()

    def boot_new_host(self) -> None:
        """Boot the host of HOST, without any state of an earlier test."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f'{self._path}.state')
        self.start()
        with self.promise(promises.CONFIGURE):
            self.driver.configure()
        self.known = self.discover()
        self._check_host()
        self.serials = {address: self._serial(address)
                        for address in self.known}

    def _check_host(self):
        for device in self.known.values():
            self.assertEqual(
                model.Health.OK, device.health,
                f'{device.address} of HOST is quarantined: {device.reason}. '
                f'Describe devices that are well, or set OPTIONS.')
        self.assertGreater(
            len(self.known), 1,
            f'{self.DRIVER.__name__}.discover() finds '
            f'{sorted(self.known) or "nothing"} on the host of HOST '
            f'{self.HOST}: describe two cards of one product.')
        self.one, self.other, *_ = sorted(
            self.known.values(), key=lambda device: device.address)

    def set_options(self, **options):
        for name, value in options.items():
            CONF.set_override(name, value, 'accel')
            self.addCleanup(CONF.clear_override, name, 'accel')

    def start(self) -> None:
        """Start nova-compute: create a driver without any state."""
        self.kernel = kernels.Kernel(self._path)
        self.driver = self.DRIVER(self.kernel)

    def discover(self, known=None) -> dict[str, model.Device]:
        """Return the devices that the driver finds, after a check of each
        return value against the contract."""
        with self.promise(promises.FIND):
            addresses = contract.addresses(self.name, self.driver.find())
        found = {}
        for address in addresses:
            device = self.examine(address, (known or {}).get(address))
            if device:
                found[address] = device
        return found

    def examine(self, address, before=None) -> model.Device | None:
        with self.changes_nothing(promises.EXAMINE_ONLY, address):
            device = self.driver.examine(address, before)
        with self.promise(promises.EXAMINE, address):
            contract.device(self.name, address, device)
            return device and contract.device(
                self.name, address, self.driver.confine(device))

    def look_again(self, address) -> model.Device | None:
        """Examine a device again, with the report that nova-compute would
        pass."""
        before, serial = self.known[address], self._serial(address)
        if serial and serial != self.serials[address]:
            # as in the scanner: the record belongs to the card, not the slot
            before = dataclasses.replace(before, record=next(
                (self.known[other].record for other, known
                 in self.serials.items() if known == serial), ()))
        return self.examine(address, before)

    def _serial(self, address) -> str:
        try:
            return contract.serial(
                self.name, self.driver.serial(address)) or ''
        except (OSError, ValueError):
            return ''

    @staticmethod
    def refusal(device: model.Device | None) -> str:
        """Return why Placement would refuse a device, or ''."""
        found: list[str] = []
        if device:
            providers.providers(
                [device], offers.offers({device.address: device}, (), ()),
                'host', _ROOT, lambda address, why: found.append(why))
        return ' '.join(found)

    # A server

    def use(self, memory=None) -> base.Use:
        self.memory = memory

        def remember(value):
            try:
                self.kernel.change()
            except OSError as error:
                raise exception.AcceleratorsUnavailable(
                    f'The claim store cannot be written ({error}).') from error
            self.memory = json.loads(json.dumps(value))
        return base.Use(keys=dict(self.KEYS), memory=memory,
                        remember=remember)

    @contextlib.contextmanager
    def guest(self, handle):
        """Let a guest have a handle inside the context."""
        if _is_opened(handle):
            self.kernel.guest_opens(handle.address)
        else:
            try:
                self.kernel.guest_takes(*handle.addresses)
            except OSError as error:
                if error.errno not in (errno.ENODEV, errno.ENOENT):
                    raise
                raise self.failureException(
                    f'{" and ".join(handle.addresses)} cannot be given to a '
                    f'guest ({error}): HOST must describe each function that '
                    f'guests get, a second one of a card in others') from error
        yield
        self.end_guest(handle)

    def end_guest(self, handle) -> None:
        """End the guest that has a handle, if there is one."""
        for address in handle.addresses:
            if address in self.kernel._look()[1]['guests']:
                if _is_opened(handle):
                    self.kernel.guest_closes(address)
                else:
                    self.kernel.guest_returns(address)

    # Failures

    @contextlib.contextmanager
    def promise(self, promise: promises.Promise, about: str = ''):
        """Fail if the context raises an error, and quote a sentence of the
        contract."""
        try:
            yield
        except unittest.SkipTest:
            raise
        except (Exception, kernels.Hung) as error:
            found = (str(error) if isinstance(error, AssertionError)
                     else f'{type(error).__name__}: {error}')
            if isinstance(error, AssertionError) and _QUOTED in found:
                raise
            raise self.failureException(
                f'{self.DRIVER.__name__}, {promise.method}()'
                f'{f" of {about}" if about else ""}: {found}\n'
                f'{_QUOTED} "{promise.sentence}"') from error

    @contextlib.contextmanager
    def changes_nothing(self, promise, about=''):
        with self.promise(promise, about), self.kernel.watch() as watched:
            yield
            if watched.steps:
                raise self.failureException(
                    'it changed the device or the kernel')


def _is_opened(handle) -> bool:
    """Return whether a guest only opens the handle, which already has a VFIO
    driver."""
    return handle.type is model.HandleType.MDEV or not handle.managed


#: UUID of the host's own provider
_ROOT = '00000000-0000-4000-8000-000000000001'
_QUOTED = 'The contract (nova_accel.drivers.base) says:'
