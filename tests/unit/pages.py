# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the pages of the documentation tell their readers to type."""

import argparse
import configparser
import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import pathlib
import re
import shlex
import textwrap

from nova.scheduler import filters
from nova.scheduler import weights
import yaml

from nova_accel.cmd import main

ROOT = pathlib.Path(__file__).parents[2]
#: of the wheel, as an index of packages shows it
DESCRIPTION = ROOT / 'docs' / 'description.rst'

_PROMPT = re.compile(r'(?:\$ |# |lab# (?:lab-vm )?)?(?:sudo (?:-u \w+ )?)?'
                     r'(?:docker exec (?:-\w \w+ )*\w+ )?'
                     r'(?=(?:nova-accel|openstack) )')
#: of nova.conf
_SECTION = re.compile(r'\[(\w+|mdev_[\w-]+)\]')
#: from its first key to a blank line before another text, or the end of a
#: document in the shell
_PROFILE = re.compile(r'^(- )?name: .+\n(.*\n)*?[ ]*groups:\n'
                      r'([ ].*\n?|- .*\n?|\n(?=- name: ))+', re.MULTILINE)
#: a variable of the shell, and what a UUID in it may be
_VARIABLE = re.compile(r'\$[A-Z]+')
_ANY_UUID = '5d1f7a90-c3b8-4e26-9f01-2b7c6a0e4d13'
_LITERAL = re.compile(r'``(.+?)``', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Page:
    """A page in reStructuredText."""

    path: pathlib.Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def __name__(self) -> str:
        # ddt names tests by it
        return self.path.stem

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text()

    @functools.cached_property
    def blocks(self) -> list[str]:
        """The literal blocks, without their indentation."""
        found, lines = [], self.text.splitlines()
        for number, line in enumerate(lines):
            plain = line.lstrip()
            if plain.endswith('::') and (
                    not plain.startswith('.. ')
                    or plain.startswith('.. code-block::')):
                found.append(_indented(
                    lines[number + 1:], len(line) - len(plain)))
        return found

    @functools.cached_property
    def literals(self) -> list[str]:
        """What stands between double backquotes, each on one line."""
        prose = self.text
        for block in self.blocks:
            for line in block.splitlines():
                prose = prose.replace(line, '') if '``' in line else prose
        return [' '.join(text.split()) for text in _LITERAL.findall(prose)]

    def profiles(self) -> list[dict]:
        """The device profiles in the blocks, also those that a diff adds."""
        found = []
        for block in self.blocks:
            text = _PROFILE.search(re.sub(
                r'^\+(?!\+\+ )', '', block, flags=re.MULTILINE))
            if text:
                parsed = yaml.safe_load(_VARIABLE.sub(_ANY_UUID, text[0]))
                found += parsed if isinstance(parsed, list) else [parsed]
        return found

    def flavors(self) -> list[dict[str, str]]:
        """The extra specs of each flavor: of ``openstack flavor set`` and
        ``create``, and of blocks that only have extra specs."""
        found = []
        for block in self.blocks:
            for words in commands(block, 'openstack'):
                if words[1] == 'flavor':
                    found.append(dict(
                        words[i + 1].split('=', 1)
                        for i, word in enumerate(words)
                        if word == '--property'))
            lines = block.split()
            if lines and all(re.fullmatch(r'(resources|trait|accel)\w*:.+=.+',
                                          line) for line in lines):
                found.append(dict(line.split('=', 1) for line in lines))
        return [specs for specs in found if specs]

    def configurations(self) -> list[str]:
        """The blocks for nova.conf."""
        return [block for block in self.blocks
                if _SECTION.fullmatch(block.split('\n', 1)[0])]

    def options(self) -> set[tuple[str, str]]:
        """(section, option) of each option that a block or a literal names."""
        found = set()
        for block in self.configurations():
            section = ''
            for line in block.splitlines():
                named = _SECTION.fullmatch(line)
                option = re.match(r'#? ?(\w+) = ', line)
                if named:
                    section = named[1]
                elif option:
                    found.add((section, option[1]))
        for text in self.literals:
            option = re.match(r'\[(\w+)\] ([a-z_]+)( = .*)?$', text)
            if option:
                found.add((option[1], option[2]))
        return found


def pages() -> list[Page]:
    return [Page(ROOT / 'README.rst'), Page(DESCRIPTION), *map(Page, sorted(
        (ROOT / 'docs' / 'source').rglob('*.rst')))]


def commands(block: str, program: str) -> list[list[str]]:
    """The words of each command of a block that starts a program."""
    found = []
    for line in re.sub(r'\\\n\s*', '', block).splitlines():
        start = _PROMPT.match(line)
        if start and line[start.end():].startswith(f'{program} '):
            found.append(shlex.split(
                re.split(' [|>] ', line[start.end():])[0], comments=True))
    return found


def unknown(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """The options among the words that a parser does not have in full."""
    return [word for word in words if word.startswith('-') and word.partition(
        '=')[0] not in parser._option_string_actions]


def refused(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Why a parser does not take the words; '' where it does."""
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            parser.parse_args(words)
        except SystemExit:
            return error.getvalue()
    return ''


def not_found(scheduler: dict[str, list[str]]) -> set[str]:
    """The filters and weighers in the options of [filter_scheduler] that
    nova-scheduler does not find; a placeholder counts as found.

    :raises ImportError: a module that is named does not exist.
    """
    found = {c.__name__ for c in filters.HostFilterHandler(
        ).get_matching_classes(scheduler['available_filters'])}
    weights.HostWeightHandler().get_matching_classes(
        re.split(r',\s*', scheduler['weight_classes'][0]))
    return {name for name in re.split(
        r',\s*', scheduler['enabled_filters'][0])
            if name.isidentifier()} - found


def _indented(lines, outside) -> str:
    block = []
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= outside:
            break
        block.append(line)
    return textwrap.dedent('\n'.join(block)).strip('\n')


class App(main.NovaAccel):
    """nova-accel with the commands of setup.cfg, installed or not."""

    def __init__(self):
        super().__init__()
        parser = configparser.ConfigParser()
        parser.read(ROOT / 'setup.cfg')
        for line in parser['options.entry_points'][
                'nova_accel.commands'].strip().splitlines():
            name, _, value = line.partition(' = ')
            self.command_manager.commands[
                name.replace('_', ' ')] = importlib.metadata.EntryPoint(
                    name, value, 'nova_accel.commands')
