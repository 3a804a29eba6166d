# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Text of users in errors and logs, errors short enough for Nova, timestamps of
the store, and labels of metrics."""

from collections.abc import Callable, Sequence
import datetime
import re
import time

#: a label of a sample that notify.metrics wrote
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
#: character after a backslash -> what it means, if not itself
_ESCAPED = {'n': '\n'}

#: number of names that some() shows
_NAMED = 3


def some(names: Sequence[str], show: Callable[[str], str] = str) -> str:
    """Return a text with the first of these names, and how many more there
    are.

    :param show: formats a name; called only for names that are shown.
    """
    more = len(names) - _NAMED
    return ', '.join(map(show, names[:_NAMED])) + (
        f' and {more} more' if more > 0 else '')


def labels(line: str) -> dict[str, str]:
    """Return name -> value of the labels in a line of a metrics file."""
    return {name: re.sub(r'\\(.)', lambda found: _ESCAPED.get(
        found[1], found[1]), value) for name, value in _LABEL.findall(line)}


def one_line(value: str) -> str:
    """Return a text with escapes in place of unprintable characters.

    Sentences contain values of users, for example properties of images. Control
    characters in these could start a new line in a log, move the reader's
    cursor, or reverse the direction of the text.
    """
    return value if value.isprintable() else ''.join(
        c if c.isprintable() else ascii(c)[1:-1] for c in value)


def printable(value: object, limit: int = 60) -> str:
    """Return a value in quotes, in ASCII and cut off after limit characters.

    Escapes keep control characters out of logs and faults.

    :param value: text or any other value; None becomes an empty text.
    """
    shown = ascii('' if value is None else value)
    if len(shown) <= limit:
        return shown
    end = shown[-1] if isinstance(value, (str, bytes)) else ''
    return f'{shown[:limit]}...{end}'


def shortened(sentence: str, room: int) -> str:
    """Return a sentence, cut to at most room characters.

    A longer sentence loses its middle: the beginning has the request, and the
    end has the remedy.
    """
    if len(sentence) <= room:
        return sentence
    what, colon, remedy = sentence.rpartition(': ')
    end = f' ...{colon}{remedy}'
    if not colon or len(end) > room:
        what, end = sentence, ' ...'
    return what[:room - len(end)].rpartition(' ')[0].rstrip(',;') + end


def now(days: float = 0, to: str = 'seconds') -> str:
    """Return a UTC time like 2026-11-22T02:17:43+00:00.

    :param days: number of days before now, negative for a time after now.
    :param to: precision: 'seconds' or 'microseconds'.
    """
    return (datetime.datetime.now(datetime.UTC) - datetime.timedelta(
        days)).isoformat(timespec=to)


def to_second(found: str) -> str:
    """Return a time of now() without its microseconds, for display."""
    return re.sub(r'[.]\d+', '', found)


def moment() -> str:
    """Return a timestamp that does not depend on the wall clock: the boot id
    of the host, and CLOCK_MONOTONIC. All processes of the host share both
    (proc_sys_kernel(5), clock_gettime(2))."""
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as file:
        return f'{file.read().strip()} {time.monotonic()}'


def elapsed(begin: str, end: str) -> float | None:
    """Return the seconds from one moment() to another, or None if the host
    booted between them."""
    boot, _, then = begin.partition(' ')
    this_boot, _, here = end.partition(' ')
    return float(here) - float(then) if boot == this_boot else None
