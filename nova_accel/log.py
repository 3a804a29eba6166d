# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Loggers that write each record on one line, even if values have line breaks.

Values include properties of images, metadata, texts of firmware, and errors of
libvirt and other services. A newline in one of them could begin a line that
looks like a line of nova-compute.
"""

from collections.abc import Callable, Collection, Mapping
import logging
import typing

from oslo_log import log

from nova_accel import text


class Lines(str):
    """A text of several lines, such as a stack, that is not escaped."""


class _Shown:
    """A value for a log line, escaped only if the line is written."""

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
    """Logs a line about a subject only if it differs from the last such line.

    A subject is a tuple, and its first item is the kind. Thread-safe.
    """

    def __init__(self):
        #: subject -> its last line
        self._logged: dict[tuple, tuple] = {}

    def log(self, about: tuple, write: Callable[..., None], message: str,
            *values: object) -> None:
        """Write a line, unless it equals the last line about the same subject.

        :param about: the subject.
        :param write: method of a logger for the level.
        """
        line = message, *map(str, values)
        if self._logged.get(about) != line:
            self._logged[about] = line
            write(message, *values)

    def has(self, about: tuple) -> bool:
        """Return whether the last line about a subject has been remembered."""
        return about in self._logged

    def forget(self, *about: object) -> None:
        """Forget the last line about a subject. Its next line is written."""
        self._logged.pop(about, None)

    def only(self, kind: str, names: Collection[object]) -> bool:
        """Forget subjects that no longer exist: those of a kind whose second
        item is not in names.

        :returns: whether a subject was forgotten.
        """
        before = list(self._logged.items())
        self._logged = {about: line for about, line in before
                        if about[0] != kind or about[1] in names}
        return len(self._logged) < len(before)


def getLogger(name: str) -> log.BaseLoggerAdapter:
    """Return a logger of oslo.log, which escapes control characters in values.
    """
    # addFilter() adds a filter only once
    logging.getLogger(name).addFilter(_escape)
    return log.getLogger(name)
