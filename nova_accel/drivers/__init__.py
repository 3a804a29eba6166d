# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The installed drivers, by entry point name."""

import importlib.metadata

from stevedore import named

from nova_accel.drivers import base
from nova_accel.drivers import contract
from nova_accel import exception

NAMESPACE = 'nova_accel.drivers'


def load(names, kernel) -> dict[str, base.AcceleratorDriver]:
    """Return drivers by name, created for this kernel.

    :param names: entry point names in NAMESPACE.
    :param kernel: a nova_accel.host.kernel.Kernel, or a simulated one.
    :raises UnusableDriver: a module cannot be imported, is for another
        contract, or its class does not state how devices are cleaned.
    :raises ConfigurationError: a name is not installed, or installed twice.
    """
    return {name: _load(name, kernel) for name in names}


def _load(name, kernel):
    # DriverManager of stevedore 5.4 has no callback for a missing one, and
    # logs a line of its own
    try:
        found = named.NamedExtensionManager(
            NAMESPACE, [name], on_load_failure_callback=_failed,
            on_missing_entrypoints_callback=_missing).extensions
    except SystemExit as error:
        raise exception.UnusableDriver(
            f'The driver {name!r} of [accel] enabled_drivers ends the process '
            f'when it is imported ({error!r}): repair its package or disable '
            f'it.') from error
    if len(found) > 1:
        raise exception.ConfigurationError(
            f'The driver {name!r} of [accel] enabled_drivers is installed '
            f'twice, as {" and ".join(e.entry_point.value for e in found)}: '
            f'uninstall one of the packages.')
    extension, = found
    _check_contract(name, extension)
    try:
        driver = extension.plugin(kernel)
        if not isinstance(driver, base.AcceleratorDriver):
            raise TypeError(f'{driver!r} is not an AcceleratorDriver')
        if not isinstance(driver.KEYS, frozenset):
            raise TypeError(f'KEYS is a {type(driver.KEYS).__name__} and not a '
                            f'frozenset')
    except (Exception, SystemExit) as error:
        _failed(None, extension.entry_point, error)
    contract.check_class(name, type(driver))
    return driver


def _check_contract(name, extension):
    # a number that the class inherits is that of its parent
    version = getattr(extension.plugin, '__dict__', {}).get('CONTRACT', 1)
    if (type(version) is int
            and base.OLDEST_CONTRACT <= version <= base.CONTRACT):
        return
    package = extension.entry_point.value.split(':')[0].split('.')[0]
    has = (f'version {base.CONTRACT}' if base.OLDEST_CONTRACT == base.CONTRACT
           else f'versions {base.OLDEST_CONTRACT} to {base.CONTRACT}')
    newer = type(version) is int and version > base.CONTRACT
    raise exception.UnusableDriver(
        f'The driver {name!r} of [accel] enabled_drivers is for version '
        f'{version!r} of the contract for drivers, and this nova_accel has '
        f'{has}: install a '
        + (f'later release of nova_accel, or an earlier one of {package}.'
           if newer else
           f'later release of {package}, or an earlier one of nova_accel.'))


def installed() -> list[str]:
    """Return the names of the installed drivers."""
    return sorted({point.name for point in
                   importlib.metadata.entry_points(group=NAMESPACE)})


def check_installed(option: str, names) -> None:
    """Check that all drivers that an option names are installed.

    :raises ConfigurationError: a driver is not installed.
    """
    if not names:
        # avoids a search of installed packages, which takes tens of
        # milliseconds
        return
    there = installed()
    missing = [name for name in names if name not in there]
    if missing:
        raise exception.ConfigurationError(
            f'{option} names {", ".join(map(repr, missing))}, and installed '
            f'are {", ".join(there) or "none"}: {_instead(missing)}.')


def _instead(missing) -> str:
    """Return the remedy for names of drivers that are not installed."""
    if any(len(name.split()) > 1 for name in missing):
        return 'separate the names by commas'
    return 'correct the name or install the package that has it'


def _missing(names):
    check_installed('[accel] enabled_drivers', names)


def _failed(manager, point, error):
    error = contract.usual(error, 'Loading it')
    raise exception.UnusableDriver(
        f'The driver {point.name!r} of [accel] enabled_drivers cannot be '
        f'loaded from {point.value} ({type(error).__name__}: {error}): repair '
        f'its package or disable it.') from error
