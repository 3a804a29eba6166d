# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel prove: test a driver's operations on a free device.

This is for devices that the authors of nova_accel do not have. Operators can
send them the report, which has neither addresses nor serial numbers.
"""

from collections.abc import Callable, Iterator
import functools
import importlib.metadata
import json
import os
import shutil
import time
import uuid

from nova_accel.cmd import configuration
from nova_accel.cmd import orders
from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel import files
from nova_accel.host import pci
from nova_accel.inventory import identity
from nova_accel import machine
from nova_accel import model

CONF = conf.CONF
OK, FAILED, SKIPPED = 'ok', 'failed', 'skipped'
_ERASES = 'it may change the content of the device: give --erase'


class Prove(output.Table):
    """Test on a disabled device the operations that its driver relies on.

    The device is found, reset and read again, and its regions are reset. A
    vGPU is created and removed. With --erase, the device is also cleaned as
    after a server, which erases disks, and its first region is programmed with
    --bitstream and read back. The exit status is 1 if a step failed. Before
    each step the command checks that the device is still disabled and free.
    nova-accel enable refuses the device during the test.
    """

    COLUMNS = ('Step', 'Result', 'Seconds', 'Found')

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        store.add_device_argument(parser)
        parser.add_argument(
            '--erase', action='store_true',
            help='also run steps that destroy the content of the device')
        parser.add_argument(
            '--bitstream', metavar='FILE',
            help='program the first region with this file; needs --erase')
        parser.add_argument(
            '--report', metavar='FILE', help='also write a report, in JSON')
        return parser

    def take_action(self, parsed_args):
        self.check_columns(parsed_args, self.COLUMNS)
        if parsed_args.bitstream and not parsed_args.erase:
            raise exception.InvalidRequest(
                '--bitstream replaces the function of the device: give '
                '--erase, too.')
        device = _free(store.read(parsed_args), parsed_args.device)
        configuration.use_privileges()
        kernel = machine.open_kernel(CONF.host)
        driver = drivers.load([device.driver], kernel)[device.driver]
        # only a reset leaves the content of the device unchanged
        is_all = parsed_args.erase or driver.RESET_IS_ALL
        CONF.set_override('handover', ['clear' if is_all else 'reset'],
                          group='accel')
        with orders.proving(store.path_of(parsed_args), device.address):
            rows = list(_rows(
                _steps(kernel, driver, device, parsed_args),
                lambda: _free(store.read(parsed_args), device.address),
                self.app.stderr))
        self.status = int(any(row[1] == FAILED for row in rows))
        if parsed_args.report:
            _write(parsed_args.report, kernel, device, rows)
        return self.COLUMNS, rows


def _free(known, name) -> model.Device:
    devices = known.devices()
    address = identity.named(name, devices)
    device = devices[address]
    disabled = identity.disabled(devices, known.disabled(), known.gone())
    if address not in disabled:
        raise exception.InvalidRequest(
            f'{address} cannot be tried while nova-compute may give it to '
            f'a server: run nova-accel disable {address} first.')
    holders = {claim.holder for claim in known.claims()
               if claim.device_address == address
               or claim.serial and claim.serial == device.serial}
    if holders:
        raise exception.InvalidRequest(
            f'{address} cannot be tried while {", ".join(sorted(holders))} '
            f'holds it: run nova-accel drain {address}, and wait until no '
            f'claim is left.')
    if any(row.means(device) for row in known.unsettled()):
        raise exception.InvalidRequest(
            f'{address} cannot be tried, because it may contain data of a '
            f'server: run nova-accel discover for the reason.')
    return device


def _steps(kernel, driver, known, wanted,
           ) -> Iterator[tuple[str, Callable[[], str]]]:
    found: list[model.Device] = []

    def find():
        if known.address not in driver.find():
            raise exception.DeviceError('the driver does not find it')
        device = driver.examine(known.address, known)
        if device is None:
            raise exception.DeviceError('the driver reports another device')
        found.append(device)
        if device.health is not model.Health.OK:
            raise exception.DeviceError(device.reason)
        return (f'regions: {len(device.regions)}, '
                f'handles: {len(device.all_handles)}, '
                f'types: {len(device.creatable)}')

    yield 'find and read', find
    if not found or found[0].health is not model.Health.OK:
        return
    device = found[0]
    yield 'read the serial number', lambda: (
        'present' if driver.serial(device.address) else 'absent')
    yield 'answers', lambda: str(driver.answers(device))
    for finding in driver.check(device):
        yield 'check', functools.partial(
            '{}: {}'.format, finding.found, finding.remedy)
    if device.creatable:
        yield 'create and remove', lambda: _created(driver, device)
    for number, handle in enumerate(device.handles):
        if not device.creatable:
            yield f'reset of handle {number}', functools.partial(
                _released, kernel, driver, device, handle)
    for region in device.regions:
        yield f'reset of {region.name}', functools.partial(
            driver.reset_region, device, region)
    if device.regions:
        yield f'program {device.regions[0].name}', lambda: (
            _programmed(driver, device, wanted.bitstream)
            if wanted.bitstream else _skip(_ERASES + ' and --bitstream'))
    if not (wanted.erase or driver.RESET_IS_ALL or device.regions):
        yield 'clean', lambda: _skip(_ERASES)
    found.clear()
    yield 'find and read again', find


def _rows(steps, check, stderr) -> Iterator[tuple[str, str, str, str]]:
    """Run the steps one after another, and yield a row for each.

    :param check: raises InvalidRequest if the device is no longer free. The
        test then ends.
    :param stderr: stream that shows the present step, if it is a terminal.
    """
    for name, step in steps:
        try:
            check()
        except exception.InvalidRequest as error:
            yield name, FAILED, '0.0', str(error)
            return
        with output.waiting(stderr, name):
            row = _tried(name, step)
        yield row


class _Skipped(Exception):
    pass


def _skip(why):
    raise _Skipped(why)


def _tried(name, step) -> tuple[str, str, str, str]:
    began = time.monotonic()
    try:
        result, said = OK, step() or 'nothing to do'
    except _Skipped as error:
        result, said = SKIPPED, str(error)
    except Exception as error:
        result, said = FAILED, (
            str(error) if isinstance(error, exception.AcceleratorError)
            else f'{type(error).__name__}: {error}')
    return name, result, f'{time.monotonic() - began:.1f}', said


def _created(driver, device) -> str:
    type_ = next((t for t in device.creatable if t.available), None)
    if type_ is None:
        return _skip('no type can be created now')
    handle = device.handles[0]
    driver.prepare(device, handle, type_.name, True, base.Use())
    try:
        shown = driver.created_type(device, handle)
    finally:
        driver.release(device, handle, type_.name, base.Use())
    if shown != type_.name:
        raise exception.DeviceError(
            f'{type_.name} was created, and {shown} is shown')
    return type_.name


def _released(kernel, driver, device, handle) -> str:
    methods = ' '.join(pci.reset_methods(kernel, handle.address))
    done = driver.release(device, handle, None, base.Use())
    shown = base.shown_of(done)
    return (f'{done or "nothing"} (the kernel offers: {methods or "none"})'
            f'{f", read back: {shown}" if shown else ""}')


def _programmed(driver, device, path) -> str:
    # the privileged process accepts only files in the cache
    os.makedirs(CONF.accel.bitstream_cache, exist_ok=True)
    copy = os.path.join(CONF.accel.bitstream_cache, f'prove-{uuid.uuid4()}')
    try:
        shutil.copyfile(path, copy)
        region = device.regions[0]
        bitstream = driver.read_bitstream(copy, os.path.basename(path))
        return f'{driver.program(device, region, bitstream)} was read back'
    finally:
        if os.path.exists(copy):
            os.unlink(copy)


def _write(path, kernel, device, rows):
    try:
        bits = kernel.physical_address_bits()
    except OSError:
        bits = None
    about = {
        'nova_accel': importlib.metadata.version('nova_accel'),
        'linux': os.uname().release, 'machine': os.uname().machine,
        'address_bits': bits,
        'driver': device.driver,
        'kernel_driver': pci.driver(kernel, device.address),
        'vendor': device.vendor_id,
        'product': device.product_id, 'subsystem': device.subsystem,
        'steps': [dict(zip(map(str.lower, Prove.COLUMNS), (
            word.replace(device.address, '<device>') for word in row)))
            for row in rows]}
    try:
        files.replace(path, f'{json.dumps(about, indent=2)}\n')
    except OSError as error:
        raise exception.ConfigurationError(
            f'The report cannot be written to {path} ({error.strerror}): '
            f'give another name.') from error
