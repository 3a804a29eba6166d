# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The installed drivers, by entry point name."""

import importlib.metadata

from stevedore import driver as stevedore_driver
from stevedore import exception as stevedore_exception

from nova_accel import exception

NAMESPACE = 'nova_accel.drivers'


def load(names, kernel) -> dict:
    """The drivers of these names, made for this kernel, by name.

    :param names: entry point names in NAMESPACE.
    :param kernel: a nova_accel.host.kernel.Kernel, or a simulated one.
    :raises ConfigurationError: when a name is not installed or its module
        cannot be imported.
    """
    return {name: _load(name, kernel) for name in names}


def _load(name, kernel):
    try:
        return stevedore_driver.DriverManager(
            NAMESPACE, name, invoke_on_load=True, invoke_args=(kernel,),
            on_load_failure_callback=_failed).driver
    except stevedore_exception.NoMatches:
        installed = sorted({point.name for point in
                            importlib.metadata.entry_points(group=NAMESPACE)})
        raise exception.ConfigurationError(
            f'[accel] enabled_drivers names {name!r}, and installed are '
            f'{", ".join(installed) or "none"}: correct the name or install '
            f'the package that has it.') from None


def _failed(manager, point, error):
    raise exception.ConfigurationError(
        f'The driver {point.name!r} of [accel] enabled_drivers cannot be '
        f'loaded from {point.value} ({type(error).__name__}: {error}): repair '
        f'its package or disable it.') from error
