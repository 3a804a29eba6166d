# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Change nova.conf, as a diff that keeps comments and order."""

from collections.abc import Iterable, Iterator
import difflib
import typing

from oslo_config import iniparser

from nova_accel import exception


class Entry(typing.NamedTuple):
    """An option, at the place where a file sets it."""

    #: as oslo.config compares sections: lower case, except DEFAULT
    section: str
    key: str
    value: str
    #: numbers of its first line, and of the line after its last one, from 0
    begin: int
    end: int


class File(iniparser.BaseParser):
    """A configuration file as oslo.config reads it, and its planned changes.
    """

    def __init__(self, path: str):
        self.path = path
        self.entries: list[Entry] = []
        self._section = 'DEFAULT'
        #: number of the last line of each non-empty section
        self._last: dict[str, int] = {}
        self._headers: dict[str, list[int]] = {}
        try:
            with open(path, encoding='utf-8') as file:
                self._before = file.readlines()
            self.parse(self._before)
        except (OSError, UnicodeDecodeError, iniparser.ParseError) as error:
            raise exception.ConfigurationError(
                f'{path} cannot be read ({error}): correct it, or make it '
                f'readable.') from error
        if self._before and not self._before[-1].endswith('\n'):
            self._before[-1] += '\n'
        #: number of a line -> the lines that replace it
        self._after = [[line] for line in self._before]
        #: number of a line -> the lines to insert after it
        self._behind: list[list[str]] = [[] for _ in self._before]
        self._more: list[str] = []

    # called by oslo.config

    def new_section(self, section):
        """Note the beginning of a section, for iniparser.BaseParser."""
        self._section = section if section == 'DEFAULT' else section.lower()
        self._last[self._section] = self.lineno - 1
        self._headers.setdefault(self._section, []).append(self.lineno - 1)

    def _split_key_value(self, line):
        self._begin = self.lineno - 1
        return super()._split_key_value(line)

    def assignment(self, key, value):
        """Note the setting of an option, for iniparser.BaseParser."""
        end = self._begin + len(value)
        self.entries.append(Entry(self._section, key, '\n'.join(value),
                                  self._begin, end))
        self._last[self._section] = end - 1

    # Changes

    def has(self, section: str) -> bool:
        return section in self._headers

    def drop(self, entry: Entry) -> None:
        """Remove an option. Remove its section, too, if no option is left
        there."""
        self.put(entry)
        if not any(any(self._after[e.begin:e.end]) for e in self.entries
                   if e.section == entry.section
                   ) and entry.section.startswith(('mdev_', 'vgpu_')):
            for line in self._headers[entry.section]:
                self._after[line] = []

    def put(self, entry: Entry, *values: str) -> None:
        """Set an option to these values, each on its own line."""
        for number in range(entry.begin, entry.end):
            self._after[number] = []
        self._after[entry.begin] = [f'{entry.key} = {value}\n'
                                    for value in values]

    def add(self, section: str, key: str, values: Iterable[str]) -> None:
        """Add an option at the end of a section."""
        lines = [f'{key} = {value}\n' for value in values]
        if section in self._last:
            self._behind[self._last[section]] += lines
            return
        if f'[{section}]\n' not in self._more:
            self._more += ['\n', f'[{section}]\n']
        self._more += lines

    def text(self) -> str:
        """Return the changed file."""
        return ''.join(line for after, behind in zip(
            self._after, self._behind) for line in (*after, *behind)
            ) + ''.join(self._more)

    def diff(self) -> Iterator[str]:
        """Yield the lines of a unified diff between the file and its planned
        changes.

        The diff has no context lines, because nova.conf contains passwords.
        The header of each hunk names the section of nova.conf.
        """
        for line in difflib.unified_diff(
                self._before, self.text().splitlines(True), self.path,
                self.path, n=0):
            if line.startswith('@@ '):
                number = int(line.split()[1][1:].partition(',')[0])
                line = f'{line.rstrip()} {self._header(number)}\n'
            yield line

    def _header(self, number):
        before = [(line, f'[{name}]') for name, lines in self._headers.items()
                  for line in lines if line < number]
        return max(before, default=(0, ''))[1]
