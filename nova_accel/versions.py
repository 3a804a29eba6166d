# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The releases of Nova that this release of nova_accel supports."""

import importlib.metadata

#: the oldest and the newest one; setup.cfg gives pip the same limits
OLDEST, NEWEST = 31, 34


def too_old() -> str:
    """Return a sentence if the installed Nova is too old, otherwise ''."""
    return _sentence(lambda major: major < OLDEST, 'upgrade Nova, or install '
                     'an earlier release of nova_accel')


def too_new() -> str:
    """Return a sentence if the installed Nova is newer than the newest one
    with which this release was tested, otherwise ''."""
    return _sentence(lambda major: major > NEWEST,
                     'install a release of nova_accel that names it')


def _sentence(unfit, remedy: str) -> str:
    try:
        found = importlib.metadata.version('nova')
        major = int(found.partition('.')[0])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        # Nova without package metadata: its release is unknown
        return ''
    if not unfit(major):
        return ''
    ours = importlib.metadata.version('nova_accel')
    return (f'nova_accel {ours} works with Nova {OLDEST} to {NEWEST}, and '
            f'this is Nova {found}: {remedy}.')
