# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The installed drivers, by entry point name."""

import importlib.metadata

from stevedore import named

from nova_accel import exception

NAMESPACE = 'nova_accel.drivers'


def load(names, kernel) -> dict:
    """The drivers of these names, made for this kernel, by name.

    :param names: entry point names in NAMESPACE.
    :param kernel: a nova_accel.host.kernel.Kernel, or a simulated one.
    :raises ConfigurationError: when a name is not installed, is installed
        twice, or its module cannot be imported.
    """
    return {name: _load(name, kernel) for name in names}


def _load(name, kernel):
    # DriverManager of stevedore 5.4 has no callback for a missing one, and
    # logs a line beside ours
    found = named.NamedExtensionManager(
        NAMESPACE, [name], invoke_on_load=True, invoke_args=(kernel,),
        on_load_failure_callback=_failed,
        on_missing_entrypoints_callback=_missing).extensions
    if len(found) > 1:
        raise exception.ConfigurationError(
            f'The driver {name!r} of [accel] enabled_drivers is installed '
            f'twice, as {" and ".join(e.entry_point.value for e in found)}: '
            f'uninstall one of the packages.')
    return found[0].obj


def _missing(names):
    installed = sorted({point.name for point in
                        importlib.metadata.entry_points(group=NAMESPACE)})
    raise exception.ConfigurationError(
        f'[accel] enabled_drivers names {", ".join(map(repr, names))}, and '
        f'installed are {", ".join(installed) or "none"}: correct the name or '
        f'install the package that has it.')


def _failed(manager, point, error):
    raise exception.ConfigurationError(
        f'The driver {point.name!r} of [accel] enabled_drivers cannot be '
        f'loaded from {point.value} ({type(error).__name__}: {error}): repair '
        f'its package or disable it.') from error
