# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Print tables for people, and the same data in other formats."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import logging
import os
import re
import textwrap
import threading
import time
import typing
import uuid

from cliff import command
from cliff import lister
from cliff import utils

from nova_accel import model
from nova_accel import text

#: hint if nothing was found
NAMES = ('give the address of a device, as nova-accel discover shows it, or '
         'the UUID of a server')
#: exit status if nothing matches the arguments
NOTHING = 4

RED, GREEN, YELLOW = 31, 32, 33

#: formats for programs, in which missing values are null
_STRUCTURED = ('json', 'yaml')
#: width of a table that is not printed on a terminal
_WIDTH = 100
#: matches the result of colored()
_COLORED = re.compile(r'(\033\[\d+m)(.*)\033\[0m', re.DOTALL)


class Status(command.Command):
    """A command whose action sets the exit status.

    Its help has no epilog. cliff (4.17) would print the name of the package
    there, and read the metadata of all packages for it.
    """

    #: exit status of a command that ends without an error
    status = 0

    def run(self, parsed_args):
        return super().run(parsed_args) or self.status

    def get_epilog(self):
        """Return '', in place of the epilog of cliff.command.Command."""
        return ''


class Table(Status, lister.Lister):
    """A table that refuses unknown columns, as argparse refuses arguments."""

    #: names of the columns for programs: they are stable, and
    #: tests/unit/data/columns.yaml lists them
    COLUMNS: tuple[str, ...]
    #: whether an empty line follows each row of the table
    _is_spaced = False

    def produce_output(self, parsed_args, column_names, data):
        self.check_columns(parsed_args, column_names)
        if parsed_args.formatter in _STRUCTURED:
            data = [[None if cell == '' else cell for cell in row]
                    for row in data]
        elif parsed_args.formatter == 'table':
            shown = [column in (parsed_args.columns or column_names)
                     for column in column_names]
            data = _fitted(column_names, list(data), shown, (
                parsed_args.max_width or (
                    utils.terminal_width() if self.app.stdout.isatty()
                    else 0) or _WIDTH))
            for row in data[:-1] if self._is_spaced else ():
                lines = max(cell.count('\n') for cell in row)
                row[0] += '\n' * (lines + 1 - row[0].count('\n'))
        return super().produce_output(parsed_args, column_names, data)

    def check_columns(self, parsed_args, column_names):
        """Refuse an unknown --column before the command begins.

        :raises SystemExit: after a sentence on stderr, like argparse.
        """
        known = {_normalized(column): column for column in column_names}
        for column in parsed_args.columns:
            if _normalized(column) not in known:
                self.app.stderr.write(
                    f'{self.cmd_name or self.app.NAME}: error: argument '
                    f'-c/--column: unknown column {column!r}: choose from '
                    f'{", ".join(map(repr, column_names))}.\n')
                raise SystemExit(2)
        # cliff 4.9 accepts only the displayed names
        parsed_args.columns = [
            known[_normalized(column)] for column in parsed_args.columns]


class Lister(Table):
    """A table in whose place a sentence is printed if it has no rows."""

    #: the sentence in place of an empty table
    nothing = ''
    #: whether the arguments select objects by name
    is_search = False
    #: table for people: heading -> templates of the lines of a cell, with names
    #: of COLUMNS; empty lines are omitted
    STACKS: Mapping[str, Sequence[str]] = {}

    def run(self, parsed_args):
        self._format = parsed_args.formatter
        return super().run(parsed_args)

    def produce_output(self, parsed_args, column_names, data):
        data = list(data)
        self.note_empty(not data)
        if data or not self.for_people:
            if self.STACKS and self.for_people and not (
                    parsed_args.columns or parsed_args.sort_columns):
                column_names, data = self._stacked(data)
            return super().produce_output(parsed_args, column_names, data)
        self.app.stdout.write(f'{self.nothing}\n')
        return 0

    def note_empty(self, is_empty: bool) -> None:
        """Set the exit status if nothing matches the arguments."""
        if is_empty and self.is_search:
            self.status = self.status or NOTHING

    def _stacked(self, data):
        """Return (headings, rows), with cells combined as STACKS defines."""
        rows = []
        for row in data:
            known = {name: str(cell).removesuffix('+00:00')
                     for name, cell in zip(self.COLUMNS, row) if cell != ''}
            rows.append(['\n'.join(dict.fromkeys(
                line.format_map(known) for line in lines
                if re.findall(r'{(.+?)}', line)[0] in known))
                for lines in self.STACKS.values()])
        self._is_spaced = any('\n' in cell for row in rows for cell in row)
        return tuple(self.STACKS), rows

    @property
    def for_people(self) -> bool:
        return self._format == 'table'

    @property
    def structured(self) -> bool:
        """Return whether the format has lists and mappings, like JSON."""
        return self._format in _STRUCTURED

    def several(self, texts: list[str]) -> str | list[str]:
        """Return several texts as one cell: lines in a table, a list in JSON.
        """
        if self.structured:
            return texts
        return ('\n' if self.for_people else ', ').join(texts)

    def identifier(self, value: str | None) -> str:
        """Return a UUID, or only its first eight digits in a table.

        :param value: a UUID in any spelling; None becomes an empty text.
        """
        return identifier(value)[:8 if self.for_people else None]

    def colored(self, text: str, color: int) -> str:
        """Return a text in a color (ECMA-48) if a terminal shows it.

        The environment variable NO_COLOR (no-color.org) prevents that.
        """
        if (text and self.for_people and self.app.stdout.isatty()
                and not os.environ.get('NO_COLOR')):
            return f'\033[{color}m{text}\033[0m'
        return text


def _fitted(names, rows, shown, width):
    """Return the rows for a table of this width. Break long cells between
    words until the table fits, as far as possible."""
    texts = [[str(cell) for cell in column] for column in zip(*rows)]
    widths = [[max(map(len, (name, *map(_plain, split(column)))))
               for name, column in zip(names, texts)]
              for split in (_words, _lines)]
    width -= 3 * sum(shown) + 1
    for most in range(max(width, 1), 0, -1):
        fitting = [max(least, min(most, all_of_it))
                   for least, all_of_it in zip(*widths)]
        if sum(one for one, is_shown in zip(fitting, shown)
               if is_shown) <= width:
            break
    return [[_wrapped(cell, most) if isinstance(cell, str) else cell
             for cell, most in zip(row, fitting)] for row in rows]


def _lines(column):
    return '\n'.join(column).split('\n')


def _words(column):
    """Return the parts of a column's cells that must stay on one line: single
    words, or both words of a line with two words."""
    return [word for line in _lines(column)
            # a cell of a tree begins with spaces
            for word in re.findall(r'^ *[^ ]+(?: [^ ]+)?$|^ *[^ ]+|[^ ]+',
                                   line)]


def _plain(text):
    return re.sub(r'\033\[\d+m', '', text)


def _wrapped(cell, width):
    colored = _COLORED.fullmatch(cell)
    color, cell = colored.groups() if colored else ('', cell)
    return '\n'.join(
        f'{color}{part}\033[0m' if color else part
        for line in cell.split('\n')
        for part in textwrap.wrap(text.one_line(line), width,
                                  break_long_words=False,
                                  break_on_hyphens=False) or [''])


def identifier(value: str | None) -> str:
    """Return a UUID of any spelling with hyphens, or '' for None."""
    return str(uuid.UUID(value)) if value else ''


def _normalized(column: str) -> str:
    """Return the name of a column in the spelling of --column in cliff 4.17:
    lower case, with underscores."""
    return column.lower().strip().replace(' ', '_')


def state(claim: model.Claim) -> str:
    """Return the state of a claim, followed by 'old' if a resize replaced the
    device."""
    shown = claim.state.value
    return shown if claim.role is model.Role.CURRENT else f'{shown}, old'


def clean(text: object) -> str:
    """Return a text without control characters, which could move the cursor of
    an operator's terminal. Users choose such texts, for example names."""
    return ''.join(c if c.isprintable() else '?' for c in str(text))


@contextlib.contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Log no warnings and errors of a logger inside the context."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def waiting(stream: typing.TextIO | None, what: str,
            limit: int | None = None) -> Iterator[None]:
    """Show the reason and the duration of a wait, inside the context.

    :param stream: shows them if it is a terminal. None if it is closed.
    :param what: the reason.
    :param limit: maximum number of seconds of the wait.
    """
    if stream is None or not stream.isatty():
        yield
        return
    began, ended = time.monotonic(), threading.Event()

    def write(text):
        # the command continues even if the terminal was closed
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()

    def show():
        most = f' of at most {limit} s' if limit else ''
        while True:
            text = f'{time.monotonic() - began:.0f} s{most}: {what}'
            width = utils.terminal_width() or _WIDTH
            write(f'\r{text[:width - 1]}\033[K')
            if ended.wait(1):
                return
    shows = threading.Thread(target=show, daemon=True)
    shows.start()
    try:
        yield
    finally:
        ended.set()
        shows.join()
        write('\r\033[K')
