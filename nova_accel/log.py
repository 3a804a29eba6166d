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
    """Logs each subject once, until its line changes.

    A subject is a tuple, whose first item is its kind. Any thread may call
    this.
    """

    def __init__(self):
        #: subject -> its last line
        self._logged: dict[tuple, tuple] = {}

    def log(self, about: tuple, write: Callable[..., None], message: str,
            *values: object) -> None:
        """Write a line, unless it is the last one about this subject.

        :param write: a method of a logger.
        """
        line = message, *map(str, values)
        if self._logged.get(about) != line:
            self._logged[about] = line
            write(message, *values)

    def has(self, about: tuple) -> bool:
        """Return whether a line about a subject was written."""
        return about in self._logged

    def forget(self, *about: object) -> None:
        """Write the next line about a subject, also if it is the same."""
        self._logged.pop(about, None)

    def only(self, kind: str, names: Collection[object]) -> bool:
        """Forget the subjects of a kind whose second item is not among names.

        :returns: whether one was forgotten.
        """
        before = list(self._logged.items())
        self._logged = {about: line for about, line in before
                        if about[0] != kind or about[1] in names}
        return len(self._logged) < len(before)


def getLogger(name: str) -> log.BaseLoggerAdapter:
    """Return a logger as that of oslo.log; values in its messages have no
    control characters."""
    # the same filter is added once only
    logging.getLogger(name).addFilter(_escape)
    return log.getLogger(name)
