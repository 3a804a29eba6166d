# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What differs between a table for people and the other formats."""

import os
import uuid

from cliff import lister

RED, GREEN, YELLOW = 31, 32, 33

#: formats for programs, in which what is not there is null
_STRUCTURED = ('json', 'yaml')


class NoEpilog:
    """A command without the name of its package under its help, for which
    cliff (4.17) reads the metadata of all packages at each start."""

    def get_epilog(self):
        """See cliff.command.Command."""
        return ''


class Table(NoEpilog, lister.Lister):
    """A list; an unknown column is an error of the arguments."""

    #: names of the columns, as programs read them: a promise, of which
    #: tests/unit/data/columns.yaml has the words
    COLUMNS: tuple[str, ...]

    def produce_output(self, parsed_args, column_names, data):
        self.check_columns(parsed_args, column_names)
        if parsed_args.formatter in _STRUCTURED:
            data = [[None if cell == '' else cell for cell in row]
                    for row in data]
        return super().produce_output(parsed_args, column_names, data)

    def check_columns(self, parsed_args, column_names):
        """Refuse an unknown --column; before it acts, of a command that does.

        :raises SystemExit: after a sentence on stderr, as argparse does.
        """
        known = {_normalized(column): column for column in column_names}
        for column in parsed_args.columns:
            if _normalized(column) not in known:
                self.app.stderr.write(
                    f'{self.cmd_name or self.app.NAME}: error: argument '
                    f'-c/--column: unknown column {column!r}: choose from '
                    f'{", ".join(map(repr, column_names))}.\n')
                raise SystemExit(2)
        # cliff 4.9 knows the names as they are shown only
        parsed_args.columns = [
            known[_normalized(column)] for column in parsed_args.columns]


class Lister(Table):
    """A list that is a sentence where it would be an empty table."""

    #: that sentence
    nothing = ''

    def take_action(self, parsed_args):
        self._format = parsed_args.formatter
        return self.table(parsed_args)

    def table(self, parsed_args):
        """Return (names of columns, rows), as cliff's take_action() does."""
        raise NotImplementedError

    def produce_output(self, parsed_args, column_names, data):
        data = list(data)
        if data or not self.for_people:
            return super().produce_output(parsed_args, column_names, data)
        self.app.stdout.write(f'{self.nothing}\n')
        return 0

    @property
    def for_people(self) -> bool:
        """Whether the format is a table."""
        return self._format == 'table'

    @property
    def structured(self) -> bool:
        """Whether a cell of the format may be a list or a mapping."""
        return self._format in _STRUCTURED

    def several(self, texts: list[str]) -> str | list[str]:
        """Return a cell of several texts: lines in a table, a list in JSON."""
        if self.structured:
            return texts
        return ('\n' if self.for_people else ', ').join(texts)

    def identifier(self, value: str | None) -> str:
        """Return a UUID, of which a table shows the first eight digits.

        :param value: in any spelling; None becomes an empty text.
        """
        if not value:
            return ''
        return str(uuid.UUID(value))[:8 if self.for_people else None]

    def colored(self, text: str, color: int) -> str:
        """Return a text in a color (ECMA-48) where a terminal shows it.

        The environment variable NO_COLOR (no-color.org) prevents that.
        """
        if (text and self.for_people and self.app.stdout.isatty()
                and not os.environ.get('NO_COLOR')):
            return f'\033[{color}m{text}\033[0m'
        return text


def _normalized(column: str) -> str:
    """Return the name of a column as --column has it, as in cliff 4.17."""
    return column.lower().strip().replace(' ', '_')


def clean(text: object) -> str:
    """Return a name that a user chose, without control characters.

    They could move the cursor of an operator's terminal.
    """
    return ''.join(c if c.isprintable() else '?' for c in str(text))
