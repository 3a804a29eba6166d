# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Wrap functions of Nova. docs/source/contributor/architecture.rst lists them.
"""

from collections.abc import Callable
import functools
import typing

#: attribute of a wrapper: the function that it wraps
ORIGINAL = '_nova_accel_original'


def wrap(owner: typing.Any, name: str, replacement: Callable) -> None:
    """Replace a function of Nova, once.

    :param owner: class, module or object that has the function.
    :param replacement: takes the function, or None if the owner has none, and
        the arguments.
    """
    original = getattr(owner, name, None)
    if hasattr(original, ORIGINAL):
        return

    @functools.wraps(original or replacement)
    def wrapper(*args, **kwargs):
        return replacement(original, *args, **kwargs)
    setattr(wrapper, ORIGINAL, original)
    setattr(owner, name, wrapper)
