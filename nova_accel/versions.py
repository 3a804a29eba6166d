# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Releases of Nova that this release works with."""

import importlib.metadata

#: the first and the last one; setup.cfg says the same to pip
OLDEST, NEWEST = 31, 34


def too_old() -> str:
    """Return why the installed Nova is too old, as a sentence; or ''."""
    return _sentence(lambda major: major < OLDEST, 'upgrade Nova, or install '
                     'an earlier release of nova_accel')


def too_new() -> str:
    """Return that the installed Nova is later than the last one that was
    tested with this release, as a sentence; or ''."""
    return _sentence(lambda major: major > NEWEST,
                     'install a release of nova_accel that names it')


def _sentence(unfit, remedy: str) -> str:
    try:
        found = importlib.metadata.version('nova')
        major = int(found.partition('.')[0])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        # of a Nova without metadata nothing is known
        return ''
    if not unfit(major):
        return ''
    ours = importlib.metadata.version('nova_accel')
    return (f'nova_accel {ours} works with Nova {OLDEST} to {NEWEST}, and '
            f'this is Nova {found}: {remedy}.')
