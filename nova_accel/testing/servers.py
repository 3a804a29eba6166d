# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Tests of prepare() and release(): before, during and after a server; and of
programming."""

import itertools
import os

from nova_accel.drivers import base as drivers
from nova_accel.drivers import contract
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel.testing import discovery
from nova_accel.testing import kernel as kernels
from nova_accel.testing import promises

#: the kind of data that a reset of the function removes
_REGISTERS = 'registers'


class ServerTests(discovery.DiscoveryTests):

    def prepare(self, device, handle, memory=None, fresh=True):
        """Call prepare() as nova-compute does before a guest starts."""
        use = self.use(memory)
        if contract.attends(self.DRIVER):
            with self.promise(promises.PREPARE, handle.address):
                self.driver.prepare(
                    device, handle, self.type_of(device), fresh, use)

    @staticmethod
    def type_of(device) -> str | None:
        """Return the type as which to create the handles of a device, or None
        for a device whose handles are not created."""
        return next((type_.name for type_ in device.creatable
                     if type_.available), None)

    def release(self, device, handle, memory=None) -> str | None:
        """Call release() as nova-compute does when a server has released a
        handle."""
        region = self.region_of(device, handle)
        if region:
            return self.driver.reset_region(device, region)
        return self.driver.release(
            device, handle, self.type_of(device), self.use(memory))

    @staticmethod
    def region_of(device, handle):
        return next((region for region in device.regions
                     if handle in region.handles), None)

    def cleaning(self, device, handle) -> promises.Promise:
        return (promises.RESET_REGION if self.region_of(device, handle)
                else promises.RELEASE)

    def each_handle(self):
        """Yield the first and the last handle of each device, or only the
        first one if handles are created on demand."""
        for device in self.known.values():
            handles = device.all_handles
            for handle in {handles[0]: 0, handles[-1]: 0} if (
                    not device.creatable) else handles[:1]:
                yield device, handle

    def serve(self, device, handle):
        """Simulate a server that writes to a handle. Return the value that the
        driver remembered, to release the handle with it."""
        self.prepare(device, handle)
        memory = self.memory
        with self.guest(handle):
            self.soil(handle)
        return memory

    def assertClean(self, device, handle, promise, about, *may):
        """Check that the next server finds no data of the previous one.

        :param may: kinds of data that may remain.
        """
        with self.promise(promise, about):
            if device.creatable:
                self.assertIsNone(
                    self.driver.created_type(device, handle),
                    'created_type() says that it is still there')
            self.prepare(device, handle)
            with self.guest(handle):
                left = set(self.remains(handle)) - set(may)
            memory = self.memory
            self.assertFalse(
                left, f'the next server finds {", ".join(sorted(left))}')
            self.release(device, handle, memory)

    # Policies

    def test_policy_clear(self):
        """Under the policy clear, no data remains, and release() returns what
        was done."""
        for device, handle in self.each_handle():
            memory = self.serve(device, handle)
            with self.promise(promises.RELEASE_RETURNS, handle.address):
                done = self.release(device, handle, memory)
                self.assertIsInstance(done, str)
                self.assertTrue(done, 'it returned no word')
            self.assertClean(device, handle, self.cleaning(device, handle),
                             f'{handle.address} under the policy clear')

    def test_policy_reset(self):
        """Under the policy reset, only data that survives a reset remains."""
        self.set_options(handover=['reset'])
        for device, handle in self.each_handle():
            memory = self.serve(device, handle)
            with self.promise(promises.RELEASE_RETURNS, handle.address):
                self.assertTrue(self.release(device, handle, memory),
                                'it returned no word')
            self.assertClean(
                device, handle, promises.RELEASE_POLICY,
                f'{handle.address} under the policy reset',
                *(() if self.DRIVER.RESET_IS_ALL
                  else {*self.LEAVES} - {_REGISTERS}))

    def test_policy_none(self):
        """Under the policies none and operator, release() does nothing."""
        for policy in 'none', 'operator':
            self.set_options(handover=[policy])
            for device, handle in self.each_handle():
                if device.creatable or self.region_of(device, handle):
                    continue
                memory = self.serve(device, handle)
                with self.promise(promises.RELEASE_POLICY,
                                  f'{handle.address} under {policy}'):
                    self.assertIsNone(self.release(device, handle, memory))

    # Kinds of releases

    def test_prepared_again(self):
        """prepare() accepts a guest that starts again, even after a restart of
        nova-compute."""
        for device, handle in self.each_handle():
            memory = self.serve(device, handle)
            self.start()
            self.prepare(device, handle, memory, fresh=False)
            self.clean(device, handle, self.memory,
                       'a guest that started twice')

    def clean(self, device, handle, memory, about):
        with self.promise(self.cleaning(device, handle), handle.address):
            self.release(device, handle, memory)
        self.assertClean(device, handle, self.cleaning(device, handle),
                         f'{handle.address} after {about}')

    def test_build_that_failed(self):
        """release() cleans after a build that failed after prepare()."""
        for device, handle in self.each_handle():
            self.prepare(device, handle)
            self.clean(device, handle, self.memory, 'a build that failed')

    def test_memory_lost(self):
        """release() cleans even if the claim store with the remembered value
        was lost."""
        for device, handle in self.each_handle():
            self.serve(device, handle)
            self.start()
            self.clean(device, handle, None, 'a lost claim store')

    def test_released_twice(self):
        """release() can be called again if its first end was not recorded."""
        for device, handle in self.each_handle():
            memory = self.serve(device, handle)
            self.release(device, handle, memory)
            self.start()
            self.clean(device, handle, memory, 'a second release')

    def test_undone(self):
        """release() restores each attribute that prepare() changed."""
        for device, handle in self.each_handle():
            settings = self._settings(device, handle)
            with self.guest(handle):
                self.soil(handle)
            self.release(device, handle, self.memory)
            self.assertUndone(device, handle, settings)

    def _settings(self, device, handle) -> dict[str, str]:
        """Prepare a handle. Return place -> earlier value of each setting that
        changed."""
        before = self._attributes(device)
        self.prepare(device, handle)
        return {place: before[place] for place, value in self._attributes(
            device).items() if before.get(place, value) != value}

    def assertUndone(self, device, handle, settings):
        with self.promise(promises.RELEASE, handle.address):
            now = self._attributes(device)
            for place, value in settings.items():
                self.assertEqual(
                    value, now.get(place),
                    f'prepare() changed /sys/{place}, and it stays so')

    def _attributes(self, device) -> dict[str, str]:
        """Return place -> text of the attributes of a device's functions."""
        found = {}

        def walk(path):
            for name in self.kernel.listdir(path):
                try:
                    found[f'{path}/{name}'] = self.kernel.read(
                        f'{path}/{name}')
                except IsADirectoryError:
                    if not self._is_link(f'{path}/{name}'):
                        walk(f'{path}/{name}')
                except OSError:
                    # an attribute that can never be read
                    pass
        for function in {device.address, *(
                a for h in device.all_handles for a in h.functions)}:
            if self.kernel.exists(pci.path(function)):
                walk(pci.path(function))
        return found

    def _is_link(self, path) -> bool:
        try:
            return bool(self.kernel.readlink(path))
        except OSError:
            return False

    def test_kept_for_guests(self):
        """A function that the operator bound to vfio-pci stays bound to it."""
        for device, handle in self.each_handle():
            if handle.type is not model.HandleType.PCI or not handle.managed:
                continue
            try:
                for function in handle.addresses:
                    self.kernel.rebind(function, drivers.VFIO)
            except OSError:
                continue
            if not self._is_offered(device.address, handle):
                continue
            self.clean(device, handle, self.serve(device, handle),
                       'a server whose device stays with vfio-pci')
            for function in handle.functions:
                self.assertEqual(drivers.VFIO, pci.driver(
                    self.kernel, function),
                    f'{function} was bound to vfio-pci before')

    def _is_offered(self, address, handle) -> bool:
        """Return whether the driver offers a handle if it has not seen the
        device before."""
        found = self.examine(address)
        if found is None:
            return False
        part = self.region_of(found, handle) or found
        return part.health is model.Health.OK and handle in part.handles

    def test_device_of_a_guest(self):
        """While a guest has a device, it is reported as before."""
        for device, handle in self.each_handle():
            self.prepare(device, handle)
            memory = self.memory
            with self.guest(handle):
                with self.changes_nothing(promises.OF_A_GUEST, device.address):
                    found = self.driver.examine(device.address, device)
                    self.assertIsNotNone(found, 'it is gone')
                    self.assertEqual(
                        model.Health.OK, found.health, found.reason)
                    self.assertIn(handle, found.all_handles,
                                  'the handle of the guest is gone')
                with self.promise(promises.HEALTH, device.address):
                    contract.readings(self.name, self.driver.health(device))
            self.release(device, handle, memory)

    # Failures and crashes

    def test_killed(self):
        """Check that release() cleans a device although nova-compute was
        killed before, after any of the changes that the driver made."""
        device, handle = next(iter(self.each_handle()))
        settings = self._settings(device, handle)
        self.release(device, handle, self.memory)
        number = 0
        while self._killed_after(device, handle, number := number + 1):
            self._after_crash(device, handle, number)
            self.assertUndone(device, handle, settings)

    def _killed_after(self, device, handle, number) -> bool:
        """Kill nova-compute after a change during a server's life and its
        release.

        :returns: whether there were as many changes as the number.
        """
        self.memory = None
        try:
            with self.kernel.watch(kill_after=number):
                self.serve(device, handle)
                memory = self.memory
                self.release(device, handle, memory)
                self.memory = memory
        except kernels.Killed:
            return True
        return False

    def _after_crash(self, device, handle, number):
        memory = self.memory
        self.start()
        self.end_guest(handle)
        self.driver.configure()
        with self.promise(self.cleaning(device, handle), handle.address):
            self.release(device, handle, memory)
        self.assertClean(
            device, handle, self.cleaning(device, handle),
            f'{handle.address}, after nova-compute was killed after change '
            f'{number} of prepare(), the guest and release(), and release() '
            f'was called')
        self.assertEnded()

    def test_operation_that_fails(self):
        """If an operation of release() fails, release() raises or cleans."""
        device, handle = next(iter(self.each_handle()))
        for number in itertools.count(1):
            memory = self.serve(device, handle)
            with self.kernel.watch(fail_at=number) as watched:
                failed = self._fails(
                    lambda: self.release(device, handle, memory))
            if failed:
                with self.promise(promises.RELEASE_AGAIN, handle.address):
                    self.release(device, handle, memory)
            self.assertClean(
                device, handle, self.cleaning(device, handle),
                f'{handle.address}, of whose release change {number} failed'
                f'{", and that was called again" if failed else ""}')
            if watched.steps < number:
                return

    @staticmethod
    def _fails(call) -> bool:
        try:
            call()
        except (exception.AcceleratorError, OSError, kernels.Hung):
            return True
        return False

    def test_faults(self):
        """Each of FAULTS is detected, and leaves no trace when it ends."""
        for name, values in self.FAULTS.items():
            for value in values if isinstance(values, tuple) else (values,):
                with self.subTest(**{name: value}):
                    self.boot_new_host()
                    readings = self._readings()
                    self.kernel.set_fault(self.one.address, **{name: value})
                    noticed = (
                        self.is_noticed() or self._readings() != readings
                        or self._fails(self._serve_and_program))
                    with self.promise(promises.DEFECT, self.one.address):
                        self.assertTrue(
                            noticed, f'no method notices the fault {name} = '
                            f'{value!r} of FAULTS')
                    self.boot_new_host()
                    self.kernel.set_fault(self.one.address, **{name: value})
                    self.is_noticed()
                    self.kernel.set_fault(self.one.address, **{name: None})
                    self.driver.configure()
                    self.assertEnded()

    def _serve_and_program(self):
        """Run a server, and program a region. Errors that the driver raises
        are not caught."""
        device, handle = self.one, self.one.all_handles[0]
        region = self.region_of(device, handle)
        with self.kernel.watch():
            self.driver.prepare(device, handle, self.type_of(device), True,
                                self.use())
            with self.guest(handle):
                self.soil(handle)
            self.release(device, handle, self.memory)
            path = region and self.bitstream(region)
            if path:
                self.driver.program(
                    device, region, self.driver.read_bitstream(path))


class RegionTests(ServerTests):

    def each_region(self):
        """Yield (programmable region, bitstream) for the first device."""
        if not contract._has(self.DRIVER, 'program'):
            self.skipTest(f'{self.DRIVER.__name__} programs nothing.')
        for region in self.one.regions:
            if region.programmable:
                path = self.bitstream(region) or ''
                with self.promise(promises.READ_BITSTREAM, path):
                    found = self.driver.read_bitstream(path)
                    self.assertIsInstance(found, model.Bitstream)
                    self.assertEqual(region.region_type_uuid,
                                     found.region_type_uuid)
                yield region, found

    def test_program(self):
        """examine() reports the function that program() returned."""
        for region, bitstream in self.each_region():
            self.program(region, bitstream)

    def program(self, region, bitstream):
        with self.promise(promises.PROGRAM, region.name):
            self.assertEqual(
                bitstream.function_uuid,
                self.driver.program(self.one, region, bitstream))
            self.assertCarries(region, bitstream)

    def assertCarries(self, region, bitstream):
        device = self.look_again(self.one.address)
        found = device and device.region(region.index).function_uuid
        # None: only a guest can read the function
        self.assertIn(found, (bitstream.function_uuid, None),
                      'examine() finds another function')

    def test_program_is_interrupted(self):
        """The region can be programmed again after any change at which
        nova-compute was killed or the operation failed."""
        for region, bitstream in self.each_region():
            with self.kernel.watch() as watched:
                self.program(region, bitstream)
            for number in range(1, watched.steps + 1):
                self.killed(number, lambda: self.driver.program(
                    self.one, region, bitstream))
                self.program(region, bitstream)
                with self.promise(promises.PROGRAM_FAILS, region.name):
                    self._program_that_fails(number, region, bitstream)
                self.program(region, bitstream)

    def _program_that_fails(self, number, region, bitstream):
        try:
            with self.kernel.watch(fail_at=number):
                self.driver.program(self.one, region, bitstream)
        except exception.ProgrammingFailed:
            return
        self.assertCarries(region, bitstream)

    def test_function_stays(self):
        """reset_region() does not change the function."""
        for region, bitstream in self.each_region():
            self.program(region, bitstream)
            with self.promise(promises.RESET_REGION, region.name):
                self.driver.reset_region(self.one, region)
                self.assertCarries(region, bitstream)

    def test_file_that_is_not_a_bitstream(self):
        for _, bitstream in self.each_region():
            with open(bitstream.path, 'rb') as file:
                good = file.read()
            path = os.path.join(self.directory, 'bad')
            for bad in (b'', b'nonsense', good[:8], good[:len(good) // 2],
                        b'\0' * len(good), b'\xff' * len(good)):
                with open(path, 'wb') as file:
                    file.write(bad)
                with self.promise(promises.READ_BITSTREAM,
                                  f'{len(bad)} bytes of {bad[:8]!r}'):
                    try:
                        self.driver.read_bitstream(path)
                    except (exception.BitstreamError,
                            exception.IncompatibleBitstream) as error:
                        self.assertTrue(str(error))
