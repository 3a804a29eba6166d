# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check the return values of drivers, which may come from other packages: a
wrong value must affect only its device.
"""

from collections.abc import Iterable
import contextlib
import dataclasses
import functools
import itertools
import types
import typing

from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.health import signals
from nova_accel import model
from nova_accel import text

#: maximum number of readings of one device
_MOST_READINGS = 256
#: maximum number of devices of one driver: find() of a defective driver may
#: yield them without end
_MOST = 4096


def attends(driver: type[base.AcceleratorDriver]) -> bool:
    """Return whether nova-compute calls prepare() and release() for every
    handle, because the class overrides one of them or sets RESETS. Otherwise
    it calls them only for handles that are created on demand."""
    return _cleans(driver) or _has(driver, 'prepare')


def confines(driver: type[base.AcceleratorDriver]) -> bool:
    """Return whether a driver removes a guest's means to reprogram devices."""
    return _has(driver, 'confine')


def sets_up(driver: type[base.AcceleratorDriver]) -> bool:
    """Return whether a driver sets up single devices."""
    return _has(driver, 'set_up')


def is_of_bus(driver: type[base.AcceleratorDriver]) -> bool:
    """Return whether the bus reports all signals of a driver's devices: the
    class is a PciDriver that does not override health()."""
    return issubclass(driver, base.PciDriver) and not _has(driver, 'health')


def check_class(name: str, driver: type[base.AcceleratorDriver]) -> None:
    """Check that the methods and attributes of a class state how its devices
    are cleaned.

    :raises UnusableDriver: they do not state it, or contradict each other.
    """
    has, remedy = _ambiguous(driver)
    if has:
        raise exception.UnusableDriver(
            f'The driver {name!r} of [accel] enabled_drivers cannot be loaded '
            f'because its class {driver.__module__}.{driver.__qualname__} has '
            f'{has}: {remedy}.')


def _ambiguous(driver) -> tuple[str, str]:
    """Return the contradictory or missing attributes of a class, and the
    remedy, or ('', '')."""
    resets = getattr(driver, 'RESETS', False)
    if resets and not issubclass(driver, base.PciDriver):
        return ('RESETS, which only a PciDriver has',
                'derive it from PciDriver, or remove RESETS and reset the '
                'device in release()')
    if not _cleans(driver) and not _has(driver, 'reset_region'):
        return (f'{"prepare() and " if _has(driver, "prepare") else ""}no '
                f'release(), RESETS or reset_region()',
                'to clean its devices after a server, write release(), or '
                'reset_region() for devices with regions, or set RESETS = True '
                'in a PciDriver')
    return '', ''


def _cleans(driver) -> bool:
    return _has(driver, 'release') or bool(getattr(driver, 'RESETS', False))


def _has(driver, method: str) -> bool:
    """Return whether a class overrides a method of base."""
    return getattr(driver, method) not in (
        getattr(base.AcceleratorDriver, method),
        getattr(base.PciDriver, method))


def addresses(driver: str, found: Iterable[typing.Any]) -> tuple[str, ...]:
    """Return the result of AcceleratorDriver.find().

    :raises DeviceError: the result is not a list of addresses.
    """
    result = tuple(itertools.islice(found, _MOST + 1))
    wrong = [item for item in result if not _is_text(item) or not item]
    if wrong or len(result) > _MOST:
        raise exception.DeviceError(
            f'The driver {driver} finds '
            + (f'{wrong[0]!r}, which is not the address of a device'
               if wrong else f'more than {_MOST} devices')
            + ': correct the driver.')
    return result


def serial(driver: str, found: typing.Any) -> str | None:
    """Return the result of AcceleratorDriver.serial(), as commands print it.

    :raises DeviceError: the result is not a text.
    """
    if found is None or _is_text(found):
        return found and text.one_line(found)
    raise exception.DeviceError(
        f'the driver {driver} reads {found!r}, which is not a text')


def left_out(driver: base.AcceleratorDriver, device: model.Device) -> str:
    """Return the result of AcceleratorDriver.left_out(), or '' if the call
    fails."""
    with contextlib.suppress(Exception):
        found = driver.left_out(device)
        return found if _is_text(found) else ''
    return ''


def device(driver: str, address: str, found: typing.Any,
           ) -> model.Device | None:
    """Return the result of AcceleratorDriver.examine() or confine().

    :raises DeviceError: the result is not a device, is another device, or a
        field is not of the type in model.
    """
    if found is None:
        return None
    wrong = _wrong(found, model.Device, 'the device')
    if not wrong and found.address != address:
        wrong = f'the device {found.address}'
    if not wrong and found.driver != driver:
        wrong = f'a device of the driver {found.driver!r}'
    indexes = [] if wrong else [region.index for region in found.regions]
    if len({*indexes}) < len(indexes):
        wrong = 'two regions of one number'
    if wrong:
        raise exception.DeviceError(
            f'The driver {driver} was asked for {address}, and reports '
            f'{wrong}: correct the driver.')
    return found


def readings(driver: str, found: Iterable[typing.Any],
             ) -> tuple[signals.Reading, ...]:
    """Return the result of AcceleratorDriver.health().

    :raises DeviceError: the result contains anything but readings of known
        signals.
    """
    result = tuple(itertools.islice(found, _MOST_READINGS + 1))
    wrong = [item for item in result if not (
        isinstance(item, signals.Reading) and item.signal in signals.SIGNALS
        and type(item.value) is int and _is_text(item.about))]
    if wrong or len(result) > _MOST_READINGS:
        raise exception.DeviceError(
            f'The driver {driver} reads '
            + (f'{wrong[0]!r}, which is not a signal with a number and a text'
               if wrong else f'more than {_MOST_READINGS} signals')
            + ' as the health of a device: correct the driver.')
    return result


def usual(error: BaseException, what: str) -> Exception:
    """Return an Exception that can be logged, in place of any error of another
    package. The error may be a BaseException, or its str() may fail."""
    try:
        if isinstance(error, Exception):
            str(error), repr(error)
            return error
        said = repr(error)
    except BaseException:
        said = f'a {type(error).__name__} without a text'
    return exception.DeviceError(
        f'{what} ended in {said}: correct the driver.')


def _is_text(value) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeError:
        # SQLite and JSON refuse a lone surrogate
        return False
    return True


@functools.cache
def _fields(kind: typing.Any):
    return typing.get_type_hints(kind)


def _wrong(value, kind: typing.Any, name) -> str:
    """Return a clause about the part of a value that has a wrong type, or ''.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return ('' if any(not _wrong(value, part, name) for part in parts)
                else f'{value!r} as {name}')
    if origin is tuple:
        if not isinstance(value, tuple):
            return f'{value!r} as {name}'
        kinds = ([parts[0]] * len(value) if parts[-1] is Ellipsis
                 else list(parts))
        if len(kinds) != len(value):
            return f'{value!r} in {name}'
        return next(filter(None, map(
            _wrong, value, kinds, itertools.repeat(name))), '')
    if kind is str:
        return '' if _is_text(value) else f'{value!r} as {name}'
    if kind is int:
        # the largest number that SQLite and Placement accept
        fits = isinstance(value, int) and abs(value) < 1 << 31
        return '' if fits else f'{value!r} as {name}'
    if not isinstance(value, kind):
        return f'{value!r} as {name}'
    if dataclasses.is_dataclass(kind):
        fields = _fields(typing.cast(typing.Any, kind))
        return next(filter(None, (
            _wrong(getattr(value, field), of, field)
            for field, of in fields.items())), '')
    return ''
