# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Loggers of which each record is one line, whatever its values are.

A record shows properties of images, metadata, texts of firmware and errors of
libvirt and of other services. A newline in one of them would begin a line of
its own, which reads as if nova-compute had written it.
"""

from collections.abc import Callable, Collection, Mapping
import logging
import typing

from oslo_log import log

from nova_accel import text


class Lines(str):
    """A text of several lines that nova_accel made, such as a stack."""


class _Shown:
    """A value as it is shown, with escapes; the text is made only for a line
    that is written."""

    def __init__(self, value: object):
        self._value = value

    def __str__(self):
        return text.one_line(str(self._value))

    def __repr__(self):
        return text.one_line(repr(self._value))


def _shown(value: typing.Any) -> typing.Any:
    return (value if value is None or isinstance(value, (int, float, Lines))
            else _Shown(value))


def _escape(record: logging.LogRecord) -> bool:
    if isinstance(record.args, Mapping):
        record.args = {key: _shown(value)
                       for key, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_shown, record.args))
    return True


class Once:
    """What the log has said of things: each is said once, until it changes.

    A thing is known by a tuple, of which the first item is its kind. Any
    thread may call this.
    """

    def __init__(self):
        self._said: dict[tuple, tuple] = {}

    def say(self, about: tuple, write: Callable[..., None], message: str,
            *values: object) -> None:
        """Write a line, unless it is the last one about this thing.

        :param write: a method of a logger.
        """
        line = message, *map(str, values)
        if self._said.get(about) != line:
            self._said[about] = line
            write(message, *values)

    def has(self, about: tuple) -> bool:
        """Whether something was said about a thing."""
        return about in self._said

    def forget(self, *about: object) -> None:
        """A thing is well again: what comes next is said."""
        self._said.pop(about, None)

    def only(self, kind: str, names: Collection[object]) -> bool:
        """Forget the things of a kind but those of these names, which are the
        second items.

        :returns: whether one was forgotten.
        """
        said = list(self._said.items())
        self._said = {about: line for about, line in said
                      if about[0] != kind or about[1] in names}
        return len(self._said) < len(said)


def getLogger(name: str) -> log.BaseLoggerAdapter:
    """Return a logger as that of oslo.log; values in its messages have no
    control characters."""
    # the same filter is added once only
    logging.getLogger(name).addFilter(_escape)
    return log.getLogger(name)
