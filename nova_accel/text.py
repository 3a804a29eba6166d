# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How an error shows text from users, images and files, and how it is made
short enough for Nova; and how the store writes times."""

from collections.abc import Callable, Sequence
import datetime

#: names that a list in a sentence shows
_NAMED = 3


def some(names: Sequence[str], show: Callable[[str], str] = str) -> str:
    """Return the first of these names, and how many more there are.

    :param show: how a name is written; called for these only.
    """
    more = len(names) - _NAMED
    return ', '.join(map(show, names[:_NAMED])) + (
        f' and {more} more' if more > 0 else '')


def one_line(value: str) -> str:
    """Return a text with escapes in place of what cannot be printed.

    Values of users, as properties of images, are in many sentences. They could
    begin a line of their own in a log, move the cursor of its reader, or turn
    the direction of the text.
    """
    return value if value.isprintable() else ''.join(
        c if c.isprintable() else ascii(c)[1:-1] for c in value)


def printable(value: object, limit: int = 60) -> str:
    """Return value in quotes, in ASCII and cut off after limit characters.

    Escapes keep control characters out of logs and faults.

    :param value: text or any other value; None becomes an empty text.
    """
    shown = ascii('' if value is None else value)
    if len(shown) <= limit:
        return shown
    end = shown[-1] if isinstance(value, (str, bytes)) else ''
    return f'{shown[:limit]}...{end}'


def shortened(sentence: str, room: int) -> str:
    """Return a sentence of at most room characters.

    A longer one loses its middle, because it begins with what was asked, and
    ends with what to do.
    """
    if len(sentence) <= room:
        return sentence
    what, colon, remedy = sentence.rpartition(': ')
    end = f' ...{colon}{remedy}'
    if not colon or len(end) > room:
        what, end = sentence, ' ...'
    return what[:room - len(end)].rpartition(' ')[0].rstrip(',;') + end


def now(days: int = 0) -> str:
    """Return the time, UTC, as 2026-11-22T02:17:43+00:00.

    :param days: how long ago.
    """
    return (datetime.datetime.now(datetime.UTC) - datetime.timedelta(
        days)).isoformat(timespec='seconds')
